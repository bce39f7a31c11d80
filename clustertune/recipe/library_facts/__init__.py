"""What the pinned TRL, PEFT, accelerate, DeepSpeed, lm-eval and transformers take, as data beside this module.

``make library-facts`` (tools/library_facts.py) writes it from their classes when a pin moves, and
tests/recipe/test_library_facts.py compares it with them. Reading it needs none of them: ``import trl`` takes 7 s, and a
login node need not have torch.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

FOLDER = Path(__file__).parent


@cache
def facts(library: str) -> dict[str, Any]:
    """The facts of one library. Callers share them and must not change them."""
    body: dict[str, Any] = json.loads((FOLDER / f"{library}.json").read_text(encoding="utf-8"))
    return body


class ModelTypeFacts(TypedDict):
    """What the pinned transformers knows about a model type."""

    keys: list[str]
    """Keys of its ``config.json`` beside those of every type: :func:`config_fields` gives both."""
    types: dict[str, str]
    """The annotation of each field of its configuration class: ``int | None``."""
    defaults: dict[str, Any]
    """The default values of the configuration class, as far as they are plain."""
    aliases: dict[str, str]
    """Other names of keys -> the names under which the configuration keeps them (``attribute_map``): hidden_size -> n_embd."""
    classes: list[str]
    """The names of the classes of its modeling file."""
    carries_state: bool
    """Whether layers hand a state from token to token: state spaces, linear attention, convolutions."""
    sdpa: bool
    """Whether torch's scaled_dot_product_attention computes its attention; without it transformers takes eager."""
    attention: list[str] | None
    """The arguments that its attention hands to whichever attention implementation is chosen; None where the implementation
    cannot be chosen, or where what tells packed conversations apart is not handed on to it.

    ``_supports_attention_backend``: the attention is looked up by name, and every layer passes on what it does not know."""
    tp: dict[str, str]
    """transformers' tensor-parallel plan: module or parameter -> style; empty without."""
    ep: dict[str, str]
    """The same for expert parallelism."""
    modules: dict[str, dict[str, str]]
    """By model class, the modules that LoRA can replace: full name, with 0 for every layer -> class. Those of the default
    configuration and of each that differs from it in one choice; none where the model could not be built without a package that
    is not pinned."""


def model_facts(kind: str) -> ModelTypeFacts:
    """The facts of a causal language model's type. Raises KeyError where there is no such type."""
    body: ModelTypeFacts = facts("transformers")["models"][kind]
    return body


@cache
def model_types() -> frozenset[str]:
    """The model types of causal language models."""
    return frozenset(facts("transformers")["models"])


@cache
def config_fields(kind: str) -> frozenset[str]:
    """The keys of a model type's ``config.json``: fields of its configuration class and its base, other names of them, and what
    is only read."""
    return frozenset([*facts("transformers")["keys"], *model_facts(kind)["keys"]])
