"""What saves cost a training, and how often to save.

``auto`` weighs what saving costs against what a failure costs: J. T. Daly, A higher order estimate of the optimum checkpoint
interval for restart dumps (Future Generation Computer Systems 22, 2006), equation 37, which refines J. W. Young's
(Communications of the ACM 17, 1974) ``sqrt(2 C M)``. C, the cost of a save, is the time that training stands still for it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from clustertune.plan.constants import SECONDS, Term
from clustertune.plan.machine import PlanMachine
from clustertune.plan.schedule import Schedule, every_steps
from clustertune.recipe.schema import parse_minutes, seconds_of
from clustertune.resolve.resolved import Resolved

NODE_MTBF_HOURS = 1000 * 24 / 6.5
"""Hours between two failures of one node where the cluster file does not say: 6.5 failures in 1,000 days of a node (Kokolis et
al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, 2024, RSC-1)."""
LOCAL_KEPT = 2
"""Whole local steps that a node keeps: the newest may have lost a file that the one before has."""
COPY_BYTES_PER_S, WRITE_BYTES_PER_S = 5e9, 1e9
"""Of one rank's copy to host memory, and of its write, until they were measured. Assumed."""


def seconds_between_ends(nodes: int, mtbf_hours: float | None, limit_minutes: float | None) -> float:
    """Mean seconds between two ends of a job that a warning does not announce.

    The time limit counts as one: its warning may come too late. ``mtbf_hours``: of one node.
    """
    rate = nodes / ((mtbf_hours or NODE_MTBF_HOURS) * 3600)
    return 1 / (rate + (1 / (60 * limit_minutes) if limit_minutes and math.isfinite(limit_minutes) else 0.0))


def best_seconds(cost: float, write: float, between: float) -> float:
    """Seconds from one save to the next that lose the least. ``cost``: training's for a save; ``write``: until it is whole."""
    cost = max(cost, 1e-3)
    share = cost / (2 * between)
    daly = math.sqrt(2 * cost * between) * (1 + math.sqrt(share) / 3 + share / 9) - cost if share < 1 else between
    return max(daly, write)


def given_seconds(every: str | int) -> float | None:
    """The seconds of ``30m``; None for a number of steps and ``auto``."""
    return seconds_of(every) if isinstance(every, str) and every != "auto" else None


def with_saves(around: Schedule, resolved: Resolved, machine: PlanMachine, step: float, copy: Term | None) -> Schedule:
    """The schedule with what saves take of a training, by the seconds of a step, and how many there are.

    ``copy``: of a node's ranks to its memory; None where training waits for its saves.
    """
    args, save, write = resolved.train_args, resolved.recipe.save, around.checkpoint.value
    cost = replace(around.checkpoint, name="save")  # training waits for it
    if copy is not None:
        each, speed = copy.value / float(copy.values["ranks"]), machine.host_link_bytes_per_s
        values = {"size": each / 1e9, "speed": speed / 1e9}
        cost = Term("save", each / speed, SECONDS, "{size} GB / {speed} GB/s copied to host memory", values)
    copied = cost.value
    interval, saves, steps = None, around.checkpoints, around.steps
    if save is None:
        every = every_steps(args, "save", steps) if str(args.get("save_strategy") or "steps") == "steps" else None
    elif isinstance(save.every, int):
        every = save.every
    else:
        nodes, limit = resolved.recipe.slurm.nodes, parse_minutes(resolved.recipe.slurm.time)
        between = seconds_between_ends(nodes, machine.mtbf_hours, limit)
        seconds = given_seconds(save.every)
        values = {"seconds": seconds or 0.0, "cost": cost.value, "between": between, "write": write, "nodes": nodes}
        text = "{seconds} s, as the recipe says"
        if seconds is None:
            seconds = best_seconds(cost.value, write, between)
            text = (
                "Daly: {cost} s a save, {between} s between failures of {nodes} nodes or time limits; a write takes {write} s"
            )
        interval, every = Term("save interval", seconds, SECONDS, text, values), max(1, math.ceil(seconds / step))
    if save is not None and steps is not None and every is not None:
        more = {at for at in save.milestones if at <= steps and at % every}
        saves = math.ceil(steps / every) + len(more)
    if copy is not None and every is not None and (wait := write - every * step) > 0:
        values = {"copy": cost.value, "write": write, "every": every, "step": step}
        text = "{copy} s to copy + {write} s to write - {every} x {step} s in which training continues"
        cost = Term("save", cost.value + wait, SECONDS, text, values)
    disk = {**around.disk}
    if saves is not None and save is not None:
        limit = args.get("save_total_limit")
        most = min(int(limit) + len(save.milestones), saves) if limit else saves
        disk["checkpoints"] = around.checkpoint_bytes * most
    local = local_bytes(resolved, around.checkpoint_bytes)
    return replace(
        around, checkpoints=saves, save=cost, copy_seconds=copied, interval=interval, save_steps=every, disk=disk,
        local_bytes=local,
    )  # fmt: skip


def local_bytes(resolved: Resolved, checkpoint: float) -> float:
    """Bytes on each node's own disk, of checkpoints of so many: those that are kept and the one that is being written."""
    local, nodes = resolved.recipe.save and resolved.recipe.save.local, resolved.recipe.slurm.nodes
    if not local:
        return 0.0
    return (LOCAL_KEPT + 1) * checkpoint / nodes * (2 if local.neighbour and nodes > 1 else 1)
