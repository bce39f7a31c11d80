"""One form for every check: a rule, the function that looks, and what it found.

A rule is one public function in a module of rules. Its name, with hyphens, is the id, its argument says what it looks at, its
docstring holds the texts that people read, and it yields what it saw:

    def swap(m: Machine) -> Iterator[Seen]:
        \"\"\"Nothing of weight is in swap.

        Looks at: memory in swap
        Why: a rank whose memory comes back from disk keeps all others waiting
        See: https://www.kernel.org/doc/html/latest/admin-guide/sysctl/vm.html
        \"\"\"

It yields nothing where it does not apply, ``pass`` where it looked and found nothing, and ``unknown`` where it could not look.
Standard library only, Python 3.8 or later: ``doctor.sbatch`` and ``doctor --facts`` run on bare nodes.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

PASS, WARN, FAIL, UNKNOWN = "pass", "warn", "fail", "unknown"
STATUSES = (PASS, UNKNOWN, WARN, FAIL)
"""From harmless to harmful. ``unknown``: what the rule looks at could not be seen here; what passed beside it decides."""

MACHINE, NODES, LINKS, SCRIPT = "machine", "nodes", "links", "script"
"""What rules look at: one machine, the nodes of a job together, links between GPUs as measured and logged, a batch script."""
RECIPE, REFUSED = "recipe", "refused"
"""A resolved recipe with its stack, data and run folder, and why one could not be resolved: rules in ``clustertune/doctor``."""
LOOKS = "looks"
"""A rule that ended in an error, or a fact that could not be read: the rule in ``clustertune/check/report.py``."""

_HOMES = {
    MACHINE: ("Machine", "clustertune.check", ("machine_",)),
    NODES: ("JobNodes", "clustertune.check", ("nodes",)),
    LINKS: ("LinkContext", "clustertune.nccl_check", ("link_rules",)),
    SCRIPT: ("Batch", "clustertune.check", ("script_",)),
    LOOKS: ("tuple[str, str]", "clustertune.check", ("report",)),
    RECIPE: ("RecipeContext", "clustertune.doctor", ("data_", "recipe_", "run_", "stack_")),
    REFUSED: ("UserError", "clustertune.doctor", ("recipe_findings",)),
}
"""For each subject: the type of a rule's argument, the package of its modules of rules, and how their names begin."""
_SUBJECTS = {kind: subject for subject, (kind, _, _) in _HOMES.items()}


@dataclass(frozen=True)
class Rule:
    """Why something is a fault, in one line, and a public place that shows it."""

    id: str
    """Lower case words with hyphens, the same for ever: people suppress and search it."""
    title: str
    """What is looked at, a phrase."""
    why: str
    """Why it hurts, one sentence."""
    link: str
    """Documentation, or a thread of people who met it."""
    fix: str = ""
    """What to do where the finding does not say it better."""


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


class Seen(NamedTuple):
    """What a rule saw at one place."""

    status: str
    found: str
    fix: str = ""
    """Empty: the rule's own."""
    where: str = ""
    """Empty: the subject's own ``where``."""


def either(status: str, bad: str, good: str, fix: str = "", where: str = "") -> Iterator[Seen]:
    """The fault ``bad`` where there is one; else what is ``good``, where something was looked at."""
    if bad or good:
        yield Seen(status, bad, fix, where) if bad else Seen(PASS, good, where=where)


class Check:
    """A rule with the function that looks. Calling it with a subject gives findings."""

    def __init__(self, rule: Rule, look: Callable[[Any], Iterable[Seen]], subject: str) -> None:
        self.rule, self.look, self.subject = rule, look, subject
        self.name = f"{look.__module__}.{rule.id}"

    def __call__(self, subject: Any) -> Iterator[Finding]:
        """What the rule finds on ``subject``."""
        for seen in self.look(subject):
            fix = seen.fix or ("" if seen.status in (PASS, UNKNOWN) else self.rule.fix)
            yield finding(self.rule, seen.status, seen.found, fix, seen.where or getattr(subject, "where", ""))


_FIELD = re.compile(r"^ *(Looks at|Why|Fix|See):\s", re.MULTILINE)


def rule(look: Callable[[Any], Iterable[Seen]]) -> Check:
    """Make a rule of a function. It is written as a decorator only where other code calls the rule for its findings.

    The docstring's first line says what holds where all is well. ``Looks at:`` is the title (without it the first line),
    ``Why:`` the reason, ``See:`` the link, and ``Fix:`` what to do where the function does not say it.
    """
    texts = described(look.__doc__ or "")
    subject = _SUBJECTS[next(iter(look.__annotations__.values()))]
    return rule_of(look.__name__.replace("_", "-"), *texts, look=look, subject=subject)


