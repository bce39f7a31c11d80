"""How wide a plan's range is, and what it says of the published runs that are like it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clustertune.cli.app import app
from clustertune.plan import evidence
from clustertune.plan.constants import Constants
from clustertune.plan.predict import step_range
from clustertune.plan.step import step
from tests.plan.world import LORA, WHOLE, constants, machine, mixture, shape
from tools.planner_grade import held_out
from tools.planner_grade.data import Case, case, published_models, published_runs, recipe_of

PLAIN: dict[str, Any] = {"sequence": 4096}


def width(of: Any, at: Any = None) -> float:
    """How far up the range goes, as a factor."""
    at = at or machine()
    low, high = step_range(of, at, constants(), step(of, at, constants()))
    assert low == pytest.approx(1 / high)
    return high


@pytest.mark.parametrize(
    "less_known",
    [
        {"compiled": False}, {"compute": "fp8"}, {"tp": 2, "weight_shards": 8}, LORA, {"of": mixture()},
        {**LORA, "weight_bytes": 0.5}, {**WHOLE, "kind": "ZeRO-2"}, {"sequence": 65536}, {"micro_batch": 1, "sequence": 512},
    ],
)  # fmt: skip
def test_what_is_less_known_has_a_wider_range(less_known: dict[str, Any]) -> None:
    """Other kernels, precision, split, adapters, experts, engine, lengths than those that most published runs have."""
    assert width(shape(**PLAIN | less_known)) > width(shape(**PLAIN)) > 1


@pytest.mark.parametrize("recipe", ["qwen3-30b-a3b-lora", "tiny-oasst2", "smollm2-135m-oasst2"])
def test_a_step_that_the_host_bounds_has_a_range_too(recipe: str) -> None:
    """Kernels take what the host takes to launch them, whatever the GPU's speed: that is no certainty. Not faster than 40 us
    for each kernel that a simulation of all layers counts (docs/results/simulate.md)."""
    body = json.loads(CliRunner().invoke(app, ["plan", recipe, "--cluster", "dgx-h100", "--json"]).stdout)
    low, high = body["step_s_range"]
    assert low < 0.8 * body["step_s"] and high > 1.25 * body["step_s"]
    counted = {"qwen3-30b-a3b-lora": 38305, "tiny-oasst2": 2685, "smollm2-135m-oasst2": 10663}[recipe]
    assert body["step_s"] >= 0.99 * counted * 40e-6


def test_a_gpu_that_no_published_run_had() -> None:
    """Its plans say so, and their spread is wider."""
    unseen = evidence.words(shape(**PLAIN), machine(generation="ada"))
    assert "ada" in evidence.unlike(unseen)
    assert evidence.sentence(unseen).startswith("range: no published run near this")
    assert evidence.spread(unseen) > evidence.spread(evidence.words(shape(**PLAIN), machine()))


@pytest.mark.parametrize(
    ("recipe", "near", "apart"),
    [
        ("qwen2.5-32b-tulu3", True, ""),
        ("qwen3-30b-a3b-lora", False, "LoRA on experts"),
        ("llama8b-qlora-1gpu", False, "quantised"),
    ],
)
def test_a_plan_says_what_it_is_compared_with(recipe: str, near: bool, apart: str) -> None:
    """The 32B recipe is a published run's; adapters on experts and on four bits nobody published in this form."""
    done = CliRunner().invoke(app, ["plan", recipe, "--cluster", "dgx-h100", "--json"])
    body = json.loads(done.stdout)
    assert bool(body["evidence"]["published_runs"]) == near
    words = "of this kind" if near else "no published run near this"
    (said,) = [text for text in body["assumptions"] if text.startswith("range: ") and words in text]
    assert apart in said


def test_the_405b_reference_run_lies_in_its_range() -> None:
    """8 h 24 m were published, with loading and 18 evaluations."""
    done = CliRunner().invoke(app, ["plan", "llama405b-oasst2", "--cluster", "rno-rtxpro6000", "--json"])
    low, high = json.loads(done.stdout)["hours_range"]
    assert low < 8.4 < high < 2 * 8.4


def test_spreads_and_kinds_are_those_of_the_published_runs() -> None:
    """What the planner carries is what tools/planner_grade finds; rounded to a hundredth."""
    spreads, _, kinds = held_out.shipped()
    assert evidence.SPREAD.keys() == spreads.keys()
    assert all(abs(evidence.SPREAD[word] - value) < 0.006 for word, value in spreads.items()), spreads
    assert dict(evidence.KINDS) == kinds


def test_constants_are_those_that_the_published_runs_give() -> None:
    """To 3 %: the shipped figures are rounded, and the fit is linear around them."""
    for name, value in held_out.fitted_values().items():
        assert Constants().value(name) == pytest.approx(value, rel=0.03), name


def test_four_of_five_runs_lie_in_ranges_that_do_not_know_them() -> None:
    """Whatever is left out: program, cluster, engine, kernels, precision, GPU, model, method, split."""
    for group in held_out.GROUPS:
        rows = [row for row in held_out.coverage() if row.group == group]
        assert sum(row.inside for row in rows) >= 0.8 * sum(row.runs for row in rows), group


MEGATRON = [run for run in published_runs().values() if run.kind == "Megatron" and not run.excluded]


@pytest.mark.parametrize("run", [run for run in MEGATRON if run.model.startswith("llama")], ids=lambda run: run.id)
def test_a_megatron_recipe_is_planned_as_its_engine_runs(run: Any) -> None:
    """From the recipe alone: within a fifth of what was published, and it fits the GPUs that it ran on."""
    one: Case = case(run)
    assert one.shape.strategy.is_megatron and recipe_of(run)["megatron"]
    assert abs(math.log(one.step(Constants()).seconds / run.seconds)) < math.log(1.2)
    # Apex's Adam of that release kept the lower half of a master weight alone, which no recipe of Megatron-Bridge does.
    assert one.fits(Constants()) or run.id == "nemo-70b-sft"


def test_overlaps_of_megatron_are_planned_where_a_recipe_says_so(tmp_path: Path) -> None:
    """This project's settings send nothing beside the products; each key hides its own traffic."""
    recipe = tmp_path / "published"
    recipe.mkdir()
    run = published_runs()["megatron-405b-h100"]
    body = recipe_of(run)
    (recipe / "model.json").write_text(json.dumps(published_models()[run.model].architecture))
    (recipe / "recipe.yaml").write_text(json.dumps({**body, "plan": {}}))
    keys = ["plan.overlap_tp=true", "plan.overlap_dp=true", "plan.overlap_pp=true"]
    seconds = []
    for count in range(len(keys) + 1):
        done = CliRunner().invoke(app, ["plan", str(recipe), *keys[:count], "--gpus", "128x8xh100-sxm", "--json"])
        seconds.append(json.loads(done.stdout)["step_s"])
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == len(seconds)
