"""The warning ahead of the time limit: long enough for the step it meets and the save after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.launch import shape
from clustertune.resolve.resolve import resolve


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
    assert shape.signal_given(text) == given


def test_too_late_is_said() -> None:
    """At the start of a job, when it can still be resubmitted, and with the option to use."""
    assert shape.signal_warning(100, 100) is None
    assert "--signal=B:USR1@100" in str(shape.signal_warning(99, 100))
    assert "no --signal" in str(shape.signal_warning(None, 100))


def test_too_early_is_said() -> None:
    """The shipped header's 25 minutes, in a job of ten, stop it at once and at every start: it would go round for ever."""
    warning = str(shape.signal_warning(1500, 60, 10))
    assert "stop 0 s after its start" in warning and "--signal=B:USR1@60" in warning
    assert "stop 300 s after its start" in str(shape.signal_warning(1500, 60, 30))
    assert shape.signal_warning(1500, 60, 60) is None and shape.signal_warning(1500, 60, None) is None


def test_a_limit_that_the_warning_uses_up() -> None:
    """A job that is asked to stop as soon as it starts would be requeued for ever."""
    assert shape.signal_problems(600, 22, file="r") == []
    assert "at least 22 minutes" in str(shape.signal_problems(600, 21.9, file="r")[0])


def test_the_header_that_ships_warns_in_time(repo: Path) -> None:
    """launch/run.sbatch has the shape of the reference recipe; its warning must be in time for that."""
    given = shape.signal_given((repo / "launch" / "run.sbatch").read_text())
    assert given == resolve("llama405b-oasst2").recipe.slurm.signal_seconds
    assert resolve("llama405b-oasst2", tiny=True).recipe.slurm.signal_seconds < 100
