"""Names of Megatron-Bridge and Megatron-Core that this project calls, read from their sources without importing them.

``python tests/megatron/record_names.py BRIDGE CORE > tests/megatron/names.json``, each argument an unpacked wheel. The recorded
file is of megatron-bridge 0.5.1 and megatron-core 0.18.2.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

CLASSES = {
    "TrainingConfig": ["bridge:training/config.py", "core:training/config/training_config.py"],
    "ValidationConfig": ["core:training/config/training_config.py"],
    "OptimizerConfig": ["core:core/optimizer/optimizer_config.py"],
    "SchedulerConfig": ["core:training/config/training_config.py"],
    "DistributedDataParallelConfig": ["core:core/distributed/distributed_data_parallel_config.py"],
    "FinetuningDatasetConfig": ["bridge:training/config.py", "bridge:training/config.py#DataloaderConfig"],
    "TokenizerConfig": ["bridge:training/tokenizers/config.py", "core:training/config/training_config.py"],
    "CheckpointConfig": ["bridge:training/config.py", "core:training/config/training_config.py"],
    "LoggerConfig": ["bridge:training/config.py", "core:training/config/training_config.py"],
    "RNGConfig": ["core:training/config/common_config.py"],
    "ConfigContainer": ["bridge:training/config.py"],
    "PackedSequenceSpecs": ["bridge:data/datasets/packed_sequence.py"],
    "CanonicalLoRA": ["bridge:peft/canonical_lora.py"],
    "MixedPrecisionConfig": ["bridge:training/mixed_precision.py"],
    "TransformerConfig": [
        "core:core/transformer/transformer_config.py",
        "core:core/model_parallel_config.py#ModelParallelConfig",
    ],
    "GPTModelProvider": ["bridge:models/gpt_provider.py"],
}
"""Each class and the sources of its fields: its own, then those of the bases that matter here."""
METHODS = {
    "bridge:models/conversion/auto_bridge.py#AutoBridge": (
        "from_hf_pretrained", "to_megatron_provider", "save_megatron_model", "save_hf_adapter", "save_hf_pretrained",
    ),
    "bridge:models/model_provider.py#ModelProviderMixin": ("provide_distributed_model", "initialize_model_parallel"),
    "bridge:data/builders/finetuning_dataset.py#FinetuningDatasetBuilder": (
        "__init__", "prepare_data", "train_path_packed", "validation_path_packed", "train_path", "validation_path",
    ),
    "bridge:training/callbacks.py#CallbackManager": ("register",),
    "bridge:training/finetune.py": ("finetune",),
    "bridge:training/gpt_step.py": ("forward_step",),
    "bridge:training/tokenizers/tokenizer.py": ("build_tokenizer",),
    "bridge:training/mixed_precision.py": ("get_mixed_precision_config",),
    "core:core/parallel_state.py": ("destroy_model_parallel",),
}  # fmt: skip
"""The functions of a source, or of a class in it."""


def parse(where: str, bridge: Path, core: Path) -> ast.Module:
    """The source that ``bridge:PATH`` or ``core:PATH`` names."""
    root, _, path = where.partition(":")
    below = bridge / "megatron" / "bridge" if root == "bridge" else core / "megatron"
    return ast.parse((below / path).read_text(encoding="utf-8"))


def fields(name: str, sources: list[str], bridge: Path, core: Path) -> list[str]:
    """The dataclass fields of a class, over the sources of its bases."""
    found: set[str] = set()
    for source in sources:
        path, _, other = source.partition("#")
        for node in parse(path, bridge, core).body:
            if isinstance(node, ast.ClassDef) and node.name == (other or name):
                found |= {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return sorted(found)


def parameters(function: str, source: str, bridge: Path, core: Path) -> list[str]:
    """The parameters of a function or method."""
    path, _, owner = source.partition("#")
    body: list[ast.stmt] = parse(path, bridge, core).body
    if owner:
        body = next(n.body for n in body if isinstance(n, ast.ClassDef) and n.name == owner)
    given = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == function).args
    named = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs) if a.arg not in ("self", "cls")]
    return [*named, *([f"**{given.kwarg.arg}"] if given.kwarg else [])]


def main() -> None:
    """Write the names to stdout."""
    bridge, core = (Path(word) for word in sys.argv[1:3])
    classes = {name: fields(name, sources, bridge, core) for name, sources in CLASSES.items()}
    functions = {
        f"{source.partition('#')[2]}.{name}".lstrip("."): parameters(name, source, bridge, core)
        for source, names in METHODS.items()
        for name in names
    }
    sys.stdout.write(json.dumps({"classes": classes, "functions": functions}, indent=1) + "\n")


if __name__ == "__main__":
    main()
