"""``model.json``: the few keys of a model's ``config.json`` from which it is planned, scaled down, and checked against."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from clustertune.config.load import did_you_mean
from clustertune.config.modeling import config_fields, model_types, modeling_classes
from clustertune.config.yamlfile import read_text
from clustertune.errors import Problem, UserError

FILE = "model.json"
INTEGERS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
"""What planning, tiny runs and adapter checks cannot do without."""
_OLD_KEYS = {"rope_theta", "rope_scaling", "torch_dtype", "_name_or_path", "auto_map", "quantization_config"}
"""Keys of published ``config.json`` files that are not fields of the installed configuration class."""
_ROPE_LISTS = ("short_factor", "long_factor", "mrope_section")
_MAX_INTEGER = 10**9

TINY_LAYERS = 2
TINY_HIDDEN = 128
TINY_HEADS = 4
TINY_VOCABULARY = 4096
TINY_POSITIONS = 2048
TINY_EXPERTS = 4


def read_architecture(path: Path, shown: str) -> dict[str, Any]:
    """Read and check a ``model.json``. Raises UserError with every problem found."""
    text = read_text(path, shown)
    try:
        body = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise UserError(Problem("not valid JSON: nested too deep", file=shown)) from None
    except json.JSONDecodeError as error:
        raise UserError(Problem(f"not valid JSON: {error.msg}", file=f"{shown}:{error.lineno}")) from None
    except ValueError as error:
        raise UserError(Problem(f"not valid JSON: {error}", file=shown)) from None
    if not isinstance(body, dict) or not body:
        raise UserError(Problem("must hold the model's config.json keys", file=shown, fix='write {"model_type": "llama", ...}'))
    problems = find_problems(body, shown)
    if problems:
        raise UserError(problems)
    return body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands twice")
    return result


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def find_problems(body: dict[str, Any], shown: str) -> list[Problem]:
    """Everything that is wrong with an architecture."""
    problems: list[Problem] = []

    def add(key: str, message: str, fix: str | None = None) -> None:
        problems.append(Problem(message, file=shown, key=key, fix=fix))

    kind = body.get("model_type")
    known = model_types()
    if not isinstance(kind, str) or kind not in known:
        add(
            "model_type",
            "missing" if kind is None else f"{kind!r} is not a model type of the installed transformers",
            did_you_mean(str(kind), known) if kind is not None else "as in the model's config.json, such as llama",
        )
        return problems
    names = config_fields(kind)
    for key in body:
        if key not in names | _OLD_KEYS:
            add(key, f"{kind} has no such key", did_you_mean(key, names))
    if body.get("auto_map") is not None:
        add("auto_map", "code from a model repository is never run", "leave it out")
    if body.get("quantization_config") is not None:
        add("quantization_config", "the architecture is given unquantized", "leave it out")
    for key in INTEGERS:
        if key in names and key not in body:
            add(key, "missing", "take it from the model's config.json")
    for key, value in body.items():
        if key in names and (key in INTEGERS or key.startswith("num_") or key.endswith("_size")):
            optional = value is None and key not in INTEGERS
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_INTEGER):
                add(key, f"{_short(value)} is not a whole number from 1 to {_MAX_INTEGER}")
    problems += _check_rest(body, shown)
    if not problems:
        problems += _check_heads(body, shown)
    return problems


def _check_rest(body: dict[str, Any], shown: str) -> list[Problem]:
    problems = []
    kind = str(body["model_type"])
    causal = sorted(name for name in modeling_classes(kind) if name.endswith("ForCausalLM"))
    given = body.get("architectures")
    if not isinstance(given, list) or len(given) != 1 or given[0] not in causal:
        problems.append(
            Problem(
                "missing" if given is None else f"{_short(given)} is not one causal language model class of {kind}",
                file=shown,
                key="architectures",
                fix=f"write {json.dumps(causal[:1])}" if causal else None,
            )
        )
    for key in ("rms_norm_eps", "layer_norm_eps", "rope_theta", "initializer_range", "head_dim"):
        value = body.get(key)
        if value is not None and not _positive(value):
            problems.append(Problem(f"{_short(value)} is not a positive number", file=shown, key=key))
    if not isinstance(body.get("tie_word_embeddings", False), bool):
        problems.append(Problem("must be true or false", file=shown, key="tie_word_embeddings"))
    vocabulary = body.get("vocab_size")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = body.get(key)
        for value in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if not whole or (isinstance(vocabulary, int) and value >= vocabulary):
                problems.append(Problem(f"{_short(value)} is not a token of a vocabulary of {vocabulary}", file=shown, key=key))
    for key in ("rope_parameters", "rope_scaling"):
        if body.get(key) is not None:
            problems += _check_rope(body[key], shown, key)
    return problems


def _check_rope(rope: object, shown: str, key: str) -> list[Problem]:
    """Positive numbers, but for the kind, longrope's lists, and models with one set of values per kind of layer."""
    if not isinstance(rope, dict):
        return [Problem("must hold rope_type and its values", file=shown, key=key)]
    problems = []
    for name, value in rope.items():
        if isinstance(value, dict) and name.endswith("_attention"):
            problems += _check_rope(value, shown, f"{key}.{name}")
        elif name in ("rope_type", "type"):
            if not isinstance(value, str):
                problems.append(Problem(f"{_short(value)} is not a word", file=shown, key=f"{key}.{name}"))
        elif not all(map(_positive, value if isinstance(value, list) and name in _ROPE_LISTS else [value])):
            problems.append(Problem(f"{_short(value)} is not a positive number", file=shown, key=f"{key}.{name}"))
    return problems


