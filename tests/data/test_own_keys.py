"""Keys that only some rows have, from tables as from JSON Lines; a row's own arguments and weights; answers of tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from clustertune.data import tokens
from clustertune.data.chats import MASKS, WEIGHTS, read
from clustertune.data.local_model import train_tokenizer
from clustertune.data.prepare import prepare
from clustertune.data.rows import BadRow
from clustertune.data.sequences import Sequences
from clustertune.errors import UserError
from clustertune.recipe.native_rules import train_defaults
from clustertune.recipe.sections import Data


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties][:1]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return said("assistant", "", tool_calls=[{"type": "function", "function": {"name": name, "arguments": arguments}}])


WALK = {"x": 0, "y": 1, "path": [{"via": "a"}, {"via": "b", "slow": True}]}
SAY = [{"words": "hello", "options": {"loud": True}}, {"words": "no", "options": {"to": "b"}}]
CALLS = [("walk", WALK), ("say", SAY[0]), ("say", SAY[1])]
TOOLS = [
    tool("walk", {"x": {"type": "integer"}, "y": {"type": "integer", "enum": [0, 1]}}),
    tool("say", {"words": {"type": "string", "default": "hi"}}),
]


def turns(number: int) -> list[dict[str, Any]]:
    name, arguments = CALLS[number % 3]
    return [said("user", f"ask {number}"), called(name, arguments), said("tool", "done", name=name), said("assistant", "Yes.")]


def as_sharegpt(number: int) -> list[dict[str, Any]]:
    name, arguments = CALLS[number % 3]
    call = {"function": {"name": name, "arguments": arguments}}
    texts = [("human", f"ask {number}"), ("gpt", "I do."), ("human", "go"), ("gpt", "Yes.")]
    entries: list[dict[str, Any]] = [{"from": speaker, "value": text} for speaker, text in texts]
    entries[1]["tool_calls"] = [call]
    return [*entries[:2], {"from": "tool", "value": "done"}, {"from": "gpt", "value": "Done."}, *entries[2:]]


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "messages": lambda n: {"messages": turns(n), "tools": TOOLS, "chat_template_kwargs": [{"a": 1}, {"b": {"c": 2}}][n % 2]},
    "sharegpt": lambda n: {"conversations": as_sharegpt(n), "tools": TOOLS},
    "prompt-completion": lambda n: {"prompt": turns(n)[:1], "completion": turns(n)[1:2], "tools": TOOLS},
    "preference": lambda n: {"prompt": turns(n)[:3], "chosen": turns(n)[3:], "rejected": turns(n + 1)[1:2], "tools": TOOLS},
    "alpaca": lambda n: {"instruction": f"q {n}", "output": "a", "tools": TOOLS, "chat_template_kwargs": [{"a": 1}, {}][n % 2]},
}


def write_stream(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


def write_file(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


WRITERS: dict[str, tuple[str, Callable[[pa.Table, Path], Any]]] = {
    "parquet": (".parquet", pq.write_table),
    "stream": (".arrow", write_stream),
    "file": (".arrow", write_file),
    "feather": (".feather", pyarrow.feather.write_feather),
}


def plain(outcome: Any) -> list[Any]:
    return sorted(json.dumps({k: v for k, v in one.items() if k != "source"}) for one in outcome.conversations)


def same_keys(found: list[Any]) -> list[Any]:
    """Arrow has one order of keys for all rows."""
    return sorted(json.dumps(json.loads(one), sort_keys=True) for one in found)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("kind", WRITERS)
def test_a_table_gives_what_the_same_rows_give_as_json_lines(run, tmp_path, kind, name):
    rows = [ROWS[name](number) for number in range(6)]
    suffix, write = WRITERS[kind]
    write(pa.Table.from_pylist(rows), tmp_path / f"rows{suffix}")
    got, expected = run(path=tmp_path / f"rows{suffix}", format=name), run(rows, format=name)
    assert not got.rejected
    assert same_keys(plain(got)) == same_keys(plain(expected))
    assert "null" not in "".join(plain(got))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("kind", ["parquet", "disk", "untyped", "hub"])
def test_the_json_type_of_datasets_is_decoded_and_keeps_the_nulls_that_were_written(run, tmp_path, monkeypatch, kind, name):
    rows = [ROWS[name](number) for number in range(6)]
    rows[0]["tools"] = [tool("walk", {"x": {"type": "integer", "default": None}})]
    table = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    settings: dict[str, Any] = {"format": name, "max_rejected": 0}
    if kind == "hub":
        monkeypatch.setattr(datasets, "load_dataset", lambda *_a, **_k: datasets.DatasetDict({"train": table}))
        out = tmp_path / "out"
        prepare(Data(name="org/set", revision="a" * 40, **settings), recipe_folder=tmp_path, seed=42, out=out)
        found = [json.loads(line) for split in ("train", "eval") for line in (out / f"{split}.jsonl").open()]
        got = type("Outcome", (), {"conversations": found})()
    elif kind == "disk":
        table.save_to_disk(tmp_path / "set")
        got = run(path=tmp_path / "set", **settings)
    else:
        path = tmp_path / "rows.parquet"
        table.to_parquet(path)
        if kind == "untyped":  # a program that knows no extension types wrote it again
            held = pq.ParquetFile(path, arrow_extensions_enabled=False).read()
            pq.write_table(held.cast(pa.schema([bare(one) for one in held.schema], held.schema.metadata)), path)
        got = run(path=path, **settings)
    assert same_keys(plain(got)) == same_keys(plain(run(rows, **settings)))
    assert '"default": null' in "".join(plain(got))


def bare(field: pa.Field) -> pa.Field:
    return pa.field(field.name, without_json(field.type))


def without_json(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_struct(kind):
        return pa.struct([bare(kind.field(at)) for at in range(kind.num_fields)])
    return pa.list_(without_json(kind.value_type)) if pa.types.is_list(kind) else kind


# --- a row's own keys ---


@pytest.fixture(scope="module")
def tokenizer():
    found = train_tokenizer((f"question {n} answer {n} mood" for n in range(50)), 400, 512)
    template = found.chat_template
    found.chat_template = "{#- tools tool_calls #}{%- if mood is defined %}mood {{ mood }}{% endif %}" + template
    return found


PAIR = [said("user", "question 1"), said("assistant", "answer 1")]
OWN = {"chat_template_kwargs": {"mood": 7}}
WITH_OWN = {
    "messages": {"messages": PAIR},
    "sharegpt": {"conversations": [{"from": "human", "value": "question 1"}, {"from": "gpt", "value": "answer 1"}]},
    "prompt-completion": {"prompt": "question 1", "completion": "answer 1"},
    "preference": {"prompt": "question 1", "chosen": "answer 1", "rejected": "answer 2"},
    "alpaca": {"instruction": "question 1", "output": "answer 1"},
    "lima": {"conversations": ["question 1", "answer 1"]},
}


@pytest.mark.parametrize("name", WITH_OWN)
def test_a_rows_own_arguments_reach_the_template(run, tokenizer, name):
    rows = [WITH_OWN[name] | own for own in (OWN, {}, {"chat_template_kwargs": json.dumps(OWN["chat_template_kwargs"])})]
    got = run(rows, format=name, eval_fraction=0.01)
    assert "chat_template_kwargs" not in got.result["unused"]
    tokens.make(got.out, tokenizer, train_defaults() | {"packing": False, "max_length": None})
    sequences = [Sequences(got.out / "tokens", split) for split in ("train", "eval")]
    key = "prompt_ids" if name == "preference" else "input_ids"
    texts = [tokenizer.decode(found[n][key]) for found in sequences for n in range(len(found))]
    assert sum(text.startswith("mood 7") for text in texts) == 2
    assert len(texts) == 3


@pytest.mark.parametrize("value", [0, 0.5, False, "no"])
@pytest.mark.parametrize("key", WEIGHTS)
def test_an_answer_that_is_not_to_be_learnt_like_the_rest_refuses_its_row(run, key, value):
    kinds = {
        "messages": [PAIR[0], PAIR[1] | {key: value}],
        "sharegpt": [WITH_OWN["sharegpt"]["conversations"][0], WITH_OWN["sharegpt"]["conversations"][1] | {key: value}],
    }
    for name, column in (("messages", "messages"), ("sharegpt", "conversations")):
        with pytest.raises(BadRow, match=key):
            read(name, {column: kinds[name]})
    with pytest.raises(BadRow, match=key):
        read("prompt-completion", {"prompt": "q", "completion": [PAIR[1] | {key: value}]})
    for plain_value in (1, 1.0, True, None):
        assert read("messages", {"messages": [PAIR[0], PAIR[1] | {key: plain_value}]}) == {"messages": PAIR}


@pytest.mark.parametrize("key", MASKS)
def test_a_masked_answer_refuses_its_row(key):
    for value in (1, True, "yes"):
        with pytest.raises(BadRow, match=key):
            read("messages", {"messages": [PAIR[0], PAIR[1] | {key: value}]})
    for plain_value in (0, False, None, ""):
        assert read("messages", {"messages": [PAIR[0], PAIR[1] | {key: plain_value}]}) == {"messages": PAIR}


@pytest.mark.parametrize("label", [False, "False", "false"])
def test_a_completion_that_is_not_wanted_is_not_learnt(label):
    """KTO's data (TRL's unpaired preference): taken as prompt and completion the model would learn what it should leave."""
    row = {"prompt": "q", "completion": "a"}
    with pytest.raises(BadRow, match="label"):
        read("prompt-completion", row | {"label": label})
    for other in (True, "true", None, 0, "positive"):
        assert read("prompt-completion", row | {"label": other}) == read("prompt-completion", row)


def test_a_question_that_is_not_to_be_learnt_is_refused_where_questions_are_learnt(run, tokenizer):
    rows = {
        "messages": [{"messages": [PAIR[0] | {"weight": 0}, PAIR[1]]}] * 2,
        "prompt-completion": [{"prompt": [PAIR[0] | {"train": False}], "completion": [PAIR[1]]}] * 2,
    }
    for name, given in rows.items():
        got = run(given, format=name)
        settings = train_defaults() | {"packing": False, "max_length": None, "assistant_only_loss": False}
        tokens.make(got.out, tokenizer, settings | {"assistant_only_loss": True})
        with pytest.raises(UserError, match="assistant_only_loss"):
            tokens.make(got.out, tokenizer, settings | {"completion_only_loss": False})
        if name == "prompt-completion":
            tokens.make(got.out, tokenizer, settings)


# --- templates that leave messages out ---

PARTS_ALONE = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}{% endfor %}{{ eos_token }}{% endfor %}"
)
NO_QUESTIONS = "{% for m in messages if m.role == 'assistant' %}{{ m.content + eos_token }}{% endfor %}"
NO_TOOLS = "{% for m in messages if m.role != 'tool' %}{{ m.role + m.content + eos_token }}{% endfor %}"
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.role + m.content + eos_token }}{% endfor %}"


@pytest.mark.parametrize(("template", "word"), [(PARTS_ALONE, "assistant"), (NO_QUESTIONS, "user"), (NO_TOOLS, "tool")])
def test_a_template_that_leaves_texts_out_is_refused(run, template, word):
    """Such as one of a model with pictures, which takes lists of parts: of a text nothing but the end would be learnt."""
    deaf = train_tokenizer(["question"], 300, 512)
    deaf.chat_template = template
    used = [*PAIR, said("tool", "3"), PAIR[1]] if word == "tool" else PAIR  # a call may stand in the text: Hermes
    for row, name in (({"messages": used}, "messages"), ({"prompt": used[:-1], "completion": used[-1:]}, "prompt-completion")):
        got = run([row] * 2, format=name)
        with pytest.raises(UserError, match=f"{word} messages"):
            tokens.make(got.out, deaf, train_defaults() | {"packing": False, "max_length": None, "assistant_only_loss": False})


def test_system_messages_that_a_template_leaves_out_are_named(run, capsys):
    deaf = train_tokenizer(["question"], 300, 512)
    deaf.chat_template = NO_SYSTEM
    got = run([{"messages": [said("system", "be kind"), *PAIR]}] * 2, format="messages")
    tokens.make(got.out, deaf, train_defaults() | {"packing": False, "max_length": None, "assistant_only_loss": False})
    assert "2 examples hold system messages" in capsys.readouterr().err
