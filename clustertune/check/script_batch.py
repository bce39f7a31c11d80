"""What a batch script says about its job: the header's values, the variables it sets, and what each srun starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from clustertune.check.rule import SCRIPT, WARN, Check, Seen, rule
from clustertune.check.script_directives import SRUN, SRUN_SHORT, BatchHeader, read_header
from clustertune.check.script_shell import ShellCommand, Text, parse, walk

MAX_EXPANDED = 20_000
"""Characters of an expanded text; a script that doubles a variable again and again must not fill memory."""
_PREFIXES = ("exec", "time", "nohup", "timeout", "env", "stdbuf", "command", "nice", "eval")
_LIGHT = frozenset(
    """
    awk bash cat chmod chown cp cut date df dirname du echo env export false find free getent grep head hostname id ip kill ln
    ls lscpu lspci mkdir mktemp mv nproc numactl nvidia-smi printenv printf ps pwd rm rsync sbcast scontrol sed set sh sleep
    sort stat sync tail tar tee test touch tr true ulimit uname uptime wc which whoami [ [[ :
    """.split()  # noqa: SIM905 (one word a program is what a person can read and extend)
)
"""Programs that look at a node or copy files: how srun binds their cores does not matter."""
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\})")
_LAUNCHER = re.compile(
    r"(?:^|[\s/'\"(])(torchrun|torch\.distributed\.(?:run|launch)|accelerate\s+launch|deepspeed)(?=$|[\s'\"])"
)


class Mistake(NamedTuple):
    """What a scan of a script sees, for the rule of that name."""

    line: int
    """From 1."""
    rule: str
    message: str
    remedy: str


if TYPE_CHECKING:  # 3.8 cannot subscript collections.abc
    Scan = Callable[["Batch"], Iterator[Mistake]]


@dataclass(frozen=True)
class Token:
    """One argument with its line."""

    text: str
    line: int


@dataclass
class Srun:
    """One call of srun."""

    command: ShellCommand
    line: int
    options: dict[str, str | None] = field(default_factory=dict)
    """Its own options by long name."""
    payload: list[Token] = field(default_factory=list)
    """What it starts, variables put in, the text of ``bash -c`` cut at blanks."""
    opaque: bool = False
    """An argument that the script does not define may hold further options."""
    program: str = ""

    @property
    def launcher(self) -> str | None:
        """torchrun, accelerate launch or deepspeed, where it starts one."""
        found = _LAUNCHER.search(" ".join(token.text for token in self.payload))
        return found.group(1) if found else None


@dataclass
class Batch:
    """A batch script, read once; rules ask it."""

    path: str
    cwd: Path
    text: str
    lines: list[str]
    header: BatchHeader
    commands: list[ShellCommand]
    """Those of the batch shell itself, without the ones inside of substitutions."""
    exported_functions: set[str] = field(default_factory=set)
    assigned: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """For each variable the texts that it is given, with their lines."""
    sruns: list[Srun] = field(default_factory=list)

    raw: str = ""
    """The text with its own line ends."""
    _mistakes: dict[Scan, list[Mistake]] = field(default_factory=dict)

    def mistakes(self, scan: Scan) -> list[Mistake]:
        """What a scan of the script sees; each is run once."""
        if scan not in self._mistakes:
            self._mistakes[scan] = list(scan(self))
        return self._mistakes[scan]

    def everything(self) -> Iterator[ShellCommand]:
        """The commands that the batch shell runs, with those of substitutions; bodies of exported functions are not its own."""
        return (c for c in walk(self.commands) if c.function not in self.exported_functions)

    # --- the job ---

    def count(self, name: str) -> int | None:
        """A header option's whole number."""
        return whole(self.header.value(name))

    @property
    def nodes(self) -> int | None:
        """Nodes of the job, where the header says one number."""
        return self.count("nodes")

    @property
    def tasks_per_node(self) -> int | None:
        """Tasks of the job on each node, where the header says it; 1 is Slurm's own value."""
        each, total = self.count("ntasks-per-node"), self.count("ntasks")
        if each is not None:
            return each
        if total is None:
            return None if self.header.last("ntasks") or self.header.last("ntasks-per-node") else 1
        return -(-total // self.nodes) if self.nodes else total

    # --- variables ---

    def last_assignment(self, name: str, line: int) -> tuple[str, int] | None:
        """The text that a variable was given last in front of ``line`` (else anywhere), and where."""
        found = self.assigned.get(name, [])
        before = [match for match in found if match[1] < line]
        candidates = before or found
        return candidates[-1] if candidates else None

    def resolve(self, text: str, line: int, depth: int = 6) -> str:
        """``text`` with the variables put in that the script sets; the others stay as they are written."""
        if depth == 0 or "$" not in text or len(text) > MAX_EXPANDED:
            return text

        def put_in(match: re.Match[str]) -> str:
            found = self.last_assignment(match.group(1) or match.group(2), line)
            if found is None or (found[1] >= line and f"{match.group()}" in found[0]):
                return match.group() if match.group(3) is None else match.group(3)
            return self.resolve(found[0], found[1], depth - 1)

        return _VARIABLE.sub(put_in, text)[:MAX_EXPANDED]

    # --- arguments ---

    def streams(self) -> Iterator[list[Token]]:
        """The arguments of each command, of each array and of each text that may become a command."""
        for command in self.everything():
            if command.name in ("echo", "printf", "cat"):
                continue
            yield [token for word in command.words for token in pieces(word)]
            for assignment in command.assignments:
                texts = assignment.items if assignment.items is not None else [assignment.value]
                yield [token for text in texts for token in pieces(text)]
            if command.name in ("srun", "bash", "sh"):
                for heredoc in command.heredocs:
                    yield pieces(heredoc.body)

    def given(self, *names: str) -> Iterator[tuple[str, Token]]:
        """Each ``--name=value`` or ``--name value`` of the script; ``-`` and ``_`` are alike in ``names``."""
        for stream in self.streams():
            yield from options_in(stream, names)


def options_in(stream: list[Token], names: tuple[str, ...]) -> Iterator[tuple[str, Token]]:
    """The options of one list of arguments, with their values."""
    for at, token in enumerate(stream):
        if not token.text.startswith("-"):
            continue
        written, equals, value = token.text.lstrip("-").partition("=")
        name = written.replace("-", "_")
        if name not in names:
            continue
        if equals:
            yield name, Token(value.strip("'\""), token.line)
        elif at + 1 < len(stream):
            yield name, Token(stream[at + 1].text.strip("'\""), stream[at + 1].line)


def pieces(text: Text) -> list[Token]:
    """The parts of a text between blanks, outside of ``$(...)`` and ``${...}``."""
    found: list[Token] = []
    start, level = None, 0
    for at, char in enumerate(text.text):
        if char in "({":
            level += 1
        elif char in ")}":
            level = max(0, level - 1)
        if char.isspace() and level == 0:
            if start is not None:
                found.append(Token(text.text[start:at], text.line_at(start)))
            start = None
        elif start is None:
            start = at
    if start is not None:
        found.append(Token(text.text[start:], text.line_at(start)))
    return found


def whole(value: str | None) -> int | None:
    """A whole number written in decimal digits."""
    return int(value) if value is not None and re.fullmatch(r"[0-9]{1,9}", value) else None


def read_batch(raw: str, path: str, cwd: Path) -> Batch:
    """Read a script."""
    text = raw.lstrip("\ufeff").replace("\r\n", "\n")
    lines = text.split("\n")
    batch = Batch(path, cwd, text, lines, read_header(lines), parse(text), raw=raw)
    for command in walk(batch.commands):
        arguments = [word.text for word in command.words]
        if arguments[:1] in (["export"], ["declare"], ["typeset"]) and any(
            w.startswith("-") and "f" in w for w in arguments[1:2]
        ):
            batch.exported_functions.update(arguments[2:])
        for assignment in command.assignments:
            items = assignment.items
            text = " ".join(item.text for item in items) if items is not None else assignment.value.text
            batch.assigned.setdefault(assignment.name, []).append((text, assignment.line))
    batch.sruns = [found for command in batch.everything() if (found := _srun(batch, command))]
    return batch


def _srun(batch: Batch, command: ShellCommand) -> Srun | None:
    at = next((i for i, word in enumerate(command.words[:6]) if word.text.rsplit("/", 1)[-1] == "srun"), None)
    if at is None or any(
        word.text.rsplit("/", 1)[-1] not in _PREFIXES and not re.match(r"-|\w+=|[0-9.]+[smh]?$", word.text)
        for word in command.words[:at]
    ):
        return None
    srun = Srun(command, command.words[at].line)
    tokens: list[tuple[Token, bool]] = []
    for word in command.words[at + 1 :]:
        text = batch.resolve(word.text, word.line)
        cut = not word.quoted or re.fullmatch(r"\$\{\w+\[@\]\}", word.text) is not None
        parts = text.split() if cut and "$(" not in text else [text]
        tokens += [(Token(part, word.line), word.quoted) for part in parts]
    rest = _options(srun, [token for token, _ in tokens])
    srun.program = next((t.text.rsplit("/", 1)[-1] for t in rest), "")
    for token in rest:
        srun.payload += [Token(part, token.line) for part in token.text.split()] or [token]
    for heredoc in command.heredocs:
        srun.payload += pieces(heredoc.body)
    return srun


def _options(srun: Srun, tokens: list[Token]) -> list[Token]:
    """Take srun's own options from the front; returns the program and its arguments."""
    at = 0
    while at < len(tokens):
        text = tokens[at].text
        at += 1
        if text.startswith("--") and len(text) > 2:
            name, equals, value = text[2:].partition("=")
            if not equals and SRUN.get(name) == "required" and at < len(tokens):
                value, equals = tokens[at].text, "="
                at += 1
            srun.options[name.replace("cpu_bind", "cpu-bind")] = value if equals else None
        elif text.startswith("-") and len(text) > 1:
            name = SRUN_SHORT.get(text[1], text[1])
            value = text[2:].lstrip("=")
            if not value and SRUN.get(name) == "required" and at < len(tokens):
                value = tokens[at].text
                at += 1
            srun.options[name] = value or None
        elif text.startswith("$"):
            srun.opaque = True
        else:
            return tokens[at - 1 :]
    return []


def is_light(srun: Srun) -> bool:
    """Whether it only looks at the nodes or copies files."""
    if srun.program in ("bash", "sh"):
        named = [t.text for t in srun.payload[1:] if not t.text.startswith("-")]
        inner = [c.name.rsplit("/", 1)[-1] for c in walk(parse(" ".join(named))) if c.words]
        return bool(inner) and all(name in _LIGHT for name in inner)
    return srun.program in _LIGHT


def scanned(name: str, scan: Scan) -> Callable[[Callable[[], None]], Check]:
    """Makes a rule of a docstring: it says what ``scan``, which several rules share, sees of it."""

    def register(described: Callable[[], None]) -> Check:
        def look(batch: Batch) -> Iterator[Seen]:
            found = (mistake for mistake in batch.mistakes(scan) if mistake.rule == name)
            return (Seen(WARN, mistake.message, mistake.remedy, str(mistake.line)) for mistake in found)

        look.__doc__ = described.__doc__
        look.__module__ = described.__module__
        return rule(name, SCRIPT)(look)

    return register
