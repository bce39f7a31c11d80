"""How long before its time limit Slurm signals a job (``slurm.signal_seconds``): it ends the step it is in, saves, and exits.

Slurm looks at its jobs now and then and may send the signal up to 60 seconds early (sbatch(1), --signal): that only costs
time. A signal that comes too late costs everything since the last save.
"""

from __future__ import annotations

import math
import re

from clustertune.errors import Problem

EARLY_SECONDS = 60
"""How much earlier than asked the signal may come."""
_SIGNAL = re.compile(r"^#SBATCH\s+(?:.*\s)?--signal[=\s]+['\"]?(?:R?B:|R:)?[A-Z0-9]+@(\d+)", re.MULTILINE)


def given_in(text: str) -> int | None:
    """The seconds of a script's ``#SBATCH --signal=B:USR1@N``; None where it has none."""
    found = _SIGNAL.findall(text)
    return int(found[-1]) if found else None


def warning(given: int | None, wanted: int, limit_minutes: float | None = None) -> str | None:
    """What to say at the start of a job whose script signals too late, or halfway to its limit or before; None if it is right.

    ``given``: of the script, in seconds. ``wanted``: the recipe's. ``limit_minutes``: the job's time limit, None where there is
    none or it is not known. What sbatch was given on its command line replaces the script's, and Slurm does not report it: the
    message names the script.
    """
    again = f"-> sbatch --signal=B:USR1@{wanted} ..."
    if given is None or given < wanted:
        has = "no --signal" if given is None else f"--signal=B:USR1@{given}"
        return (
            f"{has}: too late to save before the time limit, slurm.signal_seconds is {wanted}; what was computed since the "
            f"last save would be lost {again}"
        )
    if limit_minutes is not None and limit_minutes * 60 < 2 * (given + EARLY_SECONDS):
        left = max(0, round(limit_minutes * 60 - given))
        return (
            f"the script's --signal=B:USR1@{given} tells a job of {limit_minutes:g} minutes to stop {left} s after its start, "
            f"and it goes back into the queue each time; slurm.signal_seconds is {wanted} {again}"
        )
    return None


def find_problems(seconds: int, minutes: float, *, file: str) -> list[Problem]:
    """A time limit that the warning would use up: the job would be asked to stop as soon as it starts."""
    least = 2 * (seconds + EARLY_SECONDS) / 60
    if minutes >= least:
        return []
    text = f"{minutes:g} minutes leave no time to train: the signal comes slurm.signal_seconds={seconds} before the end"
    fix = f"give at least {math.ceil(least)} minutes, or a smaller slurm.signal_seconds"
    return [Problem(text, file=file, key="slurm.time", fix=fix)]
