"""``make gpu-check``: verdicts, what is run again, time limits that end every process, the page; all without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from clustertune.testbed.inside import state
from tests.command import REPO
from tools import gpu_check, gpu_parts
from tools.gpu_check import Failed, GpuCheck, NotHere

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
code = gpu_check.main(["--backend", "gloo", "--name", "x", "--state", folder, "--out", folder])
print(code, *gpu_check.descendants(os.getpid()))
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
    words = [*LOCAL, "--state", str(tmp_path / "s"), "--out", str(tmp_path)]
    assert gpu_check.main(words) == 1 and called == ["a", "b", "c"]
    assert gpu_check.main(words) == 0 and called[3:] == ["b", "c"]
    assert gpu_check.main([*words, "--again", "--parts", "a"]) == 0 and called[5:] == ["a"]
    page = (tmp_path / "gpu-try.md").read_text()
    assert "2 passed, 0 failed, 1 not possible here, 0 not run." in page and "| c | not possible here |" in page
    assert str(REPO) not in page
    (tmp_path / "s" / "state.json").write_text("{torn")
    assert gpu_check.main(words) == 0 and called[6:] == ["a", "b", "c"]
    capsys.readouterr()
    assert gpu_check.main([*words, "--parts", "nothing"]) == 2 and "no such part: nothing" in capsys.readouterr().err


def test_without_git_and_nvidia_smi_it_goes_on(called: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container; what is to be carried away is one file."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert gpu_check.commit() == "unknown" and gpu_parts.gpu_name() == "gpu"
    assert gpu_check.main([*LOCAL, "--state", str(tmp_path / "s"), "--out", str(tmp_path)]) == 1 and called == ["a", "b", "c"]
    with tarfile.open(tmp_path / "s" / "gpu-check.tar.gz") as archive:
        assert {"state.json", "gpu-try.md"} <= set(archive.getnames())


def test_a_budget_begins_no_part_that_may_outlast_it(called: list[str], tmp_path: Path) -> None:
    """A machine that ends each command after ten minutes would kill a part in its middle."""
    words = [*LOCAL, "--state", str(tmp_path / "s"), "--out", str(tmp_path)]
    assert gpu_check.main([*words, "--budget", "100"]) == 0 and called == []
    assert gpu_check.main([*words, "--budget", "481", "--parts", "a"]) == 0 and called == ["a"]


def test_a_call_that_is_ended_ends_its_command(tmp_path: Path) -> None:
    """SIGTERM, as a scheduler sends it: the ranks below are not left behind."""
    child = subprocess.Popen([sys.executable, "-c", MAIN, str(tmp_path), RANKS, "600", "480"], cwd=REPO)
    while not (tmp_path / "pid").exists():
        assert child.poll() is None
        time.sleep(0.1)
    below = gpu_check.descendants(child.pid)
    child.terminate()
    assert child.wait(200) == 143 and len(below) == 2 and not {"R", "S", "D"} & {*map(state, below)}


def test_parts_are_named_one_by_one_or_by_their_beginning() -> None:
    """And a word that names none is refused, not left out."""
    known = gpu_parts.parts()
    assert {path.parent.name for path in (REPO / "recipes").glob("*/recipe.yaml")} == {
        name.removeprefix("tiny-") for name in known if name.startswith("tiny-")
    }
    chosen, unknown = gpu_parts.choose("bench-8b,eval,nothing", known)
    assert unknown == ["nothing"] and "eval" in chosen
    assert all(name.startswith("bench-8b-") for name in chosen if name != "eval")
    assert gpu_parts.choose("bench-8b-full", known) == (["bench-8b-full"], [])
    assert len(chosen) == 4 and gpu_parts.choose("", known)[1] == []
    default = gpu_parts.choose("", known)[0]
    assert default[: len(gpu_parts.FIRST)] == list(gpu_parts.FIRST) and "bench-8b-full" in default
    assert set(known) - set(default) == {"doctor"}
    assert all(part.__doc__ for part in known.values()) and all(gpu_parts.seconds(name) <= 480 for name in known)


def test_on_cpus_it_runs_and_says_what_needs_a_gpu(tmp_path: Path) -> None:
    """In parts that cost little; no path of this machine on the page."""
    names = "versions,gpu-tests,bench-8b-full,tiny-llama70b-megatron"
    done = run(*LOCAL, "--parts", names, "--state", tmp_path / "s", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    parts = parts_of(tmp_path)
    assert parts["versions"]["verdict"] == "pass" and parts["versions"]["facts"]["differ"] == {}
    for name, word in (("gpu-tests", "need CUDA"), ("bench-8b-full", "CPUs"), ("tiny-llama70b-megatron", "megatron")):
        assert parts[name]["verdict"] == "not possible here" and word in parts[name]["why"]
    assert str(REPO) not in (tmp_path / "gpu-try.md").read_text()


def test_losses_are_compared_step_by_step() -> None:
    """The first is held closer than the others; a missing step, a NaN and one that is too far off are faults."""
    cpu = {1: 8.0, 2: 7.0}
    assert gpu_parts.furthest({1: 8.01, 2: 7.1}, cpu, 0.005, 0.03) == pytest.approx(0.1 / 7)
    for wrong in ({1: 8.1, 2: 7.0}, {1: 8.0, 2: 7.5}, {1: 8.0}, {1: 8.0, 2: float("nan")}, {}):
        with pytest.raises(Failed):
            gpu_parts.furthest(wrong, cpu, 0.005, 0.03)


def test_several_gpus_are_asked_for_where_they_are_needed(tmp_path: Path) -> None:
    """NCCL refuses two ranks on one GPU: what needs more says so before anything is started."""
    one = check(tmp_path, backend="nccl", gpus=1)
    for recipe, word in (
        ("llama70b-tp-fsdp2", "tp"),
        ("llama8b-longcontext-32k", "cp"),
        ("llama405b-oasst2-hsdp-qlora", "dp_rep"),
    ):
        with pytest.raises(NotHere, match=word):
            gpu_parts.parts()[f"tiny-{recipe}"](one)
    assert gpu_parts.mesh("tiny-oasst2") == []


def test_the_page_shows_speed_and_losses() -> None:
    """And how many parts were not run."""
    speed = {"step_s": 1.5, "tokens_per_s_per_gpu": 12345.6, "mfu": 0.41, "peak_gib": 33.0, "planned": {"ratio": 1.1}}
    facts = {
        "bench-8b-lora": speed,
        "tiny-x": {"here": {"1": 8.0, "10": 6.0, "2": 7.0}, "cpu": {"1": 8.0}, "ranks": 1},
    }
    base = {"verdict": "pass", "seconds": 1.0, "date": "d", "commit": "c", "why": "w"}
    state = {"name": "x", "command": "make gpu-check", "parts": {name: {**base, "facts": one} for name, one in facts.items()}}
    text = "\n".join(gpu_parts.page(state, [*facts, "other"]))
    for part in (
        "12,346", "41.0%", "1.10", "8.0000 7.0000 6.0000", "1 not run",
    ):  # fmt: skip
        assert part in text, part


@pytest.mark.jobs
@pytest.mark.timeout(2400)
def test_the_longer_parts_on_cpus(tmp_path: Path) -> None:
    """The chain with its kill and resume, the evaluation, a strategy, and the benchmark against TRL."""
    names = "doctor,nccl,chain,telemetry,eval,tiny-tiny-oasst2,bench-1b-full"
    done = run(*LOCAL, "--short", "--state", tmp_path / "s", "--out", tmp_path, "--parts", names, OMP_NUM_THREADS="1")
    parts = parts_of(tmp_path)
    assert {name: (one["verdict"], one["why"]) for name, one in parts.items() if one["verdict"] != "pass"} == {}, done.stderr
    assert "resumed from step" in parts["chain"]["why"]
