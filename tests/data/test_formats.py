"""What each format's rows become, from every kind of file and place; a wrong format is recognised, what is left out named."""

from __future__ import annotations

import bz2
import csv
import gzip
import http.server
import io
import json
import lzma
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clustertune.data import rows as rows_module
from clustertune.data import tokens
from clustertune.data.chats import read
from clustertune.data.local_model import train_tokenizer
from clustertune.data.prepare import prepare
from clustertune.data.rows import BadRow, Rejects
from clustertune.data.sequences import Sequences
from clustertune.data.sources import split_of
from clustertune.errors import ExitCode, UserError
from clustertune.recipe.native_rules import train_defaults
from clustertune.recipe.schema import Data
from tests.damage import failing, refused


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
PAIR = [user("q"), assistant("a")]


SYSTEM = {"role": "system", "content": "s"}
SHAREGPT = [
    {"from": "human", "value": "q"},
    {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Bonn"}}'},
    {"from": "observation", "value": "warm"},
    {"from": "gpt", "value": "a"},
]
BECOMES: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("messages", {"messages": [{"role": "developer", "content": "s"}, *PAIR]}, [SYSTEM, *PAIR]),
    ("messages", {"messages": json.dumps(PAIR)}, PAIR),
    ("messages", {"messages": [user([{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]), PAIR[1]]},
     [user("qr"), PAIR[1]]),
    ("messages", {"messages": [*PAIR, user("q") | {"name": "n"}, assistant("a", reasoning="hm", weight=1)]},
     [*PAIR, user("q"), assistant("a", reasoning="hm")]),
    ("sharegpt", {"system": "s", "conversations": SHAREGPT},
     [SYSTEM, user("q"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "warm"}, assistant("a")]),
    ("alpaca", {"system": "s", "history": [["q0", "a0"]], "instruction": "q", "input": "x", "output": "a"},
     [SYSTEM, user("q0"), assistant("a0"), user("q\n\nx"), assistant("a")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "expected"), BECOMES)
def test_a_row_becomes_messages(name, row, expected):
    assert read(name, row) == {"messages": expected}


def test_calls_of_tools_come_with_their_arguments_as_objects():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    answer = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "warm"}
    turns = [user("q"), {"role": "assistant", "content": None, "tool_calls": [call]}, answer, assistant("a")]
    found = read("messages", {"messages": turns, "tools": json.dumps([TOOL])})
    assert found["tools"] == [TOOL]
    assert found["messages"] == [user("q"), assistant("", tool_calls=[{"id": "c1", **CALL}]), answer, assistant("a")]


def called(*calls):
    return [user("q"), assistant("", tool_calls=list(calls))]


REFUSED: list[tuple[str, Any, str, str]] = [
    # By the turns of "messages" and of "lima".
    ("messages", [], "empty-text", "messages is empty"),
    ("messages", [user("a")], "unanswered", "ends with a user"),
    ("messages", [assistant("a")], "wrong-turn", r"messages\[0\] is a assistant"),
    ("messages", [user("a"), user("b")], "wrong-turn", r"messages\[1\]"),
    ("messages", [SYSTEM, SYSTEM, *PAIR], "wrong-turn", r"messages\[1\]"),
    ("messages", [user("a"), {"role": "tool", "content": "b"}], "wrong-turn", "tool"),
    ("messages", [user("q"), assistant(None, tool_calls=[CALL]), *PAIR], "wrong-turn", "a tool message must come"),
    ("messages", [user("a"), {"role": "narrator", "content": "b"}], "unknown-role", "narrator"),
    ("messages", [user("a"), {"role": "assistant"}], "wrong-column", r"messages\[1\].content is missing"),
    ("messages", [user("a"), assistant(None)], "wrong-column", r"messages\[1\].content is null"),
    ("messages", [user([{"type": "text"}]), PAIR[1]], "wrong-column", r"messages\[0\].content\[0\].text is missing"),
    ("messages", [user([{"type": "image_url"}]), PAIR[1]], "not-text", "image_url"),
    ("messages", [user("a"), assistant(" ")], "empty-text", r"messages\[1\].content"),
    ("messages", ["hello"], "wrong-column", r"messages\[0\]"),
    ("messages", None, "wrong-column", "messages is null"),
    ("messages", called({"name": "f", "arguments": "{"}), "invalid-json", "arguments"),
    ("messages", called("f"), "wrong-column", "not a call"),
    ("lima", ["a"], "unanswered", ""),
    ("lima", [], "empty-text", ""),
    ("lima", ["a", ""], "empty-text", ""),
    ("lima", ["a", None], "wrong-column", ""),
    ("lima", [{"from": "human", "value": "a"}], "wrong-column", ""),
    ("lima", "ab", "invalid-json", ""),
    ("sharegpt", [{"from": "narrator", "value": "x"}], "unknown-role", ""),
    ("sharegpt", [{"from": "gpt", "value": "x"}], "wrong-turn", ""),
    ("sharegpt", [{"from": "human", "value": "q"}], "unanswered", ""),
    # By whole rows.
    ("messages", {"messages": PAIR, "tools": "f(x)"}, "invalid-json", "tools"),
    ("messages", {"messages": PAIR, "tools": [{"name": "\ud800"}]}, "not-utf8", "tools"),
    ("alpaca", {"instruction": "", "output": "x"}, "empty-text", ""),
    ("alpaca", {"instruction": "x", "output": "\n"}, "empty-text", ""),
    ("alpaca", {"instruction": "x"}, "wrong-column", ""),
    ("alpaca", {"instruction": "x", "input": ["y"], "output": "z"}, "wrong-column", ""),
    ("alpaca", {"instruction": "x", "output": "y" * 10_000_000}, "message-too-long", ""),
    ("alpaca", {"instruction": "x", "output": "\udcff"}, "not-utf8", ""),
    ("alpaca", {"history": [["q"]], "instruction": "q", "output": "a"}, "wrong-column", ""),
    ("prompt-completion", {"prompt": PAIR, "completion": "a"}, "wrong-turn", ""),
    ("prompt-completion", {"prompt": "q", "completion": [user("q")]}, "wrong-turn", ""),
    ("prompt-completion", {"prompt": "q"}, "wrong-column", ""),
    ("preference", {"prompt": "q", "chosen": "a", "rejected": "a"}, "no-preference", ""),
    ("preference", {"chosen": PAIR, "rejected": [user("other"), assistant("b")]}, "wrong-turn", ""),
    ("preference", {"prompt": "q", "chosen": "a"}, "wrong-column", ""),
    ("text", {"text": " \n"}, "empty-text", ""),
]


@pytest.mark.parametrize(("name", "row", "reason", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_row_is_refused(name, row, reason, words):
    column = {"messages": "messages", "lima": "conversations", "sharegpt": "conversations"}.get(name)
    with pytest.raises(BadRow, match=words) as caught:
        read(name, row if isinstance(row, dict) else {column: row})
    assert caught.value.reason == reason


def test_arguments_too_deep_to_write_are_refused():
    deep: dict[str, Any] = {}
    for _ in range(50_000):
        deep = {"a": deep}
    with pytest.raises(BadRow, match="invalid-json"):
        read("messages", {"messages": [user("q"), assistant("", tool_calls=[{"name": "f", "arguments": deep}])]})


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]},
        {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
        {"prompt": "q", "chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
    ],
)
def test_the_forms_of_a_preference_are_one(row):
    assert read("preference", row) == {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]}


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


