"""Ranges where nothing like a run was known: constants and spreads are fitted without a group of runs, and its runs looked up.

The constants' fit is linear around the shipped ones: the logarithm of each predicted step time moves by its slopes. The spread
of a kind of run (:mod:`clustertune.plan.evidence`) is the sum of a base and of one part for each word that is not plain, as
variances, which expectation maximisation finds from what the fit leaves. A part that no run speaks of stays at its prior.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from clustertune.plan import evidence
from clustertune.plan.constants import Constants
from clustertune.plan.predict import deviations
from tools.planner_grade.data import Case, PublishedRun, case, published_runs

FITTED: dict[str, tuple[float, float]] = {
    "gemm_share.hopper": (0.6, 0.3), "gemm_share.blackwell": (0.6, 0.3), "gemm_share.ampere": (0.6, 0.3),
    "attention_share": (0.6, 0.3), "compiled_hidden": (200.0, 0.6), "engine_hidden": (200.0, 0.6), "eager_hidden": (400.0, 0.6),
    "overlap_loss": (0.1, 0.6), "fp8_share.hopper": (1.0, 0.2), "fp8_share.blackwell": (1.0, 0.2), "lora_passes": (4.0, 0.5),
}  # fmt: skip
"""Constants that are fitted: a round value that no run gave, and how far the logarithm may be from it."""
ERRORS = {"idris-csv": 0.02, "table": 0.12, "table-fp8": 0.15, "megatron": 0.15}
"""Sets that the constants are fitted to, with the error of a row that the fit expects: job logs, tables, tables in float8."""
UNMEASURED = 0.05
"""The same of rows on a cluster whose bandwidth their own times gave."""
NOT_FITTED = ("idris-1927120",)
"""One node of a cluster whose other runs wait for its network: 45 % slower than any other A100."""
WEIGHT, STEPS = 0.75, 200
"""For as many runs a prior counts; steps of the expectation maximisation."""


@dataclass(frozen=True)
class Row:
    """One published run with what it takes to fit and to judge it."""

    case: Case
    kind: tuple[str, ...]
    error: float
    """Logarithm of the published over the predicted step time."""
    slopes: Any
    """Of the predicted one's logarithm by those of the fitted constants."""
    expected: float | None
    """Its error in the fit; None: not among the fitted ones."""
    share: float
    """Of its step that its kind's spread moves."""
    links: float
    """Standard deviation that its links add."""

    @property
    def run(self) -> PublishedRun:
        return self.case.run


@cache
def rows() -> tuple[Row, ...]:
    """All published runs that count, at the shipped constants."""
    shipped = Constants()
    found = []
    for run in published_runs().values():
        if run.seconds is None or run.excluded:
            continue
        one = case(run)
        step = one.step(shipped)
        log = math.log(step.seconds)
        slopes = [
            math.log(one.step(shipped.with_values({name: shipped.value(name) * math.exp(1e-3)})).seconds) - log
            for name in FITTED
        ]
        expected = ERRORS.get(run.set) if run.id not in NOT_FITTED else None
        if expected and one.machine.inter.source == "measured" and run.nodes > 1:
            expected = UNMEASURED
        share, links = deviations(one.shape, one.machine, shipped, step)
        kind = evidence.words(one.shape, one.machine)
        found.append(Row(one, kind, math.log(run.seconds) - log, np.array(slopes) / 1e-3, expected, share, links))
    return tuple(found)


def refitted(known: Sequence[Row]) -> Any:
    """By how much the logarithm of each fitted constant moves from the shipped value where only these rows are known."""
    used = [row for row in known if row.expected]
    shipped = Constants()
    width = np.array([prior for _, prior in FITTED.values()])
    away = np.array([math.log(value / shipped.value(name)) for name, (value, _) in FITTED.items()])
    slopes = np.array([row.slopes for row in used]).reshape(-1, len(FITTED))
    weight = np.array([1 / float(row.expected or 1) ** 2 for row in used])
    errors = np.array([row.error for row in used])
    curvature = (slopes.T * weight) @ slopes + np.diag(1 / width**2)
    return np.linalg.solve(curvature, (slopes.T * weight) @ errors + away / width**2)


