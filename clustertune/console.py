"""What a person sees: messages on stderr, tables, progress bars only on a terminal, one JSON document on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from clustertune.errors import ExitCode, UserError

stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """One line for a person, on stderr. Markup is not interpreted: paths may hold brackets."""
    stderr.print(message, markup=False)


def emit_json(document: Any) -> None:
    """The one document of a ``--json`` command, on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def show_error(error: UserError) -> None:
    """Every problem of an error, one paragraph each."""
    label = "note" if error.code is ExitCode.AGAIN else "error"
    for problem in error.problems:
        where = ": ".join(part for part in (problem.file, problem.key) if part)
        stderr.print(
            f"{label}: {where + ': ' if where else ''}{problem.message}",
            markup=False,
            style="red" if stderr.is_terminal else None,
        )
        if problem.fix:
            stderr.print(f"       {problem.fix}", markup=False)


def count_progress() -> Progress:
    """A bar that counts items; silent where stderr is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=stderr,
        disable=not stderr.is_terminal,
    )


def byte_progress() -> Progress:
    """A bar that counts bytes, with their rate; silent where stderr is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=stderr,
        disable=not stderr.is_terminal,
    )
