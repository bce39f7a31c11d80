"""The rules of batch scripts: the file and its directives, secrets, signals, tasks and their rendezvous.

Every one is a warning at a line. A finding never repeats a token or a key.
"""

from __future__ import annotations

import difflib
import getpass
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from clustertune.check.rule import WARN, Seen
from clustertune.check.script_batch import (
    MAGIC,
    SHELL_PREFIXES,
    Batch,
    DirectiveOption,
    Srun,
    Token,
    base_name,
    nearest,
    options_in,
    read_header,
    spans,
    whole,
)
from clustertune.check.script_shell import DECLARING, Reference, ShellCommand, Text, parse, walk
from clustertune.host.credentials import holds_secret, names_secret


def _at(line: int, found: str, fix: str) -> Seen:
    return Seen(WARN, found, fix, str(line))


# --- the file -------------------------------------------------------------------------------------------------------------


def crlf(batch: Batch) -> Iterator[Seen]:
    r"""Lines end as on Linux.

    Why: sbatch refuses a script with DOS line ends, and bash reads the \r as part of the last word
    See: https://slurm.schedmd.com/sbatch.html
    """
    before, ended, _ = batch.raw.partition("\r\n")
    if ended:
        yield _at(before.count("\n") + 1, "DOS line ends (\\r\\n)", f"sed -i 's/\\r$//' {batch.path}")


def bom(batch: Batch) -> Iterator[Seen]:
    """The file begins with its first character.

    Why: a byte order mark in front of #! hides it: sbatch refuses the script
    See: https://slurm.schedmd.com/sbatch.html
    """
    if batch.raw.startswith("\ufeff"):
        yield _at(1, "the file begins with a byte order mark", f"sed -i '1s/^\\xef\\xbb\\xbf//' {batch.path}")


def shebang(batch: Batch) -> Iterator[Seen]:
    """The first line names an interpreter.

    Why: the first line must be #! and the path of an interpreter, else sbatch refuses the script
    See: https://slurm.schedmd.com/sbatch.html
    """
    first = batch.lines[0]
    if not first.startswith("#!"):
        yield _at(1, "the first line is not #! and an interpreter", "make the first line: #!/usr/bin/env bash")
    elif not re.match(r"#![ \t]*/", first):
        yield _at(1, f"{first.split()[0]!r} names no path of an interpreter", "#!/usr/bin/env bash")


_NEAR = re.compile(r"(?P<lead>\s*)#(?P<gap>[ \t]*)(?P<word>[A-Za-z]{5,8})(?P<rest>[ \t]+-.*)")


def _outside(batch: Batch) -> Iterator[tuple[int, str]]:
    """The lines, with their numbers, in which no word or here-document of a command stands."""
    commands = list(walk(batch.commands))
    inside = {line for command in commands for text in command.texts() for line in text.lines}
    inside |= {heredoc.end for command in commands for heredoc in command.heredocs}
    return ((number, line) for number, line in enumerate(batch.lines, 1) if number not in inside)


def not_a_directive(batch: Batch) -> Iterator[Seen]:
    """What looks like a directive is one.

    Why: only a line that begins with #SBATCH is one; anything else with a # is a comment, skipped without a message
    See: https://github.com/LambdaLabsML/distributed-training-guide/blob/main/03-job-launchers/job.sbatch
    """
    for number, line in _outside(batch):
        found = None if line.startswith(MAGIC) else _NEAR.fullmatch(line)
        # A usage line (``# sbatch --nodes=2 job.sh``) is meant as a comment.
        if not found or (found["word"].islower() and found["gap"]):
            continue
        wanted = f"{MAGIC}{found['rest']}"
        meant = read_header([wanted])
        near = difflib.get_close_matches(found["word"].upper(), ["SBATCH"], cutoff=0.66)
        if near and meant.options and not meant.loose and all(option.name for option in meant.options):
            message = "is a comment for sbatch: a directive begins with #SBATCH at the start of the line"
            yield _at(number, message, f"write {wanted.rstrip()!r}; to switch it off: ##SBATCH")


def late_directive(batch: Batch) -> Iterator[Seen]:
    """Directives stand in front of the first command.

    Why: sbatch stops reading at the first command: what follows is skipped without a message
    See: https://slurm.schedmd.com/sbatch.html
    """
    end = batch.header.end
    for number, line in _outside(batch) if end else ():
        if line.startswith(MAGIC) and number > end:
            message = f"stands behind the first command (line {end}): sbatch does not read it"
            yield _at(number, message, f"move it up, in front of line {end}")


_UNEXPANDED = re.compile(r"\$[\w{(]|`")


def variable_in_directive(batch: Batch) -> Iterator[Seen]:
    """Directives hold values, not variables.

    Why: sbatch reads directives without a shell: $NAME, $(...) and ~ stay as they are
    See: https://github.com/axolotl-ai-cloud/axolotl/pull/3038
    """
    for number, text in batch.header.lines.items():
        written = text.split("#")[0]
        if _UNEXPANDED.search(written) or re.search(r"[=\s]~/", written):
            remedy = f"write the value, or give it when you submit: {' '.join(['sbatch', *written.split(), batch.path])}"
            yield _at(number, f"sbatch does not expand this:{written.rstrip()}", remedy)


