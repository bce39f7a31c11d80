"""Whether the files of a model hold every weight of its architecture, by their headers alone: the check before every loading.

transformers draws random values for a weight that no file holds, with a warning, and vLLM serves such a model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertune.console import say
from clustertune.errors import Problem, UserError, raise_if
from clustertune.manifest import find_records, read_json
from clustertune.tensorfile import FLOATS, Tensor, TensorHeader, read_headers
from clustertune.training.missing_weights import layer_of

if TYPE_CHECKING:
    from clustertune.resolve.resolved import Resolved
    from clustertune.training.loading_sources import Sources

SHOWN = 5
"""Tensors that the errors name."""
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth")
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys of ``config.json`` for layers that predict further tokens, of which a model has one or the other."""
_HALVES = {"BF16": "F16", "F16": "BF16"}
"""Types of one size: a header that names the other one passes every comparison of lengths."""


def find_shards(folder: Path) -> tuple[list[Path], dict[str, str], dict[str, Any]]:
    """The weight files, the index's weight map and its metadata; transformers prefers the single file as well."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE], {}, {}
    path = folder / INDEX
    if not path.exists():
        raise UserError(_no_weights(folder))
    index = read_json(path)
    weights, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(weights, dict) or not weights or not all(isinstance(v, str) for v in weights.values()):
        raise UserError("not a map from tensors to files", file=str(path), key="weight_map")
    names = sorted(set(weights.values()))
    outside = [name for name in names if Path(name).name != name or name in {"", ".", ".."}]
    if outside:
        raise UserError(f"names a file outside the folder: {outside[0]!r}", file=str(path), key="weight_map")
    return [folder / name for name in names], weights, metadata if isinstance(metadata, dict) else {}


def _no_weights(folder: Path) -> Problem:
    """What a folder has in the place of safetensors files."""
    if pickled := pickles(folder):
        text = f"holds pickled weights only ({pickled[0]}), which are not loaded: a pickle can run code"
        return Problem(text, file=str(folder), fix="save the model once with save_pretrained, which writes safetensors")
    if packed := sorted(p.name for p in folder.glob("*.gguf")):
        text = f"holds GGUF weights only ({packed[0]}), which are made for llama.cpp and are not trained on"
        return Problem(text, file=str(folder), fix="take the safetensors of the model that this file was made from")
    parts = sorted(p.name for p in folder.glob("model-*-of-*.safetensors"))
    if parts:
        text = f"no model here: {INDEX} is missing, which says what {parts[0]} and the other files hold"
        return Problem(text, file=str(folder), fix=f"fetch {INDEX} from where the weights are from")
    text = f"no model here: neither {SINGLE} nor {INDEX}"
    fix = "give a model with safetensors weights: hf download OWNER/NAME --local-dir FOLDER"
    return Problem(text, file=str(folder), fix=fix)


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


def check(source: str, revision: str | None, resolved: Resolved) -> None:
    """Raise UserError where the base's weights are on this machine and are not those of its architecture.

    Weights that are still at the Hub, or not in safetensors files, are looked at while the ranks load them.
    """
    from clustertune.training import base_model

    folder = base_model.folder(source, revision)
    if folder is None or resolved.recipe.model.weights == "random":
        return
    if find_spec("transformers") is None:  # submit on a login node without the stack
        say(f"{folder}: the weights are not compared with config.json here, as transformers is not installed; prepare does it")
        return
    held = is_named(folder)
    if Path(source).is_dir() and not held and pickles(folder):
        return
    if Path(source).is_dir() or (held and all(path.exists() for path in find_shards(folder)[0])):
        raise_if(check_tensors(folder))
        say_unproved(folder)


def say_unproved(folder: Path) -> None:
    """Say that the content of weights is compared with nothing, where no digest of them is known."""
    if names := unproved_files(folder):
        say(unproved(folder, names))


def unproved_files(folder: Path) -> list[str]:
    """The names of a folder's weights of which no digest is known."""
    try:
        proved = {path.absolute() for path in find_records(folder)[1]}
    except UserError:  # an unreadable manifest, which whatever reads the files refuses
        return []
    return [path.name for path in sorted(folder.glob("*.safetensors")) if path.absolute() not in proved]


def unproved(folder: Path, names: Sequence[str]) -> str:
    """The sentence on weight files of which no digest is known."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    known = f"no digest of {names[0]}{more} is known (MANIFEST.json, Hub's cache)"
    return f"{folder}: {known}, so contents are not compared: damage would not be noticed"


def is_named(folder: Path) -> bool:
    """Whether a folder has what names its weights: the one safetensors file, or the index of several."""
    return any(os.path.lexists(folder / name) for name in (SINGLE, INDEX))


def pickles(folder: Path) -> list[str]:
    """The names of a folder's pickled weights."""
    return sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))


