"""``plan --within`` and the energy of a run: what a budget pays, and what the GPUs draw at most."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.cluster.hardware import read_hardware
from tests.plan.test_command import answer, call, refused
from tests.plan.world import LORA_SECTION, write_cluster, write_recipe


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    """A recipe of 100 steps on a node of 8 H100."""
    recipe = write_recipe(tmp_path / "some", lora=LORA_SECTION, train={"max_steps": 100})
    return str(recipe), "--cluster", str(write_cluster(tmp_path / "hgx.yaml"))


def test_what_a_budget_pays(words: tuple[str, ...]) -> None:
    """So many steps cost no more than it, and one more does; what is dearer ends with 2."""
    cost = answer(*words)["total"]["cost"]["on_demand"]
    rich = answer(*words, "--within", 2 * cost)["budget"]
    assert rich["within"] and rich["steps_within"] > 100 and rich["cost"] == pytest.approx(cost)
    poor = answer(*words, "--within", 0.9 * cost, code=2)["budget"]
    assert not poor["within"] and 0 <= poor["steps_within"] < 100
    middle = (100 + rich["steps_within"]) // 2
    recipe, *rest = words
    for steps, amount in ((middle, 2 * cost), (rich["steps_within"], 2 * cost)):
        assert answer(recipe, f"train.max_steps={steps}", *rest)["total"]["cost"]["on_demand"] <= amount * 1.001
    more = answer(recipe, f"train.max_steps={rich['steps_within'] + max(2, rich['steps_within'] // 50)}", *rest)
    assert more["total"]["cost"]["on_demand"] > 2 * cost
    assert "NO" in call(*words, "--within", 0.01).output
    told = call(*words, "--within", 100 * cost).output
    assert "of 100 steps" not in told and "the run has 100" in " ".join(told.split())


def test_searches_keep_to_it(words: tuple[str, ...]) -> None:
    """--advise lists what costs no more; where nothing does, it says what the cheapest takes."""
    listed = [one["cost"] for one in answer(*words, "--advise")["options"] if one["fits"]]
    amount = sorted(listed)[len(listed) // 2]
    kept = [one["cost"] for one in answer(*words, "--advise", "--within", amount)["options"] if one["fits"]]
    assert sorted(kept) == sorted(cost for cost in listed if cost <= amount)
    assert "the budget is 0.01" in refused(*words, "--advise", "--within", 0.01)
    assert all("--within" in refused(*words, "--within", wrong) for wrong in (0, "nan", "inf", 1e308))
    assert "--within" in refused(*words, "--within", -1) and "--within" in refused(*words, "--within", 5, "--why", "step")


def test_energy_is_gpu_hours_at_the_power_limit(words: tuple[str, ...]) -> None:
    """Training and evaluation together, at most; unknown where no power is."""
    total = answer(*words)["total"]
    assert total["gpu_power_w"] == read_hardware().gpus["h100-sxm"].power_w
    assert total["energy_kwh_at_most"] == pytest.approx(total["gpu_hours"] * total["gpu_power_w"] / 1000)
    (*_, line) = answer(*words, "--why", "energy")["arithmetic"]
    assert f"{total['energy_kwh_at_most']:,.2f} kWh" in line
    recipe = words[0]
    unknown = answer(recipe, "--gpus", "1x8xgb200")["total"]
    assert unknown["energy_kwh_at_most"] is None and unknown["gpu_hours"] > 0


def test_a_budget_needs_a_cost(tmp_path: Path) -> None:
    """Without a number of steps nothing has a price."""
    recipe = write_recipe(tmp_path / "endless")
    assert "--within" in refused(recipe, "--gpus", "1x8xh100-sxm", "--within", 5)
