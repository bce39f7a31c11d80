"""What a result is called, and that none is written over: a padded baseline beside the packed recipe."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertune.bench import batch, preparation, result
from clustertune.bench.preparation import BenchRequest
from clustertune.cli import bench as benching
from clustertune.cluster.load import load_cluster
from clustertune.errors import UserError
from clustertune.training.bench_schedule import BenchSchedule
from tests import tree
from tests.bench.documents import document
from tests.command import REPO, run
from tests.damage import failing

COMMITTED = REPO / "docs" / "results" / "bench"


def request(path: Path, *overrides: str, again: bool = False) -> BenchRequest:
    return BenchRequest("tiny-oasst2", path, BenchSchedule(1, 3, save=False), overrides, replace=again)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "llama8b-synthetic-h100-sxm-x2"),
        ({"tiny": True, "synthetic": False}, "llama8b-tiny-h100-sxm-x2"),
        ({"overrides": []}, "llama8b-synthetic-h100-sxm-x2"),
        ({"overrides": ["train.packing=false"]}, "llama8b-synthetic-h100-sxm-x2-packing-false-a9ee3c"),
    ],
)
def test_the_name_says_what_ran_where(changes: dict[str, Any], name: str) -> None:
    """Results of two machines, or of two forms of a recipe, must not write over each other."""
    assert result.name_of(document(**changes)) == name


def test_committed_results_keep_their_names() -> None:
    """A result that cannot be found by its name is measured again; and the page shows a name that is made so."""
    found = [path for path in COMMITTED.glob("*.json") if not path.name.endswith(".recipe.json")]
    assert {path.stem for path in found} >= {"tiny-oasst2-cpu-x2"}
    assert [path.stem for path in found] == [result.name_of(json.loads(path.read_text())) for path in found]
    (shown,) = re.findall(r"`(qwen2.5-14b[^`]*)`", tree.texts()["docs/bench.md"])
    changed = ["train.packing=false"]
    name = result.file_name("qwen2.5-14b-tulu3", tiny=False, synthetic=False, kind="h100-sxm", ranks=64, changed=changed)
    assert shown == name


def names(*given: str) -> list[str]:
    """The names of one recipe with different overrides, each as one text with ``;`` between them."""
    kind = {"tiny": False, "synthetic": False, "kind": "cpu", "ranks": 2}
    return [result.file_name("r", changed=result.changes(filter(None, text.split(";"))), **kind) for text in given]  # type: ignore[arg-type]


def test_names_differ_where_recipes_do() -> None:
    """Another value, another key of the same last part, long ones that begin alike; not the order, nor how false is spelt.

    They are published: a path on this machine has nothing to do in one, nor has a slash or a blank.
    """
    long = [f"lora.target_modules=[{', '.join('abcdefghijklmnop')}, {last}]" for last in "xy"]
    found = names("", "train.packing=false", "train.packing=true", "data.packing=false", *long, "a.b=1;a.c=2")
    assert len(set(found)) == len(found) and all(len(name) < 70 for name in found)
    one, *same = names("a.b=false;a.c=2", "a.c=2;a.b=False", "a.b=1;a.c=2;a.b=false", "slurm.nodes=4;a.b=false;a.c=2")
    assert set(same) == {one} and re.fullmatch(r"r-cpu-x2-b-false-c-2-[0-9a-f]{6}", one)
    odd = names("data.input=/lustre/ann/secret/rows.jsonl", "model.path=/lustre/llama 8b/", "a.b={x: [", "a.b=\N{BULLET}")
    assert odd[0].startswith("r-cpu-x2-input-rows.jsonl-") and odd[1].startswith("r-cpu-x2-path-llama-8b-")
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in odd)


@pytest.fixture
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def body(seconds: float, overrides: list[str]) -> dict[str, Any]:
    found = document(seconds, recipe="tiny-oasst2", tiny=False, synthetic=False, overrides=overrides)
    found["hardware"]["gpu"], found["utilisation"] = None, {"mfu": None, "hfu": None, "why": "no GPU"}
    return found


def keep(folder: Path, seconds: float, *overrides: str, again: bool = False) -> Path:
    """The result of a small recipe on CPUs, as the command keeps it. Returns the folder of results."""
    given = replace(request(folder / "run"), overrides=overrides, replace=again)
    benching._keep(preparation.make(given), folder / "out", body(seconds, list(overrides)))
    return folder / "out"


@pytest.mark.usefixtures("on_cpus")
def test_a_padded_baseline_lies_beside_the_recipe(tmp_path: Path) -> None:
    """Both are kept, and compare puts them side by side and says by what they differ."""
    keep(tmp_path, 0.5)
    out = keep(tmp_path, 1.0, "train.packing=false")
    files = [out / f"{name}.json" for name in ("tiny-oasst2-cpu-x2", "tiny-oasst2-cpu-x2-packing-false-a9ee3c")]
    assert len(list(out.iterdir())) == 6
    done = run("compare", *files, "--json")
    assert done.code == 0 and [entry["name"] for entry in done.json["runs"]] == [path.stem for path in files]
    assert [entry["overrides"] for entry in done.json["runs"]] == ["none", "train.packing=false"]
    assert any(note.startswith("Overrides differs (none in ") for note in done.json["notes"])


@pytest.mark.usefixtures("on_cpus")
def test_another_result_is_not_written_over(tmp_path: Path) -> None:
    """Not one byte of it; the new figures lie in the run folder, and --replace is the word."""
    out = keep(tmp_path, 0.5)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    keep(tmp_path, 0.5)  # the same again is no other
    with pytest.raises(UserError) as caught:
        keep(tmp_path, 1.0)
    (problem,) = caught.value.problems
    assert problem.key == "--out" and "--replace" in str(problem.fix) and "is another result" in problem.message
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    published = json.loads((tmp_path / "run" / "tiny-oasst2-cpu-x2.json").read_text())
    assert published["ours"]["step_s"]["median"] == 1.0
    keep(tmp_path, 1.0, again=True)
    assert json.loads((out / "tiny-oasst2-cpu-x2.json").read_text()) == published


def test_it_is_refused_before_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is known on CPUs: nobody waits for a result that has no place. With other overrides it has one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["bench", "tiny-oasst2", "--run-dir", tmp_path / "run", "--dry-run", "--json"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tiny-oasst2-cpu-x2.json").write_text("{}")
    done = run(*words, "--out", tmp_path / "out")
    assert done.code == 2 and done.json["problems"][0]["file"].endswith("out/tiny-oasst2-cpu-x2.json")
    for more in (["--replace"], ["train.packing=false"], ["--ranks", "1"]):
        assert run(*words, *more, "--out", tmp_path / "out").code == 0, more


def test_the_name_on_gpus_is_asked_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind of GPU is known before the ranks are started; several, or a driver that says nothing, are not."""
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    made = preparation.make(request(tmp_path / "run"))
    for answer, name in (
        ("NVIDIA H200\nNVIDIA H200", "tiny-oasst2-h200-sxm-x2"),
        ("Some GPU", "tiny-oasst2-gpu-x2"),
        ("NVIDIA H200\nNVIDIA A30", None),
        ("", None),
    ):
        rows = "".join(f"{n}, {kind}, 00000000:0{n}:00.0, 1 MiB\n" for n, kind in enumerate(answer.splitlines()))
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{rows}END\n")
        tool.chmod(0o755)
        assert benching._expected_name(made) == name
    tool.unlink()
    assert benching._expected_name(made) is None


