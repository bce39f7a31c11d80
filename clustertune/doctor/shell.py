"""A shell script as its commands: enough of bash's grammar to know what the batch shell itself expands, and where.

Not an interpreter: nothing is run and no file is read. Text that is no valid shell gives some commands, never an error.
The rules are those of https://www.gnu.org/software/bash/manual/bash.html#Shell-Syntax.
"""

from __future__ import annotations

import re

from clustertune.doctor.script import Assignment, Command, Heredoc, Text
from clustertune.doctor.words import MAX_DEPTH, WordReader

DECLARING = ("export", "declare", "typeset", "local", "readonly")
_RESERVED = ("if", "then", "elif", "else", "do", "while", "until", "!", "time", "fi", "done", "esac")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]\n]*\])?\+?=")


def parse(text: str, line: int = 1, depth: int = 0) -> list[Command]:
    """The commands of a script, in order; those inside substitutions hang on their words."""
    return _Parser(text, line, depth).commands(None)


class _Parser(WordReader):
    def commands(self, closing: str | None) -> list[Command]:
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

    def parse_apart(self, text: str, line: int) -> list[Command]:
        return parse(text, line, self.depth + 1)


class _Builder:
    """Collects words into commands."""

    def __init__(self, parser: _Parser) -> None:
        self.parser = parser
        self.found: list[Command] = []
        self.current: Command | None = None
        self.before = ""
        self.pending: str | None = None
        """A function whose body must follow."""
        self.groups: list[int] = []
        """How many commands stood before each ``(``, ``{`` and ``do`` that is open."""
        self.closed: int | None = None
        """The same of a group that was closed just before."""

    def open(self) -> Command:
        """The command under way."""
        if self.current is None:
            self.current = Command(self.parser.line, before=self.before, function=self.parser.function)
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
