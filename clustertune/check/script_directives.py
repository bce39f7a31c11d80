"""The ``#SBATCH`` lines of a script as sbatch reads them: only in front of the first command, only at a line's start.

Compared with sbatch 22.05's own reading (``sbatch -vv``) in the tests. Its source: src/sbatch/opt.c, _opt_batch_script.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
bcast cpu-bind cpu_bind epilog het-group jobid kill-on-bad-exit mem_bind mpi msg-timeout multi-prog prolog relative
send-libs slurmd-debug task-epilog task-prolog threads tree-width wait container-image container-mounts container-name
container-save container-workdir container-env
"""
_SRUN_WITHOUT_VALUE = """
disable-status exact external-launcher interactive label overlap preserve-env pty unbuffered whole accel-bind
container-mount-home no-container-mount-home container-remap-root no-container-remap-root container-writable
no-container-entrypoint container-entrypoint
"""
SRUN = {
    **SBATCH,
    **dict.fromkeys(_SRUN_WITH_VALUE.split(), "required"),
    **dict.fromkeys(_SRUN_WITHOUT_VALUE.split(), "none"),
    **{"kill-on-bad-exit": "maybe", "bcast": "maybe", "send-libs": "maybe", "multi-prog": "none", "pty": "maybe"},
}
"""Each long option of srun, pyxis's (--container-...) included."""

SRUN_SHORT = {
    **SHORT,
    **{"E": "preserve-env", "I": "immediate", "K": "kill-on-bad-exit", "T": "threads", "W": "wait", "X": "disable-status"},
    **{"Z": "no-allocate", "l": "label", "r": "relative", "u": "unbuffered"},
}

_OTHER_WORDS = {
    "walltime": "time",
    "timelimit": "time",
    "memory": "mem",
    "queue": "partition",
    "num-nodes": "nodes",
    "nnodes": "nodes",
    "num-tasks": "ntasks",
    "gpu": "gpus",
    "num-gpus": "gpus",
    "workdir": "chdir",
    "log": "output",
    "logfile": "output",
    "name": "job-name",
    "email": "mail-user",
    "cpus": "cpus-per-task",
    "mem-per-node": "mem",
}
"""What other schedulers and old releases call an option."""


def full_name(name: str) -> str | None:
    """The option that ``--name`` means: itself, or the only one that begins so (getopt_long takes prefixes)."""
    if name in SBATCH:
        return name
    found = [known for known in SBATCH if known.startswith(name)]
    return found[0] if len(found) == 1 else None


def nearest(name: str) -> str | None:
    """The option of sbatch that a misspelt one most likely means; None where it may be one of a site's own plugin."""
    lowered = name.lower().replace("_", "-")
    return _OTHER_WORDS.get(lowered) or _closest(lowered, SBATCH)


def _closest(name: str, known: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)
    return found[0] if found else None


MAGIC = "#SBATCH"


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
        found = [option for option in self.options if option.name == name and option.part == 0]
        return found[-1] if found else None

    def value(self, name: str) -> str | None:
        """Its value."""
        option = self.last(name)
        return option.value if option else None


def read_header(lines: Sequence[str]) -> BatchHeader:
    """The directives among the lines of a script (without line ends). Nothing is refused: rules look at what is odd."""
    header = BatchHeader()
    for number, line in enumerate(lines, 1):
        if line.startswith(MAGIC):
            header.lines[number] = line[len(MAGIC) :]
            _header_words(header, line[len(MAGIC) :], number)
        elif line.strip() and not line.lstrip().startswith("#"):
            header.end = number
            break
    _parse(header)
    return header


def _header_words(header: BatchHeader, text: str, number: int) -> None:
    at = 0
    while True:
        while at < len(text) and text[at].isspace():
            at += 1
        if at >= len(text) or text[at] == "#":
            return
        word, quote, at, commented = _word(text, at)
        header.words.append((word, number))
        if commented:
            header.cut.append((word, number))
            return
        if quote:
            return


def _word(text: str, at: int) -> tuple[str, str, int, bool]:
    """One argument from ``at`` on: its text, the quote left open, where it ends, and whether a ``#`` ended it."""
    word, quote = "", ""
    while at < len(text):
        char = text[at]
        if quote:
            if char == "\\" and at + 1 < len(text):
                at += 1
                word += text[at]
            elif char == quote:
                quote = ""
            else:
                word += char
        elif char in "'\"":
            quote = char
        elif char == "#":
            return word, quote, at, True
        elif char.isspace():
            break
        elif char != "\\":
            word += char
        at += 1
    return word, quote, at, False


def _parse(header: BatchHeader) -> None:
    part, at = 0, 0
    options = header.words
    while at < len(options):
        word, line = options[at]
        at += 1
        if word in ("hetjob", "packjob"):
            part += 1
        elif word.startswith("--") and len(word) > 2:
            written, equals, given = word[2:].partition("=")
            name = full_name(written)
            value: str | None = given if equals else None
            if value is None and SBATCH.get(name or "") == "required" and at < len(options):
                value = options[at][0]
                at += 1
            header.options.append(DirectiveOption(line, f"--{written}", name, value, part))
        elif word.startswith("-") and len(word) > 1:
            at = _short(header, word, line, part, at)
        else:
            header.loose.append((word, line))


def _short(header: BatchHeader, word: str, line: int, part: int, at: int) -> int:
    """A cluster of short options; returns where the next argument stands."""
    for end in range(1, len(word)):
        name = SHORT.get(word[end])
        kind = SBATCH.get(name or "", "none")
        rest = word[end + 1 :]
        if kind == "none":
            header.options.append(DirectiveOption(line, f"-{word[end]}", name, None, part))
            continue
        value = rest or None
        if not rest and kind == "required" and at < len(header.words):
            value = header.words[at][0]
            at += 1
        header.options.append(DirectiveOption(line, f"-{word[end]}", name, value, part))
        break
    return at