def unknown_option(batch: Batch) -> Iterator[Seen]:
    """sbatch knows every option.

    Why: sbatch refuses a script with an option that it does not know
    See: https://slurm.schedmd.com/sbatch.html
    """
    for option in batch.header.options:
        if option.name is None and (close := nearest(option.written.lstrip("-"))):
            yield _at(option.line, f"sbatch has no option {option.written}", f"#SBATCH --{close}=...")


def loose_word(batch: Batch) -> Iterator[Seen]:
    """Every word of a directive belongs to an option.

    Why: a word without -- in a directive: sbatch refuses the script
    See: https://slurm.schedmd.com/sbatch.html
    """
    for word, number in batch.header.loose:
        yield _at(number, f"{word!r} is not an option", "write --name=value, and quote values that hold blanks")


def cut_value(batch: Batch) -> Iterator[Seen]:
    """No value holds a #.

    Why: in a directive # ends the line, also inside of a value
    See: https://slurm.schedmd.com/sbatch.html
    """
    for word, number in batch.header.cut:
        yield _at(number, f"the # ends the value: it is {word!r}", "put the value in quotes")


def repeated_option(batch: Batch) -> Iterator[Seen]:
    """Each option is given once.

    Why: of two directives for one option the last counts, without a message
    See: https://slurm.schedmd.com/sbatch.html
    """
    seen: dict[tuple[int, str], DirectiveOption] = {}
    for option in batch.header.options:
        before = seen.setdefault((option.part, option.name), option) if option.name else option
        if before.value != option.value:
            message = f"--{option.name} is {option.value} here and {before.value} in line {before.line}"
            yield _at(option.line, message, "keep one of the two")


_PATTERN = re.compile(r"%(\d*)([%AaJjNnstuxb])")
_KNOWN_BEFORE = "xu%"
"""File name patterns whose value is known when the job is submitted: the job's and the user's name."""


def log_folder(batch: Batch) -> Iterator[Seen]:
    """The folders of --output and --error are there.

    Why: Slurm makes no folder for --output: the job fails at once, without a log that says so
    See: https://slurm.schedmd.com/sbatch.html
    """
    chdir, seen = batch.header.value("chdir") or ".", set()
    for option in (batch.header.last("output"), batch.header.last("error")):
        value = (option.value if option else None) or ""
        folder = value.rpartition("/")[0]
        shown = _PATTERN.sub(lambda found: _known(batch, found), folder)
        if option is None or "/" not in value.strip("/") or _UNEXPANDED.search(value) or value.startswith("~") or shown in seen:
            continue
        seen.add(shown)
        if late := next((found for found in _PATTERN.finditer(folder) if found[2] not in _KNOWN_BEFORE), None):
            message = f"--{option.name}: the folder {folder} has a name that is known only when the job runs ({late[0]})"
            yield _at(option.line, message, f"#SBATCH --{option.name}=logs/%x-%j.log, and: mkdir -p logs")
            continue
        try:  # from where sbatch is called, from --chdir, or beside the script
            there = any((batch.cwd / place / shown).is_dir() for place in (chdir, ".", Path(batch.path).parent))
        except (OSError, ValueError):  # a name that cannot be one
            there = False
        if not there:
            message = f"--{option.name}: there is no folder {shown} here; the job would fail at once, without a log"
            yield _at(option.line, message, f"mkdir -p {shown}")


def _known(batch: Batch, found: re.Match[str]) -> str:
    if found[2] == "x":
        return batch.header.value("job-name") or Path(batch.path).name
    if found[2] == "u":
        try:
            return getpass.getuser()
        except (KeyError, OSError):  # a user id without a name
            return "user"
    return "%" if found[2] == "%" else found[0]


def no_time(batch: Batch) -> Iterator[Seen]:
    """The job has a time limit.

    Why: without --time the partition's limit holds: a long wait in the queue, or an end in the middle without warning
    See: https://slurm.schedmd.com/sbatch.html
    """
    header = batch.header
    if header.options and not (header.last("time") or header.last("time-min")):
        yield _at(max(header.lines), "no --time", "#SBATCH --time=24:00:00")


def _requeues(batch: Batch) -> list[int]:
    """The lines in which the job asks for a requeue of its own."""
    return [one.line for one in batch.everything if one.name == "scontrol" and one.arguments[1:2] == ["requeue"]]


def log_truncated(batch: Batch) -> Iterator[Seen]:
    """A requeue keeps the log.

    Why: a requeued job opens its log again: what led to the requeue is gone
    See: https://slurm.schedmd.com/sbatch.html
    """
    header, calls = batch.header, _requeues(batch)
    requeue, appends = header.last("requeue"), (header.value("open-mode") or "").startswith("a")
    if (requeue or calls) and not header.last("no-requeue") and not appends:
        line = requeue.line if requeue else calls[0]
        yield _at(line, "requeue without --open-mode=append", "#SBATCH --open-mode=append")


def requeue_refused(batch: Batch) -> Iterator[Seen]:
    """A job that asks for a requeue allows it.

    Why: --no-requeue and scontrol requeue exclude each other
    See: https://slurm.schedmd.com/sbatch.html
    """
    calls, refused = _requeues(batch), batch.header.last("no-requeue")
    if calls and refused:
        message = f"the job asks for a requeue, line {refused.line} refuses it"
        yield _at(calls[0], message, "#SBATCH --requeue in the place of --no-requeue")


# --- secrets --------------------------------------------------------------------------------------------------------------

