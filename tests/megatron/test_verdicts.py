"""Our rules beside Megatron-Core's own verdict, as record_verdicts.py wrote it down."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.recipe.schema import Megatron
from clustertune.resolve.megatron import data_parallel, find_problems
from tests.megatron.record_verdicts import CASES, MODELS, NAMES, verdict

VERDICTS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("verdicts.json").read_text())


def ours(case: dict[str, Any]) -> list[str]:
    """What our rules say about a case."""
    model = MODELS[case["model"]]
    architecture = {
        "num_hidden_layers": model["num_layers"], "num_attention_heads": model["num_attention_heads"],
        "num_key_value_heads": model["num_query_groups"], "intermediate_size": model["ffn_hidden_size"],
        "num_local_experts": model.get("num_moe_experts", 0),
    }  # fmt: skip
    section = Megatron.model_validate(case["section"])
    return [f"{key}: {text}" for key, text, _ in find_problems(section, case["world"], architecture, {})]


def test_the_record_is_of_these_cases() -> None:
    """A case that was added and not recorded would be compared with nothing."""
    sections = [{NAMES.get(key, key): value for key, value in given.items()} for _, _, given in CASES]
    assert [(v["model"], v["world"], v["section"]) for v in VERDICTS] == [
        (model, world, section) for (model, world, _), section in zip(CASES, sections, strict=True)
    ]
    assert sum(v["refuses"] is None for v in VERDICTS) >= 4 and sum(v["refuses"] is not None for v in VERDICTS) >= 8


def test_the_record_is_what_megatron_core_says_here() -> None:
    """Where it is installed; its wheels are for Python 3.12, and this project's own environment has none."""
    if importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None:
        assert [verdict(*case) for case in CASES] == VERDICTS


@pytest.mark.parametrize("case", VERDICTS, ids=lambda case: f"{case['model']}-{case['world']}-{list(case['section'].values())}")
def test_what_megatron_core_refuses_is_refused_before_the_queue(case: dict[str, Any]) -> None:
    """And what it takes has the data-parallel size that we derive."""
    if case["refuses"] is not None:
        assert ours(case), case["refuses"]
    else:
        assert case["data_parallel"] == data_parallel(Megatron.model_validate(case["section"]), case["world"])


@pytest.mark.parametrize(
    "case", [v for v in VERDICTS if v["refuses"] is None], ids=lambda case: str(list(case["section"].values()))
)
def test_what_it_takes_is_not_refused_without_a_reason(case: dict[str, Any]) -> None:
    """Where we are stricter, it is a check that comes when the model is built or its first batch runs: the layers of a stage
    (get_num_layers_to_build in transformer_block.py), experts with tensor parallelism (moe_layer.py).
    """
    later = ("are not a multiple of", "Megatron-Core wants it for experts")
    assert all(any(reason in text for reason in later) for text in ours(case)), ours(case)
