"""The process of one node: signals go to the ranks, hung and superseded ranks are ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertune.errors import ExitCode
from clustertune.launch import agent as agents
from clustertune.launch.agent import Agent, launcher_pid_file, record_file
from clustertune.launch.judge import Outcome, judge
from clustertune.launch.plan import AttemptPlan, Node


def agent_of(run: Path, ranks: int = 1, *, patient: bool = False, stall: float | None = None) -> Agent:
    plan = AttemptPlan(attempt=1, nodes=(Node("here", "127.0.0.1"),), ranks_per_node=ranks, stall_seconds=stall)
    agent = Agent(run, plan, node=0, patient=patient)
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


RANK = """
import json, os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def handle(number, frame):
    (folder / "rank-0.json").write_text(json.dumps({"rank": 0, "code": 75, "time": 1.0, "problems": []}))
    sys.exit(75)
signal.signal(signal.SIGUSR1, handle)
(folder / "rank-0.pid").write_text(str(os.getpid()))
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_stop_signal_reaches_the_ranks_and_not_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    agent = agent_of(tmp_path)
    when(filled(agent.folder / "rank-0.pid"), to_this(number))
    code = agent.run([sys.executable, "-c", RANK, str(agent.folder)], quiet=True)
    assert code is ExitCode.OK, "the rank ended by itself"
    assert judge(agent.folder, agent.plan) == Outcome(ExitCode.AGAIN, asked=True)


