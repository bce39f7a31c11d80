"""A file of one's own prompts to evaluate with: plain ones, or conversations whose last answer is held out, and rules.

Rows are those that the training reads (:mod:`clustertune.data.chats`), with or without an answer, and text files with a prompt
a line. Beside it a row may say how an answer is judged: ``contains``, ``regex`` or ``json_schema``.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clustertune.bounded import StandingChild
from clustertune.data import chats, rewards
from clustertune.data.rows import KINDS, KNOWN, BadRow, RowLocation, kind_of, read_file
from clustertune.errors import Problem, UserError, raise_if
from clustertune.manifest import hash_file, open_to_read
from clustertune.recipe.eval_tasks import with_rows

RULES = ("contains", "regex", "json_schema")
"""Columns that say what an answer must be: text or texts that stand in it, a pattern that ``re.search`` finds in it, a schema
that it is JSON of."""
ANSWER = "answer"
"""Beside ``prompt``, another name of TRL's ``completion``."""
_READ = KNOWN | {ANSWER, *RULES}
JUDGE_MEMORY = 1 << 30
"""Bytes that the rule of one answer may take."""
FORM = "a row has prompt, or messages; where there is one, completion (the answer); and contains, regex or json_schema"
_ROWS = (("messages", "messages"), ("conversations", "sharegpt"), ("instruction", "alpaca"))
"""The column by which another format is known."""
_HELD = "\N{BULLET}"
"""Stands for the answer where a row has none: the formats demand one."""


@dataclass(frozen=True)
class OwnPrompt:
    """One row."""

    line: int
    """Of the file, from 1."""
    messages: list[dict[str, Any]]
    """What the model is given; the last message is the user's, or a tool's."""
    answer: str | None
    """What is held out; None: nothing."""
    rules: dict[str, Any] = field(default_factory=dict)
    """Of :data:`RULES`, those that the row has."""

    @property
    def judged_by(self) -> dict[str, Any]:
        """The rules, else the answer itself: ``exact_match``. Empty: the row only asks for an answer."""
        return self.rules or ({} if self.answer is None else {"exact_match": self.answer})


@dataclass(frozen=True)
class OwnPrompts:
    """All rows of a file, each of a good form."""

    file: Path
    sha256: str
    rows: list[OwnPrompt]
    unused: list[str]
    """Columns that are not read."""


def read_prompts(path: Path, key: str) -> OwnPrompts:
    """Raises UserError with every bad row (``file:line``) and what to write instead. ``key``: what named the file."""
    if not path.is_file():
        text = "is a folder, not a file" if path.is_dir() else "is not a plain file" if path.exists() else "no such file"
        raise UserError(text, file=str(path), key=key, fix="name a file of prompts: .jsonl, .csv, .txt, ...")
    if kind_of(path.name) == ("", ""):
        raise UserError("no file of a known kind", file=str(path), key=key, fix=f"known are {', '.join(KINDS)}")
    prompts, problems, unused = list[OwnPrompt](), list[Problem](), set[str]()
    with Judge() as judge:
        for at, row in _rows(path, unused):
            try:
                if isinstance(row, BadRow):
                    raise row
                prompt = _read(row, at.line)
            except BadRow as bad:
                problems.append(Problem(f"{bad.reason}: {bad.detail}", f"{path}:{at.line}", fix=FORM))
                continue
            problems += [Problem(text, f"{path}:{at.line}", column, fix) for column, text, fix in _check_rules(prompt, judge)]
            prompts.append(prompt)
    if not prompts and not problems:
        problems.append(Problem("holds no prompts", file=str(path), key=key, fix=FORM))
    for name in sorted(unused):
        if close := difflib.get_close_matches(name.lower(), (ANSWER, *RULES), n=1, cutoff=0.8):
            problems.append(Problem(f"column {name!r} is not read", file=str(path), key=name, fix=f"did you mean {close[0]}?"))
    raise_if(problems)
    return OwnPrompts(path, hash_file(path).sha256, prompts, sorted(unused))


def are_own(path: Path, tasks: Iterable[str]) -> bool:
    """Whether a file holds one's own prompts, and no rows of a task among ``tasks``, by the columns of its first row."""
    columns = {column for task in with_rows(tasks).values() for column in task.columns} - _READ
    unused = set[str]()
    try:
        for _ in itertools.islice(_rows(path, unused), 20):
            pass
    except (UserError, OSError):
        return True
    return not columns & unused


def _rows(path: Path, unused: set[str]) -> Iterator[tuple[RowLocation, dict[str, Any] | BadRow]]:
    """The records of a file; of a text file one prompt a line."""
    place = RowLocation(path.name, 0)
    for at, row in read_file(lambda: open_to_read(path), place, str(path), _READ, unused=unused):
        if kind_of(path.name)[0] == ".txt" and not isinstance(row, BadRow):
            lines = enumerate(str(row["text"]).splitlines(), start=1)
            yield from ((RowLocation(path.name, number), {"prompt": line}) for number, line in lines if line.strip())
            continue
        unused |= row.keys() - _READ if isinstance(row, dict) else set()
        yield at, row


