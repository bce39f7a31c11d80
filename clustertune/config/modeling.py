"""What the installed transformers knows about a model type, read from its source: keys, layer classes, module names."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from clustertune.config.remembered import remembered
from clustertune.config.source import annotated, classes, package_folder, parse_module

_FOLDERS = {"gemma3_text": "gemma3", "llama4_text": "llama4"}
"""Text models whose source lies in the folder of the model with pictures: SPECIAL_MODEL_TYPE_TO_MODULE_NAME of transformers'
models/auto/auto_mappings.py."""


def read_source(kind: str, part: str) -> ast.Module:
    """The ``modeling`` or ``configuration`` file of a model type."""
    folder = _FOLDERS.get(kind, kind)
    return parse_module("transformers", f"models/{folder}/{part}_{folder}.py")


@cache
def model_types() -> frozenset[str]:
    """The model types of the installed transformers: its ``models/TYPE/modeling_TYPE.py``."""
    folder = package_folder("transformers") / "models"
    names = {name for name in os.listdir(folder) if os.path.exists(f"{folder}/{name}/modeling_{name}.py")}  # noqa: PTH110, PTH208 - 15 times faster
    return frozenset(names | {kind for kind, home in _FOLDERS.items() if home in names})


def _config_classes(kind: str) -> tuple[ast.ClassDef, ...]:
    """The class of a model type, or all of its file where none says that it is the one."""
    found = classes(read_source(kind, "configuration"))
    own = [node for node in found.values() if _constants(node).get("model_type") == kind]
    return tuple(own or found.values())


@cache
def config_fields(kind: str) -> frozenset[str]:
    """The keys of a model type's configuration class and of its base class."""
    return frozenset(_config_fields(kind))


@remembered
def _config_fields(kind: str) -> list[str]:
    names = {"model_type"} | set(config_aliases(kind)) | set(config_aliases(kind).values())
    for node in _config_classes(kind):
        names |= {ast.unparse(item.target) for item in annotated(node)} | _taken_from_kwargs(node)
    # Some keys of published files are no fields: Qwen3-MoE's head_dim is only read, by getattr(config, "head_dim", ...).
    for call in ast.walk(read_source(kind, "modeling")):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "getattr" and ast.unparse(call.args[0]).endswith("config"):
            names |= {str(call.args[1].value)} if isinstance(call.args[1], ast.Constant) else set()
    base = classes(parse_module("transformers", "configuration_utils.py"))["PreTrainedConfig"]
    return sorted(names | {ast.unparse(item.target) for item in annotated(base)})


def _taken_from_kwargs(node: ast.ClassDef) -> set[str]:
    """Keys of published files that a class reads but does not keep: ``kwargs.pop("full_attention_interval", 4)``."""
    taken = ("kwargs.get", "kwargs.pop", "kwargs.setdefault")
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and ast.unparse(call.func) in taken]
    return {str(call.args[0].value) for call in calls if isinstance(call.args[0], ast.Constant)}


@remembered
def config_types(kind: str) -> Mapping[str, str]:
    """The annotation of each field of a model type's configuration class, as written there: ``int | None``."""
    return {
        ast.unparse(item.target): ast.unparse(item.annotation) for node in _config_classes(kind) for item in annotated(node)
    }


@remembered
def config_defaults(kind: str) -> Mapping[str, Any]:
    """The default values of a model type's configuration class, as far as they are constants."""
    found = {}
    for node in _config_classes(kind):
        for item in annotated(node):
            known, value = _constant(item.value)
            if known:
                found[ast.unparse(item.target)] = value
    return found


@remembered
def config_aliases(kind: str) -> Mapping[str, str]:
    """Other names of keys -> the names under which the configuration keeps them (``attribute_map``): hidden_size -> n_embd."""
    found: dict[str, str] = {}
    for node in _config_classes(kind):
        found |= _constants(node).get("attribute_map", {})
    return found


def _constants(node: ast.ClassDef) -> dict[str, Any]:
    """``NAME = constant`` of a class body."""
    found = {}
    for item in node.body:
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            known, value = _constant(item.value)
            if known:
                found[item.targets[0].id] = value
    return found


def _constant(node: ast.expr | None) -> tuple[bool, Any]:
    """Whether an expression is a constant, and which: literals, and products such as ``4096 * 32``."""
    if node is None:
        return False, None
    try:
        return True, ast.literal_eval(node)
    except ValueError:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            (left, one), (right, other) = _constant(node.left), _constant(node.right)
            return left and right, one * other if left and right else None
        return False, None


@cache
def modeling_classes(kind: str) -> tuple[str, ...]:
    """The names of the classes of a model type's modeling file."""
    return tuple(_modeling_classes(kind))


@remembered
def _modeling_classes(kind: str) -> list[str]:
    return list(_modeling(kind))


def _modeling(kind: str) -> dict[str, ast.ClassDef]:
    return classes(read_source(kind, "modeling"))


@cache
def layer_classes(kind: str) -> tuple[str, ...]:
    """The classes that FSDP wraps: the decoder layers, as transformers marks them for activation checkpointing."""
    return tuple(_layer_classes(kind))


@remembered
def _layer_classes(kind: str) -> list[str]:
    return [
        name
        for name, node in _modeling(kind).items()
        if any(ast.unparse(base).endswith("GradientCheckpointingLayer") for base in node.bases)
        and not (kind in _FOLDERS and "Vision" in name)
    ]


@remembered
def carries_state(kind: str) -> bool:
    """Whether layers of a model type hand a state from token to token: state spaces, linear attention, convolutions.

    transformers says so of most (``_is_stateful``, for its generation); MiniMax and LFM2 show it by what they are made of.
    """
    module = read_source(kind, "modeling")
    stated = any(_constants(node).get("_is_stateful") is True for node in classes(module).values())
    words = {node.value for node in ast.walk(module) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    return stated or "linear_attention" in words or any(name.startswith("causal_conv1d") for name in names)


@remembered
def has_sdpa(kind: str) -> bool:
    """Whether torch's scaled_dot_product_attention computes a model type's attention; without it transformers takes eager."""
    found = classes(read_source(kind, "modeling")).values()
    return any(_constants(node).get("_supports_sdpa") is True for node in found)


@remembered
def attention_takes(kind: str) -> list[str] | None:
    """The arguments that a model type's attention hands to whichever attention implementation is chosen; None where the
    implementation cannot be chosen, or where what tells packed conversations apart is not handed on to it.

    ``_supports_attention_backend``: the attention is looked up by name, and every layer passes on what it does not know.
    """
    module = read_source(kind, "modeling")
    stated = {name for node in classes(module).values() for name, value in _constants(node).items() if value is True}
    if not {"_supports_attention_backend", "_supports_flash_attn"} <= stated:
        return None
    calls = [
        node for node in ast.walk(module) if isinstance(node, ast.Call) and ast.unparse(node.func) == "attention_interface"
    ]
    return sorted({word.arg for call in calls for word in call.keywords if word.arg})


@cache
def parallel_plans(kind: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """transformers' tensor-parallel and expert-parallel plans of a model type: module or parameter -> style; empty without."""
    found = _parallel_plans(kind)
    return found["tp"], found["ep"]


@remembered
def _parallel_plans(kind: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {"tp": {}, "ep": {}}
    for node in _config_classes(kind):
        for name, plan in found.items():
            plan.update(_constants(node).get(f"base_model_{name}_plan") or {})
    return found
