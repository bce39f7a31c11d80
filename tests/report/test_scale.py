"""Many steps: what a reader needs grows with the file no faster than it may, whatever the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from clustertune.resolve.resolve import resolve

SHORT, LONG, MILLION = 5_000, 35_000, 1_000_000


class Used(NamedTuple):
    """What a process took."""

    seconds: float
    """Of CPU."""
    bytes: float
    """Resident at its peak."""


def used(words: Sequence[str]) -> Used:
    """What a process took."""
    code = "import os, resource, subprocess, sys; code = subprocess.run(sys.argv[1:], stdout=2).returncode; "
    code += "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(code, used.ru_utime + used.ru_stime, used.ru_maxrss)"
    done = subprocess.run(
        [sys.executable, "-c", code, sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        check=True,
    )  # fmt: skip
    exit_code, seconds, kilobytes = done.stdout.split()
    assert exit_code == "0"
    return Used(float(seconds), 1024 * float(kilobytes))


def make_run(folder: Path, steps: int) -> Path:
    """A run folder of so many steps, each step as a training logs it."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"recipe": resolve("tiny-oasst2").as_dict()}))
    with (folder / "metrics.jsonl").open("w") as out:
        for step in range(1, steps + 1):
            value = 1 + step % 977 / 977
            event = {"event": "step", "time": 1.8e9 + step, "attempt": 1, "step": step, "epoch": 2.0, "loss": value}
            event |= {"token_accuracy": 0.21062993, "entropy": 8.27556133, "learning_rate": 9.31405e-6, "grad_norm": value}
            event |= {"tokens": 512 * step, "seconds": value, "tokens_per_second": 984.1 * value, "memory_bytes": 900976640}
            event |= {"data_seconds": 0.000368, "forward_backward_seconds": 0.48455, "optimizer_seconds": 0.034416}
            out.write(json.dumps(event | {"padding": 0.0, "imbalance": 1.0}) + "\n")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Run folders of few and of many steps."""
    folder = tmp_path_factory.mktemp("runs")
    return {steps: make_run(folder / str(steps), steps) for steps in (SHORT, LONG)}


@pytest.fixture(scope="module")
def parsing(runs: dict[int, Path]) -> float:
    """CPU seconds that one JSON pass takes for what the long file has more than the short one."""
    code = "import json, sys\nfor line in open(sys.argv[1], 'rb'): json.loads(line)"
    files = (str(runs[steps] / "metrics.jsonl") for steps in (SHORT, LONG))
    few, many = (min(used(["-c", code, file]).seconds for _ in range(2)) for file in files)
    return many - few


@pytest.mark.parametrize("command", [["report"], pytest.param(["watch", "--once", "--json"], marks=pytest.mark.jobs)])
def test_a_long_run_takes_a_few_json_passes_and_little_memory(
    command: list[str], runs: dict[int, Path], parsing: float
) -> None:
    """1.5 to 2.4 passes on a quiet machine; 3.01 were seen beside other jobs. A reader that parses once a page would need ten.

    A step's figures are 9 bytes each in columns, 100 together; an object for each step takes 500, and each list of floats 32.
    Measured is what 30,000 steps add: less depends on the start of Python and its packages.
    """
    shorts, longs = ([used(["-m", "clustertune", *command, str(runs[n])]) for _ in range(2)] for n in (SHORT, LONG))
    assert min(one.seconds for one in longs) - min(one.seconds for one in shorts) < 6 * parsing
    assert min(one.bytes for one in longs) - min(one.bytes for one in shorts) < 400 * (LONG - SHORT)


@pytest.mark.jobs
def test_a_million_steps_are_read_in_300_mb(tmp_path: Path) -> None:
    run = str(make_run(tmp_path / "run", MILLION))
    for words in (["report", run], ["watch", "--once", run], ["compare", run, run]):
        assert used(["-m", "clustertune", *words]).bytes < 300e6, words
