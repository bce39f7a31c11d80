"""Which folders a job uses, from odd cluster files and shells; the site's options and modules in scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.schema import Cluster, Storage
from clustertune.errors import UserError
from clustertune.launch import cluster_paths
from clustertune.launch.cluster_paths import existing_folder, newest_merged
from clustertune.resolve.resolve import resolve
from clustertune.staging import bundle
from tests.launch.machines import machine

REPO = Path(__file__).resolve().parents[2]
ME = {"HOME": "/h/me", "USER": "me"}


def on(**storage: Any) -> Cluster:
    return machine(storage=Storage(**storage))


def values(cluster: Cluster, environ: dict[str, str], **given: str) -> dict[str, str]:
    return {setting.name: setting.value for setting in cluster_paths.settings(cluster, given, {**ME, **environ})}


def test_what_is_more_particular_wins_and_both_are_told() -> None:
    cluster = on(caches="/big/hf")
    assert values(cluster, {})["HF_HOME"] == "/big/hf"
    assert values(cluster, {"HF_HOME": ""})["HF_HOME"] == "/big/hf", "empty is not set, as for the libraries"
    assert values(cluster, {"HF_HOME": "/mine"})["HF_HOME"] == "/mine"
    assert values(cluster, {"HF_HOME": "/mine"}, HF_HOME="/given")["HF_HOME"] == "/given"
    reasons = {s.name: s.reason for s in cluster_paths.settings(cluster, {}, {**ME, "HF_HOME": "/mine"})}
    assert "exported" in reasons["HF_HOME"] and "storage.caches" in reasons["HF_HOME"] and "/big/hf" in reasons["HF_HOME"]
    assert values(on(), {}) == {}, "a cluster file that says nothing changes nothing"


def test_a_token_stays_at_home() -> None:
    """HF_HOME/token of a folder that others share would be anybody's."""
    assert values(on(caches="/big/hf"), {})["HF_TOKEN_PATH"] == "/h/me/.cache/huggingface/token"  # noqa: S105
    assert not {"HF_TOKEN", "WANDB_API_KEY"} & values(on(caches="/c"), {"HF_TOKEN": "x", "WANDB_API_KEY": "x"}).keys()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("~/runs", "/h/me/runs"),
        ("$SCRATCH", "/fast/me"),
        ("${SCRATCH}/a b/$USER", "/fast/me/a b/me"),
        ("/x/$(id)", "/x/$(id)"),
        ("$ABSENT/hf", "ABSENT is not set"),
        ("$EMPTY/hf", "EMPTY is not set"),
        ("$HERE/hf", "no absolute path"),
        ("$LINES/hf", "no absolute path"),
    ],
)
def test_what_is_put_in(text: str, found: str) -> None:
    """``--env`` takes the place of what cannot be."""
    environ = {**ME, "SCRATCH": "/fast/me", "EMPTY": "", "HERE": "here", "LINES": "/a\nb"}
    if found.startswith("/"):
        assert cluster_paths.folder(on(caches=text), "caches", environ) == Path(found)
        return
    with pytest.raises(UserError, match=found) as error:
        cluster_paths.folder(on(caches=text), "caches", environ)
    assert error.value.problems[0].key == "storage.caches"
    assert values(on(caches=text), environ, HF_HOME="/given")["HF_HOME"] == "/given"


LOADER = """
module() {
    [[ $1 == load && $2 != gone* ]] || return 1
    export CUDA_HOME=/site/$2 LD_LIBRARY_PATH=/site/$2/lib
}
: "$NEVER_SET"
"""


