"""Damage to a checkpoint, through the command: the older one is used, the result is that of a quiet run.

Kills at random moments and damage to every file are counted by ``make campaign``.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertune import manifest
from tests.command import events
from tests.long.conftest import STEPS
from tests.long.faults import PATIENCE, Command, adapter_sha

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def flip(path: Path) -> None:
    """One bit in the middle; in the manifest one of the state that no file's hash covers."""
    data = bytearray(path.read_bytes())
    offset = data.index(b'"tokens": ') + 10 if path.name == manifest.MANIFEST else len(data) // 2
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def stopped(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed after its checkpoint of step 4."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    shutil.copytree(prepared, folder)
    command = Command(folder, STEPS)
    assert command.until(lambda: [e for e in events(folder, "checkpoint") if e["step"] == 4])
    command.signal(signal.SIGKILL)
    command.end()
    return folder


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0/__1_0.distcp", manifest.MANIFEST])
def test_the_command_passes_over_a_damaged_checkpoint(stopped: Path, tmp_path: Path, reference: str, name: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    flip(folder / "checkpoints" / "step-000004" / name)
    code, text = Command(folder, STEPS).end(PATIENCE * 2)
    assert code == 0 and "step-000004 is not whole and is skipped" in text and "resume from step-000002" in text
    assert adapter_sha(folder) == reference
    assert (folder / "checkpoints" / "step-000004").exists()
    assert "step-000004 is damaged: kept, not counted" in text


def test_a_damaged_final_checkpoint_is_trained_again(fresh: Callable[[], Path], reference: str) -> None:
    """Training is recorded as done, the export is not: an older checkpoint must not be exported in the final one's place."""
    folder = fresh()
    assert Command(folder, STEPS, to="train").end(300)[0] == 0
    flip(folder / "checkpoints" / "step-000006" / "optimizer_0" / "__0_0.distcp")
    code, text = Command(folder, STEPS).end(PATIENCE * 2)
    assert code == 0 and "step-000006 is not whole and is skipped" in text, text
    assert adapter_sha(folder) == reference
