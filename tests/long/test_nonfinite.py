"""A loss that is not finite on one rank only: both stop before the optimizer step, and nothing of it is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import events
from tests.long.conftest import STEPS
from tests.long.faults import Command, attempts

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ON_RANK_1 = """
import os
if os.environ.get("RANK") == "1":
    from trl import SFTTrainer
    step = SFTTrainer.training_step
    def broken(self, *args, **kwargs):
        loss = step(self, *args, **kwargs)  # its gradients are whole: only the loss that comes back is not
        return loss * float("nan") if self.state.global_step == 2 else loss
    SFTTrainer.training_step = broken
"""


def test_one_rank_is_enough(fresh: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch" / "sitecustomize.py").write_text(ON_RANK_1)
    folder = fresh()
    code, text = Command(folder, STEPS, path=tmp_path / "patch").end()
    assert code == 93 and "not finite at step 3 (rank 1: loss nan)" in text, text
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    assert events(folder, "stop")[-1]["exit_code"] == 93 and attempts(folder) == 1
    records = sorted((folder / "attempts" / "0001").glob("rank-*.json"))
    assert len(records) == 2 and all('"code": 93' in record.read_text() for record in records)
