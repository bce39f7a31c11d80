"""One rank's program around the training: whose child it is, what it says when it fails, and to whom."""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertune import errors, rank
from clustertune.errors import ExitCode, UserError
from clustertune.launch.agent import launcher_pid_file
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.process import STOP_SIGNALS
from clustertune.resolve.resolve import resolve
from clustertune.rundir import RunDir
from clustertune.training import build, event_log
from tests.command import REPO
from tests.slurm import wait_for

ONE_RANK = AttemptPlan(attempt=1, nodes=(Node("here", "here"),), ranks_per_node=1)
ORPHAN = """
import os, sys, time
from pathlib import Path
from clustertune import rank
folder, late, launcher = Path(sys.argv[1]), sys.argv[2] == "late", os.getpid()
(folder / "node-0.pid").write_text(str(launcher))
if os.fork():
    while not (late or (folder / "bound").exists()):
        time.sleep(0.01)
    os._exit(0)
while late and os.getppid() == launcher:
    time.sleep(0.01)
(folder / "said").write_text(str(rank._bind_to_launcher(folder / "node-0.pid")))
(folder / "bound").touch()
time.sleep(0.5)
(folder / "survived").touch()
"""


@pytest.mark.parametrize("moment", ["late", "early"])
def test_a_rank_ends_with_its_launcher(tmp_path: Path, moment: str) -> None:
    """Killed by the kernel where it was bound in time; by its own look at the parent where it was still starting."""
    subprocess.run([sys.executable, "-c", ORPHAN, str(tmp_path), moment], cwd=REPO, check=True)
    wait_for((tmp_path / "bound").exists, "a word", 30)
    assert (tmp_path / "said").read_text() == ("False" if moment == "late" else "True")
    time.sleep(1)
    assert (tmp_path / "survived").exists() is (moment == "late")


def test_another_launcher_s_rank_is_asked_and_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun and torchrun leave no such file; a save may still succeed before they end the step."""
    bound: list[signal.Signals] = []
    monkeypatch.setattr(rank, "die_with_parent", bound.append)
    assert rank._bind_to_launcher(launcher_pid_file(tmp_path, 0))
    launcher_pid_file(tmp_path, 0).write_text(f"{os.getppid()}\n")
    assert rank._bind_to_launcher(launcher_pid_file(tmp_path, 0))
    assert bound == [signal.SIGTERM, signal.SIGKILL]


def test_a_full_disk_is_found_in_what_libraries_wrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "shard")
    wrapped = RuntimeError("could not build the dataset")
    wrapped.__cause__ = ValueError("inner")
    wrapped.__cause__.__context__ = full
    from torch.distributed.checkpoint import CheckpointException

    by_rank = CheckpointException("saving", {1: (full, None)})  # type: ignore[dict-item]
    for error in (full, wrapped, by_rank):
        known = rank._explain(error, tmp_path / "rank-0.log")
        assert known.code is ExitCode.STORAGE and "free space" in str(known), error
    lost = RuntimeError("Connection closed by peer")
    assert rank._explain(lost, tmp_path / "rank-0.log").code is ExitCode.FAILED
    assert rank._explain(ConnectionResetError(errno.ECONNRESET, "reset"), tmp_path / "log").code is ExitCode.FAILED
    monkeypatch.setattr(rank, "is_full", lambda path: True)
    assert rank._explain(RuntimeError("file write failed"), tmp_path / "log").code is ExitCode.STORAGE
    assert rank._explain(KeyboardInterrupt(), tmp_path / "log").code is ExitCode.AGAIN
    one, two = ValueError("one"), ValueError("two")
    one.__context__, two.__context__ = two, one
    assert errors.storage_cause(one) is None, "a cycle of causes ends"


def test_training_does_not_stop_for_its_audience() -> None:
    """``clustertune run ... | head``: the reader is gone."""
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(BrokenPipeError):
        os.write(write, b"x")
    out = rank._Forgiving(os.fdopen(write, "wb", 0))
    out.write("step 1\n")
    out.flush()
    read, write = os.pipe()
    heard = rank._Forgiving(os.fdopen(write, "wb", 0))
    heard.write("step 2\n")
    assert os.read(read, 100) == b"step 2\n"


def in_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: Any) -> tuple[Any, list[int]]:
    """Run ``rank.main`` with another training in its place; returns the rank's record and how it left."""
    left: list[int] = []
    streams = [os.dup(1), os.dup(2)]
    (tmp_path / "attempts" / "0001").mkdir(parents=True, exist_ok=True)
    handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGHUP)}
    with monkeypatch.context() as patch:
        patch.setattr(rank, "train", train)
        patch.setattr(rank, "_bind_to_launcher", lambda path: True)
        patch.setattr(os, "_exit", left.append)
        patch.setenv("RANK", "0")
        try:
            rank.main(tmp_path, 1, quiet=True)
        finally:
            for number, stream in enumerate(streams, 1):
                os.dup2(stream, number)
                os.close(stream)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            faulthandler.unregister(signal.SIGUSR2)
    return json.loads((tmp_path / "attempts" / "0001" / "rank-0.json").read_text()), left