_OPTIONS = re.compile(r"--(?:(?:hub|hf|push_to_hub|auth|access)_)?token|--(?:wandb_)?(?:api_?)?key|--password|--secret")
_GIVEN = re.compile(r"(?:^|[,\s])([A-Za-z_]\w*)=([^,\s]+)")
_DOTENV = re.compile(r"(?:^|/)(?:\.env(?:\.\w+)?|secrets?(?:\.env|\.sh)?)$")
_HINT = re.compile(r"your|xxx|\.\.\.|change|example|placeholder|insert|<|>|dummy|none|true|false", re.IGNORECASE)
_HARMLESS = (*DECLARING, "unset", "read", "[", "[[", "test", ":")
_READ = 'HF_TOKEN=$(sed -n "s/^HF_TOKEN=//p" .env); export HF_TOKEN'


def _looks_real(value: str) -> bool:
    """A literal that is a key, and neither a reference, a path, nor a hint to put one in."""
    literal = re.fullmatch(r"[A-Za-z0-9_+=.:-]{8,}", value) and re.search(r"\d", value) and not _HINT.search(value)
    return holds_secret(value) or bool(literal)


def _written(batch: Batch) -> list[int]:
    """The lines that hold a key."""
    found = [number for number, line in enumerate(batch.lines, 1) if holds_secret(line)]
    assigned = [one for command in batch.everything for one in command.assignments if names_secret(one.name)]
    return list(dict.fromkeys([*found, *(one.line for one in assigned if _looks_real(one.value.text))]))


def _names(command: ShellCommand) -> list[str]:
    """Secret variables whose value a command's own words hold."""
    return [
        reference.name
        for word in command.words
        for reference in word.references
        if names_secret(reference.name) and not re.search(r"\$\{(?:#|\w+(?:\[\w\])?:?\+)", word.text)
    ]


def _reads_dotenv(command: ShellCommand) -> bool:
    arguments = command.arguments
    if arguments[:1] in (["source"], ["."]) and len(arguments) > 1:
        return bool(_DOTENV.search(arguments[1]))
    inner = [name for word in command.words for one in word.inner for name in one.arguments]
    return arguments[:1] == ["export"] and any(map(_DOTENV.search, inner))


def secret_in_file(batch: Batch) -> Iterator[Seen]:
    """No secret stands in the script.

    Why: a secret in a script is kept by Slurm (scontrol write batch_script) and by git
    See: https://slurm.schedmd.com/sbatch.html
    """
    remedy = f"revoke it, and read it from a file of mode 0600: {_READ}"
    return (_at(line, "a key stands in the script (not repeated here)", remedy) for line in _written(batch))


def secret_in_export(batch: Batch) -> Iterator[Seen]:
    """No secret stands in --export.

    Why: the value stands in the job's record or on a command line, which others can read
    See: https://slurm.schedmd.com/sbatch.html
    """
    values = [(option.line, option.value) for option in batch.header.options if option.name == "export"]
    for line, value in values + [(srun.line, srun.options.get("export")) for srun in batch.sruns]:
        for name in [given[1] for given in _GIVEN.finditer(value or "") if names_secret(given[1])]:
            yield _at(line, f"--export with the value of {name}", f"name it only, without a value: --export=ALL,{name}")


def secret_in_arguments(batch: Batch) -> Iterator[Seen]:
    """No secret stands on a command line.

    Why: every user of the node reads command lines (ps)
    See: https://man7.org/linux/man-pages/man5/proc_pid_cmdline.5.html
    """
    told = _written(batch)  # once is enough
    remedy = "leave it out: the program reads it from its environment (HF_TOKEN, WANDB_API_KEY)"
    for command in batch.everything:
        arguments, names = command.arguments, _names(command)
        if not arguments or arguments[0] in (*_HARMLESS, "echo", "printf"):
            continue
        found = [(command.line, f"{arguments[0]} with the value of {names[0]}")] if names else []
        for word, following in zip(command.words, [*arguments[1:], ""]):  # noqa: B905 - Python 3.8
            option, equals, value = word.text.partition("=")
            given = value if equals else following
            known = option.startswith("--") and _OPTIONS.fullmatch("--" + option[2:].replace("-", "_"))
            if known and (_looks_real(given) or "$" in given):
                found = [(word.line, f"{option} with a value")]
                break
        yield from (_at(line, message, remedy) for line, message in found if line not in told)


def secret_in_log(batch: Batch) -> Iterator[Seen]:
    """No secret is written into the log.

    Why: the job's log is often readable by all, and is sent along with questions
    See: https://slurm.schedmd.com/sbatch.html
    """
    first, commands = batch.lines[0], batch.everything
    traced = int(first.startswith("#!") and bool(re.search(r"\s-\w*x", first)))
    holds = any(map(names_secret, batch.assigned)) or any(_reads_dotenv(one) or _names(one) for one in commands)
    for command, following in zip(commands, [*commands[1:], None]):  # noqa: B905 - Python 3.8
        arguments, names = command.arguments, _names(command)
        flags = " ".join(arguments[1:]) if arguments[:1] == ["set"] else ""
        if re.search(r"(?:^|\s)-\w*x|-o xtrace", flags):
            traced = command.line
        elif re.search(r"(?:^|\s)\+\w*x|\+o xtrace", flags):
            traced = 0
        secrets = names or [one.name for one in command.assignments if names_secret(one.name)]
        if traced and (secrets or _reads_dotenv(command)):
            what = f"the value of {secrets[0]}" if secrets else "what .env holds"
            yield _at(traced, f"set -x writes {what} (line {command.line}) into the log", "set +x")
            traced = 0
        follower = following.name if command.after == "|" and following else ""
        if holds and _dumps_environment(command, follower):
            message = f"{arguments[-1]} writes every variable of the job into the log, keys too"
            yield _at(command.line, message, "env | grep -E '^(SLURM|NCCL)_'")
        if arguments[:1] in (["echo"], ["printf"]) and names and command.after not in ("|", "|&") and not command.targets:
            yield _at(command.line, f"{arguments[0]} writes the value of {names[0]} into the log", "remove it")


