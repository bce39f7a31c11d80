"""Everything in one folder, an image too: collected, checked, rehearsed without a network, and run from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clustertune import manifest
from clustertune.cli.app import app
from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import Container
from clustertune.errors import UserError
from clustertune.resolve.resolve import resolve
from clustertune.staging import bundle, needs
from clustertune.staging.bundle_fill import BundlePart, Collector
from tests.command import REPO, SHORT
from tests.evaluate.test_tasks import choices, write_repository
from tests.staging.conftest import DATASET, MODEL, REVISION, fill, flip, run, talks


@pytest.fixture
def staged(parcel_of_all: Path, tmp_path: Path) -> Path:
    """A parcel of one's own, to be damaged."""
    return Path(shutil.copytree(parcel_of_all, tmp_path / "out"))


def test_a_parcel_is_a_cache_of_the_hub_with_sums(parcel_of_all: Path) -> None:
    """Other programs find it by HF_HUB_CACHE, other tools check it by sha256sum."""
    staged = parcel_of_all
    model = needs.snapshot(staged / "hub", "models", MODEL, REVISION)
    assert (model / "model.safetensors").is_file() and not (model / "model.safetensors").is_symlink()
    assert (staged / "hub/models--example-org--tiny-llama/refs/main").read_text() == REVISION
    subprocess.run(["sha256sum", "--check", "--quiet", bundle.SUMS], cwd=staged, check=True)
    assert manifest.find_problems(staged, bundle.KIND) == []
    assert bundle.model_folder(staged) == model
    recipes = staged / bundle.RECIPES
    there = {path.relative_to(recipes).as_posix() for path in recipes.rglob("*") if path.is_file()}
    assert {"_base/sft-lora.yaml", "_base/calm.yaml", "described/model.json", "described/recipe.yaml"} <= there
    assert "_base/tulu3.yaml" not in there


def test_a_parcel_is_rehearsed_without_a_network(parcel_of_all: Path, tmp_path: Path) -> None:
    """What the chain reads of it, each thing once; a program that a library starts gets nothing out."""
    if (refused := bundle.no_namespace()) is not None:
        pytest.skip(f"no network namespaces here: {refused}")
    planted = fill(tmp_path / "planted", {"nothing": 1})
    (planted / "langdetect.py").write_text(
        "import subprocess\n"
        "shell = ['bash', '-c', 'echo > /dev/tcp/203.0.113.5/8443']\n"
        "assert 'unreachable' in subprocess.run(shell, stderr=subprocess.PIPE, text=True).stderr\n"
        "class DetectorFactory:\n    seed = 0\nclass LangDetectException(Exception): pass\n"
        "def detect(text): return 'en'\n"
    )
    done = run("stage", "--verify", parcel_of_all, "--json", PYTHONPATH=os.pathsep.join([str(REPO), str(planted)]))
    assert done.code == 0, done.err
    steps = {step["step"]: step["found"] for step in done.json["steps"]}
    assert list(steps) == ["prepare", "load"]
    assert steps["load"].startswith("llama, 21 tensors in 1 files; 36 prompts of google/IFEval")


@pytest.mark.jobs
@pytest.mark.parametrize("part", ["tokenizer", "data", "weights"])
def test_what_a_parcel_lacks_is_found_before_it_travels(staged: Path, part: str) -> None:
    """Its sums are right, for it was sealed so."""
    model = bundle.model_folder(staged)
    assert model is not None
    gone = {"tokenizer": "tokenizer*", "data": "train.jsonl", "weights": "*.safetensors"}[part]
    for path in (needs.snapshot(staged / "hub", "datasets", DATASET, REVISION) if part == "data" else model).glob(gone):
        path.unlink()
    meta = bundle.read(staged).meta
    (staged / manifest.MANIFEST).unlink()
    manifest.seal(staged, bundle.KIND, meta)
    done = run("stage", "--verify", staged, "--json")
    assert done.code == 2 and "Traceback" not in done.err
    failed = {step["step"] for step in done.json["steps"] if step["problems"]}
    assert {"data": "prepare"}.get(part, "load") in failed, done.err


