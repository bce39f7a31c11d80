"""Tokens on disk: the same bytes however they are cut; kept over a kill; recreated for every cause and no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import copyfile, rmtree
from typing import Any

import pytest

from clustertune.data import sequences, tokens
from clustertune.data.local_model import train_tokenizer
from clustertune.data.prepare import prepare
from clustertune.errors import ExitCode, UserError
from clustertune.manifest import MANIFEST, find_problems, read_manifest
from clustertune.recipe.native_rules import train_defaults
from clustertune.recipe.sections import Data
from tests.damage import flip

CHUNK = 2000
SETTINGS = train_defaults() | {"assistant_only_loss": True, "packing": True, "max_length": 64}


def chat(number: int) -> list[dict[str, str]]:
    answer = f"answer {number} " + "with some words " * (number % 7)
    return [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": answer}]


def fill(folder: Path, count: int = 120) -> Path:
    """A prepared data set."""
    rows = folder / "rows.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    rows.write_text("".join(json.dumps({"messages": chat(number)}) + "\n" for number in range(count)))
    data = Data(name="made", format="messages", eval_fraction=0.2)
    prepare(data, recipe_folder=folder, seed=1, out=folder / "data", input_path=rows)
    return folder / "data"


def learnt() -> Any:
    return train_tokenizer((message["content"] for number in range(120) for message in chat(number)), 400, 512)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return learnt()


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return fill(tmp_path)


def content(dataset: Path) -> dict[str, bytes]:
    """What is on disk, without the rates of this making."""
    found = {path.name: path.read_bytes() for path in (dataset / "tokens").iterdir() if path.name != MANIFEST}
    return found | {"files": json.dumps(sorted(read_manifest(dataset / "tokens", tokens.KIND).files)).encode()}


def test_tokens_and_labels_are_the_templates(dataset: Path, tokenizer: Any) -> None:
    """Conversation by conversation, in the order of the file, and what is said about them is counted."""
    made = tokens.make(dataset, tokenizer, {**SETTINGS, "packing": False, "max_length": None}, chunk=CHUNK)
    total = labelled = 0
    for split in ("train", "eval"):
        rows = sequences.Sequences(dataset / "tokens", split)
        lines = (dataset / f"{split}.jsonl").read_text().splitlines()
        assert len(rows) == len(lines) == made["splits"][split]["conversations"]
        for number, line in enumerate(lines):
            expected = tokenizer.apply_chat_template(
                json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
            )
            row = rows[number]
            assert row["input_ids"].tolist() == expected["input_ids"]
            assert (row["labels"] != -100).tolist() == [bool(bit) for bit in expected["assistant_masks"]]
            total, labelled = total + len(expected["input_ids"]), labelled + sum(expected["assistant_masks"])
    assert (made["tokens"], made["sequences"]) == (total, 120)
    assert made["labelled_share"] == pytest.approx(labelled / total, abs=1e-6) and made["tokens_per_s"] > 0
    assert find_problems(dataset / "tokens", tokens.KIND) == []


def test_the_bytes_do_not_depend_on_processes_and_cuts(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = {"one": (CHUNK, {0}), "two": (CHUNK, {0, 1}), "whole": (1 << 20, {0}), "small": (150, {0})}
    found = {}
    for name, (chunk, cores) in cuts.items():
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, cores=cores: cores)
        dataset = fill(tmp_path / name)
        made = tokens.make(dataset, tokenizer, SETTINGS, chunk=chunk)
        assert made["processes"] == (2 if name == "two" else 1)
        found[name] = content(dataset)
    assert all(one == found["one"] for one in found.values())


@pytest.mark.parametrize("change", [{"max_length": 32}, {"packing": False}])
def test_other_rows_are_another_index_of_the_same_tokens(change: dict[str, Any], dataset: Path, tokenizer: Any) -> None:
    """Nothing is tokenised for them."""
    tokens.make(dataset, tokenizer, SETTINGS)
    before = {path.name: path.stat().st_mtime_ns for path in (dataset / "tokens").glob("*.u32")}
    assert tokens.make(dataset, tokenizer, SETTINGS | change)["reused"] is False
    assert {path.name: path.stat().st_mtime_ns for path in (dataset / "tokens").glob("*.u32")} == before
    assert find_problems(dataset / "tokens", tokens.KIND) == [], "the rows before are gone"


OTHER = train_tokenizer(["other words"] * 9, 300, 512)
CAUSES: dict[str, tuple[str, Any]] = {
    "data": ("data", lambda dataset, tokenizer, patch: fill(dataset.parent, 121)),
    "tokenizer": ("tokenizer", lambda dataset, tokenizer, patch: OTHER),
    "template": (
        "template",
        lambda dataset, tokenizer, patch: setattr(tokenizer, "chat_template", tokenizer.chat_template + "x"),
    ),
    "labels": ("assistant_only_loss", lambda dataset, tokenizer, patch: {**SETTINGS, "assistant_only_loss": False}),
    "a special token": ("tokenizer", lambda dataset, tokenizer, patch: setattr(tokenizer, "bos_token", "<|end_of_text|>")),
    "the code": ("format", lambda dataset, tokenizer, patch: patch.setattr(tokens, "FORMAT", tokens.FORMAT + 1)),
    "a package": ("versions", lambda dataset, tokenizer, patch: patch.setattr(tokens, "version", lambda name: "9.9")),
}


@pytest.mark.parametrize("what", CAUSES)
def test_each_cause_makes_them_anew_and_stops_a_rank_before(what: str, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = learnt()
    tokens.make(dataset, tokenizer, SETTINGS)
    sequences.load(dataset / "tokens", dataset, tokenizer, SETTINGS)
    cause, change = CAUSES[what]
    made = change(dataset, tokenizer, monkeypatch)
    tokenizer, settings = OTHER if made is OTHER else tokenizer, made if isinstance(made, dict) else SETTINGS
    with pytest.raises(UserError, match=f"another {cause} than"):
        sequences.load(dataset / "tokens", dataset, tokenizer, settings)
    old = read_manifest(dataset / "tokens").meta["made_from"]["tokens"]
    assert tokens.make(dataset, tokenizer, settings)["reused"] is False
    assert read_manifest(dataset / "tokens").meta["made_from"]["tokens"] != old
    sequences.load(dataset / "tokens", dataset, tokenizer, settings)


def test_a_rank_stops_where_rows_are_others_or_missing(dataset: Path, tokenizer: Any) -> None:
    tokens.make(dataset, tokenizer, SETTINGS)
    with pytest.raises(UserError, match="another max_length than"):
        sequences.load(dataset / "tokens", dataset, tokenizer, {**SETTINGS, "max_length": 32})
    (dataset / "tokens" / "train-00000.u32").write_bytes(b"")
    with pytest.raises(UserError, match="0 bytes"):
        sequences.load(dataset / "tokens", dataset, tokenizer, SETTINGS)
    tokens.make(dataset, tokenizer, SETTINGS)
    (dataset / "tokens" / MANIFEST).unlink()
    with pytest.raises(UserError, match="no tokens to train on"):
        sequences.load(dataset / "tokens", dataset, tokenizer, SETTINGS)


@pytest.mark.timeout(120)
def test_a_pipe_in_the_place_of_any_file_is_replaced(dataset: Path, tokenizer: Any) -> None:
    """Neither its reader nor its writer is waited for; the files are made anew, with the same bytes."""
    tokens.make(dataset, tokenizer, SETTINGS)
    made = content(dataset)
    for name in made.keys() - {"files"}:
        (dataset / "tokens" / name).unlink()
        os.mkfifo(dataset / "tokens" / name)
        tokens.make(dataset, tokenizer, SETTINGS)
        assert content(dataset) == made


@pytest.mark.parametrize("damage", ["", "cut", "flipped"])
def test_a_stopped_prepare_goes_on_behind_its_whole_shards(
    damage: str, dataset: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are there stay untouched, a cut or damaged one is recreated, and the end is the same bytes."""
    tokens.make(fill(tmp_path / "other"), tokenizer, SETTINGS, chunk=CHUNK)
    made: list[str] = []
    real = tokens.BoundedShards.make

    def fails(shards: Any, job: Any) -> float:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(job[3].name)
        return real(shards, job)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    monkeypatch.setattr(tokens.BoundedShards, "make", fails)
    with pytest.raises(KeyboardInterrupt):
        tokens.make(dataset, tokenizer, SETTINGS, chunk=CHUNK)
    assert find_problems(dataset / "tokens", tokens.KIND), "nothing there counts as whole"
    shards = sorted((dataset / "tokens").glob(".shards-*/*.bin"))
    assert [path.name for path in shards] == made
    if damage == "flipped":
        flip(shards[1], 50)
    if damage == "cut":
        os.truncate(shards[1], shards[1].stat().st_size - 8)
    before = {path: path.stat().st_mtime_ns for path in shards}
    again: list[str] = []
    monkeypatch.setattr(tokens.BoundedShards, "make", lambda shards, job: again.append(job[3].name) or real(shards, job))
    monkeypatch.setattr(tokens.shutil, "rmtree", lambda path: None)
    tokens.make(dataset, tokenizer, SETTINGS, chunk=CHUNK)
    untouched = [path for path in shards if path.name not in again]
    assert len(untouched) == (2 if damage else 3) and all(path.stat().st_mtime_ns == before[path] for path in untouched)
    for path in (dataset / "tokens").glob(".shards-*"):
        rmtree(path)
    assert content(dataset) == content(tmp_path / "other" / "data")


