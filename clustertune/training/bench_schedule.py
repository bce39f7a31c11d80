"""The steps of a benchmark: what its ranks read in their run folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

SETTINGS = "bench.json"
"""In a run folder: its ranks are measured."""


@dataclass(frozen=True)
class BenchSchedule:
    """How many optimizer steps, in this order."""

    warmup: int
    """Not timed: compilation, first connections, allocator."""
    steps: int
    """Timed."""

    @property
    def total(self) -> int:
        """Optimizer steps in all."""
        return self.warmup + self.steps

    def write(self, run_path: Path) -> None:
        """Have the ranks of a run measured."""
        (run_path / SETTINGS).write_text(json.dumps(asdict(self)) + "\n")


def read(run_path: Path) -> BenchSchedule | None:
    """What is to be measured in a run; None where it is not a benchmark's."""
    path = run_path / SETTINGS
    return BenchSchedule(**json.loads(path.read_text())) if path.exists() else None


def result_file(records: Path, rank: int) -> Path:
    """What a rank leaves."""
    return records / f"bench-rank-{rank}.json"
