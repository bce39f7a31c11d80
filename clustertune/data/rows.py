"""Records out of files: JSON lines, JSON arrays, both also gzipped, and Parquet, each with its file and line."""

from __future__ import annotations

import errno
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clustertune.data.json_text import JsonError, parse, skip_space
from clustertune.data.rejects import Place, Rejects, excerpt
from clustertune.errors import Problem, UserError

MAX_RECORD_BYTES = 256 * 1024 * 1024
"""A longer line is skipped without being held: a record is a message, or a tree of them, and no text nears this."""

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".parquet")

COLUMNS = frozenset(
    {"message_id", "parent_id", "message_tree_id", "text", "role", "lang", "rank", "deleted", "review_result"}
    | {"prompt", "instruction", "input", "output", "messages", "conversations"}
)
"""Every column that a format reads; others of a table (labels, detoxify) are not even decoded."""

Record = tuple[Place, dict[str, Any]]
Progress = Callable[[int], None]
"""Called now and then with the bytes of the file (as stored) that are read."""

_BOM = b"\xef\xbb\xbf"
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")
_REPORT_EVERY = 512
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors that only writing gives: they come from the file of rejected rows, which is written while the input is read."""


def is_data_file(path: Path) -> bool:
    """Whether the name ends as one of :data:`SUFFIXES`, in any case."""
    return path.name.lower().endswith(SUFFIXES)


def read_file(
    path: Path, name: str, split: str | None, rejects: Rejects, progress: Progress = lambda _done: None
) -> Iterator[Record]:
    """The records of one file, in order. Rows that are no record are rejected; a damaged file raises UserError."""
    try:
        if path.name.lower().endswith(".parquet"):
            yield from _parquet(path, name, split, rejects)
            return
        with path.open("rb", buffering=0) as raw:
            source: Any = gzip.GzipFile(fileobj=raw) if path.name.lower().endswith(".gz") else raw
            stream = io.BufferedReader(source, 1 << 16)
            whole = path.name.lower().removesuffix(".gz").endswith(".json")
            head = stream.peek(1 << 16).removeprefix(_BOM).lstrip() if whole else b""
            reader = _array if head.startswith(b"[") else _lines
            for number, record in enumerate(reader(stream, path, name, split, rejects)):
                if number % _REPORT_EVERY == 0:
                    progress(raw.tell())
                yield record
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(Problem(f"damaged gzip file: {error}", file=str(path), fix="fetch the file again")) from None
    except OSError as error:
        if error.errno in _WRITE_ERRORS:
            raise
        raise UserError(Problem(f"cannot be read: {error.strerror or error}", file=str(path))) from None


def _lines(stream: io.BufferedReader, _path: Path, name: str, split: str | None, rejects: Rejects) -> Iterator[Record]:
    number = row = 0
    while line := stream.readline(MAX_RECORD_BYTES):
        number += 1
        place = Place(name, number, split, row + 1)
        if len(line) == MAX_RECORD_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            row += 1
            rejects.add(place, "message-too-long", f"a line of more than {MAX_RECORD_BYTES} bytes")
            continue
        if number == 1:
            line = line.removeprefix(_BOM)
        line = line.strip(b"\0 \t\r\n")
        if not line:  # a blank line, or the zeros that a crash leaves at the end of a file
            continue
        row += 1
        try:
            text = line.decode()
            value, end = parse(text)
        except UnicodeDecodeError as error:
            rejects.add(place, "not-utf8", f"byte 0x{line[error.start]:02x} at column {error.start + 1}")
        except JsonError as error:
            reason = "truncated-json" if error.truncated else "invalid-json"
            rejects.add(place, reason, f"{error.message} at column {error.position + 1}")
        else:
            if skip_space(text, end) != len(text):
                rejects.add(place, "invalid-json", f"more text after the record at column {end + 1}")
            elif not isinstance(value, dict):
                rejects.add(place, "wrong-column", f"the row is {excerpt(value)}, not an object")
            else:
                yield place, value


def _array(stream: io.BufferedReader, path: Path, name: str, split: str | None, rejects: Rejects) -> Iterator[Record]:
    data = stream.read().removeprefix(_BOM).rstrip(b"\0 \t\r\n")
    try:
        text, damaged = data.decode(), False
    except UnicodeDecodeError:
        text, damaged = data.decode(errors="surrogateescape"), True
    del data
    at, line, counted, row = skip_space(text, text.index("[") + 1), 1, 0, 0
    while text[at : at + 1] != "]" or row:
        line, counted = line + text.count("\n", counted, at), at
        place = Place(name, line, split, row := row + 1)
        try:
            value, end = parse(text, at)
            at = skip_space(text, end)
            mark = text[at : at + 1]
            if mark not in (",", "]"):
                raise JsonError("expected ',' or ']'", at, truncated=not mark)
        except JsonError as error:
            if not error.truncated:
                raise _broken_array(path, text, error) from None
            rejects.add(place, "truncated-json", "the file ends inside this record")
            return
        if damaged and (byte := _ESCAPED_BYTE.search(text, counted, end)):
            rejects.add(place, "not-utf8", f"byte 0x{ord(byte.group()) - 0xDC00:02x} in the record that starts here")
        elif not isinstance(value, dict):
            rejects.add(place, "wrong-column", f"the row is {excerpt(value)}, not an object")
        else:
            yield place, value
        if mark == "]":
            break
        at = skip_space(text, at + 1)
    if (end := skip_space(text, at + 1)) != len(text):
        raise _broken_array(path, text, JsonError("more text after the array", end, truncated=False))


def _broken_array(path: Path, text: str, error: JsonError) -> UserError:
    """Behind a fault in the middle of an array no record can be told from the next: no row is left out, the file is refused."""
    line = text.count("\n", 0, error.position) + 1
    column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
    problem = Problem(
        f"not JSON: {error.message} at column {column}",
        file=f"{path}:{line}",
        fix="fix the file, or give one record per line (.jsonl), where a bad one can be skipped",
    )
    return UserError(problem)


def _parquet(path: Path, name: str, split: str | None, rejects: Rejects) -> Iterator[Record]:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    row = 0
    try:
        with pq.ParquetFile(path) as table:
            columns = [column for column in table.schema_arrow.names if column in COLUMNS]
            for batch in table.iter_batches(batch_size=256, columns=columns):
                for value in _batch_rows(batch):
                    place = Place(name, row + 1, split, row := row + 1)
                    if isinstance(value, dict):
                        yield place, value
                    else:
                        rejects.add(place, "not-utf8", value)
    except pa.ArrowException as error:
        raise UserError(Problem(f"damaged Parquet file: {error}", file=str(path), fix="fetch the file again")) from None


def _batch_rows(batch: Any) -> Iterator[dict[str, Any] | str]:
    """The rows of an Arrow batch; a row that holds a string that is not UTF-8 becomes a sentence that says so."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield f"byte 0x{error.object[error.start]:02x} in the row"
    else:
        yield from rows
