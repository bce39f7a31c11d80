"""LitGPT as a peer of ``clustertune bench --against tools/litgpt_peer.py``: another implementation of the model and of LoRA.

It trains the same shape, with random weights of its own (speed and memory count, the loss does not), on the same conversations,
packed to ``max_length``, with the recipe's batch, in bfloat16 where the recipe has it, recomputing each block where the recipe
recomputes. Conversations in a row see each other: LitGPT's packing knows no borders. ``pip install litgpt``; one GPU, or
several with a whole model each. SETTINGS.json and FOLDER are those of docs/bench.md.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from litgpt.lora import GPT, Config, mark_only_lora_as_trainable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer

from clustertune.training.bench_schedule import BenchSchedule, result_file
from clustertune.training.measure import Stopwatch

TARGETS = {
    "q_proj": "lora_query", "k_proj": "lora_key", "v_proj": "lora_value", "o_proj": "lora_projection", "up_proj": "lora_mlp",
    "gate_proj": "lora_mlp", "down_proj": "lora_mlp",
}  # fmt: skip
"""PEFT's names of Llama's matrices, and what LitGPT calls the switch of each."""


def config_of(given: dict[str, Any]) -> Config:
    """LitGPT's configuration from a Llama's ``config.json`` and PEFT's keys. Raises SystemExit for another model."""
    body = json.loads(Path(given["model"], "config.json").read_text())
    if body["model_type"] not in ("llama", "mistral"):
        sys.exit(f"ValueError: model_type {body['model_type']}: this peer knows Llama and Mistral")
    if ((given["sft"] or {}).get("model_init_kwargs") or {}).get("quantization_config"):
        sys.exit("ValueError: this peer trains no quantised weights")
    lora = given["lora"] or {}
    targets = lora.get("target_modules") or []
    names = list(TARGETS) if targets == "all-linear" else targets
    heads = body["num_attention_heads"]
    return Config(
        name=body["model_type"], block_size=given["max_length"], n_layer=body["num_hidden_layers"], n_embd=body["hidden_size"],
        n_head=heads, n_query_groups=body.get("num_key_value_heads") or heads, head_size=body.get("head_dim"),
        vocab_size=body["vocab_size"], padded_vocab_size=body["vocab_size"], rotary_percentage=1.0, parallel_residual=False,
        bias=False, norm_class_name="RMSNorm", norm_eps=body["rms_norm_eps"], mlp_class_name="LLaMAMLP",
        intermediate_size=body["intermediate_size"], lora_r=lora.get("r", 0), lora_alpha=lora.get("lora_alpha", 1),
        lora_dropout=lora.get("lora_dropout", 0.0), **{TARGETS[name]: True for name in names},
    )  # fmt: skip


def rows_of(given: dict[str, Any], rank: int, world: int) -> Iterator[torch.Tensor]:
    """Packed rows of ``max_length`` tokens, ``[max_length]``, without end; this rank's share."""
    tokenizer, length, held = AutoTokenizer.from_pretrained(given["model"]), given["max_length"], list[int]()
    if given["chat_template"]:
        tokenizer.chat_template = given["chat_template"]
    number = 0
    while True:
        for line in Path(given["data"]).read_text().splitlines():
            text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
            held += tokenizer(text, add_special_tokens=False)["input_ids"]
            while len(held) >= length:
                row, held = held[:length], held[length:]
                number += 1
                if number % world == rank:
                    yield torch.tensor(row)


def main(settings: Path, out: Path) -> None:
    """Train as many steps as the settings say; each rank leaves its figures in ``out``."""
    given = json.loads(settings.read_text())
    schedule = BenchSchedule(**given["schedule"])
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(given["seed"])
    config = config_of(given)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if given["bf16"] else torch.float32)
    with device:
        model = GPT(config)
    torch.set_default_dtype(before)
    model.max_seq_length = given["max_length"]
    if given["lora"]:
        mark_only_lora_as_trainable(model)
    sft = given["sft"] or {}
    if os.environ.get("FSDP_ACTIVATION_CHECKPOINTING") == "true" or sft.get("gradient_checkpointing", True):
        for block in model.transformer.h:
            forward = block.forward
            block.forward = lambda *args, _f=forward, **kwargs: checkpoint(_f, *args, use_reentrant=False, **kwargs)
    trained: Any = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=cuda)
    rows = rows_of(given, rank, world)
    watch, control = Stopwatch(schedule, result_file(out, rank)), SimpleNamespace(should_save=False)
    watch.facts = {"distributed": "MULTI_GPU" if world > 1 else "NO"}
    for _ in range(schedule.total):
        watch.on_step_begin(None, None, control)
        for _ in range(given["gradient_accumulation_steps"]):
            ids = torch.stack([next(rows) for _ in range(given["per_device_train_batch_size"])]).to(device)
            watch.count({"input_ids": ids, "labels": ids})
            logits = trained(ids)[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            (loss / given["gradient_accumulation_steps"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        watch.on_step_end(None, None, control)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
