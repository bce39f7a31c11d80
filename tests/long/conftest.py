"""A prepared run that each scenario copies, and the adapter of one that nothing interrupted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.long.faults import Command, adapter_sha

STEPS = "train.max_steps=6"


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations and base model of a run of six steps; nothing is trained."""
    folder = tmp_path_factory.mktemp("prepared") / "run"
    code, text = Command(folder, STEPS, to="prepare").end()
    assert code == 0, text
    return folder


@pytest.fixture
def fresh(prepared: Path, tmp_path: Path) -> Callable[[], Path]:
    """Make a run folder of one's own in which training is next."""
    made: list[Path] = []

    def make() -> Path:
        folder = tmp_path / f"run-{len(made)}"
        made.append(folder)
        shutil.copytree(prepared, folder)
        return folder

    return make


@pytest.fixture(scope="session")
def reference(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The adapter's SHA-256 after an uninterrupted run."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    shutil.copytree(prepared, folder)
    code, text = Command(folder, STEPS).end(300)
    assert code == 0, text
    return adapter_sha(folder)
