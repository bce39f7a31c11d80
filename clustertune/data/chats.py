"""Rows that hold one training example each, of any format but Open-Assistant's trees.

What is read has one of TRL's forms: ``{"messages"}``, ``{"prompt", "completion"}``, ``{"text"}`` or
``{"prompt", "chosen", "rejected"}``, the first three parts lists of messages, and ``tools`` beside them where the row has some.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clustertune.config.schema import COLUMNS
from clustertune.data.json_text import JsonError, parse
from clustertune.data.rejects import BadRow, Rejects, RowLocation, excerpt

MAX_MESSAGE_BYTES = 10_000_000
"""UTF-8 bytes of a message from which on it is refused (10 MB): that is a pasted file, not a turn to learn."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which chat templates take what the assistant thought before it answered."""
SPECIAL = ("tools", "tool_calls", *REASONING)
"""What a chat template must know by name, or it leaves it out without a message."""
PARTS = ("messages", "prompt", "completion", "chosen", "rejected")
"""Keys of an example under which messages stand."""
_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bing", "bard"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
    "system": "system",
    "function_call": "function_call",
}

Message = dict[str, Any]
Example = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """One example for the model."""

    example: Example
    """In one of TRL's forms."""
    source: dict[str, Any]
    """Where it comes from; ``tree`` names it in every format."""
    key: str
    """What the split goes by: the tree's id, or the hash of the example, so that a copy never lands in the other split."""
    split: str | None = None
    """The split that the input says, if it does."""


def messages_of(example: Mapping[str, Any]) -> list[Message]:
    """All messages of an example; none of a text."""
    return [message for part in PARTS for message in example.get(part, ())]


