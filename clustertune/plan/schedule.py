"""From one step to the whole training: how many steps, evaluations and checkpoints, start-up, and what is on disk."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clustertune.plan.constants import SECONDS, Constants, Term, total
from clustertune.plan.lengths import PACKED_SHARE, Lengths, known_lengths
from clustertune.plan.machine import PlanMachine
from clustertune.plan.step import micro_batch, traffic
from clustertune.plan.strategy import DEFAULT_MAX_LENGTH, ModelShape
from clustertune.resolve.resolved import Resolved

START_S = 60.0
"""Interpreter, imports, NCCL's first connections, data set and trainer of one start, seconds. Assumed."""
TOKENS_PER_CPU_S = 1.5e5
"""Tokens that ``prepare`` makes in a CPU second: the slowest measured (docs/results/data.md)."""
DEFAULT_EVAL_BATCH = 8
"""``TrainingArguments``' own ``per_device_eval_batch_size``."""
DEFAULT_SAVE_STEPS, DEFAULT_LOGGING_STEPS = 500, 10
"""``TrainingArguments``' own ``save_steps``; ``logging_steps`` of TRL's, which ``eval_steps`` follows where it is not given."""
_STRATEGY = {"save": "steps", "eval": "no"}
"""``TrainingArguments``' own ``save_strategy`` and ``eval_strategy``."""


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
    save: Term | None = None
    """Seconds that training stands still for a save."""
    copy_seconds: float = 0.0
    """Of that, what no longer interval takes away: the copy, or the whole write where training waits for it."""
    interval: Term | None = None
    """Seconds from one save to the next, where they come by time."""
    save_steps: int | None = None
    """Steps from one save to the next; None where they come by epochs, or never."""
    local_bytes: float = 0.0
    """On each node's own disk at most: its part of the local checkpoints, and a neighbour's."""


@dataclass(frozen=True)
class PackedRows:
    """Sequences of the two splits after packing; None where nothing is known."""

    train: float | None
    eval: float | None
    why: str


def rows(resolved: Resolved, lengths: Lengths | None) -> PackedRows:
    """How many sequences training and one evaluation have."""
    data, longest = resolved.recipe.data, int(resolved.train_args.get("max_length") or DEFAULT_MAX_LENGTH)
    counts = data.expect
    if counts is None or counts.train is None:
        return PackedRows(
            None, None if counts is None else counts.eval, "data.expect.train does not say how many conversations there are"
        )
    train, held = float(counts.train), counts.eval
    if held is None:
        held = round(train * data.eval_fraction / (1 - data.eval_fraction))
    packing = bool(resolved.train_args.get("packing"))
    packs_eval = bool(resolved.train_args.get("eval_packing", packing))
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
    found, lengths = resolved.recipe.data.expect, known_lengths(resolved)
    if found is None or found.train is None or resolved.recipe.megatron is not None:
        return None
    longest = int(resolved.train_args.get("max_length") or DEFAULT_MAX_LENGTH)
    each = 2 if resolved.is_dpo else 1
    return (found.train + (found.eval or 0)) * each * (lengths.mean(10**9) if lengths else float(longest))


def _packed(count: float, lengths: Lengths | None, longest: int) -> float:
    return count if lengths is None else math.ceil(count * lengths.mean(longest) / (longest * PACKED_SHARE))


def schedule(
    resolved: Resolved, shape: ModelShape, machine: PlanMachine, constants: Constants, lengths: Lengths | None
) -> Schedule:
    """Everything around the steps."""
    found = rows(resolved, lengths)
    steps, why = steps_of(resolved, found)
    args = resolved.train_args
    size = _checkpoint_bytes(shape)
    saves = times(args, "save", steps)
    checkpoint = Term(
        "checkpoint", size / machine.storage_write_bytes_per_s, SECONDS, "{size} GB / {speed} GB/s written",
        {"size": size / 1e9, "speed": machine.storage_write_bytes_per_s / 1e9},
    )  # fmt: skip
    evaluations = times(args, "eval", steps)
    if evaluations is not None and args.get("eval_on_start"):
        evaluations += 1
    limit = args.get("save_total_limit") or saves or 1
    whole = 2.0 * shape.counted.total
    disk = {"checkpoints": size * min(int(limit), saves if saves is not None else int(limit)), "merged model": whole}
    if shape.strategy.lora:
        disk["adapter"] = 4.0 * shape.adapters
    return Schedule(
        steps, why, evaluations, _evaluation(args, shape, machine, constants, found), saves, checkpoint, size,
        _start(resolved, shape, machine), disk,
    )  # fmt: skip


