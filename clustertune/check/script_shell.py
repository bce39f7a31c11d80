"""A shell script as its commands: enough of bash's grammar to know what the batch shell itself expands, and where.

Not an interpreter: nothing is run and no file is read. Text that is not a valid shell gives some commands, never an error.
The rules are those of https://www.gnu.org/software/bash/manual/bash.html#Shell-Syntax.

Not shellcheck: it gives findings and no tree, and rules ask what each srun starts and what variables hold; a parser that is a
library (bashlex, tree-sitter) is not there on a bare login node, where the lint runs with Python 3.8 alone.
"""

from __future__ import annotations

import bisect
import copy
import re
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
    text: str = ""
    lines: list[int] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    inner: list[ShellCommand] = field(default_factory=list)
    """The commands of ``$(...)`` and of backquotes."""
    quoted: bool = False

    def put(self, text: str, line: int, *, quoted: bool = False) -> None:
        """Append ``text``, which begins in ``line``."""
        self.text += text
        self.quoted = self.quoted or quoted
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

    text: Text
    end: int = 0
    """The line of the closing delimiter."""


@dataclass
class ShellCommand:
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

    @property
    def arguments(self) -> list[str]:
        """Its words."""
        return [word.text for word in self.words]

    def texts(self) -> Iterator[Text]:
        """Everything that it expands."""
        for assignment in self.assignments:
            yield assignment.value
            yield from assignment.items or ()
        yield from self.words
        yield from self.targets
        for heredoc in self.heredocs:
            yield heredoc.text


def walk(commands: list[ShellCommand]) -> Iterator[ShellCommand]:
    """Commands and those of their substitutions, outer ones first."""
    for command in commands:
        yield command
        for text in command.texts():
            yield from walk(text.inner)


MAX_DEPTH = 12
"""Substitutions within substitutions that are looked into; deeper ones are text."""
DECLARING = ("export", "declare", "typeset", "local", "readonly")
CHAINED = ("||", "&&", "|", "|&")
_RESERVED = ("if", "then", "elif", "else", "do", "while", "until", "!", "time", "fi", "done", "esac", "{", "}", "function")
_NAME = re.compile(r"[A-Za-z_]\w*")
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)?")
_PARAMETER = re.compile(r"[!#]?([A-Za-z_]\w*)")
_INNER = re.compile(r"\$\{?([A-Za-z_]\w*)")
_PLAIN = re.compile(r"[^\\'\"$` \t\r\n;&|()<>]+")
_ESCAPED = re.compile(r"\\(.?)", re.DOTALL)
_SINGLE = re.compile(r"'([^']*)'?")
_ANSI = re.compile(r"\$'((?:\\.?|[^'\\])*)'?", re.DOTALL)
_DOUBLE = re.compile(r'\$?"')
_BACKQUOTED = re.compile(r"`((?:\\.?|[^`\\])*)`?", re.DOTALL)
_INSIDE = {'"': re.compile(r'\\([$`\\"\n])|[^\\$`"]+|\\'), "": re.compile(r"\\([$`\\\n])|[^\\$`]+|\\")}
"""What stands between expansions in double quotes, and in a here-document, in which quotes mean nothing."""
_SKIPPED = re.compile(r"[ \t\r]+|\\\n|#[^\n]*")
_OPERATOR = re.compile(r"\|\||&&|\|&|;;|;&|[;&|]")
_REDIRECTION = re.compile(r"&?(<<<|<<-?|[<>]&|>>|>\||<>|[<>])[ \t]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]\n]*\])?\+?=")
_EMPTY = re.compile(r"\(\s*\)")
_FUNCTION = re.compile(r"[ \t]+([^\s(){}]+)[ \t]*(\([ \t]*\))?")
_ROW = re.compile(r"[^\n]*\n?")


def parse(text: str, line: int = 1, depth: int = 0) -> list[ShellCommand]:
    """The commands of a script, in order; those inside substitutions belong to their words."""
    return _Shell(text, line, depth).commands("")


