"""From what each rank measured to the figures of a benchmark: plain numbers in, plain numbers out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clustertune.errors import Problem, UserError

GIB = 2**30
COUNTS = ("tokens", "computed", "labelled")
"""Of a conversation; with padding; those that the loss is taken of."""

Records = Sequence[Mapping[str, Any]]
"""What the ranks of one round left, in rank order."""


@dataclass(frozen=True)
class Step:
    """One optimizer step over all ranks."""

    seconds: float
    """Of the slowest rank."""
    tokens: float
    computed: float
    labelled: float


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
    if problems:
        raise UserError(problems)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def steps_of(records: Records, share: float) -> list[Step]:
    """The timed steps of a round. ``share``: of the ranks' tokens that count: tensor parallel ranks all read the same ones."""
    found = []
    for row in zip(*(record["steps"] for record in records), strict=True):
        sums = [share * sum(float(rank.get(key) or 0) for rank in row) for key in COUNTS]
        found.append(Step(max(float(rank["seconds"]) for rank in row), *sums))
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


def speed(rounds: Sequence[Sequence[Step]], ranks: int) -> dict[str, Any]:
    """Step time and tokens per second, over all steps of all rounds; ``ranks``: all of them, the GPUs where there are some."""
    steps = [step for one in rounds for step in one]
    seconds = math.fsum(step.seconds for step in steps)
    sums = {key: math.fsum(getattr(step, key) for step in steps) for key in COUNTS}
    rates = [step.tokens / step.seconds / ranks for step in steps]
    return {
        "step_s": spread([step.seconds for step in steps]),
        "round_median_s": [statistics.median(step.seconds for step in one) for one in rounds],
        "tokens_per_s_per_gpu": spread(rates) | {"mean": sums["tokens"] / seconds / ranks},
        "computed_tokens_per_s_per_gpu": sums["computed"] / seconds / ranks,
        "labelled_tokens_per_s_per_gpu": sums["labelled"] / seconds / ranks,
        "tokens_per_step": sums["tokens"] / len(steps),
        "padding_share": 1 - sums["tokens"] / sums["computed"],
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


def _rows(records: Records) -> list[tuple[Mapping[str, Any], ...]]:
    """Step by step what each rank measured."""
    return list(zip(*(record["steps"] for record in records), strict=True))


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
