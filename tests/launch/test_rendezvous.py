"""Where nodes meet: a port that is free, outside the ephemeral range, another one for each job; and what starts their ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from clustertune.errors import ExitCode, UserError
from clustertune.launch import rendezvous
from clustertune.launch.node import accelerate_command
from clustertune.launch.plan import AttemptPlan, Node
from clustertune.resolve.resolve import resolve
from clustertune.rundir import RunDir
from tests.command import REPO

PLAN = AttemptPlan(attempt=1, nodes=(Node("a", "a"), Node("b", "b")), ranks_per_node=1)


def test_jobs_search_from_different_ports() -> None:
    starts = {rendezvous.first_port(job, 1) for job in range(1000, 1200)}
    assert len(starts) == 200 and min(starts) >= 20_000 and max(starts) < 32_000
    assert rendezvous.first_port("1234_7", 1) in range(20_000, 32_000), "an array task's id"
    assert rendezvous.first_port(7, 1) != rendezvous.first_port(7, 2)


def test_a_port_in_use_is_passed_over() -> None:
    start = rendezvous.free_port(rendezvous.first_port(4711, 1))
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")):  # noqa: S104
        with socket.socket(family) as taken:
            taken.bind((address, start))
            taken.listen()
            found = rendezvous.free_port(start)
            assert found != start and 20_000 <= found < 32_768


@pytest.mark.parametrize("low", [32_768, 30_000, 15_000, 1024])
def test_the_ephemeral_range_is_left_alone(low: int) -> None:
    """From it any outgoing connection may take the port between its choice and its use."""
    for job in range(5):
        port = rendezvous.free_port(rendezvous.first_port(job * 1001, 1), ephemeral_from=low)
        assert port < low or low == 1024


def test_the_others_learn_it_from_the_run_folder(tmp_path: Path) -> None:
    thread = threading.Timer(0.5, rendezvous.publish, (tmp_path, "10.0.0.1", 21_000))
    thread.start()
    assert rendezvous.await_published(tmp_path, PLAN, lambda: False) == ("10.0.0.1", 21_000)


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="storage that all nodes see") as caught:
        rendezvous.await_published(tmp_path, PLAN, lambda: False, seconds=0.3)
    assert caught.value.code is ExitCode.AGAIN
    with pytest.raises(UserError):
        rendezvous.await_published(tmp_path, PLAN, lambda: True)


def test_the_launcher_leaves_nothing_in_tmp(tmp_path: Path) -> None:
    """Torch's elastic agent made a folder there for every node and attempt, and took none away."""
    resolved = resolve("tiny-oasst2", tiny=True, ranks=2)
    RunDir(tmp_path).write_own_files(resolved)
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(REPO)}
    command = accelerate_command(RunDir(tmp_path), resolved, ["--help"])
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.count("Usage:") == 2, done.stderr
    assert not list(tmp_path.glob("torchelastic*"))
