"""``model.json``: the few keys of a model's ``config.json`` from which it is planned, scaled down, and checked against."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from clustertune.config.load import did_you_mean
from clustertune.config.modeling import (
    config_aliases,
    config_defaults,
    config_fields,
    config_types,
    model_types,
    modeling_classes,
)
from clustertune.config.parameters import count
from clustertune.config.values import Values
from clustertune.config.yamlfile import read_text
from clustertune.errors import Problem, UserError

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
TINY_HEAD = TINY_HIDDEN // TINY_HEADS
_TINY_AT_MOST = {
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 2 * TINY_HIDDEN),
    **dict.fromkeys(("intermediate_size_mlp", "n_inner", "ffn_hidden_size"), 2 * TINY_HIDDEN),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), TINY_EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group", "decoder_sparse_step", "interleave_moe_layer_step"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 2 * TINY_HEAD),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim"), TINY_HEAD),
    "qk_rope_head_dim": TINY_HEAD // 2,
    "first_k_dense_replace": 1,
    "linear_num_key_heads": TINY_HEADS // 2,
    "linear_num_value_heads": TINY_HEADS,
}
"""What the sizes of a scaled-down model are at most; mixtures with dense layers keep one of each kind in two layers."""
_PER_LAYER = ("layer_types", "no_rope_layers")
_LAYER_NUMBERS = ("mlp_only_layers", "moe_layers")
_STEPS = (
    "decoder_sparse_step",
    "interleave_moe_layer_step",
    "no_rope_layer_interval",
    "sliding_window_pattern",
    "full_attention_interval",
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


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
    return common_names(body)


def common_names(body: dict[str, Any]) -> dict[str, Any]:
    """The same with the names that all families share: GPT-2's n_embd is hidden_size. Both names are the installed class's."""
    kind = body.get("model_type")
    if not isinstance(kind, str) or kind not in model_types():
        return dict(body)
    names = {own: name for name, own in config_aliases(kind).items() if name in INTEGERS}
    return {names.get(key, key): value for key, value in body.items()}


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
            "missing" if kind is None else f"{kind!r} is not a model type of the pinned transformers' language models",
            did_you_mean(str(kind), known) if kind is not None else "as in the model's config.json, such as llama",
        )
        return problems
    names = config_fields(kind)
    for key in body:
        if key not in names | _OLD_KEYS:
            add(key, f"{kind} has no such key", did_you_mean(key, names))
        elif (other := config_aliases(kind).get(key)) in body:
            add(key, f"is the same as {other}", "write one of them")
    body = common_names(body)
    if body.get("auto_map") is not None:
        add("auto_map", "code from a model repository is never run", "leave it out")
    if body.get("quantization_config") is not None:
        add("quantization_config", "the architecture is given unquantized", "leave it out")
    problems += _check_numbers(body, shown, names)
    problems += _check_rest(body, shown)
    known_bad = {problem.key for problem in problems}
    problems += [problem for problem in _check_types(body, shown) if problem.key not in known_bad]
    if not problems:
        problems += _check_heads(body, shown)
    return problems or _check_count(body, shown)


def _check_numbers(body: dict[str, Any], shown: str, names: frozenset[str]) -> list[Problem]:
    """What must be there, and that counts and sizes are whole numbers."""
    problems = []
    for key in INTEGERS:
        if key not in names:
            text = f"{body['model_type']} has no such key, and nothing is planned or tried without it"
            problems.append(Problem(text, file=shown, key=key, fix="take a decoder with attention"))
        elif key not in body:
            problems.append(Problem("missing", file=shown, key=key, fix="take it from the model's config.json"))
    for key, value in body.items():
        if key in names and (key in INTEGERS or key.startswith("num_") or key.endswith("_size")):
            optional = value is None and key not in INTEGERS
            if not optional and not _whole(value, 1):
                problems.append(Problem(f"{_short(value)} is not a whole number from 1 to {_MAX_INTEGER}", file=shown, key=key))
    return problems


def _check_types(body: dict[str, Any], shown: str) -> list[Problem]:
    """Values by the annotations of the configuration class, as far as these are plain; what is per layer must be so many."""
    problems = []
    for key, value in body.items():
        annotation = "int" if key in _STEPS else config_types(str(body["model_type"])).get(key, "")
        kinds = set(annotation.split(" | ")) - {"None"}
        if value is None or len(kinds) != 1 or key in _TOKENS:
            continue
        least = 1 if key in _STEPS else 0
        if kinds == {"int"} and not _whole(value, least):
            problems.append(Problem(f"{_short(value)} is not a whole number from {least}", file=shown, key=key))
        elif kinds == {"bool"} and not isinstance(value, bool):
            problems.append(Problem("must be true or false", file=shown, key=key))
        elif kinds == {"list[int]"} and not (isinstance(value, list) and all(_whole(item, 0) for item in value)):
            problems.append(Problem(f"{_short(value)} is not a list of whole numbers", file=shown, key=key))
        elif kinds == {"list[str]"} and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            problems.append(Problem(f"{_short(value)} is not a list of words", file=shown, key=key))
        elif key in _PER_LAYER and isinstance(value, list) and value and len(value) != body.get("num_hidden_layers"):
            text = f"has {len(value)} entries, the model {body.get('num_hidden_layers')} layers"
            problems.append(Problem(text, file=shown, key=key))
    return problems


def _check_count(body: dict[str, Any], shown: str) -> list[Problem]:
    """What a family of :data:`clustertune.config.parameters.KNOWN` cannot be built without."""
    try:
        count(body)
    except KeyError as error:
        return [Problem("missing", file=shown, key=str(error.args[0]), fix="take it from the model's config.json")]
    return []


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MAX_INTEGER


def _check_rest(body: dict[str, Any], shown: str) -> list[Problem]:
    problems = []
    kind = str(body["model_type"])
    causal = sorted(name for name in modeling_classes(kind) if name.endswith(("ForCausalLM", "LMHeadModel")))
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
    for key in _TOKENS:
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


def scale_down(body: dict[str, Any], tensor_parallel: int = 1) -> dict[str, Any]:
    """The same model class with 2 layers, a hidden size of 128 and a vocabulary of 4096: about a million parameters.

    Heads per key-value head keep their ratio up to 4, RoPE scaling its kind and factor, mixtures of experts stay mixtures, and
    where there are layers of two kinds there is one of each. A default of the configuration class is scaled like a given value.
    ``tensor_parallel`` ranks that share a layer split its key-value heads: there are as many at least.
    """
    body = common_names(body)
    values, small = Values(body), dict(body)
    heads, layers = min(int(body["num_attention_heads"]), TINY_HEADS), min(int(body["num_hidden_layers"]), TINY_LAYERS)
    for key in ("num_key_value_heads", "num_kv_heads"):
        if groups := values.get(key):
            ratio = max(1, int(body["num_attention_heads"]) // int(groups))
            small[key] = min(heads, max(tensor_parallel, heads // min(ratio, heads)))
    small |= {
        "hidden_size": TINY_HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": min(int(body["vocab_size"]), TINY_VOCABULARY),
        "max_position_embeddings": min(int(body["max_position_embeddings"]), TINY_POSITIONS),
    }
    if values.get("head_dim"):
        small["head_dim"] = TINY_HIDDEN // heads
    other = config_aliases(values.kind)
    fields = {key for key in config_types(values.kind) if other.get(key) not in body} | body.keys()
    for key, most in _TINY_AT_MOST.items():
        if key in fields and int(values.get(key) or 0) > most:
            small[key] = most
    small |= _scale_layers(values, layers, fields)
    share = small["max_position_embeddings"] / int(body["max_position_embeddings"])
    narrow = TINY_HIDDEN // heads / values.head_dim
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(body.get(key), dict):
            small[key] = _scale_rope(body[key], share, narrow)
    if body.get("original_max_position_embeddings"):
        small["original_max_position_embeddings"] = max(1, int(body["original_max_position_embeddings"] * share))
    for key in _TOKENS:
        # The tokenizer of a tiny run is trained locally and sets its own; a class's default may lie outside its vocabulary.
        small.pop(key, None)
        default = config_defaults(values.kind).get(key)
        if isinstance(default, int) and default >= small["vocab_size"]:
            small[key] = None
    return small


def _scale_layers(values: Values, layers: int, fields: set[str]) -> dict[str, Any]:
    """What is said layer by layer, for the layers that are left: one of each kind of attention where there are two kinds."""
    small: dict[str, Any] = {}
    for key in _LAYER_NUMBERS:
        if isinstance(given := values.get(key), list):
            small[key] = [number for number in given if number < layers]
    if isinstance(given := values.get("no_rope_layers"), list):
        small["no_rope_layers"] = given[:layers]
    # Where positions differ from layer to layer, the kinds of attention follow from no_rope_layers.
    if isinstance(values.get("layer_types"), list) or ("layer_types" in fields and "no_rope_layers" not in fields):
        types = values.attention_types
        chosen = [*dict.fromkeys(types), *types][:layers]
        if isinstance(values.get("layer_types"), list) or len(set(types)) > 1:
            small["layer_types"] = chosen
    return small


def _scale_rope(rope: dict[str, Any], share: float, narrow: float) -> dict[str, Any]:
    """RoPE for ``share`` of the positions and heads that are ``narrow`` times as wide."""
    result: dict[str, Any] = {
        name: _scale_rope(value, share, narrow) if isinstance(value, dict) else value for name, value in rope.items()
    }
    for name in ("short_factor", "long_factor"):
        if isinstance(rope.get(name), list):
            result[name] = rope[name][: round(len(rope[name]) * narrow)]
    if result.get("original_max_position_embeddings"):
        result["original_max_position_embeddings"] = max(1, int(result["original_max_position_embeddings"] * share))
    return result


def summary(body: dict[str, Any]) -> str:
    """The architecture in a few words."""
    return (
        f"{body['architectures'][0]}, {body['num_hidden_layers']} layers, hidden {body['hidden_size']}, "
        f"vocabulary {body['vocab_size']}"
    )
