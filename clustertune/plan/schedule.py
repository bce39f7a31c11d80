"""From one step to the whole training: how many steps, evaluations and saves, what they cost, start-up, and what is on disk.

``save.every: auto`` weighs what saving costs against what a failure costs: J. T. Daly, A higher order estimate of the optimum
checkpoint interval for restart dumps (Future Generation Computer Systems 22, 2006), equation 37, which refines J. W. Young's
(Communications of the ACM 17, 1974) ``sqrt(2 C M)``. C, the cost of a save, is the time that training stands still for it.

How many steps follows from how long conversations are: how many tokens a step really computes, packed or padded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from clustertune.errors import Problem, UserError, storage_error
from clustertune.manifest import read_whole
from clustertune.plan import generation_cost
from clustertune.plan.constants import LENGTH_SIGMA, SECONDS, Constants, Term, total
from clustertune.plan.machine import PlanMachine
from clustertune.plan.step import micro_batch, traffic
from clustertune.plan.strategy import ModelShape, strategy
from clustertune.recipe.native_rules import row_tokens
from clustertune.recipe.sections import parse_minutes, seconds_of
from clustertune.resolve.resolved import Resolved

# --- how long conversations are ----------------------------------------------------------------------------------------

PACKED_SHARE = 0.98
"""Share of a packed sequence that is tokens, best-fit decreasing (TRL's "bfd"): https://arxiv.org/abs/2404.10830, 3.2, has
more than 99 % for long lists; 98 % leaves room for short ones."""
MOST, _KEPT = 10_000_000, 20_000
"""Lengths of a file at most, and of them those that a plan computes with, about."""
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """Tokens per conversation, chat template included."""

    tokens: tuple[int, ...]
    """A sample, ascending; one value where only the mean is known."""
    source: str

    def mean(self, longest: int) -> float:
        """Mean tokens of a conversation that is cut at ``longest``."""
        return sum(min(length, longest) for length in self.tokens) / len(self.tokens)

    def around_token(self, longest: int) -> float:
        """Mean length of the conversation that a token is in, cut at ``longest``: long ones count once for each of theirs.

        Where the mean alone is known, the lengths are taken to be log-normal around it (:data:`LENGTH_SIGMA`).
        """
        if len(self.tokens) > 1:
            cut = [min(length, longest) for length in self.tokens]
            return sum(length**2 for length in cut) / sum(cut)
        center = math.log(self.tokens[0]) - LENGTH_SIGMA**2 / 2
        above = (math.log(longest) - center) / LENGTH_SIGMA

        def moment(power: int) -> float:
            """Of the cut lengths: https://en.wikipedia.org/wiki/Log-normal_distribution#Partial_expectation."""
            below = math.exp(power * center + (power * LENGTH_SIGMA) ** 2 / 2) * _NORMAL.cdf(above - power * LENGTH_SIGMA)
            return float(below + longest**power * _NORMAL.cdf(-above))

        return moment(2) / moment(1)

    def padded(self, batch: int, longest: int) -> float:
        """Mean length of the longest of ``batch`` random conversations: what a micro batch is padded to."""
        count = len(self.tokens)
        result, below = 0.0, 0.0
        for index, length in enumerate(self.tokens, start=1):
            share = (index / count) ** batch
            result += min(length, longest) * (share - below)
            below = share
        return result


def known_lengths(resolved: Resolved) -> Lengths | None:
    """What the recipe says about its conversations' lengths: their mean, or the steps that a packed epoch is known to have."""
    counts, args = resolved.recipe.data.expect, resolved.train_args
    if counts is not None and counts.mean_tokens:
        return Lengths((max(1, round(counts.mean_tokens)),), "data.expect.mean_tokens")
    steps, batch = resolved.recipe.expect.steps, resolved.global_batch_size
    if counts is None or not counts.train or not steps or not args["packing"] or args["max_steps"] > 0:
        return None
    epochs = args["num_train_epochs"]
    mean = steps * batch * args["max_length"] * PACKED_SHARE / (counts.train * epochs)
    return Lengths((max(1, math.floor(mean)),), f"expect.steps {steps}")


def read_lengths(path: Path) -> Lengths:
    """A file of whole numbers, one a line, or JSON ``{"lengths": {"LENGTH": COUNT}}``. Raises UserError."""
    try:
        text = read_whole(path).decode()
    except OSError as error:
        raise storage_error(error, "cannot be read", path) from None
    except UnicodeDecodeError:
        raise UserError(Problem("is not text", file=str(path))) from None
    fix = 'write one whole number a line, or {"lengths": {"512": 37, ...}}'
    try:
        counts = json.loads(text)["lengths"].items() if text.lstrip().startswith("{") else [(line, 1) for line in text.split()]
        pairs = [(int(length), int(count)) for length, count in counts]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise UserError(Problem("contains no lengths", file=str(path), fix=fix)) from None
    if not pairs or any(length < 1 or count < 0 for length, count in pairs) or not 0 < sum(count for _, count in pairs) <= MOST:
        raise UserError(Problem(f"must hold 1 to {MOST} lengths of 1 token or more", file=str(path), fix=fix))
    return of_counts(pairs, str(path))


def of_counts(pairs: Sequence[tuple[int, int]], source: str) -> Lengths:
    """The lengths of a histogram: pairs of a length in tokens and how many conversations have it."""
    return Lengths(tuple(sorted(_thinned(pairs))), source)


def _thinned(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The lengths of a histogram as a list, of large ones a share of each."""
    step = max(1, math.ceil(sum(count for _, count in pairs) / _KEPT))
    thinned, behind = [], 0
    for length, count in sorted(pairs):
        behind += count
        thinned += [length] * (behind // step)
        behind %= step
    return thinned or [pairs[0][0]]


# --- the whole training -------------------------------------------------------------------------------------------------

START_S = 60.0
"""Interpreter, imports, NCCL's first connections, data set and trainer of one start, seconds. Assumed."""
TOKENS_PER_CPU_S = 1.5e5
"""Tokens that ``prepare`` makes in a CPU second: the slowest measured (docs/results/data.md)."""
NODE_MTBF_HOURS = 1000 * 24 / 6.5
"""Hours between two failures of one node where the cluster file does not say: 6.5 failures in 1,000 days of a node (Kokolis et
al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, 2024, RSC-1)."""
COPY_BYTES_PER_S, WRITE_BYTES_PER_S = 5e9, 1e9
"""Of one rank's copy to host memory, and of its write, until they were measured. Assumed."""


@dataclass(frozen=True)
class Schedule:
    """A whole training. None where the number of steps is not known."""

    steps: int | None
    steps_why: str
    evaluations: int | None
    evaluation: Term
    """One pass over the eval split."""
    checkpoints: int | None
    checkpoint: Term
    """Seconds of its write."""
    checkpoint_bytes: float
    start: Term
    disk: dict[str, float]
    """Bytes on shared storage at most: checkpoints kept, adapter, merged model."""
    save: Term
    """Seconds that training stands still for a save."""
    copy_seconds: float
    """Of that, what no longer interval takes away: the copy, or the whole write where training waits for it."""
    interval: Term | None
    """Seconds from one save to the next, where they come by time."""
    save_steps: int | None
    """Steps from one save to the next; None where they come by epochs, or never."""


@dataclass(frozen=True)
class PackedRows:
    """Sequences of the two splits after packing; None where nothing is known."""

    train: float | None
    eval: float | None
    why: str


def rows(resolved: Resolved, lengths: Lengths | None) -> PackedRows:
    """How many sequences training and one evaluation have."""
    data, longest = resolved.recipe.data, row_tokens(resolved.train_args)
    counts = data.expect
    if counts is None or counts.train is None:
        return PackedRows(
            None, None if counts is None else counts.eval, "data.expect.train does not say how many conversations there are"
        )
    train, held = float(counts.train), counts.eval
    if held is None:
        held = round(train * data.eval_fraction / (1 - data.eval_fraction))
    packing = bool(resolved.train_args["packing"])
    packs_eval = packing if (stated := resolved.train_args["eval_packing"]) is None else stated
    if not packing:
        return PackedRows(
            train, _packed(held, lengths, longest) if packs_eval else held, f"{counts.train:,} conversations, a sequence each"
        )
    if lengths is None:
        return PackedRows(
            None, None, "packed, and the conversations' lengths are not known: give data.expect.mean_tokens or --lengths FILE"
        )
    sequences = _packed(train, lengths, longest)
    mean = lengths.mean(longest)
    tokens = f"{counts.train:,} conversations x {mean:,.0f} tokens ({lengths.source})"
    why = f"{tokens} / ({longest} x {PACKED_SHARE}) = {sequences:,.0f} sequences"
    return PackedRows(sequences, _packed(held, lengths, longest) if packs_eval else float(held), why)


def tokens_to_prepare(resolved: Resolved) -> float | None:
    """Tokens of both splits, none of them cut; None where it is not known how many conversations there are.

    Without lengths a conversation has ``max_length`` tokens, which is more than the mean of most data.
    """
    expected, lengths = resolved.recipe.data.expect, known_lengths(resolved)
    if expected is None or expected.train is None or resolved.recipe.megatron is not None:
        return None
    longest = row_tokens(resolved.train_args)
    each = 2 if resolved.is_dpo else 1
    return (expected.train + (expected.eval or 0)) * each * (lengths.mean(10**9) if lengths else float(longest))


def _packed(count: float, lengths: Lengths | None, longest: int) -> float:
    return count if lengths is None else math.ceil(count * lengths.mean(longest) / (longest * PACKED_SHARE))


def schedule(
    resolved: Resolved, shape: ModelShape, machine: PlanMachine, constants: Constants, lengths: Lengths | None, step: float,
    copy: Term | None,
) -> Schedule:  # fmt: skip
    """Everything around the steps, of which one takes ``step`` seconds.

    ``copy``: what a save copies of a node's ranks to its memory; None where training waits for its saves.
    """
    packed, args, section = rows(resolved, lengths), resolved.train_args, resolved.recipe.save
    steps, why = steps_of(resolved, packed)
    size, speed = _checkpoint_bytes(shape), machine.storage_write_bytes_per_s
    values: dict[str, float] = {"size": size / 1e9, "speed": speed / 1e9}
    checkpoint = Term("checkpoint", size / speed, SECONDS, "{size} GB / {speed} GB/s written", values)
    cost = replace(checkpoint, name="save")  # training waits for it
    if copy is not None:
        each, speed = copy.value / float(copy.values["ranks"]), machine.host_link_bytes_per_s
        values = {"size": each / 1e9, "speed": speed / 1e9}
        cost = Term("save", each / speed, SECONDS, "{size} GB / {speed} GB/s copied to host memory", values)
    copied, write = cost.value, checkpoint.value
    interval, saves, milestones = None, times(args, "save", steps), section.milestones if section is not None else ()
    if section is None:
        every = every_steps(args, "save", steps) if args["save_strategy"] == "steps" else None
    elif isinstance(section.every, int):
        every = section.every
    else:
        interval = _interval(resolved, machine, section.every, copied, write)
        every = max(1, math.ceil(interval.value / step))
    if section is not None and steps is not None and every is not None:
        saves = math.ceil(steps / every) + len({at for at in milestones if at <= steps and at % every})
    if copy is not None and every is not None and (wait := write - every * step) > 0:
        values = {"copy": copied, "write": write, "every": every, "step": step}
        text = "{copy} s to copy + {write} s to write - {every} x {step} s in which training continues"
        cost = Term("save", copied + wait, SECONDS, text, values)
    evaluations = times(args, "eval", steps)
    if evaluations is not None and args["eval_on_start"]:
        evaluations += 1
    kept = int(args["save_total_limit"] or 0)
    most = kept or 1 if saves is None else min(kept + len(milestones), saves) if kept else saves
    disk = {"checkpoints": size * most, "merged model": 2.0 * shape.counted.total}
    if shape.strategy.lora:
        disk["adapter"] = 4.0 * shape.adapters
    return Schedule(
        steps, why, evaluations, _evaluation(args, shape, machine, constants, packed), saves, checkpoint, size,
        _start(resolved, shape, machine), disk, cost, copied, interval, every,
    )  # fmt: skip


def _interval(resolved: Resolved, machine: PlanMachine, every: str, cost: float, write: float) -> Term:
    """Seconds from one save to the next: as the recipe says, or ``auto``."""
    nodes, limit = resolved.recipe.slurm.nodes, parse_minutes(resolved.recipe.slurm.time)
    between, seconds = seconds_between_ends(nodes, machine.mtbf_hours, limit), given_seconds(every)
    values = {"seconds": seconds or 0.0, "cost": cost, "between": between, "write": write, "nodes": nodes}
    text = "{seconds} s, as the recipe says"
    if seconds is None:
        seconds = best_seconds(cost, write, between)
        text = "Daly: {cost} s a save, {between} s between failures of {nodes} nodes or time limits; a write takes {write} s"
    return Term("save interval", seconds, SECONDS, text, values)


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


FEW_STEPS = 10
"""Optimizer steps below which a training teaches little: warm-up and decay take most of them."""
_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
"""Schedules of transformers that begin with the full learning rate."""


def _known_steps(resolved: Resolved, steps: int | None, lengths: Lengths | None) -> tuple[int | None, str]:
    """Steps of a real training, and in brackets how they are known; None where they are not, and of a tiny one."""
    if resolved.tiny or steps is not None:
        return (None if resolved.tiny else steps), ""
    steps, why = steps_of(resolved, rows(resolved, lengths or known_lengths(resolved)))
    return steps, f" ({why})"


def check_schedule_end(resolved: Resolved, steps: int | None = None, lengths: Lengths | None = None) -> list[str]:
    """What a recipe names by a step that its training does not have, and that it has few. ``steps``: as far as they are known
    before, if None."""
    steps, why = _known_steps(resolved, steps, lengths)
    if steps is None:
        return []
    warnings, ends = [], f"the training has {steps:,} step{'s' * (steps != 1)}{why}"
    if steps < FEW_STEPS:
        fix = "a smaller train.global_batch_size, more epochs (train.num_train_epochs) or train.packing=false makes more"
        warnings.append(f"{ends}, and learns little in fewer than {FEW_STEPS}: {fix}")
    if (warm := float(resolved.train_args["warmup_steps"])) > steps:
        text = f"train.warmup_steps {warm:g}, {ends}: the learning rate is never reached"
        warnings.append(f"{text}; write a share of all steps, such as 0.03, or 0 where they are few")
    if late := ", ".join(f"{step}" for step in resolved.recipe.milestones if step > steps):
        warnings.append(f"save.milestones {late}, {ends}: these are never saved")
    return warnings


def find_idle_schedule(resolved: Resolved, steps: int | None = None, lengths: Lengths | None = None) -> list[Problem]:
    """A schedule whose learning rate is 0 in every step, which trains nothing.

    Step number n takes the rate of the schedule at n - 1 (the Trainer steps the scheduler behind the optimizer), and a linear
    warm-up begins with 0 (transformers/optimization.py, ``current_step / num_warmup_steps``): with a warm-up, one step has
    the rate 0, and no other number has it in all.
    """
    steps, why = _known_steps(resolved, steps, lengths)
    args = resolved.train_args
    if steps != 1 or not args["warmup_steps"] or str(args["lr_scheduler_type"]) in _WITHOUT_WARMUP:
        return []
    text = f"{float(args['warmup_steps']):g}: the training has 1 step{why}, which is the warm-up's first, with the learning "
    fix = "a smaller train.global_batch_size, or more epochs; train.warmup_steps=0 makes the one step train"
    return [Problem(f"{text}rate 0: nothing would be trained", file=resolved.name, key="train.warmup_steps", fix=fix)]


def steps_of(resolved: Resolved, packed: PackedRows) -> tuple[int | None, str]:
    """Optimizer steps of a training, and how they are known."""
    args, batch = resolved.train_args, resolved.global_batch_size
    most = args["max_steps"]
    if most > 0:
        return most, f"train.max_steps {most}"
    if packed.train is not None:
        epochs = float(args["num_train_epochs"])
        if resolved.is_grpo:
            return _steps_of_prompts(resolved, packed.train, epochs)
        # Trainer rounds up within an epoch: the last, smaller batch is a step as well.
        return max(
            1, math.ceil(epochs * math.ceil(packed.train / batch))
        ), f"{packed.why}; / global batch {batch} x {epochs:g} epochs"
    if resolved.recipe.expect.steps is not None:
        return resolved.recipe.expect.steps, f"expect.steps of the recipe ({packed.why})"
    return None, packed.why


def _steps_of_prompts(resolved: Resolved, prompts: float, epochs: float) -> tuple[int, str]:
    """TRL draws as many prompts as a generation answers; those that are left over at an epoch's end are left out."""
    args, made = resolved.train_args, strategy(resolved).rollouts
    assert made is not None
    at_a_time = made.answers * resolved.data_parallel_size / args["num_generations"]
    steps = max(1, math.ceil(epochs * math.floor(prompts / at_a_time) * made.steps))
    text = f"{prompts:,.0f} prompts, {at_a_time:g} in a generation, which is for {made.steps:g} steps; x {epochs:g} epochs"
    return steps, text


def times(args: dict[str, Any], what: str, steps: int | None) -> int | None:
    """How often evaluation or saving comes, by transformers' rules: every so many steps, of all steps a share where the value
    is below 1, and once more after the last step (trainer_callback.py, DefaultFlowCallback.on_step_end)."""
    if steps is None:
        return None
    strategy = args[f"{what}_strategy"]
    if strategy == "epoch":
        return max(1, math.ceil(float(args["num_train_epochs"])))
    if strategy != "steps":
        return 0
    return math.ceil(steps / (every_steps(args, what, steps) or steps))


def every_steps(args: dict[str, Any], what: str, steps: int | None) -> int | None:
    """Steps between two evaluations or saves; None for a share of steps whose number is not known."""
    value = float(args[f"{what}_steps"] or args["logging_steps"])  # transformers' rule for eval_steps
    if value < 1:
        return None if steps is None else max(1, math.ceil(value * steps))
    return max(1, int(value))


def _evaluation(
    args: dict[str, Any], shape: ModelShape, machine: PlanMachine, constants: Constants, packed: PackedRows
) -> Term:
    """Forward passes over the eval split; each gathers the weights once."""
    plan = shape.strategy
    batch = args["per_device_eval_batch_size"]
    if not packed.eval:
        return Term("evaluation", 0.0, SECONDS, "no eval split known", {})
    sequences = packed.eval * (args["num_generations_eval"] or args["num_generations"] if plan.rollouts else 1)
    passes = math.ceil(sequences / (batch * plan.data_parallel_size))
    filled = sequences / (passes * plan.data_parallel_size)
    forward = total(micro_batch(shape, machine, constants).forward) * filled / plan.micro_batch
    moved = sum(c.seconds(machine, constants.intra_scale, constants.inter_scale) for c in traffic(shape).forward)
    values = {"passes": passes, "forward": forward, "moved": moved, "rows": packed.eval, "batch": batch}
    text = "{passes} passes ({rows} sequences, {batch} per rank) x the longer of {forward} s computing and {moved} s gathering"
    if plan.rollouts is None:
        return Term("evaluation", passes * max(forward, moved), SECONDS, text, values)
    made = passes * generation_cost.seconds(shape, machine, batch, plan.rollouts)
    text += ", and {made} s for the answers"
    return Term("evaluation", passes * max(forward, moved) + made, SECONDS, text, {**values, "made": made})


def _checkpoint_bytes(shape: ModelShape) -> float:
    """Adapter or weights in the type they are trained in, and the optimizer's state. Shards hold a tied head by both names."""
    plan = shape.strategy
    count = float(shape.adapters if plan.lora else shape.counted.total)
    again = shape.head_weights * plan.weight_bytes if shape.counted.tied and plan.kind == "FSDP2" and not plan.lora else 0.0
    return count * ((4 if plan.lora else plan.weight_bytes) + plan.state_bytes) + again


def _start(resolved: Resolved, shape: ModelShape, machine: PlanMachine) -> Term:
    """Loading: the weights come from storage once, and where ranks read rows once for each replica of them.

    Beside it their digests are compared, each file by one rank: what that rank's node does not read anyway comes once more
    (:class:`clustertune.manifest.DigestComparison`). Every Hub cache has digests.
    """
    # The ranks of a tp group are in one node: rows that several of them read come from storage once.
    parted = shape.strategy.weight_shards * shape.strategy.tp
    copies = shape.strategy.world_size // parted if resolved.distribution.reads_parts else 1
    weights, nodes = 2.0 * shape.counted.total, shape.strategy.nodes
    size = weights * max(1, copies) * (2 if shape.strategy.reference_bytes else 1)
    # Of each file, what a node reads of it: its ranks' rows; all; or, where the first rank reads for all, its own node alone.
    if resolved.distribution.reads_parts:
        held = min(1.0, max(1, copies) / nodes)
    else:
        held = 1 / nodes if resolved.distribution.loading == "first" else 1.0
    again = weights * (1 - held)
    value = START_S + (size + again) / machine.storage_read_bytes_per_s
    values = {"start": START_S, "size": size / 1e9, "again": again / 1e9, "speed": machine.storage_read_bytes_per_s / 1e9}
    text = "{start} s + ({size} GB + {again} GB for their digests) / {speed} GB/s read"
    return Term("start-up and load", value, SECONDS, text, values)
