"""The document of a benchmark: what was measured, on what, with what, and what that means for the whole recipe."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from clustertune.bench import peer
from clustertune.bench.drive import Peer, RoundsResult
from clustertune.bench.preparation import Bench, BenchRequest
from clustertune.cluster.hardware import peak_flops, price, recognise
from clustertune.cluster.schema import Cluster
from clustertune.errors import Problem, UserError, raise_if
from clustertune.events import read_events
from clustertune.host.system import GIB
from clustertune.manifest import write_durably
from clustertune.plan import schedule as schedules
from clustertune.plan.calibration import find_calibrated
from clustertune.plan.explanation import spent
from clustertune.plan.lengths import Lengths
from clustertune.plan.predict import Plan, Work, make_plan, work_of
from clustertune.resolve.resolved import Resolved
from clustertune.tree import ROOT

SCHEMA = "clustertune.bench/3"
Body = TypeVar("Body")
CPU_NOTE = "no GPU: ranks are processes on CPUs, so that figures show the program at work, not what a GPU does"
PEER_NOTE = "{name} was distributed as {theirs}, this project as {ours}"
TOKENS_NOTE = "tokens are those of conversations, padding left out; with it they are called computed"


def document(bench: Bench, found: RoundsResult, cluster: Cluster) -> dict[str, Any]:
    """Everything that is known after the rounds. Raises UserError where a rank left no whole figures."""
    run = found.run.read()
    schedule = bench.request.schedule
    shown = str(found.run.path / "attempts")
    ours = measured(found.ours, wanted=schedule.steps, share=bench.share, shown=shown)
    events = list(read_events(found.run.metrics))
    ends, started = ends_of(events, found.attempts), startup_of(events, found.attempts)
    device = found.ours[0][0].get("device")
    lengths = bench.lengths
    plan, why = predict(bench.whole, cluster, lengths)
    used = utilisation(work_of(bench.measured, lengths), ours, device)
    own_data = not bench.request.synthetic
    rows = found.ours[0][0].get("rows") if own_data else None
    ahead = whole(bench.whole, ours, ends, rows, plan, used.get("gpu"))
    body = {
        "schema": SCHEMA,
        "recipe": bench.whole.name,
        "model": bench.whole.recipe.model.name,
        "dataset": bench.whole.recipe.data.name if not bench.request.synthetic else "made up",
        "bf16": bench.measured.distribution.mixed_precision == "bf16",
        "overrides": changed(bench.request),
        "tiny": bench.request.tiny,
        "synthetic": bench.request.synthetic,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": run.get("command"),
        "hardware": _hardware(found),
        "distributed": run.get("distributed"),
        "versions": {**(run.get("versions") or {}), "torch": found.ours[0][0].get("torch")},
        "image": run.get("container"),
        "commit": run.get("git"),
        "resolved": {
            "sha256": hashlib.sha256(recipe_text(bench).encode()).hexdigest(),
            "fingerprint": bench.measured.fingerprint(),
        },
        "schedule": {
            "warmup": schedule.warmup,
            "steps": schedule.steps,
            "profiled": schedule.profiled,
            "rounds": bench.request.rounds,
        },
        "ours": ours,
        "ends": ends,
        "startup_s": started,
        "utilisation": used,
        "plan": beside_plan(plan, why, ours, used, ahead["hours"]),
        "projection": ahead,
        "peers": [_against(bench, found, one) for one in found.peers],
    }
    body["notes"] = list(_notes(bench, found, body))
    return relative(body)


def changed(request: BenchRequest) -> list[str]:
    """What the recipe was changed by, with paths as seen from here."""
    return relative(changes(request.overrides))


def recipe_text(bench: Bench) -> str:
    """What the ranks trained as its file holds it, with paths as seen from here."""
    return json.dumps(relative(bench.measured.as_dict()), indent=1) + "\n"


def relative(value: Body) -> Body:
    """A document without this machine's places: paths from the checkout and from the working folder."""

    def changed(inner: Any) -> Any:
        if isinstance(inner, Mapping):
            return {key: changed(deeper) for key, deeper in inner.items()}
        if isinstance(inner, list | tuple):
            return [changed(deeper) for deeper in inner]
        if isinstance(inner, str):
            for folder in (str(ROOT), str(Path.cwd())):
                inner = inner.replace(folder + os.sep, "")
        return inner

    found: Body = changed(value)
    return found


