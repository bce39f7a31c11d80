"""The figures of a benchmark, from the metrics that every training writes, beside what the planner says of the recipe."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from clustertune import chain
from clustertune.bench import preparation
from clustertune.bench.preparation import Bench
from clustertune.cluster.schema import Cluster
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.events import read_events
from clustertune.host.system import GIB
from clustertune.plan.calibration import find_calibrated
from clustertune.plan.predict import Plan, make_plan
from clustertune.report.source import counted_share
from clustertune.rundir import UNSAVED, RunDir

_SPARE = 0.9
"""Share of the free memory that random weights may take here."""
Events = Sequence[Mapping[str, Any]]


def too_large(bench: Bench) -> str | None:
    """Whether the weights alone, on every rank, exceed this machine's free memory."""
    from clustertune.recipe.parameters import weight_bytes

    need, ranks = weight_bytes(bench.whole.architecture) or 0, bench.measured.world_size
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
            preparation.write_conversations(bench)
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
    run, recipe, events = run_dir.read(), bench.whole.recipe, list(read_events(run_dir.metrics))
    ran = run["distributed"]
    measured = figures(events, bench, on_gpu=ran["gpu0"] is not None)
    plan, why = predict(bench, cluster)
    return {
        "recipe": bench.whole.name,
        "model": recipe.model.name,
        "dataset": "synthetic" if bench.synthetic else recipe.data.name,
        "overrides": list(bench.overrides),
        "tiny": bench.whole.tiny,
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
        machine = where.machine(bench.whole.recipe.slurm.nodes)
        return make_plan(bench.whole, machine, where.constants, lengths=bench.lengths), None
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
        key: {"plan": planned, "measured": found, "ratio": found / planned if found and planned else None}
        for key, (planned, found) in pairs.items()
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