QUESTIONS = [{"prompt": f'question {n},\n "quoted"', "completion": f"answer {n}", "id": str(n)} for n in range(6)]


@pytest.mark.parametrize(
    "suffix",
    [".csv", ".tsv", ".csv.gz", ".jsonl", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst", ".parquet", ".arrow", ".json",
     ".JSON", ".json.gz", ".lines.json"],
)  # fmt: skip
def test_every_kind_of_file_gives_the_same(run, lines, tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    array = json.dumps(QUESTIONS, indent=1, ensure_ascii=False).encode()
    plain = {".json": array, ".JSON": b"\xef\xbb\xbf\n " + array, ".json.gz": array}.get(suffix) or lines(QUESTIONS)
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(QUESTIONS), path)
    elif suffix == ".arrow":
        with pa.ipc.new_stream(str(path), pa.Table.from_pylist(QUESTIONS).schema) as writer:
            writer.write_table(pa.Table.from_pylist(QUESTIONS))
    elif suffix == ".jsonl.zst":
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(plain)
    else:
        packers = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
        body = as_csv(QUESTIONS, "\t" if suffix == ".tsv" else ",") if "sv" in suffix else plain
        path.write_bytes(packers.get(suffix.rpartition(".")[2], bytes)(body))
    got = run(path=path, format="prompt-completion", language=None)
    found = sorted((one["prompt"][0]["content"], one["completion"][0]["content"]) for one in got.conversations)
    assert found == sorted((row["prompt"], row["completion"]) for row in QUESTIONS)
    assert got.result["unused"] == ["id"]


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        *((suffix, b"BZh9 no") for suffix in (".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst", ".arrow")),
        (".jsonl.gz", gzip.compress(b'{"prompt": "a", "completion": "b"}\n' * 50, mtime=0)[:-20]),
        (".csv", b'prompt,completion\na,b\n"c,d\n'),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_by_name(run, suffix, content):
    with pytest.raises(UserError, match=r"rows\.\w+.*(damaged \w+ file|not CSV)"):
        run(content, suffix, format="prompt-completion", language=None)


