"""A prepared run that each test copies, and the process that forks its ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.command import run
from tests.conftest import once
from tests.training.benches import Bench, Benches, make_bench
from tests.training.forked import Forge

RECIPE = "recipes/tiny-oasst2"
SMALL = ["train.max_length=64", "train.save_steps=2", "train.eval_steps=2", "data.eval_fraction=0.08"]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations and base model of a run; nothing is trained."""

    def make(folder: Path) -> None:
        done = run("run", RECIPE, "--run-dir", folder / "run", "--to", "prepare", *SMALL, "train.max_steps=4", stack=True)
        assert done.code == 0, done.err

    return once(tmp_path_factory, "prepared", make) / "run"


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Forge:
    """What runs ranks."""
    return Forge(tmp_path_factory.mktemp("forge") / "log")


@pytest.fixture(scope="session")
def bench(forge: Forge, tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Bench:
    """The tiny recipe under any distribution file, its data and base model copied from the prepared run."""
    return make_bench(forge, tmp_path_factory.mktemp("bench"), prepared=prepared)


@pytest.fixture(scope="session")
def benches(forge: Forge, tmp_path_factory: pytest.TempPathFactory, bench: Bench) -> Benches:
    """The same of other kinds of models: :data:`tests.training.benches.MODELS`."""
    return Benches(forge, tmp_path_factory.mktemp("benches"), bench)


@pytest.fixture
def fresh(prepared: Path, tmp_path: Path) -> Path:
    """A run folder of one's own in which training is next: four steps, saved and evaluated at 2 and 4."""
    return shutil.copytree(prepared, tmp_path / "run")
