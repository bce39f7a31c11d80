"""Mistakes in batch scripts that the queue would show late, or never. Most are rows of ``sbatch.yaml``; here is what they read.

A small reader, not a shell: directives by ``shlex``, logical lines with comments and quoted here-documents left out, variables
that the script itself sets put in, and the calls of srun. What only the caller's environment knows is not guessed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from clustertune.check.rule import SCRIPT, WARN, Check, Finding, Seen, rule_of
from clustertune.host.credentials import holds_secret, names_secret

MAX_BYTES = 256 * 1024
"""A batch script is some kB; Slurm itself refuses more than 4 MB (max_script_size)."""
_MOST = 20_000
"""Characters of an expanded text: a script that doubles a variable again and again must not fill memory."""
TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("sbatch.yaml").read_text(encoding="utf-8"))
"""What the reader must know of sbatch, srun and launchers, and the rules."""
SHORT, LONG, FLAGS = TABLE["short"], TABLE["long"].split(), TABLE["flags"].split()
_LIGHT = re.compile(rf"(\S*/)?({'|'.join(TABLE['light'].split())}|\[+)\b")
_STARTER = re.compile(rf"(\S*/)?({'|'.join(TABLE['starters'].split())})$")
_LAUNCHER, _PORT = re.compile(TABLE["launcher"]), re.compile(TABLE["port"], re.DOTALL)
_PIECE = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?<!\S)#[^\n]*|[^'"\\#]+|.""", re.DOTALL)
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
    found = []
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
        found.append(Option(full, value, line))
    return found, words


