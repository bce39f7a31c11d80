"""``clustertune stage`` as it is typed: on this node, and from a hub of one's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertune import manifest
from clustertune.staging import needs
from tests.fake_hub import FakeHub, Repo
from tests.staging.conftest import DATASET, MODEL, REVISION, run, same, write_cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A cluster file whose staging folder is not made yet."""
    return write_cluster(tmp_path / "here.yaml", tmp_path / "local")


def test_on_this_node_and_away_again(tmp_path: Path, cluster: Path, hub_recipe: tuple[Path, Path]) -> None:
    """As the page tells it: shown, copied, verified, removed."""
    recipe, home = hub_recipe
    words = ["stage", recipe, "--cluster", cluster, "--run-dir", tmp_path / "run", "--json"]
    shown = run(*words, "--dry-run", HF_HOME=str(home))
    assert shown.code == 0 and shown.json["trees"][0]["there"] is False and not list((tmp_path / "local").rglob("*.json"))
    first = run(*words, HF_HOME=str(home))
    assert first.code == 0, first.err
    tree = first.json["trees"][0]
    assert tree["name"] == "tiny-llama" and tree["revision"] == REVISION and tree["copied"] == tree["bytes"] > 100_000
    assert same(Path(tree["path"]), needs.snapshot(home / "hub", "models", MODEL, REVISION))
    assert "GB/s" in first.err and "no prepared data" in first.err
    assert run(*words, HF_HOME=str(home)).json["trees"][0]["reused"] is True
    look = run("stage", "--clean", "--cluster", cluster, "--dry-run", "--json")
    assert len(look.json["kept"]) == 1 and Path(tree["path"]).is_dir()
    done = run("stage", "--clean", "--cluster", cluster, "--json")
    assert done.code == 0 and len(done.json["removed"]) == 1
    assert not Path(tree["path"]).exists() and not list((tmp_path / "local").rglob("*.lock"))[1:]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipes/tiny-oasst2", "--cluster", "rno-rtxpro6000"], "storage.staging"),
        (["recipes/tiny-oasst2", "--cluster", "{cluster}", "--run-dir", "{tmp}/none"], "nothing of this recipe can be copied"),
        (["--cluster", "{cluster}"], "a recipe is missing"),
        (["recipes/tiny-oasst2", "--to", "{tmp}/o", "--clean"], "exclude each other"),
        (["recipes/tiny-oasst2", "--eval-data", "x.jsonl"], "--eval-data is for --to"),
        (["recipes/tiny-oasst2", "--to", "{tmp}/o", "--eval-data", "{tmp}/none.jsonl"], "cannot be read"),
        (["recipes/tiny-oasst2", "--to", "{tmp}/o", "--eval-data", "{cluster}"], "invalid-json"),
        (["--verify", "{tmp}"], "is not a folder of staged inputs"),
        (["--verify", "{tmp}/none"], "is not a folder of staged inputs"),
        (["recipes/tiny-oasst2", "model.path={tmp}/none", "model.weights=hub", "--cluster", "{cluster}"], "no such folder"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, cluster: Path, words: list[str], message: str) -> None:
    """With a remedy, and nothing is written."""
    done = run("stage", *(word.format(cluster=cluster, tmp=tmp_path) for word in words))
    assert done.code == 2 and message in done.err, done.err
    assert not (tmp_path / "o").exists()


@pytest.fixture
def hub(hub_recipe: tuple[Path, Path]) -> Iterator[FakeHub]:
    """A hub on loopback that has the recipe's model and dataset."""
    hub = FakeHub()
    for kind, name in (("models", MODEL), ("datasets", DATASET)):
        source = needs.snapshot(hub_recipe[1] / "hub", kind, name, REVISION)
        files = {p.relative_to(source).as_posix(): p.read_bytes() for p in source.rglob("*") if p.is_file()}
        hub.repos[name] = Repo(False, files, {file for file in files if file.endswith(".safetensors")}, [REVISION])
    hub.repos[MODEL].files["pytorch_model.bin"] = b"weights in another form"
    server = hub.serve()
    yield hub
    server.shutdown()
    server.server_close()


@pytest.mark.jobs
def test_downloaded_and_compared_with_the_hubs_own_digests(tmp_path: Path, hub_recipe: tuple[Path, Path], hub: FakeHub) -> None:
    """What a proxy or a disk has spoilt on the way is not sealed; the next call continues."""
    recipe, home = hub_recipe
    empty = tmp_path / "home"
    shutil.copytree(home / "hub", empty / "hub", ignore=shutil.ignore_patterns("*example-org*"), symlinks=True)
    words = ["stage", recipe, "--to", tmp_path / "out"]
    environment = {"HF_HOME": str(empty), "HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1"}
    hub.spoilt = "tokenizer.json"
    broken = run(*words, **environment)
    assert broken.code == 75 and "tokenizer.json: came from the network as" in broken.err, broken.err
    assert not (tmp_path / "out" / manifest.MANIFEST).exists()
    hub.spoilt = ""
    done = run(*words, "--json", **environment)
    assert done.code == 0, done.err
    model = needs.snapshot(tmp_path / "out/hub", "models", MODEL, REVISION)
    assert same(model, needs.snapshot(home / "hub", "models", MODEL, REVISION)), "and no weights in another form"
    assert manifest.find_problems(tmp_path / "out") == []
    found = {part["what"]: part["from"] for part in done.json["parts"]}
    assert found["model"] == found["data"] == "the network"
