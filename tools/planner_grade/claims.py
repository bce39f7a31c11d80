"""The figures of other people's documents, each beside what arithmetic gives: right, imprecise or refuted."""

from __future__ import annotations

from dataclasses import dataclass

from tools.planner_grade.data import Claim, claims_file
from tools.planner_grade.formulas import compute


@dataclass(frozen=True)
class ClaimResult:
    """A claim and its check."""

    claim: Claim
    computed: float
    arithmetic: str
    """The computation with its numbers."""
    verdict: str
    """right | imprecise | refuted; one that is not the claim's own is a fault of the data file or of the formula."""


def check_claims() -> list[ClaimResult]:
    """Every claim checked, in the order of the file."""
    return [check(claim) for claim in claims_file().claims]


def check(claim: Claim) -> ClaimResult:
    """One claim: the figure computed from its inputs, and how far the claimed one lies from it."""
    value, arithmetic = compute(claim.formula, claim.inputs)
    return ClaimResult(claim, value, arithmetic, judge(claim, value))


def judge(claim: Claim, value: float) -> str:
    """The verdict on a claim where arithmetic gives ``value``."""
    limits = claims_file()
    off = distance(claim, value)
    if off <= (limits.tolerance if claim.tolerance is None else claim.tolerance):
        return "right"
    return "imprecise" if off <= (limits.coarse if claim.coarse is None else claim.coarse) else "refuted"


def distance(claim: Claim, value: float) -> float:
    """How far ``value`` lies outside what is claimed, as a share of the smaller of the two; 0 inside."""
    low, high = claim.claimed if isinstance(claim.claimed, tuple) else (claim.claimed, claim.claimed)
    if claim.relation != "at_least" and value > high:
        return value / high - 1
    if claim.relation != "at_most" and value < low:
        return low / value - 1
    return 0.0
