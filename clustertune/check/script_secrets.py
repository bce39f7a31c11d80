"""Rules for tokens and keys: where they end up when a script names them. A finding never repeats one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from clustertune.check.script_batch import Batch, Mistake, scanned
from clustertune.check.script_shell import ShellCommand
from clustertune.host.credentials import holds_secret, names_secret

_OPTIONS = re.compile(r"--(?:(?:hub|hf|push_to_hub|auth|access)_)?token|--(?:wandb_)?(?:api_?)?key|--password|--secret")
_GIVEN = re.compile(r"(?:^|[,\s])([A-Za-z_]\w*)=([^,\s]+)")
_DOTENV = re.compile(r"(?:^|/)(?:\.env(?:\.\w+)?|secrets?(?:\.env|\.sh)?)$")
_DECLARING = ("export", "declare", "typeset", "local", "readonly", "unset", "read", "[", "[[", "test", ":")
_READ = 'HF_TOKEN=$(sed -n "s/^HF_TOKEN=//p" .env); export HF_TOKEN'


def _looks_real(value: str) -> bool:
    """A literal that is a key, and neither a reference, a path, nor a hint to put one in."""
    if holds_secret(value):
        return True
    hint = re.search(r"your|xxx|\.\.\.|change|example|placeholder|insert|<|>|dummy|none|true|false", value, re.IGNORECASE)
    return not hint and bool(re.fullmatch(r"[A-Za-z0-9_+=.:-]{8,}", value)) and bool(re.search(r"\d", value))


def check_secrets(batch: Batch) -> Iterator[Mistake]:
    """Keys in the file, in exports, on command lines and in the log."""
    lines: set[int] = set()
    for found in (_written(batch), _exported(batch), _shown(batch), _dotenv(batch)):
        for item in found:
            if item.rule == "secret-in-file":
                lines.add(item.line)
            elif item.line in lines and item.rule == "secret-in-arguments":
                continue  # once is enough
            yield item


def _written(batch: Batch) -> Iterator[Mistake]:
    seen = set()
    message = "a key stands in the script (not repeated here)"
    for number, line in enumerate(batch.lines, 1):
        if holds_secret(line):
            seen.add(number)
            yield Mistake(number, "secret-in-file", message, f"revoke it, and read it from a file of mode 0600: {_READ}")
    for command in batch.everything():
        for assignment in command.assignments:
            if names_secret(assignment.name) and assignment.line not in seen and _looks_real(assignment.value.text):
                seen.add(assignment.line)
                remedy = f"revoke it, and read it from a file of mode 0600: {_READ}"
                yield Mistake(assignment.line, "secret-in-file", message, remedy)


def _exported(batch: Batch) -> Iterator[Mistake]:
    values = [(option.line, option.value or "") for option in batch.header.options if option.name == "export"]
    values += [(srun.line, srun.options.get("export") or "") for srun in batch.sruns]
    for line, value in values:
        for match in _GIVEN.finditer(value):
            if names_secret(match.group(1)):
                message = f"--export with the value of {match.group(1)}"
                yield Mistake(
                    line, "secret-in-export", message, f"name it only, without a value: --export=ALL,{match.group(1)}"
                )


def _shown(batch: Batch) -> Iterator[Mistake]:
    """Command lines and the log: ``set -x``, ``echo``, ``env``."""
    tracing = "-" in batch.lines[0] and bool(re.search(r"\s-\w*x", batch.lines[0])) and batch.lines[0].startswith("#!")
    traced = 1 if tracing else 0
    holds = any(names_secret(name) for name in batch.assigned) or any(_reads_dotenv(c) for c in batch.everything())
    holds = holds or any(_names(command) for command in batch.everything())
    commands = list(batch.everything())
    for at, command in enumerate(commands):
        arguments = [word.text for word in command.words]
        if arguments[:1] == ["set"]:
            flags = " ".join(arguments[1:])
            if re.search(r"(?:^|\s)-\w*x|-o xtrace", flags):
                traced = command.line
            elif re.search(r"(?:^|\s)\+\w*x|\+o xtrace", flags):
                traced = 0
        secrets = _names(command) or [a.name for a in command.assignments if names_secret(a.name)]
        if traced and (secrets or _reads_dotenv(command)):
            what = f"the value of {secrets[0]}" if secrets else "what .env holds"
            yield Mistake(traced, "secret-in-log", f"set -x writes {what} (line {command.line}) into the log", "set +x")
            traced = 0
        follower = commands[at + 1].name if command.after == "|" and at + 1 < len(commands) else ""
        if holds and _dumps_environment(command, follower):
            message = f"{arguments[-1]} writes every variable of the job into the log, keys too"
            yield Mistake(command.line, "secret-in-log", message, "env | grep -E '^(SLURM|NCCL)_'")
        yield from _on_command_line(command, arguments)


def _names(command: ShellCommand) -> list[str]:
    """Secret variables whose value a command's own words hold."""
    return [
        reference.name
        for word in command.words
        for reference in word.references
        if names_secret(reference.name) and not re.search(r"\$\{(?:#|\w+(?:\[\w\])?:?\+)", word.text)
    ]