KILLED = """
import json, sys
from pathlib import Path
from clustertune.data import tokens
from clustertune.data.tokenizer import load_tokenizer
asked = json.loads(sys.argv[3])
tokens.make(Path(sys.argv[1]), load_tokenizer(sys.argv[2], None, None, asked), asked, chunk=int(sys.argv[4]))
"""


@pytest.mark.jobs
def test_a_killed_prepare_keeps_its_shards_and_leaves_no_process(tokenizer: Any, tmp_path: Path) -> None:
    """SIGKILL of the command alone, with two processes at work: these end too."""
    dataset = fill(tmp_path, 6000)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = [sys.executable, "-c", KILLED, str(dataset), str(tmp_path / "tokenizer"), json.dumps(SETTINGS), "20000"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    while len(shards := list(dataset.glob("tokens/.shards-*/*.bin"))) < 3 and child.poll() is None:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert shards and child.returncode == -signal.SIGKILL, "it was killed at work"
    while _group(child.pid):
        time.sleep(0.05)
    there = {path: path.stat().st_mtime_ns for path in dataset.glob("tokens/.shards-*/*.bin")}
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert f"{len(there)} of " in done.stderr, "the whole ones were not recreated"
    other = fill(tmp_path / "other", 6000)
    tokens.make(other, tokenizer, SETTINGS)
    assert content(dataset) == content(other)


def _group(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == leader and state != "Z":
                found.append(int(entry.name))
    return found


def test_what_cannot_be_trained_on_is_named_by_file_and_line(dataset: Path, tokenizer: Any) -> None:
    lines = (dataset / "train.jsonl").read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(lines) if '"question 71"' in text)
    own = tokenizer.chat_template
    try:
        refuses = "{%- if messages[0].content == 'question 71' %}{{ raise_exception('no such word') }}{%- endif %}"
        tokenizer.chat_template = refuses + own
        with pytest.raises(UserError, match="no such word") as caught:
            tokens.make(dataset, tokenizer, SETTINGS, chunk=CHUNK)
        assert caught.value.problems[0].file == f"{dataset / 'train.jsonl'}:{line}" and caught.value.code is ExitCode.CONFIG
        marks = "{%- if messages[0].content == 'question 71' %}{{ 'nothing marked' }}{%- else %}"
        tokenizer.chat_template = marks + own + "{%- endif %}"
        with pytest.raises(UserError, match="no token carries a label") as caught:
            tokens.make(dataset, tokenizer, SETTINGS, chunk=CHUNK)
        assert caught.value.problems[0].file == f"{dataset / 'train.jsonl'}:{line}"
    finally:
        tokenizer.chat_template = own


def test_points_of_a_sweep_tokenise_once(tmp_path: Path, tokenizer: Any) -> None:
    """One set of tokens by its key, linked; rows are each one's own; damage there is no one's tokens."""
    shared = tmp_path / "tokens"
    first, second, other = (fill(tmp_path / name) for name in ("first", "second", "other"))
    made = tokens.make(first, tokenizer, SETTINGS, shared=shared)
    tokens.make(alone := fill(tmp_path / "alone"), tokenizer, SETTINGS)
    assert content(first) == content(alone)
    again = tokens.make(second, tokenizer, {**SETTINGS, "max_length": 32}, shared=shared)
    assert again["tokens"] == made["tokens"] and again["sequences"] > made["sequences"] and not again["reused"]
    name = "train-00000.u32"
    assert (first / "tokens" / name).samefile(second / "tokens" / name) and len(list(shared.iterdir())) == 1
    [home] = shared.iterdir()
    Path(copyfile(home / name, tmp_path / "apart")).replace(home / name)  # no longer linked
    flip(home / name, 0)
    tokens.make(other, tokenizer, SETTINGS, shared=shared)
    assert content(other) == content(first)
    tokens.make(other, tokenizer, {**SETTINGS, "assistant_only_loss": False}, shared=shared)
    assert len(list(shared.iterdir())) == 2
    for folder in (first, second, other):
        assert not find_problems(folder / "tokens", tokens.KIND)
