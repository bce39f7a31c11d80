"""``model.json``: the few keys of a model's ``config.json`` from which it is planned, scaled down, and checked against."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError, raise_if
from clustertune.recipe.findings import is_number, is_whole
from clustertune.recipe.layers import did_you_mean, parse_json, read_text
from clustertune.recipe.library_facts import config_fields, facts, model_facts, model_types
from clustertune.recipe.parameters import Values, count

INTEGERS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
"""What planning, tiny runs and adapter checks cannot do without."""
SUPPORTED = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "llama4_text", "gpt_oss", "phi3",
    "olmo2", "deepseek_v3",
)  # fmt: skip
"""Model types that a refusal names."""
_OLD_KEYS = {"rope_theta", "rope_scaling", "torch_dtype", "_name_or_path", "auto_map", "quantization_config"}
"""Keys of published ``config.json`` files that are not fields of the installed configuration class."""
_MAX_INTEGER = 10**9
_MAX_LAYERS = 10_000
"""Layers are counted one by one, which takes minutes and gigabytes above; published models have 126 at most."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""What families call the number of layers."""

Wrong = tuple[str, str, str | None]
"""A key, what is wrong with it, and what to do."""

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
    **dict.fromkeys(("global_head_dim", "index_head_dim", "hidden_size_per_layer_input"), TINY_HEAD),
    **dict.fromkeys(("top_k_experts", "index_n_heads"), 2),
    "vocab_size_per_layer_input": TINY_VOCABULARY,
    "num_kv_shared_layers": 0,
    "num_global_key_value_heads": 2,
    "qk_rope_head_dim": TINY_HEAD // 2,
    "first_k_dense_replace": 1,
    "linear_num_key_heads": TINY_HEADS // 2,
    "linear_num_value_heads": TINY_HEADS,
}
"""What the sizes of a scaled-down model are at most; mixtures with dense layers keep one of each kind in two layers."""
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types", "indexer_types")
_LAYER_NUMBERS = ("mlp_only_layers", "moe_layers")
_STEPS = (
    "decoder_sparse_step",
    "interleave_moe_layer_step",
    "no_rope_layer_interval",
    "sliding_window_pattern",
    "full_attention_interval",
)
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
"""What families call the activation of the feed-forward block."""
_OLD_ROPE = {"phi3": ("su",)}
"""Former names that a configuration class reads as another."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_architecture(path: Path, shown: str) -> dict[str, Any]:
    """Read and check a ``model.json``. Raises UserError with every problem found."""
    body = parse_json(read_text(path, shown), shown)
    if not isinstance(body, dict) or not body:
        raise UserError(Problem("must hold the model's config.json keys", file=shown, fix='write {"model_type": "llama", ...}'))
    problems = find_problems(body, shown)
    raise_if(problems)
    return common_names(body)


def implausible(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """A key of a foreign ``config.json``, also of a model in a model, whose number no model has, and what is wrong with it.

    transformers would build that many layers before it looks at the weights.
    """
    inner = [value for value in config.values() if isinstance(value, dict)]
    for body in (config, *inner):
        for key, value in body.items():
            most = _MAX_LAYERS if key in _LAYERS else _MAX_INTEGER
            if isinstance(value, int) and (key in _LAYERS or key in INTEGERS) and not isinstance(value, bool) and value > most:
                return key, f"{value}: at most {most:,} can be meant"
    return None


def common_names(body: dict[str, Any]) -> dict[str, Any]:
    """The same with the names that all families share: GPT-2's n_embd is hidden_size. Both names are the installed class's."""
    kind = body.get("model_type")
    if not isinstance(kind, str) or kind not in model_types():
        return dict(body)
    names = {own: name for name, own in model_facts(kind)["aliases"].items() if name in INTEGERS}
    return {names.get(key, key): value for key, value in body.items()}


def find_problems(body: dict[str, Any], shown: str) -> list[Problem]:
    """Everything that is wrong with an architecture."""
    kind = body.get("model_type")
    if not isinstance(kind, str) or kind not in model_types():
        missing = "missing", "as in the model's config.json, such as llama"
        unknown = f"{_short(kind)} is not a model type of the pinned transformers' language models"
        faults: list[Wrong] = [("model_type", *(missing if kind is None else (unknown, _supported(str(kind)))))]
    else:
        faults = list(_check_keys(body, kind))
        body = common_names(body)
        faults += [*_check_numbers(body, kind), *_check_rest(body, kind)]
        bad = {key for key, _, _ in faults}
        faults += [wrong for wrong in _check_types(body, kind) if wrong[0] not in bad]
        faults = faults or list(_check_heads(body))
        if not faults:
            try:
                count(body)
            except KeyError as error:  # what a family of KNOWN cannot be built without
                faults = [(str(error.args[0]), "missing", "take it from the model's config.json")]
    return [Problem(text, file=shown, key=key, fix=fix) for key, text, fix in faults]


def _supported(kind: str) -> str:
    """What to write in the place of an unknown model type: the one that it is a misspelling of, else what is supported."""
    close = difflib.get_close_matches(kind, model_types(), n=1, cutoff=0.85)
    if close and abs(len(kind) - len(close[0])) <= 1 and re.sub(r"\D", "", kind) == re.sub(r"\D", "", close[0]):
        return f"did you mean {close[0]}?"
    known = [name for name in SUPPORTED if name in model_types()]
    return f"the {len(model_types())} types of its AutoModelForCausalLM are trained, such as {', '.join(known)}"


def _check_keys(body: dict[str, Any], kind: str) -> Iterator[Wrong]:
    names = config_fields(kind)
    for key, value in body.items():
        if key not in names | _OLD_KEYS:
            yield key, f"{kind} has no such key", did_you_mean(key, names)
        elif (other := model_facts(kind)["aliases"].get(key)) in body and body[other] != value:
            yield key, f"is the same as {other}", "write one of them"
    if body.get("auto_map") is not None:
        yield "auto_map", "code from a model repository is never run", "leave it out"
    if body.get("quantization_config") is not None:
        yield "quantization_config", "the architecture is given unquantized", "leave it out"


def _check_numbers(body: dict[str, Any], kind: str) -> Iterator[Wrong]:
    """What must be there, and that counts and sizes are whole numbers."""
    names = config_fields(kind)
    for key in INTEGERS:
        if key not in names:
            text = f"{kind} has no such key, and nothing is planned or tried without it"
            yield key, text, "take a decoder with attention"
        elif key not in body:
            yield key, "missing", "take it from the model's config.json"
    for key, value in body.items():
        counted = key in names and (key in INTEGERS or key.startswith("num_") or key.endswith("_size"))
        most = _MAX_LAYERS if key == "num_hidden_layers" else _MAX_INTEGER
        least = 0 if model_facts(kind)["defaults"].get(key) == 0 and key not in INTEGERS else 1
        if counted and (value is not None or key in INTEGERS) and not (is_whole(value, least) and value <= most):
            yield key, f"{_short(value)} is not a whole number from {least} to {most:,}", None


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "num_experts", "num_local_experts", "tie_word_embeddings",
)  # fmt: skip
"""What adapter shapes, merge and plan follow from."""


def contradictions(architecture: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The sizes in which model.json and the base's own ``config.json`` differ, for a message; empty where they agree.

    Of a model with pictures the ``text_config`` counts. A key that one of the two leaves out is not a difference.
    """
    inner = config.get("text_config")
    theirs = {**config, **inner} if isinstance(inner, dict) else config
    differ = [key for key in SIZES if key in architecture and key in theirs and architecture[key] != theirs[key]]
    return ", ".join(f"{key} {_short(architecture[key])} (config.json: {_short(theirs[key])})" for key in differ)


