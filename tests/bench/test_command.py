"""``clustertune bench`` as a user types it: what is refused, what is only shown, and real trainings that are measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clustertune.bench import batch, result
from clustertune.testbed.cluster import TemporaryCluster
from tests.command import REPO, run
from tests.nccl_check.test_submit import cluster_file

SMALL = ["train.max_length=64", "train.packing=false"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--tiny --synthetic", "--synthetic"), ("--time 10", "--time"), ("--submit", "slurm"), ("--run-dir tests", "--run-dir"),
        ("--submit --against nothing.py --ranks 2", "--against --ranks"), ("--out README.md", "--out"),
        ("--submit --cluster rno-rtxpro6000 --time soon", "--time"), ("train.max_lenght=64", "max_lenght"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_at_once(words: str, expected: str) -> None:
    """Everything that is wrong with a command line is said before anything is made."""
    done = run("bench", "tiny-oasst2", *words.split(), "--json")
    assert done.code == 2, done.err
    assert all(word in json.dumps(done.json) for word in expected.split())


def test_weights_that_no_machine_here_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """405 billion random weights on a laptop would end in the kernel's out-of-memory killer, after an hour of writing them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run("bench", "llama405b-oasst2", "--synthetic")
    assert done.code == 2 and "812 GB of weights each" in done.err and "--submit" in done.err


