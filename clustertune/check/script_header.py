"""Rules for the file itself and for what sbatch reads from it."""

from __future__ import annotations

import difflib
import getpass
import re
from collections.abc import Iterator
from pathlib import Path

from clustertune.check.script_batch import Batch, Mistake, scanned
from clustertune.check.script_directives import MAGIC, DirectiveOption, nearest, read_header
from clustertune.check.script_shell import walk

_NEAR = re.compile(r"(?P<lead>\s*)#(?P<gap>[ \t]*)(?P<word>[A-Za-z]{5,8})(?P<rest>[ \t]+-.*)")
_UNEXPANDED = re.compile(r"\$[\w{(]|`")
_PATTERN = re.compile(r"%(\d*)([%AaJjNnstuxb])")
_KNOWN_BEFORE = "xu"
"""File name patterns whose value is known when the job is submitted: the job's and the user's name."""


def check_file(batch: Batch) -> Iterator[Mistake]:
    """Line ends, byte order mark and the first line."""
    raw = batch.raw
    if raw.startswith("\ufeff"):
        yield Mistake(1, "bom", "the file begins with a byte order mark", f"sed -i '1s/^\\xef\\xbb\\xbf//' {batch.path}")
    if "\r\n" in raw:
        line = raw[: raw.index("\r\n")].count("\n") + 1
        yield Mistake(line, "crlf", "DOS line ends (\\r\\n)", f"sed -i 's/\\r$//' {batch.path}")
    first = batch.lines[0]
    if not first.startswith("#!"):
        yield Mistake(1, "shebang", "the first line is not #! and an interpreter", "make the first line: #!/usr/bin/env bash")
    elif not re.match(r"#![ \t]*/", first):
        yield Mistake(1, "shebang", f"{first.split()[0]!r} names no path of an interpreter", "#!/usr/bin/env bash")


def check_places(batch: Batch) -> Iterator[Mistake]:
    """Lines that look like directives and are none."""
    inside = {line for command in walk(batch.commands) for text in command.texts() for line in text.lines}
    inside |= {h.end for command in walk(batch.commands) for h in command.heredocs}
    for number, line in enumerate(batch.lines, 1):
        if number in inside:
            continue
        if line.startswith(MAGIC):
            if batch.header.end and number > batch.header.end:
                message = f"stands behind the first command (line {batch.header.end}): sbatch does not read it"
                yield Mistake(number, "late-directive", message, f"move it up, in front of line {batch.header.end}")
        elif (found := _NEAR.fullmatch(line)) and _is_near(found):
            wanted = f"{MAGIC}{found.group('rest')}"
            message = "is a comment for sbatch: a directive begins with #SBATCH at the start of the line"
            yield Mistake(number, "not-a-directive", message, f"write {wanted.rstrip()!r}; to switch it off: ##SBATCH")


def _is_near(found: re.Match[str]) -> bool:
    """Whether a comment was meant as a directive; a usage line (``# sbatch --nodes=2 job.sh``) is not."""
    word = found.group("word")
    if not difflib.get_close_matches(word.upper(), ["SBATCH"], cutoff=0.66) or (word.islower() and found.group("gap")):
        return False
    meant = read_header([MAGIC + found.group("rest")])
    return bool(meant.options) and not meant.loose and all(option.name for option in meant.options)


def check_options(batch: Batch) -> Iterator[Mistake]:
    """What the directives say."""
    header = batch.header
    for number, text in header.lines.items():
        written = text.split("#")[0]
        if _UNEXPANDED.search(written) or re.search(r"[=\s]~/", written):
            remedy = f"write the value, or give it when you submit: {' '.join(['sbatch', *written.split(), batch.path])}"
            yield Mistake(number, "variable-in-directive", f"sbatch does not expand this:{written.rstrip()}", remedy)
    for word, number in header.cut:
        yield Mistake(number, "cut-value", f"the # ends the value: it is {word!r}", "put the value in quotes")
    for word, number in header.loose:
        yield Mistake(
            number, "loose-word", f"{word!r} is not an option", "write --name=value, and quote values that hold blanks"
        )
    for option in header.options:
        if option.name is None:
            close = nearest(option.written.lstrip("-"))
            if close:
                message = f"sbatch has no option {option.written}"
                yield Mistake(option.line, "unknown-option", message, f"#SBATCH --{close}=...")
    seen: dict[tuple[int, str], DirectiveOption] = {}
    for option in header.options:
        if option.name is None:
            continue
        before = seen.setdefault((option.part, option.name), option)
        if before.value != option.value:
            message = f"--{option.name} is {option.value} here and {before.value} in line {before.line}"
            yield Mistake(option.line, "repeated-option", message, "keep one of the two")


