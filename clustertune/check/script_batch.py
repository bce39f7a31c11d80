"""What a batch script says about its job: the ``#SBATCH`` lines, the variables it sets, and what each srun starts.

Directives are read as sbatch reads them: only in front of the first command, only at a line's start. The tests compare this
with sbatch 22.05's own reading (``sbatch -vv``); its source: src/sbatch/opt.c, _opt_batch_script.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from clustertune.check.script_shell import ShellCommand, Text, parse, walk

# --- options --------------------------------------------------------------------------------------------------------------

_WITH_VALUE = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container container-id
core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude
export export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres
gres-flags hint input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
mem-per-gpu mincpus network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
ntasks-per-socket oom-kill-step open-mode output partition power prefer priority profile qos reservation segment signal
sockets-per-node switches thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey
wrap
"""
_WITHOUT_VALUE = """
contiguous help hold ignore-pbs no-requeue overcommit oversubscribe parsable quiet reboot requeue spread-job stepmgr
test-only usage use-min-nodes verbose version wait
"""
_MAYBE_VALUE = "exclusive get-user-env nice no-kill propagate resv-ports"
SBATCH = {
    **dict.fromkeys(_WITH_VALUE.split(), "required"),
    **dict.fromkeys(_WITHOUT_VALUE.split(), "none"),
    **dict.fromkeys(_MAYBE_VALUE.split(), "maybe"),
}
"""Each long option of sbatch, and whether a value follows."""
SHORT = {
    **{"A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus", "H": "hold"},
    **{"J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet", "S": "core-spec"},
    **{"V": "version", "W": "wait", "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error"},
    **{"h": "help", "i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks", "o": "output", "p": "partition"},
    **{"q": "qos", "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist", "x": "exclude"},
}
_SRUN_WITH_VALUE = """
cpu-bind cpu_bind epilog het-group jobid mem_bind mpi msg-timeout prolog relative slurmd-debug task-epilog task-prolog threads
tree-width wait container-image container-mounts container-name container-save container-workdir container-env
"""
_SRUN_WITHOUT_VALUE = """
disable-status exact external-launcher interactive label multi-prog overlap preserve-env unbuffered whole accel-bind
container-mount-home no-container-mount-home container-remap-root no-container-remap-root container-writable
no-container-entrypoint container-entrypoint
"""
SRUN = {
    **SBATCH,
    **dict.fromkeys(_SRUN_WITH_VALUE.split(), "required"),
    **dict.fromkeys(_SRUN_WITHOUT_VALUE.split(), "none"),
    **dict.fromkeys(("kill-on-bad-exit", "bcast", "send-libs", "pty"), "maybe"),
}
"""Each long option of srun, pyxis's (--container-...) included."""
SRUN_SHORT = {
    **SHORT,
    **{"E": "preserve-env", "I": "immediate", "K": "kill-on-bad-exit", "T": "threads", "W": "wait", "X": "disable-status"},
    **{"Z": "no-allocate", "l": "label", "r": "relative", "u": "unbuffered"},
}
_OTHER_WORDS = {
    **{"walltime": "time", "timelimit": "time", "memory": "mem", "mem-per-node": "mem", "queue": "partition"},
    **{"num-nodes": "nodes", "nnodes": "nodes", "num-tasks": "ntasks", "gpu": "gpus", "num-gpus": "gpus"},
    **{"workdir": "chdir", "log": "output", "logfile": "output", "name": "job-name", "email": "mail-user"},
    **{"cpus": "cpus-per-task"},
}
"""What other schedulers and old releases call an option."""


def full_name(name: str) -> str | None:
    """The option that ``--name`` means: itself, or the only one that begins so (getopt_long takes prefixes)."""
    found = [name] if name in SBATCH else [known for known in SBATCH if known.startswith(name)]
    return found[0] if len(found) == 1 else None


def nearest(name: str) -> str | None:
    """The option of sbatch that a misspelt one most likely means; None where it may be one of a site's own plugin."""
    lowered = name.lower().replace("_", "-")
    return _OTHER_WORDS.get(lowered) or next(iter(difflib.get_close_matches(lowered, list(SBATCH), n=1, cutoff=0.8)), None)


class _Given(NamedTuple):
    """An option as it is given."""

    written: str
    """With its dashes, without its value."""
    value: str | None
    used: int
    """How many words it took."""


def _given(words: Sequence[str], long: Mapping[str, str], short: Mapping[str, str]) -> list[_Given]:
    """The options in the first of ``words``, with a value from the second where one must follow; empty: it is no option."""
    word, following = words[0], words[1] if len(words) > 1 else None
    if word.startswith("--") and len(word) > 2:
        name, equals, value = word.partition("=")
        meant = full_name(name[2:]) if long is SBATCH else name[2:]  # sbatch takes a prefix of a name
        if equals or long.get(meant or "") != "required" or following is None:
            return [_Given(name, value if equals else None, 1)]
        return [_Given(name, following, 2)]
    found: list[_Given] = []
    for end in range(1, len(word)) if word.startswith("-") else ():
        kind, rest = long.get(short.get(word[end], ""), "none"), word[end + 1 :]
        if kind == "required" and not rest and following is not None:
            return [*found, _Given(f"-{word[end]}", following, 2)]
        found.append(_Given(f"-{word[end]}", rest or None if kind != "none" else None, 1))
        if kind != "none":
            break
    return found


