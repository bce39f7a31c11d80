"""The ``#SBATCH`` lines of a script as sbatch reads them: only in front of the first command, only at a line's start.

Compared with sbatch 22.05's own reading (``sbatch -vv``) in the tests. Its source: src/sbatch/opt.c, _opt_batch_script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from clustertune.doctor.options import SBATCH, SHORT, full_name

MAGIC = "#SBATCH"


@dataclass(frozen=True)
class Option:
    """One option of a directive."""

    line: int
    written: str
    """As it stands there, such as ``-N`` or ``--nodes``."""
    name: str | None
    """Its long name; None where sbatch has none such."""
    value: str | None
    part: int
    """The component of a heterogeneous job, from 0."""


@dataclass
class Header:
    """What sbatch takes from the script."""

    options: list[Option] = field(default_factory=list)
    lines: dict[int, str] = field(default_factory=dict)
    """The directives, each with what stands behind ``#SBATCH``."""
    words: list[tuple[str, int]] = field(default_factory=list)
    """The arguments, as sbatch cuts them, with their lines."""
    loose: list[tuple[str, int]] = field(default_factory=list)
    """Arguments that are no options, with their lines: sbatch refuses the script."""
    cut: list[tuple[str, int]] = field(default_factory=list)
    """Arguments that a ``#`` inside of them ends, with their lines."""
    end: int = 0
    """The line of the first command, behind which no directive counts; 0 where there is none."""

    def last(self, name: str) -> Option | None:
        """The option that counts: the last of that name."""
        found = [option for option in self.options if option.name == name and option.part == 0]
        return found[-1] if found else None

    def value(self, name: str) -> str | None:
        """Its value."""
        option = self.last(name)
        return option.value if option else None


def read_header(lines: Sequence[str]) -> Header:
    """The directives among the lines of a script (without line ends). Nothing is refused: rules look at what is odd."""
    header = Header()
    for number, line in enumerate(lines, 1):
        if line.startswith(MAGIC):
            header.lines[number] = line[len(MAGIC) :]
            _words(header, line[len(MAGIC) :], number)
        elif line.strip() and not line.lstrip().startswith("#"):
            header.end = number
            break
    _parse(header)
    return header


def _words(header: Header, text: str, number: int) -> None:
    at = 0
    while True:
        while at < len(text) and text[at].isspace():
            at += 1
        if at >= len(text) or text[at] == "#":
            return
        word, quote, at, commented = _word(text, at)
        header.words.append((word, number))
        if commented:
            header.cut.append((word, number))
            return
        if quote:
            return


def _word(text: str, at: int) -> tuple[str, str, int, bool]:
    """One argument from ``at`` on: its text, the quote left open, where it ends, and whether a ``#`` ended it."""
    word, quote = "", ""
    while at < len(text):
        char = text[at]
        if quote:
            if char == "\\" and at + 1 < len(text):
                at += 1
                word += text[at]
            elif char == quote:
                quote = ""
            else:
                word += char
        elif char in "'\"":
            quote = char
        elif char == "#":
            return word, quote, at, True
        elif char.isspace():
            break
        elif char != "\\":
            word += char
        at += 1
    return word, quote, at, False


def _parse(header: Header) -> None:
    part, at = 0, 0
    words = header.words
    while at < len(words):
        word, line = words[at]
        at += 1
        if word in ("hetjob", "packjob"):
            part += 1
        elif word.startswith("--") and len(word) > 2:
            written, equals, given = word[2:].partition("=")
            name = full_name(written)
            value: str | None = given if equals else None
            if value is None and SBATCH.get(name or "") == "required" and at < len(words):
                value = words[at][0]
                at += 1
            header.options.append(Option(line, f"--{written}", name, value, part))
        elif word.startswith("-") and len(word) > 1:
            at = _short(header, word, line, part, at)
        else:
            header.loose.append((word, line))


def _short(header: Header, word: str, line: int, part: int, at: int) -> int:
    """A cluster of short options; returns where the next argument stands."""
    for place in range(1, len(word)):
        name = SHORT.get(word[place])
        kind = SBATCH.get(name or "", "none")
        rest = word[place + 1 :]
        if kind == "none":
            header.options.append(Option(line, f"-{word[place]}", name, None, part))
            continue
        value = rest or None
        if not rest and kind == "required" and at < len(header.words):
            value = header.words[at][0]
            at += 1
        header.options.append(Option(line, f"-{word[place]}", name, value, part))
        break
    return at
