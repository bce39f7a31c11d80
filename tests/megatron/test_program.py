"""The program of a Megatron rank, its inputs and what starts it, against stand-ins that take NVIDIA's recorded names only."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clustertune import manifest, rank
from clustertune.checkpoint import store
from clustertune.data.local_model import make_local_model
from clustertune.errors import ExitCode, UserError
from clustertune.export.export import export
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.megatron import megatron_files, program, settings
from clustertune.megatron.bridge import Bridge
from clustertune.process import StopFlag
from clustertune.report.metrics import read_metrics
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir
from clustertune.training.event_log import Attempt, Heartbeat
from tests.megatron.conftest import SMALL
from tests.megatron.standin import Loop

GIVEN = "of the user"


class OneRank(Bridge):
    """Without a process group, which needs GPUs."""

    fetched: Path | None = None
    seen: str | None = None

    def start(self, timeout: Any) -> None:
        """Nothing to set up."""

    def fetch(self, name: str, revision: str | None) -> Path:
        OneRank.seen = os.environ.get("HF_TOKEN")
        if OneRank.fetched is None:
            raise OSError("no way to the Hub")
        return OneRank.fetched


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One process: what the last rank has is what this one has."""
    monkeypatch.setattr("clustertune.megatron.bridge.from_last", lambda value: None if value is None else float(value))
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 123)
    monkeypatch.setattr(OneRank, "fetched", tmp_path)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)


def go(
    run: RunDir, resolved: Resolved, number: int = 1, stop: StopFlag | None = None, fence: Callable[[], None] = lambda: None
) -> tuple[ExitCode, str]:
    """One attempt; its exit code and what people saw."""
    out, stop = io.StringIO(), stop or StopFlag()
    run.attempt(number).mkdir(parents=True, exist_ok=True)
    megatron_files._write_data(run.data, megatron_files.paths(run.path)["data"])
    source, tokens = ("hub/base", "c" * 40), {"HF_TOKEN": GIVEN, "WANDB_API_KEY": "w"}
    attempt = Attempt(run, resolved, number, stop, Heartbeat(), fence, out, source, [], tokens)
    bridge = OneRank.load(attempt.source, resolved.recipe.model.name)
    return program.train(attempt, bridge), out.getvalue()


def test_a_run_to_its_end(run: RunDir, resolved: Resolved, loop: Loop, tmp_path: Path) -> None:
    """Converted once, cut as the training is (no rank holds more than it trains), saved under our names with our manifests,
    exported, final; metrics as every other run has them. The stage after it checks names, shapes and values of the adapter
    against what PEFT expects of the recipe. A second attempt does nothing.
    """
    code, output = go(run, resolved)
    assert code is ExitCode.OK, output
    paths = [checkpoint.path for checkpoint in store.list_checkpoints(run.checkpoints)]
    found = [(path.name, store.verify(path), manifest.read_manifest(path).meta["final"]) for path in paths]
    assert found == [("step-000010", [], True), ("step-000008", [], False), ("step-000004", [], False)]
    metrics = read_metrics(run.metrics)
    steps = [(s.step, s.loss, s.learning_rate, s.grad_norm) for s in metrics.steps]
    assert steps[:2] == [(1, 4.0, 0.5, 2.0), (2, 2.0, 0.5, 2.0)]
    assert len(metrics.steps) == 10 and [e.step for e in metrics.evals] == [5, 10] and metrics.attempts[0].exit_code == 0
    assert metrics.steps[0].memory_bytes == 123 and metrics.steps[-1].tokens == 10 * 4 * 2048
    plan = json.loads((run.attempt(1) / settings.PLAN_FILE).read_bytes())
    assert plan["sequences"] == {"train": 40, "eval": 8} and plan["configuration"]["train"]["train_iters"] == 10
    made = loop.called("finalize")[0]
    assert (made["tensor_model_parallel_size"], made["pipeline_model_parallel_size"]) == (8, 2)
    assert made["params_dtype"] == made["pipeline_dtype"] and str(made["params_dtype"]) == "torch.bfloat16"
    assert loop.called("from_hf_pretrained")[0] == (str(OneRank.fetched), {"torch_dtype": torch.bfloat16})
    assert loop.called("destroy"), "the training makes its groups again"
    peft = loop.config.peft
    assert peft.target_modules == ["linear_q", "linear_k", "linear_v", "linear_proj"] and peft.dim == 32 and peft.alpha == 64
    assert int(loop.config.train.exit_signal) == 10, "SIGUSR1, which the launcher sends"
    assert loop.config.model.pipeline_dtype is not None
    assert loop.config.checkpoint.pretrained_checkpoint.endswith("megatron/base")
    summary = export(megatron_files.exported(run.path), tmp_path / "adapter")
    assert summary["step"] == 10 and summary["tensors"] == len(loop.adapter)
    assert manifest.find_problems(tmp_path / "adapter", "adapter") == []
    before = len(loop.calls)
    code, output = go(run, resolved, 2)
    assert code is ExitCode.OK and "nothing is left to train" in output and len(loop.calls) == before


def test_a_signal_saves_and_the_next_attempt_goes_on(run: RunDir, resolved: Resolved, loop: Loop) -> None:
    """As the launcher's other runs: exit 75 with a whole checkpoint, and the same losses after it as without the stop."""
    loop.stop_at = 6
    code, output = go(run, resolved)
    assert code is ExitCode.AGAIN and "stopped at step 6 as asked" in output
    newest, _ = store.newest_whole(run.checkpoints)
    assert newest is not None and newest.path.name == "step-000006"
    loop.stop_at = None
    loop.losses.clear()
    code, output = go(run, resolved, 2)
    assert code is ExitCode.OK and "resume from step-000006" in output and min(loop.losses) == 7
    assert loop.config.checkpoint.load == str(run.checkpoints / "step-000006")
    assert [c.path.name for c in store.list_checkpoints(run.checkpoints)] == ["step-000010.a2", "step-000008.a2", "step-000006"]
    assert len(loop.called("save_megatron_model")) == 1, "the base is converted once in a run"