class _Shell:
    """A place in a script, and the commands that are read from there on."""

    def __init__(self, source: str, first: int, depth: int) -> None:
        self.source, self.at, self.first, self.depth = source, 0, first, depth
        self.ends = [found.start() for found in re.finditer("\n", source)]
        self.function: str | None = None
        self.braces = 0
        self.begin()

    def begin(self) -> None:
        """Nothing is read yet."""
        self.found: list[ShellCommand] = []
        self.current: ShellCommand | None = None
        self.before = ""
        self.pending: str | None = None
        """A function whose body must follow."""
        self.level = 0
        """How many ``(`` are open."""
        self.groups: list[int] = []
        """How many commands stood before each ``(``, ``{`` and ``do`` that is open."""
        self.closed: int | None = None
        """The same of a group that was closed just before."""
        self.waiting: list[tuple[ShellCommand, Text, bool]] = []
        """Here-documents that the line announced: command, delimiter, and whether tabs in front of lines go."""

    @property
    def line(self) -> int:
        return self.first + bisect.bisect_left(self.ends, self.at)

    def starts(self, text: str) -> bool:
        return self.source.startswith(text, self.at)

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What a pattern matches here; reading goes on behind it."""
        found = pattern.match(self.source, self.at)
        if found:
            self.at = found.end()
        return found

    # --- words ---

    def word(self) -> Text:
        """One word, up to a blank or an operator."""
        text, begun = Text(self.line), self.at
        while self.at < len(self.source):
            line = self.line
            if self.at == begun and (self.starts("<(") or self.starts(">(")):
                self.expansion(text)
            elif self.source[self.at] in " \t\r\n;&|()<>":
                break
            elif found := self.take(_PLAIN):
                text.put(found[0], line)
            elif found := self.take(_ESCAPED):
                text.put(found[1].strip("\n"), line, quoted=found[1] not in ("", "\n"))
            elif found := self.take(_SINGLE):
                text.put(found[1], line, quoted=True)
            elif found := self.take(_ANSI):
                text.put(_ESCAPED.sub(r"\1", found[1]), line, quoted=True)
            elif self.take(_DOUBLE):
                text.quoted = True
                self.double(text, '"')
            else:
                self.expansion(text)
        return text

    def double(self, text: Text, end: str) -> None:
        """Text in which only ``$``, backquotes and backslashes mean something, up to ``end``, which is taken."""
        while self.at < len(self.source):
            line = self.line
            if found := self.take(_INSIDE[end]):
                text.put(found[1] or found[0], line)
            elif end and self.starts(end):
                self.at += 1
                return
            else:
                self.expansion(text)

    def expansion(self, text: Text) -> None:
        """What begins with ``$``, a backquote, ``<(`` or ``>(``: it stays as it is written, its commands are read."""
        begun, line = self.at, self.line
        if self.starts("$(("):
            self.close("(", ")", 3)
            source = self.source[begun : self.at]
            found = _NAME.finditer(source)
            text.references += [Reference(name[0], line + source.count("\n", 0, name.start())) for name in found]
        elif self.starts("${"):
            self.close("{", "}", 2)
            source = self.source[begun : self.at]
            first = _PARAMETER.match(source, 2)
            names = ([first[1]] if first else []) + [inner[1] for inner in _INNER.finditer(source, 2)]
            text.references += [Reference(name, line) for name in names]
        elif self.source.startswith("(", self.at + 1):
            text.inner += self.nested(2)
        elif backquoted := self.take(_BACKQUOTED):
            body = backquoted[1].replace("\\`", "`").replace("\\$", "$")
            text.inner += parse(body, line, self.depth + 1) if self.depth < MAX_DEPTH else []
        elif (variable := self.take(_VARIABLE)) and variable[1]:
            text.references.append(Reference(variable[1], line))
        text.put(self.source[begun : self.at], line)

    def nested(self, opening: int) -> list[ShellCommand]:
        """The commands up to the ``)`` that closes; ``opening``: characters that open it."""
        if self.depth >= MAX_DEPTH:
            self.close("(", ")", opening)
            return []
        inner = copy.copy(self)
        inner.begin()
        inner.at, inner.depth = self.at + opening, self.depth + 1
        found = inner.commands(")")
        self.at = inner.at
        return found

    def close(self, opening: str, closing: str, begun: int) -> None:
        """Go behind the bracket that closes those in the next ``begun`` characters; quotes and backslashes hide brackets."""
        level, quote = self.source.count(opening, self.at, self.at + begun), ""
        self.at += begun
        while self.at < len(self.source) and level:
            char = self.source[self.at]
            if char == "\\" and quote != "'":
                self.at += 1
            elif quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char in (opening, closing):
                level += 1 if char == opening else -1
            self.at += 1
        self.at = min(self.at, len(self.source))

    # --- commands ---

    def commands(self, closing: str) -> list[ShellCommand]:
        """Commands up to ``closing``, which is taken, or to the end."""
        while self.at < len(self.source):
            char, words = self.source[self.at], self.current.words if self.current else []
            if self.take(_SKIPPED):
                pass
            elif char == "\n":
                self.finish(";")
                self.at += 1
                self.heredocs()
            elif char in "&|<>();" and words and words[0].text == "[[" and words[-1].text != "]]":
                self.at += 1  # inside of [[ ... ]] operators of the shell mean something else
            elif char == closing and not self.level:
                self.at += 1
                break
            elif char in "();&|":
                self.operator(char)
            elif char in "<>" and not self.source.startswith("(", self.at + 1):
                self.redirect()
            else:
                self.argument(words)
        self.finish("")
        return self.found

    def open(self) -> ShellCommand:
        """The command under way."""
        if self.current is None:
            self.current = ShellCommand(self.line, before=self.before, function=self.function)
        return self.current

    def finish(self, operator: str) -> None:
        """End the command under way with the operator behind it."""
        first = self.closed
        if self.current is not None or operator in CHAINED:
            self.before = operator if operator in CHAINED else ""
        if self.current is not None:
            self.current.after = operator
            self.found.append(self.current)
            self.current, first = None, len(self.found) - 1
            while operator == "&" and first > 0 and self.found[first - 1].after in CHAINED:
                first -= 1
        for command in self.found[first:] if operator == "&" and first is not None else ():
            command.background = True
        self.closed = None

    def operator(self, char: str) -> None:
        """Take an operator."""
        words = self.current.words if self.current else []
        if self.starts("&>"):
            self.redirect()
        elif self.starts("((") and (self.current is None or (words and words[-1].text == "for")):
            self.close("(", ")", 2)
        elif char == "(" and self.current and len(words) == 1 and not self.current.assignments and self.take(_EMPTY):
            self.pending, self.current = words[0].text, None
        elif char in "()":
            self.finish("")
            if char == "(":
                self.groups.append(len(self.found))
            elif self.level and self.groups:
                self.closed = self.groups.pop()
            self.level = max(0, self.level + (1 if char == "(" else -1))
            self.at += 1
        elif found := self.take(_OPERATOR):
            self.finish(found[0])

    def redirect(self) -> None:
        """Take a redirection and its target."""
        command, found = self.open(), self.take(_REDIRECTION)
        assert found is not None
        target = self.word()
        if found[1] in ("<<", "<<-"):
            self.waiting.append((command, target, found[1] == "<<-"))
        else:
            command.targets.append(target)

    def heredocs(self) -> None:
        """Read the here-documents that the line before announced."""
        for command, delimiter, tabs in self.waiting:
            body, begun, inside = Heredoc(Text(self.line)), self.at, self.at
            while self.at < len(self.source):
                body.end, inside = self.line, self.at
                row = self.take(_ROW)
                assert row is not None
                if (row[0].lstrip("\t") if tabs else row[0]).rstrip("\n") == delimiter.text:
                    break
                inside = self.at
            if delimiter.quoted:
                body.text.put(self.source[begun:inside], body.text.line)
            else:
                _Shell(self.source[begun:inside], body.text.line, self.depth).double(body.text, "")
            command.heredocs.append(body)
        self.waiting = []

    def argument(self, words: list[Text]) -> None:
        """Take a word: an assignment, a reserved word, or a word of the command."""
        begun = self.at
        if (not words or words[0].text in DECLARING) and (assigned := self.take(_ASSIGNMENT)):
            command, line = self.open(), self.line
            exported = bool(words) and (words[0].text == "export" or any(word.text == "-x" for word in words[1:]))
            value, items = Text(line), None
            if self.starts("("):
                inner = self.nested(1)
                items = [text for one in inner for text in (*(other.value for other in one.assignments), *one.words)]
            else:
                value = self.word()
            command.assignments.append(Assignment(assigned[1], value, line, exported, items))
            return
        text = self.word()
        if self.at == begun:  # nothing that is known begins so
            self.at += 1
        elif text.text.isdigit() and not text.quoted and (self.starts("<") or self.starts(">")):
            self.redirect()
        elif text.quoted or (text.text and (self.current or not self.reserved(text.text))):
            self.pending = None
            self.open().words.append(text)
            self.open().line = min(self.open().line, text.line)

    def reserved(self, word: str) -> bool:
        """Whether ``word`` belongs to the grammar; a command begins behind it."""
        if word in ("{", "do"):
            self.groups.append(len(self.found))
        elif word in ("}", "done") and self.groups:
            self.closed = self.groups.pop()
        if word == "{" and self.pending and self.function is None:
            self.function, self.braces, self.pending = self.pending, 1, None
        elif word in ("{", "}") and self.function is not None:
            self.braces += 1 if word == "{" else -1
            self.function = self.function if self.braces else None
        elif word == "function" and (name := self.take(_FUNCTION)):
            self.pending = name[1]
        return word in _RESERVED