def test_bad_rows_of_a_table_are_counted_with_their_lines(run):
    content = b'prompt,completion\nq1,"a\n1"\nq2\nq3,a3,more\n\nq4,caf\xe9\nq5,\nq6,a6\n'
    got = run(content, ".csv", format="prompt-completion", language=None)
    assert [(bad["line"], bad["reason"]) for bad in got.lines("rejected")] == [
        (4, "wrong-column"), (5, "wrong-column"), (7, "not-utf8"), (8, "wrong-column"),
    ]  # fmt: skip
    assert len(got.conversations) == 2


def test_columns_are_given_the_names_of_the_format(run, lines):
    rows = [{"question": f"q{n}", "prompt": "other", "best": "a"} for n in range(3)]
    got = run(lines(rows), format="prompt-completion", language=None, columns={"prompt": "question", "completion": "best"})
    assert {one["prompt"][0]["content"] for one in got.conversations} == {"q0", "q1", "q2"}
    with pytest.raises(ValueError, match="columns: answer: prompt-completion has no such column"):
        Data(name="x", format="prompt-completion", columns={"answer": "best"})


@pytest.mark.parametrize(
    ("row", "named", "hint"),
    [
        ({"conversations": [SHAREGPT[0], SHAREGPT[3]]}, "messages", "data.format: sharegpt"),
        ({"messages": PAIR}, "sharegpt", "data.format: messages"),
        ({"dialog": PAIR}, "messages", "data.format: messages and data.columns: {messages: dialog}"),
        ({"conversations": ["q", "a"]}, "sharegpt", "data.format: lima"),
        ({"instruction": "q", "output": "a"}, "messages", "data.format: alpaca"),
        ({"prompt": "q", "completion": "a"}, "alpaca", "data.format: prompt-completion"),
        ({"prompt": "q", "chosen": PAIR, "rejected": [user("q"), assistant("b")]}, "messages", "data.format: preference"),
        ({"text": "long"}, "messages", "data.format: text"),
        ({"message_id": "1", "parent_id": None, "message_tree_id": "1"}, "messages", "data.format: oasst-tree"),
        ({"question": "q", "answer": "a"}, "messages", "the columns are question, answer: data.columns"),
        ({"messages": PAIR}, "oasst-tree", "data.format: messages"),
    ],
)
def test_another_format_is_recognised_and_named(run, lines, row, named, hint):
    with pytest.raises(UserError) as caught:
        run(lines([row] * 3), format=named, language=None)
    assert hint in str(caught.value)


def test_the_source_names_file_and_row(run, lines):
    content = b"\n" + lines([{"instruction": "x"}]) + lines([{"instruction": "x", "output": "y"}])
    got = run(content, format="alpaca", language=None)
    assert got.conversations[0]["source"] == {"tree": "rows.jsonl:2", "file": "rows.jsonl", "row": 2}
    assert got.lines("rejected") == [{"file": "rows.jsonl", "line": 2, "reason": "wrong-column", "detail": "output is missing"}]


def test_copies_of_a_conversation_never_stand_in_both_splits(run):
    content = [{"conversations": [f"question {i % 10}", "answer"]} for i in range(40)]
    got = run(content, format="lima", eval_fraction=0.3)
    train, held_out = ({line["messages"][0]["content"] for line in got.lines(name)} for name in ("train", "eval"))
    assert (len(train), len(held_out), train & held_out) == (7, 3, set())
    assert any("data.language" in warning for warning in got.result["warnings"]), "it does nothing for this format"


