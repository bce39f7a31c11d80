"""Every recipe, ``--tiny``, through the one sbatch file on a real Slurm of two nodes, with its own distribution file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertune.testbed.cluster import TemporaryCluster
from tests.recipe_runs import RUNS, judge, words
from tests.slurm import make, tidy
from tests.slurm_job import Job

pytestmark = [pytest.mark.timeout(900), pytest.mark.jobs]


@pytest.fixture(scope="module")
def two_by_two() -> Iterator[TemporaryCluster]:
    """Two nodes with two GPUs each: a mesh of two axes takes all four."""
    with make(2, gpus=2) as cluster:
        yield cluster


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_goes_through_the_real_launcher(name: str, two_by_two: TemporaryCluster, tmp_path: Path) -> None:
    """The job ends well, and its ranks were what the recipe says: distribution, mesh, placements, loss."""
    wanted = RUNS[name]
    each = max(1, wanted.ranks // 2)
    job = Job(
        two_by_two,
        tmp_path / "r",
        words=[f"recipes/{wanted.recipe}", "--tiny", "--to", "train", *words(wanted.recipe), *wanted.overrides],
        options=[
            f"--nodes={min(2, wanted.ranks)}",
            f"--gpus-per-node={each}",
            f"--cpus-per-task={each}",
            "--mem=8G",
            "--time=02:00:00",
        ],
    )
    try:
        found = job.submit().end(patience=800)
        assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), job.text
        judge(name, job.run)
    finally:
        tidy(two_by_two)
