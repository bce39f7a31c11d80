"""``make gpu-check``: verdicts, what is run again, time limits that end every process; all without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.command import REPO
from tools import gpu_check, gpu_parts
from tools.gpu_commands import Failed, GpuCheck, NotHere

LOCAL = ["--backend", "gloo", "--name", "try"]


def run(
    *words: str | Path, program: tuple[str, ...] = ("-m", "tools.gpu_check"), **env: str
) -> subprocess.CompletedProcess[str]:
    """The script as a user calls it, to its end."""
    return subprocess.run(
        [sys.executable, *program, *map(str, words)],
        cwd=REPO, capture_output=True, text=True, timeout=2300, check=False, env={**os.environ, **env},
    )  # fmt: skip


def parts_of(tmp_path: Path) -> dict[str, Any]:
    return dict(json.loads((tmp_path / "s" / "state.json").read_text())["parts"])


def check(tmp_path: Path, **more: Any) -> GpuCheck:
    values: dict[str, Any] = {"name": "try", "backend": "gloo", "gpus": 0, "deadline": time.monotonic() + 60, "part": "x"}
    return GpuCheck(folder=tmp_path / "state", work=tmp_path / "work", python=sys.executable, **{**values, **more})


def raising(error: Exception) -> Any:
    def part(_check: GpuCheck) -> dict[str, Any]:
        raise error

    return part


@pytest.mark.parametrize(
    ("part", "verdict", "why"),
    [
        (lambda _check: {"why": "fine", "figure": 1}, "pass", "fine"),
        (raising(NotHere("there is one GPU")), "not possible here", "because there is one GPU"),
        (raising(Failed("loss")), "fail", "loss"),
        (raising(KeyError("ours")), "fail", "KeyError: 'ours'"),
    ],
)
def test_a_part_ends_in_one_of_three_verdicts(part: Any, verdict: str, why: str, tmp_path: Path) -> None:
    """A fault of the script itself is a failed part, and no end of the others."""
    found = gpu_check.run_part(check(tmp_path), "x", part)
    assert (found["verdict"], found["why"]) == (verdict, why) and found["commit"] and "why" not in found["facts"]


RANKS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time, sys; open(sys.argv[1], 'w').write('x'); time.sleep(600)", sys.argv[1]],
                 start_new_session=True)
time.sleep(float(sys.argv[2]))
"""
MAIN = """
import os, sys
from tools import gpu_check, gpu_parts
folder, ranks, seconds, gpu_check.LONGEST = *sys.argv[1:4], float(sys.argv[4])
def part(check):
    check.run(sys.executable, "-c", ranks, folder + "/pid", seconds)
    return {}
gpu_parts.parts = lambda: {"x": part}
code = gpu_check.main(["--backend", "gloo", "--name", "x", "--state", folder])
from clustertune.testbed.inside import descendants
print(code, *descendants(os.getpid()))
"""


@pytest.mark.parametrize(("seconds", "code"), [(600, 1), (2, 0)])
def test_nothing_outlives_a_part(seconds: int, code: int, tmp_path: Path) -> None:
    """Neither a command beyond its time, nor a rank in a session of its own whose launcher has ended."""
    done = run(tmp_path, RANKS, str(seconds), "4", program=("-c", MAIN))
    assert done.stdout == f"{code}\n" and (tmp_path / "pid").exists(), done.stderr


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three parts in place of the real ones; ``b`` passes from its second call on."""
    seen: list[str] = []

    def part(name: str) -> Any:
        def do(_check: GpuCheck) -> dict[str, Any]:
            """One of three."""
            seen.append(name)
            if name == "c":
                raise NotHere("of its kind")
            if name == "b" and seen.count("b") == 1:
                raise Failed("once")
            return {}

        return do

    monkeypatch.setattr(gpu_parts, "parts", lambda: {name: part(name) for name in ("a", "b", "c")})
    monkeypatch.setattr(gpu_check, "adopt_orphans", lambda: None)
    monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)
    return seen


def test_a_second_call_goes_on(called: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What has passed is not run again unless asked; what failed or was not possible is."""
    words = [*LOCAL, "--state", str(tmp_path / "s")]
    assert gpu_check.main(words) == 1 and called == ["a", "b", "c"]
    assert gpu_check.main(words) == 0 and called[3:] == ["b", "c"]
    assert gpu_check.main([*words, "--again", "--parts", "a"]) == 0 and called[5:] == ["a"]
    assert [part["verdict"] for part in parts_of(tmp_path).values()] == ["pass", "pass", "not possible here"]
    (tmp_path / "s" / "state.json").write_text("{torn")
    assert gpu_check.main(words) == 0 and called[6:] == ["a", "b", "c"]
    capsys.readouterr()
    assert gpu_check.main([*words, "--parts", "nothing"]) == 2 and "no such part: nothing" in capsys.readouterr().err


def test_on_cpus_it_runs_and_says_what_needs_a_gpu(tmp_path: Path) -> None:
    """In parts that cost little."""
    names = "versions,gpu-tests,bench-8b-full,tiny-llama70b-megatron"
    done = run(*LOCAL, "--parts", names, "--state", tmp_path / "s")
    assert done.returncode == 0, done.stderr
    parts = parts_of(tmp_path)
    assert parts["versions"]["verdict"] == "pass" and parts["versions"]["facts"]["differ"] == {}
    for name, word in (("gpu-tests", "need CUDA"), ("bench-8b-full", "CPUs"), ("tiny-llama70b-megatron", "megatron")):
        assert parts[name]["verdict"] == "not possible here" and word in parts[name]["why"]