def _dumps_environment(command: ShellCommand, follower: str) -> bool:
    """Whether every variable is printed; ``follower`` is the command behind a pipe, which may choose among them."""
    arguments = command.arguments
    if arguments[:1] == ["srun"]:
        arguments = [word for word in arguments[1:] if not word.startswith("-")]
    bare = arguments in (["env"], ["printenv"], ["export", "-p"], ["declare", "-x"], ["export"])
    return bare and not command.assignments and not command.targets and follower not in ("grep", "sed", "awk", "wc", "cut")


def dotenv_sourced(batch: Batch) -> Iterator[Seen]:
    """.env is read, and not run.

    Why: .env is run as a program, and with set -a all of it goes to every process of the job
    See: https://www.gnu.org/software/bash/manual/bash.html#index-source
    """
    for command in filter(_reads_dotenv, batch.everything):
        message = f"{command.name} runs .env as a program and hands all of it on"
        yield _at(command.line, message, f"take the names that you need: {_READ}")


# --- the warning ahead of the time limit ----------------------------------------------------------------------------------

_NUMBERS = {"1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM", "18": "CONT"}
_SIGNAL = re.compile(r"(?:(?P<who>[RB]+):)?(?P<signal>\w+)(?:@\d+)?")
_HEAVY = ("torchrun", "accelerate", "deepspeed", "python", "python3", "mpirun", "apptainer", "singularity")


def _plain(name: str) -> str:
    upper = name.upper()
    return _NUMBERS.get(name, upper[3:] if upper.startswith("SIG") else upper)


def _traps(batch: Batch) -> list[tuple[int, set[str]]]:
    """The traps that the script sets: line and signals; ``trap - USR1`` takes one back."""
    found = [one for one in batch.everything if one.name == "trap" and len(one.words) > 2]
    return [(one.line, set(map(_plain, one.arguments[2:]))) for one in found if one.arguments[1] not in ("-", "-p", "-l")]


class _Warning(NamedTuple):
    """The signal that the header asks for."""

    line: int
    given: str
    """The option's value."""
    signal: str
    to_shell: bool
    """Whether the batch shell gets it."""
    traps: list[int]
    """The lines of its traps."""


def _warning(batch: Batch) -> _Warning | None:
    """What ``--signal`` says; None where it says nothing that can be read."""
    option = batch.header.last("signal")
    found = _SIGNAL.fullmatch(option.value or "") if option else None
    if option is None or found is None:
        return None
    signal = _plain(found["signal"])
    traps = [line for line, signals in _traps(batch) if signal in signals]
    return _Warning(option.line, option.value or "", signal, "B" in (found["who"] or ""), traps)


def signal_misses_shell(batch: Batch) -> Iterator[Seen]:
    """The signal reaches the shell that traps it.

    Why: --signal without B: goes to the steps only, the batch shell's trap never runs
    See: https://slurm.schedmd.com/sbatch.html
    """
    warning = _warning(batch)
    if warning and warning.traps and not warning.to_shell:
        message = f"--signal={warning.given} is not sent to the batch shell: its trap in line {warning.traps[0]} never runs"
        yield _at(warning.line, message, f"#SBATCH --signal=B:{warning.given}")


def signal_kills_shell(batch: Batch) -> Iterator[Seen]:
    """The shell traps the signal that it gets.

    Why: a signal without a trap ends bash, and with it the job, ahead of its time limit
    See: https://slurm.schedmd.com/sbatch.html
    """
    warning = _warning(batch)
    # Where another file is read in, or the program replaces the shell, the trap may be there.
    elsewhere = any(command.name in ("source", ".", "exec", "eval") for command in batch.everything)
    if warning and warning.to_shell and not warning.traps and not elsewhere:
        signal = warning.signal
        message = f"{signal} ends the batch shell, and with it the job: there is no trap for it"
        remedy = f"trap 'kill -{signal} \"$child\"' {signal}, or without B: #SBATCH --signal={warning.given[2:]}"
        yield _at(warning.line, message, remedy)


def trap_without_signal(batch: Batch) -> Iterator[Seen]:
    """A trap has a signal.

    Why: nothing sends this signal: Slurm warns only jobs that ask for it
    See: https://github.com/NVIDIA-NeMo/Automodel/pull/3007
    """
    calls = {word for one in batch.everything if one.name in ("scancel", "kill") for word in one.arguments}
    for line, signals in _traps(batch) if batch.header.options and not batch.header.last("signal") else ():
        for signal in sorted(signals & {"USR1", "USR2"}):
            if not any(signal in word for word in calls):
                message = f"a trap for {signal}, but no --signal that would have it sent"
                yield _at(line, message, f"#SBATCH --signal=B:{signal}@300")


