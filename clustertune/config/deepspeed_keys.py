"""What may stand in a DeepSpeed configuration: the keys of the pinned DeepSpeed, those that it has removed, and its ``auto``.

DeepSpeed takes an unknown key of the top level without a message (runtime/config.py asks for the ones that it knows).
It refuses one of ``zero_optimization``, ``bf16`` and ``fp16`` only when the model is being wrapped. It reads ``auto`` where
nobody fills it in as if the key were not there (runtime/config_utils.py, DeepSpeedConfigModel.__init__).
"""

from __future__ import annotations

from collections.abc import Mapping

from clustertune.config.library_facts import facts

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


def top_keys() -> frozenset[str]:
    """The keys of the top level."""
    return frozenset(facts("deepspeed")["keys"])


def sections() -> Mapping[str, Mapping[str, str]]:
    """The sections that DeepSpeed itself checks: each key with what its value is: bool, int, float, or other."""
    return facts("deepspeed")["sections"]  # type: ignore[no-any-return]
