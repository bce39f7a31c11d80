"""A recipe, its cluster, its stack, model, data and run folder without any fault, and what spoils one thing of it."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune import manifest
from clustertune.check.rule import FAIL, WARN, Finding, checks
from clustertune.check.rule import RECIPE as RECIPE_RULES
from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import Cluster
from clustertune.containers import pins
from clustertune.doctor import recipe_context
from clustertune.host.facts import HostFacts, Mount, Package
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.tensorfile import Tensor, build_header

MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
"""Llama-3.1-8B."""
RECIPE: dict[str, Any] = {
    "base": "sft-lora",
    "model": {"name": "meta-llama/Llama-3.1-8B-Instruct", "path": "MODEL"},
    "data": {
        "name": "chats", "input": "chats.jsonl", "format": "messages",
        "expect": {"train": 20000, "eval": 500, "mean_tokens": 500},
    },
    "train": {
        "global_batch_size": 32, "per_device_train_batch_size": 4, "assistant_only_loss": True, "save_steps": 40,
        "eval_steps": 100, "model_init_kwargs": {"dtype": "bfloat16"},
    },
    "slurm": {"nodes": 1, "gpus_per_node": 8, "time": "24:00:00"},
    "expect": {"hours": 1.0, "steps": 157, "tasks": {"ifeval": {"prompt_level_strict_acc": 0.7}}},
}  # fmt: skip
ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    },
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}{% endfor %}"
BIG = 10**15


@dataclass
class Case:
    """Everything that a context is built from; a test changes what it wants before :meth:`findings`."""

    root: Path
    recipe: dict[str, Any]
    overrides: list[str] = field(default_factory=list)
    cluster: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    hostname: str = "rno-it-gpu0007-1"
    place: str = "container+step"
    mounts: list[Mount] = field(default_factory=list)
    arch: str = "x86_64"
    change: Callable[[Resolved], Resolved] = lambda resolved: resolved
    """Something that resolve() refuses: older runs and other tools may have it."""

    @property
    def folder(self) -> Path:
        return self.root / "recipe"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def env(self) -> Path:
        return self.root / "home" / ".env"

    def edit(self, name: str, **changes: Any) -> None:
        """Set keys of a JSON file of the model; None takes one out."""
        path = self.model / name
        body = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in body.items() if value is not None}))

    def context(self) -> recipe_context.RecipeContext:
        (self.folder / "recipe.yaml").write_text(yaml.safe_dump(self.recipe))
        resolved = self.change(resolve(self.folder, self.overrides))
        packages = [Package(name, version, "") for name, version in self.versions.items()]
        facts = HostFacts(self.hostname, self.place, packages=packages, mounts=self.mounts)
        seen = {"run_dir": self.run, "environment": self.environment, "env_file": self.env, "arch": self.arch}
        made = recipe_context.build(resolved, self.made_cluster(), facts, **seen)  # type: ignore[arg-type]
        return replace(made, mounts="1 0 0:1 / / rw - ext4 /dev/sda rw\n")

    def made_cluster(self) -> Cluster:
        body = reference().model_dump()
        for path, value in self.cluster.items():
            *parents, last = path.split(".")
            section = body
            for name in parents:
                section[name] = section[name] or {}
                section = section[name]
            section[last] = value
        return Cluster.model_validate(body)

    def findings(self) -> list[Finding]:
        context = self.context()
        return [item for check in checks(RECIPE_RULES) for item in check(context)]

    def rules(self) -> set[str]:
        """The rules that find something."""
        return {item.rule for item in self.findings()}


@cache
def reference() -> Cluster:
    """The reference cluster, read once."""
    return load_cluster("rno-rtxpro6000")


def make(root: Path) -> Case:
    """The faultless one."""
    recipe = json.loads(json.dumps(RECIPE).replace("MODEL", str(root / "model")))
    for name in ("recipe", "model", "home", "hub"):
        (root / name).mkdir()
    (root / "recipe" / "accelerate.yaml").write_text(yaml.safe_dump(ACCELERATE))
    (root / "recipe" / "model.json").write_text(json.dumps(MODEL))
    (root / "recipe" / "chats.jsonl").write_text("{}\n")
    write_model(root / "model")
    return Case(
        root,
        recipe,
        versions=dict(pins.read()[pins.PY]),
        environment={"HF_HOME": str(root)},
        mounts=[Mount("/", "ext4", free_bytes=BIG), Mount(str(root), "xfs", free_bytes=BIG)],
        cluster={"slurm.max_time": "UNLIMITED"},
    )


def write_model(path: Path) -> None:
    """A model folder as the Hub has it, but for the size of its weights."""
    weights = {f"model-0000{part}-of-00002.safetensors": weight_file(16) for part in (1, 2)}
    for name, content in weights.items():
        (path / name).write_bytes(content)
    index = {"metadata": {"total_size": 100}, "weight_map": {"a": sorted(weights)[0], "b": sorted(weights)[1]}}
    pad = "<|finetune_right_pad_id|>"
    vocab = {"a": 0, "b": 1, "<|eot_id|>": 2, pad: 3}
    files: dict[str, Any] = {
        "model.safetensors.index.json": index,
        "config.json": MODEL,
        "generation_config.json": {"eos_token_id": [2]},
        "tokenizer.json": {"model": {"vocab": vocab}, "added_tokens": [{"id": 3, "content": pad}]},
        "tokenizer_config.json": {"eos_token": "<|eot_id|>", "pad_token": {"content": pad}, "chat_template": TEMPLATE},
    }
    for name, body in files.items():
        (path / name).write_text(json.dumps(body))


def weight_file(count: int) -> bytes:
    """A whole safetensors file of one tensor of ``count`` float32 numbers."""
    return build_header([Tensor("a", "F32", (count,), Path(), 0, 4 * count)]) + b"x" * 4 * count


def write_run(case: Case) -> None:
    """``run.json`` of the case's recipe: a run that has begun."""
    case.run.mkdir(exist_ok=True)
    resolved = case.context().resolved
    (case.run / "run.json").write_text(json.dumps({"fingerprint": resolved.fingerprint(), "recipe": resolved.as_dict()}))


