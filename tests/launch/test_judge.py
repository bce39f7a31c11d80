"""How an attempt ended, judged from what each rank and each node left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import ExitCode
from clustertune.launch import judge as room
from clustertune.launch.judge import Outcome, judge
from clustertune.launch.plan import AttemptPlan, Node

NAMES = ("gpu-a", "gpu-b")


def plan(ranks: int, nodes: int = 1) -> AttemptPlan:
    return AttemptPlan(attempt=1, nodes=tuple(Node(name, name) for name in NAMES[:nodes]), ranks_per_node=ranks // nodes)


def leave(folder: Path, rank: int, code: int, at: float = 1.0, message: str = "why") -> None:
    problems: list[dict[str, Any]] = [{"message": message, "file": None, "key": None, "fix": None}] if code else []
    (folder / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "code": code, "time": at, "problems": problems}))


def leave_node(folder: Path, node: int, code: int = 0, launcher: int = 0, message: str = "", asked: bool = False) -> None:
    problems = [{"message": message, "file": None, "key": None, "fix": None}] if message else []
    body = {"node": node, "code": code, "launcher": launcher, "asked": ["SIGUSR1"] if asked else [], "problems": problems}
    (folder / f"node-{node}.json").write_text(json.dumps(body))


def root_cause(folder: Path, node: int, rank: int, exitcode: int) -> None:
    """As torch's launcher words it."""
    (folder / f"node-{node}.log").write_text(
        "Failures:\n  <NO_OTHER_FAILURES>\n------\nRoot Cause (first observed failure):\n[0]:\n  time      : now\n"
        f"  host      : x\n  rank      : {rank} (local_rank: 1)\n  exitcode  : {exitcode} (pid: 7)\n"
    )


def test_all_well(tmp_path: Path) -> None:
    for rank in (0, 1):
        leave(tmp_path, rank, 0)
    assert judge(tmp_path, plan(2)) == Outcome(ExitCode.OK)


