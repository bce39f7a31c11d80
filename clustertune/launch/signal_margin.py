"""How long before its time limit a job must be warned: it ends the step it is in, saves, and exits.

Slurm looks at its jobs now and then and may send the signal up to 60 seconds early (sbatch(1), --signal): that only costs
time. A signal that comes too late costs everything since the last save.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertune.errors import Problem
from clustertune.events import read_events
from clustertune.resolve.resolved import Resolved

STEP_FACTOR = 1.5
"""The step that a signal meets may be slower than nearly all, and evaluation batches come between."""
MARGIN_SECONDS = 30.0
"""For the way of the signal to every rank, and for their end."""
ASSUMED_SAVE_SECONDS = 120.0
"""Where no save was measured: adapter and optimizer state, fsynced on network storage."""
DEFAULT_SECONDS = 600
"""Where neither a run nor the recipe says how long a step takes."""
TINY_SECONDS = 60
"""A tiny model's step and save take a second together."""
EARLY_SECONDS = 60
"""How much earlier than asked the signal may come."""
LONGEST_SECONDS = 65_535
"""The most that ``--signal`` can say: Slurm keeps it in 16 bits."""
RECENT = 500
"""Of this many last steps the 95th percentile is taken: a run that was moved to other nodes has another pace."""


@dataclass(frozen=True)
class SignalMargin:
    """The seconds between the warning and the time limit, and what they were computed from."""

    seconds: int
    reason: str


def needed(run_path: Path | None, resolved: Resolved) -> SignalMargin:
    """1.5 x p95 of the step seconds + p95 of the save seconds + 30 s; measured in the run, else the recipe's, else assumed."""
    steps, saves = measured(run_path) if run_path is not None else ([], [])
    if steps:
        step, source = percentile(steps), f"p95 of {len(steps)} measured steps"
        save = percentile(saves) if saves else ASSUMED_SAVE_SECONDS
        saved = f"p95 of {len(saves)} measured saves" if saves else "assumed for a save"
        return _margin(step, source, save, saved)
    if resolved.tiny or resolved.recipe.model.weights == "random":
        return SignalMargin(TINY_SECONDS, f"{TINY_SECONDS} s for a tiny model")
    expect = resolved.recipe.expect
    if expect.hours and expect.steps:
        source = f"the recipe's {expect.hours:g} h / {expect.steps} steps"
        return _margin(expect.hours * 3600 / expect.steps, source, ASSUMED_SAVE_SECONDS, "assumed for a save")
    return SignalMargin(DEFAULT_SECONDS, f"{DEFAULT_SECONDS} s: neither this run nor the recipe says how long a step takes")


def _margin(step: float, source: str, save: float, saved: str) -> SignalMargin:
    seconds = STEP_FACTOR * step + save + MARGIN_SECONDS
    text = f"{STEP_FACTOR:g} x {step:.1f} s a step ({source}) + {save:.1f} s a save ({saved}) + {MARGIN_SECONDS:.0f} s"
    return SignalMargin(math.ceil(seconds), text)


def measured(run_path: Path) -> tuple[list[float], list[float]]:
    """Seconds of the last steps and of the saves of all attempts of a run, in the order of its ``metrics.jsonl``."""
    steps: list[float] = []
    saves: list[float] = []
    for event in read_events(run_path / "metrics.jsonl"):
        seconds = event.get("seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            continue
        if event.get("event") == "step":
            steps.append(float(seconds))
        elif event.get("event") == "checkpoint" and event.get("status", "saved") == "saved":
            # A save behind training may be under way when the warning comes: it is finished, then the last step is saved.
            write = event.get("save_write_s") if event.get("save_copy_s") else None
            saves.append(2 * float(write) if isinstance(write, int | float) else float(seconds))
    return steps[-RECENT:], saves[-RECENT:]


def percentile(values: Sequence[float], share: float = 0.95) -> float:
    """The smallest value that is not below ``share`` of all (nearest rank): of few values the largest."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


_SIGNAL = re.compile(r"^#SBATCH\s+(?:.*\s)?--signal[=\s]+['\"]?(?:R?B:|R:)?[A-Z0-9]+@(\d+)", re.MULTILINE)


def given_in(text: str) -> int | None:
    """The seconds of a script's ``#SBATCH --signal=B:USR1@N``; None where it has none."""
    found = _SIGNAL.findall(text)
    return int(found[-1]) if found else None


def warning(given: int | None, wanted: SignalMargin, limit_minutes: float | None = None) -> str | None:
    """What to say at the start of a job whose script warns too late, or halfway to its limit or before; None if it is right.

    ``limit_minutes``: the job's time limit, None where there is none or it is not known. What sbatch was given on its command
    line replaces the script's, and Slurm does not report it: the message names the script.
    """
    again = f"-> sbatch --signal=B:USR1@{wanted.seconds} ..."
    if given is None or given < wanted.seconds:
        has = "no --signal" if given is None else f"--signal=B:USR1@{given}"
        return (
            f"{has}: too late to save before the time limit, {wanted.seconds} s are needed ({wanted.reason}); what was "
            f"computed since the last save would be lost {again}"
        )
    if limit_minutes is not None and limit_minutes * 60 < 2 * (given + EARLY_SECONDS):
        left = max(0, round(limit_minutes * 60 - given))
        return (
            f"the script's --signal=B:USR1@{given} tells a job of {limit_minutes:g} minutes to stop {left} s after its start, "
            f"and it goes back into the queue each time; {wanted.seconds} s are enough ({wanted.reason}) {again}"
        )
    return None


def find_problems(wanted: SignalMargin, minutes: float, *, file: str) -> list[Problem]:
    """A time limit that the warning would use up: the job would be asked to stop as soon as it starts."""
    if wanted.seconds > LONGEST_SECONDS:
        text = f"a warning {wanted.seconds} s ahead is needed ({wanted.reason}); Slurm knows at most {LONGEST_SECONDS} s"
        return [Problem(text, file=file, key="slurm.time", fix="save more often than once in many hours: smaller steps")]
    least = 2 * (wanted.seconds + EARLY_SECONDS) / 60
    if minutes >= least:
        return []
    text = f"{minutes:g} minutes leave no time to train: the warning comes {wanted.seconds} s before the end ({wanted.reason})"
    return [Problem(text, file=file, key="slurm.time", fix=f"give at least {math.ceil(least)} minutes")]
