"""Runs of a tiny recipe under distribution files that tests make up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from trl import SFTConfig

from clustertune.chain import open_run
from clustertune.checkpoint.store import newest_whole
from clustertune.data import tokens
from clustertune.data.tokenizer import load_tokenizer
from clustertune.errors import ExitCode
from clustertune.manifest import MANIFEST, read_manifest
from clustertune.resolve.resolve import resolve
from tests.command import REPO, events, run
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
    "train.eval_on_start=false", "train.report_to=none", "lora.lora_dropout=0", "activation_checkpointing.ratio=0",
    "data.eval_fraction=0.08", "train.per_device_eval_batch_size=2",
]  # fmt: skip
"""No dropout, no packing (context parallelism has neither): what is left is the order of sums.

Seven rows are evaluated, two a rank and step: ranks have different ones, and the last batch is not full on any mesh."""
FULL = ["lora=null"]
PLAIN = {
    "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": False,
}  # fmt: skip
SLICES, WHOLE = {"fsdp_cpu_ram_efficient_loading": True}, {"fsdp_cpu_ram_efficient_loading": False}


def fsdp(config: Mapping[str, Any] | None = None, **sizes: int) -> dict[str, Any]:
    """An accelerate file of FSDP2 on a mesh of these sizes."""
    body: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": {**PLAIN, **(config or {})}}
    if sizes:
        body["parallelism_config"] = {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
    return body


STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {"distributed_type": "NO"}),
    "ddp": (2, {"distributed_type": "MULTI_GPU"}),
    "ddp-4": (4, {"distributed_type": "MULTI_GPU"}),
    "fsdp2": (2, fsdp()),
    "fsdp2-4": (4, fsdp()),
    "fsdp2-slices": (2, fsdp(SLICES)),
    "fsdp2-offload": (2, fsdp({"fsdp_offload_params": True})),
    "hsdp": (4, fsdp(dp_replicate=2, dp_shard=2)),
    "tp": (4, fsdp(dp_shard=2, tp=2)),
    "cp": (2, fsdp(cp=2)),
    "cp-dp": (4, fsdp(dp_shard=2, cp=2)),
}
"""Name -> ranks and accelerate file. Those of DeepSpeed are in :data:`STAGES`, of two ranks."""
Strategy = str | tuple[int, Mapping[str, Any]]


class Bench:
    """Runs of one recipe under any distribution, and the single process that they are compared with."""

    seconds = 300
    """After which ranks that hang are ended."""

    def __init__(self, forge: Forge, recipe: Path, prepared: Path, folder: Path, same: Sequence[str] = SAME) -> None:
        self.forge, self.recipe, self.prepared, self.folder, self.same = forge, recipe, prepared, folder, same
        self._alone: dict[tuple[str, ...], Path] = {}

    def of(self, strategy: Strategy) -> tuple[int, Mapping[str, Any]]:
        """Ranks and accelerate file of a strategy; DeepSpeed's own file is written beside it."""
        if not isinstance(strategy, str):
            return strategy
        return (2, self.zero(STAGES[strategy])) if strategy in STAGES else STRATEGIES[strategy]

    def resolved(self, strategy: Strategy, *more: str) -> Any:
        """The recipe under a strategy."""
        ranks, accelerate = self.of(strategy)
        file = f"{len(list(self.recipe.iterdir()))}.yaml"
        (self.recipe / file).write_text(json.dumps(accelerate))
        return resolve(self.recipe, [*self.same, f"accelerate={file}", *more], ranks=ranks)

    def make(self, strategy: Strategy, *more: str) -> Path:
        """A run folder whose next stage is the training."""
        resolved, path = self.resolved(strategy, *more), self.folder / str(len(list(self.folder.iterdir())))
        open_run(resolved, path, ["test"]).write_own_files(resolved)
        for part in ("data", "model"):
            shutil.copytree(self.prepared / part, path / part)
        # The rows of what this run asks for; its tokens are those of the copy.
        args, source = resolved.train_args, str(next((path / "model").iterdir()))
        tokens.make(path / "data", load_tokenizer(source, None, resolved.chat_template, args), args)
        return path

    def zero(self, zero: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
        """An accelerate file of DeepSpeed, whose own file is written beside it."""
        body = {"zero_optimization": zero, **dict.fromkeys(AUTO, "auto"), "zero_force_ds_cpu_optimizer": False, **settings}
        file = f"{len(list(self.recipe.iterdir()))}.json"
        (self.recipe / file).write_text(json.dumps(body))
        config = {"deepspeed_config_file": file, "zero3_init_flag": zero["stage"] == 3}
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": config}

    def go(self, path: Path, ranks: int = 2, **more: Any) -> list[int]:
        """One attempt at a run; the ranks' exit codes."""
        return self.forge.run(path, ranks, **{"seconds": self.seconds, **more})

    def train(self, strategy: Strategy, *more: str, stop: bool = False, breaks: str | None = None) -> Path:
        """Train to the end. ``stop``: asked to stop in the second step, then begun again."""
        path, ranks = self.make(strategy, *more), self.of(strategy)[0]
        if stop:
            self.stop(path, ranks)
            assert [e["step"] for e in events(path, "step")] == [1, 2]
        self.end(path, ranks, attempt=2 if stop else 1, breaks=breaks)
        return path

    def stop(self, path: Path, ranks: int = 2) -> None:
        """The first attempt, whose rank 1 is asked to stop in the second step."""
        assert self.go(path, ranks, breaks="stop") == [ExitCode.AGAIN] * ranks, output_of(path)

    def end(self, path: Path, ranks: int = 2, *, attempt: int = 2, **more: Any) -> None:
        """An attempt to the end, by default the second one."""
        assert self.go(path, ranks, attempt=attempt, **more) == [0] * ranks, output_of(path)

    def alone(self, *more: str) -> Path:
        """The run of one process with the same global batch."""
        if more not in self._alone:
            self._alone[more] = self.train("alone", *more)
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
    for name in ("_base", "tiny-oasst2", "tiny-dpo", "tiny-grpo"):
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


ATTENTION = ["lora.target_modules=[q_proj,k_proj,v_proj,o_proj]"]
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096,
    "max_position_embeddings": 2048, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
"""Three experts on two ranks: the files hold one tensor an expert, the model one for all, and the shares are not even."""
PHI = {
    "architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4096,
    "max_position_embeddings": 2048, "layer_norm_eps": 1e-05, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "embd_pdrop": 0.2, "resid_pdrop": 0.1, "attention_dropout": 0.0,
}  # fmt: skip
"""Drops some of its embeddings, outside of the layers that are recomputed, and behind each half of a layer."""
MODELS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "tied": ({"tie_word_embeddings": True}, "LlamaDecoderLayer", []),
    "mixtral": (MIXTRAL, "MixtralDecoderLayer", ATTENTION),  # its experts are not Linear
    "mixtral4": ({**MIXTRAL, "num_local_experts": 4, "router_aux_loss_coef": 0.0}, "MixtralDecoderLayer", ATTENTION),
    "mixtral2": ({**MIXTRAL, "num_local_experts": 2, "router_aux_loss_coef": 0.0}, "MixtralDecoderLayer", ATTENTION),
    "phi": (PHI, "PhiDecoderLayer", ["lora.target_modules=[q_proj, k_proj, v_proj, dense, fc1, fc2]"]),
}
"""What differs from the tiny recipe: keys of model.json, the layer that is sharded, what is trained."""