def check_schedule_end(resolved: Resolved, steps: int | None = None) -> list[str]:
    """What a recipe names by a step that its training does not have. ``steps``: as far as they are known before, if None."""
    why = ""
    if steps is None:
        steps, known = steps_of(resolved, rows(resolved, known_lengths(resolved)))
        why = f" ({known})"
    if resolved.tiny or steps is None:
        return []
    found, ends = [], f"the training has {steps:,} steps{why}"
    if (warm := float(resolved.train_args.get("warmup_steps") or 0)) > steps:
        text = f"train.warmup_steps {warm:g}, {ends}: the learning rate is never reached"
        found.append(f"{text}; write a share of all steps, such as 0.03")
    milestones = resolved.recipe.save.milestones if resolved.recipe.save is not None else ()
    if late := ", ".join(f"{step}" for step in milestones if step > steps):
        found.append(f"save.milestones {late}, {ends}: these are never saved")
    return found


def steps_of(resolved: Resolved, found: PackedRows) -> tuple[int | None, str]:
    """Optimizer steps of a training, and how they are known."""
    args, batch = resolved.train_args, int(resolved.recipe.train["global_batch_size"])
    most = int(args.get("max_steps") or -1)
    if most > 0:
        return most, f"train.max_steps {most}"
    if found.train is not None:
        epochs = float(args.get("num_train_epochs") or 3)
        # Trainer rounds up within an epoch: the last, smaller batch is a step as well.
        return max(
            1, math.ceil(epochs * math.ceil(found.train / batch))
        ), f"{found.why}; / global batch {batch} x {epochs:g} epochs"
    if resolved.recipe.expect.steps is not None:
        return resolved.recipe.expect.steps, f"expect.steps of the recipe ({found.why})"
    return None, found.why


def times(args: dict[str, object], what: str, steps: int | None) -> int | None:
    """How often evaluation or saving comes, by transformers' rules: every so many steps, of all steps a share where the value
    is below 1, and once more after the last step (trainer_callback.py, DefaultFlowCallback.on_step_end)."""
    if steps is None:
        return None
    strategy = str(args.get(f"{what}_strategy") or _STRATEGY[what])
    if strategy == "epoch":
        return max(1, math.ceil(float(args.get("num_train_epochs") or 3)))  # type: ignore[arg-type]
    if strategy != "steps":
        return 0
    return math.ceil(steps / (every_steps(args, what, steps) or steps))


def every_steps(args: dict[str, object], what: str, steps: int | None) -> int | None:
    """Steps between two evaluations or saves; None for a share of steps whose number is not known."""
    default = args.get("logging_steps") or DEFAULT_LOGGING_STEPS if what == "eval" else DEFAULT_SAVE_STEPS
    value = float(args.get(f"{what}_steps") or default)  # type: ignore[arg-type]
    if value < 1:
        return None if steps is None else max(1, math.ceil(value * steps))
    return max(1, int(value))


def _evaluation(
    args: dict[str, object], shape: ModelShape, machine: PlanMachine, constants: Constants, found: PackedRows
) -> Term:
    """Forward passes over the eval split; each gathers the weights once."""
    plan = shape.strategy
    batch = int(args.get("per_device_eval_batch_size") or DEFAULT_EVAL_BATCH)  # type: ignore[call-overload]
    if not found.eval:
        return Term("evaluation", 0.0, SECONDS, "no eval split known", {})
    passes = math.ceil(found.eval / (batch * plan.data_parallel_size))
    filled = found.eval / (passes * plan.data_parallel_size)
    forward = total(micro_batch(shape, machine, constants).forward) * filled / plan.micro_batch
    moved = sum(c.seconds(machine, constants.intra_scale, constants.inter_scale) for c in traffic(shape).forward)
    values = {"passes": passes, "forward": forward, "moved": moved, "rows": found.eval, "batch": batch}
    text = "{passes} passes ({rows} sequences, {batch} per rank) x the longer of {forward} s computing and {moved} s gathering"
    return Term("evaluation", passes * max(forward, moved), SECONDS, text, values)


def _checkpoint_bytes(shape: ModelShape) -> float:
    """Adapter or weights in the type they are trained in, and the optimizer's state."""
    plan = shape.strategy
    count = float(shape.adapters if plan.lora else shape.counted.total)
    return count * ((4 if plan.lora else plan.weight_bytes) + plan.state_bytes)


def _start(resolved: Resolved, shape: ModelShape, machine: PlanMachine) -> Term:
    """Loading: the weights come from storage once, and where ranks read rows once for each replica of them."""
    # The ranks of a tp group are in one node: rows that several of them read come from storage once.
    parted = shape.strategy.weight_shards * shape.strategy.tp
    copies = shape.strategy.world_size // parted if resolved.distribution.reads_parts else 1
    size = 2.0 * shape.counted.total * max(1, copies) * (2 if shape.strategy.reference_bytes else 1)
    value = START_S + size / machine.storage_read_bytes_per_s
    values = {"start": START_S, "size": size / 1e9, "speed": machine.storage_read_bytes_per_s / 1e9}
    return Term("start-up and load", value, SECONDS, "{start} s + {size} GB / {speed} GB/s read", values)