def test_a_damaged_parcel_is_not_rehearsed(staged: Path) -> None:
    """Flipped, missing and foreign files, all at once and by name."""
    model = bundle.model_folder(staged)
    assert model is not None
    flip(model / "model.safetensors", 5000)
    (model / "tokenizer.json").unlink()
    (model / "adapter_config.json").write_text("{}")
    done = run("stage", "--verify", staged, "--json")
    assert done.code == 2
    body = done.json
    assert body["steps"] == []
    assert {Path(p["file"]).name: p["message"].split(":")[0] for p in body["problems"]} == {
        "model.safetensors": "its content differs from the manifest's SHA-256",
        "tokenizer.json": "cannot be read",
        "adapter_config.json": "is not named by the manifest",
    }


@pytest.mark.jobs
def test_collected_again_what_is_whole_is_kept(staged: Path, hub_recipe: tuple[Path, Path]) -> None:
    """An interrupted copy of 800 GB continues; a damaged file of it is copied again."""
    model = bundle.model_folder(staged)
    assert model is not None
    before = (model / "config.json").stat().st_ino
    flip(model / "model.safetensors", 5000)
    done = run("stage", hub_recipe[0], "--to", staged, network=False, HF_HOME=str(hub_recipe[1]))
    assert done.code == 0, done.err
    assert manifest.find_problems(staged, bundle.KIND) == []
    assert (model / "config.json").stat().st_ino == before


def test_a_folder_that_is_not_ours_is_not_written_to(tmp_path: Path) -> None:
    """--to with the wrong folder must not mix with what lies there; a dry run writes nothing at all."""
    file, mine, other = (tmp_path / name for name in ("a file", "mine", "of another recipe"))
    file.write_text("x")
    manifest.seal(fill(other, {"mine": 10}), bundle.KIND, {"recipe": "other", "parts": {}})
    fill(mine, {"mine": 10})
    before = sorted(tmp_path.rglob("*"))
    done = run("stage", "recipes/tiny-oasst2", "--to", tmp_path / "new", "--dry-run", "--json", network=False)
    assert done.code == 0 and {part["what"] for part in done.json["parts"]} >= {"data", "recipe"}
    for out in (file, mine, other):
        refused = CliRunner().invoke(app, ["stage", "recipes/tiny-oasst2", "--to", str(out)])
        assert isinstance(refused.exception, UserError) and "--to" in str(refused.exception), out
    assert sorted(tmp_path.rglob("*")) == before


def test_entered_every_library_reads_the_parcel(parcel_of_all: Path, hub_recipe: tuple[Path, Path]) -> None:
    staged = parcel_of_all
    resolved = resolve(str(hub_recipe[0]), [f"staged={staged}"])
    environ = {"WANDB_MODE": "disabled"}
    assert resolve(str(hub_recipe[0])).fingerprint() == resolved.fingerprint(), "where its inputs lie changes no weight"
    bundle.enter(resolved, environ)
    bundle.enter(resolved, environ)
    assert environ["HF_HUB_OFFLINE"] == "1" and environ["HF_HUB_CACHE"] == str(staged / "hub")
    assert environ["WANDB_MODE"] == "disabled"


@pytest.mark.jobs
@pytest.mark.timeout(1200)
def test_the_chain_runs_from_the_parcel_alone(staged: Path, tmp_path: Path) -> None:
    """From nothing, with empty caches and no network: what the page tells, to the report."""
    words = ["run", staged / "recipes/hubby", f"staged={staged}", "--ranks", "2", "--run-dir", tmp_path / "r", *SHORT]
    done = run(*words, network=False, HF_HOME=str(tmp_path / "nothing"))
    assert done.code == 0, done.err
    assert (tmp_path / "r/report.html").is_file()
    result = json.loads((tmp_path / "r/eval/results.json").read_bytes())
    assert str(staged) in result["details"]["ifeval"]["dataset"]["file"]


