"""The whole chain through the real command: two ranks sharded by FSDP on gloo, without network."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from clustertune import manifest
from clustertune.checkpoint import store
from clustertune.recipe.eval_tasks import first_task
from clustertune.report import source
from clustertune.rundir import STAGES, RunDir
from tests.command import SHORT, Done, events, rank_pid, run, run_until

RECIPE = "recipes/tiny-oasst2"


def adapter_sha(folder: Path) -> str:
    return hashlib.sha256((folder / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def test_the_document(finished: tuple[Path, Done]) -> None:
    folder, done = finished
    assert done.json["run_dir"] == str(folder)
    assert list(done.json["stages"]) == list(STAGES)
    assert all(stage["status"] == "done" and stage["seconds"] >= 0 for stage in done.json["stages"].values())
    assert {key.partition(",")[0] for key in done.json["tasks"]["ifeval"]} >= set(first_task().metrics)
    for name, kind in (("data", "dataset"), ("adapter", "adapter"), ("merged", "merged"), ("eval", "evaluation")):
        assert manifest.find_problems(folder / name, kind) == [] or name == "data"
    assert "<svg" in (folder / "report.html").read_text()


def test_run_json_says_what_really_was(finished: tuple[Path, Done]) -> None:
    body = json.loads((finished[0] / "run.json").read_text())
    distributed = body["distributed"]
    assert (distributed["type"], distributed["fsdp_version"], distributed["world_size"]) == ("FSDP", 2, 2)
    assert distributed["mesh"] == {"dp_shard": 2} and distributed["backend"] == "gloo"
    assert 0.45 < distributed["sharded_share"] < 0.6
    assert distributed["packing"] == {"isolated": True, "attention": "packed_varlen"}
    assert body["versions"]["torch"] and body["recipe"]["world_size"] == 2


def test_the_metrics_are_complete(finished: tuple[Path, Done]) -> None:
    steps = events(finished[0], "step")
    assert [s["step"] for s in steps] == list(range(1, 9))
    assert all(
        s["loss"] > 0 and s["grad_norm"] > 0 and s["tokens_per_second"] > 0 and s["memory_bytes"] > 1 << 20 for s in steps
    )
    assert [e["step"] for e in events(finished[0], "eval")] == [0, 3, 6, 8]
    assert steps[-1]["loss"] < steps[0]["loss"]
    published = json.loads((finished[0] / "metrics.json").read_text())
    assert tuple(published) == (*source.FIELDS, source.STEADY)
    assert published["world_size"] == 2 and published["fsdp"] is True
    assert published["wall_time_s"] == pytest.approx(sum(s["seconds"] for s in steps)) and published[source.STEADY] > 0


def test_the_merged_model_is_that_of_base_and_adapter(finished: tuple[Path, Done], tmp_path: Path) -> None:
    """Byte for byte; that a merge is PEFT's, tests/merge/test_bits.py says."""
    from clustertune.merge import merge

    base = next((finished[0] / "model").iterdir())
    merge(base, finished[0] / "adapter", tmp_path / "merged")
    weights = [(folder / "model.safetensors").read_bytes() for folder in (finished[0] / "merged", tmp_path / "merged", base)]
    assert weights[0] == weights[1] != weights[2]


def test_the_same_command_again_does_nothing_twice(finished: tuple[Path, Done]) -> None:
    before = adapter_sha(finished[0])
    again = run("run", RECIPE, "--run-dir", finished[0], "--json", *SHORT)
    assert again.code == 0
    status = {name: stage["status"] for name, stage in again.json["stages"].items()}
    assert status == {**dict.fromkeys(STAGES, "reused"), "report": "done"}
    assert len(list((finished[0] / "attempts").iterdir())) == 1 and adapter_sha(finished[0]) == before


def test_another_recipe_in_the_same_folder_is_refused(finished: tuple[Path, Done]) -> None:
    done = run("run", RECIPE, "--run-dir", finished[0], *SHORT, "lora.r=8")
    assert done.code == 2 and "lora.r" in done.err and "another --run-dir" in done.err


def test_from_a_stage_whose_forerunners_are_missing(tmp_path: Path) -> None:
    done = run("run", RECIPE, "--run-dir", tmp_path / "run", "--from", "merge")
    assert done.code == 2 and "not finished in this run: prepare, train, export" in done.err


def stepped(run_dir: Path, attempt: int, step: int) -> Any:
    return lambda: any(e["attempt"] == attempt and e["step"] >= step for e in events(run_dir, "step"))


def kill(run_dir: Path, rank: int, number: signal.Signals) -> Any:
    return lambda _pid: os.kill(rank_pid(run_dir, rank), number)


@pytest.mark.timeout(900)
@pytest.mark.jobs
def test_killed_warned_and_resumed_it_ends_with_the_same_bytes(finished: tuple[Path, Done], tmp_path: Path) -> None:
    """kill -9 of a rank, then a warning to the command, then the same command to the end."""
    folder = tmp_path / "run"
    arguments = ["run", RECIPE, "--run-dir", folder, "--to", "export", *SHORT]
    killed = run_until(stepped(folder, 1, 3), kill(folder, 1, signal.SIGKILL), *arguments)
    assert killed.code == 75
    warned = run_until(stepped(folder, 2, 1), lambda pid: os.kill(pid, signal.SIGUSR1), *arguments)
    assert warned.code == 75 and "stopped on request" in warned.err
    stopped = events(folder, "checkpoint")[-1]
    assert stopped["status"] == "saved" and stopped["step"] == events(folder, "stop")[-1]["step"]
    assert run(*arguments).code == 0
    assert adapter_sha(folder) == adapter_sha(finished[0])


