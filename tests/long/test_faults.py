"""Faults at chosen moments of a real command: an exit code that says what to do, nothing left over, the same bytes in the end.

``make campaign`` counts faults at random moments.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command import REPO, events
from tests.slurm import wait_for
from tools.runs import attempts

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

SETTINGS = ["train.max_steps=6", "train.save_steps=2", "train.eval_steps=5", "train.max_length=64"]
"""Steps so short that the moments between them are as likely to be hit as the steps."""
PATIENCE = 900
"""Seconds after a fault within which the command must have ended: more is a hang."""


class Command:
    """``clustertune run`` on one run folder, started and not waited for; ``path`` goes first on the module path."""

    def __init__(self, run_dir: Path, *, to: str = "export", path: Path = REPO) -> None:
        self.run_dir = run_dir
        self._child = subprocess.Popen(
            [sys.executable, "-m", "clustertune", "run", "recipes/tiny-oasst2", "--run-dir", run_dir, "--to", to, *SETTINGS],
            cwd=REPO, env={**os.environ, "PYTHONPATH": f"{path}:{REPO}", "OMP_NUM_THREADS": "1"}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.pid = self._child.pid

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a moment before the command's end."""
        seen = wait_for(lambda: condition() or (self._child.poll() is not None and "it ended"), "the moment", 240, pause=0.01)
        assert seen != "it ended", "the moment never came"

    def signal(self, number: int, *pids: int) -> None:
        """Send a signal to the processes given, else to the command."""
        for pid in pids or (self.pid,):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, seconds: float = PATIENCE) -> tuple[int, str]:
        """The exit code and all output. No traceback is ever among it, and no process stays behind."""
        try:
            text, _ = self._child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._child.kill()
            raise AssertionError(f"hangs: {processes(self.run_dir)}") from None
        assert "Traceback" not in text, text
        wait_for(lambda: not processes(self.run_dir), f"the end of {processes(self.run_dir)}", 10)
        return self._child.returncode, text