def check_log_folder(batch: Batch) -> Iterator[Mistake]:
    """The folders of ``--output`` and ``--error``."""
    seen = set()
    for name in ("output", "error"):
        option = batch.header.last(name)
        value = option.value if option else None
        if option is None or not value or "/" not in value.strip("/") or _UNEXPANDED.search(value) or value.startswith("~"):
            continue
        folder = value.rpartition("/")[0]
        late = next((m for m in _PATTERN.finditer(folder) if m.group(2) not in _KNOWN_BEFORE + "%"), None)
        shown = _PATTERN.sub(lambda m: _known(batch, m), folder)
        if shown in seen:
            continue
        seen.add(shown)
        if late:
            message = f"--{name}: the folder {folder} has a name that is known only when the job runs ({late.group()})"
            remedy = f"#SBATCH --{name}=logs/%x-%j.log, and: mkdir -p logs"
            yield Mistake(option.line, "log-folder", message, remedy)
        elif not _is_folder(batch, shown):
            message = f"--{name}: there is no folder {shown} here; the job would fail at once, without a log"
            yield Mistake(option.line, "log-folder", message, f"mkdir -p {shown}")


def _known(batch: Batch, match: re.Match[str]) -> str:
    if match.group(2) == "x":
        return batch.header.value("job-name") or Path(batch.path).name
    if match.group(2) == "u":
        try:
            return getpass.getuser()
        except (KeyError, OSError):  # a user id without a name
            return "user"
    return "%" if match.group(2) == "%" else match.group()


def _is_folder(batch: Batch, folder: str) -> bool:
    """Whether it is there: from where sbatch is called, from ``--chdir``, or beside the script."""
    places = [batch.cwd / (batch.header.value("chdir") or "."), batch.cwd, batch.cwd / Path(batch.path).parent]
    try:
        return any((path / folder).is_dir() for path in places)
    except (OSError, ValueError):  # a name that cannot be one
        return False


def check_limits(batch: Batch) -> Iterator[Mistake]:
    """Time limit, requeue and the log that it must not empty."""
    header = batch.header
    if header.options and not (header.last("time") or header.last("time-min")):
        yield Mistake(max(header.lines), "no-time", "no --time", "#SBATCH --time=24:00:00")
    requeue, refused = header.last("requeue"), header.last("no-requeue")
    calls = [
        command.line
        for command in batch.everything()
        if command.name == "scontrol" and any(word.text == "requeue" for word in command.words[1:2])
    ]
    if calls and refused:
        message = f"the job asks for a requeue, line {refused.line} refuses it"
        yield Mistake(calls[0], "requeue-refused", message, "#SBATCH --requeue in the place of --no-requeue")
    if (requeue or calls) and not refused and not (header.value("open-mode") or "").startswith("a"):
        line = requeue.line if requeue else calls[0]
        yield Mistake(line, "log-truncated", "requeue without --open-mode=append", "#SBATCH --open-mode=append")


@scanned("crlf", check_file)
def crlf() -> None:
    r"""Lines end as on Linux.

    Why: sbatch refuses a script with DOS line ends, and bash reads the \r as part of the last word
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("bom", check_file)
def bom() -> None:
    """The file begins with its first character.

    Why: a byte order mark in front of #! hides it: sbatch refuses the script
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("shebang", check_file)
def shebang() -> None:
    """The first line names an interpreter.

    Why: the first line must be #! and the path of an interpreter, else sbatch refuses the script
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("not-a-directive", check_places)
def not_a_directive() -> None:
    """What looks like a directive is one.

    Why: only a line that begins with #SBATCH is one; anything else with a # is a comment, skipped without a message
    See: https://github.com/LambdaLabsML/distributed-training-guide/blob/main/03-job-launchers/job.sbatch
    """


@scanned("late-directive", check_places)
def late_directive() -> None:
    """Directives stand in front of the first command.

    Why: sbatch stops reading at the first command: what follows is skipped without a message
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("variable-in-directive", check_options)
def variable_in_directive() -> None:
    """Directives hold values, not variables.

    Why: sbatch reads directives without a shell: $NAME, $(...) and ~ stay as they are
    See: https://github.com/axolotl-ai-cloud/axolotl/pull/3038
    """


@scanned("unknown-option", check_options)
def unknown_option() -> None:
    """sbatch knows every option.

    Why: sbatch refuses a script with an option that it does not know
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("loose-word", check_options)
def loose_word() -> None:
    """Every word of a directive belongs to an option.

    Why: a word without -- in a directive: sbatch refuses the script
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("cut-value", check_options)
def cut_value() -> None:
    """No value holds a #.

    Why: in a directive # ends the line, also inside of a value
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("repeated-option", check_options)
def repeated_option() -> None:
    """Each option is given once.

    Why: of two directives for one option the last counts, without a message
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("log-folder", check_log_folder)
def log_folder() -> None:
    """The folders of --output and --error are there.

    Why: Slurm makes no folder for --output: the job fails at once, without a log that says so
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("no-time", check_limits)
def no_time() -> None:
    """The job has a time limit.

    Why: without --time the partition's limit holds: a long wait in the queue, or an end in the middle without warning
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("log-truncated", check_limits)
def log_truncated() -> None:
    """A requeue keeps the log.

    Why: a requeued job opens its log again: what led to the requeue is gone
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("requeue-refused", check_limits)
def requeue_refused() -> None:
    """A job that asks for a requeue allows it.

    Why: --no-requeue and scontrol requeue exclude each other
    See: https://slurm.schedmd.com/sbatch.html
    """
