"""Published runs and other people's figures as data, and the arithmetic that checks the figures."""

from __future__ import annotations

import math
from typing import Any

import pytest

from clustertune.recipe.parameters import parameter_count
from tools.planner_grade.data import claims_file, cluster_document, published_models, published_runs
from tools.planner_grade.formulas import FORMULAS, check, check_claims, compute

CLAIMS = {claim.id: claim for claim in claims_file().claims}
NUMERIC = [claim.id for claim in CLAIMS.values() if any(isinstance(value, int | float) for value in claim.inputs.values())]


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


# --- the claims --------------------------------------------------------------------------------------------------------


def test_every_claim_is_judged_as_expected_and_every_document_has_right_and_wrong_ones() -> None:
    """The verdict follows from the arithmetic; a checker that only refutes is not believed."""
    results = check_claims()
    assert len(results) == len(CLAIMS) >= 35
    for result in results:
        assert result.verdict == result.claim.verdict and " = " in result.arithmetic, result
        assert result.verdict == "right" or result.claim.instead, "what is wrong needs what is right"
    for source in claims_file().sources:
        assert {"right", "refuted"} <= {one.verdict for one in results if one.claim.source == source}, source
    assert set(FORMULAS) == {claim.formula for claim in CLAIMS.values()}, "a formula that no claim uses is not tested"


@pytest.mark.parametrize("name", NUMERIC)
def test_another_input_gives_another_verdict(name: str) -> None:
    """A verdict that no input changes was not computed from them: one of the numbers, 30 times as large or small, turns it."""
    claim = CLAIMS[name]
    before = check(claim).verdict
    for key, value in claim.inputs.items():
        for factor in (30, 1 / 30) if isinstance(value, int | float) else ():
            changed = claim.model_copy(update={"inputs": claim.inputs | {key: value * factor}})
            if check(changed).verdict != before:
                return
            # A figure far off the one side comes to lie far off the other: the computed value itself then shows the input.
            if before != "right" and check(changed).computed != check(claim).computed:
                return
    pytest.fail(f"no input of {name} matters")


@pytest.mark.parametrize(
    ("formula", "inputs", "value"),
    [
        ("weight-shards", {"model": "llama-3.1-405b", "bytes": 2, "shard_gb": 5}, 191),
        ("weight-shards", {"model": "llama-3.1-8b", "bytes": 2, "shard_gb": 5}, 4),
        ("zero-reduction", {"stage": 0, "ranks": 8}, 1),
        ("zero-memory", {"parameters": 1e9, "stage": 3, "ranks": 16}, 1),
        ("bubble", {"stages": 4, "micro_batches": 12}, 20),
        ("bubble", {"stages": 4, "micro_batches": 12, "virtual": 3}, 100 / 13),
        ("epoch-steps", {"rows": 33, "epochs": 1, "batch": 32}, 2),
        ("layer-gather", {"model": "llama-3.1-405b", "bytes": 2}, 6.375415),
        ("days-for-tokens", {"tokens": 86400, "tokens_per_s": 1}, 1),
        ("more-time", {"slow": "idris-1915513", "fast": "idris-1927120"}, 452.795),
    ],
)
def test_formulas_against_values_worked_out_by_hand(formula: str, inputs: dict[str, Any], value: float) -> None:
    """191 and 4 are the numbers of files that the models have on the Hub."""
    assert compute(formula, inputs)[0] == pytest.approx(value, rel=1e-5)