def _check_types(body: dict[str, Any], kind: str) -> Iterator[Wrong]:
    """Values by the annotations of the configuration class, as far as these are plain; what is per layer must be so many."""
    for key, value in body.items():
        annotation = "int" if key in _STEPS else model_facts(kind)["types"].get(key, "")
        kinds = set(annotation.split(" | ")) - {"None"}
        if value is None or len(kinds) != 1 or key in _TOKENS:
            continue
        least, items = int(key in _STEPS), value if isinstance(value, list) else None
        if kinds == {"int"} and not (is_whole(value, least) and value <= _MAX_INTEGER):
            yield key, f"{_short(value)} is not a whole number from {least}", None
        elif kinds == {"bool"} and not isinstance(value, bool):
            yield key, "must be true or false", None
        elif kinds == {"list[int]"} and (items is None or not all(is_whole(item, 0) for item in items)):
            yield key, f"{_short(value)} is not a list of whole numbers", None
        elif kinds == {"list[str]"} and (items is None or not all(isinstance(item, str) for item in items)):
            yield key, f"{_short(value)} is not a list of words", None
        elif key in _PER_LAYER and items and len(items) != body.get("num_hidden_layers"):
            yield key, f"has {len(items)} entries, the model {body.get('num_hidden_layers')} layers", None


