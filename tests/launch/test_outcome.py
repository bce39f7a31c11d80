"""How an attempt ended, judged from what each rank and each node left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import ExitCode
from clustertune.launch import outcome as outcomes
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.launch.outcome import Outcome, judge

Trace = Callable[[Path], object]
LOST = "connection closed by peer"


def plan(ranks: int, nodes: int = 1) -> AttemptPlan:
    names = ("gpu-a", "gpu-b")[:nodes]
    return AttemptPlan(attempt=1, nodes=tuple(Node(name, name) for name in names), ranks_per_node=ranks // nodes)


def problem(message: str) -> list[dict[str, Any]]:
    return [{"message": message, "file": None, "key": None, "fix": None}] if message else []


def rank(number: int, code: int, message: str = "why", at: float = 1.0) -> Trace:
    body = {"rank": number, "code": code, "time": at, "problems": problem(message if code else "")}
    return lambda folder: (folder / f"rank-{number}.json").write_text(json.dumps(body))


def node(number: int, code: int = 0, launcher: int = 0, message: str = "", asked: bool = False) -> Trace:
    body = {"node": number, "code": code, "launcher": launcher, "asked": ["SIGUSR1"] if asked else []}
    text = json.dumps({**body, "problems": problem(message)})
    return lambda folder: (folder / f"node-{number}.json").write_text(text)


def log(name: str, text: str = "") -> Trace:
    return lambda folder: (folder / f"{name}.log").write_text(text)


def root_cause(number: int, failed: int, exitcode: int) -> Trace:
    """As torch's launcher words it."""
    return log(
        f"node-{number}",
        "Failures:\n  <NO_OTHER_FAILURES>\n------\nRoot Cause (first observed failure):\n[0]:\n  time      : now\n"
        f"  host      : x\n  rank      : {failed} (local_rank: 1)\n  exitcode  : {exitcode} (pid: 7)\n",
    )


ENDED = (node(0, 1, 1), node(1, 1, 1))
"""Both nodes' launchers report a failure."""
CASES: dict[str, tuple[AttemptPlan, list[Trace], int, list[str]]] = {
    "all well": (plan(2), [rank(0, 0), rank(1, 0)], 0, []),
    "a rank without a record was killed, and the job may continue": (
        plan(2), [log("rank-0"), rank(0, 1, LOST)], 75, ["rank 1 ended without a record"],
    ),
    "the first to fail is named": (
        plan(2), [rank(0, 1, LOST, at=5.0), rank(1, 1, "KeyError: 'x'", at=2.0)], 1, ["rank 1 failed first: KeyError"],
    ),
    **{
        f"a decision ({code}) outranks the noise of lost peers": (
            plan(3), [rank(0, 1, LOST, at=1.0), rank(1, code, "the reason", at=2.0)], code, ["the reason"],
        )
        for code in (93, 73, 2)
    },
    "a launcher that starts nothing is no reason to requeue": (
        plan(2), [log("node-0", "ValueError: no such option\n")], 1, ["the launcher started no rank: ValueError"],
    ),
    "a launcher that was killed is": (plan(2), [node(0, 1, -9)], 75, ["rank 0, rank 1 ended without a record"]),
    "ranks that were killed before they opened a log are": (plan(2), [root_cause(0, 0, -9)], 75, ["rank 0 failed first"]),
    "a stop that came after the last step still counts": (plan(2), [rank(0, 0), rank(1, 0), node(0, asked=True)], 75, []),
    "a stop hides no decision": (plan(2), [rank(0, 93), rank(1, 0), node(0, asked=True)], 93, ["why"]),
    "nor a fault": (plan(2), [rank(0, 1), rank(1, 0), node(0, asked=True)], 1, ["rank 0 failed first: why"]),
    "a killed rank is named with its node, and not its peers' lost connections": (
        plan(4, 2), [rank(0, 1, LOST), *ENDED, root_cause(1, 3, -9)], 75, ["rank 3 on gpu-b failed first: killed (SIGKILL"],
    ),
    "ranks that the scheduler ended (SIGTERM) do not hide the one that failed": (
        plan(4, 2), [rank(1, 1, "KeyError: 'x'"), *ENDED, root_cause(1, 2, -15)], 1, ["rank 1 on gpu-a failed first: KeyError"],
    ),
    "a node that says nothing is gone": (plan(4, 2), [node(0, 1, 1)], 75, ["gpu-b ended without a record"]),
    "a failure next to a lost node is no fault of the job": (
        plan(2, 2), [rank(0, 1, LOST), node(0, 1, 1)], 75, ["gpu-b ended without a record", "rank 0 on gpu-a"],
    ),
    "the agent's words on a hung rank outrank those of its peers": (
        plan(4, 2), [rank(0, 1, LOST), node(0, 1, 1), node(1, 75, -9, "rank 3 on gpu-b hangs")], 75, ["rank 3 on gpu-b hangs"],
    ),
    "a taken port is no fault of the job": (
        plan(4, 2), [log("node-0", "RuntimeError: EADDRINUSE, address in use\n"), node(0, 1, 1)], 75, ["the rendezvous port"],
    ),
    "a node that refuses decides for all": (
        plan(4, 2), [node(0, 75, -9, "waited"), node(1, 2, 0, "no interface bond0")], 2, ["no interface bond0"],
    ),
}  # fmt: skip
GONE = ("a node that says nothing is gone", "a failure next to a lost node is no fault of the job")


@pytest.mark.parametrize("case", CASES)
def test_the_end_of_an_attempt(tmp_path: Path, case: str) -> None:
    """Code, reason, lost nodes, and whether it was asked to end."""
    of, traces, code, messages = CASES[case]
    for leave in traces:
        leave(tmp_path)
    outcome = judge(tmp_path, of)
    assert outcome.code == code and len(outcome.problems) == len(messages)
    assert all(found.message.startswith(text) for found, text in zip(outcome.problems, messages, strict=True)), outcome
    assert outcome.nodes_gone == (("gpu-b",) if case in GONE else ()) or outcome.port_taken
    assert outcome.stop_requested is case.startswith("a stop that") and outcome.port_taken is case.startswith("a taken port")


def test_a_stop_that_no_record_tells(tmp_path: Path) -> None:
    """The starter of the attempt was asked."""
    for number in (0, 1):
        rank(number, 0)(tmp_path)
    assert judge(tmp_path, plan(2), requested=True) == Outcome(ExitCode.AGAIN, stop_requested=True)


def test_ranks_without_a_record_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log("rank-0")(tmp_path)
    assert judge(tmp_path, plan(2)).code is ExitCode.AGAIN
    monkeypatch.setattr(outcomes, "is_full", lambda path: True)
    outcome = judge(tmp_path, plan(2))
    assert outcome.code is ExitCode.STORAGE and "free space" in str(outcome.problems[0])


def test_the_outcome_is_written_as_it_is(tmp_path: Path) -> None:
    Outcome(ExitCode.AGAIN, nodes_gone=("gpu-b",), stop_requested=True).write(tmp_path, step=3)
    body = json.loads((tmp_path / "outcome.json").read_text())
    assert (body["code"], body["nodes_gone"], body["asked"], body["step"]) == (75, ["gpu-b"], True, 3)
