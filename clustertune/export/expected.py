"""Which tensors an adapter must hold: decided by PEFT itself, on a model without memory.

The architecture is built on the meta device and PEFT injects the recipe's ``LoraConfig`` into it, so that target matching,
rank patterns, ``modules_to_save`` and bias rules are those of the installed PEFT and not a copy of them.
Llama-3.1-405B with r 32 on q, k, v, o: 1,008 tensors and 404,619,264 parameters in 1.3 s on one core.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

from clustertune.errors import UserError

_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
_ADAPTER_NAME = re.compile(r"(\.lora_\w+)\.default(?=\.|$)")
_KEPT_MODULE = re.compile(r"\.modules_to_save\.default(?=\.)")
_KEEPS_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""``init_lora_weights`` under which the frozen base stays what was downloaded. The others (pissa, olora, loftq, corda, ...)
subtract the initial product from the base weights, so their A and B mean nothing on the published base."""


@dataclass(frozen=True)
class Expected:
    """What PEFT saves for one architecture and one LoRA configuration."""

    tensors: dict[str, tuple[int, ...]]
    """Name as ``save_pretrained`` writes it -> shape."""
    base: frozenset[str]
    """Names of the frozen tensors, which a checkpoint of the whole model holds as well."""
    config: dict[str, Any]
    """``adapter_config.json`` as PEFT would write it: sets as sorted lists, ``inference_mode`` true."""


def normalise(key: str) -> str:
    """The name that PEFT saves, from a checkpoint's key.

    ``{"model": state_dict}`` is flattened by torch DCP to ``model.base_model...``; FSDP1, activation checkpointing and
    torch.compile may leave their wrappers in it, and a plain ``state_dict()`` keeps the adapter's name ``default``.
    """
    name = _WRAPPERS.sub("", key)
    if name.startswith("model.base_model."):
        name = name.removeprefix("model.")
    return _KEPT_MODULE.sub("", _ADAPTER_NAME.sub(r"\1", name))


def build_expected(architecture: Mapping[str, Any], lora: Mapping[str, Any], model_name: str, revision: str | None) -> Expected:
    """Names and shapes for a HF ``config.json`` mapping and ``LoraConfig`` fields. Needs no weights and no network.

    Raises UserError where transformers or PEFT refuse the architecture or the LoRA settings.
    """
    start = lora["init_lora_weights"]
    if start not in _KEEPS_THE_BASE:
        raise UserError(
            f"init_lora_weights {start!r} changes the base weights, so the adapter does not fit the published base",
            file="recipe.json",
            key="lora.init_lora_weights",
            fix="train with init_lora_weights: true, gaussian, orthogonal or eva",
        )
    try:
        # The initial values are of no interest here, and "eva" and "orthogonal" cannot be computed without data.
        config = LoraConfig(**{**lora, "init_lora_weights": True})
        with warnings.catch_warnings(), torch.device("meta"):
            # PEFT looks for the base's config.json to compare vocabulary sizes and warns that a meta model has none.
            warnings.simplefilter("ignore")
            base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))
            model = get_peft_model(base, config, low_cpu_mem_usage=True)
            saved = get_peft_model_state_dict(model)
            everything = model.state_dict()
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        message = " ".join(str(error).split())[:500]
        raise UserError(f"the architecture and the LoRA settings do not go together: {message}", file="recipe.json") from None
    tensors = {normalise(name): tuple(tensor.shape) for name, tensor in sorted(saved.items())}
    frozen = frozenset(normalise(name) for name in everything) - tensors.keys()
    config = model.peft_config["default"]
    config.inference_mode = True
    config.base_model_name_or_path, config.revision = model_name, revision
    config.init_lora_weights = start
    return Expected(tensors, frozen, _as_json(config.to_dict()))


def _as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Plain JSON values; sets become sorted lists, because the order of a set changes from process to process."""
    plain = {key: sorted(value) if isinstance(value, set | frozenset) else value for key, value in settings.items()}
    return dict(json.loads(json.dumps(plain, sort_keys=True)))