@dataclass
class Srun:
    """One call of srun: its own options, and the words that it starts."""

    line: int
    options: dict[str, str]
    words: list[str]

    @property
    def opaque(self) -> bool:
        """Whether a variable of the caller stands where options may stand."""
        return bool(self.words) and self.words[0].startswith("$")

    @property
    def light(self) -> bool:
        """Whether it only looks at the nodes or copies files."""
        words = self.words
        if words[:1] in (["bash"], ["sh"]) and len(words) > 2:
            return all(_LIGHT.match(part.strip()) for part in re.split(r"[;&|\n]+", words[-1]) if part.strip())
        return bool(words) and _LIGHT.fullmatch(words[0]) is not None

    @cached_property
    def text(self) -> str:
        """What it starts, as one line."""
        return " ".join(" ".join(self.words).split())

    @property
    def launcher(self) -> str:
        """torchrun, accelerate launch or deepspeed, where it starts one."""
        found = _LAUNCHER.search(self.text)
        return found[1] if found else ""

    @property
    def on_all(self) -> bool:
        """Whether it starts a program on all nodes of the job."""
        return not self.light and self.options.get("ntasks") != "1"


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
    inside: set[int] = field(default_factory=set)
    """The lines of all here-documents, and those behind the first of a logical line."""

    def __post_init__(self) -> None:
        self.rows = self.raw.lstrip("\ufeff").replace("\r\n", "\n").split("\n")
        part = 0
        for number, row in enumerate(self.rows, 1):
            if row.startswith("#SBATCH"):
                words = _words(row[7:], comments=True)
                part += words[:1] in (["hetjob"], ["packjob"])
                self.options += options_of(words, number)[0] if not part else []
            elif row.strip() and not row.lstrip().startswith("#"):
                self.first = number
                break
        self._read()
        self.given = {option.name: option for option in self.options}

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
            pieces = _PIECE.findall(held)
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
        return self.given[name].value if name in self.given else ""

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

    def tasks_of(self, srun: Srun) -> int:
        """Tasks that one srun starts on each node; 0 where it cannot be told."""
        own = srun.options
        if "ntasks-per-node" in own:
            return _number(own["ntasks-per-node"])
        if "ntasks" in own:
            nodes = _number(own["nodes"]) if "nodes" in own else self.count("nodes")
            return -(-_number(own["ntasks"]) // nodes) if nodes else 0
        return self.tasks

    # --- variables and commands ---

    @cached_property
    def assigned(self) -> dict[str, list[Assigned]]:
        """For each variable the texts that the script gives it."""
        found: dict[str, list[Assigned]] = {}
        for start, text in self.lines:
            for match in _ASSIGNED.finditer(text):
                value, line = match[2], start + text.count("\n", 0, match.start(2))
                plain = value[1:-1] if value[:1] in "'\"(" and value[-1:] in "'\")" else value
                found.setdefault(match[1], []).append(Assigned(plain, _shell(value), line))
        return found

    def last(self, name: str, line: int) -> Assigned | None:
        """What a variable was given last in front of ``line``, else anywhere."""
        found = self.assigned.get(name, [])
        return next(reversed([one for one in found if one.line < line] or found), None)

    def expand(self, text: str, line: int, depth: int = 4) -> str:
        """``text`` with the variables put in that the script sets; others stay, but for their defaults."""
        if not depth or "$" not in text or len(text) > _MOST:
            return text

        def put_in(match: re.Match[str]) -> str:
            one = self.last(match[1] or match[3], line)
            if one is None or match[0] in one.text:
                return match[0] if match[2] is None else match[2]
            return self.expand(one.text.replace("\n", " "), one.line, depth - 1)

        return _VARIABLE.sub(put_in, text)[:_MOST]

    @cached_property
    def commands(self) -> list[tuple[int, list[str]]]:
        """Line and words of each simple command, variables put in; those of substitutions stand behind their own."""
        found = []
        for start, text in self.lines:
            for piece in _substitutions(self.expand(text, start)):
                line = start
                for words in _commands(piece):
                    found.append((line + words.count("\n"), [word for word in words if word != "\n"]))
                    line += words.count("\n")
        return [(line, words) for line, words in found if words]

    @cached_property
    def sruns(self) -> list[Srun]:
        """The calls of srun."""
        found = []
        for line, words in self.commands:
            at = next((at for at, word in enumerate(words[:6]) if word.rpartition("/")[2] == "srun"), None)
            if at is not None and all(
                re.fullmatch(r"exec|time|nohup|timeout|env|eval|-\S*|\w+=.*|[\d.]+[smh]?", w) for w in words[:at]
            ):
                options, rest = options_of(words[at + 1 :], line)
                found.append(Srun(line, {one.name: one.value for one in options}, rest))
        return found

    @cached_property
    def body(self) -> str:
        """The lines without comments and quoted here-documents, each in its place."""
        rows = [""] * len(self.rows)
        for start, text in self.lines:
            for at, row in enumerate(text.split("\n")):
                rows[start - 1 + at] = row
        return "\n".join(rows)

    @cached_property
    def hits(self) -> dict[str, dict[int, dict[str, Any]]]:
        """By rule and line what its texts name in braces."""
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for reader in READERS:
            for name, line, words in reader(self):
                found.setdefault(name, {}).setdefault(line, words)
        return found

    @cached_property
    def conditions(self) -> dict[str, bool]:
        """What the rows of ``sbatch.yaml`` may ask for with ``when``."""
        has, body, signal = self.given.__contains__, self.body, self.value("signal")
        name = re.sub(r"^[RB]*:|@\d+$|^SIG", "", signal.upper()).replace("SIG", "")
        name = {"10": "USR1", "12": "USR2", "15": "TERM"}.get(name, name)
        found = {name: bool(re.search(pattern, body)) for name, pattern in TABLE["conditions"].items()}
        return found | {
            "several_nodes": self.count("nodes") != 1,
            "two_nodes": self.least_nodes > 1,
            "header": bool(self.options),
            "no_requeue": has("no-requeue"),
            "log_appends": self.value("open-mode").startswith("a"),
            "signal": bool(signal),
            "to_shell": signal.startswith(("B", "RB")),
            "trapped": bool(name and re.search(rf"\btrap\s+(?!-)\S.*\b(SIG)?{re.escape(name)}\b", body)),
            "all_nodes": any(one.on_all for one in self.sruns) or any(_STARTER.match(words[0]) for _, words in self.commands),
            "secrets": found["dotenv"] or any(map(names_secret, self.assigned)),
        }


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0


def _shell(text: str) -> str:
    """``text`` without what stands in single quotes or behind a backslash, which this shell does not expand."""
    return "".join(piece if piece[0] not in "'\\" else " " * len(piece) for piece in _PIECE.findall(text)).replace("\\$", "  ")


def _words(text: str, *, comments: bool = False) -> list[str]:
    try:
        return shlex.split(text, comments=comments)
    except ValueError:
        return text.partition("#")[0].split() if comments else text.split()


def _substitutions(text: str) -> list[str]:
    """``text`` with ``$(...)`` taken out, and what stood in each."""
    found = []
    for _ in range(50):
        match = re.search(r"\$?\(\(([^()]*)\)\)|\$\(([^()]*)\)|`([^`]*)`", text)
        if match is None:
            break
        found += [part for part in match.groups()[1:] if part]
        text = text[: match.start()] + "$@" + text[match.end() :]
    return [text, *found]


def _commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command; a line end stands as a word of its own."""
    reader = shlex.shlex(text.replace("\n", " \n "), posix=True, punctuation_chars=";&|()")
    reader.whitespace, reader.whitespace_split, reader.commenters = " \t\r", True, ""
    try:
        words = list(reader)
    except ValueError:
        words = text.split()
    held: list[str] = []
    for word in [*words, ";"]:
        if set(word) <= set(";&|()"):
            while held and held[0] in ("if", "then", "else", "elif", "do", "while", "until", "!", "{", "}", "\n"):
                held = held[1:]
            yield held
            held = []
        elif word == "\n":
            yield held
            held = []
        else:
            held.append(word)


# --- the rules ------------------------------------------------------------------------------------------------------------

Hit = tuple[str, int, dict[str, Any]]
"""Id of a rule, line, and what its texts name in braces."""


def _texts(script: Script) -> dict[str, Iterable[tuple[int, str]]]:
    """By kind the texts that patterns are held against, each with its first line."""
    rows = [(number, row) for number, row in enumerate(script.rows, 1)]
    free = [(number, row) for number, row in rows if number not in script.inside]
    return {
        "directive": [(number, row) for number, row in rows[: script.first or None] if row.startswith("#SBATCH")],
        "comment": [(number, row) for number, row in free if not row.startswith("#SBATCH")],
        "late": [(number, row) for number, row in free if 0 < script.first < number],
        "option": [(option.line, f"--{option.name}={option.value}") for option in script.options],
        "command": [(line, " ".join(" ".join(words).split())) for line, words in script.commands],
        "body": [(1, script.body)],
        "line": script.lines,
        "shell": [(start, _shell(text)) for start, text in script.lines],
        "expanded": [(start, script.expand(text, start)) for start, text in script.lines],
    }


def _matches(script: Script) -> Iterator[Hit]:
    """What the patterns of the rows find."""
    kinds = _texts(script)
    for name, pattern in ((row["id"], one) for row in TABLE["rules"] for one in row.get("patterns", ())):
        when = pattern.get("when", "").split()
        if any(script.conditions[word.lstrip("!")] == word.startswith("!") for word in when):
            continue
        kind = next(key for key in pattern if key in kinds)
        for start, text in kinds[kind]:
            match = re.search(pattern[kind], text, re.MULTILINE)
            if match and not ("unless" in pattern and re.search(pattern["unless"], text)):
                words = {"first": script.first, "text": match[0].strip(), **match.groupdict()}
                yield name, start + text.count("\n", 0, match.start()), words
                if pattern.get("once"):
                    break


def _header(script: Script) -> Iterator[Hit]:
    """What more than one line of the header says."""
    seen: dict[str, Option] = {}
    for option in script.options:
        before = seen.setdefault(option.name, option)
        if before.value != option.value:
            yield (
                "repeated-option",
                option.line,
                {"name": option.name, "value": option.value, "other": before.value, "at": before.line},
            )
    if script.options and not {"time", "time-min"} & set(script.given):
        yield "no-time", max(option.line for option in script.options), {}
    job, folders = script.value("job-name") or Path(script.path).name, set()
    for name in ("output", "error"):
        folder = script.value(name).rpartition("/")[0].replace("%x", job)
        if not folder.strip("./") or re.search(r"[$`]|^~|%u", folder) or folder in folders:
            continue
        folders.add(folder)
        late = re.search(r"%\d*[AaJjNnst]", folder)
        places = (script.cwd / (script.value("chdir") or "."), script.cwd, Path(script.path).parent)
        if late or not any(_is_folder(place / folder) for place in places):
            what = "has a name that is known only when the job runs" if late else "does not exist here"
            yield "log-folder", script.given[name].line, {"name": name, "folder": folder, "what": what}


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that cannot be one
        return False


def _early(script: Script) -> Iterator[Hit]:
    """A task's number that the batch shell puts in, in srun's own words or in a variable that these name."""
    one_node, stated = script.count("nodes") == 1, script.tasks == 1 and bool({"ntasks", "ntasks-per-node"} & set(script.given))
    if one_node and script.tasks == 1:
        return
    telling = ["SLURM_PROCID", *([] if one_node else ["SLURM_NODEID"]), *([] if stated else ["SLURM_LOCALID"])]
    wanted = re.compile(rf"(?<!\\)\$(?:\(\([^)]*?|\{{)?({'|'.join(telling)})\b", re.DOTALL)

    def of(text: str, line: int, depth: int = 3) -> Iterator[tuple[int, str]]:
        shell = _shell(text)
        for match in wanted.finditer(shell):
            yield line + shell.count("\n", 0, match.start(1)), match[1]
        for match in _VARIABLE.finditer(shell) if depth else ():
            for one in script.assigned.get(match[1] or match[3], ()):
                yield from of(one.shell, one.line, depth - 1)

    alone = {srun.line for srun in script.sruns if not srun.on_all}
    for start, text in script.lines:
        called = re.search(r"\bsrun\s", _shell(text))
        if called and start not in alone:
            after = text[called.start() :]
            yield from (
                ("expanded-too-early", line, {"name": name})
                for line, name in of(after, start + text.count("\n", 0, called.start()))
            )
        elif script.sruns and re.match(r"\s*export\s", text):
            yield from (("expanded-too-early", line, {"name": name}) for line, name in of(text, start, 0))
    yield from (("expanded-too-early", line, {"name": match[1]}) for line, row in script.here if (match := wanted.search(row)))


def _steps(script: Script) -> Iterator[Hit]:
    """What srun starts, and how often."""
    at = script.given.get("ntasks-per-node") or script.given.get("ntasks")
    for srun in script.sruns:
        own, launcher, text = srun.options, srun.launcher, srun.text
        tasks, nodes = script.tasks_of(srun), _number(own.get("nodes", "")) or script.least_nodes
        many = re.search(r"--(nproc.per.node|num.processes|num.gpus)[= ]+(\S+)", text)
        if launcher and tasks > 1 and many and many[2] != "1":
            yield "tasks-times-processes", at.line if at else srun.line, {"tasks": tasks, "launcher": launcher, "text": many[0]}
        hostfile = re.search(r"--\w*hostfile\b|\s-H\s", text) and not re.search(r"--no_ssh|multinode_launcher=standard", text)
        total = _number(own.get("ntasks", "")) or nodes * (tasks or 1)
        if launcher and hostfile and total > 1:
            yield "hostfile-under-srun", srun.line, {"launcher": launcher, "tasks": total}
        joined = (
            re.search(r"--nnodes[= ]+(?!1(:1)?(\s|$))", text)
            or "PET_NNODES" in script.assigned
            or re.search(r"(^|\s)[$@]", text)
        )
        if launcher.startswith("torch") and nodes > 1 and own.get("ntasks") != "1" and not joined:
            yield "nodes-not-joined", srun.line, {"nodes": nodes}
        if "gpus-per-task" in own and "gpu-bind" not in own and tasks > 1:
            yield "gpus-per-task", srun.line, {"tasks": tasks}
    if "gpus-per-task" in script.given and "gpu-bind" not in script.given and script.tasks > 1:
        yield "gpus-per-task", script.given["gpus-per-task"].line, {"tasks": script.tasks}
    if script.count("cpus-per-task") > 1 and "SRUN_CPUS_PER_TASK" not in script.assigned:
        for srun in script.sruns:
            bound = {"cpus-per-task", "cpus-per-gpu", "exact"} & set(srun.options) or "none" in srun.options.get("cpu-bind", "")
            if not bound and not srun.opaque and not srun.light and srun.words:
                yield "cpus-lost-in-srun", srun.line, {"cpus": script.value("cpus-per-task")}
                return


def _ports(script: Script) -> Iterator[Hit]:
    """A port of the rendezvous that is always the same."""
    for start, text in script.lines:
        for match in _PORT.finditer(text):
            line = start + text.count("\n", 0, match.start(1))
            value = re.match(r"""["']?(\$\(\(.*?\)\)|\$\([^)]*\)|[^\s"']+)""", match[1], re.DOTALL)
            named = re.fullmatch(r"\$\{?(\w+)\}?", value[1]) if value else None
            one = script.last(named[1], line) if named else None
            port, line = (one.text, one.line) if one else (value[1] if value else "", line)
            if default := re.fullmatch(r"\$\{\w+:?-(\d+)\}", port):
                port = default[1]
            if _number(port):
                yield "fixed-port", line, {"port": port}


def _secrets(script: Script) -> Iterator[Hit]:
    """Keys that stand in the script. None is repeated."""
    hint = re.compile(r"your|xxx|\.\.\.|change|example|placeholder|insert|dummy|none|true|false", re.IGNORECASE)
    for number, row in enumerate(script.rows, 1):
        if holds_secret(row):
            yield "secret-in-file", number, {}
    for name, values in script.assigned.items():
        for one in values if names_secret(name) else ():
            if re.fullmatch(r"[A-Za-z0-9_+=.:-]{8,}", one.text) and re.search(r"\d", one.text) and not hint.search(one.text):
                yield "secret-in-file", one.line, {}


READERS: tuple[Callable[[Script], Iterator[Hit]], ...] = (_matches, _header, _early, _steps, _ports, _secrets)


def _made(row: Mapping[str, Any]) -> Check:
    def look(script: Script) -> Iterator[Seen]:
        """What was found of one rule, once a line."""
        for line, words in script.hits.get(row["id"], {}).items():
            named = {"path": script.path, **words}
            yield Seen(WARN, row["found"].format(**named), row["fix"].format(**named), str(line))

    return Check(rule_of(row["id"], row), look, SCRIPT)


RULES = tuple(map(_made, TABLE["rules"]))
"""The rules, in the order of the table."""


def lint(text: str, path: str, cwd: Path | None = None) -> list[Finding]:
    """The mistakes in a batch script, by line. ``cwd`` is where sbatch would be called: log folders lie below it.

    Any text is taken; nothing is run, and no file is read but for the question whether a log folder exists.
    """
    script = Script(text, path, cwd or Path.cwd())
    return sorted((item for rule in RULES for item in rule(script)), key=lambda item: (int(item.where), item.rule))


def lint_file(path: str) -> list[Finding]:
    """As :func:`lint`, of a file. Raises OSError, and ValueError where it cannot be a script."""
    file = Path(path)
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes: no batch script")
    if not file.is_file():
        raise ValueError("is not a file")
    return lint(file.read_bytes().decode("utf-8", errors="replace"), path)