# --- directives -----------------------------------------------------------------------------------------------------------

MAGIC = "#SBATCH"
_WORD = re.compile(r"""((?:'(?:\\.?|[^'\\])*(?:'|\Z)|"(?:\\.?|[^"\\])*(?:"|\Z)|\\|[^\s'"#\\])*)(#?)""")
"""A word of a directive, and the ``#`` that ends it and all that follows."""
_QUOTING = re.compile(r"""'((?:\\.?|[^'\\])*)(?:'|\Z)|"((?:\\.?|[^"\\])*)(?:"|\Z)|\\""")


@dataclass(frozen=True)
class DirectiveOption:
    """One option of a directive."""

    line: int
    written: str
    """As it stands there, such as ``-N`` or ``--nodes``."""
    name: str | None
    """Its long name; None where sbatch has none such."""
    value: str | None
    part: int
    """The component of a heterogeneous job, from 0."""


@dataclass
class BatchHeader:
    """What sbatch takes from the script."""

    options: list[DirectiveOption] = field(default_factory=list)
    lines: dict[int, str] = field(default_factory=dict)
    """The directives, each with what stands behind ``#SBATCH``."""
    words: list[tuple[str, int]] = field(default_factory=list)
    """The arguments, as sbatch cuts them, with their lines."""
    loose: list[tuple[str, int]] = field(default_factory=list)
    """Arguments that are not options, with their lines: sbatch refuses the script."""
    cut: list[tuple[str, int]] = field(default_factory=list)
    """Arguments that a ``#`` inside of them ends, with their lines."""
    end: int = 0
    """The line of the first command, behind which no directive counts; 0 where there is none."""

    def last(self, name: str) -> DirectiveOption | None:
        """The option that counts: the last of that name."""
        return next((option for option in reversed(self.options) if option.name == name and option.part == 0), None)

    def value(self, name: str) -> str | None:
        """Its value."""
        option = self.last(name)
        return option.value if option else None


def read_header(lines: Sequence[str]) -> BatchHeader:
    """The directives among the lines of a script (without line ends). Nothing is refused: rules look at what is odd."""
    header = BatchHeader()
    for number, line in enumerate(lines, 1):
        if line.startswith(MAGIC):
            text = header.lines[number] = line[len(MAGIC) :]
            for found in _WORD.finditer(text):
                if found[1]:
                    word = _QUOTING.sub(lambda m: re.sub(r"\\(.)", r"\1", m[1] or m[2] or ""), found[1])
                    header.words.append((word, number))
                    header.cut += [(word, number)] if found[2] else []
                if found[2]:
                    break
        elif line.strip() and not line.lstrip().startswith("#"):
            header.end = number
            break
    part = at = 0
    while at < len(header.words):
        word, line_of_word = header.words[at]
        given = _given([word for word, _ in header.words[at : at + 2]], SBATCH, SHORT)
        for option in given:
            name = full_name(option.written[2:]) if option.written.startswith("--") else SHORT.get(option.written[1:])
            header.options.append(DirectiveOption(line_of_word, option.written, name, option.value, part))
        if word in ("hetjob", "packjob"):
            part += 1
        elif not given:
            header.loose.append((word, line_of_word))
        at += given[-1].used if given else 1
    return header


# --- the script -----------------------------------------------------------------------------------------------------------

MAX_EXPANDED = 20_000
"""Characters of an expanded text; a script that doubles a variable again and again must not fill memory."""
SHELL_PREFIXES = ("exec", "time", "nohup", "timeout", "env", "stdbuf", "command", "nice", "eval")
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

    @property
    def is_light(self) -> bool:
        """Whether it only looks at the nodes or copies files."""
        if self.program not in ("bash", "sh"):
            return self.program in _LIGHT
        named = " ".join(token.text for token in self.payload[1:] if not token.text.startswith("-"))
        inner = [base_name(command.name) for command in walk(parse(named)) if command.words]
        return bool(inner) and all(name in _LIGHT for name in inner)


