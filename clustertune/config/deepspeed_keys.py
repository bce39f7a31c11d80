"""What may stand in a DeepSpeed configuration: read from the installed DeepSpeed, else as it was recorded from 0.19.8.

DeepSpeed takes an unknown key of the top level in silence (runtime/config.py asks for the ones that it knows), refuses one of
``zero_optimization``, ``bf16`` and ``fp16`` only when the model is being wrapped, and reads ``auto`` where nobody fills it in
as if the key were not there (runtime/config_utils.py, DeepSpeedConfigModel.__init__).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from typing import Any

from clustertune.config.remembered import remembered
from clustertune.config.source import annotated, classes, has_file, parse_module
from clustertune.errors import UserError

ZERO = "zero_optimization"
OFFLOADS = ("offload_param", "offload_optimizer")
VERSION = "0.19.8"
"""The release that the lists below were read from (deepspeed/runtime)."""

RECORDED_TOP = (
    "activation_checkpointing", "aio", "autotuning", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "csv_monitor", "data_efficiency", "data_types", "dataloader_drop_last",
    "disable_allgather", "disable_python_gc", "dump_state", "expert_parallel", "flops_profiler", "fp16",
    "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping", "gradient_predivide_factor",
    "hybrid_engine", "log_level", "managed_gradient_accumulation", "memory_breakdown", "optimizer", "pipeline",
    "prescale_gradients", "scheduler", "seq_parallel_communication_data_type", "sequence_parallel_size", "steps_per_print",
    "tensor_parallel", "tensorboard", "timers", "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu",
    "use_data_before_expert_parallelism", "vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
)  # fmt: skip
"""Keys of the top level."""

_ZERO = {
    "bool": (
        "contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce", "allgather_partitions", "overlap_comm",
        "compute_grad_norm", "load_from_fp32_weights", "elastic_checkpoint", "cpu_offload_param",
        "cpu_offload_use_pin_memory", "cpu_offload", "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save", "stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential", "allgather_sequential", "stage3_gather_fp16_weights_on_model_save",
        "ignore_unused_parameters", "legacy_stage1", "round_robin_gradients", "parameter_alignment",
        "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
        "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings",
        "enable_sanity_checks", "save_muon_momentum_buffer_in_memory",
    ),
    "int": (
        "reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size",
        "prefetch_bucket_size", "stage3_param_persistence_threshold", "param_persistence_threshold",
        "stage3_model_persistence_threshold", "model_persistence_threshold", "stage3_max_live_parameters",
        "max_live_parameters", "stage3_max_reuse_distance", "max_reuse_distance", "stage3_module_granularity_threshold",
        "module_granularity_threshold", "zero_hpz_partition_size",
    ),
    "other": ("stage", "offload_param", "offload_optimizer", "zenflow", "leaf_module"),
}  # fmt: skip
_OFFLOAD_PARAM = {
    "int": ("buffer_count", "buffer_size", "max_in_cpu"),
    "bool": ("pin_memory",),
    "other": ("device", "nvme_path"),
}
_OFFLOAD_OPTIMIZER = {
    "bool": ("pin_memory", "pipeline_read", "pipeline_write", "fast_init", "super_offload"),
    "int": ("buffer_count",),
    "float": ("ratio", "cpuadam_cores_perc"),
    "other": ("device", "nvme_path"),
}
_BF16 = {
    "bool": (
        "enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states",
    ),
}  # fmt: skip
_FP16 = {
    "bool": ("enabled", "auto_cast", "consecutive_hysteresis", "fp16_master_weights_and_grads"),
    "int": ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
    "float": ("loss_scale",),
}


def _by_name(kinds: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return {name: kind for kind, names in kinds.items() for name in names}


RECORDED_SECTIONS: dict[str, dict[str, str]] = {
    "zero_optimization": _by_name(_ZERO),
    "zero_optimization.offload_param": _by_name(_OFFLOAD_PARAM),
    "zero_optimization.offload_optimizer": _by_name(_OFFLOAD_OPTIMIZER),
    "bf16": _by_name(_BF16),
    "fp16": _by_name(_FP16),
}
"""Keys of the sections that DeepSpeed itself checks, each with what its value is: bool, int, float, or other."""

_CLASSES = {
    "zero_optimization": ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig"),
    "bf16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    "fp16": ("runtime/precision_config.py", "DeepSpeedFP16Config"),
}

REMOVED = {
    "nebula": "checkpoints are written through the run's own store",
    "compression_training": "DeepSpeed has none any more: the model would train uncompressed",
    "amp": "write bf16",
    "quantize_training": "DeepSpeed has none any more",
    "sparse_gradients": "DeepSpeed has none any more",
    "eigenvalue": "DeepSpeed has none any more",
    "sparse_attention": "write train.model_init_kwargs.attn_implementation",
    "elasticity": "the recipe's ranks are fixed for a run; leave it out",
    "graph_harvesting": "DeepSpeed has none any more",
    "curriculum_learning": "the order of the data is the recipe's",
    "progressive_layer_drop": "DeepSpeed has none any more",
    "zero_optimization.mics_shard_size": "MiCS is gone: FSDP2 with parallelism_config_dp_replicate_size shards inside a node",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS is gone",
    "zero_optimization.zeropp_loco_param": "leave it out: zero_quantized_gradients without error feedback",
}
"""Keys that DeepSpeed refuses since they were removed (runtime/config.py, _REMOVED_TOP_LEVEL_CONFIG_KEYS and
_REMOVED_ZERO_CONFIG_KEYS), with what takes their place."""

AUTO = frozenset(
    (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "bf16.enabled", "fp16.enabled", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps",
        "optimizer.params.weight_decay", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps", "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.offload_param.nvme_path", "zero_optimization.offload_optimizer.nvme_path",
    )
)  # fmt: skip
"""Keys whose ``auto`` somebody fills in: transformers (integrations/deepspeed.py, HfTrainerDeepSpeedConfig) and accelerate
(utils/dataclasses.py, DeepSpeedPlugin.__post_init__; accelerator.py, _prepare_deepspeed)."""


def get(body: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of a configuration; None where there is none."""
    found: Any = body
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def text(body: Mapping[str, Any], path: str) -> str | None:
    """The same as a word."""
    found = get(body, path)
    return None if found is None else str(found)


