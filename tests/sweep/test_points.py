"""The sweep folder: numbered points that are found again, and never mixed with those of another sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clustertune.errors import UserError
from clustertune.resolve.resolve import resolve
from clustertune.sweep import SWEEP, Sweep, make_sweep, point, read_sweep

WORDS = ["train.learning_rate=1e-3,5e-3", "lora.target_modules=[q_proj,k_proj],all-linear", "train.max_steps=8"]


def make(path: Path | None = None, words: list[str] = WORDS, runs: Path = Path("runs"), last: str = "train") -> Sweep:
    return make_sweep("tiny-oasst2", words, tiny=False, last=last, path=path, runs=runs)[0]


def test_the_same_command_finds_the_same_sweep(tmp_path: Path) -> None:
    """And another one never does: values, order and --tiny decide."""
    first = make(runs=tmp_path)
    assert first.path.parent == tmp_path / "tiny-oasst2" and make(runs=tmp_path).path == first.path
    assert make(runs=tmp_path, words=[*WORDS[:2], "train.max_steps=9"]).path != first.path
    assert make_sweep("tiny-oasst2", WORDS, tiny=True, last="train", runs=tmp_path)[0].path != first.path
    assert not list(tmp_path.iterdir()), "nothing is made before it is written"


def test_a_task_of_the_array_finds_its_point(tmp_path: Path) -> None:
    """What the job resolves is what was resolved when the sweep was made, whatever the folder it starts in."""
    sweep = make(tmp_path / "s")
    sweep.write()
    assert read_sweep(tmp_path / "s").points == sweep.points
    body = json.loads((tmp_path / "s" / SWEEP).read_bytes())  # plain: people and programs read it
    assert body["keys"] == ["train.learning_rate", "lora.target_modules"] and len(body["points"]) == 4
    assert [p.index for p in sweep.points] == [0, 1, 2, 3]
    last = point(tmp_path / "s", 3)
    assert last.run_dir == tmp_path / "s" / "points" / "0003" and Path(last.recipe).is_absolute()
    assert last.values == {"train.learning_rate": "0.005", "lora.target_modules": "all-linear"}
    resolved = resolve(last.recipe, last.overrides, tiny=last.tiny)
    assert resolved.lora is not None and resolved.lora["target_modules"] == "all-linear"
    assert resolved.train_args["learning_rate"] == 5e-3 and resolved.train_args["max_steps"] == 8
    for wrong in (-1, 4):
        with pytest.raises(UserError, match="has no point"):
            point(tmp_path / "s", wrong)


def test_a_folder_holds_one_sweep(tmp_path: Path) -> None:
    """A second sweep would take the run folders of the first for its own points."""
    make(tmp_path / "s").write()
    make(tmp_path / "s").write()
    with pytest.raises(UserError, match="holds another sweep"):
        make(tmp_path / "s", ["lora.r=8,16"]).write()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds something else than a sweep"):
        make(tmp_path / "other").write()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"points": [{}]}', '{"points": 3}'])
def test_a_damaged_folder_is_refused_in_words(text: str, tmp_path: Path) -> None:
    """No traceback for a file that someone has edited."""
    with pytest.raises(UserError, match="is not a sweep"):
        read_sweep(tmp_path)
    (tmp_path / SWEEP).write_text(text)
    with pytest.raises(UserError, match="unreadable"):
        read_sweep(tmp_path)
