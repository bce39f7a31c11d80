"""Servers beside the trainer score checkpoints while the training goes on: it never ends for them, nor changes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from clustertune import chain
from clustertune.chain import Chain, open_run
from clustertune.errors import UserError
from clustertune.resolve.resolve import resolve
from clustertune.rundir import RunDir
from tests.command import events, run
from tests.serving.conftest import alive, gone
from tests.serving.test_rollout_kills import WORDS, begin, servers, trained
from tests.slurm import wait_for

SCORED = ["eval.during={every: 8, tasks: [ifeval], limit: 4, keep: best}", "eval.max_gen_toks=8", "train.save_total_limit=1"]
PLAIN = [
    "--ranks", "1", "train.save_steps=4", "train.report_to=none", "train.eval_strategy=no", "train.eval_on_start=false",
    "data.limit=40",
]  # fmt: skip
KINDS = {
    "sft": (["run", "recipes/tiny-oasst2", *PLAIN], ["servers.nodes=1"], 80),
    "dpo": (["run", "recipes/tiny-dpo", *PLAIN], ["servers.nodes=1"], 60),
    "grpo": (WORDS, [], 40),
}
"""Of each trainer the command, what it takes to be scored by servers, and steps: enough to go on while a score is taken."""


@pytest.mark.jobs
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_taken_while_the_training_goes_on(tmp_path: Path, kind: str) -> None:
    """The first of them with a server that is killed meanwhile."""
    plain, folder, pids = tmp_path / "plain", tmp_path / "scored", tmp_path / "pids"
    words, served, steps = KINDS[kind]
    child = begin(folder, pids, steps, "--to", "export", *served, *SCORED, words=words)
    wait_for(lambda: [event for event in events(folder, "stage") if event["stage"] == "scores"], "the first scores", 600)
    assert "training" in run("watch", folder, "--once").err
    os.kill(alive(servers(pids))[-1], signal.SIGKILL)
    assert child.wait() == 0, (tmp_path / "scored.log").read_text()[-3000:]

    scored = events(folder, "scores")
    assert len(scored) > 1 and scored[-1]["step"] == steps and all(event["beside"] for event in scored)
    assert len(events(folder, "start")) == 1 and is_training_on(folder)
    assert not list((folder / "scores").glob("adapter-*")) and gone(servers(pids))
    best = max(scored, key=lambda event: (event["difference"], event["step"]))
    assert json.loads((folder / "adapter" / "MANIFEST.json").read_text())["meta"]["step"] == best["step"]
    assert begin(plain, tmp_path / "plain-pids", steps, "--to", "train", words=words).wait() == 0
    assert trained(folder) == trained(plain)


def is_training_on(folder: Path) -> bool:
    """A step was taken while a checkpoint was scored."""
    scored = [(event["time"] - event["seconds"], event["time"]) for event in events(folder, "scores")]
    return any(begun < event["time"] < ended for begun, ended in scored for event in events(folder, "step"))


def test_the_ranks_read_who_scores_from_now_on(tmp_path: Path) -> None:
    """A run that stopped for its scores goes on with servers, and one without scores with some."""
    for settings in ([], ["eval.during.every=4"], ["eval.during.every=4", "servers.nodes=1"]):
        asked = resolve("tiny-oasst2", settings)
        found = open_run(asked, tmp_path / "run", []).resolved().recipe
        assert (found.eval.during, found.servers) == (asked.recipe.eval.during, asked.recipe.servers)


@pytest.mark.parametrize(
    ("gpus", "each", "text"),
    [
        (2, 1, "2 ranks leave 0, and a server takes 1"),
        (3, 2, "2 ranks leave 1, and a server takes 2"),
        (0, 1, "vLLM is not installed here"),
    ],
)
def test_servers_that_this_machine_cannot_start_are_refused_before_a_stage_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, each: int, text: str
) -> None:
    monkeypatch.setattr(chain, "visible_gpus", lambda: gpus)
    monkeypatch.setenv("CLUSTERTUNE_VLLM", str(tmp_path / "none"))
    asked = resolve("tiny-oasst2", [f"servers.tensor_parallel_size={each}", "eval.during.every=4"])
    with pytest.raises(UserError, match=text) as caught:
        Chain(RunDir(tmp_path), asked).go()
    assert caught.value.problems[0].key == "servers" and not list(tmp_path.iterdir())
