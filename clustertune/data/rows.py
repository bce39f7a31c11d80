"""Records out of files: JSON Lines, JSON arrays, CSV, plain text, Parquet and Arrow, each record with its file and line.

The readers of ``datasets`` 5.2 refuse a whole file for one bad row, without its line (pandas, pyarrow). Here it becomes a
:class:`BadRow` in its place, so that it is counted and named, and the next one is read.
"""

from __future__ import annotations

import bz2
import csv
import errno
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from clustertune.config.schema import COLUMNS
from clustertune.data.json_text import JsonError, parse, skip_space
from clustertune.data.rejects import BadRow, RowLocation, excerpt
from clustertune.errors import UserError

MAX_RECORD_BYTES = 256 * 1024 * 1024
"""A longer line is skipped without being held: a record is a message, or a tree of them, and no text nears this."""
KINDS = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet", ".arrow")
PACKED = (".gz", ".bz2", ".xz", ".zst")
"""Compressions, behind any ending but those of Parquet and Arrow."""

Record = tuple[RowLocation, dict[str, Any] | BadRow]
Progress = Callable[[int], None]
"""Called now and then with the bytes of the file (as stored) that are read."""

KNOWN = frozenset(column for columns in COLUMNS.values() for column in columns)
"""Every column that a format reads; others of a table (labels, detoxify) are not even decoded."""
_BOM = b"\xef\xbb\xbf"
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")
_REPORT_EVERY = 512
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors that only writing gives: they come from the file of rejected rows, which is written while the input is read."""


def kind_of(name: str) -> tuple[str, str]:
    """The kind of a file (an ending of :data:`KINDS`) and its compression, each "" where there is none, in any case."""
    path = PurePath(name.lower())
    packed = path.suffix if path.suffix in PACKED else ""
    kind = PurePath(path.stem).suffix if packed else path.suffix
    plain = kind in KINDS and not (packed and kind in (".parquet", ".arrow"))
    return (kind, packed) if plain else ("", "")


def read_file(
    opened: Callable[[], Any],
    location: RowLocation,
    shown: str,
    wanted: frozenset[str] = KNOWN,
    progress: Progress = lambda _done: None,
    unused: set[str] | None = None,
) -> Iterator[Record]:
    """The records of one file, in order. A row that is not a record is a BadRow; a damaged file raises UserError.

    ``opened`` gives the file for reading bytes; ``location``: its name and split; ``shown``: what to call it in an error. Of
    tables only the columns ``wanted`` are read, the names of the others join ``unused``.
    """
    kind, packed = kind_of(location.file)
    reader = {".parquet": _parquet, ".arrow": _arrow, ".csv": _table, ".tsv": _table, ".txt": _document}.get(kind, _lines)
    try:
        with opened() as raw:
            stream: Any = raw
            if reader not in (_parquet, _arrow):
                stream = io.BufferedReader(_unpacked(raw, packed), 1 << 16)
                if kind == ".json" and stream.peek(1 << 16).removeprefix(_BOM).lstrip().startswith(b"["):
                    reader = _array
            for number, record in enumerate(reader(stream, location, shown, wanted, set() if unused is None else unused)):
                if number % _REPORT_EVERY == 0:
                    progress(raw.tell())
                yield record
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(packed, error, shown) from None
    except OSError as error:
        if error.errno in _WRITE_ERRORS:
            raise
        if packed and error.errno is None:  # bz2 and zstd have no error of their own
            raise _damaged(packed, error, shown) from None
        raise UserError(f"cannot be read: {error.strerror or error}", file=shown) from None


def _unpacked(raw: Any, packed: str) -> Any:
    if packed == ".zst":
        import pyarrow as pa  # type: ignore[import-untyped]

        return pa.CompressedInputStream(raw, "zstd")
    if packed == ".gz":
        return gzip.GzipFile(fileobj=raw)
    return {".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}[packed](raw) if packed else raw


def _damaged(packed: str, error: Exception, shown: str) -> UserError:
    name = {".gz": "gzip", ".zst": "zstd"}.get(packed, packed[1:])
    return UserError(f"damaged {name} file: {error}", file=shown, fix="fetch the file again")


def _at(location: RowLocation, line: int, row: int) -> RowLocation:
    return RowLocation(location.file, line, location.split, row)


def _lines(stream: Any, location: RowLocation, *_: Any) -> Iterator[Record]:
    number = row = 0
    while line := stream.readline(MAX_RECORD_BYTES):
        number += 1
        at = _at(location, number, row + 1)
        if len(line) == MAX_RECORD_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            row += 1
            yield at, BadRow("message-too-long", f"a line of more than {MAX_RECORD_BYTES} bytes")
            continue
        if number == 1:
            line = line.removeprefix(_BOM)
        line = line.strip(b"\0 \t\r\n")
        if not line:  # a blank line, or the zeros that a crash leaves at the end of a file
            continue
        row += 1
        yield at, _record(line)


def _record(line: bytes) -> dict[str, Any] | BadRow:
    try:
        text = line.decode()
        value, end = parse(text)
    except UnicodeDecodeError as error:
        return BadRow("not-utf8", f"byte 0x{line[error.start]:02x} at column {error.start + 1}")
    except JsonError as error:
        reason = "truncated-json" if error.truncated else "invalid-json"
        return BadRow(reason, f"{error.message} at column {error.position + 1}")
    if skip_space(text, end) != len(text):
        return BadRow("invalid-json", f"more text after the record at column {end + 1}")
    return _object(value)


def _object(value: Any) -> dict[str, Any] | BadRow:
    return value if isinstance(value, dict) else BadRow("wrong-column", f"the row is {excerpt(value)}, not an object")


def _array(stream: Any, location: RowLocation, shown: str, *_: Any) -> Iterator[Record]:
    data = stream.read().removeprefix(_BOM).rstrip(b"\0 \t\r\n")
    try:
        text, damaged = data.decode(), False
    except UnicodeDecodeError:
        text, damaged = data.decode(errors="surrogateescape"), True
    del data
    at, line, counted, row = skip_space(text, text.index("[") + 1), 1, 0, 0
    while text[at : at + 1] != "]" or row:
        line, counted = line + text.count("\n", counted, at), at
        position = _at(location, line, row := row + 1)
        try:
            value, end = parse(text, at)
            at = skip_space(text, end)
            mark = text[at : at + 1]
            if mark not in (",", "]"):
                raise JsonError("expected ',' or ']'", at, truncated=not mark)
        except JsonError as error:
            if not error.truncated:
                raise _broken_array(shown, text, error) from None
            yield position, BadRow("truncated-json", "the file ends inside this record")
            return
        if damaged and (byte := _ESCAPED_BYTE.search(text, counted, end)):
            yield position, BadRow("not-utf8", f"byte 0x{ord(byte.group()) - 0xDC00:02x} in the record that starts here")
        else:
            yield position, _object(value)
        if mark == "]":
            break
        at = skip_space(text, at + 1)
    if (end := skip_space(text, at + 1)) != len(text):
        raise _broken_array(shown, text, JsonError("more text after the array", end, truncated=False))


def _broken_array(shown: str, text: str, error: JsonError) -> UserError:
    """Behind a fault in the middle of an array the limits of records are lost: no row is left out, the file is refused."""
    line = text.count("\n", 0, error.position) + 1
    column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
    return UserError(
        f"not JSON: {error.message} at column {column}",
        file=f"{shown}:{line}",
        fix="fix the file, or give one record per line (.jsonl), where a bad one can be skipped",
    )


def _table(stream: Any, location: RowLocation, shown: str, *_: Any) -> Iterator[Record]:
    """CSV, or TSV, with the names of the columns in its first line. A value may hold line ends within double quotes."""
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(MAX_RECORD_BYTES)
    rows = csv.reader(text, delimiter="\t" if ".tsv" in kind_of(location.file) else ",", strict=True)
    names: list[str] = []
    begins, row = 1, 0
    while True:
        try:
            values = next(rows)
        except StopIteration:
            return
        except csv.Error as error:  # a quote that is not closed takes all lines behind it
            fix = "close the quote (a quote within a value is written twice), or give JSON Lines"
            raise UserError(f"not CSV: {error}, in the row that begins here", file=f"{shown}:{begins}", fix=fix) from None
        at, begins = _at(location, begins, row + 1), rows.line_num + 1
        if not any(values):
            continue
        if not names:
            names = [name.strip() for name in values]
            if len(set(names)) < len(names):
                twice = ", ".join(sorted({repr(name) for name in names if names.count(name) > 1}))
                fix = "name each column once in the first line"
                raise UserError(f"two columns have the name {twice}", file=f"{shown}:{at.line}", fix=fix)
            continue
        row += 1
        if len(values) != len(names):
            yield at, BadRow("wrong-column", f"{len(values)} values, the first line names {len(names)} columns")
        elif found := next(filter(None, map(_ESCAPED_BYTE.search, values)), None):
            yield at, BadRow("not-utf8", f"byte 0x{ord(found.group()) - 0xDC00:02x} in the row")
        else:
            yield at, dict(zip(names, (value or None for value in values), strict=True))


def _document(stream: Any, location: RowLocation, *_: Any) -> Iterator[Record]:
    """A text file is one document."""
    data = stream.read(MAX_RECORD_BYTES)
    try:
        yield _at(location, 1, 1), {"text": data.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        yield _at(location, 1, 1), BadRow("not-utf8", f"byte 0x{data[error.start]:02x} at byte {error.start}")


def _parquet(stream: Any, location: RowLocation, shown: str, wanted: frozenset[str], unused: set[str]) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        with pq.ParquetFile(stream) as table:
            columns = _known(table.schema_arrow.names, wanted, unused)
            yield from _batches(table.iter_batches(batch_size=256, columns=columns), location)
    except pa.ArrowException as error:
        raise UserError(f"damaged Parquet file: {error}", file=shown, fix="fetch the file again") from None


def _arrow(stream: Any, location: RowLocation, shown: str, wanted: frozenset[str], unused: set[str]) -> Iterator[Record]:
    """Arrow's stream, as ``Dataset.save_to_disk`` writes it, or Arrow's file."""
    import pyarrow as pa

    try:
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        table = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
        batches = (table.get_batch(n) for n in range(table.num_record_batches)) if is_file else table
        columns = _known(table.schema.names, wanted, unused)
        yield from _batches((batch.select(columns) for batch in batches), location)
    except pa.ArrowException as error:
        raise UserError(f"damaged Arrow file: {error}", file=shown, fix="fetch the file again") from None


def _known(names: list[str], wanted: frozenset[str], unused: set[str]) -> list[str]:
    """The columns to read; where none is ours all of them: they show what the format is."""
    unused.update(set(names) - wanted)
    return [name for name in names if name in wanted] or names


def _batches(batches: Any, location: RowLocation) -> Iterator[Record]:
    row = 0
    for batch in batches:
        for value in _batch_rows(batch):
            yield _at(location, row + 1, row := row + 1), value


def _batch_rows(batch: Any) -> Iterator[dict[str, Any] | BadRow]:
    """The rows of an Arrow batch; one that holds a string which is not UTF-8 is bad."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield BadRow("not-utf8", f"byte 0x{error.object[error.start]:02x} in the row")
    else:
        yield from rows
