"""The base model's folder, read without loading a weight: headers, index, config, and what must be refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError, collect_problems, raise_if
from clustertune.export.companions import read_json
from clustertune.manifest import DigestComparison
from clustertune.tensorfile import FLOATS, Tensor, TensorHeader, read_headers

SHOWN = 5
"""Tensors that the errors name."""
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONV1D_MODELS = {"clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"}
"""``model_type`` of the transformers models whose linear layers keep the weight transposed (Conv1D)."""
EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|lm_head|embed_out)\.weight$")


@dataclass(frozen=True)
class Base:
    """A base model: its tensors in the order of their bytes, shard after shard."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    headers: dict[Path, TensorHeader]
    index_metadata: dict[str, Any] = field(default_factory=dict)
    unrecorded: list[str] = field(default_factory=list)
    """Names of the weight files that no digest is known of."""

    @property
    def tied(self) -> bool:
        """Whether the output head shares the input embedding's tensor."""
        stated = self.config.get("tie_word_embeddings")
        if stated is None and isinstance(self.config.get("text_config"), dict):
            stated = self.config["text_config"].get("tie_word_embeddings")
        if stated is None:
            return not any(re.search(r"(^|\.)(lm_head|embed_out)\.weight$", name) for name in self.tensors)
        return bool(stated)

    def identity(self) -> dict[str, list[Any]]:
        """:func:`identity` of the shards: with the headers, what tells one base from another without reading it."""
        return identity(self.headers)


def identity(files: Iterable[Path]) -> dict[str, list[Any]]:
    """By name: bytes and modification time. Raises OSError."""
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(files)}


def find_shards(folder: Path) -> tuple[list[Path], dict[str, str], dict[str, Any]]:
    """The weight files, the index's weight map and its metadata; transformers prefers the single file as well."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE], {}, {}
    path = folder / INDEX
    if not path.exists():
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        if pickles:
            raise UserError(
                f"holds pickled weights only ({pickles[0]}), which are not loaded: a pickle can run code",
                file=str(folder),
                fix="save the model once with save_pretrained, which writes safetensors",
            )
        fix = "give a model with safetensors weights"
        raise UserError(f"no model here: neither {SINGLE} nor {INDEX}", file=str(folder), fix=fix)
    index = read_json(path)
    weights, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(weights, dict) or not weights or not all(isinstance(v, str) for v in weights.values()):
        raise UserError("not a map from tensors to files", file=str(path), key="weight_map")
    names = sorted(set(weights.values()))
    outside = [name for name in names if Path(name).name != name or name in {"", ".", ".."}]
    if outside:
        raise UserError(f"names a file outside the folder: {outside[0]!r}", file=str(path), key="weight_map")
    return [folder / name for name in names], weights, metadata if isinstance(metadata, dict) else {}


def read_weights(folder: Path) -> tuple[dict[str, Tensor], dict[Path, TensorHeader], dict[str, Any]]:
    """The tensors by name, each file's header, and the index's metadata. Raises UserError for files that are not whole."""
    shards, weights, metadata = find_shards(folder)
    headers = read_headers(shards, weights)
    kinds = {path: header.metadata.get("format", "pt") for path, header in headers.items()}
    problems = [
        Problem(f"weights in the layout of {kind!r}, not of PyTorch", file=str(path))
        for path, kind in kinds.items()
        if kind != "pt"
    ]
    tensors = {tensor.name: tensor for header in headers.values() for tensor in header.tensors}
    if not tensors:
        problems.append(Problem("contains no tensors", file=str(folder)))
    raise_if(problems)
    return tensors, headers, metadata


def check_tensors(folder: Path) -> list[Problem]:
    """Every tensor that the architecture of ``config.json`` has and no file holds, or holds in another shape: vLLM 0.30.0
    serves a model without a layer's ``q_proj`` or an untied ``lm_head``, and answers differently.

    The names of the files go through transformers' own renaming; the model is made on the ``meta`` device. What is quantised,
    and an architecture that the installed transformers does not have as a causal language model, is not looked at. Raises
    UserError for files that are not whole.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from clustertune.training.loading_sources import Unfollowed, find, survey

    if read_json(folder / "config.json").get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return []
    try:
        config: Any = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        if getattr(config, "quantization_config", None):
            return []
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    # An architecture that the installed transformers does not know, or values that its classes refuse.
    except Exception as error:
        text = " ".join(str(error).split())
        return [Problem(f"transformers does not accept it: {text}", file=str(folder / "config.json"))]
    files, named, _ = find_shards(folder)
    tensors = survey(files, named or None)  # vLLM loads what the index names, transformers all that the files hold
    try:
        sources = find(model, {n: t for n, t in tensors.items() if not named or n in named})
        return [*_surplus_layers(sources.extra, config, folder), *_without_scales(tensors, model.state_dict())]
    except UserError as error:
        more = len(error.problems) - SHOWN
        return error.problems[:SHOWN] + ([Problem(f"{more} more tensors", file=str(folder))] if more > 0 else [])
    except Unfollowed:
        pass  # transformers' own loading, or vLLM's, says what is wrong
    return []