def processes(run_dir: Path) -> dict[int, str]:
    """Launcher and ranks of a run folder that live now: process id to ``launcher`` or ``rank``."""
    found = {}
    for folder in (path for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            words = (folder / "cmdline").read_text(errors="replace").split("\0")
            dead = (folder / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0] == "Z"
        except (OSError, IndexError):
            continue
        if str(run_dir.resolve()) in words and "train" in words and not dead:
            found[int(folder.name)] = "launcher" if "clustertune.launch.elastic" in words else "rank"
    return found


def pids(run_dir: Path, kind: str) -> list[int]:
    """Process ids of the launcher, or of the ranks."""
    return sorted(pid for pid, what in processes(run_dir).items() if what == kind)


def adapter_sha(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations and base model of a run of six steps; nothing is trained."""
    folder = tmp_path_factory.mktemp("prepared") / "run"
    code, text = Command(folder, to="prepare").end()
    assert code == 0, text
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A run folder of one's own in which training is next."""
    return Path(shutil.copytree(prepared, tmp_path / "run"))


@pytest.fixture(scope="session")
def reference(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The adapter's SHA-256 after an uninterrupted run."""
    folder = Path(shutil.copytree(prepared, tmp_path_factory.mktemp("reference") / "run"))
    code, text = Command(folder).end()
    assert code == 0, text
    return adapter_sha(folder)


# --- signals ------------------------------------------------------------------------------------------------------------

MOMENTS: dict[str, Callable[[Path], Any]] = {
    "the launcher starts": lambda folder: pids(folder, "launcher"),
    "the ranks start": lambda folder: len(list(folder.glob("attempts/*/rank-*.pid"))) == 2,
    "a step": lambda folder: events(folder, "step"),
    "the last step": lambda folder: any(event["step"] == 6 for event in events(folder, "step")),
}


def struck(folder: Path, moment: str, number: int, *, at: str = "command") -> Command:
    """A command to which a signal was sent at a moment; ``at``: command, launcher or rank (the last one)."""
    command = Command(folder)
    command.until(lambda: MOMENTS[moment](folder))
    if moment == "the launcher starts":
        time.sleep(0.5)
    command.signal(number, *(() if at == "command" else pids(folder, at)[-1:]))
    return command


def ends_as_undisturbed(folder: Path, reference: str) -> None:
    """The same command again gives the bytes of a run that nothing happened to."""
    code, text = Command(folder).end()
    assert code == 0 and adapter_sha(folder) == reference, text


@pytest.mark.parametrize(
    ("moment", "number", "at"),
    [
        *(("the launcher starts", number, "command") for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)),
        ("the ranks start", signal.SIGTERM, "command"),
        ("the last step", signal.SIGTERM, "command"),
        *(("a step", number, "rank") for number in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_who_is_asked_to_stop_stops_saves_and_goes_on(
    folder: Path, reference: str, moment: str, number: signal.Signals, at: str
) -> None:
    """A rank that is asked stops all; at the last step the export does not start."""
    code, text = struck(folder, moment, number, at=at).end()
    assert code == 75 and not (folder / "adapter").exists(), text
    if moment != "the last step":
        assert "stopped on request" in text or moment == "the ranks start", text
    if at == "rank":
        assert events(folder, "checkpoint")[-1]["step"] == events(folder, "stop")[-1]["step"]
    elif moment != "the last step":
        assert events(folder, "step") == []
    ends_as_undisturbed(folder, reference)
    if moment == "the last step":
        # A second attempt where the stop fell into the last evaluation: it makes that up, and takes no step.
        assert len(attempts(folder)) <= 2 and len(events(folder, "step")) == 6


@pytest.mark.parametrize("victim", ["launcher", "command"])
@pytest.mark.parametrize("moment", ["the ranks start", "a step"])
def test_nothing_outlives_the_launcher_or_the_command(folder: Path, victim: str, moment: str) -> None:
    """A rank that continued would write beside the next attempt: the run's lock is gone with the command."""
    command = struck(folder, moment, signal.SIGKILL, at=victim)
    began = time.monotonic()
    code, text = command.end()
    assert code == (75 if victim == "launcher" else -signal.SIGKILL), text
    assert time.monotonic() - began < 10


# --- storage ------------------------------------------------------------------------------------------------------------

ON_A_SMALL_DISK = """
import hashlib, json, shutil, subprocess, sys
from pathlib import Path

disk, prepared, room, *command = sys.argv[1:]
disk, run = Path(disk), Path(disk, "run")

def mount(*arguments):
    subprocess.run(["mount", *arguments, str(disk)], check=True)

def fill(room):
    with (disk / "ballast").open("wb", buffering=0) as out:
        while (left := shutil.disk_usage(disk).free - room) > 0:
            try:
                if not out.write(bytes(min(left, 1 << 16))):
                    return
            except OSError:
                return

def go():
    words = [*command, "--run-dir", str(run)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    return {"code": done.returncode, "text": done.stdout}

mount("-t", "tmpfs", "-o", "size=64m", "tmpfs")
shutil.copytree(prepared, run)
if room == "read-only":
    mount("-o", "remount,ro")
    found = [go()]
    mount("-o", "remount,rw")
else:
    fill(int(room))
    found = [go()]
    (disk / "ballast").unlink()
found.append(go())
adapter = run / "adapter" / "adapter_model.safetensors"
found.append(hashlib.sha256(adapter.read_bytes()).hexdigest() if adapter.exists() else None)
print(json.dumps(found))
"""


@pytest.mark.parametrize("room", [0, 300_000, 1_500_000, 3_000_000, "read-only"])
def test_no_room_then_room(prepared: Path, reference: str, tmp_path: Path, room: int | str) -> None:
    """Wherever the space runs out (records, metrics, the first save, the second): 73, and with room the same bytes."""
    command = [sys.executable, "-m", "clustertune", "run", "recipes/tiny-oasst2", "--to", "export", *SETTINGS]
    inside = ["unshare", "--map-root-user", "--mount", sys.executable, "-c", ON_A_SMALL_DISK]
    done = subprocess.run(
        [*inside, tmp_path, prepared, str(room), *command], cwd=REPO, capture_output=True, text=True, timeout=900, check=False,
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    full, again, adapter = json.loads(done.stdout)
    assert full["code"] == 73 and "same command again" in full["text"], full
    assert "Traceback" not in full["text"] + again["text"]
    if room == 3_000_000:
        assert "was not saved" in full["text"] and "needs about" in full["text"]
    assert again["code"] == 0 and adapter == reference, again
