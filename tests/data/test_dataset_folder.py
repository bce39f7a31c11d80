"""The dataset on disk: reused when nothing changed, replaced safely when something did, whole or absent after a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clustertune.data import prepare as module
from clustertune.data.prepare import choose_eval, prepare
from clustertune.errors import ExitCode, UserError
from clustertune.manifest import MANIFEST, find_problems, read_manifest, seal
from clustertune.recipe.sections import Data, ExpectedSplits
from tests.damage import failing, refused
from tests.faults import sweep

SETTINGS = Data(name="x", format="lima", eval_fraction=0.25, max_rejected=1)


def conversations(count: int, answer: str = "a") -> bytes:
    return b"".join(json.dumps({"conversations": [f"q{i}", answer]}).encode() + b"\n" for i in range(count))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "input" / "rows.jsonl"
    path.parent.mkdir()
    path.write_bytes(conversations(8))
    return path


def make(source: Path, out: Path, seed: int = 1, **changes) -> dict:
    return prepare(SETTINGS.model_copy(update=changes), recipe_folder=source.parent, seed=seed, out=out, input_path=source)


def content(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in module.FILES}


def test_the_result_has_the_announced_form(source, tmp_path):
    out = tmp_path / "deep" / "out"
    assert make(source, out) == {
        "dir": str(out),
        "train": {"conversations": 6, "messages": 12},
        "eval": {"conversations": 2, "messages": 4},
        "rejected": {},
        "unused": [],
        "reused": False,
        "warnings": [],
    }
    assert find_problems(out, "dataset") == []
    assert sorted(p.name for p in out.iterdir()) == sorted([*module.FILES, MANIFEST])
    manifest = read_manifest(out, "dataset")
    assert manifest.meta["inputs"][0][0] == "rows.jsonl"


def test_reused_when_nothing_changed_and_nothing_is_written(source, tmp_path):
    out = tmp_path / "out"
    first = make(source, out)
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in out.iterdir()}
    assert make(source, out) == first | {"reused": True}
    assert {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in out.iterdir()} == before


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"eval_fraction": 0.5}, {"bad_rows": "stop"}, {"format": "messages"}, {"language": "de"}]
)
def test_made_anew_when_a_setting_changed(source, tmp_path, change):
    source.write_bytes(
        source.read_bytes() + b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    out = tmp_path / "out"
    make(source, out)
    if change.get("bad_rows"):
        with pytest.raises(UserError):
            make(source, out, **change)
        assert find_problems(out, "dataset") == []
        return
    assert make(source, out, **change)["reused"] is False


def test_made_anew_when_a_byte_of_the_input_the_code_or_the_dataset_changed(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    make(source, out)
    data = source.read_bytes()
    source.write_bytes(data.replace(b"q7", b"q_"))
    assert make(source, out)["reused"] is False
    monkeypatch.setattr(module, "FORMAT", -1)
    assert make(source, out)["reused"] is False
    good = content(out)
    (out / "train.jsonl").write_bytes(good["train.jsonl"].replace(b"a", b"b", 1))
    assert make(source, out)["reused"] is False
    assert content(out) == good


def test_what_the_recipe_expects_is_compared_each_time(source, tmp_path, capsys):
    out = tmp_path / "out"
    expect = ExpectedSplits(train=6, eval=99)
    for reused in (False, True):
        got = make(source, out, expect=expect)
        assert got["reused"] is reused
        assert got["warnings"] == ["eval split: 2 conversations, the recipe expects 99"]
        captured = capsys.readouterr()
        assert "eval split: 2 conversations, the recipe expects 99" in captured.err
        assert captured.out == ""


def test_a_full_disk_or_a_refused_input_leaves_the_old_dataset(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    make(source, out)
    old = content(out)
    with monkeypatch.context() as patch, refused("No space left", ExitCode.STORAGE):
        patch.setattr(module, "_write_splits", failing(OSError(28, "No space left on device")))
        make(source, out, seed=2)
    assert content(out) == old and find_problems(out, "dataset") == []
    source.write_bytes(b"nonsense\n")
    with pytest.raises(UserError):
        make(source, out)
    assert content(out) == old
    assert find_problems(out, "dataset") == []
    assert sorted(p.name for p in out.iterdir()) == sorted([*module.FILES, MANIFEST])


def test_what_is_no_dataset_is_never_touched(source, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "train.jsonl").write_text("mine")
    with pytest.raises(UserError, match=r"something else than a dataset: train\.jsonl"):
        make(source, foreign)
    assert (foreign / "train.jsonl").read_text() == "mine"
    other = tmp_path / "other"
    other.mkdir()
    (other / "weights").write_text("w")
    seal(other, "adapter", {})
    with pytest.raises(UserError, match=r"something else than a dataset: MANIFEST\.json of kind adapter"):
        make(source, other)
    assert find_problems(other, "adapter") == []
    with pytest.raises(UserError, match="is not a folder"):
        make(source, source)


# --- crashes at every change of the disk


def test_a_crash_at_any_moment_leaves_the_old_the_new_or_none(source, tmp_path):
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    make(source, fresh, seed=2)
    make(source, out, seed=1)
    known = {str(content(out)): "old", str(new := content(fresh)): "new"}
    assert len(known) == 2
    seen, number = set(), 0
    for number in sweep(lambda _: make(source, out, seed=2)):
        if find_problems(out, "dataset"):
            assert not (out / MANIFEST).exists(), number
            seen.add("none")
        else:
            seen.add(known[str(content(out))])
        assert make(source, out, seed=2)["train"]["conversations"] == 6
        assert content(out) == new
        assert [p.name for p in out.iterdir() if p.name.endswith(".new.tmp")] == []
        make(source, out, seed=1)
    assert number > 10 and seen == {"old", "none", "new"}


def test_a_crash_of_the_first_preparation_can_always_be_repeated(source, tmp_path):
    number = 0
    for number in sweep(lambda n: make(source, tmp_path / f"out{n}")):
        out = tmp_path / f"out{number}"
        if (out / MANIFEST).exists():
            assert find_problems(out, "dataset") == []
        assert make(source, out)["eval"]["conversations"] == 2
        assert find_problems(out, "dataset") == []
    assert number > 8


# --- which conversations are held out

KEYS = [f"tree-{i}" for i in range(1000)]


def test_the_share_is_rounded_and_neither_side_is_empty():
    sizes = {n: len(choose_eval(KEYS[:n], 42, 0.05)) for n in (0, 1, 2, 10, 50, 100, 1000)}
    assert sizes == {0: 0, 1: 0, 2: 1, 10: 1, 50: 2, 100: 5, 1000: 50}
    assert len(choose_eval(KEYS[:2], 42, 0.99)) == 1


def test_the_choice_depends_on_the_seed_and_not_on_the_order():
    chosen = choose_eval(KEYS, 42, 0.1)
    assert choose_eval(reversed(KEYS), 42, 0.1) == chosen
    assert len(choose_eval(KEYS, 43, 0.1) & chosen) < 40