def _on_command_line(command: ShellCommand, arguments: list[str]) -> Iterator[Mistake]:
    if not arguments or arguments[0] in _DECLARING:
        return
    names = _names(command)
    quiet = command.after in ("|", "|&") or bool(command.targets)
    if arguments[0] in ("echo", "printf"):
        if names and not quiet:
            yield Mistake(
                command.line, "secret-in-log", f"{arguments[0]} writes the value of {names[0]} into the log", "remove it"
            )
        return
    remedy = "leave it out: the program reads it from its environment (HF_TOKEN, WANDB_API_KEY)"
    for at, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        following = value if equals else (arguments[at + 1] if at + 1 < len(arguments) else "")
        known = _OPTIONS.fullmatch("--" + option[2:].replace("-", "_")) if option.startswith("--") else None
        if known and (_looks_real(following) or "$" in following):
            yield Mistake(command.words[at].line, "secret-in-arguments", f"{option} with a value", remedy)
            return
    if names:
        yield Mistake(command.line, "secret-in-arguments", f"{arguments[0]} with the value of {names[0]}", remedy)


def _dumps_environment(command: ShellCommand, follower: str) -> bool:
    """Whether every variable is printed; ``follower`` is the command behind a pipe, which may choose among them."""
    arguments = [word.text for word in command.words]
    if arguments[:1] == ["srun"]:
        arguments = [word for word in arguments[1:] if not word.startswith("-")]
    bare = arguments in (["env"], ["printenv"], ["export", "-p"], ["declare", "-x"], ["export"])
    return bare and not command.assignments and not command.targets and follower not in ("grep", "sed", "awk", "wc", "cut")


def _reads_dotenv(command: ShellCommand) -> bool:
    arguments = [word.text for word in command.words]
    if arguments[:1] in (["source"], ["."]) and len(arguments) > 1:
        return bool(_DOTENV.search(arguments[1]))
    inner = [w.text for word in command.words for c in word.inner for w in c.words]
    return arguments[:1] == ["export"] and any(_DOTENV.search(word) for word in inner)


def _dotenv(batch: Batch) -> Iterator[Mistake]:
    for command in batch.everything():
        if _reads_dotenv(command):
            message = f"{command.name} runs .env as a program and hands all of it on"
            yield Mistake(command.line, "dotenv-sourced", message, f"take the names that you need: {_READ}")


@scanned("secret-in-file", check_secrets)
def secret_in_file() -> None:
    """No secret stands in the script.

    Why: a secret in a script is kept by Slurm (scontrol write batch_script) and by git
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("secret-in-export", check_secrets)
def secret_in_export() -> None:
    """No secret stands in --export.

    Why: the value stands in the job's record or on a command line, which others can read
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("secret-in-arguments", check_secrets)
def secret_in_arguments() -> None:
    """No secret stands on a command line.

    Why: every user of the node reads command lines (ps)
    See: https://man7.org/linux/man-pages/man5/proc_pid_cmdline.5.html
    """


@scanned("secret-in-log", check_secrets)
def secret_in_log() -> None:
    """No secret is written into the log.

    Why: the job's log is often readable by all, and is sent along with questions
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("dotenv-sourced", check_secrets)
def dotenv_sourced() -> None:
    """.env is read, and not run.

    Why: .env is run as a program, and with set -a all of it goes to every process of the job
    See: https://www.gnu.org/software/bash/manual/bash.html#index-source
    """
