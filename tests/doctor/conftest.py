"""What the tests of the doctor share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.recipe_case import Case, make


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A recipe and all around it, without any fault."""
    return make(tmp_path)
