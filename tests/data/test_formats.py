"""What each format's rows become, from every kind of file and place; a wrong format is recognised, what is left out named."""

from __future__ import annotations

import bz2
import csv
import gzip
import http.server
import io
import json
import lzma
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clustertune.data import tokens
from clustertune.data.chats import read
from clustertune.data.local_model import train_tokenizer
from clustertune.data.prepare import prepare
from clustertune.data.rows import BadRow
from clustertune.data.sequences import Sequences
from clustertune.errors import UserError
from clustertune.recipe.native_rules import train_defaults
from clustertune.recipe.sections import Data


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


def test_copies_of_a_conversation_never_stand_in_both_splits(run):
    content = [{"conversations": [f"question {i % 10}", "answer"]} for i in range(40)]
    got = run(content, format="lima", eval_fraction=0.3)
    train, held_out = ({line["messages"][0]["content"] for line in got.lines(name)} for name in ("train", "eval"))
    assert (len(train), len(held_out), train & held_out) == (7, 3, set())
    assert any("data.language" in warning for warning in got.result["warnings"]), "it does nothing for this format"


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


def test_the_input_folder_is_never_the_output_folder(trees, lines, tmp_path):
    folder = fill(tmp_path / "set", {"train.jsonl": lines(trees(0, 4))})
    for given in (folder, folder / "train.jsonl"):
        with pytest.raises(UserError, match="folder of the input"):
            prepare(Data(name="x", format="oasst-tree"), recipe_folder=folder, seed=1, out=folder, input_path=given)
    assert (folder / "train.jsonl").read_bytes() == lines(trees(0, 4))