def in_shell(*names: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = '. launch/modules.sh "$@"; echo "$CUDA_HOME|$CLUSTERTUNE_MODULES|$CLUSTERTUNE_MODULE_VARIABLES"'
    env = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(
        ["bash", "-c", script, "bash", *names], cwd=REPO, env=env, capture_output=True, text=True, check=False
    )


def test_modules_are_loaded_and_what_they_set_goes_on(tmp_path: Path) -> None:
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "bash").write_text(LOADER)
    done = in_shell("gcc/12", "cuda/12.4", MODULESHOME=str(tmp_path))
    where, names, variables = done.stdout.strip().split("|")
    assert (where, names) == ("/site/cuda/12.4", "gcc/12 cuda/12.4")
    assert set(variables.split()) == {"CUDA_HOME", "LD_LIBRARY_PATH"}
    environ = {"CUDA_HOME": where, "HF_TOKEN": "x", "CLUSTERTUNE_MODULE_VARIABLES": f"{variables} HF_TOKEN"}
    assert cluster_paths.of_modules(environ) == ["CUDA_HOME"]
    failed = in_shell("cuda", "gone/1", MODULESHOME=str(tmp_path))
    assert failed.returncode == 2 and "module load gone/1 failed" in failed.stderr and not failed.stdout


def test_by_hand_the_program_begins_anew_with_the_modules(tmp_path: Path) -> None:
    """Once: where they are loaded it continues."""
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "bash").write_text('module() { echo "LOADED $2 $CUDA" >&2; export CUDA=$2; }\n')
    code = """
import os, sys
from clustertune.launch import cluster_paths
from clustertune.cluster.schema import SlurmFacts
from tests.launch.test_cluster_paths import machine
cluster_paths.load_modules(machine(slurm=SlurmFacts(partition="p", modules=("a/1", "b"))))
print("went on", os.environ.get("CLUSTERTUNE_MODULES"))
"""
    words = [sys.executable, "-c", code, "show-cluster", "dgx-h100", "--json"]
    environ = {**os.environ, "MODULESHOME": str(tmp_path)}
    again = subprocess.run(words, cwd=REPO, env=environ, capture_output=True, text=True, check=True)
    assert json.loads(again.stdout)["name"] == "dgx-h100" and again.stderr.split("\n")[:2] == ["LOADED a/1 ", "LOADED b a/1"]
    environ["CLUSTERTUNE_MODULES"] = "a/1 b"
    gone_on = subprocess.run(words, cwd=REPO, env=environ, capture_output=True, text=True, check=True)
    assert gone_on.stdout == "went on a/1 b\n"


def test_collected_models_are_taken_by_the_recipes_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that others can write, or of another model, is skipped with the reason."""
    resolved = resolve("llama8b-lima")
    folder = tmp_path / "llama8b-lima"
    assert bundle.offered(resolved, None) == bundle.offered(resolved, tmp_path) == (None, [])
    folder.mkdir(mode=0o755)
    (folder / "MANIFEST.json").write_text("{}")
    assert "skipped" in bundle.offered(resolved, tmp_path)[1][0]
    monkeypatch.setattr(bundle, "find_problems", lambda _resolved: [])
    assert bundle.offered(resolved, tmp_path) == (folder, [])
    folder.chmod(0o777)
    found, notes = bundle.offered(resolved, tmp_path)
    assert found is None and f"staged={folder}" in notes[0]


def test_commands_of_a_login_node_find_the_runs_of_its_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``runs/NAME/ID`` and the newest merged model, in the folder that the cluster file of this machine names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster_paths, "local_cluster", lambda: on(runs=f"{tmp_path}/far"))
    with pytest.raises(UserError):
        newest_merged(cluster_paths.runs(cluster_paths.local_cluster()))
    for age, name in ((10, "old"), (5, "new")):
        merged = tmp_path / "far" / "recipe" / name / "merged"
        merged.mkdir(parents=True)
        (merged / "MANIFEST.json").write_text("{}")
        os.utime(merged / "MANIFEST.json", (1e9 - age, 1e9 - age))
    assert newest_merged(cluster_paths.runs(cluster_paths.local_cluster())) == tmp_path / "far" / "recipe" / "new" / "merged"
    assert existing_folder(Path("runs/recipe/old"), "a run") == tmp_path / "far" / "recipe" / "old"
    (tmp_path / "runs" / "recipe" / "old").mkdir(parents=True)
    assert existing_folder(Path("runs/recipe/old"), "a run") == Path("runs/recipe/old"), "what is here goes first"
    with pytest.raises(UserError):
        existing_folder(Path("runs/recipe/none"), "a run")
