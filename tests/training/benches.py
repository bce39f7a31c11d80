"""Runs of a tiny recipe under distribution files that tests make up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clustertune.chain import open_run
from clustertune.data import tokens
from clustertune.data.tokenizer import load_tokenizer
from clustertune.errors import ExitCode
from clustertune.resolve.resolve import resolve
from tests.command import REPO, events, run
from tests.training.forked import FSDP2, Forge

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
    "data.eval_fraction=0.08", "train.per_device_eval_batch_size=2",
]  # fmt: skip
"""No dropout, no packing (context parallelism has neither): what is left is the order of sums.

Seven rows are evaluated, two a rank and step: ranks have different ones, and the last batch is not full on any mesh."""
FULL = ["lora=null"]
ALONE: dict[str, Any] = {"distributed_type": "NO"}
DDP: dict[str, Any] = {"distributed_type": "MULTI_GPU"}
FSDP1: dict[str, Any] = {
    "distributed_type": "FSDP",
    "fsdp_config": {
        **FSDP2["fsdp_config"], "fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": False,
    },
}  # fmt: skip


def fsdp(config: Mapping[str, Any] | None = None, **sizes: int) -> dict[str, Any]:
    """An accelerate file of FSDP2 on a mesh of these sizes."""
    body = {**FSDP2, "fsdp_config": {**FSDP2["fsdp_config"], **(config or {})}}
    if sizes:
        body["parallelism_config"] = {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
    return body


class Bench:
    """Runs of one recipe under any distribution, and the single process that they are compared with."""

    seconds = 300
    """After which ranks that hang are ended."""

    def __init__(self, forge: Forge, recipe: Path, prepared: Path, folder: Path, same: Sequence[str] = SAME) -> None:
        self.forge, self.recipe, self.prepared, self.folder, self.same = forge, recipe, prepared, folder, same
        self._alone: dict[tuple[str, ...], Path] = {}

    def make(self, name: str, ranks: int, accelerate: Mapping[str, Any], *more: str) -> Path:
        """A run folder whose next stage is the training."""
        (self.recipe / f"{name}.yaml").write_text(json.dumps(accelerate))
        resolved = resolve(self.recipe, [*self.same, f"accelerate={name}.yaml", *more], ranks=ranks)
        path = self.folder / f"{name}-{len(list(self.folder.iterdir()))}"
        open_run(resolved, path, ["test"]).write_own_files(resolved)
        for part in ("data", "model"):
            shutil.copytree(self.prepared / part, path / part)
        # The rows of what this run asks for; its tokens are those of the copy.
        args, source = resolved.train_args, str(next((path / "model").iterdir()))
        tokens.make(path / "data", load_tokenizer(source, None, resolved.chat_template, args), args)
        return path

    def zero(self, stage: str | Mapping[str, Any], **settings: Any) -> dict[str, Any]:
        """An accelerate file of DeepSpeed, whose own file is written beside it."""
        name, zero = (stage, STAGES[stage]) if isinstance(stage, str) else ("zero", stage)
        body = {"zero_optimization": zero, **dict.fromkeys(AUTO, "auto"), "zero_force_ds_cpu_optimizer": False, **settings}
        (self.recipe / f"{name}.json").write_text(json.dumps(body))
        config = {"deepspeed_config_file": f"{name}.json", "zero3_init_flag": zero["stage"] == 3}
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": config}

    def go(self, path: Path, ranks: int = 2, **more: Any) -> list[int]:
        """One attempt at a run; the ranks' exit codes."""
        return self.forge.run(path, ranks, **{"seconds": self.seconds, **more})

    def train(
        self, name: str, ranks: int, accelerate: Mapping[str, Any], *more: str, stop: bool = False, breaks: str | None = None
    ) -> Path:
        """Train to the end. ``stop``: asked to stop in the second step, then begun again."""
        path = self.make(name, ranks, accelerate, *more)
        if stop:
            assert self.go(path, ranks, breaks="stop") == [ExitCode.AGAIN] * ranks, output_of(path)
            assert [e["step"] for e in events(path, "step")] == [1, 2]
        assert self.go(path, ranks, attempt=2, breaks=breaks) == [0] * ranks, output_of(path)
        return path

    def alone(self, *more: str) -> Path:
        """The run of one process with the same global batch."""
        if more not in self._alone:
            self._alone[more] = self.train("alone", 1, ALONE, *more)
        return self._alone[more]


def make_bench(
    forge: Forge,
    folder: Path,
    same: Sequence[str] = SAME,
    *,
    changes: Mapping[str, Any] | None = None,
    layer: str = "LlamaDecoderLayer",
    prepared: Path | None = None,
    recipe: str = "tiny-oasst2",
) -> Bench:
    """A copy of a tiny recipe with its data and base model prepared, here unless they are given.

    ``changes``: of its architecture, or another one; ``layer``: the layers of that one.
    """
    for name in ("_base", "tiny-oasst2", "tiny-dpo"):
        shutil.copytree(REPO / "recipes" / name, folder / name)
    copy = folder / recipe
    if changes:
        given = {} if "model_type" in changes else json.loads((copy / "model.json").read_text())
        (copy / "model.json").write_text(json.dumps({**given, **changes}))
        file = copy / "accelerate.yaml"
        file.write_text(file.read_text().replace("LlamaDecoderLayer", layer))
    if prepared is None:
        prepared = folder / "prepared"
        done = run("run", copy, "--run-dir", prepared, "--to", "prepare", *same, stack=True)
        assert done.code == 0, done.err
    (folder / "runs").mkdir()
    return Bench(forge, copy, prepared, folder / "runs", same)


def output_of(path: Path) -> str:
    """What each rank left and the end of its log."""
    records = [file.read_text().strip("\0 ") for file in sorted((path / "attempts").glob("*/rank-*.json"))]
    return "\n".join([*records, *(log.read_text()[-1500:] for log in sorted((path / "attempts").glob("*/rank-*.log")))])


def problems(path: Path, rank: int = 0, attempt: int = 1) -> list[dict[str, Any]]:
    """What a rank left of what was wrong."""
    record = json.loads((path / f"attempts/{attempt:04d}/rank-{rank}.json").read_text().strip("\0 \n"))
    found: list[dict[str, Any]] = record["problems"]
    return found


def curve(path: Path) -> list[float]:
    """Loss and gradient norm of each step, then the evaluation's loss."""
    steps = [v for event in events(path, "step") for v in (event["loss"], event["grad_norm"])]
    return steps + [event["eval_loss"] for event in events(path, "eval")]


def distributed(path: Path) -> dict[str, Any]:
    """What the ranks found before the first step."""
    found: dict[str, Any] = json.loads((path / "run.json").read_text())["distributed"]
    return found


def tiny_trainer(
    kind: Any, folder: Path, train: Any, held: Any, tokenizer: Any, sizes: Mapping[str, Any], **settings: Any
) -> Any:
    """A trainer of TRL's (``kind``) on a random model of one layer; ``sizes``: what its configuration has otherwise."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import SFTConfig

    torch.manual_seed(0)
    small = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_key_value_heads=2, **{**small, **sizes}))
    plain = {"use_cpu": True, "bf16": False, "report_to": "none", "activation_checkpointing": False, "disable_tqdm": True}
    args = SFTConfig(output_dir=str(folder), **{**plain, **settings})
    return kind(model=model, args=args, train_dataset=train, eval_dataset=held, processing_class=tokenizer)