@pytest.mark.parametrize("where", [[], ["--submit", "--cluster", "rno-rtxpro6000"]])
def test_a_dry_run_looks_at_the_folders(where: list[str], tmp_path: Path) -> None:
    """What the run would refuse, the dry run refuses, both at once: a file, and a folder below one."""
    file = tmp_path / "file"
    file.write_text("")
    for places in ((file, file / "x"), (file / "x", file)):
        options = [word for pair in zip(("--run-dir", "--out"), places, strict=True) for word in pair]
        done = run("bench", "tiny-oasst2", *options, *where, "--dry-run", "--json")
        assert done.code == 2, done.err
        found = [(item["key"], item["file"], "is a file" in item["message"]) for item in done.json["problems"]]
        assert found == [(key, str(file), True) for key in ("--run-dir", "--out")]


def test_a_dry_run_in_a_used_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is closed is reported without a traceback."""
    (tmp_path / "run").mkdir()
    words = ["bench", "tiny-oasst2", "--run-dir", tmp_path / "run", "--out", tmp_path / "out", "--dry-run", "--json"]
    assert run(*words).code == 0
    (tmp_path / "run" / "run.json").write_text("{}")
    done = run(*words)
    assert done.code == 2 and "is not empty" in done.json["problems"][0]["message"]

    monkeypatch.setattr(Path, "iterdir", failing(PermissionError(13, "Permission denied")))
    args = benching.BenchArguments("tiny-oasst2", run_dir=tmp_path / "run", out=tmp_path / "out", dry_run=True)
    with pytest.raises(UserError) as caught:
        benching._folder_problems(args)
    assert "--run-dir cannot be read: Permission denied" in str(caught.value.problems[0])


def test_a_job_is_told_to_replace(tmp_path: Path) -> None:
    """The word is said on the login node and needed in the job."""
    for again in (False, True):
        asked = request(tmp_path / "run", again=again)
        assert ("--replace" in batch.arguments(asked, load_cluster("rno-rtxpro6000"), None, tmp_path, ())) is again
