"""The model card, branch by branch: what it says about GPUs, nodes, losses, hours and the chat template is what the run was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.push.upload import pack
from clustertune.rundir import RunDir
from tests.push.conftest import change

H100 = "NVIDIA H100 80GB HBM3"


def card(run: RunDir, act: Callable[[dict[str, Any]], Any] | None = None) -> str:
    if act is not None:
        change(run, act)
    return pack(run, "me/adapter", None).card


def rows(text: str) -> dict[str, str]:
    """The tables' rows of two cells."""
    return {line.split(" | ")[0].strip("| "): line.split(" | ")[1].rstrip(" |") for line in text.splitlines() if " | " in line}


@pytest.mark.parametrize(
    ("distributed", "cluster", "says"),
    [
        ({"device": "cuda:0", "gpu0": H100, "world_size": 1}, {"gpus": 8, "gpu": "h100"}, f"1 x {H100}"),
        ({"device": "cuda:0", "gpu0": H100, "world_size": 16}, None, f"16 x {H100}"),
        ({"device": None, "world_size": 16}, {"gpus": 8, "gpu": "h200"}, "16 x h200"),
        ({"device": "cuda:0", "world_size": 4}, None, "4 x GPU"),
        ({"device": "cpu", "world_size": 2}, {"gpus": 8, "gpu": "h200"}, "none: trained on CPUs"),
        ({"device": None, "world_size": 2}, None, "-"),
        ({}, None, "-"),
    ],
)
def test_gpus_are_those_that_were_used(
    distributed: dict[str, Any], cluster: dict[str, Any] | None, says: str, trained: RunDir
) -> None:
    """One GPU of a node of eight is one; the cluster file tells what a node has."""

    def act(document: dict[str, Any]) -> None:
        document["distributed"] = distributed
        document["cluster"] = None if cluster is None else {"compute": cluster}

    found = rows(card(trained, act))
    assert found["GPUs"] == says and found["ranks"] == str(distributed.get("world_size") or 2)
    assert "GPUs of the machine" not in found


def test_hours_are_of_all_tries(trained: RunDir) -> None:
    """The recorded training was interrupted twice: 30.5 + 26.4 + 20.7 seconds, and its record has the last."""
    scaled = trained.metrics.read_text().replace('"seconds":30.545', '"seconds":3654.5')
    trained.metrics.write_text(scaled)
    assert rows(card(trained))["hours of training"] == f"{(3654.5 + 26.399 + 20.682) / 3600:.2f}"
    trained.metrics.write_text("")
    record = trained.path / "stages" / "train.json"
    assert rows(card(trained))["hours of training"] == "0.01"
    record.write_text("[]")
    assert rows(card(trained))["hours of training"] == "-"


@pytest.mark.parametrize("body", ["[]", "5", '{"recipe": 5}', "{}", '{"recipe": {"recipe": {"model": null}}}'])
def test_a_run_that_is_none_is_told(body: str, trained: RunDir) -> None:
    """No object, or one without what the card is about: ``None`` is not a base model."""
    trained.run_json.write_text(body)
    with pytest.raises(UserError, match="recipe: contains no recipe that can be read"):
        card(trained)
