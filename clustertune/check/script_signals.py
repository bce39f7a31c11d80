"""Rules for the warning ahead of the time limit: who gets the signal, and whether anything happens then."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from clustertune.check.script_batch import Batch, Mistake, is_light, scanned
from clustertune.check.script_shell import ShellCommand

_NUMBERS = {"1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM", "18": "CONT"}
_SIGNAL = re.compile(r"(?:(?P<who>[RB]+):)?(?P<signal>\w+)(?:@\d+)?")
_HEAVY = ("torchrun", "accelerate", "deepspeed", "python", "python3", "mpirun", "apptainer", "singularity")
_WARNINGS = ("USR1", "USR2")


@dataclass(frozen=True)
class _Trap:
    line: int
    signals: frozenset[str]


def _plain(name: str) -> str:
    upper = name.upper()
    return _NUMBERS.get(name, upper[3:] if upper.startswith("SIG") else upper)


def _traps(batch: Batch) -> list[_Trap]:
    """The traps that the script sets; ``trap - USR1`` takes one back."""
    found = []
    for command in batch.everything():
        arguments = [word.text for word in command.words]
        if arguments[:1] == ["trap"] and len(arguments) > 2 and arguments[1] not in ("-", "-p", "-l"):
            found.append(_Trap(command.line, frozenset(_plain(word) for word in arguments[2:])))
    return found


def check_signals(batch: Batch) -> Iterator[Mistake]:
    """``--signal`` and ``trap`` belong together."""
    traps = _traps(batch)
    trapped = frozenset().union(*(trap.signals for trap in traps)) if traps else frozenset()
    option = batch.header.last("signal")
    match = _SIGNAL.fullmatch(option.value or "") if option else None
    if option is None:
        if batch.header.options:
            yield from _unsent(batch, traps)
        return
    if match is None:
        return
    signal = _plain(match.group("signal"))
    if "B" not in (match.group("who") or ""):
        if signal in trapped:
            line = next(trap.line for trap in traps if signal in trap.signals)
            message = f"--signal={option.value} is not sent to the batch shell: its trap in line {line} never runs"
            yield Mistake(option.line, "signal-misses-shell", message, f"#SBATCH --signal=B:{option.value}")
        return
    if signal not in trapped:
        if not _may_trap_elsewhere(batch):
            message = f"{signal} ends the batch shell, and with it the job: there is no trap for it"
            remedy = f"trap 'kill -{signal} \"$child\"' {signal}, or without B: #SBATCH --signal={(option.value or '')[2:]}"
            yield Mistake(option.line, "signal-kills-shell", message, remedy)
        return
    first = min(trap.line for trap in traps if signal in trap.signals)
    yield from _waited_for(batch, signal, first)


def _unsent(batch: Batch, traps: list[_Trap]) -> Iterator[Mistake]:
    calls = {word.text for c in batch.everything() if c.name in ("scancel", "kill") for word in c.words}
    for trap in traps:
        for signal in sorted(trap.signals & frozenset(_WARNINGS)):
            if not any(signal in word for word in calls):
                message = f"a trap for {signal}, but no --signal that would have it sent"
                yield Mistake(trap.line, "trap-without-signal", message, f"#SBATCH --signal=B:{signal}@300")


def _may_trap_elsewhere(batch: Batch) -> bool:
    """Another file is read in, or the shell is replaced by the program: the signal has someone to go to."""
    return any(command.name in ("source", ".", "exec", "eval") for command in batch.everything())


def _waited_for(batch: Batch, signal: str, line: int) -> Iterator[Mistake]:
    """The first program behind the trap that keeps bash from running it."""
    sruns = {id(srun.command): srun for srun in batch.sruns}
    for command in batch.commands:
        if command.line <= line or command.background or command.function is not None:
            continue
        srun = sruns.get(id(command))
        if (srun is not None and not is_light(srun)) or (srun is None and _is_heavy(command)):
            message = f"{command.name} in the foreground: the trap for {signal} (line {line}) waits until it has ended"
            remedy = f'{_start(command)} ... & child=$!; then: wait "$child" || wait "$child"'
            yield Mistake(command.line, "trap-waits", message, remedy)
            return


def _is_heavy(command: ShellCommand) -> bool:
    name = command.name.rsplit("/", 1)[-1]
    short = [word.text for word in command.words[1:3]] in (["-m", "pip"], ["-c", ""]) or any(
        word.text in ("-c", "--version", "-V") for word in command.words[1:2]
    )
    return name in _HEAVY and not short


def _start(command: ShellCommand) -> str:
    return " ".join(word.text for word in command.words[:2])[:60]


@scanned("signal-misses-shell", check_signals)
def signal_misses_shell() -> None:
    """The signal reaches the shell that traps it.

    Why: --signal without B: goes to the steps only, the batch shell's trap never runs
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("signal-kills-shell", check_signals)
def signal_kills_shell() -> None:
    """The shell traps the signal that it gets.

    Why: a signal without a trap ends bash, and with it the job, ahead of its time limit
    See: https://slurm.schedmd.com/sbatch.html
    """


@scanned("trap-without-signal", check_signals)
def trap_without_signal() -> None:
    """A trap has a signal.

    Why: nothing sends this signal: Slurm warns only jobs that ask for it
    See: https://github.com/NVIDIA-NeMo/Automodel/pull/3007
    """


@scanned("trap-waits", check_signals)
def trap_waits() -> None:
    """A trap runs while the program does.

    Why: bash runs a trap only after the command in the foreground has ended: that is after the time limit
    See: https://www.gnu.org/software/bash/manual/bash.html#Signals
    """
