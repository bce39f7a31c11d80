"""A batch script, read once: directives, logical lines, variables and commands.

A small reader, not a shell: directives by ``shlex``, logical lines with comments and quoted here-documents left out, variables
that the script itself sets put in, and the calls of srun. What only the caller's environment knows is not guessed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from clustertune.host.credentials import names_secret

_MOST = 20_000
"""Characters of an expanded text: a script that doubles a variable again and again must not fill memory."""
TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("sbatch.yaml").read_text(encoding="utf-8"))
"""What the reader must know of sbatch, srun and launchers, and the rules."""
SHORT, LONG, FLAGS = TABLE["short"], TABLE["long"].split(), TABLE["flags"].split()


@cache
def pattern_of(text: str) -> re.Pattern[str]:
    """A pattern of the table, with the macros in their angle brackets put in."""
    while macro := re.search(r"<([A-Z]+)>", text):
        text = text.replace(macro[0], TABLE["macros"][macro[1]])
    return re.compile(text, re.MULTILINE)


SRUN, ASIDE, STARTER = map(pattern_of, ("<SRUN>", "<ASIDE>", "^<STARTER>"))
PIECE = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?<!\S)#[^\n]*|[^'"\\#]+|.""", re.DOTALL)
_ASSIGNED = re.compile(TABLE["assigned"], re.DOTALL)
_VARIABLE = re.compile(r"(?<!\\)\$(?:\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}|([A-Za-z_]\w*))")


class Option(NamedTuple):
    """One option of a directive or of srun."""

    name: str
    value: str
    line: int


class Assigned(NamedTuple):
    """What a variable is given: the text, the part of it that the shell expands, and the line."""

    text: str
    shell: str
    line: int


def options_of(words: list[str], line: int) -> tuple[list[Option], list[str]]:
    """The options that ``words`` begin with, and the words behind them."""
    options = []
    while words and words[0].startswith("-") and words[0] != "-":
        written, words = words[0], words[1:]
        if written.startswith("--"):
            name, equals, value = written[2:].partition("=")
            full = name if name in LONG or len(name) < 4 else next((known for known in LONG if known.startswith(name)), name)
            takes = not equals and full not in FLAGS
        else:
            full, value = SHORT.get(written[1], written[1]), written[2:].lstrip("=")
            takes = not value and written[1] in SHORT
        if takes and words and not words[0].startswith("-"):
            value, words = words[0], words[1:]
        options.append(Option(full, value, line))
    return options, words


