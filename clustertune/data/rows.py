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
import json
import lzma
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from json import scanner
from pathlib import Path, PurePath
from typing import IO, Any

from clustertune.data import encodings
from clustertune.errors import Problem, UserError
from clustertune.recipe.sections import COLUMNS

# Rows that cannot be used: where each stands, why it is out, how many there are of each kind.


SHOWN = 20
"""Bad rows that a refusal lists; the rest is in the count."""
LOOKED_AT = 100
"""Bad rows that are looked at for another format, and columns that are listed as not used."""

NOT_A_FAULT = "no-assistant-reply"
"""A prompt without an answer is left out and counted, but it is a whole row: ``bad_rows: stop`` does not stop at it."""


@dataclass(frozen=True)
class RowLocation:
    """Where a record stands."""

    file: str
    """Name of the file below the input, or ``dataset/split`` for the Hub."""
    line: int
    """Line of the file, or row number in a JSON array, Parquet and the Hub; from 1."""
    split: str | None = None
    """``train`` or ``eval`` where the input has splits of its own."""
    row: int = 0
    """Number of the record in its file, from 1."""


@dataclass(frozen=True)
class Reject:
    """One row that is left out."""

    file: str
    line: int
    reason: str
    detail: str


class BadRow(Exception):
    """Raised while one record is read: the record is out for ``reason``, the next one is looked at."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class Rejects:
    """Counts rejected rows and writes each to ``sink`` at once, so that a file of bad rows costs no memory."""

    def __init__(self, sink: IO[str]) -> None:
        self.rows = 0
        """All rows that were read, good and bad: messages in a file of trees, else records."""
        self.counts: Counter[str] = Counter()
        self.faults: list[Reject] = []
        self.unused: set[str] = set()
        """Columns of the input, and fields of its messages, that no example holds."""
        self.looks_like: Counter[str] = Counter()
        """The settings with which bad rows could be read."""
        self.columns: list[str] = []
        """Those of the first bad row."""
        self._sink = sink

    def good(
        self,
        records: Iterable[tuple[RowLocation, dict[str, Any] | BadRow]],
        known: Iterable[str] | None,
        columns: Mapping[str, str],
    ) -> Iterator[tuple[RowLocation, dict[str, Any]]]:
        """The records that are rows; the others are rejected. ``columns``: the input's names of the ``known`` ones (None:
        whatever a row has)."""
        ours = None if known is None else set(known)
        for location, record in records:
            if isinstance(record, BadRow):
                self.rows += 1
                self.add(location, record.reason, record.detail)
                continue
            renamed = {name: record[theirs] for name, theirs in columns.items() if theirs in record}
            row = {key: value for key, value in record.items() if key not in columns.values()} | renamed if columns else record
            if ours is not None:
                self.leave_out(key for key in row.keys() - ours if row[key] is not None)
            yield location, row

    def leave_out(self, names: Iterable[str]) -> None:
        """Remember what no example holds; of rows that each have other columns, the first :data:`LOOKED_AT`."""
        if len(self.unused) < LOOKED_AT:
            self.unused.update(map(str, names))

    def look(self, row: dict[str, Any], recognise: Callable[[dict[str, Any]], str | None]) -> None:
        """Remember what format a bad row may have; the first :data:`LOOKED_AT` are looked at."""
        if self.total_faults <= LOOKED_AT:
            self.columns = self.columns or [str(key) for key in row][:SHOWN]
            if (name := recognise(row)) is not None:
                self.looks_like[name] += 1

    def add(self, location: RowLocation, reason: str, detail: str) -> None:
        """Count and write one rejected row."""
        reject = Reject(location.file, location.line, reason, detail)
        self.counts[reason] += 1
        self._sink.write(json.dumps(asdict(reject)) + "\n")
        if reason != NOT_A_FAULT and len(self.faults) < SHOWN:
            self.faults.append(reject)

    @property
    def total_faults(self) -> int:
        """Rows that are really wrong."""
        return sum(self.counts.values()) - self.counts[NOT_A_FAULT]

    @property
    def share(self) -> float:
        """Of the rows, those that are really wrong."""
        return self.total_faults / max(self.rows, 1)

    def refuse(self, text: str, fix: str, root: Path | None, shown_input: str) -> UserError:
        """An error that says ``text``, and then names the first bad rows with file and line."""
        problems = [Problem(text, file=shown_input, fix=fix)]
        for reject in self.faults:
            file = str(root / reject.file) if root else reject.file
            problems.append(Problem(f"{reject.reason}: {reject.detail}", file=f"{file}:{reject.line}"))
        return UserError(problems)

    def hint(self, format_name: str) -> str:
        """What to do where rows are not of the format that the recipe names."""
        (looks, count), *_ = self.looks_like.most_common(1) or [("", 0)]
        if count and looks != f"data.format: {format_name}":
            return f"the rows look like {looks}"
        if not self.counts["wrong-column"]:
            return "fix them"
        columns = (
            f"; the columns are {', '.join(self.columns)}: data.columns gives them the format's names" if self.columns else ""
        )
        return f"is data.format={format_name} right?{columns}"


def count_words(counts: Counter[str]) -> str:
    """``empty-text 3, cycle 2``."""
    return ", ".join(f"{reason} {count}" for reason, count in counts.most_common())


def excerpt(value: object, width: int = 60) -> str:
    """A value for a message: scalars cut to ``width``, containers by their type only (they may be 5,000 levels deep)."""
    if isinstance(value, dict | list):
        return {"dict": "an object", "list": "a list"}[type(value).__name__]
    if isinstance(value, str):
        value = value if len(value) <= width else value[:width] + "..."
    shown = ascii(value)
    return shown if len(shown) <= 3 * width else shown[: 3 * width] + "..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises BadRow where a key stands in it twice: the standard parser keeps the last one."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise BadRow("repeated-key", f"the key {excerpt(_repeated(pairs))} stands twice in an object")
    return made


def _repeated(pairs: list[tuple[str, Any]]) -> str:
    return next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
_DEEP_DECODER: Any = json.JSONDecoder(object_pairs_hook=_unique)
_DEEP_DECODER.scan_once = scanner.py_make_scanner(_DEEP_DECODER)  # type: ignore[attr-defined]
MAX_LEVELS = 250_000
"""Of nesting; with 0.5 GB of frames."""


def parse(text: str) -> Any:
    """The value of a JSON text. Raises BadRow."""
    try:
        try:
            return _DECODER.decode(text)
        except RecursionError:
            return _parse_deep(text)
    except json.JSONDecodeError as error:
        raise BadRow("invalid-json", f"{error.msg} at column {error.colno}") from None
    except RecursionError:
        raise BadRow("invalid-json", f"nested deeper than {MAX_LEVELS:,} levels") from None
    except ValueError as error:  # an integer of more digits than int() takes (4,300)
        raise BadRow("invalid-json", str(error)) from None


def _parse_deep(text: str) -> Any:
    """The same without recursion in C, about 10 times slower, for a tree of 5,000 messages: the standard parser stops at about
    1,000 levels. The frames of the parser in Python lie on the heap (Python 3.11 and newer)."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 2 * MAX_LEVELS)  # two frames a level
    try:
        return _DEEP_DECODER.decode(text)
    finally:
        sys.setrecursionlimit(before)