def _without_scales(tensors: Mapping[str, Any], state: Mapping[str, Any]) -> list[Problem]:
    """Parameters stored in eight bits or as integers, of a model whose ``config.json`` names no quantisation: transformers and
    vLLM read their numbers as they are, without the scales that belong to them."""
    packed = [
        tensor
        for name, tensor in tensors.items()
        if name in state and state[name].is_floating_point() and tensor.dtype not in (*FLOATS, "F64")
    ]
    fix = "take the config.json of these weights, or the weights in bfloat16"
    return [
        Problem(f"{one.name} is stored in {one.dtype}, and {CONFIG} names no quantization_config", file=str(one.file), fix=fix)
        for one in packed[:SHOWN]
    ]


def _surplus_layers(extra: list[Tensor], config: Any, folder: Path) -> list[Problem]:
    """Layers of the files behind the last one that ``config.json`` names: every loader leaves them out without an error."""
    layers = getattr(config, "num_hidden_layers", None)
    numbers = {int(match[1]) for tensor in extra if (match := re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", tensor.name))}
    if not isinstance(layers, int) or not (surplus := sorted(number for number in numbers if number >= layers)):
        return []
    text = f"{layers}, and the files hold layers up to number {surplus[-1]}: {len(surplus)} of them would not be used"
    fix = "take the config.json of these weights"
    return [Problem(text, file=str(folder / "config.json"), key="num_hidden_layers", fix=fix)]


def _config_problems(config: dict[str, Any], path: Path) -> list[Problem]:
    problems = []
    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method", "?") if isinstance(method, dict) else method
        problems.append(
            Problem(
                f"the base is quantised ({method}); its weights cannot take a LoRA update exactly",
                file=str(path),
                key="quantization_config",
                fix="merge into the unquantised base",
            )
        )
    if config.get("model_type") in CONV1D_MODELS:
        problems.append(
            Problem(
                f"{config['model_type']} keeps weights transposed (Conv1D): not supported", file=str(path), key="model_type"
            )
        )
    return problems


def read_base(folder: Path) -> Base:
    """Read a base model's headers and config. Raises UserError with every problem found."""
    if not folder.is_dir():
        raise UserError("no such folder", file=str(folder))
    problems: list[Problem] = []
    config: dict[str, Any] = {}
    recorded = frozenset[Path]()
    with collect_problems(problems):
        config = read_json(folder / "config.json")
        problems += _config_problems(config, folder / "config.json")
    try:
        comparison = DigestComparison(folder)
        recorded, problems = comparison.recorded, problems + comparison.problems
        tensors, headers, metadata = read_weights(folder)
    except UserError as error:
        problems += [p for p in error.problems if p not in problems]
    raise_if(problems)
    unrecorded = [path.name for path in headers if path.absolute() not in recorded]
    return Base(folder, config, tensors, headers, metadata, unrecorded)
