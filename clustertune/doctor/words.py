"""The words of a shell script: quotes, backslashes, and what a shell expands inside of them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from clustertune.doctor.script import Command, Heredoc, Reference, Text

MAX_DEPTH = 12
"""Substitutions within substitutions that are looked into; deeper ones are text."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"[!#]?([A-Za-z_]\w*)")
_INNER = re.compile(r"\$\{?([A-Za-z_]\w*)")


class WordReader(ABC):
    """A place in a script, and the words that begin there."""

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

    # --- what a reader of commands adds ---

    @abstractmethod
    def commands(self, closing: str | None) -> list[Command]:
        """Commands up to ``closing``, which is taken, or to the end."""

    @abstractmethod
    def parse_apart(self, text: str, line: int) -> list[Command]:
        """The commands of text that stands by itself."""

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
            text.inner += self.parse_apart(body.replace("\\`", "`").replace("\\$", "$"), line)
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