# --- files -----------------------------------------------------------------------------------------------------------------

MAX_RECORD_BYTES = 256 * 1024 * 1024
"""Of a line, of a value in a table, and of a text file: a record is a message, or a tree of them, and no text nears this."""
MAX_EMPTY_LINES = 100_000
"""One behind the other: a gzip of 1 MB may hold a billion."""
KINDS = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".feather")
_BINARY = (".parquet", ".arrow", ".feather")
PACKED = (".gz", ".bz2", ".xz", ".zst")
"""Compressions, behind any ending but those of Parquet, Arrow and Feather."""

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
    plain = kind in KINDS and not (packed and kind in _BINARY)
    return (kind, packed) if plain else ("", "")


def read_file(
    opened: Callable[[], Any],
    location: RowLocation,
    shown: str,
    columns: frozenset[str] | None = KNOWN,
    progress: Progress = lambda _done: None,
    unused: set[str] | None = None,
) -> Iterator[Record]:
    """The records of one file, in order. A row that is not a record is a BadRow; a damaged file raises UserError.

    ``opened`` gives the file for reading bytes; ``location``: its name and split; ``shown``: what to call it in an error. Of
    tables only the columns ``columns`` are read (None: all), the names of the others join ``unused``.
    """
    kind, packed = kind_of(location.file)
    readers: dict[str, Callable[..., Iterator[Record]]] = {".parquet": _parquet, ".arrow": _arrow, ".feather": _arrow}
    readers |= {".csv": _table, ".tsv": _table, ".txt": _document}
    readers.setdefault(kind, _lines)
    reader = readers[kind]
    remedy: str | None = None
    try:
        with opened() as raw:
            stream: Any = raw
            if kind not in _BINARY:
                stream = io.BufferedReader(_unpacked(raw, packed), 1 << 16)
                _refuse_wide(stream.peek(1 << 16), shown, kind, packed)
                if kind == ".json" and stream.peek(1 << 16).removeprefix(_BOM).lstrip().startswith(b"["):
                    reader = _array
            for number, record in enumerate(reader(stream, location, shown, columns, set() if unused is None else unused)):
                if number % _REPORT_EVERY == 0:
                    progress(raw.tell())
                at, row = record
                if isinstance(row, BadRow) and row.reason == "not-utf8" and kind not in _BINARY:
                    remedy = remedy or ": ".join(filter(None, _remedy(opened, shown, kind, packed)))
                    row = BadRow(row.reason, f"{row.detail}; {remedy}")
                yield at, row
    except UnicodeDecodeError as error:  # of a JSON array
        text = f"byte 0x{error.object[error.start]:02x} at byte {error.start} is not UTF-8"
        why, again = _remedy(opened, shown, kind, packed)
        raise UserError(f"{text}; {why}" if again else text, file=shown, fix=again or why) from None
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(packed, error, shown) from None
    except OSError as error:
        if error.errno in _WRITE_ERRORS:
            raise
        if packed and error.errno is None:  # bz2 and zstd have no error of their own
            raise _damaged(packed, error, shown) from None
        raise UserError(f"cannot be read: {error.strerror or error}", file=shown) from None


