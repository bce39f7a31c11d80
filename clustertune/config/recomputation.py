"""``activation_checkpointing``: which decoder layers are recomputed and what of them is kept; said once, in one place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from clustertune.config import accelerate_file as acc
from clustertune.config.checks import Place
from clustertune.config.distribution import recomputed_layers
from clustertune.config.schema import ActivationCheckpointing
from clustertune.errors import Problem

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
    section: ActivationCheckpointing, train: Mapping[str, Any], accelerate: Mapping[str, Any], file: str, place: Place
) -> list[Problem]:
    """Everything that is wrong with the section beside ``train`` and the accelerate configuration in ``file``."""
    return [*_itself(section, train, place), *_twice(section, train, accelerate, file, place)]


def _itself(section: ActivationCheckpointing, train: Mapping[str, Any], place: Place) -> Iterator[Problem]:
    """What ``save`` cannot be."""

    def problem(key: str, text: str, fix: str) -> Problem:
        return Problem(text, file=place((SECTION, key)), key=f"{SECTION}.{key}", fix=fix)

    if not section.model_fields_set & {"ratio", "save"}:
        fix = f"write {SECTION}.ratio=1 for all layers, or {SECTION}.save=[attention]"
        yield Problem("says neither ratio nor save", file=place((SECTION,)), key=SECTION, fix=fix)
    saved = section.save or []
    if len(set(saved)) < len(saved):
        yield problem("save", f"[{', '.join(saved)}] names one twice", "name each once")
    if {"matmul", "every_second_matmul"} <= set(saved):
        yield problem("save", "matmul keeps every product, every_second_matmul each second one", "keep one of the two")
    if saved and section.ratio == 0:
        yield problem("save", "given, and ratio 0 recomputes nothing that could be kept", "leave one of the two out")
    attention = (train.get("model_init_kwargs") or {}).get("attn_implementation")
    if "attention" in saved and attention == "eager":
        text = "attention, and eager attention is no single operation whose result could be kept"
        yield problem("save", text, "use attn_implementation: sdpa or flash_attention_2, or leave attention out")


def _twice(
    section: ActivationCheckpointing, train: Mapping[str, Any], accelerate: Mapping[str, Any], file: str, place: Place
) -> Iterator[Problem]:
    """What else says which layers are recomputed, or what of them is kept: each is a second home."""
    own = f"{SECTION}.{'ratio' if 'ratio' in section.model_fields_set or not section.save else 'save'}"
    fix = "keep one of the two"
    for key in ALIASES:
        if train.get(key) is not None:
            text = f"{train[key]}, and {own} says which layers are recomputed: that is said twice"
            yield Problem(text, file=place(("train", key)), key=f"train.{key}", fix=fix)
        named = f"{key}_kwargs"
        given = train.get(named)
        words = given if isinstance(given, dict) else {}
        where = place(("train", named))
        if "every_n_layers" in words:
            text = f"{own} says which layers are recomputed: that is said twice"
            yield Problem(text, file=where, key=f"train.{named}.every_n_layers", fix=fix)
        if section.save and words.get("selective"):
            text = f"TRL's name for {SECTION}.save=[attention], which is given too"
            yield Problem(text, file=where, key=f"train.{named}.selective", fix=fix)
        if section.save and words.get("use_reentrant"):
            text = f"reentrant checkpointing keeps no results, and {SECTION}.save asks for some"
            yield Problem(text, file=where, key=f"train.{named}.use_reentrant", fix="leave it out")
    if acc.recomputes(accelerate):
        text = f"given, and {file} has fsdp_activation_checkpointing: true, for all layers: that is said twice"
        what = "accelerate.fsdp_config.fsdp_activation_checkpointing=false, or leave the section out"
        yield Problem(text, file=place(tuple(own.split("."))), key=own, fix=what)