@pytest.mark.jobs
def test_scores_while_training_lose_nothing(finished: tuple[Path, Done], tmp_path: Path) -> None:
    """Killed within the first scores: the same command takes them, and the last weights are those of an undisturbed run."""
    folder = tmp_path / "run"
    words = ["run", RECIPE, "--run-dir", folder, "--to", "export", *SHORT, "eval.during.every=5", "eval.during.limit=2"]

    def scoring() -> bool:
        return any(event["stage"] == "scores" for event in events(folder, "stage"))

    killed = run_until(scoring, lambda pid: os.kill(pid, signal.SIGKILL), *words)
    assert killed.code == -signal.SIGKILL and events(folder, "scores") == []
    done = run(*words)
    assert done.code == 0, done.err
    assert [(event["step"], event["attempt"]) for event in events(folder, "scores")] == [(5, 1), (8, 2)]
    assert events(folder, "start")[-1]["step"] == 5 and [e["step"] for e in events(folder, "eval")] == [0, 3, 6, 8]
    assert adapter_sha(folder) == adapter_sha(finished[0])
    assert not list((folder / "scores").glob("adapter-*"))

    first = folder / "scores" / "step-000005" / "results.json"
    result = json.loads(first.read_text())
    for row in result["paired"]["ifeval"].values():
        row["difference"] = 0.5
    first.write_text(json.dumps(result))
    shutil.rmtree(folder / "adapter")
    best = run(*words, "eval.during.keep=best")
    assert best.code == 0 and "export of step-000005" in best.err
    assert json.loads((folder / "adapter" / "MANIFEST.json").read_text())["meta"]["step"] == 5


@pytest.mark.jobs
def test_weights_that_are_not_finite_stop_before_the_first_step(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "run"
    assert run("run", RECIPE, "--run-dir", folder, "--to", "prepare", *SHORT).code == 0
    model = next((folder / "model").iterdir())
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    (model / manifest.MANIFEST).unlink()
    manifest.seal(model, "model", {})
    done = run("run", RECIPE, "--run-dir", folder, *SHORT)
    assert done.code == 93 and "not finite at step 1" in done.err and "learning_rate" in done.err
    assert store.list_checkpoints(folder / "checkpoints") == []
    assert events(folder, "stop")[-1]["exit_code"] == 93


@pytest.mark.jobs
def test_the_reference_recipe_runs_tiny(tmp_path: Path) -> None:
    """Its own model class, its own distribution file, bf16 mixed precision; 16 ranks become 2."""
    folder = tmp_path / "run"
    done = run("run", "recipes/llama405b-oasst2", "--tiny", "--run-dir", folder, "--json", "train.max_steps=2")
    assert done.code == 0, done.err
    body = json.loads((folder / "run.json").read_text())
    assert body["distributed"]["type"] == "FSDP" and body["distributed"]["dtypes"].keys() == {"bfloat16", "float32"}
    assert body["recipe"]["train_args"]["bf16"] is True and body["recipe"]["tiny"] is True
    adapter = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (32, 64)
    assert sorted(adapter["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_two_commands_in_one_run_folder(finished: tuple[Path, Done]) -> None:

    with RunDir(finished[0]).lock():
        done = run("run", RECIPE, "--run-dir", finished[0], *SHORT)
    assert done.code == 75 and f"process {os.getpid()}" in done.err


def test_the_full_size_is_refused_here_with_the_way_out() -> None:
    done = run("run", "recipes/llama405b-oasst2")
    assert done.code == 2 and "needs 16 GPUs" in done.err and "--tiny" in done.err


def test_other_marks_and_settings_of_the_evaluation_need_no_training(finished: tuple[Path, Done], tmp_path: Path) -> None:
    """A mark that is missed fails the stage; other decoding is evaluated again, beside what was there."""
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    missed = run("run", RECIPE, "--run-dir", folder, *SHORT, "eval.pass_mark.ifeval.prompt_level_strict_acc=0.99", stack=True)
    assert missed.code == 1 and "pass mark is 0.99" in missed.err
    other = run("run", RECIPE, "--run-dir", folder, "--json", *SHORT, "eval.max_gen_toks=4", "eval.limit=3", stack=True)
    assert other.code == 0, other.err
    assert [name for name, stage in other.json["stages"].items() if stage["status"] == "done"] == ["eval", "report"]
    assert json.loads((folder / "eval" / "results.json").read_text())["details"]["ifeval"]["dataset"]["prompts"] == 3
    assert len(list(folder.glob("eval-*/results.json"))) == 1


def test_a_run_is_its_users_alone(finished: tuple[Path, Done]) -> None:
    """Also where the shell's umask lets everybody read: what a run makes and the folder itself."""
    made = [finished[0], *finished[0].rglob("*")]
    assert len(made) > 100
    assert [path for path in made if path.stat().st_mode & 0o077] == []


@pytest.mark.jobs
def test_a_run_folder_that_is_deleted_is_named(tmp_path: Path) -> None:
    """And is not recreated by the save that follows, empty but for a checkpoint."""
    folder = tmp_path / "run"

    def delete(_: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)  # what was written while it was removed

    words = ["run", RECIPE, *SHORT, "train.save_steps=1", "--to", "train", "--run-dir", folder]
    done = run_until(lambda: any(folder.glob("checkpoints/step-*")), delete, *words, stack=True)
    assert done.code == 73, done.err
    assert "the run folder was deleted" in done.err and str(folder) in done.err
    assert not folder.exists()
