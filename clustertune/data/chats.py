"""Rows that hold one training example each, of any format but Open-Assistant's trees.

What is read has one of TRL's forms: ``{"messages"}``, ``{"prompt", "completion"}``, ``{"text"}`` or
``{"prompt", "chosen", "rejected"}``, the first three parts lists of messages, and beside them what the row has for its chat
template: ``tools`` and ``chat_template_kwargs``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from clustertune.data.rendering import REASONING
from clustertune.data.rows import NOT_A_FAULT, BadRow, Rejects, RowLocation, excerpt, parse
from clustertune.recipe.sections import COLUMNS, wrong_template_arguments

MAX_MESSAGE_BYTES = 10_000_000
"""UTF-8 bytes of a message from which on it is refused (10 MB): that is a pasted file, not a turn to learn."""
SPECIAL = ("tools", "tool_calls", *REASONING)
"""What a chat template must know by name, or it leaves it out without a message."""
OF_ROLE = {f"{role} messages": role for role in ("system", "user", "assistant", "tool")}
"""What examples with messages of a role are counted as, beside those with :data:`SPECIAL`."""
PARTS = ("messages", "prompt", "completion", "chosen", "rejected")
"""Keys of an example under which messages stand."""
_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bing", "bard"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response", "tool_response"), "tool"),
    "system": "system",
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    **dict.fromkeys(("function", "ipython", "observation", "tool_response", "function_response"), "tool"),
}
"""Roles by what other frameworks and older interfaces call them."""
UNEQUAL = "[] of other roles than assistant with a weight of their own"
"""Behind a column's name, among what is left out of rows: it matters where all roles are learnt."""
WEIGHTS = (
    *("weight", "train", "training", "loss", "loss_weight", "train_detail", "training_detail", "trainable", "learn"),
    *("loss_mask", "include_in_loss", "supervised"),
)
"""Fields by which other frameworks say whether a message is trained on (OpenAI, mistral-finetune, axolotl, ms-swift)."""
MASKS = ("mask", "masked", "is_masked", "mask_loss", "ignore_loss")
"""Fields by which others say that it is not."""
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
    """The tree's id, or the hash of the example: copies have one."""
    prompts: tuple[str, ...]
    """What the split goes by (:func:`prompts_of`)."""
    split: str | None = None
    """The split that the input says, if it does."""
    kind: str = ""
    """Of a prompt, the kind of its first instruction: of every kind the same share is held out."""
    told: str = ""
    """What the split goes by where all have one prompt (:func:`told_of`)."""


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
            value = parse(value)
        except BadRow as bad:
            raise BadRow(bad.reason, f"{name}: {bad.detail}") from None
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
        value: list[Any] = _value(row[key], key, list)
        return value
    return list(require(row, key, list))


