"""The plan's operations beside those that torch counts: layers of transformers, with and without PEFT, under recomputation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from clustertune.plan.step import flops
from clustertune.plan.strategy import ModelShape
from clustertune.recipe.native_rules import filled, lora_defaults
from clustertune.recipe.parameters import count, lora_parameter_count
from tests.plan.world import strategy

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "max_position_embeddings": 64, "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "llama": {"model_type": "llama", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES},
    "mixture": {"model_type": "qwen3_moe", **SIZES, "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32},
}
"""Of the mixture all experts are active: which rows an expert gets is not a matter of chance."""
TOKENS = 32
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def grouped(rows: torch.Size, weights: torch.Size, *args: Any, **kwargs: Any) -> int:
    """FLOPs of experts' products, which torch does not count: each row meets one expert."""
    return 2 * rows[0] * rows[1] * weights[-1]


def counted(architecture: dict[str, Any], lora: dict[str, Any] | None, again: bool) -> float:
    """FLOPs of a training step over matrix products, as torch counts them, on a CPU."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture), attn_implementation="sdpa")
    if lora is not None:
        model = get_peft_model(model, LoraConfig(**lora))
        model.enable_input_require_grads()
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    rows = torch.randint(0, 128, (1, TOKENS))
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped}) as counter:
        model(input_ids=rows, labels=rows).loss.backward()
    return float(sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op)))


def planned(architecture: dict[str, Any], lora: dict[str, Any] | None, again: bool) -> float:
    """The plan's count of the same, hardware's: the difference of a long row's attention is left out by a window of nothing."""
    made = count(architecture)
    assert made is not None
    layers = tuple(replace(kind, attention=replace(kind.attention, qk_dim=0, v_dim=0)) for kind in made.layers)
    adapters = lora_parameter_count(architecture, filled(lora_defaults(), lora)) or 0 if lora else 0
    used = strategy(
        world_size=1, data_parallel_size=1, weight_shards=1, micro_batch=1, sequence=TOKENS, checkpointed=float(again),
        compiled=False, lora=lora is not None,
    )  # fmt: skip
    targets = tuple(lora["target_modules"]) if lora else ()
    shape = ModelShape(replace(made, layers=layers), used, adapters or made.total, adapters, lora["r"] if lora else 1, targets)
    return flops(shape, hardware=True)


LORAS: dict[str, dict[str, Any] | None] = {
    "all parameters": None,
    "LoRA on attention": {"r": 4, "target_modules": ATTENTION},
    "LoRA on everything": {"r": 4, "target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
}


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("model", "lora"), [*((name, lora) for name in ("llama", "qwen3") for lora in LORAS), ("mixture", "all parameters")]
)
def test_the_plan_counts_what_torch_computes(model: str, lora: str, again: bool) -> None:
    """Recomputation stops before what backward needs no result of: down's product, but not where LoRA adapts it or experts'
    results are weighed. The first layer's input has no gradient without LoRA, which is less than these bounds."""
    architecture, section = MODELS[model], LORAS[lora]
    real, plan = counted(architecture, section, again), planned(architecture, section, again)
    assert plan == pytest.approx(real, rel=0.01)
