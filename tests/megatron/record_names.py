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
FUNCTIONS = {
    "AutoBridge.from_hf_pretrained": "bridge:models/conversion/auto_bridge.py",
    "AutoBridge.to_megatron_provider": "bridge:models/conversion/auto_bridge.py",
    "AutoBridge.save_megatron_model": "bridge:models/conversion/auto_bridge.py",
    "AutoBridge.save_hf_adapter": "bridge:models/conversion/auto_bridge.py",
    "AutoBridge.save_hf_pretrained": "bridge:models/conversion/auto_bridge.py",
    "ModelProviderMixin.provide_distributed_model": "bridge:models/model_provider.py",
    "ModelProviderMixin.initialize_model_parallel": "bridge:models/model_provider.py",
    "FinetuningDatasetBuilder.__init__": "bridge:data/builders/finetuning_dataset.py",
    "FinetuningDatasetBuilder.prepare_data": "bridge:data/builders/finetuning_dataset.py",
    "FinetuningDatasetBuilder.train_path_packed": "bridge:data/builders/finetuning_dataset.py",
    "FinetuningDatasetBuilder.validation_path_packed": "bridge:data/builders/finetuning_dataset.py",
    "FinetuningDatasetBuilder.train_path": "bridge:data/builders/finetuning_dataset.py",
    "FinetuningDatasetBuilder.validation_path": "bridge:data/builders/finetuning_dataset.py",
    "CallbackManager.register": "bridge:training/callbacks.py",
    "finetune": "bridge:training/finetune.py",
    "forward_step": "bridge:training/gpt_step.py",
    "build_tokenizer": "bridge:training/tokenizers/tokenizer.py",
    "get_mixed_precision_config": "bridge:training/mixed_precision.py",
    "destroy_model_parallel": "core:core/parallel_state.py",
}


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


def parameters(name: str, source: str, bridge: Path, core: Path) -> list[str]:
    """The parameters of a function or method."""
    owner, _, function = name.rpartition(".")
    body: list[ast.stmt] = parse(source, bridge, core).body
    if owner:
        body = next(n.body for n in body if isinstance(n, ast.ClassDef) and n.name == owner)
    node = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == function)
    more = [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    return [
        a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls")
    ] + more


def main() -> None:
    """Write the names to stdout."""
    bridge, core = (Path(word) for word in sys.argv[1:3])
    classes = {name: fields(name, sources, bridge, core) for name, sources in CLASSES.items()}
    functions = {name: parameters(name, source, bridge, core) for name, source in FUNCTIONS.items()}
    sys.stdout.write(json.dumps({"classes": classes, "functions": functions}, indent=1) + "\n")


if __name__ == "__main__":
    main()
