"""How rules are run, and what is made of their findings for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from clustertune.check import rule as rules
from clustertune.check.machine_context import Machine
from clustertune.check.nodes import JobNodes
from clustertune.check.rule import (
    FAIL,
    MACHINE,
    NODES,
    PASS,
    RULE_ERRORS,
    UNKNOWN,
    WARN,
    Check,
    Finding,
    Rules,
    Seen,
    checks,
)

RULES = Rules(RULE_ERRORS, __file__)


@RULES("rule-broken")
def rule_broken(unread: tuple[str, str]) -> Iterator[Seen]:
    """Unforeseen facts must not keep a job from its other rules."""
    text, where = unread
    yield Seen(UNKNOWN, text, where=where)


def run(looks: Iterable[Callable[[Any], Iterable[Finding]]], context: Any, where: str = "") -> Iterator[Finding]:
    """What each of ``looks`` finds. One that raises becomes an unknown, with what it raised."""
    for look in looks:
        try:
            yield from look(context)
        except Exception as error:
            name = look.rule.id if isinstance(look, Check) else look.__name__
            message = f"{name}: {type(error).__name__}: {error}"
            yield from rule_broken((message[:300], where))


def machine_findings(machine: Machine) -> list[Finding]:
    """What all machine rules find on one machine."""
    unread = [found for text in machine.facts.unread for found in rule_broken((text, machine.where))]
    return [*run(checks(MACHINE), machine, machine.where), *unread]


def cluster_findings(several: JobNodes) -> list[Finding]:
    """What the rules find on each of several machines, and between them."""
    found = [item for machine in several.machines for item in machine_findings(machine)]
    return found + list(run(checks(NODES), several))


@dataclass
class Report:
    """Findings, and which of them are ignored."""

    findings: list[Finding]
    ignored: tuple[str, ...] = ()

    @property
    def counted(self) -> list[Finding]:
        """What decides the verdict, worst first."""
        return [item for item in rules.in_order(self.findings) if item.rule not in self.ignored]

    @property
    def ignored_faults(self) -> list[str]:
        """The ids of ignored rules that found a fault."""
        return sorted({item.rule for item in self.findings if item.rule in self.ignored and item.status in (WARN, FAIL)})

    @property
    def faults(self) -> list[Finding]:
        """Warnings and failures that are not ignored, worst first."""
        return [item for item in self.counted if item.status in (WARN, FAIL)]

    def summary(self) -> str:
        """One line: how many of each."""
        many = Counter(item.status for item in self.counted)
        warnings = "warning" if many[WARN] == 1 else "warnings"
        parts = [(FAIL, "failed"), (WARN, warnings), (UNKNOWN, "could not be checked"), (PASS, "passed")]
        text = ", ".join(f"{many[status]} {word}" for status, word in parts if many[status] or status == PASS)
        return text + (f"; ignored: {', '.join(self.ignored_faults)}" if self.ignored_faults else "")

    def lines(self, *, everything: bool = False) -> list[str]:
        """For people, a few lines a finding: what, why, what to do, where it was met. Alike ones of several nodes are one."""
        shown = self.counted if everything else self.faults
        return [line for item, places in grouped(shown) for line in describe(item, places)]


def grouped(findings: Iterable[Finding]) -> list[tuple[Finding, list[str]]]:
    """Findings that differ in nothing but where they are, as one with the places."""
    found: dict[tuple[str, ...], tuple[Finding, list[str]]] = {}
    for item in findings:
        _, places = found.setdefault((item.rule, item.status, item.found, item.fix), (item, []))
        places += [item.where] if item.where else []
    return list(found.values())


def describe(item: Finding, places: Sequence[str], width: int = 7) -> list[str]:
    """The lines of one finding. ``width``: of its status, behind which the reasons are indented."""
    where = f"{rules.listed(places, 8)}: " if places else ""
    lines = [f"{item.status.upper():<{width}} {item.rule}: {where}{item.found}"]
    if item.fix:
        lines += [f"{'':{width}} {word}: {text}" for word, text in (("why", item.why), ("fix", item.fix), ("see", item.link))]
    return [rules.printable(line) for line in lines]
