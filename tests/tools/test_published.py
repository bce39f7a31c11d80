"""Published runs and other people's figures as data, and the arithmetic that checks the figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from clustertune.cluster.hardware import load_hardware
from clustertune.recipe.parameters import count, parameter_count
from tests.tree import REPO
from tools.planner_grade import data
from tools.planner_grade.data import claims_file, cluster_document, published_clusters, published_models, published_runs
from tools.planner_grade.formulas import FORMULAS, check, check_claims, compute, judge, node_bandwidth

CLAIMS = {claim.id: claim for claim in claims_file().claims}

# --- the files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(published_models()))
def test_an_architecture_counts_to_the_published_integer(name: str) -> None:
    """A wrong width would make every prediction for the model wrong by as much."""
    model = published_models()[name]
    assert parameter_count(model.architecture) == model.parameters


def test_the_405b_architecture_is_that_of_the_recipe() -> None:
    """The same facts stand in the recipe; two homes may not drift apart."""
    recipe = yaml.safe_load((REPO / "recipes/llama405b-oasst2/model.json").read_text())
    architecture = published_models()["llama-3.1-405b"].architecture
    assert {key: recipe[key] for key in architecture} == architecture


def test_clusters_name_known_gpus_and_take_files_as_they_are() -> None:
    """A GPU without figures cannot be planned on; the reference cluster has one home."""
    clusters = published_clusters()
    assert {cluster.gpu for cluster in clusters.values()} <= set(load_hardware())
    reference = clusters["nutanix-rtxpro6000"]
    assert (reference.gpu, reference.gpus_per_node, reference.host_gb) == ("rtx-pro-6000-blackwell-server", 8, 3900)
    assert reference.network is not None and reference.network.gb_s == 12.5


def test_measured_bandwidths_are_those_of_the_runs() -> None:
    """3.1, 4.7 and 8.0 GB/s: with nominal speeds the A100 runs are planned at a fifth of their time."""
    found = {name: cluster.measured_gb_s for name, cluster in published_clusters().items() if cluster.measured_gb_s}
    assert found == {"idris-jeanzay-a100": 3.1, "nutanix-rtxpro6000": 4.7, "nebius-h100-tcp": 8.0}
    opa = published_clusters()["idris-jeanzay-a100"].network
    assert opa is not None and opa.gb_s == 50
    # Two all-gathers in bf16 and a reduce-scatter in fp32: 8 B a parameter; in bf16 alone three times 2 B.
    runs = {("qwen2.5-14b", 8, 1, 0): "idris-1915513", ("mistral-7b", 2, 3, 3.4): "nebius-2-nodes"}
    for (model, each, passes, warm_up), run in runs.items():
        ran, counted = published_runs()[run], count(published_models()[model].architecture)
        assert counted is not None
        reached, _ = node_bandwidth(counted.total, each, passes, ran, warm_up)
        assert reached == pytest.approx(found[ran.cluster], rel=0.01)


# --- the runs ----------------------------------------------------------------------------------------------------------


def test_the_table_of_17_runs_has_its_batch_and_hours() -> None:
    """8,192 tokens a GPU and step in each; the hours that the logs print are 14,676 steps of that time."""
    runs = [run for run in published_runs().values() if run.set == "idris-csv"]
    assert {run.step_tokens // run.world for run in runs} == {8192}
    hours = {"idris-4803": 3.641, "idris-5431": 7.333, "idris-1915513": 151.737, "idris-1915698": 20.122}
    for name, published in hours.items():
        seconds = published_runs()[name].seconds
        assert seconds is not None and seconds * 14676 / 3600 == pytest.approx(published, rel=1e-3)
    assert all(run.peak_gib for run in runs)


def test_step_times_and_throughputs_of_a_row_agree() -> None:
    """Where a table prints both, batch, length and GPUs must turn one into the other: a wrong accumulation shows here."""
    both = [run for run in published_runs().values() if run.step_s and run.tokens_per_s_per_gpu]
    assert len(both) > 10
    for run in both:
        assert run.step_tokens / (run.step_s or math.nan) / run.world == pytest.approx(run.tokens_per_s_per_gpu, rel=2e-3), (
            run.id
        )


def test_the_reference_run_is_whole() -> None:
    """36 steps of 32 sequences in 8.4 h, 162 gathers of the weights."""
    run = published_runs()["nutanix-405b"]
    assert (run.global_batch, run.steps, run.hours, run.world) == (32, 36, 8.4, 16)
    assert run.steps is not None and run.eval_steps is not None
    assert run.gathers == run.steps * run.accumulation * 2 + run.steps // run.eval_steps


def test_published_seconds_come_from_the_rate_where_only_that_is_printed() -> None:
    """Most tables print tokens per second alone; hours alone give no step."""
    run = published_runs()["torchtitan-8b-8"]
    assert run.step_s is None and run.seconds == pytest.approx(2 * 8192 / 5762)
    assert published_runs()["idris-4803"].rate == pytest.approx(8192 / 0.893)
    assert published_runs()["dllm-1-node"].seconds is None and published_runs()["dllm-1-node"].rate is None


def test_rows_that_do_not_count_say_why() -> None:
    """A row that is left out without a message looks like a row that was chosen."""
    left = {run.id for run in published_runs().values() if run.excluded}
    assert {"idris-gb200-14b-bs4", "nebius-1-node", "dllm-2-nodes"} <= left
    assert all(len(run.excluded or "long enough") > 10 for run in published_runs().values())
    assert {run.id for run in published_runs().values() if not run.verified} >= {"megatron-70b-lora-h100", "idris-h100-72b"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "llama-9b"}, "there is no model llama-9b"),
        ({"cluster": "moon"}, "moon"),
        ({"step_s": None, "peak_gib": 80}, "needs a published time"),
        ({"tp": 3}, "not a multiple of tp 3"),
        ({"method": "lora"}, "lora stands with"),
        ({"assumed": ["colour"]}, "fields that there are not: colour"),
        ({"packing": "full", "useful_share": 0.5}, "for padded sequences"),
        ({"nodes": True}, "not a number"),
        ({"speed": 3}, "Extra inputs"),
        ({"id": "idris-4803"}, "stands twice"),
    ],
)
def test_a_wrong_row_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """Every guard of the rows, each with a row that only it refuses."""
    good = {
        "id": "a", "place": "x", "model": "llama-3.1-8b", "cluster": "dgx-h100", "nodes": 1, "method": "full", "kind": "FSDP2",
        "micro_batch": 1, "sequence": 4096, "checkpointed": 0, "compiled": True, "weight_dtype": "bf16", "reduce_dtype": "bf16",
        "state_dtype": "bf16", "step_s": 1.0,
    }  # fmt: skip
    path = tmp_path / "runs.yaml"

    def runs(*rows: dict[str, Any]) -> dict[str, data.PublishedRun]:
        path.write_text(yaml.safe_dump({"groups": [{"set": "s", "source": "x", "runs": list(rows)}]}))
        published_runs.cache_clear()
        return dict(published_runs(path))

    try:
        assert runs(good)["a"].gpus_per_node == 8
        with pytest.raises((ValidationError, AssertionError, KeyError), match=words):
            runs(good | change, good | {"id": "idris-4803"})
    finally:
        published_runs.cache_clear()


def test_the_cluster_of_a_run_is_a_cluster_file() -> None:
    """With as many nodes as the run had, and what was measured; a run inside one NVLink domain names no network."""
    document = cluster_document(published_runs()["idris-1915513"])
    assert len(document["nodes"]) == 8 and document["network"]["measured_gb_s"] == 3.1
    assert len({node["address"] for node in cluster_document(published_runs()["megatron-405b-h100"])["nodes"]}) == 128
    rack = cluster_document(published_runs()["idris-5434"])
    assert rack["compute"]["nvlink_domain"] == 72 and rack["network"] == {"kind": "none"}


# --- the claims --------------------------------------------------------------------------------------------------------


def test_the_claims_cover_every_document() -> None:
    """Right ones too: a checker that only refutes is not believed."""
    results = check_claims()
    assert len(results) >= 35 and len(CLAIMS) == len(results)
    for source in claims_file().sources:
        own = {check(claim).verdict for claim in CLAIMS.values() if claim.source == source}
        assert {"right", "refuted"} <= own, source
    assert set(FORMULAS) == {claim.formula for claim in CLAIMS.values()}, "a formula that no claim uses is not tested"


@pytest.mark.parametrize("name", sorted(CLAIMS))
def test_a_claim_is_judged_as_expected(name: str) -> None:
    """The verdict follows from the arithmetic, which shows the value that it was judged by: that value itself would be right,
    12 times as much in the direction of the claim is refuted."""
    claim = CLAIMS[name]
    result = check(claim)
    assert result.verdict == claim.verdict, result
    assert " = " in result.arithmetic
    if result.verdict != "right":
        assert claim.instead, "what is wrong needs what is right"
    assert check(claim.model_copy(update={"claimed": result.computed})).verdict == "right"
    off = result.computed / 12 if claim.relation == "at_most" else result.computed * 12
    assert check(claim.model_copy(update={"claimed": off})).verdict == "refuted"


@pytest.mark.parametrize(
    ("name", "right", "imprecise", "refuted"),
    [
        # In a range, and near it: the distance is counted from the nearer end, by ratio.
        ("spheron-405b-hours", [50, 57, 60, 62.9, 47.7], [63.1, 74.9, 47.5, 40.1], [75.1, 39.9, 500]),
        ("nebius-13b-node", [1, 80], [90], [300]),  # 80 GB are enough for 26 GB
        ("nebius-70b-nodes", [9, 1], [0.9], [0.2]),  # more than one node is needed for 1.8
    ],
)
def test_a_verdict_follows_the_distance(name: str, right: list[float], imprecise: list[float], refuted: list[float]) -> None:
    for verdict, values in (("right", right), ("imprecise", imprecise), ("refuted", refuted)):
        assert [judge(CLAIMS[name], value) for value in values] == [verdict] * len(values)


def test_an_input_that_no_formula_reads_is_refused() -> None:
    """It would look as if it had been taken into account."""
    assert compute("product", {"GPUs": 2, "hours": 3})[0] == 6
    with pytest.raises(KeyError, match="takes no colour"):
        compute("memory", {"parameters": 7e9, "bytes": 2, "colour": 1})
    with pytest.raises(KeyError, match="each"):
        compute("memory", {"parameters": 7e9})


def test_a_claim_of_an_unknown_source_is_refused() -> None:
    """Every figure has its document."""
    body = data.read(data.FOLDER / "claims.yaml")
    for claims in ([body["claims"][0] | {"source": "nobody"}], [body["claims"][1]] * 2):
        with pytest.raises(ValidationError, match=r"unknown source|stands twice"):
            data.ClaimsFile(**body | {"claims": claims})


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
