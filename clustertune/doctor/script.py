"""What a shell script consists of: commands, their words, and what the shell that reads them replaces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reference:
    """A variable that the shell which reads the script replaces by its value."""

    name: str
    line: int


@dataclass
class Text:
    """Text whose quotes are gone, with the line of every character; expansions stand in it as they were written."""

    line: int
    lines: list[int] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    inner: list[Command] = field(default_factory=list)
    """The commands of ``$(...)`` and of backquotes."""
    quoted: bool = False
    _parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text itself."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def put(self, text: str, line: int) -> None:
        """Append ``text``, which begins in ``line``."""
        self._parts.append(text)
        for char in text:
            self.lines.append(line)
            line += char == "\n"

    def line_at(self, offset: int) -> int:
        """The line of a character."""
        return self.lines[offset] if 0 <= offset < len(self.lines) else self.line


@dataclass
class Assignment:
    """``NAME=value`` or ``NAME=(a b)``."""

    name: str
    value: Text
    line: int
    exported: bool = False
    items: list[Text] | None = None
    """The words of an array."""


@dataclass
class Heredoc:
    """The lines behind ``<<WORD``."""

    delimiter: str
    literal: bool
    """The delimiter is quoted: nothing is expanded."""
    tabs: bool
    body: Text = field(default_factory=lambda: Text(0))
    end: int = 0
    """The line of the closing delimiter."""


@dataclass
class Command:
    """One simple command."""

    line: int
    assignments: list[Assignment] = field(default_factory=list)
    words: list[Text] = field(default_factory=list)
    targets: list[Text] = field(default_factory=list)
    """Files and texts of redirections."""
    heredocs: list[Heredoc] = field(default_factory=list)
    before: str = ""
    """The operator in front: ``||``, ``&&``, ``|`` or nothing."""
    after: str = ""
    """The operator behind."""
    function: str | None = None
    """The function whose body it is in."""
    background: bool = False
    """It, its pipeline or its group ends with ``&``: the shell does not wait for it."""

    @property
    def name(self) -> str:
        """Its first word; empty for assignments alone."""
        return self.words[0].text if self.words else ""

    def texts(self) -> Iterator[Text]:
        """Everything that it expands."""
        for assignment in self.assignments:
            yield assignment.value
            yield from assignment.items or ()
        yield from self.words
        yield from self.targets
        for heredoc in self.heredocs:
            yield heredoc.body


def walk(commands: list[Command]) -> Iterator[Command]:
    """Commands and those of their substitutions, outer ones first."""
    for command in commands:
        yield command
        for text in command.texts():
            yield from walk(text.inner)
