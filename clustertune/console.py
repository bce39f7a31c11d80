"""What a person sees: messages on stderr, progress bars only on a terminal; on stdout what was asked for, as tables or one JSON
document."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from clustertune.errors import ExitCode, UserError
from clustertune.host.credentials import mask

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.segment import Segment
    from rich.table import Table

    stderr: Console
    stdout: Console


@cache
def _console(name: str) -> Console:
    """Made when the first message comes: rich takes 70 ms to import, and many commands say nothing."""
    from rich.console import Console
    from rich.segment import Segment
    from rich.table import Table

    class Whole(Console):
        """Prints tables without an ellipsis: a line longer than the window is broken by the terminal, a number cut is lost."""

        def print(self, *objects: Any, **options: Any) -> None:
            before = self._width
            for table in objects:
                if isinstance(table, Table):
                    self.width = max(self.width, _least_width(self, table))  # print(width=...) makes narrower only
            try:
                super().print(*objects, **options)
            finally:
                self._width = before

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            """Names of runs, files and rows reach the terminal through here only: nothing of them steers it."""
            for part in super().render(renderable, options):
                yield part if part.control else Segment(escape(part.text), part.style)

    stream = Whole(stderr=name == "stderr", highlight=False, soft_wrap=True)
    if not stream.is_terminal:
        stream.width = _PIPE_WIDTH  # rich takes a pipe for 80 columns wide
    return stream


def _least_width(console: Console, table: Table) -> int:
    """Columns that a table needs so that no number is cut; no cell of it gets an ellipsis from now on."""
    wide = console.options.update(width=_PIPE_WIDTH)
    for column in table.columns:
        column.overflow = "fold"
        sizes = [console.measure(cell, options=wide) for cell in (column.header, *column.cells)]
        whole = max(size.maximum for size in sizes)
        column.no_wrap = column.no_wrap or whole <= _SHORT_CELL
        least = whole if column.no_wrap else min(max(size.minimum for size in sizes), _LONGEST_WORD)
        column.min_width = max(column.min_width or 0, least)
    lines = 3 * len(table.columns) + 1  # and blanks between columns, at most
    return sum(column.min_width or 0 for column in table.columns) + lines


def __getattr__(name: str) -> Any:
    """``console.stderr``, the console that all messages go to, and ``console.stdout``, that of a command's result."""
    if name in ("stderr", "stdout"):
        return _console(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_PIPE_WIDTH = 10_000
_SHORT_CELL = 24
"""Characters of a table's cell that stays on one line, as a number with its unit does."""
_LONGEST_WORD = 40
"""Characters of a word that a table does not break: more than a number has, fewer than a path."""
MAX_PROBLEMS = 25
"""Problems that are printed: one screen. ``--json`` gives all of them."""
_MAX_TEXT = 600
"""Characters of one message; a longer one loses its middle."""


def say(message: str) -> None:
    """One line for a person, on stderr. Markup is not interpreted: paths may hold brackets."""
    _console("stderr").print(escape(message), markup=False)


def show(message: str) -> None:
    """As :func:`say`, on stdout: a line of what the command was asked for."""
    _console("stdout").print(escape(message), markup=False)


def escape(text: str, keep: str = "\n\t") -> str:
    """``text`` without secrets, and without what steers a terminal or turns the reading direction: names may hold anything."""
    text = mask(text)
    if text.isprintable():
        return text
    return "".join(c if c in keep or unicodedata.category(c) not in _STEERING else ascii(c)[1:-1] for c in text)


_STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories: control, format (bidirectional overrides), lone surrogate, line and paragraph separator."""


def emit_json(document: Any) -> None:
    """The one document of a ``--json`` command, on stdout: strict JSON in ASCII, a number that is not finite as null, and no
    secret in a text.

    Raises OSError where stdout cannot be written; nothing is written to it from then on.
    """
    text = json.dumps(_plain(document), indent=2, allow_nan=False) + "\n"
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        # What is left in the buffer would fail again, with a traceback, when the interpreter ends.
        with contextlib.suppress(OSError), open(os.devnull, "wb") as sink:  # noqa: PTH123
            os.dup2(sink.fileno(), sys.stdout.fileno())
        raise


def reply(as_json: bool, document: Any, *shown: str | Callable[[], Any]) -> None:
    """Print a command's document with ``--json``, otherwise its lines for a person; a callable prints its part by itself."""
    if as_json:
        emit_json(document)
    for part in () if as_json else shown:
        part() if callable(part) else say(part)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def show_error(error: UserError) -> None:
    """The problems of an error, one paragraph each, as many as fit a screen."""
    stderr = _console("stderr")
    label = "note" if error.code is ExitCode.AGAIN else "error"
    for problem in error.problems[:MAX_PROBLEMS]:
        where = "".join(f"{_fit(escape(part, keep=''))}: " for part in (problem.file, problem.key) if part)
        stderr.print(
            f"{label}: {where}{_fit(escape(problem.message))}",
            markup=False,
            style="red" if stderr.is_terminal and label == "error" else None,
        )
        if problem.fix:
            stderr.print(f"       {_fit(escape(problem.fix))}", markup=False)
    if (more := len(error.problems) - MAX_PROBLEMS) > 0:
        stderr.print(f"and {more} more; --json lists all", markup=False)


def _fit(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[: _MAX_TEXT // 2]} ... {text[-_MAX_TEXT // 3 :]}"


def count_progress() -> Progress:
    """A bar that counts items; silent where stderr is not a terminal."""
    from rich.progress import MofNCompleteColumn

    return _progress(MofNCompleteColumn())


def byte_progress() -> Progress:
    """A bar that counts bytes, with their rate; silent where stderr is not a terminal."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    return _progress(DownloadColumn(), TransferSpeedColumn())


def _progress(*columns: ProgressColumn) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    shown = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    return Progress(*shown, console=_console("stderr"), disable=not _console("stderr").is_terminal)


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Lines of a table that are never broken: programs look for its words too. ``right``: columns that end in line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = [str.rjust if at in right else str.ljust for at in range(len(widths))]
    return ["  ".join(put(cell, wide) for put, cell, wide in zip(pad, row, widths, strict=True)).rstrip() for row in rows]
