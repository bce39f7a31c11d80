"""Copies of the shipped recipes that a test may spoil."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.resolve.resolve import resolve

Refuse = Callable[..., list[Any]]
"""Problems."""


@pytest.fixture
def recipes(tmp_path: Path, repo: Path) -> Path:
    """A copy of ``recipes/`` without the conversations."""
    return shutil.copytree(repo / "recipes", tmp_path / "recipes", ignore=shutil.ignore_patterns("*.jsonl", "*.md"))


@pytest.fixture
def refused() -> Refuse:
    """Resolve what must be refused; returns the problems, each checked for the form that a person can read."""
    return functools.partial(readable, resolve)


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


def readable(call: Callable[..., object], *arguments: Any, **named: Any) -> list[Any]:
    """The problems with which a call is refused, checked for their form."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    check_form(caught.value)
    return caught.value.problems
