"""What a person sees: messages on stderr, progress bars only on a terminal; on stdout what was asked for, as tables or one JSON
document."""

from __future__ import annotations

import contextlib
import itertools
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
        """Prints tables without breaking a word: one that the window cannot hold becomes a list of its rows."""

        def print(self, *objects: Any, **options: Any) -> None:
            before, fitted = self._width, []
            for one in objects:
                if not isinstance(one, Table) or (least := _fit_columns(self, one)) <= self.width:
                    fitted.append(one)
                elif self.is_terminal:
                    fitted += _as_list(self, one)
                    options = {"soft_wrap": True, "sep": "\n", **options}
                else:  # a width that was set: what reads it breaks lines by itself
                    self.width = least
                    fitted.append(one)
            try:
                super().print(*fitted, **options)
            finally:
                self._width = before

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            """Names of runs, files and rows reach the terminal through here only: nothing of them steers it."""
            for part in super().render(renderable, options):
                yield part if part.control else Segment(escape(part.text), part.style)

    stream = Whole(stderr=name == "stderr", highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not stream.is_terminal:
        stream.width = _PIPE_WIDTH  # rich takes a pipe for 80 columns wide
    return stream


def make_table(*columns: str, title: str | None = None, text_columns: int = 1) -> Table:
    """The one form of all tables, whose first columns hold text and the others numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=None if title is None else Text(title),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_header=any(columns),
    )
    for index, name in enumerate(columns):
        table.add_column(Text(name), justify="left" if index < text_columns else "right", overflow="fold")
    return table


def _fit_columns(console: Console, table: Table) -> int:
    """Set the widths of a table's columns so that it fits, and no word and no number is broken; the least width that holds it.

    What is left over goes to the columns that would take most.
    """
    wide = console.options.update(width=_PIPE_WIDTH)
    least, largest = list[int](), list[int]()
    for column in table.columns:
        column.overflow, column.no_wrap = "fold", False
        sizes = [console.measure(cell, options=wide) for cell in column.cells]
        head = console.measure(column.header, options=wide) if table.show_header else None
        largest.append(max([0, *(size.maximum for size in sizes), *([head.maximum] if head else [])]))
        numbers = column.justify == "right"
        parts = [size.maximum if numbers and size.maximum <= _SHORT_CELL else size.minimum for size in sizes]
        least.append(max([1, *parts, *([head.minimum] if head else [])]))
    # Lines and blanks between columns, and at the edges where the table has them: make_table's has not.
    around = 3 * len(table.columns) + (1 if table.pad_edge else -1)
    room = max(0, console.width - around - sum(least))
    for column, small, large in sorted(zip(table.columns, least, largest, strict=True), key=lambda one: one[2] - one[1]):
        left = sum(1 for one in table.columns if one.width is None)
        more = min(large - small, room // max(1, left))
        column.width, room = small + max(0, more), room - max(0, more)
    return sum(least) + around


def _as_list(console: Console, table: Table) -> list[Any]:
    """The rows of a table that is too wide: of each its first cell, and below it the others with their headings; of three
    columns, such as key, value and origin, a line or two. Words stay whole."""
    from rich.text import Text

    width, rows = console.width, list(zip(*(list(column.cells) for column in table.columns), strict=True))
    titles = [str(column.header) for column in table.columns]
    lines: list[Any] = [Text(str(table.title), style="italic")] if table.title else []
    first = min(_LONGEST_FIRST, max((len(str(row[0])) for row in rows), default=0))
    if table.show_header and len(titles) <= _FEW_COLUMNS:
        lines.append(Text("  ".join([titles[0].ljust(first), *titles[1:]]), style="bold"))
    for row in rows:
        cells = [str(cell) for cell in row]
        if len(cells) <= _FEW_COLUMNS:
            text = "  ".join([cells[0].ljust(first), *filter(None, cells[1:])])
            lines += _wrapped(text.split(" "), width, "", " " * 4)
        else:
            lines.append(Text(f"{titles[0]} {cells[0]}".strip(), style="bold"))
            named = [f"{title} {cell}".strip() for title, cell in zip(titles[1:], cells[1:], strict=True) if cell]
            lines += _wrapped([f"{one}," for one in named[:-1]] + named[-1:], width, "  ", "  ")
    return lines


def _wrapped(parts: Sequence[str], width: int, begin: str, further: str) -> list[Any]:
    """Lines of parts that are not broken, but for one longer than a line, which is broken between words."""
    from rich.text import Text

    lines, line = list[str](), begin
    pieces = [[part] if len(part) + len(further) <= width else part.split(" ") for part in parts]
    for part in itertools.chain.from_iterable(pieces):
        if len(line) + 1 + len(part) > width and line.strip():
            lines.append(line)
            line = further + part
        else:
            line += part if line in (begin, further) and not line.strip() else f" {part}"
    return [Text(line) for line in [*lines, line]]


def __getattr__(name: str) -> Any:
    """``console.stderr``, the console that all messages go to, and ``console.stdout``, that of a command's result."""
    if name in ("stderr", "stdout"):
        return _console(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_PIPE_WIDTH = 10_000
_SHORT_CELL = 24
"""Characters of a table's cell that stays on one line, as a number with its unit does."""
_LONGEST_FIRST = 36
"""Characters of the first cells of such a list that are padded to one width."""
_FEW_COLUMNS = 3
"""Up to so many a row of a table that is too wide needs no headings."""
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
    keep += _JOINERS
    return "".join(c if c in keep or unicodedata.category(c) not in CONTROL_CATEGORIES else ascii(c)[1:-1] for c in text)


CONTROL_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories: control, format (bidirectional overrides), lone surrogate, line and paragraph separator."""
_JOINERS = "\u200c\u200d"
"""Format characters that Persian, Hindi and emoji are written with; they change neither order nor place of others."""


def duration(seconds: object) -> str:
    """``0.42 s``, ``41 s``, ``12 min 05 s``, ``8 h 24 min``; ``-`` for what is no finite number."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not abs(seconds) < 1e12:
        return "-"
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    rounded = round(seconds)
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


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
