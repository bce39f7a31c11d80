"""The distribution file: accelerate loads what is accepted; what it would misread without a message is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune.config.accelerate_file import find_problems

FSDP2: dict[str, Any] = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_activation_checkpointing": True,
}
FSDP1: dict[str, Any] = {
    "fsdp_version": 1,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_use_orig_params": True,
}


def problems(body: dict[str, Any], kind: str | None = "llama", folder: Path = Path("/nonexistent")) -> dict[str, str]:
    return {".".join(path[1:]): f"{message} -> {fix}" for path, message, fix in find_problems(body, folder, kind)}


def fsdp(base: dict[str, Any] = FSDP2, **changes: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "fsdp_config": base | changes}


@pytest.mark.parametrize("base", [FSDP1, FSDP2])
def test_both_versions_are_accepted(base: dict[str, Any]) -> None:
    assert problems(fsdp(base)) == {}


@pytest.mark.parametrize("key", ["version", "offload_params", "cpu_ram_efficient_loading"])
def test_keys_have_their_prefix(key: str) -> None:
    """accelerate launch adds it; what plans, loads and checks the sharding reads the whole name."""
    found = problems(fsdp({"fsdp_version": 2}, **{key: 2}) if key == "version" else fsdp(**{key: True}))
    assert f"write fsdp_{key}" in found[f"fsdp_config.{key}"]
    assert "write fsdp_version" in problems(fsdp({"version": 2}))["fsdp_config.version"]


@pytest.mark.parametrize("file", ["accelerate.yaml", "accelerate-fsdp1.yaml"])
@pytest.mark.parametrize("recipe", ["tiny-oasst2", "llama405b-oasst2"])
def test_accelerate_loads_the_shipped_files(repo: Path, recipe: str, file: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = repo / "recipes" / recipe / file
    loaded = load_config_from_file(str(path))
    assert loaded.distributed_type.value == "FSDP"
    assert loaded.fsdp_config == yaml.safe_load(path.read_text())["fsdp_config"]
    assert loaded.num_processes == -1  # left to the launcher


@pytest.mark.parametrize("file", ["accelerate.yaml", "accelerate-fsdp1.yaml"])
def test_the_reference_plugin_is_what_the_source_says(repo: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    config = yaml.safe_load((repo / "recipes/llama405b-oasst2" / file).read_text())["fsdp_config"]
    for key, value in config.items():
        name = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}.get(key, key.upper())
        text = str(value).lower() if isinstance(value, bool) else str(value)
        # torch 2.13 broadcasts states over a GPU only; there is none where tests run.
        monkeypatch.setenv(name, "false" if key == "fsdp_sync_module_states" else text)
    if file == "accelerate-fsdp1.yaml":
        monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.activation_checkpointing and plugin.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    if file == "accelerate.yaml":
        assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    else:
        assert plugin.fsdp_version == 1 and plugin.sharding_strategy.name == "FULL_SHARD"
        assert plugin.backward_prefetch.name == "BACKWARD_PRE" and plugin.use_orig_params is True


@pytest.mark.parametrize(
    ("body", "key", "says"),
    [
        (fsdp(fsdp_sharding_strategy="FULL_SHARD"), "fsdp_config.fsdp_sharding_strategy", "fsdp_reshard_after_forward: true"),
        (fsdp(fsdp_use_orig_params=True), "fsdp_config.fsdp_use_orig_params", "leave it out"),
        (fsdp(fsdp_backward_prefetch="BACKWARD_PRE"), "fsdp_config.fsdp_backward_prefetch", "by itself"),
        (fsdp(fsdp_sync_module_states=True), "fsdp_config.fsdp_sync_module_states", "cpu_ram_efficient_loading"),
        (fsdp(fsdp_forward_prefetch=True), "fsdp_config.fsdp_forward_prefetch", "refuses it"),
        (fsdp(fsdp_version=3), "fsdp_config.fsdp_version", "not 1 or 2"),
        (fsdp({}), "fsdp_config.fsdp_version", "missing"),
        (fsdp(fsdp_reshard="x"), "fsdp_config.fsdp_reshard", "fsdp_reshard_after_forward"),
        (fsdp(fsdp_reshard_after_forward="FULL_SHARD"), "fsdp_config.fsdp_reshard_after_forward", "true or false"),
        (fsdp(fsdp_auto_wrap_policy="TRANSFORMER"), "fsdp_config.fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        (fsdp(fsdp_auto_wrap_policy="NO_WRAP"), "fsdp_config.fsdp_transformer_layer_cls_to_wrap", "TRANSFORMER_BASED_WRAP"),
        (
            fsdp(fsdp_transformer_layer_cls_to_wrap="LlamaDecodeLayer"),
            "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
            "did you mean LlamaDecoderLayer",
        ),
        (
            fsdp(fsdp_transformer_layer_cls_to_wrap="Qwen2DecoderLayer"),
            "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
            "did you mean LlamaDecoderLayer",
        ),
        (fsdp(fsdp_transformer_layer_cls_to_wrap=["A"]), "fsdp_config.fsdp_transformer_layer_cls_to_wrap", "name of a class"),
        (fsdp(fsdp_state_dict_type="FULL_STATE_DICT"), "fsdp_config.fsdp_state_dict_type", "SHARDED_STATE_DICT"),
        (fsdp(fsdp_state_dict_type="SHARDED"), "fsdp_config.fsdp_state_dict_type", "SHARDED_STATE_DICT"),
        (fsdp(fsdp_offload_params="maybe"), "fsdp_config.fsdp_offload_params", "true or false"),
        (fsdp(fsdp_min_num_params=-1), "fsdp_config.fsdp_min_num_params", "whole number"),
        (
            fsdp(fsdp_activation_checkpointing=False, fsdp_activation_checkpointing_offload=True),
            "fsdp_config.fsdp_activation_checkpointing_offload",
            "needs",
        ),
        (
            fsdp(FSDP1, fsdp_cpu_ram_efficient_loading=True, fsdp_sync_module_states=False),
            "fsdp_config.fsdp_sync_module_states",
            "set both",
        ),
        (fsdp(FSDP1, fsdp_reshard_after_forward=True), "fsdp_config.fsdp_reshard_after_forward", "fsdp_sharding_strategy"),
        (fsdp() | {"num_processes": 8}, "num_processes", "derived"),
        (fsdp() | {"machine_rank": 0}, "machine_rank", "derived"),
        (fsdp() | {"main_process_port": 29500}, "main_process_port", "derived"),
        (fsdp() | {"use_cpu": True}, "use_cpu", "derived"),
        (fsdp() | {"mixed_precison": "bf16"}, "mixed_precison", "did you mean mixed_precision"),
        (fsdp() | {"mixed_precision": "bf17"}, "mixed_precision", "bf16"),
        (fsdp() | {"mixed_precision": "fp8"}, "mixed_precision", "has no effect"),
        (fsdp() | {"mixed_precision": "fp16"}, "mixed_precision", "train.fp16 is not carried"),
        (fsdp() | {"fp8_config": {"fp8_backend": "TE"}}, "fp8_config", "has no effect"),
        (fsdp() | {"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment", "LOCAL_MACHINE"),
        (fsdp() | {"fsdp_config": [1]}, "fsdp_config", "keys and values"),
        ({"fsdp_config": FSDP2}, "distributed_type", "missing"),
        ({"distributed_type": "FSDP2"}, "distributed_type", "did you mean FSDP"),
        ({"distributed_type": "TPU"}, "distributed_type", "MULTI_GPU"),
        ({"distributed_type": "MULTI_GPU", "fsdp_config": FSDP2}, "fsdp_config", "only with distributed_type: FSDP"),
        ({"distributed_type": "DEEPSPEED"}, "deepspeed_config", "missing"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
            "deepspeed_config.deepspeed_config_file",
            "not a file",
        ),
        (fsdp() | {"parallelism_config": {"tp_size": 2}}, "parallelism_config.tp_size", "parallelism_config_tp_size"),
        (
            fsdp() | {"parallelism_config": {"parallelism_config_tp_size": 0}},
            "parallelism_config.parallelism_config_tp_size",
            "1",
        ),
        (fsdp(FSDP1) | {"parallelism_config": {"parallelism_config_tp_size": 2}}, "parallelism_config", "fsdp_version: 2"),
        (fsdp() | {"dynamo_config": {"dynamo_bakend": "INDUCTOR"}}, "dynamo_config.dynamo_bakend", "dynamo_backend"),
    ],
)
def test_what_accelerate_would_misread(body: dict[str, Any], key: str, says: str) -> None:
    found = problems(body)
    assert key in found, found
    assert says in found[key]


def test_deepspeed_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    body = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}}
    assert problems(body, folder=tmp_path) == {}


def test_without_a_known_model_the_wrap_class_is_left_alone() -> None:
    assert problems(fsdp(fsdp_transformer_layer_cls_to_wrap="Nothing"), kind=None) == {}
