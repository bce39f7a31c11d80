"""What a plan says: a document with all its keys, parts that sum up, arithmetic that is true, one sentence that fits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.hardware import Price
from clustertune.plan import explanation
from clustertune.plan.constants import Constants
from clustertune.plan.machine import Link, PlanMachine
from clustertune.plan.predict import Plan, make_plan
from clustertune.plan.schedule import Lengths
from clustertune.resolve.resolve import resolve
from tests.plan.test_advise import EXPERTS, NF4
from tests.plan.world import INTER, INTRA, LORA_SECTION, constants, fsdp2, machine, write_recipe

NUMBER = (int, float)
PROMISED: dict[str, Any] = {
    "fits": bool, "step_s": NUMBER, "step_parts_s": dict, "peak_gib_per_gpu": NUMBER, "memory_parts_gib": dict,
    "tokens_per_s": NUMBER, "mfu": NUMBER, "hours": NUMBER, "gpu_hours": NUMBER, "bottleneck": str,
    "assumptions": list, "bandwidth_source": str,
}  # fmt: skip
PRICE = Price(on_demand=2.0, spot=0.5, currency="USD", date="2026-04-29", source="a page")
ROWS = Lengths((500,), "test")
TRAIN = {"save_strategy": "steps", "save_steps": 10, "eval_strategy": "steps", "eval_steps": 10}


def planned(folder: Path, at: PlanMachine | None = None, given: Constants | None = None, **recipe: Any) -> Plan:
    recipe["train"] = TRAIN | recipe.get("train", {})
    return make_plan(resolve(write_recipe(folder, **recipe)), at or machine(), given or constants(), lengths=ROWS)


CASES: dict[str, dict[str, Any]] = {
    "full": {"nodes": 2},
    "lora": {"nodes": 2, "lora": LORA_SECTION, "train": {"per_device_train_batch_size": 2}},
    "megatron": {
        "nodes": 2,
        "megatron": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "sequence_parallel": True},
    },
    "offload": {"accelerate": fsdp2(offload_params=True)},
}  # fmt: skip


@pytest.fixture(params=CASES)
def plan(request: pytest.FixtureRequest, tmp_path: Path) -> Plan:
    """Plans of several sorts."""
    return planned(tmp_path / "recipe", **CASES[request.param])


def test_the_document_holds_what_is_promised(plan: Plan) -> None:
    """Keys and types that programs read; parts sum up to the step, the memory and the hours; tokens a second x seconds =
    tokens; GPU-hours x price = money."""
    body = explanation.as_json(plan)
    for key, kind in PROMISED.items():
        assert isinstance(body[key], kind), key
    assert body["fits"] == (body["needed_gib_per_gpu"] <= body["usable_gib_per_gpu"])
    assert body["step_s_range"][0] < body["step_s"] < body["step_s_range"][1]
    parts = body["step_parts_s"]
    own = ("compute", "exposed_communication", "pipeline_bubble", "optimizer")
    assert sum(parts[name] for name in own) == pytest.approx(body["step_s"])
    assert sum(parts.values()) * body["steps"] / 3600 == pytest.approx(body["hours"])
    assert sum(body["memory_parts_gib"].values()) == pytest.approx(body["needed_gib_per_gpu"])
    base = sum(term.value for term in plan.peak.parts if term.name in ("weights", "adapters"))
    assert body["memory_parts_gib"]["weights"] == pytest.approx(base / 2**30)
    beside = body["memory_parts_gib"]["fragmentation"] + plan.constants.context_gib
    most = max(body["peak_gib_per_gpu"], body["evaluation_gib_per_gpu"] or 0)
    assert body["needed_gib_per_gpu"] - most == pytest.approx(beside)
    assert body["tokens_per_s"] * body["step_s"] == pytest.approx(64 * 2048)
    assert body["gpu_hours"] == pytest.approx(body["hours"] * plan.strategy.world_size)
    money = explanation.spent(body["gpu_hours"], PRICE)
    assert money and (money["on_demand"], money["spot"]) == pytest.approx((2 * body["gpu_hours"], 0.5 * body["gpu_hours"]))
    assert 0 < body["mfu"] <= body["hfu"] < 1
    assert explanation.spent(body["gpu_hours"], None) is explanation.spent(None, PRICE) is None
    no_spot = explanation.spent(1.0, PRICE.model_copy(update={"spot": None}))
    assert no_spot and no_spot["spot"] is None


TOKEN = re.compile(r"(?P<number>\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?)|(?P<word>[A-Za-z][\w'-]*(?:/s)?)|(?P<sign>[-+/()])")


def evaluate(line: str) -> tuple[float, float, str]:
    """The left side of ``NAME: FORMULA = RESULT UNIT`` computed without its words, and the result."""
    text, result = line.partition(": ")[2].partition(";")[0].partition(" = ")[0], line.rpartition(" = ")[2]
    tokens = []
    for found in TOKEN.finditer(text):
        if found["number"]:
            tokens.append(found["number"].replace(",", ""))
        elif found["sign"] or found["word"] == "x":
            tokens.append(found["sign"] or "*")
    value, unit = result.replace(",", "").split(" ")
    while "(" in tokens and (at := tokens.index("(")) + 1 < len(tokens) and tokens[at + 1] == ")":
        del tokens[at : at + 2]
    return eval(" ".join(tokens)), float(value), unit  # noqa: S307 - numbers and signs


UNITS = {"s": 1.0, "ms": 1e-3, "GiB": 2.0**30, "MiB": 2.0**20}


LATENT = machine(
    intra=Link(INTRA, INTRA, "nominal", "links", 2e-6), inter=Link(INTER, INTER, "nominal", "network", 10e-6)
)  # fmt: skip


@pytest.mark.parametrize("name", [*CASES, "experts", "quantised"])
def test_the_arithmetic_is_true(name: str, tmp_path: Path) -> None:
    """What stands before the equals sign gives what stands behind it, of every part but two that choose between numbers."""
    more = {
        "experts": {"model": EXPERTS, "nodes": 2,
                    "megatron": {"expert_model_parallel_size": 8}},
        "quantised": {"lora": LORA_SECTION, "train": {"model_init_kwargs": {"dtype": "bfloat16", "quantization_config": NF4}}},
    }  # fmt: skip
    plan = planned(tmp_path / "recipe", LATENT, **(CASES | more)[name])
    checked = set()
    for topic, terms in explanation.topics(plan).items():
        for term in terms:
            if not term.value or "{" not in term.formula or "the longer of" in term.formula:
                continue
            left, right, unit = evaluate(f"{term.name}: {term.arithmetic()}")
            scale = 1.0 if term.unit == "s" else 2.0**30 if "GiB" in term.formula else 1e9 if " GB" in term.formula else 1.0
            assert left * scale == pytest.approx(term.value, rel=0.01), term
            assert right * UNITS[unit] == pytest.approx(term.value, rel=0.01, abs=0.005 * UNITS[unit]), term
            checked.add(topic)
    assert checked >= {"compute", "communication", "optimizer", "checkpoint", "load", "memory", "host", "step"}


LONG = {"train": {"num_train_epochs": 20}}
QUICK = machine(storage_write_bytes_per_s=1e15, storage_read_bytes_per_s=1e15)
SLOW = Link(1e8, 1e9, "measured", "check", 0.0)


@pytest.mark.parametrize(
    ("expected", "at", "given", "recipe"),
    [
        ("Computing", QUICK, constants(), {"lora": LORA_SECTION, **LONG}),
        ("The network between nodes", machine(inter=SLOW), constants(), {"nodes": 2}),
        ("The network inside a node", machine(intra=SLOW), constants(), {}),
        ("Start-up and loading", machine(storage_read_bytes_per_s=1e6), constants(), {}),
        ("Checkpoints", machine(storage_write_bytes_per_s=1e6), constants(), {}),
        ("The optimizer", machine(), constants(fused_optimizer_bytes=1e8), {}),
        ("It does not fit: ", machine(usable_bytes=2**30), constants(), {}),
        ("It does not fit into a node's RAM", machine(host_bytes=1.0), constants(), {}),
    ],
)  # fmt: skip
def test_the_bottleneck_is_the_largest_part(
    expected: str, at: PlanMachine, given: Constants, recipe: dict[str, Any], tmp_path: Path
) -> None:  # fmt: skip
    """One sentence that follows what takes the time, or why nothing starts."""
    plan = planned(tmp_path / "recipe", at, given, **recipe)
    found = explanation.bottleneck(plan)
    assert found.startswith(expected), found
    assert plan.fits == ("not fit" not in found)
    assert found.endswith(".") and "\n" not in found


def test_training_and_evaluation_are_two_figures(tmp_path: Path) -> None:
    """What an evaluation takes changes nothing of the training's peak; where it is the largest, the key that is named lowers it
    to no more than the training's."""
    recipe = write_recipe(tmp_path / "some", lora=LORA_SECTION, train={"max_steps": 9, "eval_strategy": "steps"})
    bodies = {}
    for rows in (1, 64):
        made = make_plan(resolve(recipe, [f"train.per_device_eval_batch_size={rows}"]), machine())
        bodies[rows] = explanation.as_json(made)
    small, large = bodies[1], bodies[64]
    assert small["peak_gib_per_gpu"] == large["peak_gib_per_gpu"] < large["evaluation_gib_per_gpu"]
    assert large["peak_moment"] == "evaluation" and large["needed_gib_per_gpu"] > large["evaluation_gib_per_gpu"]
    (told,) = (text for text in large["assumptions"] if "train.per_device_eval_batch_size" in text)
    (rows,) = re.findall(r"eval_batch_size=(\d+)", told)
    better = make_plan(resolve(recipe, [f"train.per_device_eval_batch_size={rows}"]), machine())
    assert better.peak is better.training_peak and better.evaluation_peak is not None
    assert not any("per_device_eval_batch_size" in text for text in explanation.assumptions(better))
    assert explanation.why(made, "evaluation-memory") and explanation.why(made, "training-memory")
    none = make_plan(resolve(recipe, ["train.eval_strategy=no"]), machine())
    assert explanation.as_json(none)["evaluation_gib_per_gpu"] is None
    assert none.peak.bytes == none.training_peak.bytes == better.training_peak.bytes