def _refuse_wide(head: bytes, shown: str, kind: str, packed: str) -> None:
    """Raise UserError where a file begins as one in UTF-16 or UTF-32."""
    if (wide := encodings.wide_encoding(head)) is not None:
        name, by = wide
        table = kind == ".txt" and encodings.looks_like_table(head, name)
        text = f"is in {name[:6]}, by {by}{', a table with tabs' if table else ''}: write it in UTF-8, and name the new file"
        raise UserError(text, file=shown, fix=encodings.command(shown, name, ".tsv" if table else kind, packed))


def _remedy(opened: Callable[[], Any], shown: str, kind: str, packed: str) -> tuple[str, str]:
    """A sentence on the encoding of a file that is not UTF-8, and the command that writes it again, "" where there is none."""
    with opened() as raw:
        stream = io.BufferedReader(_unpacked(raw, packed), 1 << 16)
        name, text = encodings.eight_bit_encoding(iter(lambda: stream.readline(MAX_RECORD_BYTES), b""))
    return text, encodings.command(shown, name, kind, packed) if name else ""


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


def _lines(stream: Any, location: RowLocation, shown: str, *_: Any) -> Iterator[Record]:
    row = empty = 0
    for number, line in enumerate(iter(lambda: stream.readline(MAX_RECORD_BYTES), b""), 1):
        text = line.removeprefix(_BOM).strip(b"\0 \t\r\n")  # files that were joined have one within
        empty = 0 if text else empty + 1  # a blank line, or the zeros that a crash leaves at the end of a file
        if empty > MAX_EMPTY_LINES or len(line) == MAX_RECORD_BYTES:
            what = f"more than {MAX_EMPTY_LINES:,} empty lines" if empty else f"a line of more than {MAX_RECORD_BYTES:,} bytes"
            fix = "give the file that holds the rows"
            raise UserError(f"{what}: this is no file of rows", file=f"{shown}:{number}", fix=fix)
        if text:
            row += 1
            yield _at(location, number, row), _record(text)


