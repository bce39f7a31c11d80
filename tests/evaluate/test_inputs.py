"""The operator's file, and which prompts are scored when none are given."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants

from clustertune.errors import UserError
from clustertune.evaluate import tasks as room
from clustertune.evaluate.run import quiet
from clustertune.recipe.eval_tasks import read_task_file
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


@pytest.mark.parametrize("guarded", [True, False])
def test_reading_a_local_file_is_not_reported_to_anyone(guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard, datasets sends a request for each ``load_dataset("json")`` of a local file."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')

    def load() -> None:
        datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"))

    with forbid_network() as attempts:
        if guarded:
            with quiet():
                load()
        else:
            load()
    assert bool(attempts) is not guarded
    assert datasets.config.HF_UPDATE_DOWNLOAD_COUNTS is True