def secondary_partition(body: Mapping[str, Any]) -> bool:
    """Whether a second copy of the weights is split over the ranks of each node (ZeRO++'s hpZ)."""
    given = str(get(body, f"{ZERO}.zero_hpz_partition_size"))
    return given.isdecimal() and int(given) > 1


def quantizes_traffic(body: Mapping[str, Any]) -> bool:
    """Whether weights or gradients travel quantised (ZeRO++)."""
    return any(bool(get(body, f"{ZERO}.zero_quantized_{what}")) for what in ("weights", "gradients"))


def nvme_paths(body: Mapping[str, Any]) -> dict[str, str]:
    """What is swapped to a local disk, and where: a folder or ``auto``."""
    on_disk = [part for part in OFFLOADS if get(body, f"{ZERO}.{part}.device") == "nvme"]
    return {part: str(get(body, f"{ZERO}.{part}.nvme_path")) for part in on_disk}


def move_to_memory(body: dict[str, Any]) -> list[str]:
    """Have what is swapped to a disk offloaded to host memory in a configuration; returns what was moved."""
    moved = list(nvme_paths(body))
    for part in moved:
        section = get(body, f"{ZERO}.{part}")
        section.pop("nvme_path", None)
        section["device"] = "cpu"
    return moved


def keep_own_optimizer(body: dict[str, Any]) -> bool:
    """Have torch's optimizer offloaded instead of DeepSpeed's Adam; whether the configuration offloads one of its own."""
    own = get(body, f"{ZERO}.offload_optimizer.device") == "cpu" and "optimizer" not in body
    if own:
        body["zero_force_ds_cpu_optimizer"] = False
    return own


@cache
def top_keys() -> frozenset[str]:
    """The keys of the top level: the recorded ones, and what the installed DeepSpeed asks for besides."""
    return frozenset(RECORDED_TOP) | frozenset(_asked_for() if _installed() else ())


@cache
def section_keys(section: str) -> Mapping[str, str]:
    """The keys of a section that DeepSpeed checks, by what their values are; empty for a section that it does not check."""
    if section not in RECORDED_SECTIONS:
        return {}
    return _fields(*_CLASSES[section]) if _installed() else RECORDED_SECTIONS[section]


@cache
def _installed() -> bool:
    try:
        return all(has_file("deepspeed", file) for file, _ in _CLASSES.values())
    except UserError:
        return False


@remembered
def _asked_for() -> list[str]:
    """The keys for which runtime/config.py asks the dictionary of the whole file."""
    names = {
        target.id: item.value.value
        for file in ("runtime/constants.py", "runtime/config.py")
        for item in parse_module("deepspeed", file).body
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)
        for target in item.targets
        if isinstance(target, ast.Name)
    }
    found = set()
    for node in ast.walk(parse_module("deepspeed", "runtime/config.py")):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        whole = bool(node.args) and ast.unparse(node.args[0]) == "param_dict"
        key = node.args[0] if called == "param_dict.get" else node.args[1] if whole and len(node.args) > 1 else None
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            found.add(key.value)
        elif isinstance(key, ast.Name) and key.id in names:
            found.add(names[key.id])
    return sorted(found)


@remembered
def _fields(file: str, name: str) -> dict[str, str]:
    """The fields of one of DeepSpeed's models, by name and by alias, with what their values are."""
    found: dict[str, str] = {}
    for item in annotated(classes(parse_module("deepspeed", file))[name]):
        kind = ast.unparse(item.annotation).removeprefix("Optional[").removesuffix("]")
        kind = kind if kind in ("bool", "int", "float") else "other"
        found[ast.unparse(item.target)] = kind
        found |= dict.fromkeys(_aliases(item.value), kind)
    return found


def _aliases(value: Any) -> list[str]:
    keywords = value.keywords if isinstance(value, ast.Call) else []
    return [str(ast.literal_eval(word.value)) for word in keywords if word.arg == "alias"]
