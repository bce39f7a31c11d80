"""The servers of answers score checkpoints while the training goes on: it never ends for them, nor changes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.command import events, run
from tests.serving.conftest import alive, gone
from tests.serving.test_rollout_kills import begin, servers, trained
from tests.slurm import wait_for

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]
SCORED = ["eval.during={every: 8, tasks: [ifeval], limit: 4, keep: best}", "eval.max_gen_toks=8", "train.save_total_limit=1"]


def is_training_on(folder: Path) -> bool:
    """A step was taken while a checkpoint was scored."""
    scored = [(event["time"] - event["seconds"], event["time"]) for event in events(folder, "scores")]
    return any(begun < event["time"] < ended for begun, ended in scored for event in events(folder, "step"))


def test_scores_are_taken_while_the_training_goes_on(tmp_path: Path) -> None:
    """The first of them with a server that is killed meanwhile."""
    plain, folder, pids = tmp_path / "plain", tmp_path / "scored", tmp_path / "pids"
    child = begin(folder, pids, 40, "--to", "export", *SCORED)
    wait_for(lambda: [event for event in events(folder, "stage") if event["stage"] == "scores"], "the first scores", 600)
    assert "training" in run("watch", folder, "--once").err
    os.kill(alive(servers(pids))[-1], signal.SIGKILL)
    assert child.wait() == 0, (tmp_path / "scored.log").read_text()[-3000:]

    scored = events(folder, "scores")
    assert len(scored) > 1 and scored[-1]["step"] == 40 and all(event["beside"] for event in scored)
    assert len(events(folder, "start")) == 1 and is_training_on(folder)
    assert not list((folder / "scores").glob("adapter-*")) and gone(servers(pids))
    best = max(scored, key=lambda event: (event["difference"], event["step"]))
    assert json.loads((folder / "adapter" / "MANIFEST.json").read_text())["meta"]["step"] == best["step"]
    assert begin(plain, tmp_path / "plain-pids", 40).wait() == 0
    assert trained(folder) == trained(plain)
