"""Ranks as other launchers start them: the fence, the world that is not all there, and the last evaluation made up."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from clustertune import manifest
from clustertune.launch.plan import AttemptPlan, Node
from tests.command import events
from tests.training.conftest import ACCELERATE, TORCHRUN, Ranks

pytestmark = pytest.mark.timeout(900)


def manifests(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in (folder / "checkpoints").glob(f"*/{manifest.MANIFEST}"))


def test_an_attempt_that_was_followed_writes_nothing_more_and_ends_with_75(fresh: Path) -> None:
    """Split brain: the ranks of a node that was cut off continue while the scheduler has given their run to others."""
    ranks = Ranks(fresh, 1, ACCELERATE)
    assert ranks.until(lambda: events(fresh, "step")), ranks.end()
    (fresh / "attempts" / "0002").mkdir()
    time.sleep(0.05)  # a line whose fence was asked just before
    before = [(fresh / name).read_bytes() for name in ("metrics.jsonl", "run.json")]
    left = manifests(fresh)
    assert len(left) < 2, "the run was over before the other attempt began"
    ranks.end()
    assert [(fresh / name).read_bytes() for name in ("metrics.jsonl", "run.json")] == before
    assert manifests(fresh) == left
    assert [ranks.record(rank)["code"] for rank in (0, 1)] == [75, 75]
    assert "attempt 2 has taken over from attempt 1" in ranks.record(0)["problems"][0]["message"]


def test_an_attempt_that_comes_late_does_not_begin(fresh: Path) -> None:
    (fresh / "attempts" / "0002").mkdir(parents=True)
    ranks = Ranks(fresh, 1, ACCELERATE)
    ranks.end()
    left = [rank for rank in (0, 1) if (fresh / f"attempts/0001/rank-{rank}.json").is_file()]
    # The launcher ends a rank that is still on its way as soon as the other has gone.
    assert left and {ranks.record(rank)["code"] for rank in left} == {75}
    assert not events(fresh, "start") and not (fresh / "wandb").exists()


@pytest.mark.jobs
def test_torchrun_alone_shards_as_accelerate_launch_does(fresh: Path) -> None:
    """Without accelerate's variables the Trainer would fall back to plain data parallelism."""
    plan = AttemptPlan(
        attempt=1, nodes=(Node("here", "localhost"),), ranks_per_node=2, environment={"TORCH_SHOW_CPP_STACKTRACES": "0"}
    )
    (fresh / "attempts" / "0001").mkdir(parents=True)
    plan.write(fresh / "attempts" / "0001")
    ranks = Ranks(fresh, 1, TORCHRUN, TORCH_SHOW_CPP_STACKTRACES="1")
    output = ranks.end()
    assert ranks.record(0)["code"] == ranks.record(1)["code"] == 0, output
    found = json.loads((fresh / "run.json").read_text())["distributed"]
    assert (found["type"], found["fsdp_version"], found["world_size"]) == ("FSDP", 2, 2) and found["sharded_share"] < 0.6
    assert any("accelerate.yaml was applied here" in note for note in found["notes"])
    assert any(note.startswith("TORCH_SHOW_CPP_STACKTRACES=0 by the plan") for note in found["notes"])
    assert ranks.record(1)["step"] == 4 and ranks.record(1)["host"] == os.uname().nodename
    count, phase, step = (ranks.records / "rank-1.heartbeat").read_text().split()
    assert int(count) > 8 and (phase, step) == ("end", "4")


def test_a_world_that_is_not_all_there_is_told_before_the_model_is_loaded(fresh: Path) -> None:
    (next((fresh / "model").iterdir()) / "model.safetensors").unlink()
    ranks = Ranks(fresh, 1, TORCHRUN, count=1)
    ranks.end()
    record = ranks.record(0)
    assert record["code"] == 1 and "sees a world of 1, the run is for 2" in record["problems"][0]["message"]


def final(folder: Path) -> dict[str, dict[str, Any]]:
    return {name: dict(manifest.read_manifest(folder / "checkpoints" / name).meta) for name in manifests(folder)}


@pytest.mark.jobs
def test_an_evaluation_that_the_last_step_s_stop_left_out_is_made_up(fresh: Path) -> None:
    """Else the run has no final loss. No step is taken for it, and the weights stay what they were."""
    ranks = Ranks(fresh, 1, ACCELERATE)
    assert ranks.until(lambda: any(e["step"] == 3 for e in events(fresh, "step"))), ranks.end()
    os.kill(int((ranks.records / "rank-1.pid").read_text()), signal.SIGUSR1)
    ranks.end()
    before = final(fresh)["step-000004"]
    assert (ranks.record(0)["code"], before["final"], before["eval_skipped"]) == (75, False, True)
    again = Ranks(fresh, 2, ACCELERATE)
    output = again.end()
    assert [name for name in final(fresh) if name.startswith("step-000004")] == ["step-000004"], "saved once"
    assert manifest.find_problems(fresh / "checkpoints/step-000004") == []
    after = final(fresh)["step-000004"]
    assert (again.record(0)["code"], after["final"], after["eval_skipped"]) == (0, True, False), output
    assert after["state_digests"] == before["state_digests"]
    assert [e["step"] for e in events(fresh, "step")] == [1, 2, 3, 4]
    assert [(e["step"], e["attempt"]) for e in events(fresh, "eval")] == [(0, 1), (2, 1), (4, 2)]
    assert events(fresh, "stop")[-1]["reason"] == "finished"