def trap_waits(batch: Batch) -> Iterator[Seen]:
    """A trap runs while the program does.

    Why: bash runs a trap only after the command in the foreground has ended: that is after the time limit
    See: https://www.gnu.org/software/bash/manual/bash.html#Signals
    """
    warning, sruns = _warning(batch), {id(srun.command): srun for srun in batch.sruns}
    if not warning or not warning.to_shell or not warning.traps:
        return
    first = min(warning.traps)
    for command in batch.commands:
        if command.line <= first or command.background or command.function is not None:
            continue
        srun = sruns.get(id(command))
        if not srun.is_light if srun else _is_heavy(command):
            message = f"{command.name} in the foreground: the trap for {warning.signal} (line {first}) waits until it has ended"
            begun = " ".join(command.arguments[:2])[:60]
            yield _at(command.line, message, f'{begun} ... & child=$!; then: wait "$child" || wait "$child"')
            return


def _is_heavy(command: ShellCommand) -> bool:
    """Whether it is a program that runs for long, not ``python -c`` and the like."""
    following = command.arguments[1:3]
    short = following == ["-m", "pip"] or following[:1] in (["-c"], ["--version"], ["-V"])
    return base_name(command.name) in _HEAVY and not short


# --- tasks ----------------------------------------------------------------------------------------------------------------

_PROCESSES = ("nproc_per_node", "num_processes", "num_gpus")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")


def expanded_too_early(batch: Batch) -> Iterator[Seen]:
    """A task's number is put in by the task.

    Why: the batch shell, itself task 0 on the first node, puts the value in: every task gets the same one
    See: https://github.com/huggingface/alignment-handbook/blob/main/recipes/launch.slurm
    """
    names = _telling(batch)
    # of `export NAME` without a value
    exported = {name for command in batch.everything if command.name == "export" for name in command.arguments[1:]}
    reaching: dict[tuple[int, str], str] = {}
    tainted = _tainted(batch, names)

    def note(texts: list[Text], where: str, *, tainting: bool = True) -> None:
        for reference in _references(texts):
            if reference.name in names:
                reaching.setdefault((reference.line, reference.name), where)
            for use in tainted.get(reference.name, []) if tainting else ():
                reaching.setdefault(use, where)

    for command in batch.everything if names else ():
        if _reaches_tasks(batch, command):
            note(list(command.texts()), command.name or "the command")
            continue
        for one in command.assignments if batch.sruns else ():
            if one.exported or one.name in exported:
                note([one.value], f"export {one.name}", tainting=False)
        note([heredoc.text for heredoc in command.heredocs], "a here-document")
    for (line, name), where in sorted(reaching.items()):
        message = f"the batch shell puts ${name} in, once, for {where}: every task gets the value of task 0"
        remedy = f"srun bash -c '... \"${name}\" ...' with single quotes, in which the task's own shell puts it in"
        yield _at(line, message, remedy)


def _telling(batch: Batch) -> tuple[str, ...]:
    """The variables that differ between the job's tasks, as far as the header tells how many there are."""
    one_node, one_task = batch.nodes == 1, batch.tasks_per_node == 1
    if one_node and (one_task or batch.count("ntasks") == 1):
        return ()
    stated = one_task and _task_line(batch)
    return ("SLURM_PROCID", *(() if one_node else ("SLURM_NODEID",)), *(() if stated else ("SLURM_LOCALID",)))


def _references(texts: list[Text]) -> list[Reference]:
    inner = [text for one in texts for command in walk(one.inner) for text in command.texts()]
    return [reference for text in (*texts, *inner) for reference in text.references]


def _tainted(batch: Batch, names: tuple[str, ...]) -> dict[str, list[tuple[int, str]]]:
    """Variables that were given a value with one of ``names`` in it, also by way of others, with the lines where."""
    found: dict[str, list[tuple[int, str]]] = {}
    assignments = [one for command in batch.everything for one in command.assignments] if names else []
    for one in assignments * 3:
        for reference in _references([one.value, *(one.items or [])]):
            places = [(reference.line, reference.name)] if reference.name in names else found.get(reference.name, [])
            known = found.setdefault(one.name, []) if places else []
            known += [place for place in places if place not in known]
    return found


def _reaches_tasks(batch: Batch, command: ShellCommand) -> bool:
    srun = next((srun for srun in batch.sruns if srun.command is command), None)
    if srun is not None:
        return srun.options.get("ntasks") != "1" and srun.program not in ("echo", "printf")
    return base_name(command.name) in _LAUNCHERS


def _task_line(batch: Batch) -> int | None:
    option = batch.header.last("ntasks-per-node") or batch.header.last("ntasks")
    return option.line if option else None


