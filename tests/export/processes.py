"""Adapters of two gloo ranks: ``python -m tests.export.processes OUT``.

``OUT/<case>/pytorch_model_fsdp_0`` is what a training saves of the model, and ``OUT/<case>.pt`` holds what the ranks had
trained, gathered without any checkpoint code; ``ddp`` is the file of a run without sharding.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

from clustertune.checkpoint.saving import sharded_states
from clustertune.checkpoint.shards import Planner, ShardWriter
from clustertune.launch.node import free_port
from clustertune.training import build
from tests.export.conftest import ARCHITECTURE, LORA

CASES: dict[str, dict[str, Any]] = {"fsdp2": LORA, "fsdp2-head": LORA | {"modules_to_save": ["lm_head"]}}
_ADDED = re.compile(r"_checkpoint_wrapped_module\.|\.default|\.modules_to_save")


def build_model(lora: dict[str, Any]) -> torch.nn.Module:
    """The PEFT model with the same random weights wherever it is built."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ARCHITECTURE))
    return get_peft_model(base, LoraConfig(**lora))


def gather(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The whole adapter on every rank."""
    full = {name: value.full_tensor().detach() for name, value in model.named_parameters()}
    return {_ADDED.sub("", name): value for name, value in full.items() if "lora_" in name or "modules_to_save" in name}


def train_and_save(rank: int, port: int, lora: dict[str, Any], out: Path) -> None:
    """Two optimizer steps under FSDP with activation checkpointing, then what a checkpoint holds of them."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_PORT=str(port))
    os.environ.update(MASTER_ADDR="127.0.0.1", ACCELERATE_USE_FSDP="true")
    build.use_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        activation_checkpointing=True,
    )
    build.install_cpu_fsdp()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert accelerator.distributed_type == DistributedType.FSDP and accelerator.is_fsdp2
    model = build_model(lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(0, 96, (2, 12))
    for _ in range(2):
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    for name, state in sharded_states(model, optimizer).items():
        dcp.save(state, storage_writer=ShardWriter(out / name), planner=Planner())
    trained = gather(model)
    if accelerator.is_main_process:
        torch.save(trained, out.with_suffix(".pt"))
    accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()


def main(out: Path) -> None:
    """All cases."""
    torch.set_num_threads(1)
    for number, (name, lora) in enumerate(CASES.items()):
        (out / name).mkdir()
        arguments = (free_port(23_000 + number), lora, out / name)
        torch.multiprocessing.start_processes(train_and_save, arguments, nprocs=2, start_method="fork")
    model = build_model(LORA)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value)
    model.save_pretrained(out / "ddp")
    torch.save(get_peft_model_state_dict(model), out / "ddp.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
