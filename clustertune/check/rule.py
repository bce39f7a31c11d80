"""One form for every check: a rule, the function that looks, and what it found.

Each module of rules makes one list, and names each rule in it by its id:

    RULES = Rules(MACHINE, __file__)

    @RULES("gpu-mig")
    def gpu_mig(m: Machine) -> Iterator[Seen]: ...

The texts that people read stand under that id in ``rules.yaml`` beside the module. A rule yields nothing where it does not
apply, ``pass`` where it looked and found nothing, and ``unknown`` where it could not look. :data:`MODULES` names the modules.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from clustertune.text import listed

PASS, WARN, FAIL, UNKNOWN = "pass", "warn", "fail", "unknown"
STATUSES = (PASS, UNKNOWN, WARN, FAIL)
"""From harmless to harmful. ``unknown``: what the rule looks at could not be seen here; what passed beside it decides."""

MACHINE, NODES, LINKS, SCRIPT = "machine", "nodes", "links", "script"
"""What rules look at: one machine, the nodes of a job together, links between GPUs as measured and logged, a batch script."""
RECIPE, REFUSED, RULE_ERRORS = "recipe", "refused", "looks"
"""A resolved recipe with its stack, data and run folder; why one could not be resolved; a rule that ended in an error."""

MODULES = {
    MACHINE: "check.machine_gpu check.machine_system check.machine_network check.machine_storage",
    NODES: "check.machines",
    LINKS: "nccl_check.link_rules",
    RULE_ERRORS: "check.rule",
    SCRIPT: "check.sbatch",
    RECIPE: "doctor.recipe_rules",
    REFUSED: "doctor.recipe_rules",
}
"""For each subject the modules of its rules, in the order in which they are listed; a module may hold rules of two subjects."""


@dataclass(frozen=True)
class Rule:
    """Why something is a fault, in one line, and a public place that shows it."""

    id: str
    """Lower case words with hyphens: people suppress and search it."""
    title: str
    """What is looked at, a phrase."""
    why: str
    """Why it hurts, one sentence."""
    link: str
    """Documentation, or a thread of people who met it."""
    fix: str = ""
    """What to do where the finding does not say it better."""
    stops: bool = False
    """Whether a failure of it is sure to stop or spoil the job that is about to start."""


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


def either(status: str, bad: str, good: str, fix: str = "") -> Iterator[Seen]:
    """The fault ``bad`` where there is one; else what is ``good``, where something was looked at."""
    if bad or good:
        yield Seen(status, bad, fix) if bad else Seen(PASS, good)


Look = Callable[[Any], Iterable[Seen]]


class Check:
    """A rule with the function that looks. Calling it with a subject gives findings."""

    def __init__(self, rule: Rule | Callable[[], Rule], look: Look, subject: str) -> None:
        self._made, self.look, self.subject = rule, look, subject

    @cached_property
    def rule(self) -> Rule:
        """The rule itself; texts are read when they are first asked for."""
        return self._made if isinstance(self._made, Rule) else self._made()

    def __call__(self, subject: Any) -> Iterator[Finding]:
        """What the rule finds on ``subject``."""
        for seen in self.look(subject):
            fix = seen.fix or ("" if seen.status in (PASS, UNKNOWN) else self.rule.fix)
            yield finding(self.rule, seen.status, seen.found, fix, seen.where or getattr(subject, "where", ""))


def rule_of(name: str, texts: Mapping[str, Any]) -> Rule:
    """The rule of a row of YAML: ``title``, ``why``, ``see``, and where it has them ``fix`` and ``stops``."""
    return Rule(name, texts["title"], texts["why"], texts["see"], texts.get("fix", ""), texts.get("stops", False))


@cache
def _texts(folder: Path) -> dict[str, dict[str, Any]]:
    import yaml  # a command that only looks at its arguments must not pay for it

    texts: dict[str, dict[str, Any]] = yaml.safe_load((folder / "rules.yaml").read_text(encoding="utf-8"))
    return texts


class Rules(list[Check]):
    """The rules of one module, in the order in which they stand there."""

    def __init__(self, subject: str, file: str) -> None:
        super().__init__()
        self.subject, self.folder = subject, Path(file).parent

    def __call__(self, name: str, subject: str = "") -> Callable[[Look], Check]:
        """Decorates the function that looks, and adds its rule ``name`` to the list; ``subject``: another than the module's."""

        def add(look: Look) -> Check:
            self.append(Check(lambda: rule_of(name, _texts(self.folder)[name]), look, subject or self.subject))
            return self[-1]

        return add


def checks(*subjects: str) -> list[Check]:
    """The rules of these subjects, in the order of :data:`MODULES`; without any, of all subjects."""
    modules = dict.fromkeys(module for subject in subjects or MODULES for module in MODULES[subject].split())
    rules = [check for module in modules for check in importlib.import_module(f"clustertune.{module}").RULES]
    return [check for check in rules if not subjects or check.subject in subjects]


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


def printable(text: str) -> str:
    """Without what steers a terminal: names of files and devices, and text of scripts and logs, stand in findings."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# --- how rules are run, and what people read of their findings ---------------------------------------------------------

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


@dataclass
class Report:
    """Findings, and which of them are ignored."""

    findings: list[Finding]
    ignored: tuple[str, ...] = ()

    @property
    def counted(self) -> list[Finding]:
        """What decides the verdict, worst first."""
        return [item for item in in_order(self.findings) if item.rule not in self.ignored]

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
    groups: dict[tuple[str, ...], tuple[Finding, list[str]]] = {}
    for item in findings:
        _, places = groups.setdefault((item.rule, item.status, item.found, item.fix), (item, []))
        places += [item.where] if item.where else []
    return list(groups.values())


def describe(item: Finding, places: Sequence[str]) -> list[str]:
    """The lines of one finding; the reasons are indented behind its status."""
    where = f"{listed(places, 8)}: " if places else ""
    lines = [f"{item.status.upper():<7} {item.rule}: {where}{item.found}"]
    if item.fix:
        lines += [f"{'':7} {word}: {text}" for word, text in (("why", item.why), ("fix", item.fix), ("see", item.link))]
    return [printable(line) for line in lines]


def render_page(template: Path, **values: Any) -> str:
    """A page of the docs from its template."""
    import jinja2

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)  # noqa: S701 - no HTML
    return environment.from_string(template.read_text(encoding="utf-8")).render(**values)
