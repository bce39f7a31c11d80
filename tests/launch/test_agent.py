"""The process of one node: signals go to the ranks, hung and superseded ranks are ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clustertune.errors import ExitCode
from clustertune.launch import agent as agents
from clustertune.launch.agent import Agent, launcher_pid_file, record_file
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.launch.outcome import Outcome, judge


def agent_of(run: Path, ranks: int = 1, nodes: int = 1, *, sigterm_asks: bool = True, patient: bool = False) -> Agent:
    names = tuple(Node(name, name) for name in ("here", "there")[:nodes])
    agent = Agent(run, AttemptPlan(1, names, ranks, sigterm_asks=sigterm_asks), node=0, patient=patient)
    agent.folder.mkdir(parents=True)
    return agent


def when(condition: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Do something from another thread as soon as a condition holds."""

    def wait() -> None:
        while not condition():
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def to_this(number: int) -> Callable[[], None]:
    main = threading.main_thread().ident or 0
    return lambda: signal.pthread_kill(main, number)


def filled(path: Path) -> Callable[[], bool]:
    return lambda: path.exists() and bool(path.read_text().strip())


def up(agent: Agent) -> Callable[[], bool]:
    """Whether the rank is there and the agent takes signals: one that comes before ends this process."""
    return lambda: filled(agent.folder / "rank-0.pid")() and launcher_pid_file(agent.folder, 0).exists()


START = """
import json, os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
"""
UP = """
(folder / "rank-0.pid").write_text(str(os.getpid()))
time.sleep(float(sys.argv[2]))
"""
SAVES = """
def handle(number, frame):
    (folder / "rank-0.json").write_text(json.dumps({"rank": 0, "code": 75, "time": 1.0, "problems": []}))
    sys.exit(75)
signal.signal(signal.SIGUSR1, handle)
"""
COUNTS = """
seen = []
def handle(number, frame):
    seen.append(number)
    (folder / "seen").write_text(str(len(seen)))
    if len(seen) == 2:
        sys.exit(0)
signal.signal(signal.SIGUSR1, handle)
"""


def run_rank(agent: Agent, handler: str = "", seconds: float = 120) -> ExitCode:
    """The agent around a rank that lives so long."""
    return agent.run([sys.executable, "-c", f"{START}{handler}{UP}", str(agent.folder), str(seconds)], quiet=True)


@pytest.mark.parametrize("by", [signal.SIGUSR1, signal.SIGTERM, "a file"])
def test_a_wish_to_stop_reaches_the_ranks_and_not_the_launcher(tmp_path: Path, by: signal.Signals | str) -> None:
    """In a container a signal to every process of the step would end the one by which the image is read. Once is enough."""
    agent = agent_of(tmp_path)
    ask = agents.stop_request_file(agent.folder).touch if isinstance(by, str) else to_this(by)
    when(up(agent), ask)
    assert run_rank(agent, SAVES) is ExitCode.OK, "the rank ended by itself"
    assert judge(agent.folder, agent.plan) == Outcome(ExitCode.AGAIN, stop_requested=True)
    assert agents.node_record(agent.folder, 0)["asked"] == ["SIGUSR1" if isinstance(by, str) else by.name]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_stop_before_the_first_rank_is_no_failure(tmp_path: Path, number: signal.Signals) -> None:
    agent = agent_of(tmp_path, ranks=2)
    when(launcher_pid_file(agent.folder, 0).exists, to_this(number))
    assert agent.run([sys.executable, "-c", "import time; time.sleep(60)"], quiet=True) is ExitCode.AGAIN
    assert judge(agent.folder, agent.plan) == Outcome(ExitCode.AGAIN, stop_requested=True)


@pytest.mark.parametrize(
    ("first", "second", "patient", "ended"),
    [
        (signal.SIGUSR1, signal.SIGTERM, False, False),
        (signal.SIGUSR1, signal.SIGUSR1, False, False),
        (signal.SIGTERM, signal.SIGTERM, False, True),
        (signal.SIGINT, signal.SIGINT, False, True),
        (signal.SIGTERM, signal.SIGTERM, True, False),
    ],
)
def test_only_impatience_breaks_off_a_save(tmp_path: Path, first: int, second: int, patient: bool, ended: bool) -> None:
    """Under a scheduler even that does not: it sends SIGTERM to every process, and more than once."""
    agent = agent_of(tmp_path, patient=patient)
    seen = agent.folder / "seen"
    when(up(agent), to_this(first))
    when(filled(seen), to_this(second))
    run_rank(agent, COUNTS)
    record = json.loads(record_file(agent.folder, 0).read_text())
    assert (record["launcher"] == -signal.SIGKILL) is ended
    assert seen.read_text() == ("1" if ended else "2")


def test_a_newer_attempt_ends_the_ranks_of_an_older_one(tmp_path: Path) -> None:
    """A node that was cut off continues computing; nothing of it may be written once others do its work."""
    agent = agent_of(tmp_path)
    when(filled(agent.folder / "rank-0.pid"), (tmp_path / "attempts" / "0002").mkdir)
    assert run_rank(agent) is ExitCode.AGAIN
    assert "attempt 2 has taken over" in judge(agent.folder, agent.plan).problems[0].message


def test_ranks_do_not_outlive_a_node_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for a peer that never joins; their agent ends them, so that every node has a record and the reason shows."""
    monkeypatch.setattr(agents, "PEER_SECONDS", 0.5)
    agent = agent_of(tmp_path, nodes=2, patient=True)
    record_file(agent.folder, 1).write_text(json.dumps({"node": 1, "code": 1, "launcher": 1, "asked": [], "problems": []}))
    assert run_rank(agent) is ExitCode.FAILED
    assert not judge(agent.folder, agent.plan).nodes_gone


@pytest.mark.parametrize(("asks", "signals"), [(False, []), (True, ["SIGTERM"])])
def test_sigterm_in_a_slurm_step_is_no_wish_of_a_person(tmp_path: Path, asks: bool, signals: list[str]) -> None:
    """srun sends it to what is left of a step of which a node failed: the next attempt must begin, not the queue."""
    agent = agent_of(tmp_path, 2, sigterm_asks=asks, patient=True)
    when(launcher_pid_file(agent.folder, 0).exists, to_this(signal.SIGTERM))
    run_rank(agent)
    assert json.loads(record_file(agent.folder, 0).read_text())["asked"] == signals


def test_a_stopped_rank_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP leaves it in every collective for ever; SIGKILL ends also a stopped process."""
    monkeypatch.setattr(agents, "STOPPED_SECONDS", 0.5)
    agent = agent_of(tmp_path)
    pid = agent.folder / "rank-0.pid"
    when(filled(pid), lambda: os.kill(int(pid.read_text()), signal.SIGSTOP))
    run_rank(agent)
    outcome = judge(agent.folder, agent.plan)
    assert outcome.code is ExitCode.AGAIN and "its process is stopped" in outcome.problems[0].message


def test_a_silent_rank_is_ended(tmp_path: Path) -> None:
    agent = agent_of(tmp_path)
    agent.plan = replace(agent.plan, stall_seconds=1.0)
    (agent.folder / "rank-0.heartbeat").write_text("7 train 3\n")
    agent.run([sys.executable, "-c", "import time; time.sleep(120)"], quiet=True)
    outcome = judge(agent.folder, agent.plan)
    assert outcome.code is ExitCode.AGAIN and "no sign of life" in outcome.problems[0].message
    assert "(last: train 3)" in outcome.problems[0].message