def check_tensors(folder: Path) -> list[Problem]:
    """Every tensor that the architecture of ``config.json`` has and no file holds, or holds in another shape or type.

    The names of the files go through transformers' own renaming; the model is made on the ``meta`` device. Of quantised weights
    only the names are compared. An architecture that the installed transformers does not have as a causal language model is not
    looked at. Raises UserError for files that are not whole.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from clustertune.training.loading_sources import Unfollowed, find, find_packed, survey

    files, named, _ = find_shards(folder)
    stored = read_json(folder / CONFIG)
    tensors = survey(files, named or None, packed=bool(stored.get("quantization_config")))
    if stored.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return []
    try:
        config, model = _without_values(folder)
    # An architecture that the installed transformers does not know, or values that its classes refuse.
    except Exception as error:
        text = " ".join(str(error).split())
        return [Problem(f"transformers does not accept it: {text}", file=str(folder / CONFIG))]
    tensors = {n: t for n, t in tensors.items() if not named or n in named}  # vLLM loads what the index names
    try:
        if getattr(config, "quantization_config", None):
            find_packed(model, tensors)
            return []
        raise_if(_without_scales(tensors, model.state_dict()))
        sources = find(model, tensors)
        return [*_surplus_layers(sources, config, folder), *_other_types(tensors, config, folder)]
    except UserError as error:
        more = len(error.problems) - SHOWN
        return error.problems[:SHOWN] + ([Problem(f"{more} more tensors", file=str(folder))] if more > 0 else [])
    except Unfollowed:
        return []  # transformers' own loading, or vLLM's, says what is wrong


def _without_values(folder: Path) -> tuple[Any, Any]:
    """transformers' configuration and the model on the ``meta`` device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _without_scales(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> list[Problem]:
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


def _surplus_layers(sources: Sources, config: Any, folder: Path) -> list[Problem]:
    """Layers of the files behind the last one that ``config.json`` names: every loader leaves them out without an error.

    Layers that predict further tokens stand behind the last one as well (DeepSeek-V3, GLM-4.5), and nothing here uses them. A
    list that the model's layers are not in is of another part, such as a draft model's.
    """
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return []
    stored = read_json(folder / CONFIG)
    further = max((stored[key] for key in FURTHER if isinstance(stored.get(key), int)), default=0)
    names = (original for source in sources.by_name.values() for _, original, _ in source.parts)
    lists = {name.split(f".{number}.")[0] for name in names if (number := layer_of(name)) is not None}
    behind = {n for t in sources.extra if (n := layer_of(t.name)) is not None and t.name.split(f".{n}.")[0] in lists}
    if not (surplus := sorted(number for number in behind if number >= layers + further)):
        return []
    text = f"{layers}, and the files hold layers up to number {surplus[-1]}: {len(surplus)} of them would not be used"
    fix = "take the config.json of these weights"
    return [Problem(text, file=str(folder / CONFIG), key="num_hidden_layers", fix=fix)]


def _other_types(tensors: Mapping[str, Tensor], config: Any, folder: Path) -> list[Problem]:
    """Tensors that a header calls float16 where ``config.json`` says bfloat16, or the other way round: the bytes would be read
    as other numbers. Only of files whose content no digest proves."""
    said = str(getattr(config, "dtype", None)).removeprefix("torch.")
    kind = next((kind for kind, name in FLOATS.items() if name == said and kind in _HALVES), None)
    if kind is None:
        return []
    proved = {path.absolute() for path in find_records(folder)[1]}
    other = [one for one in tensors.values() if one.dtype == _HALVES[kind] and one.file.absolute() not in proved]
    if not other:
        return []
    count = "all tensors are" if len(other) == len(tensors) else f"{other[0].name} is" if len(other) == 1 else ""
    count = count or f"{len(other)} of {len(tensors)} tensors are, such as {other[0].name},"
    wide = FLOATS[_HALVES[kind]]
    text = f"{count} {wide} by the file's header, and {CONFIG} says {said}: bytes of one would be read as numbers of the other"
    fix = f"fetch the file again; if the weights are {wide}, write that as torch_dtype into {CONFIG}"
    return [Problem(text, file=str(other[0].file), key="dtype", fix=fix)]


# --- what transformers reported -------------------------------------------------------------------------------------------


def reported(source: str, report: Any) -> list[Problem]:
    """What transformers' report of a loading (``LoadStateDictInfo``) says of weights that would be random.

    ``source``: the folder or Hub id that was loaded.
    """
    kinds = {
        "missing": sorted(report.missing_keys),
        "of another shape than the configuration says": sorted(str(entry[0]) for entry in report.mismatched_keys),
        "not converted": sorted(map(str, report.conversion_errors)),
    }
    problems = []
    for what, names in kinds.items():
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            text = f"{len(names)} tensors are {what}: {', '.join(names[:SHOWN])}{more}"
            problems.append(Problem(text, file=source, fix="copy or merge the model again"))
    return problems
