"""What the installed transformers knows about a model type, read from its source: keys, layer classes, module names."""

from __future__ import annotations

import ast
from functools import cache

from clustertune.config.source import annotated, classes, package_folder, parse_module


@cache
def model_types() -> frozenset[str]:
    """The model types of the installed transformers: its ``models/TYPE/modeling_TYPE.py``."""
    folder = package_folder("transformers") / "models"
    return frozenset(path.parent.name for path in folder.glob("*/modeling_*.py") if path.stem == f"modeling_{path.parent.name}")


@cache
def config_fields(kind: str) -> frozenset[str]:
    """The keys of a model type's configuration class and of its base class."""
    names = {"model_type"}
    for node in classes(parse_module("transformers", f"models/{kind}/configuration_{kind}.py")).values():
        names |= {ast.unparse(item.target) for item in annotated(node)}
    # Some keys of published files are no fields: Qwen3-MoE's head_dim is only read, by getattr(config, "head_dim", ...).
    for call in ast.walk(parse_module("transformers", f"models/{kind}/modeling_{kind}.py")):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "getattr" and ast.unparse(call.args[0]).endswith("config"):
            names |= {str(call.args[1].value)} if isinstance(call.args[1], ast.Constant) else set()
    base = classes(parse_module("transformers", "configuration_utils.py"))["PreTrainedConfig"]
    return frozenset(names | {ast.unparse(item.target) for item in annotated(base)})


@cache
def modeling_classes(kind: str) -> dict[str, ast.ClassDef]:
    """The classes of a model type's modeling file, by name."""
    return classes(parse_module("transformers", f"models/{kind}/modeling_{kind}.py"))


@cache
def layer_classes(kind: str) -> tuple[str, ...]:
    """The classes that FSDP wraps: the decoder layers, as transformers marks them for activation checkpointing."""
    return tuple(
        name
        for name, node in modeling_classes(kind).items()
        if any(ast.unparse(base).endswith("GradientCheckpointingLayer") for base in node.bases)
    )


@cache
def module_names(kind: str, top: str) -> dict[str, str]:
    """The modules of one model class that LoRA can replace, by their full name, with layer 0 for all layers; and their class.

    Empty where the modeling file builds its modules in a way that its source does not show.
    """
    found: dict[str, str] = {}
    _walk(modeling_classes(kind), top, "", found, 0)
    return found


def _walk(known: dict[str, ast.ClassDef], name: str, prefix: str, found: dict[str, str], depth: int) -> None:
    if name not in known or depth > 8:
        return
    for item in ast.walk(known[name]):
        if not (isinstance(item, ast.Assign) and isinstance(item.value, ast.Call)):
            continue
        for target in item.targets:
            if not (isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"):
                continue
            made, path = ast.unparse(item.value.func).split(".")[-1], f"{prefix}{target.attr}"
            if made == "ModuleList":
                inner = [ast.unparse(c.func) for c in ast.walk(item.value) if isinstance(c, ast.Call)]
                for child in inner:
                    _walk(known, child, f"{path}.0.", found, depth + 1)
            elif made in {"Linear", "Conv1D", "Embedding"}:
                found[path] = made
            else:
                _walk(known, made, f"{path}.", found, depth + 1)
