"""The command that puts an attempt onto the nodes: what it passes on, and what stays behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from clustertune.launch import step
from tests.slurm import wait_for

SECRETS = {"HF_TOKEN": "canary", "WANDB_API_KEY": "canary", "MY_PASSWORD": "canary"}


def command(**changes: object) -> list[str]:
    words = {"nodes": 2, "cpus": 64, "gpus": True, "environ": {"PATH": "/bin", "HOME": "/h", **SECRETS}} | changes
    return step.srun_command(["python", "x"], **words)  # type: ignore[arg-type]


def test_only_listed_variables_reach_the_nodes() -> None:
    words = command()
    listed = next(word for word in words if word.startswith("--export=")).partition("=")[2].split(",")
    assert {"PATH", "HOME"} <= set(listed) and "HF_HOME" not in listed, "a cache that nobody named is the library's own"
    assert not any("canary" in word or name in word for word in words for name in SECRETS)
    assert words == command(environ=SECRETS), "the line does not depend on what the batch script was started with"
    cached = command(environ={"HF_HOME": "/big/hf", "CUDA_HOME": "/c", "CLUSTERTUNE_MODULE_VARIABLES": "CUDA_HOME HF_TOKEN"})
    assert "--export=" + ",".join([*listed, "HF_HOME"]) in cached, "modules are of step.in_step"


def test_srun_gets_the_cores_of_the_job() -> None:
    """Since Slurm 22.05 it takes them from sbatch no longer."""
    assert "--cpus-per-task=64" in command()
    assert not any("cpus-per-task" in word for word in command(cpus=None))
    assert "--kill-on-bad-exit=1" in command()
    assert not any("gpu" in word for word in command(gpus=False))


def test_which_node_it_is_the_node_finds_out(tmp_path: Path) -> None:
    """Expanded on the first node, every node would be node 0: nothing of the kind is on the line."""
    words = step.node_command(tmp_path, 3)
    assert words[-4:] == ["--run-dir", str(tmp_path), "--attempt", "3"]
    assert not any("SLURM" in word or "$" in word for word in [*words, *command()])


STEP = """
import signal, sys, time
from pathlib import Path
def handle(number, frame):
    Path(sys.argv[1]).write_text(signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGUSR1, handle)
Path(sys.argv[1] + ".up").touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "asks", "heard"),
    [
        (signal.SIGUSR1, None, "SIGUSR1"),
        (signal.SIGTERM, None, "SIGUSR1"),  # which only the batch script got: the ranks are asked for a save
        (signal.SIGUSR1, "well", "asked"),
        (signal.SIGUSR1, "on a full disk", "SIGUSR1"),
    ],
)
def test_a_warning_reaches_the_step(tmp_path: Path, number: signal.Signals, asks: str | None, heard: str) -> None:
    """As a signal through srun, or another way where there is one, and as the signal again where that fails."""
    mark, signals, main = tmp_path / "mark", list[int](), threading.main_thread().ident or 0

    def warn() -> None:
        wait_for(Path(f"{mark}.up").exists, "the step")
        signal.pthread_kill(main, number)

    def ask() -> None:
        if asks != "well":
            raise OSError(28, "No space left on device")
        mark.write_text("asked")

    threading.Thread(target=warn, daemon=True).start()
    still_mine = lambda: asks != "well" or not mark.exists()  # noqa: E731
    step.run_step([sys.executable, "-c", STEP, str(mark)], signals, still_mine, ask=ask if asks else None)
    assert mark.read_text() == heard and signals == [number]


@pytest.mark.parametrize("failed", [False, True])
def test_a_step_is_left(monkeypatch: pytest.MonkeyPatch, failed: bool) -> None:
    """When a later start has taken over; or where srun waits for the tasks of a node that lost its power, came back at once,
    and knows nothing of them."""
    monkeypatch.setattr(step, "END_SECONDS", 0.5)
    began = time.monotonic()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    code = step.run_step(command, [], lambda: failed or time.monotonic() - began < 1, lambda: failed)
    assert code == -signal.SIGKILL


def test_the_step_ends_with_the_program(tmp_path: Path) -> None:
    """A job whose program was killed is requeued: its srun must not keep the old ranks."""
    pid = tmp_path / "pid"
    child = f"import os, time; from pathlib import Path; Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(60)"
    if (parent := os.fork()) == 0:
        try:
            step.run_step([sys.executable, "-c", child], [], lambda: True)
        finally:
            os._exit(0)
    wait_for(lambda: pid.exists() and pid.read_text(), "the step")
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_for(lambda: not Path(f"/proc/{pid.read_text()}").exists(), "the end of the step", 30)
