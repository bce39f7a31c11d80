"""When to save: the optimum of Young and Daly, times, steps and milestones."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from clustertune.checkpoint.store import Cadence
from clustertune.errors import UserError
from clustertune.plan.schedule import best_seconds
from clustertune.recipe.sections import Save
from clustertune.resolve.resolve import resolve
from tests.command import REPO

TINY = REPO / "recipes" / "tiny-oasst2"


@pytest.mark.parametrize(("cost", "between"), [(0.2, 86_400.0), (5.0, 3_600.0), (60.0, 40_000.0), (300.0, 7_200.0)])
def test_the_interval_loses_the_least_time(cost: float, between: float) -> None:
    """Of all intervals, by the expected time of a piece of work under failures of an exponential law (Daly 2006, eq. 20)."""

    def wasted(interval: float) -> float:
        return between * math.exp(cost / between) * (math.exp((interval + cost) / between) - 1) / interval

    best = min(range(1, 40_000, 5), key=wasted)
    assert wasted(best_seconds(cost, 0.0, between)) <= 1.001 * wasted(best)
    assert best_seconds(cost, 50_000.0, between) == 50_000.0, "the save before must be whole"


def test_a_save_that_is_named_by_its_step_is_not_left_out_while_another_is_written() -> None:
    """Half of the checkpoints of ``every: 1`` were missing, and milestones, where a save took longer than a step."""
    made = Cadence(Save(every=2, milestones=(3,)), 10_000.0)
    assert [step for step in range(1, 7) if made.is_due(step, busy=True)] == [2, 3, 4, 6]
    now = [0.0]
    timed = Cadence(Save(every="10s", milestones=(3,)), 10_000.0, clock=lambda: now[0])
    timed.is_due(1)
    now[0] = 20.0
    assert not timed.is_due(2, busy=True) and timed.is_due(2) and timed.is_due(3, busy=True)


@pytest.mark.parametrize("saving", [False, True])
def test_the_trainer_waits_for_a_save_before_one_that_is_due_by_its_step(saving: bool) -> None:
    from clustertune.training.trainer import RankTrainer

    trainer = SimpleNamespace(
        cadence=Cadence(Save(every=2), 10_000.0, 1.0),
        state=SimpleNamespace(global_step=2), _saving=SimpleNamespace() if saving else None,
    )  # fmt: skip
    assert RankTrainer._is_save_due(trainer)  # type: ignore[arg-type]
    trainer.state.global_step = 3
    assert not RankTrainer._is_save_due(trainer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["save.every=auto", "train.save_steps=5"], "train.save_steps"),
        (["save.every=0"], "save.every"),
        (["save.every=0m"], "save.every"),
        (["save.every=true"], "save.every"),
        (["save.every=soon"], "save.every"),
        (["save.milestones=[0]"], "save.milestones"),
    ],
)
def test_a_section_that_means_nothing_is_refused(given: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve(TINY, given)
