"""What CI leaves out on a slow machine: named, and a failure."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.command import REPO
from tests.folders import program


def ci(tree: Path, begun: int, bare: str = "exit 0") -> subprocess.CompletedProcess[str]:
    """All of ``.ci/run`` with programs that do nothing, begun so many seconds before."""
    text = (REPO / ".ci/run").read_text(encoding="utf-8").replace("/usr/include/libaio.h", "/dev/null")
    for name in (*re.findall(r" \[(\S+)\]=", text), "apptainer"):
        program(tree / "tools" / name, "exit 0")
    for name, body in ((".ci/run", text.partition("\n")[2]), (".ci/bare", bare), (".venv/bin/python", "exit 0")):
        program(tree / name, body)
    environment = {**os.environ, "PATH": f"{tree}/tools:{os.environ['PATH']}", "SECONDS": str(begun)}
    command = ["bash", tree / ".ci/run"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("begun", "jobs", "code"), [(0, "all", 0), (5000, "none", 1)])
def test_jobs_that_are_left_out_are_named(begun: int, jobs: str, code: int, tmp_path: Path) -> None:
    done = ci(tmp_path, begun)
    ran, total = (int(number) for number in re.findall(r"(\d+) of (\d+) jobs ran", done.stderr)[0])
    assert bool(done.returncode) == bool(code) and ran + done.stderr.count("not run, the time is over") == total, done.stderr
    assert ran == {"all": total, "none": 0}[jobs]
    assert done.stdout.count("exit code 0: ") == 4 + ran


def test_a_part_that_fails_is_a_failure(tmp_path: Path) -> None:
    """Of those that run two at a time; the others go on, and its own exit code is said."""
    done = ci(tmp_path, 0, "exit 3")
    assert (
        done.returncode and "exit code 3: WORKERS=2 .ci/bare" in done.stdout and re.search(r"(\d+) of \1 jobs ran", done.stderr)
    )
