"""Checkpoints on the nodes' own disks in real jobs: two ranks, each on a "node" with a folder of its own."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from clustertune.chain import open_run
from clustertune.checkpoint import local
from clustertune.checkpoint.local import name_of
from clustertune.rundir import RunDir
from clustertune.training.session import Session
from clustertune.training.trainer import RankTrainer
from tests.command import events
from tests.damage import failing, flip
from tests.training.benches import Bench, fsdp, make_bench
from tests.training.forked import Forge, around, kill, on_rank
from tests.training.test_saving import shards

pytestmark = pytest.mark.timeout(900)
SAVED = ["save.every=3", "save.local.every=1"]


def two_nodes() -> None:
    """Each rank sees a folder of its own under the path of the recipe, and what rank 0 says is kept."""
    real, folder = local.open_root, Path(os.environ["CT_LOCAL"], f"node-{os.environ['RANK']}")
    local.open_root = lambda _, name: real(folder, name)

    def keep(self: Any, message: str) -> None:
        with (self.run_path / "told").open("a") as out:
            out.write(message + "\n")

    around(Session, "tell", on_rank(0, keep))


def killed() -> None:
    """Rank 1 is killed in the last step; what was saved before is whole."""
    die = on_rank(1, kill())

    def last(self: Any, *_: Any) -> None:
        self.finish_save()  # the next one is left out where a step is taken sooner than a save
        if self.state.global_step == 5:
            die()

    two_nodes()
    around(RankTrainer, "training_step", last)


def full() -> None:
    """The disk of node 1 takes no file of another node."""
    two_nodes()
    around(local, "write_new", on_rank(1, failing(OSError(errno.ENOSPC, "No space left on device", "shard"))))


class Job:
    """A run folder, and the disks of its two nodes beside it."""

    def __init__(self, bench: Bench, folder: Path, settings: Sequence[str]) -> None:
        self.bench, self.folder, self.settings = bench, folder, settings
        self.disks = folder.parent / f"{folder.name}-disks"

    def go(self, what: str = "two_nodes", attempt: int = 1, ranks: int = 2) -> list[int]:
        for rank in range(ranks):
            (self.disks / f"node-{rank}").mkdir(parents=True, exist_ok=True)
        if ranks != 2:
            open_run(self.bench.resolved((ranks, fsdp()), *self.settings), self.folder, ["test"])
        more = {"breaks": f"{__name__}:{what}", "environment": {"CT_LOCAL": str(self.disks)}}
        return self.bench.go(self.folder, ranks, attempt=attempt, **more)

    def root(self, rank: int) -> Path:
        return self.disks / f"node-{rank}" / name_of(self.folder, RunDir(self.folder).read()["created"])

    @property
    def output(self) -> str:
        return (self.folder / "told").read_text()

    @property
    def started_at(self) -> int:
        return int(events(self.folder, "start")[-1]["step"])

    def copy(self, folder: Path) -> Job:
        made = Job(self.bench, shutil.copytree(self.folder, folder), self.settings)
        for rank in (0, 1):
            if self.root(rank).is_dir():
                shutil.copytree(self.root(rank), made.root(rank))
                made.root(rank).chmod(0o700)
        return made


@pytest.fixture(scope="module")
def bench(forge: Forge, tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Bench:
    same = ["train.max_length=64", "train.max_steps=6", "train.eval_steps=3", "train.bf16=true", "train.report_to=none"]
    return make_bench(forge, tmp_path_factory.mktemp("local"), same, prepared=prepared)


def make(bench: Bench, *settings: str) -> Job:
    return Job(bench, bench.make("fsdp2", *settings), settings)


@pytest.fixture(scope="module")
def calm(bench: Bench) -> dict[str, Any]:
    """What a run without local checkpoints that nobody disturbs ends with."""
    job = make(bench, "save.every=3")
    assert job.go() == [0, 0]
    return shards(job.folder)["6"]


@pytest.fixture(scope="module")
def lost(bench: Bench) -> Callable[[bool], Job]:
    """A run that was killed in step 6: shared storage holds step 3, the nodes 4 and 5; where asked, their neighbours, too."""

    @functools.cache
    def one(neighbour: bool) -> Job:
        where = [f"save.local.path={bench.folder / 'disk'}", f"save.local.neighbour={str(neighbour).lower()}"]
        job = make(bench, *SAVED, *where)
        assert -signal.SIGKILL in job.go("killed")
        found = [(e["step"], e["status"]) for e in events(job.folder, "checkpoint")]
        assert found == [(1, "local"), (2, "local"), (3, "saved"), (4, "local"), (5, "local")]
        assert sorted(path.name for path in job.root(1).iterdir()) == ["step-000004", "step-000005"]
        return job

    return one


def node_gone(job: Job) -> None:
    shutil.rmtree(job.root(1))


def flipped(job: Job) -> None:
    """One bit of each shard on one disk."""
    for shard in job.root(1).glob("step-000005/*/__*_0.distcp"):
        flip(shard, -5)


@pytest.mark.parametrize(
    ("neighbour", "damage", "step", "message"),
    [
        pytest.param(True, None, 5, "copied to step-000005.a2", marks=pytest.mark.jobs),
        pytest.param(True, node_gone, 5, "copied to step-000005.a2", marks=pytest.mark.jobs),
        (True, flipped, 5, "content differs from the manifest's digest"),
        pytest.param(False, None, 5, "copied to step-000005.a2", marks=pytest.mark.jobs),
        (False, node_gone, 3, "survived on no node"),
        pytest.param(False, flipped, 4, "content differs from the manifest's digest", marks=pytest.mark.jobs),
    ],
)
def test_it_goes_on_from_the_newest_step_that_survived_to_the_same_end(
    neighbour: bool, damage: Any, step: int, message: str, lost: Callable[[bool], Job], calm: Any, tmp_path: Path
) -> None:
    job = lost(neighbour).copy(tmp_path / "run")
    if damage is not None:
        damage(job)
    assert job.go(attempt=2) == [0, 0]
    assert job.started_at == step and message in job.output, job.output
    assert shards(job.folder)["6"] == calm
    assert not job.root(0).exists() and not job.root(1).exists(), "the end of a run clears its local folders"


@pytest.mark.jobs
@pytest.mark.parametrize("neighbour", [True, False])
@pytest.mark.parametrize("ranks", [1, 4])
def test_other_ranks_go_on_from_it_as_from_shared_storage(
    neighbour: bool, ranks: int, bench: Bench, lost: Callable[[bool], Job], tmp_path: Path
) -> None:
    """Node 0 alone, and four nodes of which two are new. The last step is the one of a run whose every save was shared."""
    job = lost(neighbour).copy(tmp_path / "run")
    assert job.go(attempt=2, ranks=ranks) == [0] * ranks, job.output
    assert job.started_at == (5 if neighbour or ranks == 4 else 3), job.output
    shared = make(bench, f"save.every={job.started_at}")
    shared.folder.joinpath("told").touch()
    assert -signal.SIGKILL in shared.go("killed")
    assert shared.go(attempt=2, ranks=ranks) == [0] * ranks, shared.output
    assert shared.started_at == job.started_at
    assert shards(job.folder)["6"] == shards(shared.folder)["6"]


def test_a_local_disk_that_is_full_costs_no_step(bench: Bench, calm: Any, tmp_path: Path) -> None:
    job = make(bench, *SAVED, f"save.local.path={tmp_path}")
    assert job.go("full") == [0, 0]
    assert "No space left" in job.output and "none is from here on" in job.output
    assert [(e["step"], e["status"]) for e in events(job.folder, "checkpoint")] == [(3, "saved"), (6, "saved")]
    assert shards(job.folder)["6"] == calm
