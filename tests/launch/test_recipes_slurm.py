"""Every recipe, ``--tiny``, with its own distribution file: through the one sbatch file on a real Slurm, and here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import run
from tests.recipe_runs import RUNS, judge, words
from tests.slurm import FaultyCluster, make, tidy
from tests.slurm_job import Job

pytestmark = [pytest.mark.timeout(900), pytest.mark.jobs]

KINDS = {name: (run.kind, *run.mesh, run.placements, run.offloaded) for name, run in RUNS.items()}
ONE_OF_EACH_KIND = [name for name, kind in KINDS.items() if name == next(first for first in KINDS if KINDS[first] == kind)]
OTHERS = [name for name in RUNS if name not in ONE_OF_EACH_KIND]


@pytest.fixture(scope="module")
def two_by_two() -> Iterator[FaultyCluster]:
    """Two nodes with two GPUs each: a mesh of two axes takes all four."""
    with make(2, gpus=2) as cluster:
        yield cluster


def through_slurm(name: str, cluster: FaultyCluster, run: Path) -> None:
    """A recipe's job, which ends well, and whose ranks were what the recipe says: distribution, mesh, placements, loss."""
    wanted = RUNS[name]
    each = max(1, wanted.ranks // 2)
    job = Job(
        cluster,
        run,
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
        tidy(cluster)


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_a_kind_of_distribution_goes_through_slurm(name: str, two_by_two: FaultyCluster, tmp_path: Path) -> None:
    through_slurm(name, two_by_two, tmp_path / "r")


@pytest.mark.parametrize("name", OTHERS)
def test_another_recipe_of_a_kind_goes_through_slurm(name: str, two_by_two: FaultyCluster, tmp_path: Path) -> None:
    """``.ci/run`` leaves these to the next test, which takes a quarter of the time."""
    through_slurm(name, two_by_two, tmp_path / "r")


@pytest.mark.parametrize("name", OTHERS)
def test_another_recipe_of_a_kind_trains_on_this_machine(name: str, tmp_path: Path) -> None:
    """With the same launcher and ranks, forked of a process that has the stack."""
    wanted, folder = RUNS[name], tmp_path / "r"
    options = ["--tiny", "--to", "train", "--ranks", str(wanted.ranks), "--run-dir", folder]
    done = run("run", f"recipes/{wanted.recipe}", *options, *words(wanted.recipe), *wanted.overrides, stack=True)
    assert done.code == 0, done.err
    judge(name, folder)
