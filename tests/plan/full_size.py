"""A training step of layers of the real size on fake tensors: one of 64 FSDP2 ranks, without a GPU and without their memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from clustertune.training import sharding
from tests.plan.tracked import Tracker


class Kernel(torch.autograd.Function):
    """What a GPU's attention kernel keeps: its inputs, its output and a logarithm of each head's sum."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        query, _, value = inputs[:3]
        output = torch.empty(*query.transpose(1, 2).shape[:3], value.shape[-1], dtype=query.dtype)
        ctx.save_for_backward(*inputs, output, torch.empty(query.shape[:3]))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*map(torch.empty_like, ctx.saved_tensors[:3]), None)


def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """transformers' sdpa under a mask: keys and values of a group are repeated, the mask gets the queries' type."""
    repeated = (each.repeat_interleave(module.num_key_value_groups, dim=1) for each in (key, value))
    return Kernel.apply(query, *repeated, torch.empty_like(mask, dtype=query.dtype)), None


def build(case: dict[str, Any], mesh: Any) -> Any:
    """The model as its program shards it: a loop of its own like IDRIS's, or accelerate 1.15 (fsdp2_prepare_model)."""
    config = AutoConfig.for_model(**case["architecture"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="fake", dtype=torch.float32)
    model.config.use_cache = False
    half = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    body = model.model
    for number, layer in enumerate(body.layers):
        if number < case["recomputed"]:
            body.layers[number] = checkpoint_wrapper(layer)
        fully_shard(body.layers[number], **half)
    if not case["loop"]:
        fully_shard(body.embed_tokens, **half)
        fully_shard([body.norm, model.lm_head], **half, reshard_after_forward=False)
    fully_shard(model, **half)
    return model


def step(model: Any, optimizer: Any, case: dict[str, Any], tracker: Tracker) -> None:
    """Forward, loss, backward and update. The loop's logits live until the function ends, transformers' loss drops its own."""
    rows = torch.zeros(case["micro_batch"], case["sequence"], dtype=torch.long)
    mask = torch.ones(*rows.shape[:1], 1, case["sequence"], case["sequence"], dtype=torch.bool)
    tracker.enter_phase("layers")
    if case["loop"]:
        logits = model(rows, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows.flatten())
    else:
        loss = model(rows, attention_mask=mask, labels=rows).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    tracker.enter_phase("optimizer")
    optimizer.step()
    optimizer.zero_grad()


def measure(case: dict[str, Any], mesh: Any) -> dict[str, int]:
    """The phases' peaks in the second step, when the optimizer has its state."""
    tracker = Tracker()
    # The loop is not the product's: torch as it is.
    FSDPParamGroup.wait_for_unshard = getattr(FSDPParamGroup.wait_for_unshard, "original", FSDPParamGroup.wait_for_unshard)
    if not case["loop"]:
        sharding.free_gathered_units()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(case, mesh)
        model.model.layers[-1].register_forward_hook(lambda *_: tracker.enter_phase("loss and backward"))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        step(model, optimizer, case, tracker)
        tracker.peaks.clear()
        tracker.start()
        step(model, optimizer, case, tracker)
        tracker.__exit__(None, None, None)
    return tracker.peaks


def run(file: Path) -> None:
    """All cases of a JSON file; leaves the largest sum of storages of each phase, in bytes, in ``peaks.json`` beside it."""
    ALL_ATTENTION_FUNCTIONS.register("fake", attend)
    ranks = 64
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    found = [measure(case, mesh) for case in json.loads(file.read_text())]
    file.with_name("peaks.json").write_text(json.dumps(found))
