"""The words of whatever inspects a cluster: a rule, what it found, and how bad that is.

Standard library only, Python 3.8 or later: ``doctor`` and the reader of NCCL's log run on bare login nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

PASS, WARN, FAIL, UNKNOWN = "pass", "warn", "fail", "unknown"
STATUSES = (PASS, UNKNOWN, WARN, FAIL)
"""From harmless to harmful. ``unknown``: what the rule looks at could not be seen here; it spoils no verdict."""


@dataclass(frozen=True)
class Rule:
    """Why something is a fault, in one line, and a public place that shows it."""

    id: str
    """Lower case words with hyphens, the same for ever: people suppress and search it."""
    title: str
    """What is looked at, a few words."""
    why: str
    """Why it hurts, one sentence."""
    link: str
    """Documentation, or a thread of people who met it."""


@dataclass(frozen=True)
class Finding:
    """What one rule found at one place."""

    rule: str
    """The id of a :class:`Rule`."""
    status: str
    """One of :data:`STATUSES`."""
    where: str
    """Node, file or link that it is about; empty: the whole."""
    found: str
    """What was seen, with its value and unit."""
    fix: str
    """What to do; empty where nothing is to be done."""
    why: str
    link: str


def finding(rule: Rule, status: str, found: str, fix: str = "", where: str = "") -> Finding:
    """A finding of ``rule``, with the rule's own reason and link."""
    assert status in STATUSES
    assert fix or status in (PASS, UNKNOWN), f"{rule.id}: a fault without a remedy"
    return Finding(rule.id, status, where, found, fix, rule.why, rule.link)


def worst(findings: Iterable[Finding]) -> str:
    """The verdict over findings: ``fail`` where one fails, else ``warn`` where one warns, else ``pass``."""
    seen = {item.status for item in findings}
    return FAIL if FAIL in seen else WARN if WARN in seen else PASS


EXIT = {PASS: 0, UNKNOWN: 1, WARN: 1, FAIL: 2}
"""The exit code of a verdict as a whole: where nothing could be judged, a script must not go on as if all were well."""


def exit_code(findings: Iterable[Finding]) -> int:
    """0: nothing to mend; 1: warnings; 2: what would stop or spoil a job."""
    return {PASS: 0, WARN: 1, FAIL: 2}[worst(findings)]


def as_json(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """The ``--json`` form, worst first, in the order of their rules."""
    return [asdict(item) for item in in_order(findings)]


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first; what is alike stays in its order, and a finding that came twice stands once."""
    return sorted(dict.fromkeys(findings), key=lambda item: -STATUSES.index(item.status))
