"""A run by its folder, by latest, by its recipe or by the beginning of its id; from a folder below, too."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clustertune.errors import UserError
from clustertune.launch import cluster_paths
from clustertune.launch.cluster_paths import existing_run, merged_or_model
from tests.command import run

IDS = {"alpha": ("aaaa1111", "aaaa2222"), "beta": ("bbbb3333",)}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs, the later the newer."""
    for number, (recipe, name) in enumerate((recipe, name) for recipe, names in IDS.items() for name in names):
        folder = tmp_path / "runs" / recipe / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"schema": 2}))
        os.utime(folder / "run.json", (1000 + number, 1000 + number))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster_paths, "local_cluster", lambda: None)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "name"), [("latest", "bbbb3333"), ("alpha", "aaaa2222"), ("aaaa1", "aaaa1111"), ("runs/beta/bbbb3333", "bbbb3333")]
)
def test_a_run_is_named(place: Path, text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert existing_run(Path(text)).name == name
    if "/" not in text:
        (place / "below" / "deeper").mkdir(parents=True)
        monkeypatch.chdir(place / "below" / "deeper")
        assert existing_run(Path(text)).name == name


@pytest.mark.parametrize(
    ("text", "says"), [("aaaa", "2 runs"), ("aaa", "no such folder"), ("gamma", "alpha"), ("runs/alpha", "it holds 2")]
)
def test_what_names_none_or_several_is_refused(place: Path, text: str, says: str) -> None:
    """A beginning of fewer than four characters is none; the message names what there is."""
    with pytest.raises(UserError) as refused:
        existing_run(Path(text))
    assert place and says in str(refused.value) + str(refused.value.problems[0].fix)


def test_a_folder_of_that_name_comes_first(place: Path) -> None:
    (place / "alpha").mkdir()
    assert existing_run(Path("alpha"), "a run or a model") == Path("alpha")


def test_the_merged_model_of_a_named_run(place: Path) -> None:
    with pytest.raises(UserError, match="no merged model yet"):
        merged_or_model(Path("latest"))
    merged = place / "runs" / "beta" / "bbbb3333" / "merged"
    merged.mkdir()
    (merged / "config.json").write_text("{}")
    assert merged_or_model(Path("bbbb")).resolve() == merged


@pytest.mark.parametrize("command", ["report", "eval", "chat", "watch"])
def test_commands_say_what_has_run(command: str, tmp_path: Path) -> None:
    """No task of an evaluation, no model and no page is touched for a name that is none."""
    done = run(command, "nothing-of-that-name", cwd=tmp_path)
    assert done.code == 2 and "latest" in done.err
