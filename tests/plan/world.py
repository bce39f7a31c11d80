"""A model, machines, strategies and recipes so small that every number of a plan can be computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustertune.plan.constants import Constants
from clustertune.plan.machine import Link, PlanMachine
from clustertune.plan.strategy import ModelShape, Strategy
from clustertune.recipe.parameters import Attention, LayerKind, Linear, ParameterCount
from clustertune.recipe.quantization import Quantized
from clustertune.resolve.resolved import Recompute

HIDDEN, INNER, LAYERS, VOCABULARY = 64, 128, 4, 1000
NARROW = 32
"""Width of keys and values: 2 heads of 16."""
MATMUL = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * NARROW + 3 * HIDDEN * INNER
"""Weights of one layer's matrices: 36,864."""
NORMS = 2 * HIDDEN
LAYER = MATMUL + NORMS
ENDS = VOCABULARY * HIDDEN
"""The embedding; the head has as many."""
TOTAL = LAYERS * LAYER + 2 * ENDS + HIDDEN


def linears() -> tuple[Linear, ...]:
    """The matrices of one dense layer."""
    return (
        Linear("self_attn.q_proj", HIDDEN, HIDDEN),
        Linear("self_attn.k_proj", HIDDEN, NARROW),
        Linear("self_attn.v_proj", HIDDEN, NARROW),
        Linear("self_attn.o_proj", HIDDEN, HIDDEN),
        Linear("mlp.gate_proj", HIDDEN, INNER),
        Linear("mlp.up_proj", HIDDEN, INNER),
        Linear("mlp.down_proj", INNER, HIDDEN),
    )


def counted(window: int | None = None) -> ParameterCount:
    """Four equal layers, untied."""
    kind = LayerKind(LAYERS, linears(), NORMS, Attention(4, 2, 16, 16, window), INNER)
    return ParameterCount((kind,), HIDDEN, VOCABULARY, ENDS, ENDS, HIDDEN, tied=False)


def mixture(experts: int = 8, active: int = 2) -> ParameterCount:
    """The same with a mixture of experts in each layer."""
    narrow = [replace(one, name=one.name.replace("mlp", "mlp.experts"), copies=experts, active=active) for one in linears()[4:]]
    layer = (*linears()[:4], Linear("mlp.gate", HIDDEN, experts), *narrow)
    kind = LayerKind(LAYERS, layer, NORMS, Attention(4, 2, 16, 16), active * INNER)
    return ParameterCount((kind,), HIDDEN, VOCABULARY, ENDS, ENDS, HIDDEN, tied=False)


RECOMPUTE = {"checkpointed": "share", "checkpoint_offload": "offload", "save": "save"}


def strategy(**changes: Any) -> Strategy:
    """Full fine-tuning with FSDP2 over 16 GPUs on two nodes, but for what is given."""
    again = Recompute(**{field: changes.pop(key) for key, field in RECOMPUTE.items() if key in changes})
    values: dict[str, Any] = {
        "kind": "FSDP2", "world_size": 16, "ranks_per_node": 8, "data_parallel_size": 16, "weight_shards": 16,
        "gradient_shards": 16, "state_shards": 16, "reshard": True, "micro_batch": 2, "accumulation": 1, "sequence": 512,
        "packing": True, "recompute": again, "compiled": True, "attention": "sdpa", "lora": False, "weight_bytes": 4.0,
        "gather_bytes": 2.0, "gradient_bytes": 4.0, "reduce_bytes": 2.0, "state_bytes": 8.0, "fused_loss": True,
    }  # fmt: skip
    return Strategy(**(values | changes))


WHOLE = {"weight_shards": 1, "gradient_shards": 1, "state_shards": 1}
"""Nothing is split."""
LORA = {"lora": True, "weight_bytes": 2.0}
NF4 = Quantized("bitsandbytes", 0.5, 0.0, "0.5")
ADAPTERS, RANK = 4096, 8


def shape(of: ParameterCount | None = None, targets: tuple[str, ...] = ("q_proj", "v_proj"), **changes: Any) -> ModelShape:
    """The tiny model over :func:`strategy`."""
    used = strategy(**changes)
    model = of or counted()
    adapters = ADAPTERS if used.lora else 0
    return ModelShape(model, used, adapters or model.total, adapters, RANK, targets if used.lora else ())