def test_a_limit_takes_the_first_conversations(run, lines):
    """The source's 2,048 samples: what stands behind them is not taken, and another limit is another dataset."""
    rows = [{"instruction": f"ask {n}", "output": f"answer {n}"} for n in range(20)]
    found = run(lines(rows), format="alpaca", limit=8)
    assert sorted(c["source"]["row"] for c in found.conversations) == list(range(1, 9))
    assert len(run(lines(rows), format="alpaca").conversations) == 20


def test_too_many_bad_rows_stop_and_are_named(run, lines):
    rows = [{"messages": PAIR} if n % 4 else {"messages": []} for n in range(20)]
    with pytest.raises(UserError) as caught:
        run(lines(rows), format="messages", language=None, max_rejected=0.2)
    assert "5 bad rows of 20 (empty-text 5), 25%: more than data.max_rejected=0.2" in str(caught.value)
    assert caught.value.problems[1].file.endswith("rows.jsonl:1")
    assert run(lines(rows), format="messages", language=None, max_rejected=0.25).rejected == {"empty-text": 5}


def test_a_lower_limit_judges_what_was_made_before(run, lines, tmp_path):
    path, out = tmp_path / "rows.jsonl", tmp_path / "out"
    path.write_bytes(lines([{"messages": PAIR}, {"messages": []}]))
    run(path=path, out=out, format="messages", language=None, max_rejected=0.5)
    with pytest.raises(UserError, match="max_rejected"):
        run(path=path, out=out, format="messages", language=None, max_rejected=0.4)


# --- what is trained ---


@pytest.fixture(scope="module")
def tokenizer():
    found = train_tokenizer((f"question {n} answer {n}" for n in range(50)), 400, 512)
    found.chat_template = found.chat_template.replace("{{-", "{#- tools tool_calls #}{{-", 1)
    return found


def rows_of(run, lines, rows, tokenizer, train=None, **data):
    got = run(lines(rows), language=None, **data)
    tokens.make(got.out, tokenizer, train_defaults() | {"packing": False, "max_length": None, **(train or {})})
    found = Sequences(got.out / "tokens", "train")
    return got, [found[n] for n in range(len(found))]


