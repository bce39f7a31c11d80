"""The model card, branch by branch: what it says about hours and a broken run is what the run was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.push import pack
from clustertune.rundir import RunDir
from tests.push.conftest import change


def card(run: RunDir, act: Callable[[dict[str, Any]], Any] | None = None) -> str:
    if act is not None:
        change(run, act)
    return pack(run, "me/adapter", None).card


def rows(text: str) -> dict[str, str]:
    """The tables' rows of two cells."""
    return {line.split(" | ")[0].strip("| "): line.split(" | ")[1].rstrip(" |") for line in text.splitlines() if " | " in line}


def test_hours_are_of_all_tries(trained: RunDir) -> None:
    """The recorded training was interrupted twice: 30.5 + 26.4 + 20.7 seconds, and its record has the last."""
    scaled = trained.metrics.read_text().replace('"seconds":30.545', '"seconds":3654.5')
    trained.metrics.write_text(scaled)
    assert rows(card(trained))["hours of training"] == f"{(3654.5 + 26.399 + 20.682) / 3600:.2f}"
    trained.metrics.write_text("")
    assert rows(card(trained))["hours of training"] == "-"


@pytest.mark.parametrize("body", ["[]", "5", '{"recipe": 5}', "{}", '{"recipe": {"recipe": {"model": null}}}'])
def test_a_run_that_is_none_is_told(body: str, trained: RunDir) -> None:
    """No object, or one without what the card is about: ``None`` is not a base model."""
    trained.run_json.write_text(body)
    with pytest.raises(UserError, match="recipe: contains no recipe that can be read"):
        card(trained)