def _record(line: bytes) -> dict[str, Any] | BadRow:
    try:
        return _object(parse(line.decode()))
    except UnicodeDecodeError as error:
        return BadRow("not-utf8", f"byte 0x{line[error.start]:02x} at column {error.start + 1}")
    except BadRow as bad:
        return bad


def _object(value: Any) -> dict[str, Any] | BadRow:
    return value if isinstance(value, dict) else BadRow("wrong-column", f"the row is {excerpt(value)}, not an object")


def _array(stream: Any, location: RowLocation, shown: str, *_: Any) -> Iterator[Record]:
    """A JSON array: behind a fault in its middle the limits of records are lost, so that the whole file is refused."""
    fix = "fix the file, or give one record per line (.jsonl), where a bad one can be skipped"
    try:
        text = stream.read().removeprefix(_BOM).rstrip(b"\0 \t\r\n").decode()
        try:
            rows = json.loads(text, object_pairs_hook=_marked)
        except RecursionError:
            rows = _parse_deep(text)
    except json.JSONDecodeError as error:
        text = f"not JSON: {error.msg} at column {error.colno}"
        raise UserError(text, file=f"{shown}:{error.lineno}", fix=fix) from None
    except UnicodeDecodeError:
        raise
    except (RecursionError, ValueError) as error:
        raise UserError(f"not JSON: {error}", file=shown, fix=fix) from None
    except BadRow as bad:  # of deep rows
        raise UserError(bad.detail, file=shown, fix=fix) from None
    yield from ((_at(location, number, number), _checked(row)) for number, row in enumerate(rows, 1))


class _Repeated(dict[str, Any]):
    """An object of JSON in which a key stands twice, :attr:`key`."""

    key = ""


def _marked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        made = _Repeated(made)
        made.key = _repeated(pairs)
    return made


def _checked(row: Any) -> dict[str, Any] | BadRow:
    """The row of an array, whose parser can only mark an object with a key that stands in it twice."""
    waiting = [row]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _Repeated):
            return BadRow("repeated-key", f"the key {excerpt(value.key)} stands twice in an object")
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
    return _object(row)


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
            if len(names) == 1 and (sign := next((sign for sign in ";\t|" if sign in names[0]), None)):
                fix = f"write commas: {encodings.with_commas(shown, sign, kind_of(location.file)[1])}"
                raise UserError(f"the columns are separated by {sign!r}, not by commas", file=f"{shown}:{at.line}", fix=fix)
            if len(set(names)) < len(names):
                twice = ", ".join(sorted({repr(name) for name in names if names.count(name) > 1}))
                fix = "name each column once in the first line"
                raise UserError(f"two columns have the name {twice}", file=f"{shown}:{at.line}", fix=fix)
            continue
        row += 1
        if len(values) != len(names):
            yield at, BadRow("wrong-column", f"{len(values)} values, the first line names {len(names)} columns")
        elif escaped := next(filter(None, map(_ESCAPED_BYTE.search, values)), None):
            yield at, BadRow("not-utf8", f"byte 0x{ord(escaped.group()) - 0xDC00:02x} in the row")
        else:
            yield at, dict(zip(names, (value or None for value in values), strict=True))


