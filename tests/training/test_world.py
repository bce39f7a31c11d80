"""A group that is not the planned one ends before the model is loaded, with the numbers."""

from __future__ import annotations

from typing import Any, cast

import pytest

from clustertune.errors import ExitCode, UserError
from clustertune.launch.plan import AttemptPlan, Node
from clustertune.training.collectives import Group, check_world


class Ranks:
    """A group of as many ranks, whose places are given."""

    def __init__(self, *places: tuple[str | None, str | None]) -> None:
        self.places, self.world_size, self.rank = list(places), len(places), 0

    def gather(self, value: Any) -> list[Any]:
        return self.places


def group(*places: tuple[str | None, str | None]) -> Group:
    return cast("Group", Ranks(*places))


def plan(nodes: int, ranks_per_node: int) -> AttemptPlan:
    return AttemptPlan(attempt=1, nodes=tuple(Node(f"n{i}", f"n{i}") for i in range(nodes)), ranks_per_node=ranks_per_node)


TWO_NODES = [("0", "2"), ("1", "2"), ("0", "2"), ("1", "2")]


def test_the_planned_world_is_taken() -> None:
    check_world(group(*TWO_NODES), 4, plan(2, 2))
    check_world(group(*[(None, None)] * 4), 4, plan(2, 2))
    check_world(group(*TWO_NODES), 4, None)


@pytest.mark.parametrize(
    ("places", "world_size", "planned", "message"),
    [
        ([("0", "1")], 4, plan(2, 2), "sees a world of 1, the run is for 4: the ranks did not find each other"),
        ([("0", "2"), ("1", "2")], 4, None, "sees a world of 2, the run is for 4"),
        ([("0", "4"), ("1", "4"), ("2", "4"), ("3", "4")], 4, plan(2, 2), "run on 1 nodes, the plan names 2"),
        ([("0", "3"), ("1", "3"), ("2", "3"), ("0", "1")], 4, plan(2, 2), "1 ranks on one node, the plan says 2 on each"),
        (TWO_NODES, 4, plan(4, 2), "the plan of this attempt is for 8 ranks, the run for 4"),
    ],
)
def test_another_world_is_refused(places: Any, world_size: int, planned: AttemptPlan | None, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_world(group(*places), world_size, planned)
    assert caught.value.code is ExitCode.FAILED