def write_checkpoint(case: Case, step: int, *, world: int = 8, size: int = 1000, metadata: bool = True) -> Path:
    """A whole sharded checkpoint with its manifest."""
    path = case.run / "checkpoints" / f"step-{step:06d}"
    shards = path / "pytorch_model_fsdp_0"
    shards.mkdir(parents=True)
    if metadata:
        (shards / ".metadata").write_bytes(b"m")
    with (shards / "__0_0.distcp").open("wb") as out:
        out.truncate(size)
    seal(path, step, world)
    return path


def seal(path: Path, step: int, world: int = 8) -> None:
    """The manifest of a checkpoint with the sizes that its files have."""
    records = {name: manifest.FileRecord((path / name).stat().st_size, "0" * 64) for name in manifest.list_files(path)}
    manifest.seal(path, "checkpoint", {"step": step, "world_size": world}, records)


# --- run folders, secrets and disks ------------------------------------------------------------------------------------

LORA = 27_262_976
"""Parameters of the case's adapter: 32 layers x 32 x (4096 + 4096 + 4096 + 1024 + 4096 + 1024 + 4096 + 4096)."""


def foreign_run(case: Case) -> None:
    write_run(case)
    path = case.run / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fingerprint": "0" * 64}))


def no_run(case: Case) -> None:
    case.run.mkdir()
    (case.run / "thesis.tex").write_text("")


def two_nodes(case: Case) -> None:
    """The run folder is on this node's disk, and the cluster shares /pool."""
    case.recipe["slurm"]["nodes"] = 2
    case.recipe["train"]["per_device_train_batch_size"] = 2


HELD: list[int] = []


def in_use(case: Case) -> None:
    write_run(case)
    path = case.run / "lock"
    path.write_text("process 7 on node3\n")
    HELD.append(os.open(path, os.O_RDWR))
    fcntl.flock(HELD[-1], fcntl.LOCK_EX)


def damaged(*steps: int, whole: int | None = None) -> Callable[[Case], None]:
    """Checkpoints that lack a file, newer than a whole one or without any."""

    def spoil(case: Case) -> None:
        write_run(case)
        if whole is not None:
            write_checkpoint(case, whole)
        for step in steps:
            (write_checkpoint(case, step) / "pytorch_model_fsdp_0" / "__0_0.distcp").unlink()

    return spoil


