"""``activation_checkpointing``: which decoder layers are recomputed and what of them is kept; said once, in one place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from clustertune.config import accelerate_file as acc
from clustertune.config.distribution import recomputed_layers
from clustertune.config.findings import Found
from clustertune.config.schema import ActivationCheckpointing

SECTION = "activation_checkpointing"
ALIASES = (SECTION, "gradient_checkpointing")
"""The key of ``train`` and its deprecated name."""


def read(given: Any) -> ActivationCheckpointing | None:
    """The section; None where there is none, or where the schema says what is wrong with it."""
    try:
        return ActivationCheckpointing.model_validate(given) if given is not None else None
    except ValidationError:
        return None


def settings(train: Mapping[str, Any]) -> dict[str, Any]:
    """``train.activation_checkpointing_kwargs``, by either name."""
    given = next((found for key in ALIASES if (found := train.get(f"{key}_kwargs"))), None)
    return given if isinstance(given, dict) else {}


def saved(section: ActivationCheckpointing | None, train: Mapping[str, Any]) -> tuple[str, ...]:
    """What recomputed layers keep beside their input: the section's ``save``, or TRL's ``selective``, which is attention."""
    if section is not None and section.save:
        return tuple(section.save)
    return ("attention",) if settings(train).get("selective") else ()


def reason(section: ActivationCheckpointing, layers: int) -> str:
    """What the section makes of a model with ``layers`` decoder layers, in words."""
    count = len(recomputed_layers(section.ratio, layers))
    kept = f"; of them {', '.join(section.save)} kept" if section.save else ""
    return f"{SECTION}.ratio {section.ratio:g}: {count} of {layers} layers{kept}"


def find_problems(
    section: ActivationCheckpointing, train: Mapping[str, Any], accelerate: Mapping[str, Any], file: str
) -> Iterator[Found]:
    """Everything that is wrong with the section beside ``train`` and the accelerate configuration in ``file``."""
    if not section.model_fields_set & {"ratio", "save"}:
        fix = f"write {SECTION}.ratio=1 for all layers, or {SECTION}.save=[attention]"
        yield (SECTION,), "says neither ratio nor save", fix
    saved, save = section.save or [], (SECTION, "save")
    if len(set(saved)) < len(saved):
        yield save, f"[{', '.join(saved)}] names one twice", "name each once"
    if {"matmul", "every_second_matmul"} <= set(saved):
        yield save, "matmul keeps every product, every_second_matmul each second one", "keep one of the two"
    if saved and section.ratio == 0:
        yield save, "given, and ratio 0 recomputes nothing that could be kept", "leave one of the two out"
    if "attention" in saved and (train.get("model_init_kwargs") or {}).get("attn_implementation") == "eager":
        text = "attention, and eager attention is no single operation whose result could be kept"
        yield save, text, "use attn_implementation: sdpa or flash_attention_2, or leave attention out"
    yield from _twice(section, train, accelerate, file)


def _twice(
    section: ActivationCheckpointing, train: Mapping[str, Any], accelerate: Mapping[str, Any], file: str
) -> Iterator[Found]:
    """What else says which layers are recomputed, or what of them is kept: each is a second home."""
    key_of_section = "ratio" if "ratio" in section.model_fields_set or not section.save else "save"
    own, fix = f"{SECTION}.{key_of_section}", "keep one of the two"
    for key in ALIASES:
        if train.get(key) is not None:
            yield ("train", key), f"{train[key]}, and {own} says which layers are recomputed: that is said twice", fix
        named = ("train", f"{key}_kwargs")
        words = given if isinstance(given := train.get(named[1]), dict) else {}
        if "every_n_layers" in words:
            yield (*named, "every_n_layers"), f"{own} says which layers are recomputed: that is said twice", fix
        if section.save and words.get("selective"):
            yield (*named, "selective"), f"TRL's name for {SECTION}.save=[attention], which is given too", fix
        if section.save and words.get("use_reentrant"):
            text = f"reentrant checkpointing keeps no results, and {SECTION}.save asks for some"
            yield (*named, "use_reentrant"), text, "leave it out"
    if acc.recomputes(accelerate):
        text = f"given, and {file} has fsdp_activation_checkpointing: true, for all layers: that is said twice"
        what = "accelerate.fsdp_config.fsdp_activation_checkpointing=false, or leave the section out"
        yield (SECTION, key_of_section), text, what