def test_a_broken_checkpoint_is_passed_over(run: RunDir, resolved: Resolved, loop: Loop) -> None:
    loop.fail_at = 9
    with pytest.raises(RuntimeError):
        go(run, resolved)
    (run.checkpoints / "step-000008" / "iter_0000008" / "__0_0.distcp").write_bytes(b"other bytes")
    loop.fail_at = None
    code, output = go(run, resolved, 2)
    assert code is ExitCode.OK and "step-000008 is incomplete or damaged" in output and "resume from step-000004" in output


@pytest.mark.parametrize("every", [4, 5])
def test_a_failed_export_costs_no_step(run: RunDir, resolved: Resolved, loop: Loop, every: int) -> None:
    """The last checkpoint is whole, and is the final one only once what it holds is exported. With a save at the last step
    itself NVIDIA's loop does not save again.
    """
    resolved = replace(resolved, train_args={**resolved.train_args, "save_steps": every})
    loop.fail_export = True
    with pytest.raises(RuntimeError):
        go(run, resolved)
    newest, _ = store.newest_whole(run.checkpoints)
    assert newest is not None and newest.step == 10 and not manifest.read_manifest(newest.path).meta["final"]
    loop.fail_export = False
    loop.losses.clear()
    code, _ = go(run, resolved, 2)
    assert code is ExitCode.OK and not loop.losses
    newest, _ = store.newest_whole(run.checkpoints)
    assert newest is not None and manifest.read_manifest(newest.path).meta["final"]


def test_the_hub_is_asked_by_rank_0_with_the_token(run: RunDir, resolved: Resolved, loop: Loop) -> None:
    """And by nobody else: all ranks read the folder. The token is in the environment no longer than that."""
    go(run, resolved)
    assert OneRank.seen == GIVEN and "HF_TOKEN" not in os.environ
    OneRank.fetched = None
    shutil.rmtree(run.checkpoints)  # nothing is trained yet
    with pytest.raises(UserError, match="cannot be loaded: OSError: no way to the Hub"):
        go(run, resolved, 2)


def test_a_base_of_another_revision_is_converted_anew(run: RunDir, resolved: Resolved, loop: Loop) -> None:
    go(run, resolved)
    base = megatron_files.paths(run.path)["base"]
    manifest.seal(base, program.BASE_KIND, {"source": {"model": "other", "revision": None}})
    shutil.rmtree(run.checkpoints)
    go(run, resolved, 2)
    assert len(loop.called("save_megatron_model")) == 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder with a tokenizer."""
    texts = [f"word{n} and more words of it" for n in range(200)]
    make_local_model({**SMALL, "vocab_size": 512}, texts, tmp_path / "model", 1)
    return tmp_path / "model"


def test_conversations_and_tokenizer(run: RunDir, resolved: Resolved, model: Path) -> None:
    """Of a row the messages alone; the tokenizer masks what the user said, by its own template; whole folders are kept."""
    from transformers import AutoTokenizer

    counts = megatron_files.make(resolved, run.path, run.data, (str(model), None))
    assert counts == {"train": 1, "eval": 1}
    where = megatron_files.paths(run.path)
    assert [set(json.loads(line)) for line in (where["data"] / "training.jsonl").open()] == [{"messages"}]
    assert (where["data"] / "validation.jsonl").is_file()
    tokenizer: Any = AutoTokenizer.from_pretrained(where["tokenizer"])
    talk = [{"role": "user", "content": "word1"}, {"role": "assistant", "content": "more words"}]
    found = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    learnt = [token for token, mask in zip(found["input_ids"], found["assistant_masks"], strict=True) if mask]
    assert "more words" in tokenizer.decode(learnt) and "word1" not in tokenizer.decode(learnt)
    before = {path: path.stat().st_mtime_ns for path in where["data"].parent.rglob("*") if path.is_file()}
    (where["data"] / "training.jsonl.idx.npy").write_bytes(b"an index that Bridge puts beside it")
    megatron_files.make(resolved, run.path, run.data, (str(model), None))
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())


@pytest.fixture
def planned(run: RunDir) -> RunDir:
    """The run with the plan of its first attempt."""
    run.attempt(1).mkdir(parents=True)
    AttemptPlan(1, (Node("here", "127.0.0.1"),), 4, environment={"NCCL_DEBUG": "WARN"}).write(run.attempt(1))
    return run


def test_a_rank_runs_the_program(planned: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its signals, its fence, the base model and the tokens."""
    given: list[Attempt] = []

    def train(attempt: Attempt) -> ExitCode:
        given.append(attempt)
        return ExitCode.AGAIN

    monkeypatch.setattr(program, "train", train)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("HF_TOKEN", "of the user")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    stop = StopFlag()
    assert rank.train(planned, 1, stop, Heartbeat(), io.StringIO()) is ExitCode.AGAIN
    (attempt,) = given
    assert attempt.stop is stop and attempt.tokens == {"HF_TOKEN": "of the user"} and attempt.number == 1
    assert attempt.source == (attempt.resolved.recipe.model.name, attempt.resolved.recipe.model.revision)
    assert attempt.notes == ["NCCL_DEBUG=WARN by the plan of this attempt; it was INFO in the environment"]
    attempt.fence()
    RunDir(planned.path).new_attempt()