def sentinel(case: Case) -> None:
    write_run(case)
    path = write_checkpoint(case, 80)
    (path / "checkpoint-is-incomplete.txt").write_text("")
    (path / "MANIFEST.json").unlink()
    seal(path, 80)


def checkpoint(step: int = 40, **how: Any) -> Callable[[Case], None]:
    def spoil(case: Case) -> None:
        write_run(case)
        write_checkpoint(case, step, **how)

    return spoil


def zero_of_other_ranks(case: Case) -> None:
    """FSDP loads a checkpoint of other ranks; DeepSpeed does not."""
    zero = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}
    (case.folder / "accelerate.yaml").write_text(yaml.safe_dump(zero))
    checkpoint(world=16)(case)


def adapter(case: Case, tensors: dict[str, list[int]], step: int = 40) -> None:
    """An exported adapter, its bytes a hole in the file."""
    checkpoint()(case)
    out, listed, at = case.run / "adapter", [], 0
    out.mkdir()
    for name, shape in tensors.items():
        listed.append(Tensor(name, "F32", tuple(shape), Path(), at, 4 * math.prod(shape)))
        at += 4 * math.prod(shape)
    header = build_header(listed)
    with (out / "adapter_model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + at)
    manifest.seal(out, "adapter", {"step": step}, {})


def whole_adapter(case: Case, step: int = 40, **instead: list[int]) -> None:
    """What PEFT saves for the case's recipe; ``instead``: other shapes of the first layer's q_proj, by ``A`` and ``B``."""
    tensors = {}
    for layer in range(32):
        for name, out in {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024, "o_proj": 4096}.items():
            for part, shape in {"A": [32, 4096], "B": [out, 32]}.items():
                chosen = instead.get(part, shape) if (layer, name) == (0, "q_proj") else shape
                tensors[f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight"] = chosen
    adapter(case, {name: shape for name, shape in tensors.items() if shape != [-1]}, step)


def cut_adapter(case: Case) -> None:
    whole_adapter(case)
    path = case.run / "adapter" / "adapter_model.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def left_over(case: Case) -> None:
    write_run(case)
    (case.run / ".merged.merging").mkdir()
    (case.run / ".merged.merging" / "model-00001.part").write_bytes(b"x" * 100)


def full_disk(share: float) -> Callable[[Case], None]:
    """The run folder's disk has this share of the 17.4 GB that the run writes: 4 checkpoints, adapter and merged model."""
    return lambda case: setattr(case, "mounts", [Mount(str(case.root), "xfs", free_bytes=int(share * 17.48e9))])


def env(text: str = "HF_TOKEN=x\n", mode: int = 0o600) -> Callable[[Case], None]:
    def spoil(case: Case) -> None:
        case.env.write_text(text)
        case.env.chmod(mode)

    return spoil


def tracked(case: Case) -> None:
    if shutil.which("git") is None:
        pytest.skip("not installed: git (apt-get install)")
    env()(case)
    for words in (["init", "-q"], ["add", "-f", ".env"]):
        subprocess.run(["git", "-C", str(case.env.parent), *words], check=True, timeout=30)


def many_kept(case: Case) -> None:
    case.recipe["train"] |= {"save_total_limit": None, "save_steps": 1, "num_train_epochs": 20}
    case.cluster["storage.write_gb_s"] = 1000


def home_cache(case: Case) -> None:
    """A model of 16 GB, and no variable that says where the cache is."""
    case.environment = {}
    case.recipe["model"] = {"name": "acme/Llama-3.1-8B-Instruct", "revision": "0" * 40}
    case.recipe["lora"] = {"r": 32}


RUN_CASES: list[tuple[str, str, Callable[[Case], object]]] = [
    ("disk-space", FAIL, full_disk(0.9)), ("disk-space", WARN, full_disk(1.05)), ("env-in-git", FAIL, tracked),
    ("token-in-environment", WARN, lambda case: case.environment.update(WANDB_API_KEY="x")),
]  # fmt: skip