@pytest.mark.jobs
def test_the_data_of_other_tasks_are_carried_along(tmp_path: Path) -> None:
    """Their data set from the Hub's cache, found in the folder alone; what only IFEval needs stays behind."""
    write_repository(tmp_path / "hf/hub", "allenai/ai2_arc", "ARC-Easy", {split: choices(6, 1) for split in ("test", "train")})
    out, words = tmp_path / "out", ["recipes/tiny-oasst2", "eval.tasks=[arc_easy]"]
    done = run("stage", *words, "--to", out, "--json", network=False, HF_HOME=str(tmp_path / "hf"))
    assert done.code == 0, done.err
    assert {part["what"] for part in done.json["parts"]} == {"task", "data", "recipe"}
    shutil.rmtree(tmp_path / "hf")
    checked = run("stage", "--verify", out, "--json")
    assert checked.code == 0, checked.err
    assert {step["step"]: step["found"] for step in checked.json["steps"]}["load"].endswith("6 documents of arc_easy")


@pytest.mark.jobs
@pytest.mark.timeout(1200)
def test_what_a_recipe_names_by_path_is_carried_along(tmp_path: Path, tiny_model: Path) -> None:
    """A model folder, a data file and a file of prompts from anywhere: found in the folder alone, and run from there."""
    data = tmp_path / "site/talks.jsonl"
    data.parent.mkdir()
    data.write_text(talks("q", 20))
    prompts = tmp_path / "site/prompts.jsonl"
    lines = (REPO / "eval/ifeval/prompts.jsonl").read_text().splitlines()[:2]
    prompts.write_text("\n".join(lines) + "\n")
    model = Path(shutil.copytree(tiny_model, tmp_path / "site/tiny-llama"))
    recipe = Path(shutil.copytree(REPO / "recipes/tiny-oasst2", tmp_path / "recipes/tiny-oasst2"))
    words = [f"data.input={data}", "data.format=messages", f"model.path={model}", "model.weights=hub"]
    shutil.copy(model / "config.json", recipe / "model.json")
    done = run("stage", recipe, *words, "--to", tmp_path / "out", "--eval-data", prompts, network=False)
    assert done.code == 0, done.err
    shutil.rmtree(tmp_path / "site")
    checked = run("stage", "--verify", tmp_path / "out", "--json")
    assert checked.code == 0, checked.err
    found = {step["step"]: step["found"] for step in checked.json["steps"]}
    assert "2 prompts of prompts.jsonl" in found["load"]
    run_words = [*words, f"staged={tmp_path / 'out'}", "--ranks", "2", "--run-dir", tmp_path / "r", *SHORT]
    ran = run("run", tmp_path / "out/recipes/tiny-oasst2", *run_words, "--to", "train", network=False)
    assert ran.code == 0, ran.err
    log = (tmp_path / "r/attempts/0001/rank-1.log").read_text()
    assert f"base model from {tmp_path}/out/model/tiny-llama" in log


# --- the image that goes along -----------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are remembered below it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan(tmp_path: Path, **container: str) -> tuple[list[BundlePart], list[str]]:
    """The parts of the tiny recipe for a cluster with this container, and the notes."""
    cluster = load_cluster("local").model_copy(update={"container": Container.model_validate(container)})
    resolved = resolve("recipes/tiny-oasst2", [], tiny=False)
    collector = Collector(resolved, cluster, tmp_path / "out", None, 60)
    return [part for part in collector.plan() if part.what == "container"], collector.notes


@pytest.mark.usefixtures("cache")
def test_an_image_goes_with_its_sum(tmp_path: Path) -> None:
    """So that the machine without network holds it against the same one."""
    image = tmp_path / "train.sif"
    image.write_bytes(b"image")
    (part,), notes = plan(tmp_path, runtime="apptainer", image=str(image))
    assert [file.name for file in part.files] == ["train.sif"]
    assert any("train.sif.sha256 is not there" in note for note in notes)
    image.with_name("train.sif.sha256").write_text(f"{hashlib.sha256(b'image').hexdigest()}  train.sif\n")
    (part,), notes = plan(tmp_path, runtime="apptainer", image=str(image))
    assert [file.name for file in part.files] == ["train.sif", "train.sif.sha256"]
    assert not any("sha256" in note for note in notes)
    image.write_bytes(b"altered")  # where it is opened nobody can fetch it again
    with pytest.raises(UserError, match=r"train.sif.sha256 says"):
        plan(tmp_path, runtime="apptainer", image=str(image))
    with pytest.raises(UserError, match="no such image"):
        plan(tmp_path, runtime="apptainer", image=str(tmp_path / "none.sif"))
    assert plan(tmp_path)[0] == [], "a laptop's"
