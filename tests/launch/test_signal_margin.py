"""The warning ahead of the time limit: long enough for the step it meets and the save after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.launch import signal_margin
from clustertune.resolve.resolve import resolve


def run_with(folder: Path, *events: dict[str, Any] | str) -> Path:
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_measured_figures_count(tmp_path: Path) -> None:
    """1.5 x p95 of the steps + p95 of the saves + 30 s, over all attempts; torn lines and removals are not figures."""
    steps = [{"event": "step", "attempt": 1 + i // 10, "step": i, "seconds": 10.0 + i} for i in range(20)]
    saves = [{"event": "checkpoint", "step": 5, "seconds": 7.0}, {"event": "checkpoint", "status": "removed", "seconds": 9e9}]
    odd = ['{"event": "step", "seco', '{"event": "step", "seconds": true}', "[1]", '{"event":"step","seconds":Infinity}']
    run = run_with(tmp_path, *steps, *saves, *odd)
    found = signal_margin.needed(run, resolve("llama405b-oasst2"))
    assert found.seconds == round(1.5 * 28.0 + 7.0 + 30)
    assert "20 measured steps" in found.reason


def test_the_recipe_counts_where_nothing_was_measured(tmp_path: Path) -> None:
    """The reference run's step takes 14 minutes: the customary minute of warning would save nothing."""
    found = signal_margin.needed(tmp_path, resolve("llama405b-oasst2"))
    assert found.seconds == 1.5 * 840 + 120 + 30
    assert (
        signal_margin.needed(None, resolve("llama405b-oasst2", ["expect.steps=null"])).seconds == signal_margin.DEFAULT_SECONDS
    )
    assert signal_margin.needed(None, resolve("llama405b-oasst2", tiny=True)).seconds == signal_margin.TINY_SECONDS


def test_percentile() -> None:
    """Of few values the slowest counts."""
    assert signal_margin.percentile([3.0]) == 3
    assert signal_margin.percentile([1.0, 9.0, 2.0]) == 9
    assert signal_margin.percentile([float(i) for i in range(1, 101)]) == 95


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("#SBATCH --signal=B:USR1@1500\n", 1500),
        ("#SBATCH --requeue --signal=B:USR1@90 --mem=0\n", 90),
        ("#SBATCH --signal=USR1@90\n", 90),
        ("#SBATCH --signal=RB:USR1@91\n", 91),
        ("#SBATCH --signal=B:10@92\n", 92),
        ("## SBATCH --signal=B:USR1@90\n# --signal=B:USR1@90\n", None),
        ("", None),
    ],
)
def test_the_signal_of_a_script(text: str, given: int | None) -> None:
    """What a header gives must be read as Slurm reads it, or a good one is warned about."""
    assert signal_margin.given_in(text) == given


def test_too_late_is_said() -> None:
    """At the start of a job, when it can still be resubmitted, and with the option to use."""
    wanted = signal_margin.SignalMargin(100, "measured")
    assert signal_margin.warning(100, wanted) is None
    assert "--signal=B:USR1@100" in str(signal_margin.warning(99, wanted))
    assert "no --signal" in str(signal_margin.warning(None, wanted))


def test_too_early_is_said() -> None:
    """The shipped header's 25 minutes, in a job of ten, stop it at once and at every start: it would go round for ever."""
    wanted = signal_margin.SignalMargin(60, "tiny")
    warning = str(signal_margin.warning(1500, wanted, 10))
    assert "stop 0 s after its start" in warning and "--signal=B:USR1@60" in warning
    assert "stop 300 s after its start" in str(signal_margin.warning(1500, wanted, 30))
    assert signal_margin.warning(1500, wanted, 60) is None and signal_margin.warning(1500, wanted, None) is None


def test_a_limit_that_the_warning_uses_up() -> None:
    """A job that is asked to stop as soon as it starts would be requeued for ever."""
    wanted = signal_margin.SignalMargin(600, "measured")
    assert signal_margin.find_problems(wanted, 22, file="r") == []
    assert "at least 22 minutes" in str(signal_margin.find_problems(wanted, 21.9, file="r")[0])
    assert signal_margin.find_problems(signal_margin.SignalMargin(70_000, "slow"), 10_000, file="r")[0].key == "slurm.time"


def test_the_header_that_ships_warns_in_time(repo: Path) -> None:
    """launch/run.sbatch has the shape of the reference recipe; its warning must be in time for that."""
    given = signal_margin.given_in((repo / "launch" / "run.sbatch").read_text())
    assert signal_margin.warning(given, signal_margin.needed(None, resolve("llama405b-oasst2"))) is None