def _hardware(found: RoundsResult) -> dict[str, Any]:
    """Of the node that this runs on: all of a benchmark's are taken to be alike."""
    first = found.ours[0][0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    size = first.get("device_bytes")
    return {
        "gpu": first.get("device"),
        "gpu_gib": size / 2**30 if size else None,
        "ranks": len(found.ours[0]),
        "nodes": found.nodes,
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


def ends_of(events: list[dict[str, Any]], attempts: list[int]) -> dict[str, float | None]:
    """Seconds of one evaluation and of one checkpoint, and its size: medians over the rounds. Not part of any step."""

    def of(kind: str, key: str) -> float | None:
        values = [value for _, value in _logged(events, attempts, kind, key)]
        return statistics.median(values) if values else None

    size = of("checkpoint", "bytes")
    return {
        "evaluation_s": of("eval", "seconds"),
        "checkpoint_s": of("checkpoint", "seconds"),
        "checkpoint_gb": size / 1e9 if size else None,
    }


def startup_of(events: list[dict[str, Any]], attempts: list[int]) -> dict[str, float]:
    """Seconds of each part of the start-up, medians over the rounds, in the order of their records; empty: unknown."""
    parts: dict[str, list[float]] = {}
    for name, seconds in _logged(events, attempts, "startup", "seconds"):
        if isinstance(name, str):
            parts.setdefault(name, []).append(seconds)
    return {name: statistics.median(values) for name, values in parts.items()}


def _logged(events: list[dict[str, Any]], attempts: list[int], kind: str, key: str) -> Iterator[tuple[Any, float]]:
    """Of each event of a kind and of these attempts the part that it names, and a number of it."""
    for event in events:
        if event.get("event") == kind and event.get("attempt") in attempts and isinstance(event.get(key), int | float):
            yield event.get("part"), float(event[key])


def _against(bench: Bench, found: RoundsResult, one: Peer) -> dict[str, Any]:
    body: dict[str, Any] = {
        "peer": peer.title(one.name) if one.name not in peer.NAMES else one.name,
        "what": peer.title(one.name),
    }
    if one.failed is not None or not one.theirs:
        return {**body, "failed": one.failed, "measured": None, "ratio": None, "pairs": None}
    kind = one.theirs[0][0].get("distributed")
    # It has the recipe's distribution file. On CPUs accelerate makes data parallelism of it for trl-defaults.
    share = 1.0 if kind == "MULTI_CPU" else bench.share
    wanted, shown = bench.request.schedule.steps, str(found.run.path / "peer")
    theirs = measured(one.theirs, wanted=wanted, share=share, shown=shown)
    ours = measured(one.paired, wanted=wanted, share=bench.share, shown=str(found.run.path / "attempts"))
    return {
        **body,
        "failed": None,
        "distributed": kind,
        "measured": theirs,
        "ratio": ratio(ours, theirs),
        "pairs": paired(one.paired, one.theirs, interleaved=bench.request.interleave),
        "same_tokens": ours["tokens_per_step"] == theirs["tokens_per_step"],
    }


def _notes(bench: Bench, found: RoundsResult, body: Mapping[str, Any]) -> Iterator[str]:
    yield TOKENS_NOTE
    if body["hardware"]["gpu"] is None:
        yield CPU_NOTE
    if bench.request.tiny:
        yield "--tiny: the architecture is scaled down and its weights are random"
    if bench.request.synthetic:
        yield "random weights at full size and made-up conversations: speed and memory count, loss does not"
    ours = (body["distributed"] or {}).get("type")
    for one in body["peers"]:
        if one.get("distributed") and ours and one["distributed"] != ours:
            yield PEER_NOTE.format(name=one["peer"], theirs=one["distributed"], ours=ours)
        if one["failed"]:
            yield f"the peer ended without a result: {one['failed']}"
        elif one["peer"] == peer.TRL and not one["same_tokens"]:
            yield f"{one['peer']} trained on another number of tokens a step: its steps are not the same work"
    spread = body["ours"]["step_s"]
    if spread["median"] and spread["stdev"] > 0.1 * spread["median"]:
        share = spread["stdev"] / spread["median"]
        yield f"steps differ by {share:.0%} (standard deviation over median): more --steps, or a machine of its own"
    rows, schedule = found.ours[0][0].get("rows"), bench.request.schedule
    batch = int(bench.measured.recipe.train["global_batch_size"])
    if rows and rows < schedule.total * batch and rows % batch:
        yield f"{rows:,} sequences are fewer than the steps take: the last step of each epoch is smaller than the others"


# --- figures --------------------------------------------------------------------------------------------------------------

# From what each rank measured to the figures of a benchmark: plain numbers in, plain numbers out.

Records = Sequence[Mapping[str, Any]]
"""What the ranks of one round left, in rank order."""


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


def check(records: Records, wanted: int, shown: str) -> None:
    """Raise UserError unless every rank timed as many steps as were asked for, in the form that :mod:`peer` describes."""
    problems = []
    for rank, record in enumerate(records):
        steps = record.get("steps")
        rows = steps if isinstance(steps, list) else []
        if len(rows) != wanted:
            problems.append(Problem(f"rank {rank} timed {len(rows)} steps, {wanted} were asked for", file=shown, key="steps"))
        elif any(not _positive(row.get("seconds")) or not _positive(row.get("computed")) for row in rows):
            problems.append(Problem(f"rank {rank}: a step without seconds or tokens above 0", file=shown, key="steps"))
    if not records:
        problems.append(Problem("no rank left its figures", file=shown))
    raise_if(problems)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def steps_of(records: Records, share: float) -> list[StepTimes]:
    """The timed steps of a round. ``share``: of the ranks' tokens that count: tensor parallel ranks all read the same ones."""
    found = []
    for row in _rows(records):
        sums = [share * sum(float(rank.get(key) or 0) for rank in row) for key in StepTimes._fields[1:]]
        found.append(StepTimes(max(float(rank["seconds"]) for rank in row), *sums))
    return found


def _rows(records: Records) -> list[tuple[Mapping[str, Any], ...]]:
    """Step by step what each rank measured."""
    return list(zip(*(record["steps"] for record in records), strict=True))


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


def speed(rounds: Sequence[Sequence[StepTimes]], ranks: int) -> dict[str, Any]:
    """Step time and tokens per second, over all steps of all rounds; ``ranks``: all of them, the GPUs where there are some."""
    steps = [step for one in rounds for step in one]
    seconds, tokens, computed, labelled = map(math.fsum, zip(*steps, strict=True))
    rates = [step.tokens / step.seconds / ranks for step in steps]
    return {
        "step_s": spread([step.seconds for step in steps]),
        "round_median_s": [statistics.median(step.seconds for step in one) for one in rounds],
        "tokens_per_s_per_gpu": spread(rates) | {"mean": tokens / seconds / ranks},
        "computed_tokens_per_s_per_gpu": computed / seconds / ranks,
        "labelled_tokens_per_s_per_gpu": labelled / seconds / ranks,
        "tokens_per_step": tokens / len(steps),
        "padding_share": 1 - tokens / computed,
    }


def peaks(rounds: Iterable[Records]) -> dict[str, float | None]:
    """Peak memory, GiB: the largest of all ranks and rounds; of the host what all ranks hold together, too."""
    found: dict[str, float | None] = {"allocated_gib": None, "reserved_gib": None, "rss_gib": None, "rss_all_ranks_gib": None}
    for records in rounds:
        for key in ("allocated", "reserved", "rss"):
            values = [float((r.get("peak") or {}).get(key) or 0) / GIB for r in records]
            if any(values):
                found[f"{key}_gib"] = max(found[f"{key}_gib"] or 0.0, *values)
        together = sum(float((r.get("peak") or {}).get("rss") or 0) for r in records) / GIB
        found["rss_all_ranks_gib"] = max(found["rss_all_ranks_gib"] or 0.0, together) or None
    return found


def paired(ours: Sequence[Records], theirs: Sequence[Records], *, interleaved: bool) -> dict[str, Any]:
    """The ratio of step times, ours over theirs, over pairs of steps of the same number: its median with its 95 % interval.

    Wall time is that of the slowest rank, CPU time that of all ranks together; ``cpu`` is None where a peer counts none.
    """
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(_rows(one), _rows(other), strict=True)]
    wall = [max(float(r["seconds"]) for r in one) / max(float(r["seconds"]) for r in other) for one, other in pairs]
    used = [[math.fsum(float(r.get("cpu_seconds") or 0) for r in row) for row in pair] for pair in pairs]
    cpu = [one / other for one, other in used if one and other]
    return {
        "interleaved": interleaved,
        "wall": median_interval(wall),
        "cpu": median_interval(cpu) if len(cpu) == len(pairs) else None,
    }


def median_interval(values: Sequence[float]) -> dict[str, float | int | None]:
    """The median and its 95 % interval, by the order statistics that the binomial distribution names (no assumption on the
    distribution of the values; Conover, Practical Nonparametric Statistics, 3.2). Below six values there is no interval.
    """
    n, ordered, below = len(values), sorted(values), 0.0
    rank = 0  # the largest with P(Binomial(n, 1/2) < rank) <= 2.5 %
    for k in range(n):
        below += math.comb(n, k) / 2**n
        if below > 0.025:
            break
        rank = k + 1
    low, high = (ordered[rank - 1], ordered[n - rank]) if rank else (None, None)
    return {"median": statistics.median(values) if values else None, "low": low, "high": high, "n": n}


def profile(rounds: Sequence[Records]) -> dict[str, Any] | None:
    """Rank 0's profile: that of the round with the median share of time in which ranks waited for each other."""
    seen = [records[0]["profile"] for records in rounds if records and records[0].get("profile")]
    whole = [one for one in seen if one.get("exposed_share") is not None]
    whole.sort(key=lambda one: one["exposed_share"])
    return whole[(len(whole) - 1) // 2] if whole else None


def measured(rounds: Sequence[Records], *, wanted: int, share: float, shown: str) -> dict[str, Any]:
    """All figures of one program's rounds. Raises UserError as :func:`check` does."""
    for records in rounds:
        check(records, wanted, shown)
    first = rounds[0]
    starts = [float(r["to_first_step_s"]) for records in rounds for r in records if r.get("to_first_step_s")]
    return {
        "ranks": len(first),
        "rounds": len(rounds),
        "steps_timed": wanted * len(rounds),
        **speed([steps_of(records, share) for records in rounds], len(first)),
        "peak": peaks(rounds),
        "start_s": max(starts) if starts else None,
        "warmup_s": [float(row["seconds"]) for row in first[0].get("warmup") or []],
        "communication": profile(rounds),
    }


def ratio(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float | None]:
    """Ours over theirs: tokens per second (above 1: faster), step time, and peak memory (below 1: less)."""

    def over(one: Any, other: Any) -> float | None:
        return one / other if one and other else None

    kind = "allocated_gib" if ours["peak"]["allocated_gib"] else "rss_gib"
    return {
        "tokens_per_s": over(ours["tokens_per_s_per_gpu"]["mean"], theirs["tokens_per_s_per_gpu"]["mean"]),
        "computed_tokens_per_s": over(ours["computed_tokens_per_s_per_gpu"], theirs["computed_tokens_per_s_per_gpu"]),
        "step_s": over(ours["step_s"]["median"], theirs["step_s"]["median"]),
        "peak_memory": over(ours["peak"][kind], theirs["peak"][kind]),
    }


# --- what measured steps mean: utilisation, the whole recipe's hours and price, and how far the planner was off -------


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
        "mfu": work.model * measured["tokens_per_s_per_gpu"]["mean"] / could,
        "hfu": work.hardware * measured["computed_tokens_per_s_per_gpu"] / could,
        "gpu": name,
        "peak_tflops": peak,
        "model_tflops": work.model * measured["tokens_per_s_per_gpu"]["mean"] / 1e12,
        "why": f"{work.model / 1e9:.3g} GFLOP a token, {peak:g} TFLOP/s dense peak of {name}",
    }


def whole_steps(resolved: Resolved, rows: int | None, plan: Plan | None) -> tuple[int | None, str]:
    """Optimizer steps of the whole recipe, and how they are known. ``rows``: sequences of its own data, where that was read."""
    if rows or plan is None:
        unknown = "how many steps the recipe has is not known here: its data was not read, and data.expect does not say"
        return schedules.steps_of(
            resolved, schedules.PackedRows(rows or None, None, f"{rows:,} sequences" if rows else unknown)
        )
    return plan.schedule.steps, plan.schedule.steps_why


def whole(
    resolved: Resolved,
    measured: Mapping[str, Any],
    ends: Mapping[str, Any],
    rows: int | None,
    plan: Plan | None,
    gpu: str | None,
) -> dict[str, Any]:
    """Hours, GPU-hours and price of the whole recipe at the measured median step."""
    steps, why = whole_steps(resolved, rows, plan)
    if steps is None:
        return {"steps": None, "why": why, "hours": None, "gpu_hours": None, "cost": None}
    args = resolved.train_args
    evaluations = (schedules.times(args, "eval", steps) or 0) + bool(args.get("eval_on_start"))
    saves = schedules.times(args, "save", steps) or 0
    parts = {
        "start": measured["start_s"] or 0.0,
        "steps": steps * measured["step_s"]["median"],
        "evaluations": evaluations * (ends.get("evaluation_s") or 0.0),
        "checkpoints": saves * (ends.get("checkpoint_s") or 0.0),
    }
    hours = math.fsum(parts.values()) / 3600
    cost = spent(hours * measured["ranks"], price(gpu)) if gpu else None
    if cost is not None:
        del cost["per_gpu_hour"]
    return {
        "steps": steps, "why": why, "evaluations": evaluations, "checkpoints": saves, "parts_s": parts, "hours": hours,
        "gpu_hours": hours * measured["ranks"] if gpu else None, "cost": cost,
    }  # fmt: skip


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


def beside_plan(
    plan: Plan | None, why: str | None, measured: Mapping[str, Any], used: Mapping[str, Any], hours: float | None
) -> dict[str, Any]:
    """What the planner predicted, what was measured, and measured over predicted; ``{"unknown": why}`` without a plan."""
    if plan is None:
        return {"unknown": why}
    compared = {
        "step_s": plan.step.seconds,
        "tokens_per_s_per_gpu": plan.tokens_per_s / plan.strategy.world_size,
        "peak_gib_per_gpu": plan.peak.bytes / GIB,
        "mfu": plan.utilisation(hardware=False) * plan.useful,
        "hfu": plan.utilisation(hardware=True),
        "exposed_share": plan.step.exposed.value / plan.step.seconds,
        "hours": plan.hours,
    }
    found = {
        "step_s": measured["step_s"]["median"],
        "tokens_per_s_per_gpu": measured["tokens_per_s_per_gpu"]["mean"],
        "peak_gib_per_gpu": measured["peak"]["allocated_gib"],
        "mfu": used["mfu"],
        "hfu": used["hfu"],
        "exposed_share": (measured["communication"] or {}).get("exposed_share"),
        "hours": hours,
    }
    rows = {
        key: {"plan": value, "measured": found[key], "ratio": found[key] / value if found[key] and value else None}
        for key, value in compared.items()
    }
    reach = [plan.step.seconds * plan.low, plan.step.seconds * plan.high]
    return {"cluster": plan.machine.name, "step_s_range": reach, "rows": rows}


# --- published ------------------------------------------------------------------------------------------------------------

# Where a result lies and what it is called: two recipes never have one name, and what is published is not written over.

LONGEST = 40
"""Characters of a file's name that tell overrides; the digest behind them tells all."""


def changes(overrides: Iterable[str]) -> list[str]:
    """What of the overrides makes another recipe of it, by key, the last of each.

    Those of ``slurm`` are left out: the name has the ranks, and a job has them where the same recipe by hand has none.
    """
    last = {text.partition("=")[0].strip(): text for text in overrides}
    return [last[key] for key in sorted(last) if key.partition(".")[0] != "slurm"]


def name_of(body: Mapping[str, Any]) -> str:
    """File name of a result without suffix."""
    kind = body["utilisation"].get("gpu") or ("gpu" if body["hardware"]["gpu"] else "cpu")
    ranks, changed = body["hardware"]["ranks"], body.get("overrides") or ()
    return file_name(body["recipe"], tiny=body["tiny"], synthetic=body["synthetic"], kind=kind, ranks=ranks, changed=changed)


def file_name(recipe: str, *, tiny: bool, synthetic: bool, kind: str, ranks: int, changed: Sequence[str]) -> str:
    """Recipe, what it ran on, how many ranks, and what the recipe was changed by: overrides, and a digest of them all."""
    parts = [recipe, "tiny" if tiny else "", "synthetic" if synthetic else "", kind, f"x{ranks}"]
    if changed:
        pairs = [_pair(text) for text in changed]
        joined = "-".join(_name_part(key, value) for key, value in pairs)[:LONGEST].strip("-._")
        parts += [joined, hashlib.sha256(json.dumps(pairs, default=str).encode()).hexdigest()[:6]]
    return "-".join(part for part in parts if part)


def _pair(text: str) -> tuple[str, Any]:
    """Key and value as YAML has it, so that ``False`` and ``false`` are one."""
    key, _, value = text.partition("=")
    try:
        return key.strip(), yaml.safe_load(value)
    except (ValueError, yaml.YAMLError):
        return key.strip(), value


def _name_part(key: str, value: Any) -> str:
    """The last part of the key with its value; of a path only its last part, which is not a place of a machine."""
    shown = value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else json.dumps(value, default=str)
    return re.sub(r"[^A-Za-z0-9._]+", "-", f"{key.rpartition('.')[2]}-{shown}").strip("-")


def others(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Those of the files to be written that are there and hold something else. Raises OSError."""
    places = {folder / name: text for name, text in texts.items()}
    return [path for path, text in places.items() if path.exists() and path.read_bytes() != text.encode()]


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """All files of a result. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_durably(folder / name, text)
