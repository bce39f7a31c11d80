"""Runs of the tiny recipe under distribution files that tests make up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from clustertune.chain import open_run
from clustertune.config.resolve import resolve
from clustertune.data import tokens
from clustertune.data.tokenizer import load_tokenizer
from tests.command import events
from tests.training.forked import Forge

AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
CPU = {"device": "cpu", "pin_memory": False}
STAGES: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    # torch's own AdamW on what is offloaded: DeepSpeed's is compiled for minutes when it is first used.
    "zero3-offload": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "sub_group_size": 100_000},
}


SAME = [
    "train.max_steps=3", "train.save_steps=2", "train.eval_steps=3", "train.max_length=64", "train.packing=false",
    "train.eval_on_start=false", "train.report_to=none", "lora.lora_dropout=0", "train.activation_checkpointing=false",
]  # fmt: skip
FULL = "lora=null"


class ZeroBench:
    """Runs of one recipe under DeepSpeed, and the single process that they are compared with."""

    def __init__(self, forge: Forge, recipe: Path, prepared: Path, folder: Path) -> None:
        self.forge, self.recipe, self.prepared, self.folder = forge, recipe, prepared, folder
        self._alone: dict[tuple[str, ...], list[float]] = {}

    def make(self, file: str, ranks: int, *more: str) -> Path:
        """A run folder whose next stage is the training."""
        resolved = resolve(self.recipe, [*SAME, f"accelerate={file}", *more], ranks=ranks)
        path = self.folder / f"run-{len(list(self.folder.iterdir()))}"
        open_run(resolved, path, ["test"]).write_own_files(resolved)
        for part in ("data", "model"):
            shutil.copytree(self.prepared / part, path / part)
        # The rows of what this run asks for; its tokens are those of the copy.
        args, source = resolved.train_args, str(next((path / "model").iterdir()))
        tokens.make(path / "data", load_tokenizer(source, None, resolved.chat_template, args), args)
        return path

    def zero(self, name: str, *more: str, ranks: int = 2) -> Path:
        body = {"zero_optimization": STAGES[name], **dict.fromkeys(AUTO, "auto"), "zero_force_ds_cpu_optimizer": False}
        (self.recipe / f"{name}.json").write_text(json.dumps(body))
        config = {"deepspeed_config_file": f"{name}.json", "zero3_init_flag": STAGES[name]["stage"] == 3}
        text = json.dumps({"distributed_type": "DEEPSPEED", "deepspeed_config": config})
        (self.recipe / f"{name}.yaml").write_text(text)
        return self.make(f"{name}.yaml", ranks, *more)

    def go(self, path: Path, attempt: int = 1, ranks: int = 2, breaks: str | None = None, seconds: float = 300) -> list[int]:
        more = {"breaks": breaks, "accelerate": str(path / "accelerate.yaml")} if breaks else {}
        return self.forge.run(path, ranks, attempt=attempt, seconds=seconds, **more)

    def alone(self, *more: str) -> list[float]:
        """What one process with the same global batch says."""
        if more not in self._alone:
            (self.recipe / "alone.yaml").write_text("distributed_type: 'NO'\n")
            path = self.make("alone.yaml", 1, *more)
            assert self.go(path, ranks=1) == [0], output_of(path)
            self._alone[more] = curve(path)
        return self._alone[more]


def output_of(path: Path) -> str:
    """What each rank left and the end of its log."""
    records = [file.read_text().strip("\0 ") for file in sorted((path / "attempts").glob("*/rank-*.json"))]
    return "\n".join([*records, *(log.read_text()[-1500:] for log in sorted((path / "attempts").glob("*/rank-*.log")))])


def curve(path: Path) -> list[float]:
    """Loss and gradient norm of each step, then the evaluation's loss."""
    steps = [v for event in events(path, "step") for v in (event["loss"], event["grad_norm"])]
    return steps + [event["eval_loss"] for event in events(path, "eval")]