class _ConversationReader:
    """Reads rows; ``leave_out`` gets the names of fields of messages that no example holds."""

    def __init__(self, leave_out: Callable[[Iterable[str]], None]) -> None:
        self._leave_out = leave_out

    def read(self, format_name: str, row: Mapping[str, Any]) -> Example:
        example = _READ[format_name](self, row)
        if "tools" not in COLUMNS[format_name]:
            return example
        for column, kind in (("tools", list), ("chat_template_kwargs", dict)):
            if row.get(column) and (value := _value(row[column], column, kind)):
                example[column] = value
        if fault := wrong_template_arguments(example.get("chat_template_kwargs", {})):
            raise BadRow("template-setting", f"chat_template_kwargs {fault}")
        return example

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
                more = {key: value for key, value in entry.items() if key not in ("from", "value", "role", "content")}
                entries.append({"role": role, "content": entry.get("value"), **more})
        return {"messages": _answered(self._turns(entries, "conversations", [], "value"), "conversations")}

    def lima(self, row: Mapping[str, Any]) -> Example:
        turns = enumerate(_list(row, "conversations"))
        entries = [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in turns]
        for index, entry in enumerate(entries):
            check_text(entry, "content", f"conversations[{index}]")
        return {"messages": _answered(self._turns(entries, "conversations", []), "conversations")}

    def alpaca(self, row: Mapping[str, Any]) -> Example:
        """The input follows the instruction after a blank line; ``history``: pairs of question and answer before it."""
        turns: list[Message] = []
        if (system := require(row, "system", str, optional=True)) and system.strip():
            turns.append({"role": "system", "content": system})
        for index, pair in enumerate(_list(row, "history") if row.get("history") else []):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise BadRow("wrong-column", f"history[{index}] is not a pair of question and answer")
            for role, text in zip(("user", "assistant"), pair, strict=True):
                turns.append({"role": role, "content": check_text({"text": text}, "text", f"history[{index}]")})
        prompt = check_text(row, "instruction")
        extra: str | None = require(row, "input", str, optional=True)
        if extra and extra.strip():
            prompt = f"{prompt}\n\n{check_text(row, 'input')}"
        answer = {"role": "assistant", "content": check_text(row, "output")}
        return {"messages": [*turns, {"role": "user", "content": prompt}, answer]}

    def prompt_completion(self, row: Mapping[str, Any]) -> Example:
        if (label := row.get("label")) is False or str(label).lower() == "false":
            text = "label is false: the completion is one that is not wanted (KTO's data), and it would be learnt"
            raise BadRow("unwanted-completion", f"{text}; leave such rows out, or give pairs: data.format=preference")
        prompt = self._prompt(row)
        return {"prompt": prompt, "completion": self._answer(row, "completion", prompt)}

    def preference(self, row: Mapping[str, Any]) -> Example:
        both = ("chosen", "rejected")
        answers = [row.get(key) for key in both]
        first = [answer[0] if isinstance(answer, list) and answer else None for answer in answers]
        opens = [isinstance(turn, dict) and turn.get("role") not in ("assistant", None) for turn in first]
        if all(opens):  # each holds the prompt too: it ends where they part, or with the last message of the user
            chosen, rejected = (
                _answered(self._turns(answer or [], key, []), key) for answer, key in zip(answers, both, strict=True)
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

    def prompt(self, row: Mapping[str, Any]) -> Example:
        """All other columns stand below ``columns``, for the rewards: as they are, whatever they are called."""
        more = {key: value for key, value in row.items() if key != "prompt" and value is not None}
        return {"prompt": self._prompt(row), "columns": _value(more, "the row", dict)}

    def _prompt(self, row: Mapping[str, Any]) -> list[Message]:
        if not isinstance(row.get("prompt"), list):
            return [{"role": "user", "content": check_text(row, "prompt")}]
        turns = self._turns(row["prompt"], "prompt", [])
        if not turns or turns[-1]["role"] not in ("user", "tool"):
            raise BadRow("wrong-turn", "prompt does not end with a message of the user or of a tool")
        return turns

    def _answer(self, row: Mapping[str, Any], key: str, prompt: list[Message]) -> list[Message]:
        if not isinstance(row.get(key), list):
            return [{"role": "assistant", "content": check_text(row, key)}]
        return _answered(self._turns(row[key], key, prompt), key)

    def _turns(self, entries: list[Any], column: str, before: list[Message], label: str = "content") -> list[Message]:
        """Messages in turn: a system message first if any, then user and assistant, and tools after an assistant that calls.

        ``label``: what the input calls the text of a message.
        """
        turns: list[Message] = []
        for index, entry in enumerate(entries):
            name = f"{column}[{index}]"
            if not isinstance(entry, dict):
                raise BadRow("wrong-column", f"{name} is {excerpt(entry)}, not an object")
            stated = require(entry, "role", str, name=f"{name}.role")
            if (role := _ROLES.get(stated)) is None:
                raise BadRow("unknown-role", f"{name}.role {excerpt(stated)}, known are system, user, assistant and tool")
            expected = _next(turns[-1] if turns else before[-1] if before else None)
            if role not in expected:
                raise BadRow("wrong-turn", f"{name} is a {role} message where a {expected[0]} message must come")
            turns.append({"role": role, **self._content(entry, role, name, label)})
        return turns

    def _content(self, entry: dict[str, Any], role: str, name: str, label: str) -> Message:
        more: Message = {}
        if role == "assistant":
            more |= {key: entry[key] for key in REASONING if entry.get(key) and check_text(entry, key, f"{name}.{key}")}
            if entry.get("tool_calls"):
                calls = _value(entry["tool_calls"], f"{name}.tool_calls", list)
                more["tool_calls"] = [_call(call, f"{name}.tool_calls[{at}]") for at, call in enumerate(calls)]
            elif entry.get("function_call"):  # OpenAI's form before tools
                call = _value(entry["function_call"], f"{name}.function_call", dict)
                more["tool_calls"] = [_call(call, f"{name}.function_call")]
            _check_weight(entry, name)
        elif _unequal(entry) is not None:
            self._leave_out([name.partition("[")[0] + UNEQUAL])
        if role == "tool":
            more |= {key: require(entry, key, str) for key in ("name", "tool_call_id") if entry.get(key) is not None}
        read = {"role", "content", *more, *(("function_call",) if "tool_calls" in more else ())}
        self._leave_out(f"messages[].{key}" for key in entry.keys() - read if entry[key] is not None)
        content = entry.get("content")
        if isinstance(content, list):
            content = "".join(_part(part, f"{name}.{label}[{at}]") for at, part in enumerate(content))
        if not content and (role == "tool" or "tool_calls" in more):
            return {"content": "", **more}
        body = {key: value for key, value in entry.items() if key == "content"} if content is None else {"content": content}
        return {"content": check_text(body, "content", f"{name}.{label}"), **more}


_READ: dict[str, Callable[[_ConversationReader, Mapping[str, Any]], Example]] = {  # in the order in which a row is recognised
    "preference": _ConversationReader.preference,
    "prompt-completion": _ConversationReader.prompt_completion,
    "messages": _ConversationReader.messages,
    "sharegpt": _ConversationReader.sharegpt,
    "alpaca": _ConversationReader.alpaca,
    "lima": _ConversationReader.lima,
    "text": _ConversationReader.text,
    "prompt": _ConversationReader.prompt,
}


def read(format_name: str, row: Mapping[str, Any]) -> Example:
    """One row as an example in TRL's form. Raises BadRow."""
    return _ConversationReader(lambda _names: None).read(format_name, row)


def _next(last: Message | None) -> tuple[str, ...]:
    """The roles that may follow a message."""
    if last is None:
        return ("user", "system")
    if last["role"] == "assistant":
        return ("tool",) if last.get("tool_calls") else ("user", "tool")  # a call may be in the text: Hermes
    return {"system": ("user",), "user": ("assistant",), "tool": ("assistant", "tool")}[last["role"]]


def _check_weight(entry: Mapping[str, Any], name: str) -> None:
    """Raise BadRow where an answer is to be trained on otherwise than the rest: TRL has no such field, it would be learnt."""
    if (key := _unequal(entry)) is not None:
        text = "all answers of a row are trained on alike; data.format=prompt-completion trains on the completion alone"
        raise BadRow("weighted-message", f"{name}.{key} is {excerpt(entry[key])}: {text}")


def _unequal(entry: Mapping[str, Any]) -> str | None:
    """The field of a message that says it is not to be learnt like the others."""
    own = (key for key in (*WEIGHTS, *MASKS) if not _says_nothing(entry.get(key), 0 if key in MASKS else 1))
    return next(own, None)


def _says_nothing(weight: Any, usual: int) -> bool:
    return weight in (None, usual) or (isinstance(weight, str | list | dict) and not weight)


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


def _answered(turns: list[Message], column: str) -> list[Message]:
    if not turns:
        raise BadRow("empty-text", f"{column} is empty")
    if turns[-1]["role"] != "assistant":
        raise BadRow("unanswered", f"{column} ends with a {turns[-1]['role']} message")
    return turns


_THOUGHT = re.compile(
    r"(?P<opens><(?:think|thinking|thought|reasoning|seed:think)>|\[THINK\]|<\|START_THINKING\|>|\u25c1think\u25b7)"
    r"|</(?:think|thinking|thought|reasoning|seed:think)>|\[/THINK\]|<\|END_THINKING\|>|\u25c1/think\u25b7"
)
"""Marks around thoughts in texts: Qwen3's and DeepSeek-R1's, Seed-OSS's, Magistral's, Command A's, Kimi's."""


def open_thought(text: str) -> str:
    """The mark with which a text ends in an open thought, "" where none is open."""
    marks = list(_THOUGHT.finditer(text))
    return marks[-1]["opens"] or "" if marks else ""


def has_thought(example: Mapping[str, Any]) -> bool:
    """Whether an answer of the example holds a thought, in a field of its own or in its text."""
    answers = [message for message in messages_of(example) if message["role"] == "assistant"]
    return any(any(answer.get(name) for name in REASONING) or _marks(answer["content"]) for answer in answers)


def _marks(text: str) -> bool:
    """Whether a mark stands in a text; most texts have none of the signs that one begins with."""
    return any(sign in text for sign in "<[\u25c1") and _THOUGHT.search(text) is not None


def kind_of_prompt(example: Mapping[str, Any]) -> str:
    """The first of a prompt's instructions (its column ``instruction_id_list``); empty where there is none."""
    names = example.get("columns", {}).get("instruction_id_list")
    return str(names[0]) if isinstance(names, list) and names else ""


def prompts_of(example: Mapping[str, Any]) -> tuple[str, ...]:
    """Hashes of what a model is given before the example's first answer that is trained, and of its beginnings up to each
    earlier answer, the shortest first; of a text, of all of it.

    System messages, white space, upper case and forms of Unicode's letters make no difference. Of ``messages`` the first answer
    is trained, of the other forms what follows ``prompt``.
    """
    if "text" in example:
        return (hashlib.sha256(_plain(example["text"]).encode()).hexdigest(),)
    turns = example.get("prompt") or list(takewhile(lambda turn: turn["role"] != "assistant", example["messages"]))
    digest, prompts = hashlib.sha256(), list[str]()
    for at, turn in enumerate(turns):
        if turn["role"] != "system":
            told = [turn["role"], _plain(turn["content"]), turn.get("tool_calls")]
            digest.update(json.dumps(told, sort_keys=True).encode())
            if at + 1 == len(turns) or turns[at + 1]["role"] == "assistant":
                prompts.append(digest.hexdigest())
    return tuple(prompts)


def told_of(example: Mapping[str, Any], prompts: tuple[str, ...]) -> str:
    """A hash of what an example is told beside its first prompt: system messages, and what users say after the first answer.

    ``prompts``: of :func:`prompts_of`. Of several turns in the prompt those up to the second answer count: the turns of one
    conversation may be rows of their own.
    """
    several = prompts[1:2]
    roles = {"system"} if several else {"system", "user"}
    texts = [_plain(turn["content"]) for turn in messages_of(example) if turn["role"] in roles]
    return hashlib.sha256(json.dumps([*(several or prompts), *texts]).encode()).hexdigest()


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def recognise(row: Mapping[str, Any]) -> str | None:
    """The settings with which a row can be read, as a recipe has them; None where no format fits."""
    if {"message_id", "parent_id", "message_tree_id"} <= row.keys() or isinstance(row.get("prompt"), dict):
        return "data.format: oasst-tree"
    for name in [name for name in _READ if name != "prompt"]:  # rows of other formats have prompts, too
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
    reader = _ConversationReader(rejects.leave_out)
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
        key, kind = hashlib.sha256(json.dumps(body).encode()).hexdigest(), kind_of_prompt(example)
        prompts = prompts_of(example)
        yield Conversation(example, source, key, prompts, location.split, kind, told_of(example, prompts))


# --- oasst -------------------------------------------------------------------------------------------------------------

# Open-Assistant message trees -> one conversation per tree.
#
# Two exports are read, distinguished record by record: flat rows (one message each, as in OpenAssistant/oasst2) and nested
# trees (``{"message_tree_id": ..., "prompt": {..., "replies": [...]}}``). The flat rows of a tree may stand in any order and
# between those of other trees; "file order" is the order of the rows, in a nested tree that of a depth-first reading.
#
# From the tree one path is taken: under a prompter message the assistant reply of rank 0, else of the lowest rank, else the
# first; under an assistant message every prompter reply; of all paths that end with the assistant the longest, and of equally
# long ones the first that a depth-first walk in file order meets.
#
# Rows that were deleted or whose review failed are not wrong: they go with their subtrees and are counted as dropped.
# A bad row is rejected with its reason; the rows below it are counted as dropped too, so that a fault counts once.


ROLES = {"prompter": "user", "assistant": "assistant"}


@dataclass(slots=True)
class TreeMessage:
    """One message of a tree."""

    id: str
    parent: str | None
    location: RowLocation
    usable: bool = False
    """False for a bad or filtered row, which stays in the tree so that its replies are not taken for orphans."""
    role: str = ""
    text: str = ""
    rank: float | None = None
    lang: str | None = None
    replies: list[TreeMessage] = field(default_factory=list)


@dataclass(slots=True)
class MessageTree:
    id: str
    split: str | None
    messages: dict[str, TreeMessage] = field(default_factory=dict)
    """By message id, in file order."""


class Trees:
    """Collects rows into trees, then gives one conversation for each tree that has one. All trees are held in memory."""

    def __init__(self, rejects: Rejects, language: str | None) -> None:
        self.trees: dict[str, MessageTree] = {}
        self.dropped: Counter[str] = Counter()
        """Rows (``deleted``, ``review``, ``below``: under one that is out) and trees (``language``) left out by rule."""
        self.languages: Counter[str] = Counter()
        """Roots by language, before the filter."""
        self._rejects = rejects
        self._language = language
        self._ids: set[str] = set()

    def conversations(self, records: Iterable[tuple[RowLocation, dict[str, Any]]]) -> Iterator[Conversation]:
        """Read all records, then walk the trees in the order in which their first rows came."""
        for location, record in records:
            for row in flatten(record):
                self._rejects.rows += 1
                try:
                    self._add(location, row)
                except BadRow as bad:
                    self._rejects.add(location, bad.reason, bad.detail)
                    self._rejects.look(record, recognise)
        for tree in self.trees.values():
            conversation = self._conversation(tree)
            if conversation is not None:
                yield conversation

    def _add(self, location: RowLocation, row: dict[str, Any]) -> None:
        """Put one flat row into its tree. Raises BadRow; where the ids are good, a placeholder is left for the replies."""
        identity = require(row, "message_id", str)
        tree_id = require(row, "message_tree_id", str)
        if identity in self._ids:
            raise BadRow("duplicate-id", f"message_id {excerpt(identity)} was there before")
        self._ids.add(identity)
        tree = self.trees.setdefault(tree_id, MessageTree(tree_id, location.split))
        if tree.split != location.split:
            raise BadRow("two-splits", f"tree {excerpt(tree_id)} is in the {tree.split} split already")
        message = tree.messages[identity] = TreeMessage(identity, None, location)
        message.parent = require(row, "parent_id", str, optional=True)
        if require(row, "deleted", bool, optional=True):
            self.dropped["deleted"] += 1
        elif require(row, "review_result", bool, optional=True) is False:
            self.dropped["review"] += 1
        else:
            self._fill(message, row)

    def _fill(self, message: TreeMessage, row: dict[str, Any]) -> None:
        role = require(row, "role", str)
        if role not in ROLES:
            raise BadRow("unknown-role", f"role {excerpt(role)}, known are prompter and assistant")
        message.text = check_text(row, "text")
        message.role = role
        message.rank = _rank(row)
        if message.parent is None:
            message.lang = require(row, "lang", str, optional=self._language is None)
        if not isinstance(row.get("replies") or [], list):
            raise BadRow("wrong-column", f"replies is {excerpt(row['replies'])}, not a list")
        message.usable = True

    def _conversation(self, tree: MessageTree) -> Conversation | None:
        root = self._link(tree)
        if root is not None and root.usable and root.role != "prompter":
            root.usable = False
            self._rejects.add(root.location, "wrong-parent-role", f"the root {excerpt(root.id)} is an assistant message")
        alive = self._prune(root) if root is not None and root.usable else 0
        self.dropped["below"] += sum(message.usable for message in tree.messages.values()) - alive
        if root is None or not root.usable:
            return None
        self.languages[root.lang or "?"] += 1
        if self._language is not None and root.lang != self._language:
            self.dropped["language"] += 1
            return None
        path = longest_path(root)
        if not path:
            self._rejects.add(root.location, NOT_A_FAULT, f"tree {excerpt(tree.id)} has no usable assistant reply")
            return None
        messages = [{"role": ROLES[message.role], "content": message.text} for message in path]
        example = {"messages": messages}
        prompts = prompts_of(example)
        return Conversation(example, {"tree": tree.id}, tree.id, prompts, tree.split, told=told_of(example, prompts))

    def _link(self, tree: MessageTree) -> TreeMessage | None:
        """Hang every message under its parent, reject those that have none, and return the root."""
        roots: list[TreeMessage] = []
        tops: list[TreeMessage] = []
        for message in tree.messages.values():
            if message.parent is None:
                roots.append(message)
            elif message.parent in tree.messages:
                tree.messages[message.parent].replies.append(message)
            else:
                tops.append(message)
                self._out(message, "missing-parent", f"parent_id {excerpt(message.parent)} is not a message of this tree")
        root = _choose_root(tree, roots)
        for other in roots:
            if other is not root:
                root_id = excerpt(root.id) if root else "none"
                self._out(other, "two-roots", f"a second message without parent_id, the root is {root_id}")
        for message in find_cycles(tree, roots + tops):
            self._out(message, "cycle", f"following parent_id from {excerpt(message.id)} comes back to it")
        return root

    def _prune(self, root: TreeMessage) -> int:
        """Cut off everything below the root that is out, and return how many messages stay."""
        alive, waiting = 0, [root]
        while waiting:
            message = waiting.pop()
            alive += 1
            usable = []
            for reply in message.replies:
                if reply.usable and reply.role == message.role:
                    self._out(reply, "wrong-parent-role", f"{reply.role} message under a message of the same role")
                elif reply.usable:
                    usable.append(reply)
            message.replies = usable
            waiting += usable
        return alive

    def _out(self, message: TreeMessage, reason: str, detail: str) -> None:
        """Reject a message for its place in the tree, unless it is out already for what it holds."""
        if message.usable:
            message.usable = False
            self._rejects.add(message.location, reason, detail)


def flatten(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The flat rows of a record, depth first: of a nested tree all its messages, else the record itself."""
    if "prompt" not in record or "message_id" in record:
        yield record
        return
    waiting: list[tuple[Any, str | None]] = [(record["prompt"], None)]
    while waiting:
        node, parent = waiting.pop()
        if not isinstance(node, dict):
            node = {"message_id": node}  # no message: its id is reported as a wrong column
        replies = node.get("replies")
        row = {**node, "parent_id": parent, "message_tree_id": record.get("message_tree_id")}
        if isinstance(replies, list):
            row["replies"] = None
        yield row
        if isinstance(replies, list) and isinstance(node.get("message_id"), str):
            waiting += [(reply, node["message_id"]) for reply in reversed(replies)]


def longest_path(root: TreeMessage) -> list[TreeMessage]:
    """The chosen path from the root to an assistant message, or [] where no assistant reply follows the root."""
    best: TreeMessage | None = None
    deepest = 0
    above: dict[str, TreeMessage] = {}
    waiting = [(root, 1)]
    while waiting:
        message, depth = waiting.pop()
        if message.role == "assistant":
            if depth > deepest:
                best, deepest = message, depth
            follow = message.replies
        else:
            follow = sorted(message.replies, key=_preference)[:1]
        for reply in reversed(follow):
            above[reply.id] = message
            waiting.append((reply, depth + 1))
    path: list[TreeMessage] = []
    while best is not None:
        path.append(best)
        best = above.get(best.id)
    return path[::-1]


def find_cycles(tree: MessageTree, tops: list[TreeMessage]) -> list[TreeMessage]:
    """The messages that are their own ancestors. ``tops`` are those that no message of the tree is above of."""
    reached: set[str] = set()
    waiting = list(tops)
    while waiting:
        message = waiting.pop()
        reached.add(message.id)
        waiting += message.replies
    cyclic: list[TreeMessage] = []
    for start in tree.messages.values():
        trail: dict[str, TreeMessage] = {}
        at = start
        while at.id not in reached and at.id not in trail:
            trail[at.id] = at
            assert at.parent is not None  # what has no parent is a top
            at = tree.messages[at.parent]
        if at.id in trail:
            ids = list(trail)
            cyclic += [trail[i] for i in ids[ids.index(at.id) :]]
        reached.update(trail)
    return cyclic


def _choose_root(tree: MessageTree, roots: list[TreeMessage]) -> TreeMessage | None:
    """The tree is named after its root; where no root has that name, the first usable one."""
    named = [root for root in roots if root.id == tree.id]
    usable = [root for root in roots if root.usable]
    return next(iter(named + usable + roots), None)


def _preference(reply: TreeMessage) -> tuple[bool, bool, float]:
    """Rank 0 first, then the lowest rank, then no rank; ``sorted`` keeps file order among equals."""
    return reply.rank is None, reply.rank != 0, reply.rank or 0


def _rank(row: dict[str, Any]) -> float | None:
    """Tables made by pandas hold ranks as floats."""
    rank = row.get("rank")
    if rank is None:
        return None
    if isinstance(rank, bool) or not isinstance(rank, int | float) or not math.isfinite(rank):
        raise BadRow("wrong-column", f"rank is {excerpt(rank)}, not a number or null")
    return rank
