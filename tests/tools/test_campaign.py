"""The campaign judges rightly: what it mutates is accepted unmutated, and its oracles see what is wrong."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from clustertune import manifest
from clustertune.cli.app import app
from tests.command import REPO
from tools import campaign, spoil


@pytest.mark.parametrize(("source", "file"), sorted({config for config in spoil.CONFIGS if config[0] != "clusters"}))
def test_what_is_mutated_is_taken_as_it_is(source: str, file: str, tmp_path: Path) -> None:
    path = campaign.recipe_copy(source, file, tmp_path)
    done = CliRunner().invoke(app, ["show", str(path.parent), *spoil.bring_in(file), "--json"])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert spoil.differences(path, shown, file) == []
    body = yaml.safe_load(path.read_text())
    path.write_text(json.dumps(body | {"a_key_of_nobody": 3}))
    assert spoil.differences(path, shown, file)


def test_what_counts_as_the_same() -> None:
    same = [(2, 2.0), ("0.002", 0.002), ("no", False), ("x", ["x"])]
    assert all(spoil.alike(*pair) for pair in same)
    assert not any(spoil.alike(*pair) for pair in [(True, "1"), (3, 2), ([1], [2])])


def test_damage_is_damage(tmp_path: Path) -> None:
    """Every change that is reported as one is seen by the manifest."""
    whole = tmp_path / "whole"
    whole.mkdir()
    for name in ("a", "b"):
        (whole / name).write_bytes(name.encode() * 5000)
    manifest.seal(whole, "dataset", {})
    for seed in range(30):
        chance, copied = random.Random(seed), tmp_path / str(seed)
        shutil.copytree(whole, copied)
        changed = spoil.damage(copied / "a", chance, [whole / "b"])
        assert bool(manifest.find_problems(copied)) is (changed is not None)


def test_seeds_repeat_and_results_are_kept_by_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spoil.hostile_name(random.Random(5), REPO) == spoil.hostile_name(random.Random(5), REPO)
    monkeypatch.setattr(campaign, "RESULTS", tmp_path / "results.jsonl")
    rows = [{"tree": "a", "fault": "kills", "seed": 0, "count": 4}, {"tree": "b", "fault": "kills", "seed": 0, "failed": "x"}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "| 4 of 4 | none |" in campaign.page("a") and "| 0 of 1 | seed 0 |" in campaign.page("b")


def test_another_comment_is_the_same_product_and_another_value_is_not() -> None:
    before = 'A = 1\n"""Of A."""\n\ndef f():\n    """One."""\n    return A  # here\n'
    after = 'A = 1\n\n\ndef f():\n    """Two lines,\n    now."""\n    return A\n'
    assert campaign.code_of(before) == campaign.code_of(after) != campaign.code_of(after.replace("= 1", "= 2"))
