"""Every recipe fits on the machine that it is for, and its plan is the one that was read and committed."""

from __future__ import annotations

import pytest

from clustertune.config.cluster import load_cluster
from clustertune.config.resolve import resolve
from clustertune.plan.place import find_place
from clustertune.plan.predict import Plan, make_plan
from tests.launch.machines import cluster_of
from tests.plan import golden_plan


@pytest.mark.parametrize("case", golden_plan.CASES, ids=lambda case: golden_plan.file_name(*case))
def test_the_plan_is_the_golden_one(case: tuple[str, ...]) -> None:
    """A changed figure is to be seen in review; ``make golden`` writes the texts again."""
    text = golden_plan.document(*case)
    assert "fits" in text and "does not fit" not in text
    assert text == (golden_plan.GOLDEN / golden_plan.file_name(*case)).read_text()


def plan(recipe: str, *overrides: str, cluster: str | None = None) -> Plan:
    place = find_place(load_cluster(cluster or cluster_of(recipe)))
    resolved = resolve(recipe, overrides)
    return make_plan(resolved, place.machine(resolved.recipe.slurm.nodes), place.constants)


def test_a_quantised_base_in_each_node_is_ten_times_faster() -> None:
    """The reason for the recipe: on the same 16 GPUs only the adapter's gradients cross the Ethernet."""
    reference, hsdp = plan("llama405b-oasst2"), plan("llama405b-oasst2-hsdp-qlora")
    assert reference.step.seconds >= 10 * hsdp.step.seconds
    assert hsdp.fits and hsdp.strategy.replicas == 2


@pytest.mark.parametrize(
    ("recipe", "ratio", "cluster", "measured"),
    [
        ("qwen2.5-14b-tulu3", 0.5, "idris-jeanzay-h100", 1.9978),
        ("qwen2.5-32b-tulu3", 0.75, "idris-jeanzay-h100", 4.1666),
        ("qwen2.5-14b-tulu3", 0, "idris-dalia-gb200", 0.9041),
        ("qwen2.5-32b-tulu3", 0, "idris-dalia-gb200", 1.7988),
        ("qwen2.5-72b-tulu3", 0.5, "idris-dalia-gb200", 4.3788),
    ],
)
def test_the_recipes_are_the_measured_jobs(recipe: str, ratio: float, cluster: str, measured: float) -> None:
    """64 GPUs, 2 sequences of 4,096 tokens each, the source's ratio for the GPU's memory: its measured step is the plan's.

    The source padded each conversation to 4,096 tokens. The recipes pack; without lengths a row counts as one conversation.
    """
    found = plan(recipe, f"activation_checkpointing.ratio={ratio}", "data.expect.mean_tokens=null", cluster=cluster)
    assert found.fits and found.step.seconds == pytest.approx(measured, rel=0.08)


def test_padding_wastes_what_the_source_says() -> None:
    """Packed, an epoch has a fifth of the steps: 81 % of what the source computes is padding."""
    packed, padded = plan("qwen2.5-14b-tulu3"), plan("qwen2.5-14b-tulu3", "train.packing=false")
    assert packed.schedule.steps and padded.schedule.steps
    assert 1 - packed.schedule.steps / padded.schedule.steps == pytest.approx(0.81, abs=0.01)