@pytest.mark.parametrize("train", [{"assistant_only_loss": True}, {"completion_only_loss": False}])
def test_of_prompt_and_completion_trl_labels_the_same(run, lines, tokenizer, train):
    """TRL's own preparation of the same rows is the oracle."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    turns = [user("q0"), assistant("a0")]
    rows = [{"prompt": [*turns, user(f"question {n}")], "completion": [assistant(f"answer {n}")]} for n in range(4)]
    got, found = rows_of(run, lines, rows, tokenizer, train, format="prompt-completion")
    examples = [{key: one[key] for key in ("prompt", "completion")} for one in got.lines("train")]
    self = type("Trainer", (), {"_tokenizer": tokenizer, "_is_vlm": False, "chat_template": tokenizer.chat_template})()
    self.completion_only_loss = train.get("completion_only_loss", True)
    args = SFTConfig(output_dir=str(got.out), max_length=None, bf16=False, report_to="none", **train)
    made = SFTTrainer._prepare_dataset(self, Dataset.from_list(examples), tokenizer, args, False, None, "train")
    assert [row["input_ids"].tolist() for row in found] == [row["input_ids"] for row in made]
    assert [row["labels"].tolist() for row in found] == [row["labels"] for row in made]


def test_of_a_text_every_token_is_trained_and_it_ends(run, lines, tokenizer):
    rows = [{"text": "question 1"}, {"text": "answer 2"}]
    _, found = rows_of(run, lines, rows, tokenizer, {"assistant_only_loss": True}, format="text")
    assert [row["labels"].tolist() for row in found] == [row["input_ids"].tolist() for row in found]
    assert {tokenizer.decode(row["input_ids"]) for row in found} <= {"question 1<|eot_id|>", "answer 2<|eot_id|>"}


def test_a_template_without_tools_is_refused_where_the_data_have_some(run, lines, tokenizer):
    rows = [{"messages": PAIR, "tools": [TOOL]}, {"messages": [user("b"), assistant("c")]}]
    rows_of(run, lines, rows, tokenizer, format="messages")
    bare = train_tokenizer(["question"], 300, 512)
    with pytest.raises(UserError, match="1 examples hold tools, which the chat template does not name"):
        rows_of(run, lines, rows, bare, format="messages")


# --- where the rows come from ---


def test_a_mixture_takes_each_source_by_its_weight(tmp_path, lines):
    for name, count in (("chat", 40), ("doc", 20)):
        rows = [
            {"text": f"{name} {n}"} if name == "doc" else {"messages": [user(f"{name} {n}"), assistant("a")]}
            for n in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_bytes(lines([*rows, {"other": 1}]))
    sources = [
        {"name": "chat", "input": "chat.jsonl", "format": "messages", "weight": 0.5},
        {"name": "doc", "input": "doc.jsonl", "format": "text", "weight": 2.5},
    ]
    data = Data(name="mix", sources=sources, eval_fraction=0.25)
    made = prepare(data, recipe_folder=tmp_path, seed=3, out=tmp_path / "out")
    again = prepare(data, recipe_folder=tmp_path, seed=3, out=tmp_path / "out")
    assert (made["reused"], again["reused"]) == (False, True)
    counted = [(part["name"], part["conversations"], part["rows"]) for part in made["sources"]]
    assert counted == [("chat", 40, 41), ("doc", 20, 21)]
    split = {name: [json.loads(line) for line in (tmp_path / "out" / f"{name}.jsonl").open()] for name in ("train", "eval")}
    counts = {name: Counter(json.dumps(line) for line in found) for name, found in split.items()}
    assert not counts["train"].keys() & counts["eval"].keys()
    assert set(counts["eval"].values()) == {1}
    by_source = {
        name: [n for line, n in counts["train"].items() if json.loads(line)["source"]["data"] == name]
        for name in ("chat", "doc")
    }
    held_out = Counter(line["source"]["data"] for line in split["eval"])
    assert set(by_source["chat"]) == {1} and abs(len(by_source["chat"]) + held_out["chat"] - 20) <= 1
    assert set(by_source["doc"]) == {2, 3} and abs(sum(by_source["doc"]) / len(by_source["doc"]) - 2.5) < 0.05
    other = data.model_copy(update={"sources": [data.sources[0], data.sources[1].model_copy(update={"weight": 1.0})]})
    assert prepare(other, recipe_folder=tmp_path, seed=3, out=tmp_path / "out")["reused"] is False


def test_data_split_and_config_choose_files(run, lines, tmp_path):
    folder = tmp_path / "set"
    for name in ("en/train_sft-00000.jsonl", "en/train_gen-00000.jsonl", "en/test_sft-00000.jsonl", "de/train_sft.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(lines([{"messages": [user(f"{name} {n}"), assistant("a")]} for n in range(3)]))

    def names(**chosen):
        got = run(path=folder, format="messages", language=None, **chosen)
        return {split: {one["source"]["file"] for one in got.lines(split)} for split in ("train", "eval")}

    both = {"train": "train_sft", "eval": "test_sft"}
    assert names(config="en", split=both) == {"train": {"train_sft-00000.jsonl"}, "eval": {"test_sft-00000.jsonl"}}
    assert names(config="de", split="train_sft") == {"train": {"train_sft.jsonl"}, "eval": {"train_sft.jsonl"}}
    with pytest.raises(UserError, match=r"no file of the split dev; there are .*train_gen"):
        names(config="en", split="dev")
    with pytest.raises(UserError, match=r"data\.config: no such folder"):
        names(config="fr")


def test_rows_behind_an_address_are_read_and_counted(tmp_path, lines):
    """A web server stands for an object store: fsspec reads both."""
    body = gzip.compress(lines([*({"messages": [user(f"q{n}"), assistant("a")]} for n in range(8)), {"messages": []}]))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found = self.path == "/rows.jsonl.gz"
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(body) if found else 0))
            self.send_header("ETag", '"one"')
            self.end_headers()
            self.wfile.write(body if found and self.command == "GET" else b"")

        do_HEAD = do_GET

        def log_message(self, *_args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = f"http://127.0.0.1:{server.server_port}"
        data = Data(name="x", format="messages", input=f"{at}/rows.jsonl.gz")
        made = prepare(data, recipe_folder=tmp_path, seed=1, out=tmp_path / "out")
        assert made["train"]["conversations"] + made["eval"]["conversations"] == 8
        assert json.loads((tmp_path / "out" / "rejected.jsonl").read_text())["line"] == 9
        for address, words in ((f"{at}/gone.jsonl", r"data\.input: cannot be read"), ("s3://bucket/rows.jsonl", "s3fs")):
            with pytest.raises(UserError, match=words):
                other = data.model_copy(update={"input": address})
                prepare(other, recipe_folder=tmp_path, seed=1, out=tmp_path / "other")
        server.shutdown()


def test_a_folder_of_an_object_store_is_one_of_files(tmp_path, lines):
    import fsspec

    store = fsspec.filesystem("memory")
    for name in ("train-0.jsonl", "test-0.jsonl"):
        store.pipe(f"/set/{name}", lines([{"text": f"{name} {n}"} for n in range(3)]))
    data = Data(name="x", format="text", input="memory://set")
    made = [prepare(data, recipe_folder=tmp_path, seed=1, out=tmp_path / "out") for _ in range(2)]
    assert (made[0]["train"]["conversations"], made[0]["eval"]["conversations"]) == (3, 3)
    assert [one["reused"] for one in made] == [False, True]
    store.pipe("/set/train-0.jsonl", lines([{"text": "other"}]))
    assert prepare(data, recipe_folder=tmp_path, seed=1, out=tmp_path / "out")["train"]["conversations"] == 1


@pytest.mark.parametrize(
    "address", ["s3://key:secret@bucket/a.jsonl", "https://x/a.jsonl?sig=abc", "file:///etc/a.jsonl", "zip://a::s3://b"]
)
def test_an_address_with_credentials_or_to_this_machine_is_refused(address):
    with pytest.raises(ValueError, match=r"credentials|no address|not an address"):
        Data(name="x", format="text", input=address)


@pytest.fixture
def trees(row):
    def make(first, count):
        found = []
        for number in range(first, first + count):
            tree = {"message_tree_id": f"t{number}"}
            found += [row(f"p{number}", None, **tree), row(f"a{number}", f"p{number}", rank=0, **tree)]
        return found

    return make


def write_parquet(path: Path, found: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([r | {"labels": {"name": ["x"]}} for r in found]), path)
    return path


def test_line_numbers_in_an_array_are_those_of_the_file(run, trees):
    found = trees(0, 1)
    array = f'[\n{json.dumps(found[0])},\n\n{{\n"message_id": 7}},\n{json.dumps(found[1])}, 5]\n'.encode()
    rejected = [(entry["line"], entry["reason"]) for entry in run(array, ".json").lines("rejected")]
    assert rejected == [(4, "wrong-column"), (6, "wrong-column")]


def test_an_array_that_is_cut_off_keeps_what_is_whole(run, trees):
    array = json.dumps(trees(0, 3), indent=1).encode()
    got = run(array[: array.rindex(b'"text"') + 12], ".json")
    assert len(got.conversations) == 2
    assert got.rejected == {"truncated-json": 1, "no-assistant-reply": 1}
    got = run(array.rstrip(b"] \n"), ".json")
    assert got.rejected["truncated-json"] == 1


def test_a_record_that_is_not_utf8_is_left_out_of_an_array(run, trees):
    found = trees(0, 2)
    found[3]["note"] = "caf\u00e9"  # even in a column that nobody reads, as in JSON lines
    array = json.dumps(found, indent=0, ensure_ascii=False).encode().replace("é".encode(), b"\xe9")
    got = run(array, ".json")
    assert list(got.texts) == ["t0"]
    assert got.rejected == {"not-utf8": 1, "no-assistant-reply": 1}


@pytest.mark.parametrize("array", [b'[{"a": 1},\n {"b" 2}]', b'[{"a": 1}\n{"b": 2}]', b'[\n{"a": 1},]', b'[{"a": 1}\n] x'])
def test_an_array_broken_in_the_middle_is_refused_with_its_line(run, array):
    with pytest.raises(UserError, match=r"rows\.json:[12]: not JSON: .*column"):
        run(array, ".json")


def test_parquet_rows_that_are_not_utf8_are_left_out(run, trees, tmp_path):
    found = trees(0, 300)
    table = pa.Table.from_pylist(found)
    texts = pa.array([b"\xff" if r["message_id"] == "a7" else r["text"].encode() for r in found]).view(pa.string())
    path = tmp_path / "rows.parquet"
    pq.write_table(table.set_column(table.schema.get_field_index("text"), "text", texts), path)
    got = run(path=path)
    assert len(got.conversations) == 299
    assert got.lines("rejected")[0] | {"detail": ""} == {"file": "rows.parquet", "line": 16, "reason": "not-utf8", "detail": ""}


NAMED = {
    "train": "train.jsonl train-00000-of-00002.parquet train_sft oasst2.train.json TRAIN.jsonl trainset.json training_1.jsonl",
    "eval": "validation.jsonl valid.json eval-1.jsonl.gz evaluation.json dev.jsonl test_en.parquet val.json testset.jsonl",
    None: "conversations.jsonl latest.jsonl trainers.jsonl developers.json train_test.json data.parquet",
}


def test_splits_by_name():
    assert {name: split_of(name) for names in NAMED.values() for name in names.split()} == {
        name: split for split, names in NAMED.items() for name in names.split()
    }


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


FOLDERS = {  # by file: the first tree and their number, or a content; then the trees of each split, and words of a warning
    "own splits": (
        {"train.jsonl": (0, 5), "validation.jsonl": (5, 2), "test.jsonl": (7, 1), "notes.json": b"[]", "README.md": b""},
        (5, 3), "notes.json",
    ),
    "a snapshot of the Hub": (
        {
            "data/train-00000-of-00002.parquet": (0, 5), "data/train-00001-of-00002.parquet": (5, 1),
            "data/validation-00000-of-00001.parquet": (6, 2), "all.trees.jsonl.gz": b"not read", "dataset_infos.json": b"{}",
        },
        (6, 2), None,
    ),
    "one pool": ({"a.jsonl": (0, 4), "b.jsonl": (4, 2), ".hidden.jsonl": b"x"}, (4, 2), None),
}  # fmt: skip


@pytest.mark.parametrize("what", FOLDERS)
def test_a_folder_keeps_its_own_splits(run, trees, lines, tmp_path, what):
    """Files that are named after a split, or in a folder of data; else they are one pool."""
    files, counts, warned = FOLDERS[what]
    for name, given in files.items():
        if name.endswith(".parquet"):
            write_parquet(tmp_path / "set" / name, trees(*given))
        else:
            fill(tmp_path / "set", {name: given if isinstance(given, bytes) else lines(trees(*given))})
    got = run(path=tmp_path / "set", eval_fraction=0.34)
    assert (got.result["train"]["conversations"], got.result["eval"]["conversations"]) == counts
    assert got.rejected == {} and (warned is None or any(warned in warning for warning in got.result["warnings"]))
    if what != "one pool":
        assert {line["source"]["tree"] for line in got.lines("eval")} == {f"t{n}" for n in range(counts[0], sum(counts))}


def test_an_eval_split_without_answers_is_replaced(run, tmp_path, lines):
    """LIMA's own test split holds questions only."""
    train = lines({"conversations": [f"q{i}", "a"]} for i in range(20))
    folder = fill(tmp_path / "set", {"train.jsonl": train, "test.jsonl": lines([{"conversations": ["q"]}])})
    got = run(path=folder, format="lima", language=None)
    assert (got.result["train"]["conversations"], got.result["eval"]["conversations"]) == (19, 1)
    assert any("own eval split gives no conversation" in warning for warning in got.result["warnings"])


