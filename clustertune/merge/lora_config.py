"""``adapter_config.json``: which settings leave the arithmetic ``W + scaling * B A`` as it is, and what they select.

An allow-list: a key that is not known here, or that holds another value than the plain one, is refused by name. A setting
that was ignored would give a model that is wrong by a little and looks right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError

_NEUTRAL = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
"""Read here, or without influence on merged weights: a dropout, what only initialised A and B, provenance."""

_PLAIN_ONLY = {
    "alora_invocation_tokens": "an activated LoRA acts on a part of the sequence only and cannot be merged",
    "arrow_config": "Arrow routes between adapters and cannot be merged",
    "bias": "trained biases are not merged",
    "ensure_weight_tying": "tied adapters are not merged",
    "fan_in_fan_out": "transposed (Conv1D) layers are not merged",
    "layer_replication": "replicated layers cannot be merged into one copy",
    "lora_bias": "a bias in B is not merged",
    "megatron_config": "Megatron's parallel layers are not merged",
    "monteclora_config": "MonteCLoRA is not merged",
    "target_parameters": "LoRA on bare parameters (fused experts) is not merged",
    "trainable_token_indices": "trained token embeddings are not merged",
    "use_bdlora": "block-diagonal LoRA is not merged",
    "use_dora": "DoRA rescales the whole weight and is not merged",
    "use_qalora": "QALoRA pools its input and is not merged",
    "velora_config": "VeLoRA is not merged",
}
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""The initialisations that touch A and B only. The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change the base's weights too,
and MiCA is a variant of the layer (peft 0.20 ``tuners/lora/layer.py``)."""
_ABSENT: tuple[Any, ...] = (None, False, "none", [], {})
_MERGE_WITH_PEFT = "merge it with PEFT's merge_and_unload"


