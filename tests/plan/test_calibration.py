"""Runs that were made with known factors give these factors back, and only those that they identify."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertune.plan import memory
from clustertune.plan.calibration import IDENTIFIED, PRIOR, CalibratedRun, Fit, Observation, fit, read, store
from clustertune.plan.constants import Constants
from clustertune.plan.machine import PlanMachine
from clustertune.plan.step import step
from clustertune.plan.strategy import ModelShape
from clustertune.recipe.parameters import ParameterCount
from tests.plan.world import counted, machine, mixture, shape

COMPUTING = machine(peak_flops=1e11)
"""A machine so slow that all traffic hides behind computing."""
WAITING = machine(peak_flops=1e18, hbm_bytes_per_s=1e15)
"""One so fast that it waits for the network only."""


def run(
    true: Constants, at: PlanMachine, *, name: str = "run", of: ParameterCount | None = None,
    memory_too: bool = False, **changes: Any,
) -> Observation:  # fmt: skip
    """A run on a machine whose true constants are given."""
    of_shape: ModelShape = shape(of or counted(), **changes)

    def predict(constants: Constants) -> tuple[float, float]:
        return step(of_shape, at, constants).seconds, max(moment.bytes for moment in memory.moments(of_shape, constants))

    seconds, peak = predict(true)
    return Observation(name, seconds, peak if memory_too else None, predict)


def factors(**values: float) -> Constants:
    return replace(Constants(), **values)


ONE_NODE = {"world_size": 8, "data_parallel_size": 8, "weight_shards": 8, "gradient_shards": 8, "state_shards": 8}
"""What never left the node does not move the network's factor."""
BIG = {"micro_batch": 64, "compiled": False}
PEAK = {"memory_too": True, **BIG}
Made = tuple[PlanMachine, dict[str, Any]]


@pytest.mark.parametrize(
    ("true", "made"),
    [
        ({"compute_scale": 1.15}, [(COMPUTING, {})]),
        ({"inter_scale": 0.6}, [(WAITING, {})]),
        ({"intra_scale": 0.8}, [(WAITING, ONE_NODE)]),
        ({"compute_scale": 0.9, "inter_scale": 1.5}, [(COMPUTING, {"name": "a"}), (WAITING, {"name": "b"})]),
        ({"compute_scale": 1.2}, [(COMPUTING, {"of": mixture()})]),  # the factors are the machine's, not the model's
        ({"compute_scale": 1.0, "memory_scale": 1.1}, [(COMPUTING, PEAK)]),
        ({"compute_scale": 1.0}, [(COMPUTING, BIG)]),  # without a measured peak the other is not even named
    ],
)
def test_runs_give_back_the_factors_that_they_identify(true: dict[str, float], made: list[Made]) -> None:
    """All others stay what they were and are named; of each that was found the deviation is less than half of its prior."""
    found = fit([run(factors(**true), at, **changes) for at, changes in made])
    assert found.values == pytest.approx(true, rel=0.05) and found.values.keys() == true.keys()
    measured = any("memory_too" in changes for _, changes in made)
    assert set(found.left) == {name for name in PRIOR if name != "memory_scale" or measured} - true.keys()
    assert min(found.left.values(), default=1.0) >= IDENTIFIED
    assert all(0 < found.deviation[name] < IDENTIFIED * PRIOR[name] for name in true)


RUN = CalibratedRun(name="run", measured_s=2.0, before_s=1.8, after_s=1.98)
FOUND = Fit({"compute_scale": 1.1}, {"compute_scale": 0.03}, {"inter_scale": 0.9}, (RUN,))


def test_it_is_kept_beside_the_cluster_and_read_again(tmp_path: Path) -> None:
    """The stored factors and no others are laid over the constants; nothing half-written is left behind."""
    path = tmp_path / "c.calibration.json"
    store(path, "c", "2026-11-02", FOUND)
    known = read(path)
    assert known.compute_scale == 1.1 and known.inter_scale == 1.0
    assert known.calibrated == ("compute_scale",)
    assert known.deviation == {"compute_scale": 0.03}
    assert replace(known, compute_scale=1.0, calibrated=(), deviation={}) == Constants()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    body = json.loads(path.read_text())
    assert body["runs"] == [{"name": "run", "measured_s": 2.0, "before_s": 1.8, "after_s": 1.98}]
