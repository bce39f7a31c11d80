"""Rounds in turn, what a failing peer does, and the document that comes of it, with ranks that cost nothing."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertune import chain
from clustertune.bench import drive, page, peer, preparation, result
from clustertune.bench.preparation import BenchRequest
from clustertune.cluster.load import load_cluster
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch.judge import Outcome
from clustertune.launch.plan import AttemptPlan
from clustertune.training.bench_schedule import GONE, BenchSchedule, read, result_file

PEER = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1]).parent
told = json.loads((folder / "settings.json").read_text())
assert told["schedule"]["steps"] == 3 and told["max_length"] == 256 and told["lora"]["r"] == 16
if sys.argv[2:]:  # in turn with ours
    assert told["schedule"]["turns"] == str(folder / "turns") and told["schedule"]["profiled"] == 0
    assert (told["sft"] is None) == ("defaults" in sys.argv[2])
for rank in range(2):
    steps = [{"seconds": 2.0, "tokens": 100, "computed": 100, "labelled": 100}] * 3
    body = {"steps": steps, "peak": {"rss": 1 << 30}, "distributed": "MULTI_CPU"}
    (folder / f"bench-rank-{rank}.json").write_text(json.dumps(body))
"""
FAILING = """
import pathlib, sys
pathlib.Path(sys.argv[1]).with_name("node-0.log.txt").write_text("x\\ntorch.OutOfMemoryError: CUDA out of memory\\nbye\\n")
sys.exit(3)
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was run, in order; the stages and the ranks of this project are replaced by ones that only leave their files."""
    seen: list[str] = []

    def stage(self: chain.Chain, name: str) -> None:
        seen.append(name)
        self.run.finish_stage(name, 1.0)

    def attempt(self: chain.Chain, plan: AttemptPlan) -> Outcome:
        seen.append("ours")
        assert not self.run.checkpoints.exists(), "a round resumes from no other one's checkpoint"
        assert read(self.run.path) == BenchSchedule(1, 3, 1)
        self.run.checkpoints.mkdir()
        for rank in range(plan.world_size):
            steps = [{"seconds": 1.0, "tokens": 90, "computed": 100, "labelled": 50}] * 3
            facts = {"rows": 83, "device": None, "to_first_step_s": 5.0, "warmup": [{"seconds": 4.0}], "threads": 1}
            body = {"steps": steps, "peak": {"rss": 1 << 30}, "torch": "2", **facts}
            result_file(self.run.attempt(plan.attempt), rank).write_text(json.dumps(body))
        events = [("eval", 3.0), ("checkpoint", 2.0), ("startup", 7.0)]
        with self.run.metrics.open("a") as out:
            for event, seconds in events:
                line = {"event": event, "part": "imports", "seconds": seconds, "attempt": plan.attempt}
                out.write(json.dumps(line) + "\n")
        self.run.update(distributed={"type": "FSDP", "fsdp_version": 2, "mesh": {"dp_shard": 2}, "device": "cpu"})
        return Outcome(ExitCode.OK)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(chain.Chain, "run_stage", stage)
    monkeypatch.setattr(chain.Chain, "run_attempt", attempt)
    return seen


def made(tmp_path: Path, **more: Any) -> preparation.Bench:
    wanted = {"schedule": BenchSchedule(1, 3, 1), "rounds": 2, "against": ("trl",), **more}
    return preparation.make(BenchRequest("tiny-oasst2", tmp_path / "run", **wanted))


