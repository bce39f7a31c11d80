"""A model split over ranks: what transformers' plans name and cannot split, and who has which piece of a sequence under cp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from clustertune.training import parallelism
from tests.conftest import TINY_LLAMA
from tests.damage import fork, wait


def in_a_group(folder: Path, work: Callable[[Any], None], ranks: int = 2) -> None:
    """Call ``work`` with the mesh of a group, in as many forked processes; an error in any of them fails the test."""

    def act(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
        work(init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))

    assert wait([fork(partial(act, rank)) for rank in range(ranks)]) == [0] * ranks


def model(**changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY_LLAMA, **changes}))


PAD = 5
ARCHITECTURES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "llama": ({}, {"colwise": 10, "rowwise": 4}),
    "tied": ({"tie_word_embeddings": True}, {"embedding_rowwise": 1}),
    "biases": ({"model_type": "qwen2"}, {"colwise": 10}),
    "head norms": ({"model_type": "qwen3", "head_dim": 8}, {"replicated_with_grad_allreduce": 4}),
    "experts": ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, {"ep_dispatch_experts": 2}),
    "many experts": (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8},
        {"ep_dispatch_experts": 2},
    ),
    "a scaled embedding": ({"model_type": "gemma3_text", "head_dim": 8, "tie_word_embeddings": True}, {"embedding_rowwise": 1}),
    "a padding row": ({"pad_token_id": PAD}, {"embedding_rowwise": 1}),
    "norms between": ({"model_type": "phi", "qk_layernorm": True}, {"replicated_with_grad_allreduce": 4}),
    "parameters between": ({"model_type": "apertus"}, {"replicated_with_grad_allreduce": 2}),
}
"""Changes to the tiny Llama of two layers -> what is split, at least."""


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_split_model_computes_the_same(tmp_path: Path, name: str, adapter: bool) -> None:
    """Loss and every gradient over two ranks are those of the whole model; every parameter is a DTensor, tied ones stay one."""
    changes, least = ARCHITECTURES[name]
    whole, split = model(**changes), model(**changes)
    if adapter:
        config = {"target_modules": ["q_proj", "o_proj"], "init_lora_weights": False}
        whole, split = get_peft_model(whole, LoraConfig(**config)), get_peft_model(split, LoraConfig(**config))
    split.load_state_dict(whole.state_dict())
    tokens = torch.randint(0, TINY_LLAMA["vocab_size"], (2, 12))
    tokens[:, 3] = PAD

    def work(mesh: Any) -> None:
        counts = parallelism.split(split, mesh)
        assert all(counts.get(style, 0) >= count for style, count in least.items()), counts
        assert all(isinstance(parameter, DTensor) for parameter in split.parameters())
        held = sum(parameter.to_local().numel() for parameter in split.parameters())
        assert held < 0.6 * sum(parameter.numel() for parameter in whole.parameters())
        assert len(list(split.parameters())) == len(list(whole.parameters()))
        losses = [made(input_ids=tokens, labels=tokens).loss for made in (whole, split)]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
        for loss in losses:
            loss.backward()
        gradients = {key: parameter.grad for key, parameter in whole.named_parameters() if parameter.grad is not None}
        for key, parameter in split.named_parameters():
            assert (parameter.grad is None) == (key not in gradients), key
            if key in gradients:
                grad = parameter.grad.full_tensor()
                torch.testing.assert_close(
                    grad, gradients[key], rtol=1e-3, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
                )

    in_a_group(tmp_path, work)
