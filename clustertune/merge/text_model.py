"""The text model of a checkpoint with pictures or sound around it, saved alone: its tensors under its own names, unchanged.

The project trains text models. ``Gemma3ForConditionalGeneration`` and its like hold one, and LoRA's names would match modules
of the parts around it too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustertune.errors import UserError, raise_if, storage_error
from clustertune.export import companions
from clustertune.manifest import DigestComparison, fsync_path, read_json, read_whole, seal
from clustertune.resolve.models import PLAIN_TEXT, plain_rope
from clustertune.tensorfile import OpenFiles, Tensor, build_header
from clustertune.training.base_weights import CONFIG, INDEX, SINGLE, read_weights

KIND = "model"
_INSIDE = (
    (re.compile(r"^(?:model\.)?(?:language_model|text_model)\.model\."), "model."),
    (re.compile(r"^model\.(?:language_model|text_model)\."), "model."),
    (re.compile(r"^(?:language_model|text_model)\.(?=lm_head\.)"), ""),
)
"""How checkpoints name the text model's tensors, of transformers 4 and 5; its own name for the same place. Names that none of
these fit stay, and what the text model has no place for is left out."""
_PIECE = 64 << 20


def save_text_model(source: Path, out: Path) -> dict[str, Any]:
    """Write the text model of the checkpoint ``source`` to ``out``, with its tokenizer: whole, or without a manifest.

    Returns ``{"out", "architecture", "tensors", "left_out", "bytes"}``. Raises UserError where ``source`` is none, a tensor of
    the text model is missing, or ``out`` is not free.
    """
    if not source.is_dir():
        raise UserError("no such folder", file=str(source), fix="name the folder of a model, with its config.json")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError("exists already: nothing is overwritten", file=str(out), fix="give another name, or remove it")
    tensors, _, _ = read_weights(source)
    config, model = _text_config(source)
    chosen = _chosen(model, tensors, source)
    names = {**companions.matching(source, (*companions.TOKENIZER, *companions.CHAT, *companions.TEXTS, companions.GENERATION))}
    raise_if(companions.problems_of(names))
    try:
        out.mkdir(parents=True, exist_ok=True)
        with DigestComparison(source) as compared:
            size = _write(chosen, out)
            raise_if(compared.finish())
        for name, path in names.items():
            (out / name).write_bytes(read_whole(path))
        (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        kind = config["architectures"][0]
        seal(out, KIND, {"text_model_of": str(read_json(source / CONFIG).get("model_type")), "architecture": kind})
    except OSError as error:
        raise storage_error(error, "the text model was not written", out) from None
    return {
        "out": str(out), "architecture": kind, "tensors": len(chosen), "left_out": len(tensors) - len(chosen), "bytes": size,
    }  # fmt: skip


def _text_config(source: Path) -> tuple[dict[str, Any], Any]:
    """The text model's ``config.json``, and the model on the ``meta`` device. Raises UserError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    shown = str(source / CONFIG)
    read_json(source / CONFIG)
    try:
        around: Any = AutoConfig.from_pretrained(str(source), trust_remote_code=False)
        text = around.get_text_config(decoder=True)
    # Whatever a foreign configuration makes a library raise.
    except Exception as error:
        raise UserError(f"transformers does not accept it: {' '.join(str(error).split())}", file=shown) from error
    if text is around:
        fix = "train on this folder"
        raise UserError(f"{around.model_type} is a text model already", file=shown, key="model_type", fix=fix)
    if getattr(around, "quantization_config", None) or getattr(text, "quantization_config", None):
        fix = "take the weights of this model that are not quantised"
        raise UserError("the weights are quantised", file=shown, key="quantization_config", fix=fix)
    kind = PLAIN_TEXT.get(text.model_type, text.model_type)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        can = ", ".join(sorted({*PLAIN_TEXT, "gemma3_text", "llama4_text", "mistral"}))
        text_of = f"its text model is a {text.model_type}, of which the pinned transformers has no causal language model"
        raise UserError(text_of, file=shown, key="text_config", fix=f"text models are saved of {can} and their like")
    values = {key: value for key, value in text.to_dict().items() if key not in ("model_type", "architectures")}
    known = AutoConfig.for_model(kind).to_dict()
    values = plain_rope(
        {key: value for key, value in values.items() if key in known or key.startswith("rope")}, text.model_type
    )
    values["tie_word_embeddings"] = bool(around.tie_word_embeddings)
    values["dtype"] = around.dtype or text.dtype
    own = AutoConfig.for_model(kind, **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(own)
    own.architectures = [type(model).__name__]
    body: dict[str, Any] = json.loads(own.to_json_string())
    return body, model


def _chosen(model: Any, tensors: Mapping[str, Tensor], source: Path) -> list[tuple[Tensor, str]]:
    """The tensors of the text model, in the order of their bytes, each with its own name there. Raises UserError."""
    from clustertune.training.loading_sources import Unfollowed, find

    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = next((new + pattern.sub("", name) for pattern, new in _INSIDE if pattern.match(name)), name)
        named[own] = replace(tensor, name=own)
    try:
        sources = find(model, named).by_name.values()
    except Unfollowed as error:
        raise UserError(str(error), file=str(source)) from error
    used = {original for one in sources for _, original, _ in one.parts}
    return sorted(((named[own], own) for own in used), key=lambda pair: (pair[0].file.name, pair[0].offset))


def _write(chosen: list[tuple[Tensor, str]], out: Path) -> int:
    """Copy the tensors, a file for each of the source's. Returns the bytes of all."""
    files: dict[Path, list[Tensor]] = {}
    for tensor, _ in chosen:
        files.setdefault(tensor.file, []).append(tensor)
    several = len(files) > 1
    weights: dict[str, str] = {}
    reader = OpenFiles()
    buffer = memoryview(bytearray(_PIECE))
    try:
        for number, (_, held) in enumerate(sorted(files.items()), start=1):
            name = f"model-{number:05}-of-{len(files):05}.safetensors" if several else SINGLE
            weights |= dict.fromkeys((tensor.name for tensor in held), name)
            with (out / name).open("xb") as target:
                target.write(build_header(held))
                for tensor in held:
                    for begin in range(0, tensor.size, _PIECE):
                        piece = buffer[: min(_PIECE, tensor.size - begin)]
                        reader.read(tensor.file, piece, tensor.offset + begin)
                        target.write(piece)
            fsync_path(out / name)
    finally:
        reader.close()
    total = sum(tensor.size for tensor, _ in chosen)
    if several:
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return total