def test_a_warning_may_come_as_a_file(tmp_path: Path) -> None:
    """In a container a signal to every process of the step would end the one by which the image is read. Once is enough."""
    agent = agent_of(tmp_path)
    when(filled(agent.folder / "rank-0.pid"), agents.asked_file(agent.folder).touch)
    code = agent.run([sys.executable, "-c", RANK, str(agent.folder)], quiet=True)
    assert code is ExitCode.OK and agents.rank_record(agent.folder, 0)["code"] == 75
    assert agents.node_record(agent.folder, 0)["asked"] == ["SIGUSR1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_stop_before_the_first_rank_is_no_failure(tmp_path: Path, number: signal.Signals) -> None:
    agent = agent_of(tmp_path, ranks=2)
    when(launcher_pid_file(agent.folder, 0).exists, to_this(number))
    assert agent.run([sys.executable, "-c", "import time; time.sleep(60)"], quiet=True) is ExitCode.AGAIN
    assert judge(agent.folder, agent.plan) == Outcome(ExitCode.AGAIN, asked=True)


COUNTING = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
seen = []
def handle(number, frame):
    seen.append(number)
    (folder / "seen").write_text(str(len(seen)))
signal.signal(signal.SIGUSR1, handle)
(folder / "rank-0.pid").write_text(str(os.getpid()))
time.sleep(3)
"""


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
    when(filled(agent.folder / "rank-0.pid"), to_this(first))
    when(filled(seen), to_this(second))
    agent.run([sys.executable, "-c", COUNTING, str(agent.folder)], quiet=True)
    record = json.loads(record_file(agent.folder, 0).read_text())
    assert (record["launcher"] == -signal.SIGKILL) is ended
    assert seen.read_text() == ("1" if ended else "2")


SLEEPER = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1], "rank-0.pid").write_text(str(os.getpid()))
time.sleep(120)
"""


def test_a_newer_attempt_ends_the_ranks_of_an_older_one(tmp_path: Path) -> None:
    """A node that was cut off continues computing; nothing of it may be written once others do its work."""
    agent = agent_of(tmp_path)
    when(filled(agent.folder / "rank-0.pid"), (tmp_path / "attempts" / "0002").mkdir)
    assert agent.run([sys.executable, "-c", SLEEPER, str(agent.folder)], quiet=True) is ExitCode.AGAIN
    assert "attempt 2 has taken over" in judge(agent.folder, agent.plan).problems[0].message


def test_ranks_do_not_outlive_a_node_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for a peer that never joins; their agent ends them, so that every node has a record and the reason shows."""
    monkeypatch.setattr(agents, "PEER_SECONDS", 0.5)
    plan = AttemptPlan(attempt=1, nodes=(Node("a", "a"), Node("b", "b")), ranks_per_node=1, launcher="slurm")
    agent = Agent(tmp_path, plan, node=0, patient=True)
    agent.folder.mkdir(parents=True)
    record_file(agent.folder, 1).write_text(json.dumps({"node": 1, "code": 1, "launcher": 1, "asked": [], "problems": []}))
    assert agent.run([sys.executable, "-c", SLEEPER, str(agent.folder)], quiet=True) is ExitCode.FAILED
    assert not judge(agent.folder, plan).nodes_gone


@pytest.mark.parametrize(("launcher", "signals"), [("slurm", []), ("torchrun", ["SIGTERM"])])
def test_sigterm_in_a_slurm_step_is_no_wish_of_a_person(tmp_path: Path, launcher: str, signals: list[str]) -> None:
    """srun sends it to what is left of a step of which a node failed: the next attempt must begin, not the queue."""
    plan = AttemptPlan(attempt=1, nodes=(Node("a", "a"),), ranks_per_node=2, launcher=launcher)
    agent = Agent(tmp_path, plan, node=0, patient=True)
    agent.folder.mkdir(parents=True)
    when(launcher_pid_file(agent.folder, 0).exists, to_this(signal.SIGTERM))
    agent.run([sys.executable, "-c", SLEEPER, str(agent.folder)], quiet=True)
    assert json.loads(record_file(agent.folder, 0).read_text())["asked"] == signals


def test_a_stopped_rank_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP leaves it in every collective for ever; SIGKILL ends also a stopped process."""
    monkeypatch.setattr(agents, "STOPPED_SECONDS", 0.5)
    agent = agent_of(tmp_path)
    pid = agent.folder / "rank-0.pid"
    when(filled(pid), lambda: os.kill(int(pid.read_text()), signal.SIGSTOP))
    agent.run([sys.executable, "-c", SLEEPER, str(agent.folder)], quiet=True)
    outcome = judge(agent.folder, agent.plan)
    assert outcome.code is ExitCode.AGAIN and "its process is stopped" in outcome.problems[0].message


def test_a_silent_rank_is_ended(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, stall=1.0)
    (agent.folder / "rank-0.heartbeat").write_text("7 train 3\n")
    agent.run([sys.executable, "-c", "import time; time.sleep(120)"], quiet=True)
    outcome = judge(agent.folder, agent.plan)
    assert outcome.code is ExitCode.AGAIN and "no sign of life" in outcome.problems[0].message
    assert "(last: train 3)" in outcome.problems[0].message


def test_patience_follows_the_pace(tmp_path: Path) -> None:
    """Loading and saving may take an hour; under way five times the longest silence, 300 s at least."""
    now = [0.0]
    plan = AttemptPlan(attempt=1, nodes=(Node("here", "here"),), ranks_per_node=1)
    look = agents.HeartbeatMonitor(tmp_path, plan, 0, clock=lambda: now[0])

    def at(seconds: float, heartbeat: str | None = None) -> bool:
        now[0] = seconds
        if heartbeat:
            (tmp_path / "rank-0.heartbeat").write_text(heartbeat)
        return bool(look.look())

    assert not at(0) and not at(1000, "1 model 0") and not at(4000)
    assert not at(4100, "2 train 0") and not at(4101, "3 train 0")
    assert not at(4600), "what lies before the first step says nothing of a step, which may take many minutes"
    assert not at(4611, "4 train 0") and not at(4621, "5 train 1") and not at(4611 + 5 * 510 - 1) and at(4621 + 5 * 510)
    assert not at(9000, "6 save 1") and not at(9000 + 3599) and at(9000 + 3600)
    assert not at(15_000, "7 train 1"), "nor does what lies between a save and the next step"
    assert not at(15_001, "8 train 1") and not at(15_001 + 5 * 510 - 1)
    assert not at(20_000, "9 end 3") and not at(30_000), "a rank that has ended is not waited for"


def test_a_small_models_pace_has_its_floor(tmp_path: Path) -> None:
    """Steps of a second: whoever says nothing for five minutes hangs."""
    now = [0.0]
    plan = AttemptPlan(attempt=1, nodes=(Node("here", "here"),), ranks_per_node=1)
    look = agents.HeartbeatMonitor(tmp_path, plan, 0, clock=lambda: now[0])
    for count in range(5):
        now[0] = float(count)
        (tmp_path / "rank-0.heartbeat").write_text(f"{count} train {count}\n")
        assert not look.look()
    now[0] = 4.0 + 299
    assert not look.look()
    now[0] = 4.0 + 300
    assert look.look()


def test_what_other_nodes_left_is_asked_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client remembers that a name was absent: the failure of a peer would be seen a minute late, after Slurm's kill."""
    folders: list[Path] = []
    monkeypatch.setattr(agents, "ask_anew", folders.append)
    monkeypatch.setattr(agents, "LINGER_SECONDS", 0.1)
    plan = AttemptPlan(attempt=1, nodes=(Node("a", "a"), Node("b", "b")), ranks_per_node=1)
    agent = Agent(tmp_path, plan, node=0)
    assert not agent._peer_failed() and folders == [agent.folder]
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        agent.linger()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert len(folders) > 1
