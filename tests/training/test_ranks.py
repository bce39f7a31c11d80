"""Ranks that no launcher of ours started: the fence, the world that is not all there, and what they leave behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clustertune.launch.attempt import AttemptPlan, Node
from tests.command import events
from tests.training.benches import distributed, problems
from tests.training.forked import Forge, around

pytestmark = pytest.mark.timeout(900)


def followed() -> None:
    """Another attempt takes over while the second step is computed."""
    from clustertune.training.trainer import RankTrainer

    def take_over(self: Any, *_: Any) -> None:
        if self.state.global_step == 1:
            Path(self.args.output_dir, "attempts/0002").mkdir(exist_ok=True)

    around(RankTrainer, "training_step", take_over)


def test_an_attempt_that_was_followed_writes_nothing_more_and_ends_with_75(forge: Forge, fresh: Path) -> None:
    """Split brain: the ranks of a node that was cut off continue while the scheduler has given their run to others."""
    assert forge.run(fresh, 2, breaks=f"{__name__}:followed") == [75, 75]
    assert [event["step"] for event in events(fresh, "step")] == [1] and not events(fresh, "stop")
    assert not list(fresh.glob("checkpoints/*")), "the second step is not saved"
    assert "attempt 2 has taken over from attempt 1" in problems(fresh)[0]["message"]


def test_an_attempt_that_comes_late_does_not_begin(forge: Forge, fresh: Path) -> None:
    (fresh / "attempts" / "0002").mkdir(parents=True)
    assert forge.run(fresh, 2) == [75, 75]
    assert not events(fresh, "start")


def test_a_world_that_is_not_all_there_is_told_before_the_model_is_loaded(forge: Forge, fresh: Path) -> None:
    (next((fresh / "model").iterdir()) / "model.safetensors").unlink()
    assert forge.run(fresh, 1) == [1]
    assert "sees a world of 1, the run is for 2" in problems(fresh)[0]["message"]


@pytest.mark.jobs
def test_a_rank_follows_the_plan_of_its_attempt_and_leaves_a_record(forge: Forge, fresh: Path) -> None:
    """And the accelerate file: without accelerate's variables the Trainer would fall back to plain data parallelism."""
    variable = "TORCH_SHOW_CPP_STACKTRACES"
    plan = AttemptPlan(attempt=1, nodes=(Node("here", "localhost"),), ranks_per_node=2, environment={variable: "0"})
    records = fresh / "attempts" / "0001"
    records.mkdir(parents=True)
    plan.write(records)
    assert forge.run(fresh, 2, environment={variable: "1"}) == [0, 0]
    found = distributed(fresh)
    assert (found["type"], found["fsdp_version"], found["world_size"]) == ("FSDP", 2, 2) and found["sharded_share"] < 0.6
    assert any("accelerate.yaml was applied here" in note for note in found["notes"])
    assert any(note.startswith(f"{variable}=0 by the plan") for note in found["notes"])
    record = json.loads((records / "rank-1.json").read_bytes())
    assert (record["code"], record["step"], record["host"]) == (0, 4, os.uname().nodename)
    count, phase, step = (records / "rank-1.heartbeat").read_text().split()
    assert int(count) > 8 and (phase, step) == ("end", "4")
