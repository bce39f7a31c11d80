"""The launcher's side: which program a node and a rank start, and what the stages before and after the training do."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from clustertune import chain, manifest, rank
from clustertune.errors import ExitCode
from clustertune.launch import node
from clustertune.launch.agent import Agent
from clustertune.launch.plan import AttemptPlan, Node
from clustertune.megatron import inputs, program
from clustertune.process import StopFlag
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir
from clustertune.training.heartbeat import Attempt, Heartbeat
from tests.megatron.standin import Loop


@pytest.fixture
def planned(run: RunDir) -> RunDir:
    """The run with the plan of its first attempt."""
    run.attempt(1).mkdir(parents=True)
    AttemptPlan(1, (Node("here", "127.0.0.1"),), 4, environment={"NCCL_DEBUG": "WARN"}).write(run.attempt(1))
    return run


def test_a_node_starts_the_ranks_by_torchrun(planned: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of any other recipe by accelerate."""
    commands: list[list[str]] = []

    def start(_agent: Agent, command: list[str], **_options: Any) -> ExitCode:
        commands.append(command)
        return ExitCode.OK

    monkeypatch.setattr(Agent, "run", start)
    assert node.main(planned.path, 1, 0, quiet=True) == 0
    resolved = planned.resolved()
    other = replace(resolved, recipe=resolved.recipe.model_copy(update={"megatron": None}))
    planned.update(recipe=other.as_dict(), fingerprint=other.fingerprint())
    assert node.main(planned.path, 1, 0, quiet=True) == 0
    assert [command[2] for command in commands] == ["torch.distributed.run", "accelerate.commands.launch"]
    assert commands[0][commands[0].index("--nproc_per_node") + 1] == "4"


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


def test_the_stage_export_takes_what_the_ranks_exported(run: RunDir, resolved: Resolved, loop: Loop) -> None:
    """The final checkpoint says that there is one; the adapter is checked as every other."""
    final = run.checkpoints / "step-000010"
    final.mkdir(parents=True)
    (final / "recipe.json").write_text("{}")
    manifest.seal(final, "checkpoint", {"step": 10, "final": True})
    out = inputs.exported(run.path)
    out.mkdir(parents=True)
    save_file(loop.adapter, out / "adapter_model.safetensors")
    (out / "recipe.json").write_text(json.dumps(resolved.as_dict()))
    manifest.seal(out, "checkpoint", {"step": 10, "final": True})
    found = chain.Chain(run, resolved).export()
    assert found["summary"]["tensors"] == len(loop.adapter) and not manifest.find_problems(run.adapter, "adapter")


def test_the_stage_prepare_makes_the_inputs(run: RunDir, resolved: Resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Path, tuple[str, str | None]]] = []

    def make(_resolved: Resolved, run_path: Path, _prepared: Path, source: tuple[str, str | None]) -> dict[str, int]:
        made.append((run_path, source))
        return {}

    counts = {"conversations": 1}
    monkeypatch.setattr("clustertune.data.prepare.prepare", lambda *_a, **_k: {"train": counts, "eval": counts})
    monkeypatch.setattr(inputs, "make", make)
    chain.Chain(run, resolved).prepare()
    assert made == [(run.path, (resolved.recipe.model.name, resolved.recipe.model.revision))]