def test_a_rank_that_raised_leaves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may wait in a collective for it, also where it is to be started again: the orderly end waits for them."""

    def fail(*args: Any) -> Any:
        args[3]("train", 7)
        raise UserError("interrupted", ExitCode.AGAIN)

    record, left = in_attempt(tmp_path, monkeypatch, fail)
    assert left == [75] and (record["code"], record["step"], record["host"]) == (75, 7, os.uname().nodename)
    assert (tmp_path / "attempts" / "0001" / "rank-0.heartbeat").read_text().split()[1:] == ["end", "7"]
    record, left = in_attempt(tmp_path, monkeypatch, lambda *args: ExitCode.OK)
    assert left == [] and record["code"] == 0


def test_what_fails_in_an_attempt_that_was_followed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are taken away under it, and its peers are gone: exit 75, and W&B's run is left to the next attempt."""
    finished: list[int] = []
    monkeypatch.setattr(event_log, "finish_wandb", lambda code: finished.append(code) or True)

    def fail(*args: Any) -> Any:
        (tmp_path / "attempts" / "0002").mkdir()
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "shard")

    record, left = in_attempt(tmp_path, monkeypatch, fail)
    assert left == [75] and record["code"] == 75 and "attempt 2 has taken over" in record["problems"][0]["message"]
    assert finished == []
    record, left = in_attempt(tmp_path, monkeypatch, lambda *args: pytest.fail("it began"))
    assert left == [75]


def test_the_plan_s_variables_go_first_and_are_told_where_they_change_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1", "RANK": "3", "LOCAL_RANK": "1"})
    values = {"NCCL_DEBUG": "WARN", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "bond0"}
    notes = rank._follow_plan(replace(ONE_RANK, ranks_per_node=2, environment=values))
    assert values.items() <= os.environ.items()
    assert notes == ["NCCL_DEBUG=WARN by the plan of this attempt; it was INFO in the environment"]
    assert rank._follow_plan(None) == [] and rank._follow_plan(ONE_RANK) == []


@pytest.mark.parametrize(
    ("recipe", "ranks", "visible", "seen"),
    [
        ("llama8b-qlora-1gpu", 1, None, "0"),
        ("llama8b-qlora-1gpu", 1, "5,6,7", "5"),
        ("llama8b-qlora-1gpu", 1, "GPU-1b,GPU-2c", "GPU-1b"),
        ("llama8b-qlora-1gpu", 1, "", ""),
        ("tiny-oasst2", 2, "5,6,7", "5,6,7"),
        ("tiny-oasst2", 2, None, None),
    ],
)
def test_a_training_of_one_rank_sees_one_gpu(
    recipe: str, ranks: int, visible: str | None, seen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight TRL would take all: the layers spread over them, or each batch torn apart by DataParallel."""
    monkeypatch.setattr(os, "environ", {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})

    def before_torch(*_: Any, **__: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(build, "set_environment", before_torch)
    with pytest.raises(InterruptedError):
        rank._set_environment(resolve(recipe, tiny=True, ranks=ranks), RunDir(tmp_path), "x", has_key=False)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen
