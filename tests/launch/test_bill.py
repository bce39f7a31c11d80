"""One total everywhere: parts that sum up, the same figure from every command, and what makes a run dear."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.load import load_cluster, of_gpus
from clustertune.launch import bill as bills
from clustertune.launch.bill import bill, of_recipe
from clustertune.plan.predict import Plan
from clustertune.resolve.resolve import resolve
from tests.command import run

RECIPE, CLUSTER = "llama70b-lora", "rno-rtxpro6000"


def total(*words: str) -> Any:
    done = run(*words, "--json")
    assert done.code == 0, done.err
    return done.json["total"]


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    return dict(total("plan", RECIPE, "--cluster", CLUSTER))


def test_the_parts_sum_up_to_hours_money_and_wall_clock(planned: dict[str, Any]) -> None:
    """And the range is the training's, with the evaluation in both ends."""
    stages = planned["stages"]
    assert planned["gpu_hours"] == pytest.approx(sum(stage["gpu_hours"] for stage in stages.values()))
    assert planned["wall_s"] == pytest.approx(sum(stage["seconds"] for stage in stages.values()))
    assert planned["cost"]["on_demand"] == pytest.approx(planned["gpu_hours"] * planned["cost"]["per_gpu_hour"]["on_demand"])
    low, high = planned["gpu_hours_range"]
    assert stages["evaluation"]["gpu_hours"] < low < planned["gpu_hours"] < high
    assert planned["price_age_days"] == (date.today() - date.fromisoformat(planned["cost"]["date"])).days


def test_plan_dry_run_and_sweep_say_the_same(planned: dict[str, Any], tmp_path: Path) -> None:
    """Two points of a sweep up to its evaluation cost twice as much; up to the training, twice the training."""
    assert total("submit", RECIPE, "--cluster", CLUSTER, "--dry-run", "--run-dir", str(tmp_path / "run")) == planned
    sweep = ("sweep", RECIPE, "train.learning_rate=1e-5,2e-5", "--cluster", CLUSTER, "--dry-run", "--sweep-dir")
    whole, training = (total(*sweep, str(tmp_path / stage), "--to", stage) for stage in ("eval", "train"))
    assert whole["gpu_hours"] == pytest.approx(2 * planned["gpu_hours"])
    assert training["gpu_hours"] == pytest.approx(2 * planned["stages"]["training"]["gpu_hours"])


def test_an_option_of_advise_costs_what_its_plan_says() -> None:
    found = run("plan", "llama405b-oasst2", "--cluster", CLUSTER, "--advise", "--json").json
    option = next(one for one in found["options"] if one["fits"] and one["engine"] == "trl")
    planned = total("plan", "llama405b-oasst2", *option["overrides"], "--cluster", CLUSTER)
    assert option["cost"] == pytest.approx(planned["cost"]["on_demand"]) and found["currency"] == planned["cost"]["currency"]


def test_an_evaluation_without_vllm_is_named_with_what_vllm_saves() -> None:
    """Not where the recipe asks for transformers, and not where vLLM is there."""
    slow = load_cluster("idris-jeanzay-a100")
    found = of_recipe(resolve(RECIPE), slow)
    assert found and "with vLLM" in found[1].saving and found[1].saving in found[1].rows("x").values()
    asked = of_recipe(resolve(RECIPE, ["eval.backend=hf"]), slow)
    there = of_recipe(resolve(RECIPE), load_cluster(CLUSTER))
    assert asked and there and asked[1].saving == there[1].saving == ""


def test_without_a_price_there_is_no_money() -> None:
    cluster = load_cluster("idris-dalia-gb200")
    found = of_recipe(resolve(RECIPE, ["slurm.nodes=2", "slurm.gpus_per_node=4"]), cluster)
    assert found and found[1].gpu_hours and found[1].cost is None and "no price" in found[1].rows("gb200")["cost"]


def test_without_steps_there_are_no_hours(planned_llama: Plan) -> None:
    bare = bill(planned_llama, load_cluster(CLUSTER))
    assert bare.gpu_hours is bare.cost is bare.wall is None and bare.headline() == ""


@pytest.fixture
def planned_llama(monkeypatch: pytest.MonkeyPatch) -> Plan:
    found = of_recipe(resolve(RECIPE), load_cluster(CLUSTER))
    assert found
    monkeypatch.setattr(Plan, "totals", lambda _self: None)
    return found[0]


# --- several clusters --------------------------------------------------------------------------------------------------


def test_a_row_a_cluster_the_cheapest_first() -> None:
    """Clusters of four GPUs a node get twice the nodes; --gpus counts as one; each total is that of its own plan."""
    done = run("plan", RECIPE, "--clusters", "all", "--gpus", "2x4xa100-sxm-80", "--json")
    rows = {row["cluster"]: row for row in done.json["clusters"]}
    assert rows["2x4xa100-sxm-80"]["fits"] and rows["idris-jeanzay-h100"]["nodes"] == 2
    paid = [row["total"]["cost"]["on_demand"] for row in rows.values() if row["fits"] and row["total"]["cost"]]
    assert paid == sorted(paid) and len(paid) > 3
    assert rows[CLUSTER]["total"] == total("plan", RECIPE, "--cluster", CLUSTER)
    assert rows["2x4xa100-sxm-80"]["evaluation"]["backend"] == rows[CLUSTER]["evaluation"]["backend"] == "vllm"


def test_what_does_not_fit_has_a_reason_and_no_hours() -> None:
    """Too little memory, too few nodes, a mesh that the nodes do not carry."""
    small, few = (of_gpus(text) for text in ("2x8xl40s", "1x8xh100-sxm"))
    found = {one.cluster.name: one.as_json() for one in bills.choices("llama405b-oasst2", [], [small, few])}
    assert "GiB a GPU" in found["2x8xl40s"]["why_not"] and "it has 1" in found["1x8xh100-sxm"]["why_not"]
    assert all(row["hours"] is row["total"] is row["step_s"] is None for row in found.values())
    narrow = bills.choices("llama70b-ifeval-grpo", [], [of_gpus("8x4xh100-sxm")])[0]
    assert not narrow.fits and "8 GPUs, and the job has 4 on each node" in narrow.why_not  # its servers take eight of a node
    done = run("plan", "llama405b-oasst2", "--clusters", "", "--gpus", "2x8xl40s")
    assert done.code == 2 and "does not fit: 2x8xl40s" in done.out


def test_slurm_is_asked_when_it_would_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch --test-only answers on stderr; it is asked where the cluster is this place alone, and its silence is no start."""
    program = tmp_path / "sbatch"
    program.write_text('#!/bin/sh\necho "sbatch: Job 7 to start at 2031-02-03T04:05:06 using 8 processors on n1" >&2\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cluster = load_cluster(CLUSTER)
    monkeypatch.setattr(bills, "load_cluster", lambda _name: cluster)
    assert bills.choices(RECIPE, [], [cluster])[0].start == "2031-02-03T04:05:06"
    assert bills.choices(RECIPE, [], [load_cluster("dgx-h100")])[0].start is None
    program.write_text("#!/bin/sh\nexit 1\n")
    assert bills.choices(RECIPE, [], [cluster])[0].start is None


def test_the_page_replaces_its_own_and_nothing_else(tmp_path: Path) -> None:
    page, other = tmp_path / "clusters.html", tmp_path / "mine.html"
    other.write_text("mine")
    words = ("plan", RECIPE, "--clusters", "dgx-h100", "--out")
    assert run(*words, str(page)).code == run(*words, str(page)).code == 0 and "dgx-h100" in page.read_text()
    assert run(*words, str(other)).code == 2 and other.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("--cluster", "dgx-h100", "--cluster=nebius-h100"), "--cluster"),
        (("--clusters", "all", "--cluster", "dgx-h100"), "--clusters"),
        (("--clusters", "dgx-h10"), "--cluster"),
        (("--out", "x.html"), "--out"),
    ],
)
def test_contradictions_are_refused(words: tuple[str, ...], key: str) -> None:
    done = run("plan", RECIPE, *words, "--json")
    assert done.code == 2 and [problem["key"] for problem in json.loads(done.out)["problems"]] == [key]


@pytest.mark.parametrize(("recipe", "cluster"), [("qwen3-30b-a3b-lora", "dgx-h100"), ("llama8b-lima", "dgx-h100")])
def test_the_largest_part_of_a_bill_has_its_arithmetic(recipe: str, cluster: str) -> None:
    """Each GPU-hour of the evaluation behind the training comes from a line, and the whole bill adds up from its stages."""
    plan = json.loads(run("plan", recipe, "--cluster", cluster, "--json").out)
    why = {part: run("plan", recipe, "--cluster", cluster, "--why", part).out for part in ("evaluation", "hours", "cost")}
    last = why["evaluation"].strip().splitlines()[-1]
    assert f"= {plan['evaluation']['gpu_hours']:,.2f} GPU-hours" in last
    assert all(f"{plan['total']['cost']['on_demand']:,.2f}" in why[part] for part in ("hours", "cost"))
    assert all(f"{plan['total']['gpu_hours']:,.2f}" in why[part] for part in ("hours", "cost"))