class Benches:
    """A bench for each kind of model, made when it is first asked for."""

    def __init__(self, forge: Forge, folder: Path, llama: Bench) -> None:
        self._forge, self._folder = forge, folder
        self._made = {"llama": llama}

    def __call__(self, name: str) -> Bench:
        if name not in self._made:
            changes, layer, more = MODELS[name]
            folder = self._folder / name
            self._made[name] = make_bench(self._forge, folder, [*SAME, *more], changes=changes, layer=layer)
        return self._made[name]


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


def newest(path: Path) -> Path:
    """The newest checkpoint, which is whole."""
    found, broken = newest_whole(path / "checkpoints")
    assert found is not None and not broken
    return found.path


def digests(path: Path) -> Any:
    """Those of each rank's parameters and optimizer state at the newest save."""
    return read_manifest(newest(path)).meta["state_digests"]


def lossless(path: Path) -> tuple[list[float], list[Any]]:
    """What must not differ in a single bit: losses, gradient norms and the trained state at each save."""
    saved = sorted((path / "checkpoints").glob(f"*/{MANIFEST}"))
    return curve(path), [json.loads(file.read_text())["meta"]["state_digests"] for file in saved]


def distributed(path: Path) -> dict[str, Any]:
    """What the ranks found before the first step."""
    found: dict[str, Any] = json.loads((path / "run.json").read_text())["distributed"]
    return found


def startup(path: Path) -> dict[str, Any]:
    """What the first start read, and how."""
    return next(e for e in events(path, "startup") if e["part"] == "total")


def weights_of(path: Path) -> Path:
    """The base's weights in a run's own folder, which has no digests to compare from here on."""
    file = next((path / "model").glob("*/*.safetensors"))
    (file.parent / MANIFEST).unlink(missing_ok=True)
    return file


def size_of(path: Path) -> int:
    """Bytes of the base's weights."""
    return sum(file.stat().st_size for file in (path / "model").glob("*/*.safetensors"))


class Operations(TorchDispatchMode):
    """Every operation that runs inside, and the most elements of a tensor that one of them made, of those that ``counts``."""

    def __init__(self, counts: Callable[[Any], bool] = lambda _: True) -> None:
        super().__init__()
        self.counts, self.names, self.largest = counts, list[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        sizes = (one.numel() for one in tree_leaves(found) if isinstance(one, torch.Tensor) and self.counts(one))
        self.largest = max(self.largest, *sizes, 0)
        return found


def tiny_trainer(
    kind: Any, folder: Path, train: Any, held: Any, tokenizer: Any, sizes: Mapping[str, Any], **settings: Any
) -> Any:
    """A trainer of TRL's (``kind``) on a random model of one layer; ``sizes``: what its configuration has otherwise."""
    torch.manual_seed(0)
    small = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_key_value_heads=2, **{**small, **sizes}))
    plain = {"use_cpu": True, "bf16": False, "report_to": "none", "activation_checkpointing": False, "disable_tqdm": True}
    args = SFTConfig(output_dir=str(folder), **{**plain, **settings})
    return kind(model=model, args=args, train_dataset=train, eval_dataset=held, processing_class=tokenizer)
