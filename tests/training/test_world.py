"""A group that is not the planned one ends before the model is loaded, with the numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from clustertune.errors import ExitCode, UserError
from clustertune.launch.plan import AttemptPlan, Node
from clustertune.training.collectives import check_world


def plan(nodes: int, ranks_per_node: int) -> AttemptPlan:
    return AttemptPlan(attempt=1, nodes=tuple(Node(f"n{i}", f"n{i}") for i in range(nodes)), ranks_per_node=ranks_per_node)


TWO_NODES = [("0", "2"), ("1", "2"), ("0", "2"), ("1", "2")]


@pytest.mark.parametrize(
    ("places", "planned", "message"),
    [
        (TWO_NODES, plan(2, 2), None),
        ([(None, None)] * 4, plan(2, 2), None),
        (TWO_NODES, None, None),
        ([("0", "1")], plan(2, 2), "sees a world of 1, the run is for 4: the ranks did not find each other"),
        ([("0", "2"), ("1", "2")], None, "sees a world of 2, the run is for 4"),
        ([("0", "4"), ("1", "4"), ("2", "4"), ("3", "4")], plan(2, 2), "run on 1 nodes, the plan names 2"),
        ([("0", "3"), ("1", "3"), ("2", "3"), ("0", "1")], plan(2, 2), "1 ranks on one node, the plan says 2 on each"),
        (TWO_NODES, plan(4, 2), "the plan of this attempt is for 8 ranks, the run for 4"),
    ],
)
def test_another_world_than_the_planned_one_is_refused(places: Any, planned: AttemptPlan | None, message: str | None) -> None:
    group: Any = SimpleNamespace(gather=lambda _: places, world_size=len(places), rank=0)
    if message is None:
        check_world(group, 4, planned)
        return
    with pytest.raises(UserError, match=message) as caught:
        check_world(group, 4, planned)
    assert caught.value.code is ExitCode.FAILED
