"""A prepared run that each test copies, and its ranks started as a launcher that knows nothing of the run starts them."""

from __future__ import annotations

import json
import os
import select
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.command import REPO, run, warm
from tests.conftest import once
from tests.training.benches import Bench, make_bench
from tests.training.forked import Forge

RECIPE = "recipes/tiny-oasst2"
SMALL = ["train.max_length=64", "train.save_steps=2", "train.eval_steps=2", "data.eval_fraction=0.08"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--config_file", f"{RECIPE}/accelerate.yaml", "--num_machines", "1"]
ACCELERATE += ["--machine_rank", "0", "--main_process_port", "0", "--num_processes"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


class Ranks:
    """The ranks of one attempt at a run folder, without any agent that watches them."""

    def __init__(self, folder: Path, attempt: int, launcher: list[str], count: int = 2, **environment: str) -> None:
        self.folder = folder
        self.records = folder / "attempts" / f"{attempt:04d}"
        self.records.mkdir(parents=True, exist_ok=True)
        program = ["train", "--run-dir", str(folder), "--attempt", str(attempt)]
        module = ["-m" if launcher is TORCHRUN else "--module", "clustertune"]
        self._output = folder.with_name(f"{folder.name}-{attempt}.said")
        environ = {**os.environ, "PYTHONPATH": str(REPO), **environment}
        with self._output.open("wb") as output:
            words = [*launcher[1:], str(count), *module, *program]
            self._ended = warm(stack=True).start(words, REPO, output.fileno(), output.fileno(), environ)

    def until(self, condition: Callable[[], Any], seconds: float = 300) -> bool:
        """Wait for a condition; False where the ranks ended before."""
        deadline = time.monotonic() + seconds
        while not select.select([self._ended], [], [], 0.02)[0] and time.monotonic() < deadline:
            if condition():
                return True
        return False

    def end(self) -> str:
        """Wait for all ranks; returns what the launcher and rank 0 said."""
        with self._ended as ended:
            ended.settimeout(300)
            assert ended.recv(64)
        return self._output.read_text()

    def record(self, rank: int) -> Mapping[str, Any]:
        """What a rank left at its end."""
        found: dict[str, Any] = json.loads((self.records / f"rank-{rank}.json").read_bytes())
        return found


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations and base model of a run; nothing is trained."""

    def make(folder: Path) -> None:
        done = run("run", RECIPE, "--run-dir", folder / "run", "--to", "prepare", *SMALL, "train.max_steps=4", stack=True)
        assert done.code == 0, done.err

    return once(tmp_path_factory, "prepared", make) / "run"


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """The process that forks ranks. It imports the stack once, in about 10 s."""
    found = Forge(tmp_path_factory.mktemp("forge") / "log")
    yield found
    found.end()


@pytest.fixture(scope="session")
def bench(forge: Forge, tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Bench:
    """The tiny recipe under any distribution file, its data and base model copied from the prepared run."""
    return make_bench(forge, tmp_path_factory.mktemp("bench"), prepared=prepared)


@pytest.fixture
def fresh(prepared: Path, tmp_path: Path) -> Path:
    """A run folder of one's own in which training is next: four steps, saved and evaluated at 2 and 4."""
    folder = tmp_path / "run"
    shutil.copytree(prepared, folder)
    return folder
