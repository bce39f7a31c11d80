"""Which of transformers' optimizers step, and can be saved, on parameters that FSDP2 has sharded: two gloo ranks try each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clustertune.recipe.checks import sharded_optimizer
from clustertune.recipe.library_facts import facts
from tests.tree import REPO

NAMES = (
    "adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adafactor", "adagrad", "adamw_bnb_8bit", "ademamix", "lion_32bit",
    "paged_adamw_8bit", "rmsprop_bnb_8bit",
)  # fmt: skip
"""One of each function in transformers/trainer_optimizer.py whose package is pinned, and each kind of bitsandbytes'."""


def try_each(rank: int, port: int, out: Path) -> None:
    """Two steps and what a checkpoint takes of each; rank 0 writes which did both."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_PORT=str(port))
    os.environ.update(MASTER_ADDR="127.0.0.1", ACCELERATE_USE_FSDP="true")
    from clustertune.training import build

    build.use_cpu()
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments
    from transformers.trainer import Trainer

    from clustertune.checkpoint.saving import sharded_states
    from tests.export.conftest import ARCHITECTURE

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    # Made first: each resets accelerate's state.
    options = {"output_dir": str(out.parent), "use_cpu": True, "report_to": "none", "bf16": False}
    arguments = {name: TrainingArguments(optim=name, **options) for name in NAMES}
    build.install_cpu_fsdp()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    import torch

    ids, worked = torch.arange(24).reshape(2, 12), []
    for name in NAMES:
        bare: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ARCHITECTURE))
        kind, words = Trainer.get_optimizer_cls_and_kwargs(arguments[name], bare)
        try:
            model, optimizer = accelerator.prepare(bare, kind(bare.parameters(), **words))
            for _ in range(2):
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                optimizer.step()
                optimizer.zero_grad()
            sharded_states(model, optimizer)
        except (RuntimeError, KeyError):
            continue
        worked.append(name)
    if rank == 0:
        out.write_text(json.dumps(worked))


@pytest.mark.jobs
def test_what_is_refused_under_fsdp2_is_what_fails_there(tmp_path: Path) -> None:
    from clustertune.launch.node import free_port

    out = tmp_path / "worked.json"
    command = [sys.executable, "-m", "tests.training.test_optimizers", str(free_port(20000)), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, cwd=REPO)
    assert done.returncode == 0, done.stderr
    worked = json.loads(out.read_text())
    assert worked == [name for name in NAMES if sharded_optimizer(name) is None]
    assert {"adamw_torch", "adamw_torch_fused", "sgd", "rmsprop"} == set(worked)
    named = facts("trl")["optimizer_modules"]
    assert not [name for name in facts("trl")["optimizers"] if name not in NAMES and name not in named], "one was never tried"


if __name__ == "__main__":
    import torch.multiprocessing

    torch.multiprocessing.spawn(try_each, (int(sys.argv[1]), Path(sys.argv[2])), nprocs=2)
