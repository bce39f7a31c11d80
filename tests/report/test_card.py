"""The model card, branch by branch: what it says about hours and a broken run is what the run was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.report.push import pack
from clustertune.rundir import RunDir
from tests.report.conftest import change


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


HOSTILE = "x\n# Big | <script>a()</script> [l](http://e) `c` ![i](http://e/x.png) \u202eback \x1b[31m"


def test_no_value_becomes_markup(trained: RunDir) -> None:
    """Names, versions and tasks are texts of others: in the card each is one line of plain words."""

    def act(body: dict[str, Any]) -> None:
        body["host"]["name"] = HOSTILE
        body["versions"] = {HOSTILE: HOSTILE}
        body["git"] = {"commit": HOSTILE, "dirty": True}
        body["distributed"] = {**(body.get("distributed") or {}), "gpu0": HOSTILE}

    results = trained.path / "eval" / "results.json"
    scored = json.loads(results.read_text())
    scored["tasks"][HOSTILE] = {HOSTILE: 0.5}
    results.write_text(json.dumps(scored))
    _, _, text = card(trained, act).split("---\n", 2)
    assert text.count("Big") >= 5 and "\u202e" not in text and "\x1b" not in text
    plain = re.sub(r"`+[^`]*`+", "", text)
    assert not re.search(r"(?<!\\)(<script|\[l\]\(|!\[|`c`)", plain) and not re.search(r"^# Big", plain, re.MULTILINE)
    tables = [line for line in text.splitlines() if line.startswith("|") and "Big" in line]
    assert tables and all(len(re.findall(r"(?<!\\)\|", line)) in (3, 4, 5, 8) for line in tables)
