"""What the pinned transformers knows about a model type: configuration keys, layer classes, module names, parallel plans."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from clustertune.config.library_facts import facts


def _of(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = facts("transformers")["models"][kind]
    return found


@cache
def model_types() -> frozenset[str]:
    """The model types of causal language models."""
    return frozenset(facts("transformers")["models"])


@cache
def config_fields(kind: str) -> frozenset[str]:
    """The keys of a model type's ``config.json``: fields of its configuration class and its base, other names of them, and what
    is only read."""
    return frozenset([*facts("transformers")["keys"], *_of(kind)["keys"]])


def config_types(kind: str) -> Mapping[str, str]:
    """The annotation of each field of a model type's configuration class: ``int | None``."""
    return _of(kind)["types"]  # type: ignore[no-any-return]


def config_defaults(kind: str) -> Mapping[str, Any]:
    """The default values of a model type's configuration class, as far as they are plain."""
    return _of(kind)["defaults"]  # type: ignore[no-any-return]


def config_aliases(kind: str) -> Mapping[str, str]:
    """Other names of keys -> the names under which the configuration keeps them (``attribute_map``): hidden_size -> n_embd."""
    return _of(kind)["aliases"]  # type: ignore[no-any-return]


def modeling_classes(kind: str) -> tuple[str, ...]:
    """The names of the classes of a model type's modeling file."""
    return tuple(_of(kind)["classes"])


def layer_classes(kind: str) -> tuple[str, ...]:
    """The classes that FSDP wraps: the decoder layers, as transformers marks them for activation checkpointing."""
    return tuple(_of(kind)["layers"])


def carries_state(kind: str) -> bool:
    """Whether layers of a model type hand a state from token to token: state spaces, linear attention, convolutions."""
    return bool(_of(kind)["carries_state"])


def has_sdpa(kind: str) -> bool:
    """Whether torch's scaled_dot_product_attention computes a model type's attention; without it transformers takes eager."""
    return bool(_of(kind)["sdpa"])


def attention_takes(kind: str) -> list[str] | None:
    """The arguments that a model type's attention hands to whichever attention implementation is chosen; None where the
    implementation cannot be chosen, or where what tells packed conversations apart is not handed on to it.

    ``_supports_attention_backend``: the attention is looked up by name, and every layer passes on what it does not know.
    """
    return _of(kind)["attention"]  # type: ignore[no-any-return]


def parallel_plans(kind: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """transformers' tensor-parallel and expert-parallel plans of a model type: module or parameter -> style; empty without."""
    return _of(kind)["tp"], _of(kind)["ep"]


def module_names(kind: str, top: str) -> Mapping[str, str]:
    """The modules of one model class that LoRA can replace: full name, with 0 for every layer -> class.

    Those of the default configuration and of each that differs from it in one choice; empty where the model could not be built
    without a package that is not pinned.
    """
    return _of(kind)["modules"].get(top, {})  # type: ignore[no-any-return]
