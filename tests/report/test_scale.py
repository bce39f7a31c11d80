"""Many steps: what a reader needs grows with the file no faster than it may, whatever the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SHORT, LONG = 5_000, 35_000


def used(words: Sequence[str]) -> float:
    """CPU seconds of a process."""
    code = "import os, resource, subprocess, sys; code = subprocess.run(sys.argv[1:], stdout=2).returncode; "
    code += "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(code, used.ru_utime + used.ru_stime)"
    done = subprocess.run(
        [sys.executable, "-c", code, sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        check=True,
    )  # fmt: skip
    exit_code, seconds = done.stdout.split()
    assert exit_code == "0"
    return float(seconds)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Run folders of few and of many steps, each step as a training logs it."""
    found = {}
    for steps in (SHORT, LONG):
        found[steps] = tmp_path_factory.mktemp("runs") / str(steps)
        found[steps].mkdir()
        (found[steps] / "run.json").write_text("{}")
        with (found[steps] / "metrics.jsonl").open("w") as out:
            for step in range(1, steps + 1):
                value = 1 + step % 977 / 977
                event = {"event": "step", "time": 1.8e9 + step, "attempt": 1, "step": step, "epoch": 2.0, "loss": value}
                event |= {"token_accuracy": 0.21062993, "entropy": 8.27556133, "learning_rate": 9.31405e-6, "grad_norm": value}
                event |= {"tokens": 512 * step, "seconds": value, "tokens_per_second": 984.1 * value, "memory_bytes": 900976640}
                event |= {"data_seconds": 0.000368, "forward_backward_seconds": 0.48455, "optimizer_seconds": 0.034416}
                out.write(json.dumps(event | {"padding": 0.0, "imbalance": 1.0}) + "\n")
    return found


@pytest.fixture(scope="module")
def parsing(runs: dict[int, Path]) -> float:
    """CPU seconds that one JSON pass takes for what the long file has more than the short one."""
    code = "import json, sys\nfor line in open(sys.argv[1], 'rb'): json.loads(line)"
    few, many = (min(used(["-c", code, str(runs[steps] / "metrics.jsonl")]) for _ in range(2)) for steps in (SHORT, LONG))
    return many - few


@pytest.mark.parametrize("command", [["report"], pytest.param(["watch", "--once", "--json"], marks=pytest.mark.jobs)])
def test_a_long_run_takes_a_few_json_passes(command: list[str], runs: dict[int, Path], parsing: float) -> None:
    """1.5 to 2.4 passes on a quiet machine; 3.01 were seen beside other jobs. A reader that parses once a page would need ten.

    Measured is what 30,000 steps add: less depends on the start of Python and its packages.
    """
    short, long = (min(used(["-m", "clustertune", *command, str(runs[steps])]) for _ in range(2)) for steps in (SHORT, LONG))
    assert long - short < 6 * parsing
