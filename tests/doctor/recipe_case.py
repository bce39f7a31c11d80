"""A recipe, its cluster, its stack, model, data and run folder without any fault; each test spoils one thing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from clustertune import manifest
from clustertune.check.rule import RECIPE as RECIPE_RULES
from clustertune.check.rule import Finding
from clustertune.config.cluster import load_cluster
from clustertune.config.cluster_schema import Cluster
from clustertune.config.resolve import resolve
from clustertune.config.resolved import Resolved
from clustertune.containers import pins
from clustertune.doctor import recipe_context
from clustertune.doctor.recipe_findings import recipe_checks
from clustertune.evaluate import punkt
from clustertune.host.facts import HostFacts, Mount, Package
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
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_activation_checkpointing": True,
        "fsdp_cpu_ram_efficient_loading": True,
    },
}
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
        made = recipe_context.build(
            resolved,
            self.made_cluster(),
            facts,
            run_dir=self.run,
            environment=self.environment,
            env_file=self.env,
            arch=self.arch,
        )
        return replace(made, mounts="1 0 0:1 / / rw - ext4 /dev/sda rw\n")

    def made_cluster(self) -> Cluster:
        body = load_cluster("rno-rtxpro6000").model_dump()
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
        return [item for check in recipe_checks(RECIPE_RULES) for item in check(context)]


def make(root: Path) -> Case:
    """The faultless one."""
    recipe = json.loads(json.dumps(RECIPE).replace("MODEL", str(root / "model")))
    for name in ("recipe", "model", "home", "nltk", "hub"):
        (root / name).mkdir()
    (root / "recipe" / "accelerate.yaml").write_text(yaml.safe_dump(ACCELERATE))
    (root / "recipe" / "model.json").write_text(json.dumps(MODEL))
    (root / "recipe" / "chats.jsonl").write_text("{}\n")
    write_model(root / "model")
    (root / "nltk" / punkt.FOLDER).mkdir(parents=True)
    for name in punkt.FILES:
        (root / "nltk" / punkt.FOLDER / name).write_text("")
    return Case(
        root,
        recipe,
        versions=dict(pins.read()[pins.PY]),
        environment={"NLTK_DATA": str(root / "nltk"), "HF_HOME": str(root)},
        mounts=[Mount("/", "ext4", free_bytes=BIG), Mount(str(root), "xfs", free_bytes=BIG)],
        cluster={"slurm.max_time": "UNLIMITED"},
    )


def write_model(path: Path) -> None:
    """A model folder as the Hub has it, but for the size of its weights."""
    weights = {f"model-0000{part}-of-00002.safetensors": weight_file(16) for part in (1, 2)}
    for name, content in weights.items():
        (path / name).write_bytes(content)
    index = {"metadata": {"total_size": 100}, "weight_map": {"a": sorted(weights)[0], "b": sorted(weights)[1]}}
    vocab = {"a": 0, "b": 1, "<|eot_id|>": 2, "<|finetune_right_pad_id|>": 3}
    files: dict[str, Any] = {
        "model.safetensors.index.json": index,
        "config.json": MODEL,
        "generation_config.json": {"eos_token_id": [2]},
        "tokenizer.json": {"model": {"vocab": vocab}, "added_tokens": [{"id": 3, "content": "<|finetune_right_pad_id|>"}]},
        "tokenizer_config.json": {
            "eos_token": "<|eot_id|>",
            "pad_token": {"content": "<|finetune_right_pad_id|>"},
            "chat_template": TEMPLATE,
        },
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
    records = {name: manifest.FileRecord((path / name).stat().st_size, "0" * 64) for name in manifest.list_files(path)}
    manifest.seal(path, "checkpoint", {"step": step, "world_size": world}, records)
    return path
