"""Published runs as data: what their sources say twice agrees."""

from __future__ import annotations

import math

import pytest

from clustertune.recipe.parameters import parameter_count
from tools.planner_grade.data import cluster_document, published_models, published_runs

# --- the files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(published_models()))
def test_an_architecture_counts_to_the_published_integer(name: str) -> None:
    """A wrong width would make every prediction for the model wrong by as much."""
    model = published_models()[name]
    assert parameter_count(model.architecture) == model.parameters


# --- the runs ----------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_run_agree() -> None:
    """A wrong accumulation or batch shows where a table prints the same twice: tokens a GPU and step, hours of 14,676 steps,
    seconds and rate. A row that does not count says why."""
    runs = published_runs()
    assert {run.step_tokens // run.world for run in runs.values() if run.set == "idris-csv"} == {8192}
    hours = {"idris-4803": 3.641, "idris-5431": 7.333, "idris-1915513": 151.737, "idris-1915698": 20.122}
    assert {name: (runs[name].seconds or math.nan) * 14676 / 3600 for name in hours} == pytest.approx(hours, rel=1e-3)
    both = [run for run in runs.values() if run.step_s and run.tokens_per_s_per_gpu]
    rates = {run.id: run.step_tokens / (run.step_s or math.nan) / run.world for run in both}
    assert len(both) > 10 and rates == pytest.approx({run.id: run.tokens_per_s_per_gpu for run in both}, rel=2e-3)
    reference = runs["nutanix-405b"]
    assert reference.steps is not None and reference.eval_steps is not None
    assert reference.gathers == reference.steps * reference.accumulation * 2 + reference.steps // reference.eval_steps == 162
    only_rate, only_step, only_hours = (runs[name] for name in ("torchtitan-8b-8", "idris-4803", "dllm-1-node"))
    assert only_rate.step_s is None and only_rate.seconds == pytest.approx(2 * 8192 / 5762)
    assert only_step.rate == pytest.approx(8192 / 0.893) and only_hours.seconds is None and only_hours.rate is None
    assert all(len(run.excluded or "long enough") > 10 for run in runs.values())


def test_the_cluster_of_a_run_is_a_cluster_file() -> None:
    """With as many nodes as the run had, and what was measured; a run inside one NVLink domain names no network."""
    document = cluster_document(published_runs()["idris-1915513"])
    assert len(document["nodes"]) == 8 and document["network"]["measured_gb_s"] == 3.1
    assert len({node["address"] for node in cluster_document(published_runs()["megatron-405b-h100"])["nodes"]}) == 128
    rack = cluster_document(published_runs()["idris-5434"])
    assert rack["compute"]["nvlink_domain"] == 72 and rack["network"] == {"kind": "none"}