def test_a_tree_never_stands_in_both_splits(run, trees, row, lines, tmp_path):
    again = [row("p_", None, message_tree_id="t0"), row("a_", "p_", message_tree_id="t0")]
    folder = fill(tmp_path / "set", {"train.jsonl": lines(trees(0, 2)), "eval.jsonl": lines(again + trees(2, 1))})
    got = run(path=folder)
    assert [line["source"]["tree"] for line in got.lines("eval")] == ["t2"]
    assert got.rejected == {"two-splits": 2}
    assert {entry["file"] for entry in got.lines("rejected")} == {"eval.jsonl"}


def test_what_cannot_be_an_input_is_refused(run, trees, lines, tmp_path):
    (tmp_path / "rows.docx").write_text("a,b")
    (tmp_path / "empty").mkdir()
    fill(tmp_path / "set", {"test.jsonl": lines(trees(0, 2))})
    for name, words in (
        ("rows.docx", "known kind; there is rows.docx"),
        ("empty", "no file of a known kind"),
        ("gone", r"--input: no such file or folder \(looked for .*gone"),
        ("set", "no train split"),
    ):
        with pytest.raises(UserError, match=words):
            run(path=tmp_path / name)


def test_data_input_is_sought_beside_the_recipe_then_here(trees, lines, tmp_path, monkeypatch):
    recipe = fill(tmp_path / "recipe", {"c.jsonl": lines(trees(0, 2))})
    working = fill(tmp_path / "here", {"c.jsonl": lines(trees(2, 2))})
    monkeypatch.chdir(working)

    def get(name: str) -> set[str]:
        out = tmp_path / name
        prepare(Data(name="x", format="oasst-tree", input="c.jsonl"), recipe_folder=recipe, seed=1, out=out)
        lines_ = (out / "train.jsonl").read_text().splitlines() + (out / "eval.jsonl").read_text().splitlines()
        return {json.loads(line)["source"]["tree"] for line in lines_}

    assert get("one") == {"t0", "t1"}
    (recipe / "c.jsonl").unlink()
    assert get("two") == {"t2", "t3"}
    (working / "c.jsonl").unlink()
    with pytest.raises(UserError) as caught:
        get("three")
    assert str(recipe / "c.jsonl") in str(caught.value)
    assert str(working / "c.jsonl") in str(caught.value)


