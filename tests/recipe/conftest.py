"""Copies of the shipped recipes that a test may spoil."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import Problem, UserError
from clustertune.resolve.resolve import resolve

Refuse = Callable[..., list[Any]]
"""Of :class:`Problem`."""
SMALL_FILES = ("*.yaml", "*.json")


@pytest.fixture
def recipes(tmp_path: Path, repo: Path) -> Path:
    """A copy of ``recipes/`` without the conversations."""
    for source in (repo / "recipes").iterdir():
        (tmp_path / "recipes" / source.name).mkdir(parents=True)
        for pattern in SMALL_FILES:
            for path in source.glob(pattern):
                shutil.copy(path, tmp_path / "recipes" / source.name / path.name)
    return tmp_path / "recipes"


@pytest.fixture
def refused() -> Refuse:
    """Resolve what must be refused; returns the problems, each checked for the form that a person can read."""

    def run(recipe: str | Path, overrides: Sequence[str] = (), **options: object) -> list[Problem]:
        with pytest.raises(UserError) as caught:
            resolve(recipe, overrides, **options)  # type: ignore[arg-type]
        check_form(caught.value)
        return caught.value.problems

    return run


def check_form(error: UserError) -> None:
    """One readable screen: a few short lines that each say where, and no trace of Python."""
    assert error.code == 2
    assert 1 <= len(error.problems) <= 60
    for problem in error.problems:
        text = str(problem)
        assert problem.file, text
        assert len(text) - len(problem.file) < 600 and "\n" not in text, text  # the test's own folder may have a long name
        for word in ("Traceback", "pydantic", "errors.pydantic.dev", "<class", "object at 0x"):
            assert word not in text, text
