"""The same rows from every kind of place: files, gzip, Parquet, folders with splits, the Hub."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clustertune.data import rows as rows_module
from clustertune.data.prepare import prepare
from clustertune.data.rows import Rejects
from clustertune.data.sources import split_of
from clustertune.errors import UserError
from clustertune.recipe.schema import Data


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


def test_every_encoding_gives_the_same_conversations(run, trees, lines, tmp_path):
    found = trees(0, 10)
    array = json.dumps(found, indent=1, ensure_ascii=False).encode()
    results = [
        run(lines(found)),
        run(gzip.compress(lines(found)), ".jsonl.gz"),
        run(array, ".json"),
        run(b"\xef\xbb\xbf\n " + array, ".JSON"),
        run(gzip.compress(array), ".json.gz"),
        run(lines(found), ".json"),
        run(path=write_parquet(tmp_path / "rows.parquet", found)),
    ]
    assert len(results[0].conversations) == 10
    found = [[one.lines(name) for name in ("train", "eval", "rejected")] for one in results]
    assert all(one == found[0] for one in found)


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


@pytest.mark.parametrize("damage", [lambda b: b[:-20], lambda b: b"<html>"])
def test_a_damaged_gzip_is_refused(run, trees, lines, damage):
    with pytest.raises(UserError, match="damaged gzip file"):
        run(damage(gzip.compress(lines(trees(0, 50)))), ".jsonl.gz")


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

    def broken(*_args):
        raise OSError(5, "Input/output error")
        yield

    monkeypatch.setattr(rows_module, "_lines", broken)
    with pytest.raises(UserError, match=r"rows\.jsonl: cannot be read: Input/output error"):
        run(path=path)


def test_a_full_disk_while_rejecting_is_a_storage_error(run, row, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Rejects, "add", full)
    with pytest.raises(UserError, match="writing the dataset: No space left") as caught:
        run([b"{", row("p1", None), row("a1", "p1")])
    assert caught.value.code == 73


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

    def refuse(*_args, **_options):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", refuse)
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
