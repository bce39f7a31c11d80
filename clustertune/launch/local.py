"""Start the ranks of one machine: ``accelerate launch`` with the recipe's own file, and who failed first if it fails."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from clustertune.config.resolved import Resolved
from clustertune.errors import ExitCode, Problem
from clustertune.process import STOP_SIGNALS, die_with_parent
from clustertune.storage import is_full

LAUNCHER_PID = "launcher.pid"
"""In an attempt's folder: the parent that its ranks must have. A rank that finds another one is an orphan, and ends."""
_RANK_KILLED = re.compile(r"exitcode\s*: -9\b")
"""How torch's launcher reports a rank that was killed, here before it could open its log."""
MISSING_RECORD = "ended without a word: killed (out of memory, kill -9, or a node fault)"


def accelerate_command(resolved: Resolved, program: Sequence[str]) -> list[str]:
    """``accelerate launch`` for all ranks on this machine; ``program`` are the arguments of the ``clustertune`` module.

    Port 0 lets accelerate take a free one: a fixed port collides after a killed run.
    """
    return [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(resolved.accelerate_path),
        "--num_processes",
        str(resolved.world_size),
        "--num_machines",
        "1",
        "--machine_rank",
        "0",
        "--main_process_port",
        "0",
        "--module",
        "clustertune",
        *program,
    ]


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, from what each rank left behind."""

    code: ExitCode
    problems: list[Problem]


def run_ranks(command: Sequence[str], attempt_dir: Path, world_size: int, *, quiet: bool) -> Outcome:
    """Run the launcher, pass stop signals on to every rank, and judge the attempt by the ranks' own records.

    An attempt that was asked to stop ends with ``AGAIN`` at the best, even where the stop came before its first rank or
    after its last step: what follows training must not start.

    The launcher's own words go to ``launcher.log``: what it prints when a rank fails is a traceback of its own code.
    """
    attempt_dir.mkdir(parents=True, exist_ok=True)
    with (attempt_dir / "launcher.log").open("ab") as log:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=log if quiet else sys.stderr.fileno(),
            stderr=log,
            # A new session keeps a terminal's Ctrl-C from reaching the launcher, which would kill the ranks after 30 s:
            # it is passed on below, and the ranks save before they end. SIGUSR1 would kill the launcher.
            start_new_session=True,
            preexec_fn=_in_launcher,  # noqa: PLW1509 - no thread is running here yet, and it calls libc only
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )
    asked: list[int] = []
    previous = {number: signal.signal(number, _forward(child, attempt_dir, asked)) for number in STOP_SIGNALS}
    try:
        (attempt_dir / LAUNCHER_PID).write_text(f"{child.pid}\n")
        ended = child.wait()
    except OSError:
        child.kill()
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return judge(attempt_dir, world_size, asked=bool(asked), killed=ended == -signal.SIGKILL)


def _in_launcher() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)


def _forward(child: subprocess.Popen[bytes], attempt_dir: Path, asked: list[int]) -> Any:
    """A handler that asks every rank to save and stop; an impatient Ctrl-C or ``kill``, given twice, ends them at once."""

    def handle(number: int, _frame: FrameType | None) -> None:
        # Slurm warns with SIGUSR1 and ends with SIGTERM: another signal is no reason to break off the save of the first.
        impatient = number in asked and number != signal.SIGUSR1
        asked.append(number)
        pids = [int(text) for path in attempt_dir.glob("rank-*.pid") if (text := path.read_text().strip())]
        if impatient or not pids:
            child.kill()  # the ranks die with it
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    return handle


def judge(attempt_dir: Path, world_size: int, *, asked: bool = False, killed: bool = False) -> Outcome:
    """The code and reason of an attempt: a rank that left no record died first; else the earliest record that is not 0.

    ``asked``: it was asked to stop, which explains ranks that say nothing. ``killed``: the launcher was, with ``kill -9``.
    """
    records: dict[int, dict[str, Any]] = {}
    for path in attempt_dir.glob("rank-*.json"):
        try:
            record = json.loads(path.read_bytes())
            records[int(record["rank"])] = record
        except (OSError, ValueError, KeyError):
            continue
    codes = {ExitCode(r["code"]) for r in records.values()}
    # A decision that all ranks took together comes before the noise of ranks that lost their peers.
    for code in (ExitCode.STOP, ExitCode.CONFIG, ExitCode.STORAGE):
        if code in codes:
            return Outcome(code, _problems(r for r in records.values() if r["code"] == code))
    silent = sorted(set(range(world_size)) - set(records))
    if asked and (silent or codes <= {ExitCode.OK, ExitCode.AGAIN}):
        return Outcome(ExitCode.AGAIN, [])
    if silent:
        return _without_records(attempt_dir, silent, killed=killed)
    failed = sorted((r for r in records.values() if r["code"] not in (0, ExitCode.AGAIN)), key=lambda r: float(r["time"]))
    if failed:
        return Outcome(ExitCode(failed[0]["code"]), _problems(failed[:1], prefix=f"rank {failed[0]['rank']} failed first: "))
    return Outcome(ExitCode.AGAIN if ExitCode.AGAIN in codes else ExitCode.OK, [])


def _without_records(attempt_dir: Path, silent: Sequence[int], *, killed: bool) -> Outcome:
    """What became of ranks that left no record."""
    again = "the same command goes on from the newest whole checkpoint"
    if is_full(attempt_dir):
        problem = Problem("no space left for what the ranks write", file=str(attempt_dir), fix=f"free space, then {again}")
        return Outcome(ExitCode.STORAGE, [problem])
    log = attempt_dir / "launcher.log"
    if not (attempt_dir / "rank-0.log").exists() and not killed and not _RANK_KILLED.search(_read(log)):
        return Outcome(ExitCode.FAILED, [Problem(f"the launcher started no rank: {_last_line(log)}", file=str(log))])
    names = ", ".join(f"rank {rank}" for rank in silent)
    return Outcome(ExitCode.AGAIN, [Problem(f"{names} {MISSING_RECORD}", file=str(attempt_dir), fix=again)])


def _problems(records: Any, prefix: str = "") -> list[Problem]:
    found: dict[Problem, None] = {}
    for record in records:
        for problem in record["problems"]:
            found[Problem(**{**problem, "message": prefix + problem["message"]})] = None
    return list(found)


def _last_line(path: Path) -> str:
    lines = [line for line in _read(path).splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
