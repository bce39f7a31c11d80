"""The document of a benchmark: what the ranks measured, on what, and what the planner says about the same recipe."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from clustertune import chain
from clustertune.bench import preparation
from clustertune.bench.preparation import Bench
from clustertune.cluster.hardware import peak_flops, recognise
from clustertune.cluster.schema import Cluster
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.events import read_object
from clustertune.host.system import GIB
from clustertune.plan.calibration import find_calibrated
from clustertune.plan.lengths import Lengths
from clustertune.plan.predict import Plan, Work, make_plan, work_of
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir
from clustertune.training.bench_schedule import result_file


def train(bench: Bench, command: list[str]) -> tuple[RunDir, list[dict[str, Any]]]:
    """Train the steps in the launcher, program and guards of ``clustertune run``. Returns the run and what each rank measured.

    Raises UserError where the training fails.
    """
    path, resolved = bench.request.run_path, bench.measured
    chain.check_folder(resolved, path)
    chain.require_training()
    with RunDir(path).lock():
        preparation.make_conversations(bench)
        run = chain.open_run(resolved, path, command)
        bench.request.schedule.write(path)
        stages = chain.Chain(run, resolved)
        stages.run_stage("prepare")
        plan = stages.make_plan(run.new_attempt(), 0)
        outcome = stages.run_attempt(plan)
        folder = run.attempt(plan.attempt)
        if outcome.code is not ExitCode.OK:
            stopped = Problem("stopped before the last step", file=str(folder), fix="measure again")
            raise UserError(outcome.problems or [stopped], outcome.code)
    records = [read_object(result_file(folder, rank)) for rank in range(plan.world_size)]
    if not all(records):
        raise UserError("a rank left no figures", file=str(folder), fix="measure again")
    return run, records


def document(bench: Bench, run_dir: RunDir, records: Records, cluster: Cluster) -> dict[str, Any]:
    """All figures."""
    run, schedule, recipe = run_dir.read(), bench.request.schedule, bench.whole.recipe
    measured = figures(records, share=bench.share)
    plan, why = predict(bench.whole, cluster, bench.lengths)
    used = utilisation(work_of(bench.measured, bench.lengths), measured, records[0].get("device"))
    return {
        "recipe": bench.whole.name,
        "model": recipe.model.name,
        "dataset": "synthetic" if bench.request.synthetic else recipe.data.name,
        "overrides": list(bench.request.overrides),
        "tiny": bench.request.tiny,
        "synthetic": bench.request.synthetic,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": run.get("command"),
        "run_dir": str(run_dir.path),
        "hardware": _hardware(records),
        "distributed": run.get("distributed"),
        "versions": {**(run.get("versions") or {}), "torch": records[0].get("torch")},
        "commit": run.get("git"),
        "schedule": {"warmup": schedule.warmup, "steps": schedule.steps},
        **measured,
        "utilisation": used,
        "plan": beside_plan(plan, why, measured, used),
    }


def _hardware(records: Records) -> dict[str, Any]:
    first = records[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    size = first.get("device_bytes")
    return {
        "gpu": first.get("device"),
        "gpu_gib": size / 2**30 if size else None,
        "ranks": len(records),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_rank": first.get("threads"),
        "memory_gib": memory,
    }


def _cpu() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), None)


Records = Sequence[Mapping[str, Any]]
"""What the ranks left, in rank order."""


class StepTimes(NamedTuple):
    """One optimizer step over all ranks."""

    seconds: float
    """Of the slowest rank."""
    tokens: float
    """Of conversations."""
    computed: float
    """With padding."""
    labelled: float
    """Those that the loss is taken of."""


def steps_of(records: Records, share: float) -> list[StepTimes]:
    """The timed steps. ``share``: of the ranks' tokens that count: tensor parallel ranks all read the same ones."""
    found = []
    for row in zip(*(record["steps"] for record in records), strict=True):
        sums = [share * sum(float(rank.get(key) or 0) for rank in row) for key in StepTimes._fields[1:]]
        found.append(StepTimes(max(float(rank["seconds"]) for rank in row), *sums))
    return found


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Median, mean, standard deviation, extremes and number of some measurements."""
    if not values:
        return {"median": None, "mean": None, "stdev": None, "min": None, "max": None, "n": 0}
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "stdev": statistics.stdev(values) if len(values) > 1 else 0.0,
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def figures(records: Records, *, share: float) -> dict[str, Any]:
    """Step time, rates and peak memory of the timed steps.

    ``share``: see :func:`steps_of`. Rates are a rank's: a GPU's where there are some.
    """
    rows, ranks = steps_of(records, share), len(records)
    seconds, tokens, computed, labelled = map(math.fsum, zip(*rows, strict=True))
    starts = [float(record["to_first_step_s"]) for record in records if record.get("to_first_step_s")]
    return {
        "step_s": spread([row.seconds for row in rows]),
        "tokens_per_s_per_gpu": tokens / seconds / ranks,
        "computed_tokens_per_s_per_gpu": computed / seconds / ranks,
        "labelled_tokens_per_s_per_gpu": labelled / seconds / ranks,
        "tokens_per_step": tokens / len(rows),
        "padding_share": 1 - tokens / computed,
        "peak": peaks(records),
        "start_s": max(starts, default=None),
    }


def peaks(records: Records) -> dict[str, float | None]:
    """Peak memory, GiB: of the rank with the most tensors, allocator and resident set; None: not measured on this device."""
    found: dict[str, float | None] = {}
    for key in ("allocated", "reserved", "rss"):
        values = [float((record.get("peak") or {}).get(key) or 0) / GIB for record in records]
        found[f"{key}_gib"] = max(values) or None
    return found


def utilisation(work: Work | None, measured: Mapping[str, Any], device: str | None) -> dict[str, Any]:
    """MFU and HFU against the dense bf16 peak of ops/hardware.yaml. MFU counts tokens of conversations, HFU what was computed:
    padding and recomputation too."""
    if device is None:
        return {"mfu": None, "hfu": None, "why": "no GPU: the peak of this CPU is not known"}
    name = recognise(device)
    if name is None:
        return {"mfu": None, "hfu": None, "why": f"{device} is not in ops/hardware.yaml"}
    could = peak_flops(device)
    if work is None or not could:
        return {"mfu": None, "hfu": None, "gpu": name, "why": "the planner cannot count this architecture"}
    peak = could / 1e12
    return {
        "mfu": work.model * measured["tokens_per_s_per_gpu"] / could,
        "hfu": work.hardware * measured["computed_tokens_per_s_per_gpu"] / could,
        "gpu": name,
        "peak_tflops": peak,
        "model_tflops": work.model * measured["tokens_per_s_per_gpu"] / 1e12,
        "why": f"{work.model / 1e9:.3g} GFLOP a token, {peak:g} TFLOP/s dense peak of {name}",
    }


def predict(resolved: Resolved, cluster: Cluster, lengths: Lengths | None) -> tuple[Plan | None, str | None]:
    """The plan of what is measured, or why there is none."""
    try:
        where = find_calibrated(cluster)
        return make_plan(resolved, where.machine(resolved.recipe.slurm.nodes), where.constants, lengths=lengths), None
    except UserError as error:
        return None, str(error.problems[0])


def brief(plan: Plan) -> dict[str, Any]:
    """What a dry run says about a plan."""
    return {
        "cluster": plan.machine.name,
        "fits": plan.fits,
        "step_s": plan.step.seconds,
        "needed_gib_per_gpu": plan.needed / GIB,
        "usable_gib_per_gpu": plan.machine.usable_bytes / GIB,
        "tokens_per_s_per_gpu": plan.tokens_per_s / plan.strategy.world_size,
        "hours": plan.hours,
    }


def beside_plan(plan: Plan | None, why: str | None, measured: Mapping[str, Any], used: Mapping[str, Any]) -> dict[str, Any]:
    """What the planner predicted, what was measured, and measured over predicted; ``{"unknown": why}`` without a plan."""
    if plan is None:
        return {"unknown": why}
    pairs = {
        "step_s": (plan.step.seconds, measured["step_s"]["median"]),
        "tokens_per_s_per_gpu": (plan.tokens_per_s / plan.strategy.world_size, measured["tokens_per_s_per_gpu"]),
        "peak_gib_per_gpu": (plan.peak.bytes / GIB, measured["peak"]["allocated_gib"]),
        "mfu": (plan.utilisation(hardware=False) * plan.useful, used["mfu"]),
        "hfu": (plan.utilisation(hardware=True), used["hfu"]),
    }
    rows = {
        key: {"plan": planned, "measured": found, "ratio": found / planned if found and planned else None}
        for key, (planned, found) in pairs.items()
    }
    reach = [plan.step.seconds * plan.low, plan.step.seconds * plan.high]
    return {"cluster": plan.machine.name, "step_s_range": reach, "rows": rows}
