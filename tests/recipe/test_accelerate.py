"""The distribution file: accelerate loads what is accepted; what it would misread without a message is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune.errors import UserError
from clustertune.recipe.accelerate_file import find_problems
from clustertune.resolve.resolve import resolve
from clustertune.training.build import accelerate_environment

FSDP2: dict[str, Any] = {
    "fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}  # fmt: skip
FSDP1: dict[str, Any] = {
    "fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_use_orig_params": True,
}  # fmt: skip


def problems(body: dict[str, Any], folder: Path = Path("/nonexistent")) -> dict[str, str]:
    return {".".join(path[1:]): f"{message} -> {fix}" for path, message, fix in find_problems(body, folder)}


def fsdp(base: dict[str, Any] = FSDP2, **changes: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "fsdp_config": base | changes}


def test_what_is_right(tmp_path: Path) -> None:
    """FSDP2, and DeepSpeed with its file."""
    (tmp_path / "ds.json").write_text("{}")
    body = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}}
    assert problems(fsdp(FSDP2)) == problems(body, folder=tmp_path) == {}


def test_fsdp1_is_refused_in_one_sentence() -> None:
    """It names accelerate's own converter; keys of FSDP1 are not told one by one beside it."""
    for body in (fsdp(FSDP1), fsdp({}), fsdp({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"})):
        ((key, text),) = problems(body).items()
        assert key == "fsdp_config.fsdp_version" and "accelerate to-fsdp2 --config_file FILE" in text


WRAP = "fsdp_transformer_layer_cls_to_wrap"
WRONG_FSDP: dict[str, list[tuple[Any, str]]] = {
    "fsdp_sharding_strategy": [("FULL_SHARD", "fsdp_reshard_after_forward: true")],
    "fsdp_use_orig_params": [(True, "leave it out")],
    "fsdp_backward_prefetch": [("BACKWARD_PRE", "by itself")],
    "fsdp_sync_module_states": [(True, "cpu_ram_efficient_loading")],
    "fsdp_forward_prefetch": [(True, "refuses it")],
    "fsdp_version": [(3, "FSDP2")],
    "fsdp_reshard": [("x", "fsdp_reshard_after_forward")],
    "fsdp_state_dict_type": [("FULL_STATE_DICT", "SHARDED_STATE_DICT")],
}  # fmt: skip
"""One key of FSDP2's section, changed: value, and words of what is said."""
FILE = {"deepspeed_config_file": "ds.json"}
MESH = "parallelism_config"
WRONG: list[tuple[dict[str, Any], str, str]] = [
    *((fsdp(**{key: value}), f"fsdp_config.{key}", says) for key, cases in WRONG_FSDP.items() for value, says in cases),
    (fsdp({}), "fsdp_config.fsdp_version", "missing"),
    # accelerate launch adds the prefix; what plans, loads and checks the sharding reads the whole name
    (fsdp({"version": 2}), "fsdp_config.version", "write fsdp_version"),
    (fsdp(offload_params=True), "fsdp_config.offload_params", "write fsdp_offload_params"),
    (fsdp(fsdp_auto_wrap_policy="NO_WRAP"), f"fsdp_config.{WRAP}", "TRANSFORMER_BASED_WRAP"),
    (fsdp(fsdp_activation_checkpointing_offload=True), "fsdp_config.fsdp_activation_checkpointing_offload", "offloading"),
    *((fsdp() | {key: 1}, key, "derived") for key in ("num_processes", "machine_rank", "main_process_port", "use_cpu")),
    (fsdp() | {"mixed_precison": "bf16"}, "mixed_precison", "did you mean mixed_precision"),
    (fsdp() | {"mixed_precision": "bf17"}, "mixed_precision", "bf16"),
    (fsdp() | {"mixed_precision": "fp8"}, "mixed_precision", "has no effect"),
    (fsdp() | {"mixed_precision": "fp16"}, "mixed_precision", "train.fp16 is not carried"),
    (fsdp() | {"fp8_config": {"fp8_backend": "TE"}}, "fp8_config", "has no effect"),
    (fsdp() | {"fsdp_config": [1]}, "fsdp_config", "keys and values"),
    ({"fsdp_config": FSDP2}, "distributed_type", "missing"),
    ({"distributed_type": "FSDP2"}, "distributed_type", "did you mean FSDP"),
    ({"distributed_type": "MULTI_GPU", "fsdp_config": FSDP2}, "fsdp_config", "only with distributed_type: FSDP"),
    ({"distributed_type": "DEEPSPEED"}, "deepspeed_config", "missing"),
    ({"distributed_type": "DEEPSPEED", "deepspeed_config": FILE}, "deepspeed_config.deepspeed_config_file", "not a file"),
    (fsdp() | {MESH: {"tp_size": 2}}, f"{MESH}.tp_size", "parallelism_config_tp_size"),
    (fsdp() | {MESH: {f"{MESH}_tp_size": 0}}, f"{MESH}.{MESH}_tp_size", "1"),
    (fsdp() | {"dynamo_config": {"dynamo_bakend": "INDUCTOR"}}, "dynamo_config.dynamo_bakend", "dynamo_backend"),
]


@pytest.mark.parametrize(("body", "key", "says"), WRONG)
def test_what_accelerate_would_misread(body: dict[str, Any], key: str, says: str) -> None:
    found = problems(body)
    assert key in found, found
    assert says in found[key]


def test_accelerates_own_switch_of_recomputation_is_that_of_the_recipe(tmp_path: Path) -> None:
    """It stands in most files that people have. Where the recipe says something else, neither is taken silently."""
    switch = "accelerate.fsdp_config.fsdp_activation_checkpointing=true"
    assert resolve("tiny-oasst2", [switch]).distribution == resolve("tiny-oasst2", []).distribution
    with pytest.raises(UserError, match="recomputes all layers"):
        resolve("tiny-oasst2", [switch, "activation_checkpointing.ratio=0.5"])
    file = tmp_path / "accelerate.yaml"
    file.write_text(yaml.safe_dump(fsdp(fsdp_activation_checkpointing=True)))
    variables = accelerate_environment(file, 2)
    assert (variables["FSDP_VERSION"], variables["FSDP_ACTIVATION_CHECKPOINTING"]) == ("2", "false")