class Batch:
    """A batch script, read once; rules ask it."""

    def __init__(self, raw: str, path: str, cwd: Path) -> None:
        self.path, self.cwd, self.raw = path, cwd, raw
        text = raw.lstrip("\ufeff").replace("\r\n", "\n")
        self.lines = text.split("\n")
        self.header = read_header(self.lines)
        self.commands = parse(text)
        """Those of the batch shell itself, without the ones inside of substitutions."""
        self.assigned: dict[str, list[tuple[str, int]]] = {}
        """For each variable the texts that it is given, with their lines."""
        exported: set[str] = set()
        for command in walk(self.commands):
            words = command.arguments
            if words[:1] in (["export"], ["declare"], ["typeset"]) and any(w.startswith("-") and "f" in w for w in words[1:2]):
                exported.update(words[2:])
            for one in command.assignments:
                text = one.value.text if one.items is None else " ".join(item.text for item in one.items)
                self.assigned.setdefault(one.name, []).append((text, one.line))
        self.everything = [command for command in walk(self.commands) if command.function not in exported]
        """The commands that the batch shell runs, with those of substitutions; bodies of exported functions are not its own."""
        self.sruns = [found for command in self.everything if (found := _srun(self, command))]

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
        return next(reversed([one for one in found if one[1] < line] or found), None)

    def resolve(self, text: str, line: int, depth: int = 6) -> str:
        """``text`` with the variables put in that the script sets; the others stay as they are written."""
        if depth == 0 or "$" not in text or len(text) > MAX_EXPANDED:
            return text

        def put_in(match: re.Match[str]) -> str:
            found = self.last_assignment(match.group(1) or match.group(2), line)
            if found is None or (found[1] >= line and match.group() in found[0]):
                return match.group() if match.group(3) is None else match.group(3)
            return self.resolve(found[0], found[1], depth - 1)

        return _VARIABLE.sub(put_in, text)[:MAX_EXPANDED]

    # --- arguments ---

    def streams(self) -> Iterator[list[Token]]:
        """The arguments of each command, of each array and of each text that may become a command."""
        for command in self.everything:
            if command.name in ("echo", "printf", "cat"):
                continue
            for texts in (command.words, *(one.items or [one.value] for one in command.assignments)):
                yield [token for text in texts for token in pieces(text)]
            if command.name in ("srun", "bash", "sh"):
                yield from (pieces(heredoc.text) for heredoc in command.heredocs)

    def given(self, *names: str) -> Iterator[tuple[str, Token]]:
        """Each ``--name=value`` or ``--name value`` of the script; ``-`` and ``_`` are alike in ``names``."""
        for stream in self.streams():
            yield from options_in(stream, names)


def options_in(stream: list[Token], names: tuple[str, ...]) -> Iterator[tuple[str, Token]]:
    """The options of one list of arguments, with their values."""
    for token, following in zip(stream, [*stream[1:], None]):  # noqa: B905 - Python 3.8
        written, equals, value = token.text.lstrip("-").partition("=")
        name = written.replace("-", "_")
        if token.text.startswith("-") and name in names:
            if equals:
                yield name, Token(value.strip("'\""), token.line)
            elif following:
                yield name, Token(following.text.strip("'\""), following.line)


def pieces(text: Text) -> list[Token]:
    """The parts of a text between blanks, outside of ``$(...)`` and ``${...}``."""
    return [Token(text.text[begun:end], text.line_at(begun)) for begun, end in spans(text.text)]


def spans(text: str) -> Iterator[tuple[int, int]]:
    """Where the parts of a text between blanks begin and end, outside of ``$(...)`` and ``${...}``."""
    begun, level = 0, 0
    for at, char in enumerate(text + " "):
        level = level + 1 if char in "({" else max(0, level - 1) if char in ")}" else level
        if at == len(text) or (char.isspace() and level == 0):
            if at > begun:
                yield begun, at
            begun = at + 1


def base_name(path: str) -> str:
    """A program without its folder."""
    return path.rsplit("/", 1)[-1]


def whole(value: str | None) -> int | None:
    """A whole number written in decimal digits."""
    return int(value) if value is not None and re.fullmatch(r"[0-9]{1,9}", value) else None


def _srun(batch: Batch, command: ShellCommand) -> Srun | None:
    names = [base_name(name) for name in command.arguments]
    at = names.index("srun") if "srun" in names[:6] else None
    if at is None or any(
        name not in SHELL_PREFIXES and not re.match(r"-|\w+=|[0-9.]+[smh]?$", word)
        for name, word in zip(names[:at], command.arguments)  # noqa: B905 - Python 3.8
    ):
        return None
    srun = Srun(command, command.words[at].line)
    rest: list[Token] = []
    for word in command.words[at + 1 :]:
        text = batch.resolve(word.text, word.line)
        cut = not word.quoted or re.fullmatch(r"\$\{\w+\[@\]\}", word.text) is not None
        rest += [Token(part, word.line) for part in (text.split() if cut and "$(" not in text else [text])]
    while rest and rest[0].text.startswith(("-", "$")):  # its own options; then the program and its arguments
        given = _given([token.text for token in rest[:2]], SRUN, SRUN_SHORT)
        for option in given:
            name = option.written.lstrip("-")
            srun.options[SRUN_SHORT.get(name, name.replace("cpu_bind", "cpu-bind"))] = option.value
        if not given and rest[0].text == "-":
            break
        srun.opaque = srun.opaque or not given
        rest = rest[given[-1].used if given else 1 :]
    srun.program = base_name(rest[0].text) if rest else ""
    for token in rest:
        srun.payload += [Token(part, token.line) for part in token.text.split()] or [token]
    for heredoc in command.heredocs:
        srun.payload += pieces(heredoc.text)
    return srun