def _check_rest(body: dict[str, Any], kind: str) -> Iterator[Wrong]:
    causal = sorted(name for name in model_facts(kind)["classes"] if name.endswith(("ForCausalLM", "LMHeadModel")))
    classes = body.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1 or classes[0] not in causal:
        text = "missing" if classes is None else f"{_short(classes)} is not one causal language model class of {kind}"
        yield "architectures", text, f"write {json.dumps(causal[:1])}" if causal else None
    known = facts("transformers")
    for key in ACTIVATIONS:
        if isinstance(value := body.get(key), str) and value not in known["activations"]:
            text = f"{_short(value)} is no activation of the pinned transformers"
            yield key, text, did_you_mean(value, known["activations"]) or f"known: {', '.join(known['activations'])}"
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(rope := body.get(key), dict | None):
            yield key, "must hold rope_type and its values", None
        for part in [rope, *rope.values()] if isinstance(rope, dict) else ():
            value = part.get("rope_type", part.get("type")) if isinstance(part, dict) else None
            if value is not None and value not in (*known["rope_types"], *_OLD_ROPE.get(kind, ())):
                text = f"rope_type {_short(value)} is no rotary embedding of the pinned transformers"
                yield key, text, did_you_mean(str(value), known["rope_types"]) or f"known: {', '.join(known['rope_types'])}"


def _check_heads(body: dict[str, Any]) -> Iterator[Wrong]:
    hidden, heads, groups = (body.get(key) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    latent = Values(body).get("qk_nope_head_dim")  # heads of their own width
    if hidden and heads and not (body.get("head_dim") or latent) and hidden % heads:
        yield "hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}", None
    if heads and groups and heads % groups:
        yield "num_attention_heads", f"{heads} is not a multiple of num_key_value_heads {groups}", None


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
    if values.get("head_dim") and "head_dim" not in model_facts(values.kind)["aliases"]:
        small["head_dim"] = TINY_HIDDEN // heads
    known = model_facts(values.kind)
    fields = {key for key in known["types"] if known["aliases"].get(key) not in body} | body.keys()
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
        default = known["defaults"].get(key)
        if isinstance(default, int) and default >= small["vocab_size"]:
            small[key] = None
    return small


def _scale_layers(values: Values, layers: int, fields: set[str]) -> dict[str, Any]:
    """What config.json lists by layer, for the layers that are left: one of each kind of attention."""
    small: dict[str, Any] = {}
    for key in _LAYER_NUMBERS:
        if isinstance(by_layer := values.get(key), list):
            small[key] = [number for number in by_layer if number < layers]
    if isinstance(by_layer := values.get("mlp_layer_types"), list):
        small["mlp_layer_types"] = [*dict.fromkeys(by_layer), *by_layer][:layers]
    if isinstance(by_layer := values.get("indexer_types"), list):
        small["indexer_types"] = by_layer[:layers]
    if isinstance(by_layer := values.get("no_rope_layers"), list):
        small["no_rope_layers"] = by_layer[:layers]
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
    if is_number(positions := result.get("original_max_position_embeddings")):
        result["original_max_position_embeddings"] = max(1, int(positions * share))
    return result


def summary(body: dict[str, Any]) -> str:
    """The architecture in a phrase."""
    return (
        f"{body['architectures'][0]}, {body['num_hidden_layers']} layers, hidden {body['hidden_size']}, "
        f"vocabulary {body['vocab_size']}"
    )