def test_a_rank_without_a_record_was_killed_and_the_job_may_go_on(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").touch()
    leave(tmp_path, 0, 1, message="connection closed by peer")
    outcome = judge(tmp_path, plan(2))
    assert outcome.code is ExitCode.AGAIN and "rank 1 ended without a word" in str(outcome.problems[0])


def test_the_first_to_fail_is_named(tmp_path: Path) -> None:
    leave(tmp_path, 0, 1, at=5.0, message="connection closed by peer")
    leave(tmp_path, 1, 1, at=2.0, message="KeyError: 'x'")
    outcome = judge(tmp_path, plan(2))
    assert outcome.code is ExitCode.FAILED and "rank 1 failed first: KeyError" in str(outcome.problems[0])


@pytest.mark.parametrize("code", [ExitCode.STOP, ExitCode.STORAGE, ExitCode.CONFIG])
def test_a_decision_outranks_the_noise_of_lost_peers(tmp_path: Path, code: ExitCode) -> None:
    leave(tmp_path, 0, 1, at=1.0, message="connection closed by peer")
    leave(tmp_path, 1, int(code), at=2.0, message="the reason")
    outcome = judge(tmp_path, plan(3))
    assert outcome.code is code and [p.message for p in outcome.problems] == ["the reason"]


def test_a_launcher_that_starts_nothing_is_no_reason_to_requeue(tmp_path: Path) -> None:
    (tmp_path / "node-0.log").write_text("ValueError: no such option\n")
    outcome = judge(tmp_path, plan(2))
    assert outcome.code is ExitCode.FAILED and "no such option" in str(outcome.problems[0])


def test_a_stop_that_came_after_the_last_step_still_stops_the_chain(tmp_path: Path) -> None:
    for rank in (0, 1):
        leave(tmp_path, rank, 0)
    assert judge(tmp_path, plan(2)).code is ExitCode.OK
    assert judge(tmp_path, plan(2), requested=True).code is ExitCode.AGAIN
    leave_node(tmp_path, 0, asked=True)
    assert judge(tmp_path, plan(2)) == Outcome(ExitCode.AGAIN, asked=True)


def test_a_stop_does_not_hide_a_decision_or_a_fault(tmp_path: Path) -> None:
    leave(tmp_path, 0, int(ExitCode.STOP))
    leave(tmp_path, 1, 0)
    assert judge(tmp_path, plan(2), requested=True).code is ExitCode.STOP
    leave(tmp_path, 0, 1)
    assert judge(tmp_path, plan(2), requested=True).code is ExitCode.FAILED


def test_a_launcher_that_was_killed_is_a_reason_to_requeue(tmp_path: Path) -> None:
    assert judge(tmp_path, plan(2)).code is ExitCode.FAILED
    leave_node(tmp_path, 0, code=1, launcher=-9)
    assert judge(tmp_path, plan(2)).code is ExitCode.AGAIN


def test_ranks_killed_before_they_opened_a_log_are_a_reason_to_requeue(tmp_path: Path) -> None:
    root_cause(tmp_path, 0, 0, -9)
    assert judge(tmp_path, plan(2)).code is ExitCode.AGAIN


def test_ranks_without_a_record_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank-0.log").touch()
    assert judge(tmp_path, plan(2)).code is ExitCode.AGAIN
    monkeypatch.setattr(room, "is_full", lambda path: True)
    outcome = judge(tmp_path, plan(2))
    assert outcome.code is ExitCode.STORAGE and "free space" in str(outcome.problems[0])


# --- several nodes -----------------------------------------------------------------------------------------------------


def test_a_killed_rank_is_named_with_its_node(tmp_path: Path) -> None:
    """Its peers' words about lost connections come first in time and are not the cause."""
    leave(tmp_path, 0, 1, at=1.0, message="connection closed by peer")
    leave_node(tmp_path, 0, code=1, launcher=1)
    leave_node(tmp_path, 1, code=1, launcher=1)
    root_cause(tmp_path, 1, 3, -9)
    outcome = judge(tmp_path, plan(4, nodes=2))
    assert outcome.code is ExitCode.AGAIN and not outcome.nodes_gone
    assert outcome.problems[0].message.startswith("rank 3 on gpu-b failed first: killed (SIGKILL")


def test_ranks_that_the_scheduler_ended_do_not_hide_the_one_that_failed(tmp_path: Path) -> None:
    """srun ends the other nodes when one fails: their ranks leave no record, or die by SIGTERM."""
    leave(tmp_path, 1, 1, at=3.0, message="KeyError: 'x'")
    leave_node(tmp_path, 0, code=1, launcher=1)
    leave_node(tmp_path, 1, code=1, launcher=1)
    root_cause(tmp_path, 1, 2, -15)
    outcome = judge(tmp_path, plan(4, nodes=2))
    assert outcome.code is ExitCode.FAILED
    assert outcome.problems[0].message == "rank 1 on gpu-a failed first: KeyError: 'x'"


def test_a_node_that_says_nothing_is_gone(tmp_path: Path) -> None:
    """Lost or cut off: another attempt in the same allocation makes no sense."""
    leave_node(tmp_path, 0, code=1, launcher=1)
    outcome = judge(tmp_path, plan(4, nodes=2))
    assert outcome.code is ExitCode.AGAIN and outcome.nodes_gone == ("gpu-b",)
    assert "gpu-b ended without a word" in outcome.problems[0].message


def test_a_failure_next_to_a_lost_node_is_no_fault_of_the_job(tmp_path: Path) -> None:
    """A node that lost its power and came back at once: its peers see their connections reset, and the job continues."""
    leave(tmp_path, 0, 1, message="connection reset by peer")
    leave_node(tmp_path, 0, code=1, launcher=1)
    outcome = judge(tmp_path, plan(2, nodes=2))
    assert outcome.code is ExitCode.AGAIN and outcome.nodes_gone == ("gpu-b",)
    assert "gpu-b ended without a word" in outcome.problems[0].message and "rank 0 on gpu-a" in outcome.problems[1].message


def test_a_hung_rank_that_its_agent_ended(tmp_path: Path) -> None:
    """The agent's words outrank those of peers that then lost their connection."""
    leave(tmp_path, 0, 1, message="connection closed by peer")
    leave_node(tmp_path, 0, code=1, launcher=1)
    leave_node(tmp_path, 1, code=75, launcher=-9, message="rank 3 on gpu-b hangs")
    outcome = judge(tmp_path, plan(4, nodes=2))
    assert outcome.code is ExitCode.AGAIN and [p.message for p in outcome.problems] == ["rank 3 on gpu-b hangs"]


def test_a_taken_port_is_told_apart(tmp_path: Path) -> None:
    """It is not a fault of the job: the next attempt takes another one."""
    (tmp_path / "node-0.log").write_text("RuntimeError: EADDRINUSE, address already in use\n")
    leave_node(tmp_path, 0, code=1, launcher=1)
    outcome = judge(tmp_path, plan(4, nodes=2))
    assert outcome.port_taken and outcome.code is ExitCode.AGAIN


def test_a_node_that_refuses_decides_for_all(tmp_path: Path) -> None:
    """An interface that is not there will not be there the next time."""
    leave_node(tmp_path, 0, code=75, launcher=-9, message="did not say where to meet")
    leave_node(tmp_path, 1, code=2, message="gpu-b has no interface bond0")
    outcome = judge(tmp_path, plan(4, nodes=2))
    assert outcome.code is ExitCode.CONFIG and "no interface bond0" in outcome.problems[0].message


def test_the_outcome_is_written_as_it_is(tmp_path: Path) -> None:
    Outcome(ExitCode.AGAIN, nodes_gone=("gpu-b",), asked=True).write(tmp_path, step=3)
    body = json.loads((tmp_path / "outcome.json").read_text())
    assert (body["code"], body["nodes_gone"], body["asked"], body["step"]) == (75, ["gpu-b"], True, 3)
