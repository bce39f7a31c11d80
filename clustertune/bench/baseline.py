"""TRL's own trainer as a person writes it down, on the model and the conversations of a benchmark.

``accelerate launch --config_file FILE baseline.py SETTINGS.json FOLDER``. ``--against trl`` gives it every training argument of
the recipe: what is left is what this project puts around TRL. ``--against trl-defaults`` gives it the batch and the lengths
alone: padded sequences, float32 weights under bfloat16 autocast, gradient checkpointing, TRL's loss and optimizer.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clustertune.training.bench_schedule import THEIRS, BenchSchedule, result_file

NOTHING_ELSE = {"eval_strategy": "no", "eval_on_start": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
"""It trains, and no more: evaluation and checkpoints are timed apart."""


def arguments_of(given: Mapping[str, Any], *, cuda: bool) -> dict[str, Any]:
    """Keyword arguments of ``SFTConfig`` from a peer's settings, for this device."""
    if given["sft"] is not None:
        from trl import SFTConfig

        from clustertune.training import build

        fitted = build.fit_to_device(given["sft"], cuda=cuda).values
        return build.spelt({k: v for k, v in fitted.items() if k != "pad_token"}, SFTConfig.__dataclass_fields__) | NOTHING_ELSE
    shared = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "seed")
    requested: dict[str, Any] = {key: given[key] for key in shared} | NOTHING_ELSE
    if not cuda:
        requested |= {"use_cpu": True, "bf16": given["bf16"]}
    if os.environ.get("FSDP_ACTIVATION_CHECKPOINTING") == "true":  # the Trainer refuses both at once
        requested["gradient_checkpointing"] = False
    return requested


def prepare_device(given: Mapping[str, Any], *, cuda: bool) -> None:
    """With the recipe's arguments: let accelerate follow the recipe's file on CPUs too, as the ranks of this project do."""
    if given["sft"] is None or cuda or os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return
    from clustertune.training import cpu_fsdp

    cpu_fsdp.set_environment(fsdp1=os.environ.get("FSDP_VERSION", "1") == "1")
    cpu_fsdp.install()


def main(settings: Path, out: Path) -> None:
    """Train as many steps as the settings say; each rank leaves its figures in ``out``."""
    import torch

    given = json.loads(settings.read_text())
    schedule = BenchSchedule(**given["schedule"])
    cuda = torch.cuda.is_available()
    prepare_device(given, cuda=cuda)

    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from clustertune.data.tokenizer import load_tokenizer
    from clustertune.training import packing
    from clustertune.training.measure import Stopwatch, Turns

    class Baseline(SFTTrainer):  # type: ignore[misc]
        """Counts its tokens, and is TRL's own otherwise."""

        on_inputs: Any = None

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.on_inputs(args[1])
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            return loss

    tokenizer = None
    if given["sft"] is not None:
        packing.register()  # the recipe's attention may be this project's
        tokenizer = load_tokenizer(given["model"], None, given["chat_template"], given["sft"])
    elif given["chat_template"]:
        tokenizer = AutoTokenizer.from_pretrained(given["model"])
        tokenizer.chat_template = given["chat_template"]
    requested = arguments_of(given, cuda=cuda) | {"max_steps": schedule.total}
    trainer = Baseline(
        model=given["model"],
        args=SFTConfig(str(out), **requested),
        train_dataset=load_dataset("json", data_files=given["data"], split="train").select_columns(["messages"]),
        processing_class=tokenizer,
        peft_config=LoraConfig(**given["lora"]) if given["lora"] else None,
    )
    turns = Turns(Path(schedule.turns), THEIRS) if schedule.turns else None
    watch = Stopwatch(schedule, result_file(out, int(os.environ.get("RANK", "0"))), turns)
    watch.facts = {"distributed": str(trainer.accelerator.distributed_type.value), "rows": len(trainer.train_dataset)}
    trainer.on_inputs = watch.count
    trainer.add_callback(watch)
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