def _document(stream: Any, location: RowLocation, *_: Any) -> Iterator[Record]:
    """A text file is one document."""
    data = stream.read(MAX_RECORD_BYTES)
    try:
        yield _at(location, 1, 1), {"text": data.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        yield _at(location, 1, 1), BadRow("not-utf8", f"byte 0x{data[error.start]:02x} at byte {error.start}")


def _parquet(
    stream: Any, location: RowLocation, shown: str, selected: frozenset[str] | None, unused: set[str]
) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        with pq.ParquetFile(stream) as table:
            columns = chosen_columns(table.schema_arrow.names, selected, unused)
            yield from table_records(table.iter_batches(batch_size=BATCH_ROWS, columns=columns), location)
    except pa.ArrowException as error:
        raise UserError(f"damaged Parquet file: {error}", file=shown, fix="fetch the file again") from None


def _arrow(
    stream: Any, location: RowLocation, shown: str, selected: frozenset[str] | None, unused: set[str]
) -> Iterator[Record]:
    """Arrow's stream, as ``Dataset.save_to_disk`` writes it, or Arrow's file, which is Feather's second version."""
    import pyarrow as pa

    try:
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        table = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
        batches = (table.get_batch(n) for n in range(table.num_record_batches)) if is_file else table
        columns = chosen_columns(table.schema.names, selected, unused)
        yield from table_records((batch.select(columns) for batch in batches), location)
    except pa.ArrowException as error:
        raise UserError(f"damaged Arrow file: {error}", file=shown, fix="fetch the file again") from None


def chosen_columns(names: list[str], selected: frozenset[str] | None, unused: set[str]) -> list[str]:
    """The columns to read; where none is ours all of them: they show what the format is."""
    if selected is None:
        return names
    unused.update(set(names) - selected)
    return [name for name in names if name in selected] or names


def table_records(batches: Any, location: RowLocation) -> Iterator[Record]:
    """The rows of Arrow batches or tables, numbered through all of them."""
    row = 0
    for batch in batches:
        for value in arrow_rows(batch):
            yield _at(location, row + 1, row := row + 1), value


BATCH_ROWS = 256
"""Rows of a table that are held as Python objects at once."""


def arrow_rows(batch: Any) -> Iterator[dict[str, Any] | BadRow]:
    """The rows of an Arrow batch or table as JSON Lines would hold them; one with a string that is not UTF-8 is bad.

    An Arrow struct has every key that any row has, null where a row lacks it: below the columns such keys are left out, as
    TRL's ``remove_none_values`` (trl/trainer/utils.py of 1.16) does it. What the ``Json`` type of ``datasets`` and the entries
    of an Arrow map hold as null was written there, and stays.
    """
    decoders = {name: _decoder(kind) for name, kind in zip(batch.schema.names, _types(batch.schema), strict=True)}
    changed = {name: decode for name, decode in decoders.items() if decode is not None}

    def decoded(row: dict[str, Any]) -> dict[str, Any] | BadRow:
        try:
            return row | {name: decode(row[name]) for name, decode in changed.items() if row[name] is not None}
        except BadRow as bad:
            return bad

    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield decoded(batch.slice(index, 1).to_pylist()[0])
            except UnicodeDecodeError as error:
                yield BadRow("not-utf8", f"byte 0x{error.object[error.start]:02x} in the row")
    else:
        yield from map(decoded, rows)


def _types(schema: Any) -> list[Any]:
    """The columns' Arrow types; of a file of ``datasets`` those that it says itself, as a writer may lose the type ``Json``."""
    own = (schema.metadata or {}).get(b"huggingface", b"")
    if b'"Json"' not in own:
        return list(schema.types)
    import datasets

    try:
        described = datasets.Features.from_dict(json.loads(own)["info"]["features"]).arrow_schema
    except (ValueError, KeyError, TypeError):  # of another version, or not its own
        return list(schema.types)
    columns = zip(schema.names, schema.types, strict=True)
    return [described.field(name).type if name in described.names else kind for name, kind in columns]


Decode = Callable[[Any], Any]


def _decoder(kind: Any) -> Decode | None:
    """What turns a Python value of an Arrow type, other than None, into a value of JSON; None where it is one already."""
    import pyarrow as pa

    if isinstance(kind, pa.JsonType):
        return parse
    if isinstance(kind, pa.BaseExtensionType):
        return _decoder(kind.storage_type)
    if pa.types.is_struct(kind):
        parts = {kind.field(at).name: _decoder(kind.field(at).type) for at in range(kind.num_fields)}
        return lambda value: {
            key: inner if (decode := parts.get(key)) is None else decode(inner)
            for key, inner in value.items()
            if inner is not None
        }
    if pa.types.is_map(kind):
        item = _decoder(kind.item_type)
        return lambda value: {key: inner if item is None or inner is None else item(inner) for key, inner in value}
    if hasattr(kind, "value_type") and not pa.types.is_dictionary(kind):  # lists of every sort
        inner = _decoder(kind.value_type)
        return inner and (lambda value: [item if item is None else inner(item) for item in value])
    return None
