"""TRL's own trainer as a person writes it down, on the model and the conversations of a benchmark: what ``--against trl`` runs.

``accelerate launch --config_file FILE baseline.py SETTINGS.json FOLDER``. Whatever is not given below is TRL's default: padded
sequences, float32 weights under bfloat16 autocast, gradient checkpointing, its loss and its optimizer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from clustertune.training.course import Course, result_file
from clustertune.training.measure import Stopwatch


class Baseline(SFTTrainer):  # type: ignore[misc]
    """Counts its tokens, and is TRL's own otherwise."""

    on_inputs: Any = None

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.on_inputs(args[1])
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        return loss


def main(settings: Path, out: Path) -> None:
    """Train as many steps as the settings say; each rank leaves its figures in ``out``."""
    given = json.loads(settings.read_text())
    course = Course(**given["course"])
    if given["chat_template"]:
        tokenizer = AutoTokenizer.from_pretrained(given["model"])
        tokenizer.chat_template = given["chat_template"]
    else:
        tokenizer = None
    asked = {key: given[key] for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "seed")}
    if not torch.cuda.is_available():
        asked |= {"use_cpu": True, "bf16": given["bf16"]}
    if os.environ.get("FSDP_ACTIVATION_CHECKPOINTING") == "true":  # the Trainer refuses both at once
        asked["gradient_checkpointing"] = False
    trainer = Baseline(
        model=given["model"],
        args=SFTConfig(str(out), max_steps=course.total, save_strategy="no", report_to="none", disable_tqdm=True, **asked),
        train_dataset=load_dataset("json", data_files=given["data"], split="train").select_columns(["messages"]),
        processing_class=tokenizer,
        peft_config=LoraConfig(**given["lora"]) if given["lora"] else None,
    )
    watch = Stopwatch(course, result_file(out, int(os.environ.get("RANK", "0"))))
    watch.facts = {"distributed": str(trainer.accelerator.distributed_type.value), "rows": len(trainer.train_dataset)}
    trainer.on_inputs = watch.count
    trainer.add_callback(watch)
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
