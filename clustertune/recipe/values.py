"""The keys of an architecture as its configuration class sees them: other names resolved, defaults filled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Any, TypedDict

from clustertune.recipe.library_facts import facts

# --- what the pinned transformers knows about a model type -------------------------------------------------------------


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
    layers: list[str]
    """The classes that FSDP wraps: the decoder layers, as transformers marks them for activation checkpointing."""
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
    found: ModelTypeFacts = facts("transformers")["models"][kind]
    return found


@cache
def model_types() -> frozenset[str]:
    """The model types of causal language models."""
    return frozenset(facts("transformers")["models"])


@cache
def config_fields(kind: str) -> frozenset[str]:
    """The keys of a model type's ``config.json``: fields of its configuration class and its base, other names of them, and what
    is only read."""
    return frozenset([*facts("transformers")["keys"], *model_facts(kind)["keys"]])


class Values:
    """An architecture's values by any of a key's names; what is not given has the default of the installed transformers."""

    def __init__(self, architecture: Mapping[str, Any]) -> None:
        kind = str(architecture["model_type"])
        self.kind = kind
        aliases = model_facts(kind)["aliases"]
        self._same = {**aliases, **{own: other for other, own in aliases.items()}}
        self._given = architecture
        self._defaults = model_facts(kind)["defaults"]

    def get(self, key: str) -> Any:
        """The value of a key; None where there is none."""
        for known in (self._given, self._defaults):
            for name in (key, self._same.get(key, key)):
                if name in known:
                    return known[name]
        return None

    def keys(self) -> frozenset[str]:
        """All keys that have a value or a default."""
        return frozenset(self._given) | frozenset(self._defaults)

    def whole(self, key: str) -> int:
        """A whole number that must be there. Raises KeyError where it is not."""
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return int(value)

    def flag(self, key: bool | str) -> bool:
        """A key's truth, or the constant itself."""
        return key if isinstance(key, bool) else bool(self.get(key))

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.whole("num_hidden_layers")

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.whole("hidden_size")

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.whole("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Key-value heads: as many as query heads where nothing says otherwise."""
        return int(self.get("num_key_value_heads") or self.heads)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return int(self.get("head_dim") or self.hidden // self.heads)

    @cached_property
    def attention_types(self) -> tuple[str, ...]:
        """The kind of attention of each layer, as the configuration classes derive it where ``layer_types`` is not given."""
        given = self.get("layer_types")
        if given:
            return tuple(map(str, given))
        name = _NAMES.get(self.kind, "sliding_attention")
        rule = _LOCAL.get(self.kind) if name != "sliding_attention" or self.is_windowed else None
        return tuple(name if rule and rule(self, layer) else "full_attention" for layer in range(self.layers))

    @property
    def is_windowed(self) -> bool:
        """Whether there is a sliding window at all."""
        return bool(self.get("sliding_window")) and self.get("use_sliding_window") in (None, True)


def _has_rope(values: Values, layer: int) -> bool:
    """Layers without rotary positions see everything (NoPE)."""
    given = values.get("no_rope_layers")
    return bool(given[layer]) if given else (layer + 1) % values.whole("no_rope_layer_interval") != 0


def _every(layer: int, values: Values, key: str, default: int) -> bool:
    """Not every so-many-th layer, where the interval may be given under a key that is not a field."""
    return (layer + 1) % int(values.get(key) or default) != 0


_LOCAL: dict[str, Callable[[Values, int], bool]] = {
    "qwen2": lambda values, layer: layer >= values.whole("max_window_layers"),
    "qwen3": lambda values, layer: layer >= values.whole("max_window_layers"),
    "qwen2_moe": lambda values, layer: layer % 2 == 0 and layer < values.whole("max_window_layers"),
    "gemma2": lambda _, layer: layer % 2 == 0,
    "gpt_oss": lambda _, layer: layer % 2 == 0,
    "gemma3_text": lambda values, layer: _every(layer, values, "sliding_window_pattern", 6),
    "qwen3_next": lambda values, layer: _every(layer, values, "full_attention_interval", 4),
    "llama4_text": _has_rope,
    "smollm3": lambda values, layer: not _has_rope(values, layer),
    **dict.fromkeys(("mistral", "mixtral", "phi3", "starcoder2", "qwen3_moe"), lambda *_: True),
}
"""Which layers see a part only, by model type: ``__post_init__`` of the configuration classes; others see everything."""
_NAMES = {"qwen3_next": "linear_attention", "llama4_text": "chunked_attention"}
_SEES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""The key that says how many tokens a layer sees, by its kind of attention."""


def window(values: Values, layer: int) -> int | None:
    """How many tokens one token of a layer sees; None: all before it."""
    kind = values.attention_types[layer]
    if kind not in _SEES or (kind == "sliding_attention" and not values.is_windowed):
        return None
    seen = values.get(_SEES[kind])
    return int(seen) if seen else None