def test_a_job_measures_what_was_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits the recipe is edited and the cluster file removed: it reads neither."""
    shutil.copytree(REPO / "recipes" / "_base", tmp_path / "recipes" / "_base")
    recipe = Path(shutil.copytree(REPO / "recipes" / "tiny-oasst2", tmp_path / "recipes" / "mine"))
    cluster = cluster_file(tmp_path)
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    words = ["bench", recipe, "--cluster", cluster, "--run-dir", tmp_path / "run", "--out", tmp_path / "out", *SMALL]
    done = run(*words, "--submit", "--json")
    assert done.code == 0, done.err
    command = done.json["command"]
    inside = command[command.index(next(word for word in command if word.endswith(".sbatch"))) + 1 :]
    before = run("bench", *inside, "--dry-run", "--json").json
    cluster.unlink()
    shutil.rmtree(recipe)
    assert run("bench", *inside, "--dry-run", "--json").json == before and before["ranks"] == 2
    (tmp_path / "run.job" / "description.json").write_text("{}")
    (problem,) = run("bench", *inside, "--dry-run", "--json").json["problems"]
    assert problem["file"].endswith("description.json") and "--submit" in problem["fix"]


@pytest.mark.parametrize("where", [[], ["--submit", "--cluster", "nebius-h100", "--dry-run"]])
def test_a_recipe_for_another_trainer_is_refused(where: list[str]) -> None:
    """Megatron-Bridge has no stopwatch of ours: its ranks would train, and leave nothing to read."""
    done = run("bench", "llama70b-megatron", *where)
    assert done.code == 2 and "Megatron-Bridge" in done.err


def test_a_dry_run_makes_nothing(tmp_path: Path) -> None:
    """It says folder, steps, command and plan, and leaves no folder."""
    words = ["bench", "tiny-oasst2", "--dry-run", "--steps", "9", "--against", "trl"]
    words += ["--run-dir", str(tmp_path / "r"), "--out", str(tmp_path / "o")]
    found = run(*words, "--json").json
    assert found["schedule"] == {"warmup": 5, "steps": 9, "profiled": 2} and found["changes"]["max_steps"] == 16
    assert (found["against"], found["interleave"], found["rounds"]) == (["trl"], True, 2)
    assert found["train"][-2:] == ["--attempt", "1"] and list(tmp_path.iterdir()) == []
    assert "in turn with: trl" in run(*words).err


def test_the_job_of_a_full_size_model_is_shown() -> None:
    """What needs 16 large GPUs can be looked at anywhere: shape, command, and the plan of what it will measure."""
    words = ["bench", "llama405b-oasst2", "--synthetic", "--submit", "--cluster", "rno-rtxpro6000", "--dry-run"]
    found = run(*words, "--json").json
    assert "#SBATCH --nodes=2\n" in found["script"] and "#SBATCH --exclusive\n" in found["script"]
    assert found["script"].endswith(batch.SCRIPT.read_text().partition("set -euo")[2]) and found["plan"]["step_s"] > 60
    command = found["command"]
    assert command[:2] == ["sbatch", "--parsable"] and "--synthetic" in command and "--inside" in command
    assert command[command.index("--cluster") + 1] == "rno-rtxpro6000"
    assert f"{REPO}/recipes/llama405b-oasst2" in command and Path(command[command.index("--run-dir") + 1]).is_absolute()
    done = run(*words)
    assert done.code == 0 and "made up: random weights" in done.err and "$ sbatch --parsable" in done.out


def test_the_script_says_where_to_call_it(tmp_path: Path) -> None:
    """sbatch in another folder: the words, exit 2, no traceback."""
    done = subprocess.run(["bash", str(batch.SCRIPT)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "is not a checkout of clustertune" in done.stderr


@pytest.mark.jobs
@pytest.mark.timeout(1200)
def test_a_recipe_is_measured_against_trl(tmp_path: Path) -> None:
    """Real ranks of both programs: figures of every kind, the page, the recipe, and compare reads what was written."""
    out, folder = tmp_path / "out", tmp_path / "run"
    words = ["--against", "trl,trl-defaults", "--rounds", "1", "--steps", "4", "--warmup", "1", "--profile", "1"]
    changed = [*SMALL, "train.per_device_train_batch_size=2"]
    done = run("bench", "tiny-oasst2", *words, "--out", out, "--run-dir", folder, "--json", *changed)
    assert done.code == 0, done.err
    found = done.json
    name = result.name_of(found)
    assert sorted(p.name for p in out.iterdir()) == [f"{name}.json", f"{name}.md", f"{name}.recipe.json"]
    assert json.loads((out / f"{name}.json").read_text()) == found
    assert "-max_length-64-packing-false-" in name and found["overrides"] == sorted(changed)
    assert [one["peer"] for one in found["peers"]] == ["trl", "trl-defaults"]
    same, plain = found["peers"]
    ours, theirs = found["ours"], plain["measured"]
    for one, steps in ((ours, 8), (theirs, 4), (same["measured"], 4)):
        assert one["step_s"]["n"] == steps and one["tokens_per_s_per_gpu"]["mean"] > 0 and one["tokens_per_step"] > 0
    assert ours["tokens_per_step"] == theirs["tokens_per_step"], "the same conversations, cut at the same length"
    assert same["same_tokens"] and same["distributed"] == "FSDP" and same["pairs"]["interleaved"]
    assert same["pairs"]["wall"]["n"] == same["pairs"]["cpu"]["n"] == 4 and plain["distributed"] == "MULTI_CPU"
    assert 0 < ours["communication"]["exposed_share"] < 1 and ours["communication"]["top"]
    assert found["ends"]["evaluation_s"] > 0 and found["ends"]["checkpoint_s"] > 0
    assert found["projection"]["hours"] > 0 and found["distributed"]["type"] == "FSDP"
    assert found["startup_s"].get("total", 0) > 0
    assert not (folder / "checkpoints").exists() and (folder / "run.json").exists()
    again = run("compare", folder, out / f"{name}.json", "--json")
    assert again.code == 0 and [entry["kind"] for entry in again.json["runs"]] == ["run", "bench"]


@pytest.mark.jobs
@pytest.mark.timeout(1800)
def test_on_two_nodes_of_a_real_slurm(slurm: TemporaryCluster, tmp_path: Path) -> None:
    """``--submit`` as a user calls it: both programs over both nodes by srun, full size without the Hub."""
    file, out = cluster_file(tmp_path), tmp_path / "out"
    words = ["bench", "tiny-oasst2", "--synthetic", "--submit", "--cluster", str(file), "--against", "trl", "--rounds", "1"]
    words += ["--steps", "2", "--warmup", "1", "--profile", "0", "--no-ends"]
    words += ["--out", str(out), "--run-dir", str(tmp_path / "run")]
    words += ["slurm.nodes=2", "slurm.gpus_per_node=1", *SMALL, "--json"]
    done = slurm.run([sys.executable, "-m", "clustertune", *words], cwd=REPO)
    slurm.wait(int(json.loads(done.stdout)["job"]), timeout=1500)
    log = "".join(path.read_text() for path in (tmp_path / "run.job").glob("bench-*.log"))
    (file,) = (path for path in out.glob("tiny-oasst2-synthetic-cpu-x2-*.json") if not path.name.endswith(".recipe.json"))
    found = json.loads(file.read_text())
    assert found["hardware"]["nodes"] == 2 and found["peers"][0]["failed"] is None, log
    assert found["peers"][0]["measured"]["step_s"]["n"] == 2 and found["distributed"]["mesh"] == {"dp_shard": 2}
    records = [json.loads(path.read_text()) for path in (tmp_path / "run" / "attempts" / "0001").glob("node-*.json")]
    assert len(records) == 2 and {record["code"] for record in records} == {0}
    assert len(list((tmp_path / "run" / "peer").glob("round-*/node-*.log.txt"))) == 2, "the peer ran on both nodes, too"