def _tasks_per_node(batch: Batch, srun: Srun) -> int | None:
    """Tasks that one srun starts on each node: its own options, else the header's. None where it cannot be determined."""
    own = srun.options
    if "ntasks-per-node" in own:
        return whole(batch.resolve(own["ntasks-per-node"] or "", srun.line))
    if "ntasks" in own:
        total, nodes = whole(own["ntasks"]), whole(own["nodes"]) if "nodes" in own else batch.nodes
        return -(-total // nodes) if total and nodes else None
    return batch.tasks_per_node


def tasks_times_processes(batch: Batch) -> Iterator[Seen]:
    """One launcher runs on each node.

    Why: each task starts a launcher of its own, and each of these all ranks of the node
    See: https://github.com/pytorch/pytorch/issues/137402
    """
    for srun in batch.sruns:
        tasks, line = _tasks_per_node(batch, srun) or 0, _task_line(batch)
        for name, value in options_in(srun.payload, _PROCESSES) if tasks > 1 and srun.launcher else ():
            resolved = whole(batch.resolve(value.text, value.line))
            if resolved != 1:
                started = f"{tasks} x {resolved} = {tasks * resolved}" if resolved else f"{tasks} times as many"
                message = f"{tasks} tasks a node, and in each {srun.launcher} --{name}={value.text}: {started} processes a node"
                yield _at(line or srun.line, message, "#SBATCH --ntasks-per-node=1" if line else "srun --ntasks-per-node=1 ...")
                break


def gpus_per_task(batch: Batch) -> Iterator[Seen]:
    """Every rank sees all GPUs of its node.

    Why: each task sees only its own GPU: NCCL finds no peer to peer transport, cuda:1 is an invalid device
    See: https://github.com/NVIDIA/nccl/issues/1066
    """
    option = batch.header.last("gpus-per-task")
    places = [(option.line, batch.tasks_per_node)] if option and not batch.header.last("gpu-bind") else []
    own = [srun for srun in batch.sruns if "gpus-per-task" in srun.options and "gpu-bind" not in srun.options]
    for line, tasks in places + [(srun.line, _tasks_per_node(batch, srun)) for srun in own]:
        if tasks is not None and tasks > 1:
            message = f"--gpus-per-task with {tasks} tasks a node: each task sees only its own GPU"
            yield _at(line, message, "#SBATCH --gpus-per-node=8, and srun --gpu-bind=none")


def cpus_lost_in_srun(batch: Batch) -> Iterator[Seen]:
    """Steps have the cores that the job asked for.

    Why: since Slurm 22.05 srun does not take sbatch's --cpus-per-task: the task is bound to one core
    See: https://github.com/Lightning-AI/pytorch-lightning/issues/18650
    """
    requested = batch.count("cpus-per-task") or 0
    for srun in batch.sruns if requested > 1 and "SRUN_CPUS_PER_TASK" not in batch.assigned else ():
        given = {"cpus-per-task", "cpus-per-gpu", "exact"} & set(srun.options) or "none" in (srun.options.get("cpu-bind") or "")
        if not given and not srun.opaque and not srun.is_light:
            message = f"srun does not take --cpus-per-task={requested} from sbatch (Slurm 22.05 and later)"
            yield _at(srun.line, message, "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK")
            return


# --- rendezvous -----------------------------------------------------------------------------------------------------------

_HOST_NAME = re.compile(r"(?:^|_)(?:ADDR|ADDRESS|HOST|IP|ENDPOINT)$|^HEAD_?NODE", re.IGNORECASE)
_PORT_NAME = re.compile(r"(?:MASTER|RDZV|RENDEZVOUS|MAIN_PROCESS)_?PORT$", re.IGNORECASE)
_NODELIST = re.compile(r"\$\{?SLURM_(?:JOB_|STEP_)?NODELIST\}?(?::.*)?")
_LOCAL = ("localhost", "127.0.0.1")
_EPHEMERAL = (32768, 60999)
"""Linux's own net.ipv4.ip_local_port_range."""
_FIRST_NODE = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
_PORT = "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"


def _values(batch: Batch, name: re.Pattern[str], *options: str) -> list[Token]:
    """What options and variables of these names are given."""
    assigned = [one for command in batch.everything for one in command.assignments if name.search(one.name)]
    plain = [Token(one.value.text, one.line) for one in assigned if one.items is None]
    return [value for _, value in batch.given(*options)] + plain


def _hosts(batch: Batch) -> list[Token]:
    """What the script gives as the host of the rendezvous; a job of one node has no use for it."""
    return [] if batch.nodes == 1 else _values(batch, _HOST_NAME, "rdzv_endpoint", "master_addr", "main_process_ip")


def nodelist_as_host(batch: Batch) -> Iterator[Seen]:
    """The rendezvous is at one host.

    Why: the node list is written node[1-4], which is the name of no host
    See: https://slurm.schedmd.com/sbatch.html
    """
    lines: set[int] = set()
    for value in _hosts(batch):
        if _NODELIST.fullmatch(batch.resolve(value.text, value.line)) and value.line not in lines:
            lines.add(value.line)
            yield _at(value.line, f"{value.text} is a list such as node[1-4], no host", _FIRST_NODE)


def nodes_not_joined(batch: Batch) -> Iterator[Seen]:
    """torchrun knows the number of nodes.

    Why: without --nnodes it is 1: each node trains alone, without a message
    See: https://docs.pytorch.org/docs/stable/elastic/run.html
    """
    for srun in batch.sruns:
        nodes = whole(srun.options.get("nodes") or "") or batch.nodes or 0
        hidden = srun.opaque or "PET_NNODES" in batch.assigned or any(token.text[:1] in "$@" for token in srun.payload)
        torchrun = srun.launcher in ("torchrun", "torch.distributed.run")
        given = [batch.resolve(value.text, value.line) for _, value in options_in(srun.payload, ("nnodes",))]
        if torchrun and not hidden and nodes > 1 and srun.options.get("ntasks") != "1" and given in ([], ["1"], ["1:1"]):
            message = f"torchrun starts on {nodes} nodes, each with --nnodes=1: {nodes} trainings that write the same files"
            remedy = "torchrun --nnodes=$SLURM_NNODES --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT ..."
            yield _at(srun.line, message, remedy)


_STARTERS = frozenset(
    """
    srun mpirun mpiexec mpiexec.hydra orterun prun ssh pdsh clush pssh parallel-ssh parallel blaunch
    """.split()  # noqa: SIM905 (one word a program is what a person can read and extend)
)
"""Programs that start others on more than this node."""
_WRAPPERS = {
    **dict.fromkeys(("apptainer", "singularity"), ("exec", "run")),
    **dict.fromkeys(("docker", "podman", "conda", "mamba", "micromamba", "uv", "poetry", "pixi"), ("run", "exec")),
    **dict.fromkeys(("numactl", "taskset", "nsys", "catchsegv", "strace", "xargs"), ()),
}
"""Programs that run another one here, and the words of which one makes them do so."""
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "deepspeed", "accelerate.commands.launch")
_ALONE = ("torchrun", "deepspeed", "accelerate", "accelerate-launch")
"""What starts ranks on this node, as a module of Python and as a program."""


