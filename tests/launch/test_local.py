"""The command that starts the ranks of one node."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from clustertune.launch import local
from clustertune.resolve.resolve import resolve
from clustertune.rundir import RunDir
from tests.command import REPO


def test_the_launcher_leaves_nothing_in_tmp(tmp_path: Path) -> None:
    """Torch's elastic agent made a folder there for every node and attempt, and took none away."""
    resolved = resolve("tiny-oasst2", tiny=True, ranks=2)
    RunDir(tmp_path).write_own_files(resolved)
    command = local.accelerate_command(RunDir(tmp_path), resolved, ["--help"], local.local_plan(resolved, 1))
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.count("Usage:") == 2, done.stderr
    assert not list(tmp_path.glob("torchelastic*"))