@dataclass
class Script:
    """A batch script, read once."""

    raw: str
    path: str
    cwd: Path
    options: list[Option] = field(default_factory=list)
    first: int = 0
    """The line of the first command, behind which no directive counts; 0: there is none."""
    lines: list[tuple[int, str]] = field(default_factory=list)
    """Number of the first line, and text, of each logical line; comments are blank, what the shell joins has its line ends."""
    here: list[tuple[int, str]] = field(default_factory=list)
    """The lines of here-documents that the shell expands."""
    hits: dict[str, dict[int, dict[str, Any]]] | None = None
    """By rule and line what its texts name in braces; None until ``sbatch.py`` has read it."""
    inside: set[int] = field(default_factory=set)
    """The lines of all here-documents, and those behind the first of a logical line."""

    def __post_init__(self) -> None:
        self.rows = self.raw.lstrip("\ufeff").replace("\r\n", "\n").split("\n")
        part = 0
        for number, row in enumerate(self.rows, 1):
            if row.startswith("#SBATCH"):
                words = _words(row[7:])
                part += words[:1] in (["hetjob"], ["packjob"])
                self.options += options_of(words, number)[0] if not part else []
            elif row.strip() and not row.lstrip().startswith("#"):
                self.first = number
                break
        self._read()
        self.directives = {option.name: option for option in self.options}

    def _read(self) -> None:
        held, start, end, quoted = "", 0, "", False
        for number, row in enumerate(self.rows, 1):
            if end:
                self.inside.add(number)
                end, body = ("", False) if row.strip() == end else (end, not quoted)
                self.here += [(number, row)] if body else []
                continue
            if held:
                self.inside.add(number)
            held, start = f"{held}\n{row}" if held else row, start or number
            pieces = PIECE.findall(held)
            text = "".join(" " if piece[0] == "#" else piece for piece in pieces)
            closed = not ({"'", '"'} & set(pieces)) and not re.search(r"(?:^|\s)\w+=\([^)]*\Z", text)
            if (text.endswith("\\") or not closed) and number - start < 200 and number < len(self.rows):
                held = held[:-1] if text.endswith("\\") and held.endswith("\\") else held
                continue
            self.lines.append((start, text))
            shown = re.search(r"(?<!<)<<-?\s*(['\"\\]?)(\w+)", text)
            end, quoted = (shown[2], bool(shown[1])) if shown else ("", False)
            held, start = "", 0

    # --- the job ---

    def value(self, name: str) -> str:
        """An option of the header; empty where it is not given."""
        return self.directives[name].value if name in self.directives else ""

    def count(self, name: str) -> int:
        """A whole number of the header; 0 where it says none."""
        return _number(self.value(name))

    @property
    def least_nodes(self) -> int:
        """The least number of nodes that the header asks for; 1 where it does not say more."""
        stated, each = re.match(r"\d{1,6}", self.value("nodes")), self.count("ntasks-per-node")
        return int(stated[0]) if stated else self.count("ntasks") // each if each and self.count("ntasks") else 1

    @property
    def tasks(self) -> int:
        """Tasks on each node, where the header says it; 1 is Slurm's own value."""
        total = self.count("ntasks")
        return self.count("ntasks-per-node") or (-(-total // max(1, self.count("nodes"))) if total else 1)

    # --- variables and commands ---

    @cached_property
    def assigned(self) -> dict[str, list[Assigned]]:
        """For each variable the texts that the script gives it."""
        assignments: dict[str, list[Assigned]] = {}
        for start, text in self.lines:
            for match in _ASSIGNED.finditer(text):
                value, line = match[2], start + text.count("\n", 0, match.start(2))
                plain = value[1:-1] if value[:1] in "'\"(" and value[-1:] in "'\")" else value
                assignments.setdefault(match[1], []).append(Assigned(plain, unquoted(value), line))
        return assignments

    def last(self, name: str, line: int) -> Assigned | None:
        """What a variable was given last in front of ``line``, else anywhere."""
        assigned = self.assigned.get(name, [])
        return next(reversed([one for one in assigned if one.line < line] or assigned), None)

    def expand(self, text: str, line: int, depth: int = 4, *, early: bool = False) -> str:
        """``text`` with the variables put in that the script sets; others stay, but for their defaults.

        ``early``: of a value only the part that the batch shell expanded when it was set.
        """
        if not depth or "$" not in text or len(text) > _MOST:
            return text

        def put_in(match: re.Match[str]) -> str:
            one = self.last(match[1] or match[3], line)
            if one is None or match[0] in one.text:
                return match[0] if match[2] is None else match[2]
            return self.expand((one.shell if early else one.text).replace("\n", " "), one.line, depth - 1, early=early)

        return _VARIABLE.sub(put_in, text)[:_MOST]

    @cached_property
    def commands(self) -> list[tuple[int, str]]:
        """Line and text of each simple command, variables put in; those of substitutions stand behind their own."""
        parts: list[tuple[int, list[str]]] = []
        for start, text in self.lines:
            for piece in substitutions(self.expand(text, start)):
                line = start
                for words in split_commands(piece):
                    begins = next((at for at, word in enumerate(words) if word != "\n"), 0)
                    parts.append((line + begins, [word for word in words if word != "\n"]))
                    line += words.count("\n")
        return [(line, " ".join(" ".join(words).split())) for line, words in parts if words]

    @cached_property
    def body(self) -> str:
        """The lines without comments and quoted here-documents, each in its place."""
        rows = [""] * len(self.rows)
        for start, text in self.lines:
            for at, row in enumerate(text.split("\n")):
                rows[start - 1 + at] = row
        return "\n".join(rows)

    @cached_property
    def conditions(self) -> dict[str, bool]:
        """What the rows of ``sbatch.yaml`` may ask for with ``when``."""
        has, body, signal = self.directives.__contains__, self.body, self.value("signal")
        commands = [text for _, text in self.commands]
        name = re.sub(r"^[RB]*:|@\d+$|^SIG", "", signal.upper()).replace("SIG", "")
        name = {"10": "USR1", "12": "USR2", "15": "TERM"}.get(name, name)
        conditions = {name: bool(re.search(pattern, body)) for name, pattern in TABLE["conditions"].items()}
        return conditions | {
            "several_nodes": self._several_nodes(commands),
            "exclusive": any(one.name == "exclusive" and one.value in ("", "exclusive") for one in self.options),
            "meets_by_id": self._meets_by_id(body),
            "two_nodes": self.least_nodes > 1,
            "header": bool(self.options),
            "no_requeue": has("no-requeue"),
            "log_appends": self.value("open-mode").startswith("a"),
            "signal": bool(signal),
            "to_shell": signal.startswith(("B", "RB")),
            "trapped": bool(name and re.search(rf"\btrap\s+(?!-)\S.*\b(SIG)?{re.escape(name)}\b", body)),
            "several_tasks": self.tasks > 1,
            "one_task": self.tasks == 1 and (self.count("nodes") == 1 or has("ntasks") or has("ntasks-per-node")),
            "many": self.least_nodes * self.tasks > 1,
            "gpu_bind": has("gpu-bind"),
            "many_cpus": self.count("cpus-per-task") > 1,
            "srun_cpus": "SRUN_CPUS_PER_TASK" in self.assigned,
            "pet_nnodes": "PET_NNODES" in self.assigned,
            "calls_srun": any(map(SRUN.search, commands)),
            "all_nodes": any(STARTER.search(one) or (SRUN.search(one) and not ASIDE.search(one)) for _, one in self.commands),
            "secrets": conditions["dotenv"] or any(map(names_secret, self.assigned)),
        }

    def _several_nodes(self, commands: list[str]) -> bool:
        """Whether the job may have several nodes: one task, or a script that reaches no other node, has one."""
        if "nodes" in self.directives:
            return self.count("nodes") != 1
        reaches = any(SRUN.search(one) or STARTER.search(one) for one in commands) or "SLURM_N" in self.raw
        return reaches and self.count("ntasks") != 1

    def _meets_by_id(self, body: str) -> bool:
        """Whether its ranks meet in a c10d rendezvous that no other job joins: its store serves several jobs at one port."""
        backend = re.search(r"--rdzv[-_]backend[= ]+[\"']?c10d|PET_RDZV_BACKEND=[\"']?c10d", body)
        named = re.search(r"(?:--rdzv[-_]id[= ]+|RDZV_ID=)[\"']?\S*\$", body)
        return backend is not None and (self.least_nodes > 1 or named is not None)


_IN_FRONT = ("if", "then", "else", "elif", "do", "while", "until", "!", "{", "}", "\n")


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0


def unquoted(text: str) -> str:
    """``text`` without what stands in single quotes or behind a backslash, which this shell does not expand."""
    return "".join(piece if piece[0] not in "'\\" else " " * len(piece) for piece in PIECE.findall(text)).replace("\\$", "  ")


def _words(text: str) -> list[str]:
    """The words of a directive, without a comment behind them."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.partition("#")[0].split()


def substitutions(text: str) -> list[str]:
    """``text`` with ``$(...)`` taken out, and what stood in each."""
    parts = []
    for _ in range(50):
        match = re.search(r"\$?\(\(([^()]*)\)\)|\$\(([^()]*)\)|`([^`]*)`", text)
        if match is None:
            break
        parts += [part for part in match.groups()[1:] if part]
        text = text[: match.start()] + "$@" + text[match.end() :]
    return [text, *parts]


def split_commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command; a line end, which a backslash or brackets let it go on behind, as a word of its own."""
    reader = shlex.shlex(text.replace("\n", " \n "), posix=True, punctuation_chars=";&|()")
    reader.whitespace, reader.whitespace_split, reader.commenters = " \t\r", True, ""
    try:
        words = list(reader)
    except ValueError:
        words = text.split()
    held: list[str] = []
    for word in [*words, ";"]:
        if set(word) <= set(";&|()"):
            begins = next((at for at, one in enumerate(held) if one not in _IN_FRONT), len(held))
            yield [one for one in held[:begins] if one == "\n"] + held[begins:]
            held = []
        else:
            held.append(word)