def against(program: str, seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def command(_made: Any, order: Path, _plan: AttemptPlan) -> list[str]:
        seen.append("theirs")
        return [sys.executable, "-c", program, str(order)]

    monkeypatch.setattr(drive, "_on_nodes", command)


def test_rounds_alternate(tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, theirs, ours, theirs: a machine that slows down slows both, and data is prepared once."""
    against(PEER, calls, monkeypatch)
    bench = made(tmp_path)
    found = drive.measure(bench, ["clustertune", "bench"])
    assert calls == ["prepare", "ours", "theirs", "ours", "theirs"] and found.peers[0].failed is None
    body = result.document(bench, found, load_cluster("local"))
    (one,) = body["peers"]
    assert one["ratio"]["tokens_per_s"] == pytest.approx(0.9 * 2) and body["ours"]["rounds"] == 2
    assert one["peer"] == "trl" and one["pairs"]["wall"] == {"median": 0.5, "low": 0.5, "high": 0.5, "n": 6}
    assert body["ends"] == {"evaluation_s": 3.0, "checkpoint_s": 2.0, "checkpoint_gb": None}
    assert body["startup_s"] == {"imports": 7.0} and body["projection"]["steps"] == 42
    # 42 steps of 1 s, 9 evaluations (every 5 and one before) of 3 s, 9 checkpoints of 2 s, 5 s of start-up.
    assert body["projection"]["hours"] == pytest.approx((42 + 10 * 3 + 9 * 2 + 5) / 3600)
    notes = "\n".join(body["notes"])
    assert "MULTI_CPU, this project as FSDP" in notes and "no GPU" in notes
    assert json.loads(result.recipe_text(bench))["folder"] == "recipes/tiny-oasst2", "no path of this machine is published"
    assert body["resolved"]["sha256"] == hashlib.sha256(result.recipe_text(bench).encode()).hexdigest()
    assert "| tokens/s per rank | 90 | 50 | 1.8 |" in page.render(body, "x.json")


def test_a_peer_that_fails_is_told_and_not_tried_again(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's defaults may not fit where the recipe does: that is a result, not an end."""
    against(FAILING, calls, monkeypatch)
    bench = made(tmp_path)
    found = drive.measure(bench, ["clustertune", "bench"])
    assert calls == ["prepare", "ours", "theirs", "ours"]
    failed = found.peers[0].failed
    assert failed is not None and "torch.OutOfMemoryError: CUDA out of memory" in failed and "exit code 3" in failed
    body = result.document(bench, found, load_cluster("local"))
    assert body["peers"][0]["measured"] is None and any("peer ended without a result" in note for note in body["notes"])


def test_our_own_failure_ends_it(tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a benchmark is none: the rank's own words are the command's."""
    outcome = Outcome(ExitCode.STOP, [Problem("not finite at step 2")])
    monkeypatch.setattr(chain.Chain, "run_attempt", lambda _self, _plan: outcome)
    with pytest.raises(UserError) as caught:
        drive.measure(made(tmp_path, against=()), ["clustertune", "bench"])
    assert caught.value.code is ExitCode.STOP and calls == ["prepare"]


def test_an_epoch_that_ends_between_the_steps_is_said(tmp_path: Path, calls: list[str]) -> None:
    """83 sequences are 20 steps of 4 and one of 3, which is faster than the others."""
    bench = made(tmp_path, against=(), rounds=1, schedule=BenchSchedule(1, 3, 1))
    found = drive.measure(bench, ["clustertune", "bench"])
    assert not any("smaller than the others" in note for note in result.document(bench, found, load_cluster("local"))["notes"])
    longer = replace(bench, request=replace(bench.request, schedule=BenchSchedule(20, 3, 1)))
    notes = result.document(longer, found, load_cluster("local"))["notes"]
    assert any("83 sequences are fewer than the steps take" in note for note in notes)
    assert calls == ["prepare", "ours"]


def test_two_peers_each_in_turn_with_ours(tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round of each peer has one of ours beside it, which knows the folder of the turns; both stand in the headline."""
    seen: list[str | None] = []
    words = iter(["trl", "trl-defaults"])
    attempt = chain.Chain.run_attempt

    def command(_made: Any, order: Path, _plan: AttemptPlan) -> list[str]:
        return [sys.executable, "-c", PEER, str(order), next(words)]

    def watched(self: chain.Chain, plan: AttemptPlan) -> Outcome:
        schedule = read(self.run.path)
        assert schedule is not None and schedule.turns is not None and Path(schedule.turns).is_dir()
        seen.append(schedule.turns)
        replace(schedule, turns=None).write(self.run.path)
        return attempt(self, plan)

    monkeypatch.setattr(drive, "_on_nodes", command)
    monkeypatch.setattr(chain.Chain, "run_attempt", watched)
    bench = made(tmp_path, against=("trl", "trl-defaults"), rounds=1, interleave=True)
    found = drive.measure(bench, ["clustertune", "bench"])
    assert [one.failed for one in found.peers] == [None, None] and len(set(seen)) == 2
    assert all(Path(turns, "0").read_text() == str(GONE) for turns in seen if turns)
    body = result.document(bench, found, load_cluster("local"))
    text = page.render(body, "x.json")
    for word in ("trl", "trl-defaults"):
        assert f"over {word}: 0.500 (too few pairs for an interval, 3 pairs)" in text


def test_why_a_peer_ended(tmp_path: Path) -> None:
    """The launcher's own traceback comes last and says nothing: the line that names the error counts."""
    assert peer.why(tmp_path) == "it left no message"
    log = tmp_path / "node-0.log.txt"
    log.write_text(
        "starting\nValueError: bad batch\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\n"
    )
    assert peer.why(tmp_path) == "ValueError: bad batch"
    log.write_text("one\ntwo\n")
    assert peer.why(tmp_path) == "two"
