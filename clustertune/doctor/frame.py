"""The registry of rules: which there are, how they are run, and how what they find is told. Python 3.8, standard library.

A module of rules has ``RULES``, a tuple of :class:`clustertune.health.Rule`, and ``check(context)``, which yields findings.
``LOOKS``, where it has them, are the parts of ``check``: what goes wrong in one of them does not keep the others from speaking.
Modules whose name begins with ``machine_`` take a :class:`clustertune.doctor.machine.Machine`; they run on a bare Python.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import clustertune.doctor
from clustertune.doctor import compare
from clustertune.doctor.machine import Machine
from clustertune.health import FAIL, PASS, UNKNOWN, WARN, Finding, Rule, finding, in_order

MACHINE = "machine_"
OTHERS = ("recipe_", "stack_", "run_", "data_")
"""How the modules of rules begin that need the recipe, and with it the packages of the environment."""

BROKEN = Rule(
    "rule-broken",
    "the rules themselves",
    "a rule that ended in an error has judged nothing",
    "https://docs.python.org/3/library/exceptions.html",
)
"""What stands for a rule that raised: facts that nobody foresaw must not keep a job from its other rules."""


def modules(prefixes: Sequence[str]) -> list[Any]:
    """The modules of this room whose name begins so and that hold rules, in the order of their names."""
    found = sorted(info.name for info in pkgutil.iter_modules(clustertune.doctor.__path__))
    loaded = [importlib.import_module(f"clustertune.doctor.{name}") for name in found if name.startswith(tuple(prefixes))]
    return [module for module in loaded if hasattr(module, "RULES")]


def machine_rules() -> tuple[Rule, ...]:
    """The rules that need nothing but the machine, and those over several machines."""
    return (*(rule for module in modules([MACHINE]) for rule in module.RULES), *compare.RULES, BROKEN)


def all_rules() -> tuple[Rule, ...]:
    """Every rule; imports what the recipe's rules need."""
    return (*machine_rules(), *(rule for module in modules(OTHERS) for rule in module.RULES))


def run(looks: Iterable[Callable[[Any], Iterable[Finding]]], context: Any, where: str = "") -> Iterator[Finding]:
    """What each of ``looks`` finds. One that raises is told as unknown, with what it raised."""
    for look in looks:
        try:
            yield from look(context)
        except Exception as error:
            words = f"{look.__module__}.{look.__name__}: {type(error).__name__}: {error}"
            yield finding(BROKEN, UNKNOWN, words[:300], where=where)


def looks_of(module: Any) -> Sequence[Callable[[Any], Iterable[Finding]]]:
    """The parts of a module's check, or the whole."""
    return tuple(getattr(module, "LOOKS", ())) or (module.check,)


def machine_findings(machine: Machine) -> list[Finding]:
    """What all machine rules find on one machine."""
    looks = [look for module in modules([MACHINE]) for look in looks_of(module)]
    unread = [finding(BROKEN, UNKNOWN, words, where=machine.where) for words in machine.facts.unread]
    return [*run(looks, machine, machine.where), *unread]


def cluster_findings(machines: Sequence[Machine]) -> list[Finding]:
    """What the rules find on each of several machines, and between them."""
    found = [item for machine in machines for item in machine_findings(machine)]
    return found + list(run(compare.LOOKS, machines))


@dataclass
class Report:
    """Findings, and which of them nobody wants to hear of."""

    findings: list[Finding]
    ignored: tuple[str, ...] = ()

    @property
    def counted(self) -> list[Finding]:
        """What decides the verdict, worst first."""
        return [item for item in in_order(self.findings) if item.rule not in self.ignored]

    @property
    def faults(self) -> list[Finding]:
        """Warnings and failures that are not ignored, worst first."""
        return [item for item in self.counted if item.status in (WARN, FAIL)]

    @property
    def dropped(self) -> list[Finding]:
        """Warnings and failures that are ignored: they are told in one line."""
        return [item for item in in_order(self.findings) if item.rule in self.ignored and item.status in (WARN, FAIL)]

    def count(self, status: str) -> int:
        """Findings of a status."""
        return sum(item.status == status for item in self.counted)

    def summary(self) -> str:
        """One line: how many of each."""
        parts = [(FAIL, "failed"), (WARN, "warnings"), (UNKNOWN, "not seen"), (PASS, "passed")]
        text = ", ".join(f"{self.count(status)} {word}" for status, word in parts if self.count(status) or status == PASS)
        names = sorted({item.rule for item in self.dropped})
        return text + (f"; ignored: {', '.join(names)}" if names else "")

    def lines(self, *, everything: bool = False) -> list[str]:
        """For people, a few lines a finding: what, why, what to do, where it was met. Alike ones of several nodes are one."""
        shown = self.counted if everything else self.faults
        return [line for item, places in grouped(shown) for line in describe(item, places)]


SAME = {
    "env-file": ("secret-mode",),
    "weights-on-network": ("hub-cache",),
    "pool-without-mmap": ("pool-mmap", "mmap"),
}
"""A recipe's rule, and those of the machine that tell the same of the same file or folder."""


def once(machine: Sequence[Finding], recipe: Sequence[Finding]) -> list[Finding]:
    """Both, without what the machine's rules say less exactly of what the recipe's rules have found as well."""
    found = {item.rule: item.where for item in recipe if item.status in (WARN, FAIL) and item.rule in SAME}
    told = {other for rule in found for other in SAME[rule] if rule != "env-file"}
    file = found.get("env-file")
    left = [
        item
        for item in machine
        if item.status not in (WARN, FAIL)
        or (item.rule not in told and not (file and item.rule == "secret-mode" and item.found.startswith(f"{file} ")))
    ]
    return [*left, *recipe]


def grouped(findings: Iterable[Finding]) -> list[tuple[Finding, list[str]]]:
    """Findings that differ in nothing but where they are, as one with the places."""
    places: dict[tuple[str, ...], list[str]] = {}
    first: dict[tuple[str, ...], Finding] = {}
    for item in findings:
        key = (item.rule, item.status, item.found, item.fix)
        first.setdefault(key, item)
        places.setdefault(key, []).append(item.where)
    return [(first[key], [place for place in places[key] if place]) for key in first]


def describe(item: Finding, places: Sequence[str]) -> list[str]:
    """The lines of one finding."""
    where = f"{', '.join(places[:8])}{f' and {len(places) - 8} more' if len(places) > 8 else ''}: " if places else ""
    lines = [f"{item.status.upper():<7} {item.rule}: {where}{item.found}"]
    if item.fix:
        lines += [f"        why: {item.why}", f"        fix: {item.fix}", f"        see: {item.link}"]
    return [plain(line) for line in lines]


def plain(text: str) -> str:
    """Without what steers a terminal: names of files and devices stand in findings."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
