"""What the tests of the doctor share."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.errors import UserError
from clustertune.evaluate import tasks
from tests.doctor.recipe_case import Case, make


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A recipe and all around it, without any fault. lm-eval's own index, of which tests/evaluate/test_tasks.py asks, takes
    ten seconds to read."""

    def data_sets(names: list[str]) -> dict[str, str]:
        if set(names) - {"gsm8k"}:
            raise UserError("lm-eval has no task of this name", key="eval.tasks")
        return {}

    monkeypatch.setattr(tasks, "data_sets", data_sets)
    return make(tmp_path)