def _check_heads(body: dict[str, Any], shown: str) -> list[Problem]:
    hidden, heads = body.get("hidden_size"), body.get("num_attention_heads")
    problems = []
    if hidden and heads and not body.get("head_dim") and hidden % heads:
        problems.append(Problem(f"{hidden} is no multiple of num_attention_heads {heads}", file=shown, key="hidden_size"))
    groups = body.get("num_key_value_heads")
    if heads and groups and heads % groups:
        problems.append(
            Problem(f"{heads} is no multiple of num_key_value_heads {groups}", file=shown, key="num_attention_heads")
        )
    return problems


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def scale_down(body: dict[str, Any]) -> dict[str, Any]:
    """The same model class with 2 layers, a hidden size of 128 and a vocabulary of 4096: about a million parameters.

    Heads per key-value head keep their ratio up to 4, RoPE scaling its kind and factor, mixtures of experts stay mixtures.
    """
    small = dict(body)
    heads = min(int(body["num_attention_heads"]), TINY_HEADS)
    groups = body.get("num_key_value_heads")
    if groups:
        ratio = max(1, int(body["num_attention_heads"]) // int(groups))
        small["num_key_value_heads"] = max(1, heads // min(ratio, heads))
    small |= {
        "hidden_size": TINY_HIDDEN,
        "num_hidden_layers": min(int(body["num_hidden_layers"]), TINY_LAYERS),
        "num_attention_heads": heads,
        "vocab_size": min(int(body["vocab_size"]), TINY_VOCABULARY),
        "max_position_embeddings": min(int(body["max_position_embeddings"]), TINY_POSITIONS),
    }
    if body.get("head_dim"):
        small["head_dim"] = TINY_HIDDEN // heads
    for key in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if body.get(key):
            small[key] = min(int(body[key]), 2 * TINY_HIDDEN)
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if body.get(key):
            small[key] = min(int(body[key]), TINY_EXPERTS)
    if body.get("num_experts_per_tok"):
        small["num_experts_per_tok"] = min(int(body["num_experts_per_tok"]), 2)
    if isinstance(body.get("layer_types"), list):
        small["layer_types"] = body["layer_types"][: small["num_hidden_layers"]]
    share = small["max_position_embeddings"] / int(body["max_position_embeddings"])
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(body.get(key), dict):
            small[key] = _scale_rope(body[key], share)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # The tokenizer of a tiny run is trained locally and sets its own.
        small.pop(key, None)
    return small


def _scale_rope(rope: dict[str, Any], share: float) -> dict[str, Any]:
    result: dict[str, Any] = {
        name: _scale_rope(value, share) if isinstance(value, dict) else value for name, value in rope.items()
    }
    if result.get("original_max_position_embeddings"):
        result["original_max_position_embeddings"] = max(1, int(result["original_max_position_embeddings"] * share))
    return result


def summary(body: dict[str, Any]) -> str:
    """The architecture in a few words."""
    return (
        f"{body['architectures'][0]}, {body['num_hidden_layers']} layers, hidden {body['hidden_size']}, "
        f"vocabulary {body['vocab_size']}"
    )