def rule_of(*texts: str, look: Callable[[Any], Iterable[Seen]], subject: str) -> Check:
    """A rule with the function that looks. ``texts``: the fields of :class:`Rule` in their order."""
    return Check(Rule(*texts), look, subject)


def described(docstring: str) -> tuple[str, str, str, str]:
    """Title, why, link and fix of the rule that a docstring describes; empty texts where Python leaves docstrings out (-OO)."""
    first, *parts = _FIELD.split(docstring)
    texts = {key: " ".join(text.split()) for key, text in zip(parts[::2], parts[1::2])}  # noqa: B905 - Python 3.8
    title = texts.get("Looks at") or first.strip().partition("\n")[0].rstrip(".")
    return title, texts.get("Why", ""), texts.get("See", ""), texts.get("Fix", "")


def checks(*subjects: str) -> list[Check]:
    """The rules of these subjects, in the order of their modules and in these as they stand; without any, of all subjects."""
    modules, subjects = set(), subjects or tuple(_HOMES)
    for _, package, begins in map(_HOMES.__getitem__, subjects):
        listed = pkgutil.iter_modules(importlib.import_module(package).__path__)
        modules |= {f"{package}.{found.name}" for found in listed if found.name.startswith(begins)}
    found = [check for module in sorted(modules) for check in _rules_in(module) if check.subject in subjects]
    assert len({check.rule.id for check in found}) == len(found), "two rules have one id"
    return found


@lru_cache(maxsize=None)  # noqa: UP033 - Python 3.8
def _rules_in(module: str) -> tuple[Check, ...]:
    """The rules of a module: those that are made already, and each public function that yields what it saw."""
    contents = vars(importlib.import_module(module))
    looks = [(value, getattr(value, "look", value)) for value in [*contents.get("CHECKS", ()), *contents.values()]]
    own = [value for value, look in looks if getattr(look, "__module__", "") == module]
    return tuple(
        value if isinstance(value, Check) else rule(value) for value in own if isinstance(value, Check) or _is_rule(value)
    )


def _is_rule(value: Any) -> bool:
    """Whether it is a public function that yields what it saw. One that takes more than a subject would be lost: an error."""
    types = list(value.__annotations__.values()) if inspect.isfunction(value) and not value.__name__.startswith("_") else []
    if not types or "Seen" not in types[-1]:
        return False
    assert len(types) == 2 and types[0] in _SUBJECTS, f"{value.__module__}.{value.__name__}: a rule takes one subject alone"
    return True


def finding(rule: Rule, status: str, found: str, fix: str = "", where: str = "") -> Finding:
    """A finding of ``rule``, with the rule's own reason and link."""
    assert status in STATUSES
    assert fix or status in (PASS, UNKNOWN), f"{rule.id}: a fault without a remedy"
    return Finding(rule.id, status, where, found, fix, rule.why, rule.link)


def worst(findings: Iterable[Finding]) -> str:
    """The verdict over findings: ``fail`` where one fails, else ``warn`` where one warns, else ``pass``.

    ``unknown`` where nothing that was to be looked at could be seen. What could not be seen beside what passed changes nothing.
    """
    seen = {item.status for item in findings}
    return next((status for status in (FAIL, WARN, PASS, UNKNOWN) if status in seen), PASS)


EXIT = {PASS: 0, UNKNOWN: 1, WARN: 1, FAIL: 2}
"""The exit code of every verdict: where nothing could be judged, a script must not continue as if all were well."""


def exit_code(findings: Iterable[Finding]) -> int:
    """0: nothing to fix; 1: warnings, or nothing could be judged; 2: what would stop or spoil a job."""
    return EXIT[worst(findings)]


def as_json(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """The ``--json`` form, worst first, in the order of their rules."""
    return [asdict(item) for item in in_order(findings)]


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings, the worst first. Equal ones keep their order; a repeated finding is listed once."""
    return sorted(dict.fromkeys(findings), key=lambda item: -STATUSES.index(item.status))


def listed(items: Iterable[str], most: int, between: str = ", ", last: str = " and") -> str:
    """``a, b and 3 more``: the first ``most`` of the items, and how many more there are."""
    given = list(items)
    return between.join(given[:most]) + (f"{last} {len(given) - most} more" if len(given) > most else "")


def printable(text: str) -> str:
    """Without what steers a terminal: names of files and devices, and text of scripts and logs, stand in findings."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
