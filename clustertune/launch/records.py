"""What ``scontrol show job`` says, as records. It needs no accounting database, and users may not have one."""

from __future__ import annotations

import re

_FREE_LINES = ("Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment", "SystemComment", "Dependency")
"""Keys with a line to themselves, whose values hold what a user typed."""


_NAME_END = re.compile(r"\n(?=   UserId=\S+ GroupId=\S+ MCS_label=.*\n   Priority=\d+ )")
"""Where the job's name ends: Slurm takes one with line breaks."""


def parse_jobs(text: str) -> list[dict[str, str]]:
    """The records of ``scontrol show job`` (several for an array).

    The form of several lines is read and not ``-o``: there a job's name, command or folder with blanks and equal signs cannot
    be told from the keys after it.
    """
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n(?=JobId=)", text):
        if blocks and not _NAME_END.search(blocks[-1]):  # the break was part of the name
            blocks[-1] += "\n\n" + block
        else:
            blocks.append(block)
    return [parse_job(block) for block in blocks if _NAME_END.search(block)]


def parse_job(text: str) -> dict[str, str]:
    """One record."""
    head, rest = _NAME_END.split(text.strip("\n"), maxsplit=1)
    ids, _, name = head.partition(" JobName=")
    record = {**_pairs(ids), "JobName": name}
    for line in rest.split("\n"):
        key, equals, value = line.strip().partition("=")
        found = {key: value} if key in _FREE_LINES else _pairs(line)
        # The first stands: what follows a free text may be part of it.
        record = {**found, **record} if equals else record
    return record


def _pairs(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)
