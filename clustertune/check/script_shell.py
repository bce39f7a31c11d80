"""A shell script as its commands: enough of bash's grammar to know what the batch shell itself expands, and where.

Not an interpreter: nothing is run and no file is read. Text that is not a valid shell gives some commands, never an error.
The rules are those of https://www.gnu.org/software/bash/manual/bash.html#Shell-Syntax.

Not shellcheck: it gives findings and no tree, and rules ask what each srun starts and what variables hold; a parser that is a
library (bashlex, tree-sitter) is not there on a bare login node, where the lint runs with Python 3.8 alone.
"""

from __future__ import annotations

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
    lines: list[int] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    inner: list[ShellCommand] = field(default_factory=list)
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

    def texts(self) -> Iterator[Text]:
        """Everything that it expands."""
        for assignment in self.assignments:
            yield assignment.value
            yield from assignment.items or ()
        yield from self.words
        yield from self.targets
        for heredoc in self.heredocs:
            yield heredoc.body


def walk(commands: list[ShellCommand]) -> Iterator[ShellCommand]:
    """Commands and those of their substitutions, outer ones first."""
    for command in commands:
        yield command
        for text in command.texts():
            yield from walk(text.inner)


MAX_DEPTH = 12
"""Substitutions within substitutions that are looked into; deeper ones are text."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"[!#]?([A-Za-z_]\w*)")
_INNER = re.compile(r"\$\{?([A-Za-z_]\w*)")


class _Parser:
    """A place in a script, and the words and commands that begin there."""

    def __init__(self, text: str, line: int, depth: int) -> None:
        self.source = text
        self.at = 0
        self.line = line
        self.depth = depth
        self.waiting: list[Heredoc] = []
        self.function: str | None = None
        self.braces = 0

    # --- characters ---

    def peek(self, ahead: int = 0) -> str:
        return self.source[self.at + ahead : self.at + ahead + 1]

    def starts(self, text: str) -> bool:
        return self.source.startswith(text, self.at)

    def take(self, count: int = 1) -> str:
        taken = self.source[self.at : self.at + count]
        self.at += count
        self.line += taken.count("\n")
        return taken

    def to_line_end(self) -> int:
        end = self.source.find("\n", self.at)
        return (len(self.source) if end < 0 else end) - self.at

    # --- words ---

    def word(self) -> Text:
        """One word, up to a blank or an operator."""
        text = Text(self.line)
        begun = self.at
        while self.at < len(self.source):
            char = self.peek()
            if char in "<>" and self.peek(1) == "(" and self.at == begun:
                self.substitution(text, 2)
            elif char in " \t\r\n;&|()<>":
                break
            else:
                self.part(text)
        return text

    def part(self, text: Text) -> None:
        """One character or one quoted or expanded piece outside of quotes."""
        char = self.peek()
        if char == "\\":
            self.take()
            if self.peek() == "\n":
                self.take()
            elif self.at < len(self.source):
                text.quoted = True
                text.put(self.peek(), self.line)
                self.take()
        elif char == "'":
            self.single(text)
        elif char == '"':
            text.quoted = True
            self.take()
            self.double(text, end='"')
        elif self.starts("$'"):
            self.take()
            self.single(text, escapes=True)
        elif self.starts('$"'):
            self.take()
        elif char == "$":
            self.dollar(text)
        elif char == "`":
            self.backquote(text)
        else:
            text.put(char, self.line)
            self.take()

    def single(self, text: Text, *, escapes: bool = False) -> None:
        self.take()
        text.quoted = True
        while self.at < len(self.source) and self.peek() != "'":
            if escapes and self.peek() == "\\":
                self.take()
            text.put(self.peek(), self.line)
            self.take()
        self.take()

    def double(self, text: Text, end: str | None) -> None:
        """Text in which only ``$``, backquotes and backslashes mean something, up to ``end``, which is taken."""
        while self.at < len(self.source):
            char = self.peek()
            if char == end:
                self.take()
                return
            if char == "\\" and self.peek(1) == "\n":
                text.put("\n", self.line)
                self.take(2)
            elif char == "\\" and self.peek(1) in ("$", "`", "\\", end or "$"):
                self.take()
                text.put(self.peek(), self.line)
                self.take()
            elif char == "$":
                self.dollar(text)
            elif char == "`":
                self.backquote(text)
            else:
                text.put(char, self.line)
                self.take()

    # --- expansions ---

    def dollar(self, text: Text) -> None:
        if self.starts("$(("):
            self.arithmetic(text)
        elif self.starts("$("):
            self.substitution(text, 2)
        elif self.starts("${"):
            self.parameter(text)
        else:
            found = _NAME.match(self.source, self.at + 1)
            if found:
                text.references.append(Reference(found.group(), self.line))
            text.put(self.source[self.at : found.end() if found else self.at + 1], self.line)
            self.take((found.end() if found else self.at + 1) - self.at)

    def substitution(self, text: Text, opening: int) -> None:
        """``$(...)``, ``<(...)`` or ``>(...)``: its commands are parsed, its source is the text."""
        begun, line = self.at, self.line
        self.take(opening)
        if self.depth >= MAX_DEPTH:
            self.take(self.closing("(", ")"))
        else:
            outer = self.function, self.braces, self.waiting
            self.depth, self.waiting = self.depth + 1, []
            text.inner += self.commands(")")
            self.depth -= 1
            self.function, self.braces, self.waiting = outer
        text.put(self.source[begun : self.at], line)

    def arithmetic(self, text: Text) -> None:
        begun, line = self.at, self.line
        self.take(3)
        self.take(self.closing("(", ")", level=2))
        source = self.source[begun : self.at]
        text.references += [Reference(m.group(), line + source[: m.start()].count("\n")) for m in _NAME.finditer(source)]
        text.put(source, line)

    def parameter(self, text: Text) -> None:
        begun, line = self.at, self.line
        self.take(2)
        self.take(self.closing("{", "}"))
        source = self.source[begun : self.at]
        first = _PARAMETER.match(source, 2)
        names = [first.group(1)] if first else []
        names += [m.group(1) for m in _INNER.finditer(source, 2)]
        text.references += [Reference(name, line) for name in names]
        text.put(source, line)

    def backquote(self, text: Text) -> None:
        begun, line = self.at, self.line
        self.take()
        while self.at < len(self.source) and self.peek() != "`":
            self.take(2 if self.peek() == "\\" else 1)
        body = self.source[begun + 1 : self.at]
        self.take()
        if self.depth < MAX_DEPTH:
            text.inner += parse(body.replace("\\`", "`").replace("\\$", "$"), line, self.depth + 1)
        text.put(self.source[begun : self.at], line)

    def closing(self, opening: str, closing: str, level: int = 1) -> int:
        """Characters up to and with the bracket that closes; quotes and backslashes hide brackets."""
        at, quote = self.at, ""
        while at < len(self.source):
            char = self.source[at]
            if char == "\\" and quote != "'":
                at += 1
            elif quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char in (opening, closing):
                level += 1 if char == opening else -1
                if level == 0:
                    return at + 1 - self.at
            at += 1
        return len(self.source) - self.at

    # --- commands ---

    def commands(self, closing: str | None) -> list[ShellCommand]:
        """Commands up to ``closing``, which is taken, or to the end."""
        builder = _Builder(self)
        level = 0
        while self.at < len(self.source):
            char = self.peek()
            if char in " \t\r":
                self.take()
            elif self.starts("\\\n"):
                self.take(2)
            elif char == "\n":
                builder.finish(";")
                self.take()
                self.heredocs()
            elif char == "#":
                self.take(self.to_line_end())
            elif builder.in_test() and char in "&|<>();":
                self.take()
            elif char == ")" and level == 0 and closing == ")":
                builder.finish("")
                self.take()
                return builder.found
            elif char in "();&|":
                level = builder.operator(level)
            elif char in "<>" and self.peek(1) != "(":
                builder.redirect()
            else:
                builder.word()
        builder.finish("")
        return builder.found

    def heredocs(self) -> None:
        """Read the bodies that the line before announced."""
        for heredoc in self.waiting:
            start, body = self.line, []
            while self.at < len(self.source):
                heredoc.end = self.line
                row = self.take(self.to_line_end() + 1)
                plain = row.rstrip("\n").lstrip("\t") if heredoc.tabs else row.rstrip("\n")
                if plain == heredoc.delimiter:
                    break
                body.append(row)
            heredoc.body = Text(start)
            if heredoc.literal:
                heredoc.body.put("".join(body), start)
            else:
                _Parser("".join(body), start, self.depth).double(heredoc.body, end=None)
        self.waiting = []


DECLARING = ("export", "declare", "typeset", "local", "readonly")
_RESERVED = ("if", "then", "elif", "else", "do", "while", "until", "!", "time", "fi", "done", "esac")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]\n]*\])?\+?=")


def parse(text: str, line: int = 1, depth: int = 0) -> list[ShellCommand]:
    """The commands of a script, in order; those inside substitutions belong to their words."""
    return _Parser(text, line, depth).commands(None)


class _Builder:
    """Collects words into commands."""

    def __init__(self, parser: _Parser) -> None:
        self.parser = parser
        self.found: list[ShellCommand] = []
        self.current: ShellCommand | None = None
        self.before = ""
        self.pending: str | None = None
        """A function whose body must follow."""
        self.groups: list[int] = []
        """How many commands stood before each ``(``, ``{`` and ``do`` that is open."""
        self.closed: int | None = None
        """The same of a group that was closed just before."""

    def open(self) -> ShellCommand:
        """The command under way."""
        if self.current is None:
            self.current = ShellCommand(self.parser.line, before=self.before, function=self.parser.function)
        return self.current

    def finish(self, operator: str) -> None:
        """End the command under way with the operator behind it."""
        chained = operator if operator in ("||", "&&", "|", "|&") else ""
        if self.current is not None:
            self.current.after = operator
            self.found.append(self.current)
            self.current = None
            self.before = chained
            if operator == "&":
                self.mark(self.chain())
        elif chained:
            self.before = chained
        elif operator == "&" and self.closed is not None:
            self.mark(self.closed)
        self.closed = None

    def chain(self) -> int:
        """Where the list begins that ends with the newest command."""
        first = len(self.found) - 1
        while first > 0 and self.found[first - 1].after in ("|", "|&", "&&", "||"):
            first -= 1
        return first

    def mark(self, first: int) -> None:
        for command in self.found[first:]:
            command.background = True

    def in_test(self) -> bool:
        """Inside of ``[[ ... ]]``, where operators of the shell mean something else."""
        words = self.current.words if self.current else []
        return bool(words) and words[0].text == "[[" and words[-1].text != "]]"

    def operator(self, level: int) -> int:
        """Take an operator; returns how many ``(`` are open then."""
        parser = self.parser
        words = self.current.words if self.current else []
        if parser.starts("&>"):
            parser.take()
            self.redirect()
        elif parser.starts("((") and (self.current is None or (words and words[-1].text == "for")):
            parser.take(2)
            parser.take(parser.closing("(", ")", level=2))
        elif parser.peek() == "(":
            empty = re.compile(r"\(\s*\)").match(parser.source, parser.at)
            if empty and self.current and len(words) == 1 and not self.current.assignments:
                self.pending, self.current = words[0].text, None
                parser.take(len(empty.group()))
                return level
            self.finish("")
            self.groups.append(len(self.found))
            parser.take()
            return level + 1
        elif parser.peek() == ")":
            self.finish("")
            self.closed = self.groups.pop() if level and self.groups else None
            parser.take()
            return max(0, level - 1)
        else:
            operator = next((o for o in ("||", "&&", "|&", ";;", ";&") if parser.starts(o)), parser.peek())
            self.finish(operator)
            parser.take(len(operator))
        return level

    def redirect(self) -> None:
        """Take a redirection and its target."""
        parser = self.parser
        operator = next(o for o in ("<<<", "<<-", "<<", "<&", ">&", ">>", ">|", "<>", "<", ">") if parser.starts(o))
        command = self.open()
        parser.take(len(operator))
        while parser.peek() in (" ", "\t"):
            parser.take()
        target = parser.word()
        if operator in ("<<", "<<-"):
            heredoc = Heredoc(target.text, target.quoted, operator == "<<-")
            command.heredocs.append(heredoc)
            parser.waiting.append(heredoc)
        else:
            command.targets.append(target)

    def word(self) -> None:
        """Take a word: an assignment, a reserved word, or a word of the command."""
        parser, begun = self.parser, self.parser.at
        words = self.current.words if self.current else []
        if not words or words[0].text in DECLARING:
            assigned = _ASSIGNMENT.match(parser.source, parser.at)
            if assigned:
                self.assignment(assigned)
                return
        text = parser.word()
        if parser.at == begun:  # nothing that is known begins so
            parser.take()
        elif text.text.isdigit() and parser.peek() in ("<", ">") and not text.quoted:
            self.redirect()
        elif (text.text or text.quoted) and not (self.current is None and not text.quoted and self.reserved(text.text)):
            self.pending = None
            self.open().words.append(text)
            self.open().line = min(self.open().line, text.line)

    def assignment(self, match: re.Match[str]) -> None:
        parser, command = self.parser, self.open()
        line = parser.line
        exported = bool(command.words) and (command.words[0].text == "export" or any(w.text == "-x" for w in command.words[1:]))
        parser.take(len(match.group()))
        if parser.peek() != "(":
            command.assignments.append(Assignment(match.group(1), parser.word(), line, exported))
            return
        parser.take()
        items: list[Text] = []
        if parser.depth >= MAX_DEPTH:
            parser.take(parser.closing("(", ")"))
        else:
            parser.depth += 1
            for inner in parser.commands(")"):
                items += [assignment.value for assignment in inner.assignments] + inner.words
            parser.depth -= 1
        command.assignments.append(Assignment(match.group(1), Text(line), line, exported, items))

    def reserved(self, word: str) -> bool:
        """Whether ``word`` belongs to the grammar; a command begins behind it."""
        parser = self.parser
        if word in ("{", "do"):
            self.groups.append(len(self.found))
        elif word in ("}", "done") and self.groups:
            self.closed = self.groups.pop()
        if word == "{" and self.pending and parser.function is None:
            parser.function, parser.braces, self.pending = self.pending, 1, None
        elif word in ("{", "}") and parser.function is not None:
            parser.braces += 1 if word == "{" else -1
            if parser.braces == 0:
                parser.function = None
        elif word == "function":
            name = re.compile(r"[ \t]+([^\s(){}]+)[ \t]*(\([ \t]*\))?").match(parser.source, parser.at)
            if name:
                self.pending = name.group(1)
                parser.take(len(name.group()))
        return word in _RESERVED or word in ("{", "}", "function")
