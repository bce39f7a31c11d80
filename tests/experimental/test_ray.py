"""Ray Train: the worker around a rank, and real runs on a local Ray with two workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import ExitCode
from clustertune.experimental import raytrain
from clustertune.launch.agent import process_state
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.launch.outcome import Outcome
from clustertune.rundir import RunDir
from tests.command import REPO, SHORT, Done, rank_pid
from tests.slurm import wait_for

ADAPTER = "adapter/adapter_model.safetensors"

RANK = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.insert(0, sys.argv[2])
from clustertune.process import die_with_parent
die_with_parent(signal.SIGKILL)
record = '{"rank": 0, "code": 75, "time": 1, "problems": []}'
save = lambda *_: (print("saved", flush=True), (folder / "rank-0.json").write_text(record), sys.exit(75))
signal.signal(signal.SIGUSR1, save)
(folder / "parent").write_text(str(os.getppid()))
(folder / "rank-0.pid").write_text(str(os.getpid()))
time.sleep(60)
"""


def written_pid(run: RunDir) -> int:
    """The process of rank 0, once its file holds a number: the file is there before it is written."""
    path = run.attempt(1) / "rank-0.pid"
    wait_for(lambda: path.exists() and path.read_text().strip().isdigit(), "the rank's process")
    return int(path.read_text())


def plan(run: RunDir, ranks: int = 1) -> AttemptPlan:
    found = AttemptPlan(run.new_attempt(), tuple(Node(f"n{i}", "127.0.0.1") for i in range(ranks)), 1, launcher="ray", job="j")
    found.write(run.attempt(found.attempt))
    return found


def alive(pid: int) -> bool:
    return process_state(pid) not in ("", "Z")


class Worker(threading.Thread):
    """A rank as a worker of Ray starts it: from a thread."""

    def __init__(self, run: RunDir, made: AttemptPlan, stop: Path) -> None:
        super().__init__(daemon=True)
        self.agent, self.stop = raytrain.RankAgent(run.path, made, 0), stop
        self.code: ExitCode | None = None
        self.start()

    def run(self) -> None:
        command = [sys.executable, "-c", RANK, str(self.agent.folder), str(REPO)]
        self.code = self.agent.run_rank(command, {"RANK": "0"}, self.stop, quiet=False)


def test_a_worker_passes_the_wish_to_stop_on(tmp_path: Path) -> None:
    """Ray's own stop kills the worker: the driver asks by a file, and the rank saves first."""
    run = RunDir(tmp_path)
    worker = Worker(run, plan(run), tmp_path / "stop")
    written_pid(run)
    assert (run.attempt(1) / "parent").read_text() == (run.attempt(1) / "node-0.pid").read_text().strip() == str(os.getpid())
    (tmp_path / "stop").touch()
    worker.join(60)
    assert worker.code is ExitCode.OK and worker.agent.received == [signal.SIGUSR1]
    assert (run.attempt(1) / raytrain.PROGRESS).read_text() == "saved\n"


def test_a_rank_dies_with_its_worker(tmp_path: Path) -> None:
    """Ray kills workers with SIGKILL: a rank that outlived it would continue writing, and hold the GPU."""
    run = RunDir(tmp_path)
    plan(run)
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from clustertune.launch.attempt import AttemptPlan\n"
        "from clustertune.rundir import RunDir\n"
        "from tests.experimental import test_ray as t\n"
        "run = RunDir(Path(sys.argv[1])); t.Worker(run, AttemptPlan.read(run.attempt(1)), Path('none')).join()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(REPO)], cwd=REPO) as worker:
        pid = written_pid(run)
        assert alive(pid)
        worker.kill()
    wait_for(lambda: not alive(pid), "the rank's end")


def test_every_restart_is_a_new_attempt_until_nothing_moves(tmp_path: Path) -> None:
    """Ray restarts for ever if it is let; attempts without a new checkpoint are counted as they are on Slurm."""
    run = RunDir(tmp_path)
    config = {"attempt": run.new_attempt(), "job": "j", "stop": str(tmp_path / "stop")}
    for number in (1, 2, 3):
        assert raytrain._begin(run, config) == number
        made = AttemptPlan(number, (Node("n", "a"),), 1, launcher="ray", job="j")
        made.write(run.attempt(number))
        Outcome(ExitCode.FAILED).write(run.attempt(number))
    assert raytrain._begin(run, config) is None
    config["job"] = "the next call"
    assert raytrain._begin(run, config) == 4
    AttemptPlan(4, (Node("n", "a"),), 1, launcher="ray", job="j").write(run.attempt(4))
    (tmp_path / "stop").touch()  # asked to, while Ray was about to start the workers again
    assert raytrain._begin(run, config) is None


def driver(run: Path, *arguments: str) -> subprocess.Popen[str]:
    words = [str(REPO / "launch" / "ray_train.py"), "tiny-oasst2", "--workers", "2", "--run-dir", str(run), *SHORT, *arguments]
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *words], cwd=REPO, text=True, env=env, **pipes)


def end(call: subprocess.Popen[str]) -> Done:
    try:
        out, err = call.communicate(timeout=1200)
    finally:
        call.kill()  # Ray's processes end with their driver
    assert "Traceback" not in err, err
    return Done(call.returncode, out, err)


def saved(run: Path, call: subprocess.Popen[str], step: int) -> None:
    there = lambda: list(run.glob(f"checkpoints/step-{step:06d}*/MANIFEST.json")) or call.poll() is not None  # noqa: E731
    wait_for(there, "a checkpoint", 400)
    assert call.poll() is None, end(call)


@pytest.mark.jobs
@pytest.mark.timeout(1800)
def test_ray_starts_a_killed_rank_anew(tmp_path: Path, finished: tuple[Path, Done]) -> None:
    """One call, two attempts, and the bytes of an uninterrupted run of ``clustertune run``."""
    run = tmp_path / "run"
    call = driver(run, "--json")
    saved(run, call, 2)
    os.kill(rank_pid(run, 1), signal.SIGKILL)
    done = end(call)
    assert done.code == 0, done
    assert done.json["stages"]["train"]["status"] == "done"
    first: Any = AttemptPlan.read(run / "attempts" / "0001")
    assert first.launcher == "ray" and sorted(path.name for path in (run / "attempts").iterdir()) == ["0001", "0002"]
    problems = json.loads((run / "attempts" / "0001" / "outcome.json").read_text())["problems"]
    assert "rank 1 on " in problems[0]["message"] and "SIGKILL" in problems[0]["message"]
    assert (run / ADAPTER).read_bytes() == (finished[0] / ADAPTER).read_bytes()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_stop_saves_and_the_same_command_goes_on(tmp_path: Path, finished: tuple[Path, Done], number: signal.Signals) -> None:
    """Ray's own answer to Ctrl-C is to kill the workers: whatever is not saved is lost."""
    run = tmp_path / "run"
    call = driver(run)
    saved(run, call, 2)
    call.send_signal(number)
    stopped = end(call)
    assert stopped.code == 75 and "stopped on request after saving" in stopped.err
    assert not list(run.glob("stop-*")) and not (run / "ray").exists()
    whole = end(driver(run))
    assert whole.code == 0, whole
    assert (run / ADAPTER).read_bytes() == (finished[0] / ADAPTER).read_bytes()
