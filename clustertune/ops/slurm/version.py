"""Slurm's versions, and the words that only some of them know: an unknown key makes every client command fail.

``packaging`` reads versions of Python packages (PEP 440), which ``slurm-wlm 24.11.5-1`` is not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering


@total_ordering
@dataclass(frozen=True)
class Version:
    """A release of Slurm: year and month, such as 24.11."""

    year: int
    month: int

    def __str__(self) -> str:
        return f"{self.year:02d}.{self.month:02d}"

    def __lt__(self, other: Version) -> bool:
        return (self.year, self.month) < (other.year, other.month)


OLDEST, NEWEST = Version(22, 5), Version(24, 11)
"""Releases whose parsers and daemons took the files: Debian 12 and Debian 13."""


def parse_version(text: str) -> Version | None:
    """The release in ``22.05.8``, ``slurm-wlm 24.11.5`` or ``23.11``; None where there is none."""
    match = re.search(r"(?<![\d.])(\d\d)\.(0[1-9]|1[0-2])(?!\d)", text)
    return Version(int(match[1]), int(match[2])) if match else None


def preempt_signal(version: Version | None) -> tuple[str, str]:
    """Key and value by which a preempted job gets the signal of its ``--signal`` at once.

    ``PreemptParameters`` is not known to 22.05 ("unrecognized key"). The word in ``SlurmctldParameters``, a list whose unknown
    members do no harm, works in 22.05 and 24.11 alike: one file serves machines of different releases, and of an unknown one.
    24.11 documents the other word only, so that what comes after may have forgotten the first.
    """
    if version is not None and version > NEWEST:
        return "PreemptParameters", "send_user_signal"
    return "SlurmctldParameters", "preempt_send_user_signal"