def _here(words: list[str]) -> list[str]:
    """The words of a command from the program on, without what runs it in this shell: ``env A=b time nohup torchrun``."""
    at = 0
    while at < len(words) and (base_name(words[at]) in SHELL_PREFIXES or re.match(r"-|\w+=|[0-9.]+[smhd]?$", words[at])):
        at += 1
    return words[at:]


def _launches(words: list[str]) -> str:
    """The launcher that a command starts on this node, if it starts one; empty if not, or where another program starts it."""
    if words[:1] == ["eval"]:
        words = " ".join(words[1:]).split()
    words = _here(words)
    program = base_name(words[0]) if words and not {"--help", "-h", "--version"} & set(words) else ""
    if "--standalone" in words or (_WRAPPERS.get(program) and not set(_WRAPPERS[program]) & set(words[1:4])):
        return ""  # one node is what is meant; it runs nothing
    if program in _WRAPPERS:
        inner = next(
            (at for at, word in enumerate(words[1:], 1) if base_name(word) in (*_ALONE, "bash", "sh") or _python(word)), 0
        )
        return _launches(words[inner:]) if inner and not _STARTERS & {base_name(word) for word in words[:inner]} else ""
    if program == "accelerate":
        return "accelerate launch" if "launch" in words[1:2] else ""
    if _python(program) and "-m" in words[:-1]:
        at = words.index("-m") + 1
        accelerate = words[at : at + 2] == ["accelerate", "launch"]
        return f"python -m {words[at]}" if words[at] in _MODULES or accelerate else ""
    if program in ("bash", "sh") and len(words) > 2 and re.fullmatch(r"-\w*c", words[1]):
        inside = walk(parse(" ".join(words[2:])))
        return next((found for one in inside if (found := _launches(one.arguments))), "")
    return program if program in _ALONE else ""


def _python(word: str) -> bool:
    return re.fullmatch(r"python[0-9.]*", base_name(word)) is not None


def _resolved(batch: Batch, command: ShellCommand) -> list[str]:
    """The words of a command with the script's variables put in, cut as the shell cuts them."""
    found: list[str] = []
    for word in command.words:
        text = batch.resolve(word.text, word.line)
        cut = not word.quoted or re.fullmatch(r"\$\{\w+\[@\]\}", word.text)
        found += [text[begun:end] for begun, end in spans(text)] if cut else [text]
    return found


def _several_nodes(batch: Batch) -> int:
    """The least number of nodes that the header asks for; 1 where it does not say more."""
    stated = re.match(r"\d{1,6}", batch.header.value("nodes") or "")
    total, each = batch.count("ntasks"), batch.count("ntasks-per-node")
    return int(stated[0]) if stated else total // each if total and each else 1


def _by_hostfile(words: list[str]) -> bool:
    """Whether DeepSpeed reaches the other nodes itself, by ssh."""
    names = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in words if word.startswith("-")}
    standard = "multinode_launcher=standard" in "=".join(words).replace("-", "_")
    given = any(name == "H" or name.endswith("hostfile") for name in names)
    return given and "no_ssh" not in names and not standard


def launcher_without_srun(batch: Batch) -> Iterator[Seen]:
    """Every node starts its launcher.

    Why: the batch shell runs on the first node only: the launcher waits for the others, or trains there alone while they idle
    See: https://github.com/meta-llama/llama-cookbook/issues/491
    """
    nodes = _several_nodes(batch)
    elsewhere = any(not srun.is_light and srun.options.get("ntasks") != "1" for srun in batch.sruns)
    called = {command.name for command in batch.everything}
    commands = [] if nodes < 2 or elsewhere else batch.everything
    resolved = [(one, _resolved(batch, one)) for one in commands if one.function is None or one.function in called]
    if any(base_name(word) in _STARTERS for _, words in resolved for word in _here(words)[:1] if base_name(word) != "srun"):
        return  # ssh in a loop, mpirun: the other nodes have theirs
    for command, words in resolved:
        launcher = _launches(words)
        if launcher and not _by_hostfile(words):
            yield _at(
                command.line,
                f"{launcher} starts on the first of {nodes} nodes only: the batch shell runs it, without srun",
                f"srun --ntasks-per-node=1 {launcher} ... (with options of the node itself: srun bash -c '...')",
            )
            return