INTRA, INTER = 100e9, 10e9
PEAK, HBM = 1e15, 1e12


def machine(**changes: Any) -> PlanMachine:
    """Two nodes of 8 GPUs with round figures and no latency."""
    values: dict[str, Any] = {
        "name": "m", "gpu": "h100-sxm", "nodes": 2, "gpus_per_node": 8, "peak_flops": PEAK, "peak_flops_fp8": 2 * PEAK,
        "hbm_bytes_per_s": HBM, "usable_bytes": 80 * 2**30, "memory_gb": 80.0, "domain": 8,
        "intra": Link(INTRA, INTRA, "nominal", "links", 0.0), "inter": Link(INTER, 2 * INTER, "nominal", "network", 0.0),
        "host_bytes": 2000 * 2.0**30, "host_link_bytes_per_s": 50e9, "storage_read_bytes_per_s": 2e9,
        "storage_write_bytes_per_s": 1e9, "storage_note": "storage", "mtbf_hours": None, "generation": "hopper",
    }  # fmt: skip
    return PlanMachine(**(values | changes))


def constants(**changes: Any) -> Constants:
    """Constants under which matrix products run at half of the peak and memory at all of its bandwidth."""
    plain = Constants(gemm_share={"hopper": 0.5}, attention_share=0.5, hbm_share=1.0, overlap_loss=0.0)
    return replace(plain, **changes)


LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
LORA_SECTION = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
FSDP2: dict[str, Any] = {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
}  # fmt: skip


ZERO3 = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}


def fsdp2(base: dict[str, Any] = FSDP2, **keys: Any) -> dict[str, Any]:
    """:data:`FSDP2` with other keys, named without their prefix."""
    return {**base, "fsdp_config": base["fsdp_config"] | {f"fsdp_{key}": value for key, value in keys.items()}}


def write_recipe(
    folder: Path, *, model: dict[str, Any] | None = None, train: dict[str, Any] | None = None, lora: Any = None, nodes: int = 1,
    accelerate: dict[str, Any] | None = None, gpus: int = 8, **sections: Any,
) -> Path:  # fmt: skip
    """A recipe folder: 8 billion parameters, all of them trained in bfloat16 over one node, but for what is given."""
    folder.mkdir(parents=True)
    body = {
        "model": {"name": "some-model", "weights": "random"},
        "data": {"name": "some-data", "input": "rows.jsonl", "format": "messages", "expect": {"train": 10_000, "eval": 100}},
        "train": {
            "global_batch_size": 64, "per_device_train_batch_size": 1, "max_length": 2048, "packing": True,
            "num_train_epochs": 1,
            "model_init_kwargs": {"dtype": "bfloat16"}, "optim": "adamw_torch_fused",
        } | (train or {}),
        "slurm": {"nodes": nodes, "gpus_per_node": gpus},
    }  # fmt: skip
    body |= {"lora": lora} if lora else {}
    files = {"recipe.yaml": body | sections, "model.json": model or LLAMA_8B, "accelerate.yaml": accelerate or FSDP2}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))  # JSON is YAML
    return folder


def write_cluster(path: Path, *, nodes: int = 2, network: dict[str, Any] | None = None, **compute: Any) -> Path:
    """A cluster file: nodes of 8 H100 with eight ports of InfiniBand, but for what is given."""
    facts = {"gpus": 8, "gpu": "h100-sxm", "interconnect": "nvlink4", "cores": 96, "threads": 192, "memory_gb": 2000}
    net = {"interface": "ib0", "kind": "infiniband", "gbit": 400, "ports": 8, "subnet": "10.0.0.0/24"} | (network or {})
    body = {
        "name": path.stem,
        "nodes": [{"name": f"{path.stem}-{n}", "address": f"10.0.0.{n}", "roles": ["compute"]} for n in range(1, nodes + 1)],
        "compute": facts | compute,
        "network": {key: value for key, value in net.items() if value is not None},
    }
    path.write_text(json.dumps(body))
    return path
