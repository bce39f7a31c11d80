"""The comparison with plain TRL: its arithmetic, and one real round."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command import REPO
from tools import bench_trl


def rank(*seconds: float, tokens: int = 100) -> dict[str, Any]:
    return {"steps": [{"seconds": one, "tokens": tokens} for one in seconds], "peak": {"rss": 2**30}}


@pytest.mark.parametrize(("n", "low", "high"), [(5, None, None), (6, 1, 6), (9, 2, 8), (20, 6, 15), (100, 40, 61)])
def test_the_interval_of_a_median(n: int, low: int | None, high: int | None) -> None:
    """The order statistics of published tables (95 %, two-sided), and none where no two of them reach it."""
    found = bench_trl.interval([float(value) for value in range(n, 0, -1)])
    assert (found["low"], found["high"], found["n"]) == (low, high, n) and found["median"] == (n + 1) / 2


def test_pairs_are_of_the_same_step_on_the_slowest_rank() -> None:
    """Ours over theirs: above 1 is slower than TRL."""
    found = bench_trl.ratios([rank(1.0, 10.0), rank(1.1, 9.0)], [rank(1.0, 10.0), rank(0.5, 10.0)])
    assert found == [pytest.approx(1.1), 1.0]


def test_a_rank_without_figures_is_a_failure(tmp_path: Path) -> None:
    """Half of the ranks must not become a step time."""
    (tmp_path / "bench-rank-0.json").write_text(json.dumps(rank(1.0)))
    with pytest.raises(bench_trl.Failed):
        bench_trl.records_of(tmp_path, 2)


@pytest.mark.jobs
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("more", [[], ["--defaults"]])
def test_a_round_against_trl(more: list[str], tmp_path: Path) -> None:
    """The same conversations, cut at the same length, and the recipe's own arguments or TRL's defaults."""
    words = ["tiny-oasst2", "train.max_length=64", "train.packing=false", "--steps", "2", "--warmup", "1", "--rounds", "1"]
    command = [sys.executable, "-m", "tools.bench_trl", *words, *more, "--work", str(tmp_path / "w"), "--json"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same_tokens"] and found["ratio"]["n"] == 2 and found["ratio"]["median"] > 0 and found["peak_ratio"] > 0