def spreads(known: Sequence[Row], moved: Any) -> dict[str, float]:
    """The standard deviation of each word, and of the base as ``""``, from what a fit leaves. Runs of one source count as the
    square root of their number, because they share program and machine."""
    sources = Counter(source(row) for row in known)
    words = sorted({word for row in known for word in row.kind if word not in evidence.PLAIN})
    prior = {"": evidence.FIRST, **dict.fromkeys(words, evidence.UNSEEN)}
    parts = {name: value**2 for name, value in prior.items()}
    names = [("", *(word for word in row.kind if word in prior)) for row in known]
    weights = [sources[source(row)] ** -0.5 for row in known]
    left = [(row.error - float(row.slopes @ moved)) / row.share for row in known]
    links = [(row.links / row.share) ** 2 for row in known]
    for _ in range(STEPS):
        sums = {name: WEIGHT * prior[name] ** 2 for name in parts}
        counts = dict.fromkeys(parts, WEIGHT)
        for own, weight, error, link in zip(names, weights, left, links, strict=True):
            whole = sum(parts[name] for name in own) + link
            for name in own:
                gain = parts[name] / whole
                sums[name] += weight * (parts[name] * (1 - gain) + (gain * error) ** 2)
                counts[name] += weight
        parts = {name: sums[name] / counts[name] for name in parts}
    return {name: math.sqrt(value) for name, value in parts.items()}


def source(row: Row) -> str:
    """The page or repository of a run."""
    return row.run.source.partition("/blob/")[0]


GROUPS: dict[str, Callable[[Row], str]] = {
    "program (source)": source,
    "cluster": lambda row: row.run.cluster,
    "engine": lambda row: row.kind[0],
    "kernels": lambda row: row.kind[1],
    "precision": lambda row: row.kind[2],
    "GPU generation": lambda row: row.kind[3],
    "dense or experts": lambda row: row.kind[4],
    "what is trained": lambda row: row.kind[5],
    "how it is split": lambda row: ", ".join(row.kind[6:]) or "data alone",
    "model family": lambda row: row.run.model.partition("-")[0].partition(".")[0],
}
"""What is left out together: all runs of one value."""


@dataclass(frozen=True)
class Coverage:
    """Runs of one group that lie in the range that is planned where the group is not known."""

    group: str
    value: str
    inside: int
    runs: int
    error: float
    """Mean absolute logarithm."""
    width: float
    """Upper end of the range over the plan, mean."""

    @property
    def factor(self) -> float:
        """The mean error as a factor."""
        return math.exp(self.error)


@cache
def coverage() -> tuple[Coverage, ...]:
    """Each value of each group, left out of constants and spreads."""
    found = []
    for group, of in GROUPS.items():
        for value in sorted({of(row) for row in rows()}):
            out = [row for row in rows() if of(row) == value]
            known = [row for row in rows() if of(row) != value]
            moved = refitted(known)
            spread = spreads(known, moved)
            errors = [row.error - float(row.slopes @ moved) for row in out]
            widths = [evidence.QUANTILE * math.hypot(row.share * evidence.spread(row.kind, spread), row.links) for row in out]
            inside = sum(abs(error) <= width for error, width in zip(errors, widths, strict=True))
            mean = sum(map(abs, errors)) / len(errors)
            found.append(Coverage(group, value, inside, len(out), mean, sum(map(math.exp, widths)) / len(widths)))
    return tuple(found)


def shipped() -> tuple[dict[str, float], dict[str, int], dict[str, int]]:
    """What :mod:`clustertune.plan.evidence` must say: spreads, runs by word, runs by kind."""
    kinds = Counter(evidence.key(row.kind) for row in rows())
    words = Counter(word for row in rows() for word in row.kind)
    return spreads(rows(), np.zeros(len(FITTED))), dict(words), dict(kinds)


def fitted_values(known: Iterable[Row] | None = None) -> Mapping[str, float]:
    """The constants that the rows give, by name."""
    moved = refitted(tuple(known) if known is not None else rows())
    now = Constants()
    return {name: now.value(name) * math.exp(change) for name, change in zip(FITTED, moved, strict=True)}