def hostfile_under_srun(batch: Batch) -> Iterator[Seen]:
    """DeepSpeed reaches the nodes once.

    Why: with a hostfile deepspeed starts the ranks of all nodes by ssh: under srun each task starts them all again
    See: https://www.deepspeed.ai/getting-started/#resource-configuration-multi-node
    """
    for srun in batch.sruns:
        nodes = whole(srun.options.get("nodes") or "") or _several_nodes(batch)
        tasks = whole(srun.options.get("ntasks") or "") or nodes * (_tasks_per_node(batch, srun) or 1)
        if tasks > 1 and srun.launcher and _by_hostfile([token.text for token in srun.payload]):
            message = f"srun starts {srun.launcher} {tasks} times, and each starts the ranks of all hosts of its hostfile"
            yield _at(srun.line, message, "call it without srun, once; or leave the hostfile out: --no_ssh and --node_rank")


def localhost_fallback(batch: Batch) -> Iterator[Seen]:
    """No node of several takes itself for the first.

    Why: where the rendezvous is at localhost each node waits for the others, or trains alone without a message
    See: https://github.com/pytorch/pytorch/issues/73656
    """
    values = _hosts(batch)
    echoed = [one for one in batch.everything if one.name == "echo" and one.before == "||"] if batch.nodes != 1 else []
    fallen = {one.line for one in echoed if any(word in _LOCAL for word in one.arguments[1:])}
    fallen |= {value.line for value in values if re.search(r":?-(localhost|127\.0\.0\.1)\}", value.text)}
    for line in sorted(fallen):
        message = "falls back to localhost: without the first node's name each node would train alone"
        yield _at(line, message, "end the job instead: ... || exit 1")
    for value in values if batch.nodes else []:
        if value.line not in fallen and batch.resolve(value.text, value.line).partition(":")[0] in _LOCAL:
            message = f"{value.text} is another machine on each of {batch.nodes} nodes: no node finds the others"
            yield _at(value.line, message, _FIRST_NODE)


def _ports(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Line, lowest and highest of each port that the script gives and that can be determined; a line counts once."""
    lines: set[int] = set()
    for value in _values(batch, _PORT_NAME, "rdzv_endpoint", "master_port", "main_process_port"):
        port, line = _port_text(batch, value)
        resolved = batch.resolve(port, value.line).strip("'\"") if port is not None else ""
        number = whole(resolved)
        between = (number, number) if number else _port_range(batch, resolved, line) if number is None else None
        if between and line not in lines:
            low, high = between
            lines |= {line} if low == high == number or low < 1024 or high >= _EPHEMERAL[0] else set()
            yield line, low, high


def fixed_port(batch: Batch) -> Iterator[Seen]:
    """Each job has a port of its own.

    Why: two jobs on a node, or a process left over from the last one, take the same port: address already in use
    See: https://github.com/NVIDIA-NeMo/DataDesigner/issues/929
    """
    return (_at(line, f"the port is always {low}", _PORT) for line, low, high in _ports(batch) if low == high)


def port_range(batch: Batch) -> Iterator[Seen]:
    """No other process takes the port.

    Why: the kernel hands out ports from 32768 on to any connection, and ports below 1024 are root's
    See: https://github.com/NVIDIA/enroot/issues/243
    """
    for line, low, high in _ports(batch):
        if low < high and high >= _EPHEMERAL[0] and low <= _EPHEMERAL[1]:
            message = f"ports from {low} to {high} lie in the range that the kernel gives to any connection"
            yield _at(line, f"{message} (32768 to 60999)", _PORT)
        elif low < high and low < 1024:
            yield _at(line, f"ports from {low} to {high}: those below 1024 are root's", _PORT)


def _port_text(batch: Batch, value: Token) -> tuple[str | None, int]:
    """The port in a value, and the line where it was written: a variable's where one holds it."""
    text = value.text
    if re.fullmatch(r"\$\{?\w+\}?", text) and ":" in (whole_text := batch.resolve(text, value.line)):
        text = whole_text
    head, colon, port = text.rpartition(":")
    if colon and not head.endswith("{") and "$((" not in head and not re.search(r"\$\{\w+$", head):
        text = port
    elif not colon and re.search(r"[A-Za-z)]$", text) and "$" not in text[:1]:
        return None, value.line
    named = re.fullmatch(r"\$\{?([A-Za-z_]\w*)\}?", text)
    found = batch.last_assignment(named.group(1), value.line) if named else None
    return text, found[1] if found else value.line


def _port_range(batch: Batch, text: str, line: int) -> tuple[int, int] | None:
    """The ports that an expression can give; None where that cannot be determined."""
    if shuffled := re.search(r"shuf\s+-i\s*(\d+)-(\d+)", text):
        return int(shuffled.group(1)), int(shuffled.group(2))
    inside = re.fullmatch(r"\$(?:\(\((.*)\)\)|\[(.*)\])", text, re.DOTALL)
    given = "RANDOM" if text in ("$RANDOM", "${RANDOM}") else (inside[1] or inside[2] or "") if inside else None
    if given is None:
        return None
    low = high = 0
    for term in re.sub(r"[\s()]", "", batch.resolve(given, line)).split("+"):
        rest = re.fullmatch(r"[^%]+%(\d{1,9})", term)
        if whole(term) is not None:
            low, high = low + int(term), high + int(term)
        elif rest or re.fullmatch(r"\$?\{?RANDOM\}?", term):
            high += int(rest.group(1)) - 1 if rest else 32767
        else:
            return None
    return low, high