def require(row: Mapping[str, Any], key: str, kind: type, *, optional: bool = False, name: str | None = None) -> Any:
    """The value of a column. Raises BadRow where it is missing, of another type or (a str) not representable in UTF-8.

    ``optional``: missing and null are both None. ``name`` is what to call the column in the message.
    """
    name = name or key
    value = row.get(key)
    if value is None:
        if optional:
            return None
        raise BadRow("wrong-column", f"{name} is {'null' if key in row else 'missing'}")
    if not isinstance(value, kind):
        raise BadRow("wrong-column", f"{name} is {excerpt(value)}, not {_KINDS[kind]}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRow("not-utf8", f"{name} holds a lone surrogate at character {error.start + 1}") from None
    return value


_KINDS: dict[type, str] = {str: "a text", bool: "true or false", list: "a list", dict: "an object"}


def check_text(row: Mapping[str, Any], key: str, name: str | None = None) -> str:
    """The text of a message. Raises BadRow where there is none, or too much."""
    text: str = require(row, key, str, name=name)
    if all(char.isspace() or unicodedata.category(char) == "Cf" for char in text):  # zero-width characters show nothing
        raise BadRow("empty-text", f"{name or key} is empty")
    # Only a text of a quarter of the limit can exceed it: a character has at most 4 bytes.
    if len(text) * 4 >= MAX_MESSAGE_BYTES and (size := len(text.encode())) >= MAX_MESSAGE_BYTES:
        raise BadRow("message-too-long", f"{name or key} has {size} bytes, the limit is {MAX_MESSAGE_BYTES}")
    return text


def _value(value: Any, name: str, kind: type) -> Any:
    """A value of JSON, or a text that holds one, as tables have it. Raises BadRow."""
    if isinstance(value, str):
        try:
            value, _ = parse(value)
        except JsonError as error:
            raise BadRow("invalid-json", f"{name}: {error.message} at column {error.position + 1}") from None
    if not isinstance(value, kind):
        raise BadRow("wrong-column", f"{name} is {excerpt(value)}, not {_KINDS[kind]}")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRow("not-utf8", f"{name} holds a lone surrogate") from None
    except (RecursionError, TypeError, ValueError) as error:
        raise BadRow("invalid-json", f"{name} cannot be written as JSON: {type(error).__name__}") from None
    return value


def _list(row: Mapping[str, Any], key: str) -> list[Any]:
    """A column of lists; where it holds texts, they are read as JSON. Raises BadRow."""
    if isinstance(row.get(key), str):
        found: list[Any] = _value(row[key], key, list)
        return found
    return list(require(row, key, list))


class _Reader:
    """Reads rows; ``leave_out`` gets the names of fields of messages that no example holds."""

    def __init__(self, leave_out: Callable[[Iterable[str]], None]) -> None:
        self._leave_out = leave_out

    def read(self, format_name: str, row: Mapping[str, Any]) -> Example:
        example = _READ[format_name](self, row)
        tools = row.get("tools") if "tools" in COLUMNS[format_name] else None
        return example | ({"tools": found} if tools and (found := _value(tools, "tools", list)) else {})

    def messages(self, row: Mapping[str, Any]) -> Example:
        return {"messages": _answered(self._turns(_list(row, "messages"), "messages", []), "messages")}

    def sharegpt(self, row: Mapping[str, Any]) -> Example:
        entries: list[Any] = []
        if row.get("system") and check_text(row, "system"):
            entries.append({"role": "system", "content": row["system"]})
        for index, entry in enumerate(_list(row, "conversations")):
            name = f"conversations[{index}]"
            if not isinstance(entry, dict):
                raise BadRow("wrong-column", f"{name} is {excerpt(entry)}, not an object")
            speaker = require(entry, "from", str, name=f"{name}.from")
            if (role := _SHAREGPT.get(speaker)) is None:
                raise BadRow("unknown-role", f"{name}.from {excerpt(speaker)}, known are {', '.join(_SHAREGPT)}")
            if role == "function_call":
                entries.append({"role": "assistant", "tool_calls": [_value(entry.get("value"), f"{name}.value", dict)]})
            else:
                entries.append({"role": role, "content": entry.get("value"), **_without(entry, ("from", "value"))})
        return {"messages": _answered(self._turns(entries, "conversations", [], "value"), "conversations")}

    def lima(self, row: Mapping[str, Any]) -> Example:
        turns = enumerate(_list(row, "conversations"))
        entries = [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in turns]
        for index, entry in enumerate(entries):
            check_text(entry, "content", f"conversations[{index}]")
        return {"messages": _answered(self._turns(entries, "conversations", []), "conversations")}

    def alpaca(self, row: Mapping[str, Any]) -> Example:
        """The input follows the instruction after a blank line; ``history``: pairs of question and answer before it."""
        found: list[Message] = []
        if (system := require(row, "system", str, optional=True)) and system.strip():
            found.append({"role": "system", "content": system})
        for index, pair in enumerate(_list(row, "history") if row.get("history") else []):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise BadRow("wrong-column", f"history[{index}] is not a pair of question and answer")
            for role, text in zip(("user", "assistant"), pair, strict=True):
                found.append({"role": role, "content": check_text({"text": text}, "text", f"history[{index}]")})
        prompt = check_text(row, "instruction")
        extra: str | None = require(row, "input", str, optional=True)
        if extra and extra.strip():
            prompt = f"{prompt}\n\n{check_text(row, 'input')}"
        answer = {"role": "assistant", "content": check_text(row, "output")}
        return {"messages": [*found, {"role": "user", "content": prompt}, answer]}

    def prompt_completion(self, row: Mapping[str, Any]) -> Example:
        prompt = self._prompt(row)
        return {"prompt": prompt, "completion": self._answer(row, "completion", prompt)}

    def preference(self, row: Mapping[str, Any]) -> Example:
        both = ("chosen", "rejected")
        whole = [row.get(key) for key in both]
        opens = [isinstance(found, list) and _role_of(found[:1]) not in ("assistant", None) for found in whole]
        if all(opens):  # each holds the prompt too: it ends where they part, or with the last message of the user
            chosen, rejected = (
                _answered(self._turns(found or [], key, []), key) for found, key in zip(whole, both, strict=True)
            )
            shared = 0
            while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
                shared += 1
            while shared and chosen[shared - 1]["role"] == "assistant":
                shared -= 1
            if not shared:
                raise BadRow("wrong-turn", "chosen and rejected do not begin with the same message")
            example = {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
        else:
            prompt = self._prompt(row)
            example = {"prompt": prompt, **{key: self._answer(row, key, prompt) for key in both}}
        if example["chosen"] == example["rejected"]:
            raise BadRow("no-preference", "chosen and rejected are equal")
        return example

    def text(self, row: Mapping[str, Any]) -> Example:
        return {"text": check_text(row, "text")}

    def _prompt(self, row: Mapping[str, Any]) -> list[Message]:
        if not isinstance(row.get("prompt"), list):
            return [{"role": "user", "content": check_text(row, "prompt")}]
        found = self._turns(row["prompt"], "prompt", [])
        if not found or found[-1]["role"] not in ("user", "tool"):
            raise BadRow("wrong-turn", "prompt does not end with a message of the user or of a tool")
        return found

    def _answer(self, row: Mapping[str, Any], key: str, prompt: list[Message]) -> list[Message]:
        if not isinstance(row.get(key), list):
            return [{"role": "assistant", "content": check_text(row, key)}]
        return _answered(self._turns(row[key], key, prompt), key)

    def _turns(self, entries: list[Any], column: str, before: list[Message], label: str = "content") -> list[Message]:
        """Messages in turn: a system message first if any, then user and assistant, and tools after an assistant that calls.

        ``label``: what the input calls the text of a message.
        """
        found: list[Message] = []
        for index, entry in enumerate(entries):
            name = f"{column}[{index}]"
            if not isinstance(entry, dict):
                raise BadRow("wrong-column", f"{name} is {excerpt(entry)}, not an object")
            role = require(entry, "role", str, name=f"{name}.role")
            role = "system" if role == "developer" else role
            if role not in ("system", "user", "assistant", "tool"):
                raise BadRow("unknown-role", f"{name}.role {excerpt(role)}, known are system, user, assistant and tool")
            expected = _next(found[-1] if found else before[-1] if before else None)
            if role not in expected:
                raise BadRow("wrong-turn", f"{name} is a {role} message where a {expected[0]} message must stand")
            found.append({"role": role, **self._content(entry, role, name, label)})
        return found

    def _content(self, entry: dict[str, Any], role: str, name: str, label: str) -> Message:
        more: Message = {}
        if role == "assistant":
            more |= {key: entry[key] for key in REASONING if entry.get(key) and check_text(entry, key, f"{name}.{key}")}
            if entry.get("tool_calls"):
                calls = _value(entry["tool_calls"], f"{name}.tool_calls", list)
                more["tool_calls"] = [_call(call, f"{name}.tool_calls[{at}]") for at, call in enumerate(calls)]
        if role == "tool":
            more |= {key: require(entry, key, str) for key in ("name", "tool_call_id") if entry.get(key) is not None}
        self._leave_out(f"messages[].{key}" for key in entry.keys() - {"role", "content", *more} if entry[key] is not None)
        content = entry.get("content")
        if isinstance(content, list):
            content = "".join(_part(part, f"{name}.{label}[{at}]") for at, part in enumerate(content))
        if not content and (role == "tool" or "tool_calls" in more):
            return {"content": "", **more}
        given = {key: value for key, value in entry.items() if key == "content"} if content is None else {"content": content}
        return {"content": check_text(given, "content", f"{name}.{label}"), **more}


_READ: dict[str, Callable[[_Reader, Mapping[str, Any]], Example]] = {  # in the order in which a row is recognised
    "preference": _Reader.preference,
    "prompt-completion": _Reader.prompt_completion,
    "messages": _Reader.messages,
    "sharegpt": _Reader.sharegpt,
    "alpaca": _Reader.alpaca,
    "lima": _Reader.lima,
    "text": _Reader.text,
}


def read(format_name: str, row: Mapping[str, Any]) -> Example:
    """One row as an example in TRL's form. Raises BadRow."""
    return _Reader(lambda _names: None).read(format_name, row)


def _without(entry: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in (*keys, "role", "content")}


def _role_of(entries: list[Any]) -> str | None:
    return entries[0].get("role") if entries and isinstance(entries[0], dict) else None


def _next(last: Message | None) -> tuple[str, ...]:
    """The roles that may follow a message."""
    if last is None:
        return ("user", "system")
    if last["role"] == "assistant":
        return ("tool",) if last.get("tool_calls") else ("user",)
    return {"system": ("user",), "user": ("assistant",), "tool": ("assistant", "tool")}[last["role"]]


def _part(part: Any, name: str) -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind != "text":
        raise BadRow("not-text", f"{name} is {f'of type {excerpt(kind)}' if kind else excerpt(part)}: only text is trained on")
    text: str = require(part, "text", str, name=f"{name}.text")
    return text


def _call(call: Any, name: str) -> dict[str, Any]:
    """One call in the form that chat templates take: arguments as an object (OpenAI has them as a text)."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict):
        raise BadRow("wrong-column", f"{name} is {excerpt(call)}, not a call with name and arguments")
    arguments = _value(inner.get("arguments") or {}, f"{name}.arguments", dict)
    function = {"name": check_text(inner, "name", f"{name}.name"), "arguments": arguments}
    own = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**own, "type": "function", "function": function}


def _answered(found: list[Message], column: str) -> list[Message]:
    if not found:
        raise BadRow("empty-text", f"{column} is empty")
    if found[-1]["role"] != "assistant":
        raise BadRow("unanswered", f"{column} ends with a {found[-1]['role']} message")
    return found


def recognise(row: Mapping[str, Any]) -> str | None:
    """The settings with which a row can be read, as a recipe has them; None where no format fits."""
    if {"message_id", "parent_id", "message_tree_id"} <= row.keys() or isinstance(row.get("prompt"), dict):
        return "data.format: oasst-tree"
    for name in _READ:
        lists = [column for column, value in row.items() if isinstance(value, list)]
        column = {"messages": "messages", "sharegpt": "conversations"}.get(name)
        for other in dict.fromkeys((column, *lists)) if column else (None,):
            try:
                read(name, {**row, column: row.get(other)} if column and other else row)
            except BadRow:
                continue
            return f"data.format: {name}" + (f" and data.columns: {{{column}: {other}}}" if other != column else "")
    return None


def conversations(
    format_name: str, records: Iterable[tuple[RowLocation, dict[str, Any]]], rejects: Rejects
) -> Iterator[Conversation]:
    """One conversation per good row, in file order."""
    reader = _Reader(rejects.leave_out)
    for location, row in records:
        rejects.rows += 1
        try:
            example = reader.read(format_name, row)
        except BadRow as bad:
            rejects.add(location, bad.reason, bad.detail)
            rejects.look(row, recognise)
            continue
        source = {"tree": f"{location.file}:{location.row}", "file": location.file, "row": location.row}
        body = example["messages"] if example.keys() == {"messages"} else example
        yield Conversation(example, source, hashlib.sha256(json.dumps(body).encode()).hexdigest(), location.split)