def test_an_unreadable_file_is_no_traceback(run, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text("x")

    monkeypatch.setattr(rows_module, "_lines", failing(OSError(5, "Input/output error")))
    with pytest.raises(UserError, match=r"rows\.jsonl: cannot be read: Input/output error"):
        run(path=path)


def test_a_full_disk_while_rejecting_is_a_storage_error(run, row, monkeypatch):
    monkeypatch.setattr(Rejects, "add", failing(OSError(28, "No space left on device")))
    with refused("writing the dataset: No space left", ExitCode.STORAGE):
        run([b"{", row("p1", None), row("a1", "p1")])


# --- the Hub


@pytest.fixture
def hub(monkeypatch):
    import datasets

    calls: list[tuple[str, str | None]] = []
    content: dict[str, list[dict]] = {}

    def load_dataset(name, revision=None):
        calls.append((name, revision))
        return datasets.DatasetDict({split: datasets.Dataset.from_list(found) for split, found in content.items()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls, content


def from_hub(tmp_path: Path, out: str = "out", **data) -> dict:
    settings = Data(**{"name": "org/set", "format": "oasst-tree", "language": "en", "revision": "a" * 40} | data)
    return prepare(settings, recipe_folder=tmp_path, seed=42, out=tmp_path / out)


def test_the_hub_gives_what_the_same_files_give(hub, run, trees, lines, tmp_path):
    calls, content = hub
    content |= {"train": [*trees(0, 8), trees(0, 1)[0]], "validation": trees(8, 2)}
    got = from_hub(tmp_path)
    folder = fill(tmp_path / "set", {"train.jsonl": lines(content["train"]), "validation.jsonl": lines(content["validation"])})
    local = run(path=folder)
    assert calls == [("org/set", "a" * 40)]
    assert all(got[key] == local.result[key] for key in ("train", "eval", "rejected"))
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (local.out / name).read_bytes()
    rejected = json.loads((tmp_path / "out" / "rejected.jsonl").read_text())
    assert (rejected["file"], rejected["line"], rejected["reason"]) == ("org/set/train", 17, "duplicate-id")


def test_a_pinned_dataset_is_reused_without_asking_the_hub(hub, trees, tmp_path):
    """Splits of no known name are left aside."""
    calls, content = hub
    content |= {"train": trees(0, 4), "ideas": trees(4, 4)}
    first, again = from_hub(tmp_path), from_hub(tmp_path)
    assert [first["reused"], again["reused"]] == [False, True] and len(calls) == 1
    assert first["train"]["conversations"] + first["eval"]["conversations"] == 4
    assert any("ideas" in warning for warning in first["warnings"])
    assert from_hub(tmp_path, revision="b" * 40)["reused"] is False


@pytest.mark.parametrize("error", [ConnectionError("Couldn't reach 'org/set' on the Hub"), RuntimeError("")])
def test_an_unreachable_hub_says_what_to_do(monkeypatch, tmp_path, error):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", failing(error))
    with pytest.raises(UserError, match=r"is not available from the Hub: .+ -> .*data\.input=PATH"):
        from_hub(tmp_path)


def test_the_input_folder_is_never_the_output_folder(trees, lines, tmp_path):
    folder = fill(tmp_path / "set", {"train.jsonl": lines(trees(0, 4))})
    for given in (folder, folder / "train.jsonl"):
        with pytest.raises(UserError, match="folder of the input"):
            prepare(Data(name="x", format="oasst-tree"), recipe_folder=folder, seed=1, out=folder, input_path=given)
    assert (folder / "train.jsonl").read_bytes() == lines(trees(0, 4))


def test_a_file_name_that_is_not_utf8_can_be_written(run, lines, tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl"))
    path.write_bytes(lines([{"conversations": ["a", "b"]}]))
    assert run(path=path, format="lima", language=None).conversations[0]["source"]["file"] == "caf\ufffd.jsonl"