@dataclass(frozen=True)
class LoraSettings:
    """The part of ``adapter_config.json`` that decides which weight becomes what."""

    r: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...] | None
    modules_to_save: tuple[str, ...]
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    base_name: str | None
    revision: str | None

    def rank(self, module: str) -> int:
        """Rank of one module; as in PEFT the first pattern that matches the end of its name wins."""
        return self.rank_pattern.get(_first_match(self.rank_pattern, module), self.r)

    def scaling(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA (https://arxiv.org/abs/2312.03732)."""
        alpha, rank = self.alpha_pattern.get(_first_match(self.alpha_pattern, module), self.alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def ambiguous(self, modules: Iterable[str]) -> list[str]:
        """Modules that several patterns match with different values.

        The first one wins, in training by the order in which they were given, and here, as in PEFT, by that of the file,
        which PEFT sorts by name (peft 0.20 ``PeftConfigMixin.save_pretrained``).
        """
        found = []
        for module in modules:
            for patterns in (self.rank_pattern, self.alpha_pattern):
                if len({value for p, value in patterns.items() if _matches(p, module)}) > 1:
                    found.append(module)
                    break
        return found

    def saves(self, name: str) -> bool:
        """Whether the tensor ``name`` belongs to a module of ``modules_to_save``."""
        return any(re.match(rf"(^|.*\.){re.escape(m)}($|\..*)", name) for m in self.modules_to_save)

    def selects(self, module: str) -> bool:
        """Whether PEFT would put a LoRA layer on ``module`` (peft 0.20 ``check_target_module_exists``)."""
        if _named(self.exclude_modules, module) or self.saves(module):
            return False
        if not _named(self.target_modules, module):
            return False
        if isinstance(self.target_modules, str) or module in self.target_modules or not self.layers:
            return True
        patterns = self.layers_pattern or (r"[^.]*",)
        found = next((m for p in patterns if (m := re.match(rf".*?\.{p}\.(\d+)\.", module))), None)
        return found is not None and int(found[1]) in self.layers


def _matches(pattern: str, module: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _first_match(patterns: Mapping[str, Any], module: str) -> str:
    return next((p for p in patterns if _matches(p, module)), module)


def _named(modules: str | tuple[str, ...] | None, module: str) -> bool:
    if not modules:
        return False
    if isinstance(modules, str):
        return re.fullmatch(modules, module) is not None
    return module in modules or any(module.endswith(f".{name}") for name in modules)


class _Reader:
    """Takes typed values out of the document and gathers what is wrong with them."""

    def __init__(self, body: dict[str, Any], file: Path) -> None:
        self.body, self.file, self.problems = body, str(file), list[Problem]()

    def wrong(self, key: str, message: str, fix: str | None = None) -> None:
        self.problems.append(Problem(message, file=self.file, key=key, fix=fix))

    def number(self, key: str, value: object, whole: bool) -> Any:
        good = isinstance(value, (int,) if whole else (int, float)) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or (whole and value < 1):  # type: ignore[arg-type,operator]
            self.wrong(key, f"{value!r} is no {'positive whole number' if whole else 'number'}")
            return 1
        return value

    def pattern(self, key: str, whole: bool) -> dict[str, Any]:
        value = self.body.get(key) or {}
        if not isinstance(value, dict):
            self.wrong(key, f"{value!r} is no map from patterns to numbers")
            return {}
        return {p: self.number(f"{key}.{p}", v, whole) for p, v in value.items() if self.regex(key, p)}

    def regex(self, key: str, text: str) -> bool:
        try:
            re.compile(text)
        except re.error as error:
            self.wrong(key, f"{text!r} is no regular expression: {error}")
            return False
        return True

    def names(self, key: str) -> str | tuple[str, ...] | None:
        value = self.body.get(key)
        if isinstance(value, str):
            if value.lower() == "all-linear":
                return r".*"
            return value if self.regex(key, value) else None
        if value is None or (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            return tuple(value) if value is not None else None
        self.wrong(key, f"{value!r} is neither a list of names nor a regular expression")
        return None

    def listed(self, key: str, kind: type) -> tuple[Any, ...]:
        value = self.body.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(v, kind) for v in values):
            self.wrong(key, f"{value!r} is no list of {kind.__name__}")
            return ()
        return tuple(values)

    def word(self, key: str) -> str | None:
        value = self.body.get(key)
        return value if isinstance(value, str) and value else None


def _refuse_variants(read: _Reader) -> None:
    body = read.body
    if (kind := body.get("peft_type")) != "LORA":
        read.wrong("peft_type", f"{kind!r}: only LORA can be merged here", _MERGE_WITH_PEFT)
        return
    for key, value in body.items():
        if key in _PLAIN_ONLY and value not in _ABSENT:
            read.wrong(key, f"{value!r}: {_PLAIN_ONLY[key]}", _MERGE_WITH_PEFT)
        elif key not in _PLAIN_ONLY and key not in _NEUTRAL and value not in _ABSENT:
            read.wrong(key, f"unknown setting with value {value!r}: it may change the arithmetic", _MERGE_WITH_PEFT)
    if body.get("init_lora_weights", True) not in _PLAIN_INITS:
        init = body["init_lora_weights"]
        read.wrong(
            "init_lora_weights", f"{init!r} changes the base's weights as well", "convert the adapter to a plain LoRA first"
        )


def read_settings(body: dict[str, Any], file: Path) -> LoraSettings:
    """Check ``adapter_config.json`` (already parsed; ``file`` only for messages). Raises UserError with every problem."""
    read = _Reader(body, file)
    _refuse_variants(read)
    targets = read.names("target_modules")
    if not targets and body.get("peft_type") == "LORA" and not body.get("target_parameters"):
        read.wrong("target_modules", "names no module")
    patterns = tuple(p for p in read.listed("layers_pattern", str) if read.regex("layers_pattern", p))
    layers = read.listed("layers_to_transform", int)
    settings = LoraSettings(
        r=read.number("r", body.get("r", 8), whole=True),
        alpha=read.number("lora_alpha", body.get("lora_alpha", 8), whole=False),
        rslora=body.get("use_rslora", False) is True,
        rank_pattern=read.pattern("rank_pattern", whole=True),
        alpha_pattern=read.pattern("alpha_pattern", whole=False),
        target_modules=targets or (),
        exclude_modules=read.names("exclude_modules"),
        modules_to_save=read.listed("modules_to_save", str),
        layers=layers or None,
        layers_pattern=patterns,
        base_name=read.word("base_model_name_or_path"),
        revision=read.word("revision"),
    )
    if read.problems:
        raise UserError(read.problems)
    return settings
