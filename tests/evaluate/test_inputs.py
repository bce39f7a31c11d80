"""The operator's file, and which prompts are scored when none are given."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants

from clustertune.errors import UserError
from clustertune.evaluate import inputs as room
from clustertune.recipe.tasks import read_task_file
from tests.evaluate.conftest import IFEVAL, forbid_network

GIVEN = yaml.safe_load((IFEVAL.folder / "task.yaml").read_text())


def test_decoding_is_lm_evals_own() -> None:
    from lm_eval.tasks._yaml_loader import load_yaml

    upstream = load_yaml(room.locate_upstream(IFEVAL), resolve_func=False)
    assert GIVEN["generation_kwargs"] == upstream["generation_kwargs"]
    assert GIVEN["metrics"] == [row["metric"] for row in upstream["metric_list"]]
    assert GIVEN["hub"]["name"] == upstream["dataset_path"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "other"}, "its folder is ifeval"),
        ({"include": ""}, "include"),
        ({"generation_kwargs": {"until": [], "do_sample": True, "temperature": 0.0}}, "generation_kwargs.do_sample"),
        ({"sampling": 1}, "sampling"),
        ({"task": "../up"}, "task"),
        ({"hub": {**GIVEN["hub"], "revision": "main"}}, "hub.revision"),
        ({"version": 3.0}, "installed lm-eval has version 4.0"),
        ({"include": "none.yaml"}, "neither in this folder nor below"),
    ],
)
def test_a_task_file_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    """The last two are well formed, and another definition than the installed one."""
    shutil.copytree(IFEVAL.folder, tmp_path / "ifeval")
    (tmp_path / "ifeval" / "task.yaml").write_text(yaml.safe_dump({**GIVEN, **changes}))
    with pytest.raises(UserError, match=message):
        room.check_version(read_task_file(tmp_path / "ifeval" / "task.yaml"))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_args, **_kwargs: None)


def test_without_a_network_our_own() -> None:
    with forbid_network() as attempts:
        found = room.choose_source(IFEVAL, None)
    assert found == (IFEVAL.folder / "prompts.jsonl", "clustertune-ifeval-smoke")
    assert attempts  # it did ask


def test_the_cached_benchmark_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find(repo: str, file: str, *, revision: str, repo_type: str) -> str:
        asked.append((repo, file, revision, repo_type))
        return str(tmp_path / "cached.jsonl")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", find)
    with forbid_network() as attempts:
        assert room.choose_source(IFEVAL, None) == (tmp_path / "cached.jsonl", "google/IFEval")
    assert attempts == []
    assert asked == [("google/IFEval", GIVEN["hub"]["file"], GIVEN["hub"]["revision"], "dataset")]
