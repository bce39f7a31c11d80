"""How fast a recipe trains here: its own steps and nothing in between, on made-up data if asked, beside the plan."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from clustertune import chain
from clustertune.cluster.schema import Cluster
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.host.system import GIB
from clustertune.manifest import read_events
from clustertune.plan.calibration import find_calibrated
from clustertune.plan.constants import LENGTH_SIGMA
from clustertune.plan.predict import Plan, make_plan
from clustertune.plan.schedule import Lengths
from clustertune.recipe.sections import CHOOSING
from clustertune.report.source import counted_share
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import UNSAVED, RunDir

HELD_OUT = 0.05
"""Share of made-up conversations that the eval split takes (the recipe's default)."""
CONVERSATIONS = "synthetic.jsonl"
_NOTHING_ELSE = (
    "train.logging_steps=1", "train.eval_strategy=no", "train.eval_on_start=false", "train.save_strategy=no",
    "train.report_to=none",
)  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """A benchmark as it is run."""

    run_path: Path
    warmup: int
    """Optimizer steps that are not timed: compilation, first connections, allocator."""
    steps: int
    """Timed."""
    resolved: Resolved
    """The recipe as it was given: what is planned."""
    measured: Resolved
    """What the ranks train."""
    overrides: tuple[str, ...] = ()
    """As they were given."""
    synthetic: bool = False
    """Random weights at the recipe's full size, made-up conversations: nothing comes from the Hub."""

    @property
    def lengths(self) -> Lengths | None:
        """Lengths of made-up conversations, for the plan; None: what the recipe says."""
        if not self.synthetic:
            return None
        drawn = lengths(_mean(self.resolved), _longest(self.resolved), _seed(self.resolved))
        return Lengths(tuple(sorted(next(drawn) for _ in range(1000))), "made-up conversations")


def make(
    recipe: str,
    overrides: Sequence[str],
    run_path: Path,
    warmup: int,
    steps: int,
    *,
    tiny: bool = False,
    ranks: int | None = None,
    synthetic: bool = False,
) -> Bench:
    """Resolve the recipe twice: as it is, and as it is measured. Raises UserError with all problems of the recipe."""
    resolved = chain.resolve_here(recipe, overrides, tiny=tiny, ranks=ranks, made_up=synthetic)
    if resolved.recipe.trainer != "sft":
        fix = "clustertune run RECIPE train.max_steps=20: the report has its step times"
        text = f"{resolved.recipe.trainer}: bench measures supervised fine-tuning"
        raise UserError(text, file=recipe, key="trainer", fix=fix)
    own = [f"train.max_steps={warmup + steps}", *_NOTHING_ELSE, *(_made_up(resolved, run_path) if synthetic else [])]
    keys = {text.partition("=")[0] for text in own}
    others = [text for text in overrides if text.partition("=")[0] not in keys]
    measured = resolve(recipe, [*others, *own], tiny=tiny, ranks=resolved.world_size)
    return Bench(run_path, warmup, steps, resolved, measured, tuple(overrides), synthetic)


def _made_up(resolved: Resolved, run_path: Path) -> list[str]:
    """Random weights and a local tokenizer for the recipe's own architecture, and conversations of our own."""
    names = ["model.weights=random", "model.revision=null", "model.path=null", "data.format=messages", "data.language=null"]
    names += [f"data.input={made_file(run_path)}", "data.revision=null", "data.expect=null"]
    names += [f"data.{key}=null" for key in ("limit", *CHOOSING) if getattr(resolved.recipe.data, key) is not None]
    # The tokenizer is trained locally and brings its own special tokens.
    return [*names, *(f"train.{key}=null" for key in ("pad_token", "eos_token") if resolved.train_args[key] is not None)]


def made_file(run_path: Path) -> Path:
    """Where made-up conversations lie: beside the run folder."""
    return run_path.absolute().with_name(run_path.name + "." + CONVERSATIONS)


def _longest(resolved: Resolved) -> int:
    return int(resolved.train_args["max_length"])


def _mean(resolved: Resolved) -> float:
    """Tokens of a conversation: what the recipe expects of its own, or a quarter of the longest."""
    expected = resolved.recipe.data.expect
    return float(expected.mean_tokens) if expected and expected.mean_tokens else _longest(resolved) / 4


def _seed(resolved: Resolved) -> int:
    return int(resolved.train_args["seed"])


def needed(bench: Bench) -> tuple[float, int]:
    """Tokens and conversations that every step needs a new one of: a second epoch would begin with a smaller step."""
    rows = (bench.warmup + bench.steps) * bench.resolved.global_batch_size
    spare = 1.1 / (1 - HELD_OUT)
    packed = bool(bench.resolved.train_args["packing"])
    return (rows * _longest(bench.resolved) * spare, 2) if packed else (0.0, math.ceil(rows * spare) + 2)


# --- made-up conversations: as long as real ones, of words that are a token each ------------------------------------------

WORDS = 1000
SHORTEST = 8
TEMPLATE_TOKENS = 12
"""Header and end of two turns in the chat template."""
_SYLLABLES = ("ba", "ce", "di", "fo", "gu", "la", "me", "ni", "po", "ru")


def vocabulary() -> list[str]:
    """The vocabulary: each word ends in another one's beginning, so that a tokenizer learns whole words."""
    return [a + b + c for a in _SYLLABLES for b in _SYLLABLES for c in _SYLLABLES][:WORDS]


def lengths(mean: float, longest: int, seed: int) -> Iterator[int]:
    """Tokens of one conversation after the other: log-normal with this mean before the cut at ``longest``."""
    draw = random.Random(seed)  # noqa: S311 - nothing secret
    center = mean / math.exp(LENGTH_SIGMA**2 / 2)
    while True:
        yield max(SHORTEST, min(longest, round(center * math.exp(draw.gauss(0, LENGTH_SIGMA)))))


def write_conversations(bench: Bench) -> None:
    """Write a JSON Lines file of conversations, each of which answers one question. Raises OSError."""
    resolved, (tokens, count) = bench.resolved, needed(bench)
    draw, known = random.Random(_seed(resolved) + 1), vocabulary()  # noqa: S311 - nothing secret
    path, made, total = made_file(bench.run_path), 0, 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as out:
        for length in lengths(_mean(resolved), _longest(resolved), _seed(resolved)):
            if made >= count and total >= tokens:
                return
            body = max(2, length - TEMPLATE_TOKENS)
            text, cut = draw.choices(known, k=body), max(1, body // 4)
            turns = [("user", text[:cut]), ("assistant", text[cut:])]
            messages = [{"role": role, "content": " ".join(words)} for role, words in turns]
            out.write(json.dumps({"messages": messages}) + "\n")
            made, total = made + 1, total + length


_SPARE = 0.9
"""Share of the free memory that random weights may take here."""
Events = Sequence[Mapping[str, Any]]


def too_large(bench: Bench) -> str | None:
    """Whether the weights alone, on every rank, exceed this machine's free memory."""
    from clustertune.recipe.parameters import weight_bytes

    need, ranks = weight_bytes(bench.resolved.architecture) or 0, bench.measured.world_size
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if need * ranks <= _SPARE * free:
        return None
    return f"{ranks} ranks with {need / 1e9:.0f} GB of weights each; {free / 1e9:.0f} GB are free"


def train(bench: Bench, command: list[str]) -> RunDir:
    """Train the steps in the launcher, program and guards of ``clustertune run``, without a checkpoint at their end.

    Raises UserError where the training fails.
    """
    path, resolved = bench.run_path, bench.measured
    chain.check_folder(resolved, path)
    chain.require_training()
    with RunDir(path).lock():
        if bench.synthetic:
            write_conversations(bench)
        run = chain.open_run(resolved, path, command)
        stages = chain.Chain(run, resolved)
        stages.run_stage("prepare")
        plan = replace(stages.make_plan(run.new_attempt(), 0), environment={UNSAVED: "1"})
        outcome = stages.run_attempt(plan)
        if outcome.code is not ExitCode.OK:
            stopped = Problem("stopped before the last step", file=str(run.attempt(plan.attempt)), fix="measure again")
            raise UserError(outcome.problems or [stopped], outcome.code)
    return run


def document(bench: Bench, run_dir: RunDir, cluster: Cluster) -> dict[str, Any]:
    """All figures."""
    run, recipe, events = run_dir.read(), bench.resolved.recipe, list(read_events(run_dir.metrics))
    ran = run["distributed"]
    measured = figures(events, bench, on_gpu=ran["gpu0"] is not None)
    plan, why = predict(bench, cluster)
    return {
        "recipe": bench.resolved.name,
        "model": recipe.model.name,
        "dataset": "synthetic" if bench.synthetic else recipe.data.name,
        "overrides": list(bench.overrides),
        "tiny": bench.resolved.tiny,
        "synthetic": bench.synthetic,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": run.get("command"),
        "run_dir": str(run_dir.path),
        "hardware": {"gpu": ran["gpu0"], "ranks": bench.measured.world_size, "cores": len(os.sched_getaffinity(0))},
        "distributed": ran,
        "versions": {**run["versions"], "torch": ran["torch"]},
        "commit": run.get("git"),
        "schedule": {"warmup": bench.warmup, "steps": bench.steps},
        **measured,
        "plan": beside_plan(plan, why, measured),
    }


def figures(events: Events, bench: Bench, *, on_gpu: bool) -> dict[str, Any]:
    """Step times, rates and peak memory of the timed steps, from the events of ``metrics.jsonl``.

    A step lasts from the line of the one before to its own: data, forward, backward, optimizer, logging. Rates are a rank's: a
    GPU's where there are some.
    """
    steps = [event for event in events if event["event"] == "step"][bench.warmup - 1 :]
    times = [after["time"] - before["time"] for before, after in pairwise(steps)]
    timed, ranks = steps[1:], bench.measured.world_size
    tokens = counted_share(bench.measured.data_parallel_size, ranks) * (timed[-1]["tokens"] - steps[0]["tokens"])
    start = [event["seconds"] for event in events if event["event"] == "startup" and event["part"] == "total"]
    peak = max(step["memory_bytes"] for step in timed) / GIB
    return {
        "steps_s": times,
        "step_s": spread(times),
        "tokens": tokens,
        "tokens_per_s_per_gpu": tokens / sum(times) / ranks,
        "padding_share": statistics.fmean(step.get("padding", 0.0) for step in timed),
        "utilisation": {name: _median([step[name] for step in timed if name in step]) for name in ("mfu", "hfu")},
        "peak": {"allocated_gib": peak if on_gpu else None, "rss_gib": None if on_gpu else peak},
        "start_s": next(iter(start), None),
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Median, mean, standard deviation, extremes and number of some measurements."""
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "stdev": statistics.stdev(values) if len(values) > 1 else 0.0,
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def predict(bench: Bench, cluster: Cluster) -> tuple[Plan | None, str | None]:
    """The plan of what is measured, or why there is none."""
    try:
        where = find_calibrated(cluster)
        machine = where.machine(bench.resolved.recipe.slurm.nodes)
        return make_plan(bench.resolved, machine, where.constants, lengths=bench.lengths), None
    except UserError as error:
        return None, str(error.problems[0])


def beside_plan(plan: Plan | None, why: str | None, measured: Mapping[str, Any]) -> dict[str, Any]:
    """What the planner predicted, what was measured, and measured over predicted; ``{"unknown": why}`` without a plan."""
    if plan is None:
        return {"unknown": why}
    pairs = {
        "step_s": (plan.step.seconds, measured["step_s"]["median"]),
        "tokens_per_s_per_gpu": (plan.tokens_per_s / plan.strategy.world_size, measured["tokens_per_s_per_gpu"]),
        "peak_gib_per_gpu": (plan.peak.bytes / GIB, measured["peak"]["allocated_gib"]),
        "mfu": (plan.utilisation(hardware=False) * plan.useful, measured["utilisation"]["mfu"]),
        "hfu": (plan.utilisation(hardware=True), measured["utilisation"]["hfu"]),
    }
    rows = {
        key: {"plan": planned, "measured": figure, "ratio": figure / planned if figure and planned else None}
        for key, (planned, figure) in pairs.items()
    }
    reach = [plan.step.seconds * plan.low, plan.step.seconds * plan.high]
    return {"cluster": plan.machine.name, "step_s_range": reach, "rows": rows}


def lines(body: Mapping[str, Any]) -> list[str]:
    """The figures in words."""
    step, used, peak = body["step_s"], body["utilisation"], body["peak"]
    memory = f"{peak['allocated_gib']:.3g} GiB on a GPU" if peak["allocated_gib"] else f"{peak['rss_gib']:.3g} GiB of a process"
    lines = [
        f"step {step['median']:.3g} s (median of {step['n']}, standard deviation {step['stdev']:.2g}), "
        f"{body['tokens_per_s_per_gpu']:,.0f} tokens/s per rank, padding {body['padding_share']:.1%}",
        f"MFU {used['mfu']:.1%}, HFU {used['hfu']:.1%}" if used["mfu"] else "MFU unknown: no GPU that ops/hardware.yaml has",
        f"peak memory: {memory}",
    ]
    if "unknown" in body["plan"]:
        return [*lines, f"no plan to compare with: {body['plan']['unknown']}"]
    row = body["plan"]["rows"]["step_s"]
    return [*lines, f"planned on {body['plan']['cluster']}: {row['plan']:.3g} s a step; measured / planned {row['ratio']:.3g}"]
