"""Text files that are not in UTF-8: which encoding they are in, and the command that writes them again in UTF-8."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import PurePath

_MARKS = ((b"\xff\xfe\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))
"""Byte order marks, the longer first; iconv reads the mark itself."""
_UNPACK = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_UNDEFINED = frozenset((0x81, 0x8D, 0x8F, 0x90, 0x9D))
"""Bytes that Windows-1252 has no character for."""
_RUN = re.compile(rb"[\x80-\xff]{3,}")
"""Letters beyond ASCII stand alone in the words of western languages; in Cyrillic, Greek or Chinese they are all letters."""
_ZEROS = 0.05
"""Share of zero bytes from which on a file without a byte order mark is taken for UTF-16: of English text half of them are."""
SAVE_AGAIN = "save the file as UTF-8 in the program that wrote it"


def wide_encoding(head: bytes) -> tuple[str, str] | None:
    """iconv's name of the encoding, and by what it was recognised, of a file in UTF-16 or UTF-32; None for other files.

    ``head``: the first bytes of the file, some thousands. Without a byte order mark: by the places of the zero bytes, which no
    text in UTF-8 has.
    """
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name, f"the byte order mark {mark.hex(' ')}"
    head = head.rstrip(b"\0")  # which a crash leaves at the end of a file
    zeros = [head[at::4].count(0) for at in range(4)]
    total, units = sum(zeros), max(1, len(head) // 4)
    if len(head) < 4 or total < _ZEROS * len(head):
        return None
    even, odd = zeros[0] + zeros[2], zeros[1] + zeros[3]
    if zeros[3] >= units and zeros[2] > units / 2:
        name = "UTF-32LE"
    elif zeros[0] >= units and zeros[1] > units / 2:
        name = "UTF-32BE"
    elif odd > 4 * even:
        name = "UTF-16LE"
    elif even > 4 * odd:
        name = "UTF-16BE"
    else:
        return None
    text = head[: len(head) // 4 * 4].decode(name, errors="replace").rstrip("\0\ufffd")
    return None if re.search(r"[\0-\x08\x0e-\x1f\ufffd]", text) else (name, "its zero bytes")


def looks_like_table(head: bytes, encoding: str) -> bool:
    """Whether a text file is a table with tabs, as spreadsheets write it under the name "Unicode text" (.txt)."""
    lines = head[: len(head) // 4 * 4].decode(encoding, errors="replace").splitlines()[:2]
    return len(lines) == 2 and 0 < lines[0].count("\t") == lines[1].count("\t")


def command(shown: str, encoding: str, kind: str, packed: str) -> str:
    """A shell command that writes a file again in UTF-8, into this folder.

    ``kind``: the ending that its name gets; ``packed``: its compression's ending, or "". A file in an object store is to be
    fetched here first.
    """
    return _written_by(f"iconv -f {encoding} -t UTF-8", shown, f"utf8{kind}", packed)


def with_commas(shown: str, sign: str, packed: str) -> str:
    """A shell command that writes a table whose columns ``sign`` separates again with commas, whatever its encoding is."""
    streams = "sys.stdin.reconfigure(errors='surrogateescape', newline=''); sys.stdout.reconfigure(errors='surrogateescape')"
    rows = f"csv.writer(sys.stdout, lineterminator='\\n').writerows(csv.reader(sys.stdin, delimiter={sign!r}))"
    program = f"import csv, sys; {streams}; {rows}"
    return _written_by(f"python3 -X utf8 -c {shlex.quote(program)}", shown, "commas.csv", packed)


def _written_by(convert: str, shown: str, ending: str, packed: str) -> str:
    path = PurePath(shown.rpartition(": ")[2] if "://" in shown else shown)
    stem = path.name.removesuffix(path.suffix) if packed else path.name
    source = shlex.quote(path.name if "://" in shown else shown)
    target = shlex.quote(f"{PurePath(stem).stem}.{ending}")
    return f"{_UNPACK[packed]} -dc < {source} | {convert} > {target}" if packed else f"{convert} < {source} > {target}"


def eight_bit_encoding(lines: Iterable[bytes]) -> tuple[str | None, str]:
    """iconv's name of the encoding of a file that is not UTF-8, None where it is not recognised, and a sentence on it.

    ``lines``: all of the file, at least the ones that are not UTF-8. Latin-1 and Windows-1252 are recognised.
    """
    mixed, used, high, in_runs = False, set[int](), 0, 0
    for line in lines:
        if line.isascii():
            continue
        try:
            line.decode()
            mixed = True
        except UnicodeDecodeError:
            beyond = [byte for byte in line if byte > 0x7F]
            used.update(beyond)
            high += len(beyond)
            in_runs += sum(map(len, _RUN.findall(line)))
    if mixed:
        return None, "others of its rows are in UTF-8: write these again"
    if used & _UNDEFINED or 2 * in_runs > high:
        return None, SAVE_AGAIN
    name = "WINDOWS-1252" if any(byte < 0xA0 for byte in used) else "LATIN1"
    return name, f"of {'Windows-1252' if name != 'LATIN1' else 'Latin-1'}"