def _read(row: Mapping[str, Any], line: int) -> OwnPrompt:
    """A row's messages, answer and rules. Raises BadRow."""
    cells = {name: value for name, value in row.items() if value not in (None, "", [], {})}  # tables have empty cells
    if cells.get("tools"):
        raise BadRow("unused-column", "tools: an evaluation shows the model no tools")
    if "prompt" in cells:
        if ANSWER in cells and "completion" in cells:
            raise BadRow("two-answers", "completion and answer are two names of one thing: leave one out")
        answer = cells.get("completion", cells.get(ANSWER))
        example = chats.read("prompt-completion", {"prompt": cells["prompt"], "completion": answer or _HELD})
        messages, last = example["prompt"], example["completion"]
    else:
        name = next((form for column, form in _ROWS if column in cells), None)
        if name is None:
            raise BadRow("wrong-column", f"has {', '.join(map(str, cells)) or 'no columns'}, and neither prompt nor messages")
        messages, last, answer = _split(name, cells)
    if len(last) != 1 or (answer and not last[0]["content"]):
        raise BadRow("wrong-turn", "the answer that is held out must be one message with a text")
    rules = {rule: cells[rule] for rule in RULES if rule in cells}
    return OwnPrompt(line, messages, str(last[0]["content"]) if answer else None, rules)


def _split(name: str, row: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Any]:
    """Of a row that holds a conversation: the messages before the answer, the answer, and whether it is the row's own."""
    if name == "alpaca":
        answer: Any = row.get("output", row.get(ANSWER))
        turns = chats.read(name, {**row, "output": answer or _HELD})["messages"]
        return turns[:-1], turns[-1:], answer
    try:
        turns = chats.read(name, row)["messages"]
        return turns[:-1], turns[-1:], True
    except BadRow as bad:
        if bad.reason != "unanswered":
            raise
    column, more = {
        "messages": ("messages", {"role": "assistant", "content": row.get(ANSWER) or _HELD}),
        "sharegpt": ("conversations", {"from": "gpt", "value": row.get(ANSWER) or _HELD}),
    }[name]
    earlier = json.loads(row[column]) if isinstance(row[column], str) else row[column]
    turns = chats.read(name, {**row, column: [*earlier, more]})["messages"]
    return turns[:-1], turns[-1:], row.get(ANSWER)


def _check_rules(prompt: OwnPrompt, judge: Judge) -> Iterator[tuple[str, str, str]]:
    """Column, what is wrong with its rule, and what to do; also where the row's own answer does not keep it."""
    rules, wrong = prompt.rules, False
    texts = rules.get("contains", "")
    if not isinstance(texts, str) and not (isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)):
        wrong = True
        yield "contains", "is neither a text nor a list of texts", "write the text that must stand in the answer"
    if "regex" in rules and (fault := rewards.wrong_pattern(rules["regex"])) is not None:
        wrong = True
        yield "regex", fault, "a sign such as ( or + is written \\( or \\+ if it is meant"
    if "json_schema" in rules and (schema_fault := _wrong_schema(rules["json_schema"])):
        wrong = True
        yield "json_schema", *schema_fault
    if wrong or prompt.answer is None:
        return
    for rule, expected in rules.items():
        if (keeps := judge(rule, expected, prompt.answer)) is not True:
            text = "the row's own answer does not keep this rule" if keeps is False else "does not come to an end on the answer"
            yield rule, text, "change one of the two" if keeps is False else "write a pattern without nested repetition"


def _wrong_schema(schema: Any) -> tuple[str, str] | None:
    """What is wrong with a JSON schema, and what to do; None: nothing."""
    if find_spec("jsonschema") is None:
        return "the package jsonschema is not installed", "pip install jsonschema, or use contains or regex"
    if (fault := rewards.wrong_schema(schema)) is None:
        return None
    return fault, 'write a JSON object, or a text that holds one, such as {"type": "object", "required": ["name"]}'


class Judge:
    """Whether answers keep rules; a reward's child judges each, with its limit of CPU time. Use as a context."""

    def __init__(self) -> None:
        self._child: StandingChild | None = None

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.close()

    def __call__(self, rule: str, expected: Any, answer: str) -> bool | None:
        """Whether an answer keeps a rule; None where that cannot be said within :data:`~clustertune.data.rewards.SECONDS`."""
        if rule == "exact_match":
            return rewards.is_equal(answer, expected)
        if rule == "contains":
            return all(text in answer for text in ([expected] if isinstance(expected, str) else expected))
        if self._child is None or self._child.ended:
            self._child = StandingChild(rewards.judge_one, JUDGE_MEMORY)
        told = {"pattern" if rule == "regex" else "schema": expected}
        reply = self._child.ask([rule, told, "", answer, {}]).found
        if rule == "json_schema" and reply is not None and "raised" in reply:  # it refers to nothing
            return False
        return bool(reply["reward"]) if reply is not None and "reward" in reply else None
