"""A resolved recipe as the planner reads it: over which ranks things are split, and how many bytes they take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.plan.strategy import Strategy, strategy
from clustertune.resolve.resolve import resolve
from tests.command import REPO
from tests.plan.world import RECOMPUTE

RECIPE = "llama405b-oasst2"
DEEPSPEED = ["accelerate.distributed_type=DEEPSPEED", "accelerate.fsdp_config=null"]
ZERO = "accelerate.deepspeed_config"
PARALLEL = "accelerate.parallelism_config.parallelism_config"
TP8, TP2 = ([f"megatron.tensor_model_parallel_size={n}", f"megatron.pipeline_model_parallel_size={10 - n}"] for n in (8, 2))


def read(*overrides: str, recipe: str | Path = RECIPE) -> Strategy:
    return strategy(resolve(recipe, overrides))


def check(found: Strategy, wanted: dict[str, Any]) -> None:
    known = vars(found) | {key: getattr(found.recompute, field) for key, field in RECOMPUTE.items()}
    assert {key: known[key] for key in wanted} == wanted


def test_a_deepspeed_file_and_what_is_laid_over_it(tmp_path: Path) -> None:
    """Offload and reduction stand in DeepSpeed's own words; the command line replaces single values."""
    for name in ("_base", RECIPE):
        shutil.copytree(REPO / "recipes" / name, tmp_path / name)
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "nvme", "nvme_path": "auto"}}
    batch = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    folder = tmp_path / RECIPE
    (folder / "deepspeed.json").write_text(json.dumps({"zero_optimization": zero, "communication_data_type": "fp32", **batch}))
    config = "{deepspeed_config_file: deepspeed.json, zero3_init_flag: true}"
    (folder / "ds.yaml").write_text(f"distributed_type: DEEPSPEED\ndeepspeed_config: {config}\n")
    given = {"kind": "ZeRO-3", "offload_params": "cpu", "offload_optimizer": "nvme", "reduce_bytes": 4, "gradient_bytes": 2}
    check(read("accelerate=ds.yaml", recipe=folder), given | {"state_bytes": 12})
    words = ["deepspeed.zero_optimization.offload_param=null", "deepspeed.data_types.grad_accum_dtype=fp32"]
    check(read("accelerate=ds.yaml", *words, recipe=folder), given | {"offload_params": "none", "gradient_bytes": 4})


@pytest.mark.parametrize(
    ("config", "weight", "gather"),
    [
        ({"quant_method": "fp8"}, 1.0002, 1.0), ({"quant_method": "fbgemm_fp8"}, 1.0002, 1.0),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, 0.5195, 0.5),
    ],
)  # fmt: skip
def test_a_base_of_another_program_is_counted(config: dict[str, Any], weight: float, gather: float) -> None:
    """No recipe starts with it (tests/recipe/test_refusals.py). What another program did is planned all the same."""
    resolved = resolve(RECIPE)
    resolved.train_args["model_init_kwargs"] = {**resolved.train_args["model_init_kwargs"], "quantization_config": config}
    found = strategy(resolved)
    assert (found.weight_bytes, found.whole_bytes) == pytest.approx((weight, 0.0), abs=1e-4)
    check(found, {"gather_bytes": gather, "other_bytes": 2})


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["accelerate.distributed_type=NO", DEEPSPEED[1]], "starts one process"),
        ([f"{PARALLEL}_cp_size=4", "train.packing=false", "train.max_length=2044"], "train.max_length=2040"),
        ([*DEEPSPEED, f"{ZERO}.zero_stage=7"], "no ZeRO stage 7"),
        ([*DEEPSPEED, f"{ZERO}={{zero_stage: 2, offload_param_device: cpu}}"], "offloaded from stage 3 on, here it is 2"),
        ([*DEEPSPEED, f"{ZERO}={{zero_stage: 2, offload_optimizer_device: nvme}}"], "of stage 3 only, here it is 2"),
    ],
)  # fmt: skip
def test_what_the_ranks_would_refuse(overrides: list[str], says: str) -> None:
    """Better said by a plan of a moment than by 128 ranks in the queue."""
    with pytest.raises(UserError) as caught:
        read(*overrides)
    assert any(says in str(problem) for problem in caught.value.problems)
