"""Every problem of a recipe's sections, each with the file, the key, what is wrong and the nearest valid name."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from clustertune.config import native, native_rules, quantization
from clustertune.config.load import did_you_mean, nearest
from clustertune.config.native import NativeField
from clustertune.config.native_rules import Range, names_secret, show_value
from clustertune.config.parameters import adapter_modules, head_names, matches
from clustertune.config.schema import Recipe
from clustertune.config.yamlfile import KeyPath
from clustertune.errors import Problem
from clustertune.host.credentials import holds_secret

Place = Callable[[KeyPath], str]
"""The ``file:line`` of a key path."""

_PATTERNS = {
    "revision": "a Hub commit of 40 hex digits in lower case",
    "name": "a Hub id such as owner/name, or a plain name (letters, digits, '.', '_' and '-')",
    "accelerate": "the name of a .yaml file in the recipe folder",
    "chat_template": "the name of a file in the recipe folder",
    "time": "a Slurm time such as 48:00:00 or 2-00:00:00",
    "language": "a language code such as en",
}
QUANTIZATION = "quantization_config"
_SECRET_FIX = "take it out of the file: log in with `hf auth login` or `wandb login`, and renew what was written down"  # noqa: S105


def find_schema_problems(values: Mapping[str, Any], place: Place) -> list[Problem]:
    """What pydantic finds in the sections, and what the model and data sections demand together."""
    problems = _find_secrets(values, place, ())
    try:
        Recipe.model_validate(values)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            path = tuple(str(part) for part in item["loc"] if part != "[key]")
            problems.append(_schema_problem(item, path, place))
    model, data = values.get("model"), values.get("data")
    if isinstance(model, dict):
        hub = model.get("weights", "hub") == "hub" and not model.get("path")
        problems += _demand_revision(model, "model", hub, "weights: random, or path, needs none", place)
        if model.get("weights") == "random" and model.get("path"):
            text = "given, while weights: random makes the weights"
            problems.append(_problem(place, ("model", "path"), text, "leave out one"))
    if isinstance(data, dict):
        problems += _demand_revision(data, "data", not data.get("input"), "a local input needs none", place)
        other = data.get("format") in ("alpaca", "messages", "lima")
        # A format that is laid over a recipe's own (data.format=alpaca) leaves its language without effect: prepare says so.
        if data.get("language") and other and _same_layer(place, ("data", "language"), ("data", "format")):
            problems.append(_problem(place, ("data", "language"), f"{data['format']} rows carry no language", "leave it out"))
    return problems


def _same_layer(place: Place, one: KeyPath, other: KeyPath) -> bool:
    return place(one).rsplit(":", 1)[0] == place(other).rsplit(":", 1)[0]


def _demand_revision(section: Mapping[str, Any], name: str, hub: bool, otherwise: str, place: Place) -> list[Problem]:
    if not hub or section.get("revision") is not None or section.get("name") is None:
        return []
    fix = f"pin the Hub commit of {section['name']} (40 hex digits); {otherwise}"
    return [_problem(place, (name, "revision"), "missing: what comes from the Hub is pinned", fix)]


def _problem(place: Place, path: KeyPath, message: str, fix: str | None = None) -> Problem:
    return Problem(message, file=place(path), key=".".join(path), fix=fix)


def _find_secrets(values: Mapping[str, Any], place: Place, path: KeyPath) -> list[Problem]:
    problems = []
    for key, value in values.items():
        here = (*path, str(key))
        if isinstance(value, dict):
            problems += _find_secrets(value, place, here)
        elif any(holds_secret(item) for item in (value if isinstance(value, list) else [value])):
            problems.append(_problem(place, here, "holds an access token (not shown)", _SECRET_FIX))
    return problems


def _schema_problem(item: Mapping[str, Any], path: KeyPath, place: Place) -> Problem:
    kind, value, context = item["type"], item.get("input"), item.get("ctx", {})
    name = path[-1] if path else ""
    fix = None
    if kind == "extra_forbidden":
        if names_secret(name) and nearest(name, _siblings(path)) is None:
            return _problem(place, path, "looks like a secret and is no key of a recipe (value not shown)", _SECRET_FIX)
        message, fix = "unknown key", did_you_mean(name, _siblings(path))
    elif kind == "missing":
        message = "missing"
        fix = _hint_missing(path)
    elif kind == "literal_error":
        words = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        if item["loc"][-1] == "[key]":
            message, fix = "unknown key", did_you_mean(name, words)
        else:
            message = f"{show_value(value, name)} is not one of {', '.join(words)}"
            fix = did_you_mean(value, words) if isinstance(value, str) else None
    elif kind == "string_pattern_mismatch" and name in _PATTERNS:
        message = f"{show_value(value, name)} is not {_PATTERNS[name]}"
    elif kind in {"dict_type", "model_type", "model_attributes_type"}:
        message = f"{show_value(value, name)} is not a section of keys and values" if value is not None else "empty"
    elif kind == "value_error":
        message = f"{show_value(value, name)}: {str(item['msg']).removeprefix('Value error, ')}"
    else:
        text = str(item["msg"]).replace("Input should be", "should be").replace("Input", "it")
        message = f"{show_value(value, name)} {text}"
        if kind == "string_type" and value is not None:
            fix = "put it in quotes"
    return _problem(place, path, message, fix)


def _hint_missing(path: KeyPath) -> str | None:
    return {
        ("model",): "write model: {name: owner/model, revision: <commit>}",
        ("data",): "write data: {name: owner/dataset, revision: <commit>, format: oasst-tree}",
        ("train",): "write train: with at least global_batch_size, or base: sft-lora",
        ("data", "format"): "one of oasst-tree, alpaca, messages, lima",
    }.get(path)


def _siblings(path: KeyPath) -> list[str]:
    """The keys that the section of a path takes."""
    current: type[BaseModel] = Recipe
    for part in path[:-1]:
        info = current.model_fields.get(part)
        found = _section_class(info.annotation) if info else None
        if found is None:
            return []
        current = found
    return list(current.model_fields)


def _section_class(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in {Union, types.UnionType}:
        return next((found for part in get_args(annotation) if (found := _section_class(part))), None)
    return None


@dataclass(frozen=True)
class NativeSection:
    """One section whose keys are a foreign dataclass's."""

    name: str
    owner: str
    fields: dict[str, NativeField]
    owned: Mapping[str, str]
    removed: Mapping[str, str]
    ranges: Mapping[str, Range]
    own: frozenset[str] = frozenset()
    """Keys of this section that the dataclass does not have."""


def train_section() -> NativeSection:
    rules = native_rules
    return NativeSection(
        "train", "SFTConfig", native.train_fields(), rules.TRAIN_OWNED, rules.TRAIN_REMOVED, rules.TRAIN_RANGES,
        frozenset({"global_batch_size"}),
    )  # fmt: skip


def lora_section() -> NativeSection:
    rules = native_rules
    return NativeSection("lora", "LoraConfig", native.lora_fields(), rules.LORA_OWNED, rules.LORA_REMOVED, rules.LORA_RANGES)


def check_native(section: NativeSection, given: Mapping[str, Any], place: Place) -> tuple[dict[str, Any], list[Problem]]:
    """The values of a section as the foreign dataclass takes them, and everything that is wrong with them."""
    checked: dict[str, Any] = {}
    problems: list[Problem] = []
    known = set(section.fields) - set(section.owned) | section.own
    for key, value in given.items():
        path = (section.name, key)
        if key in section.own or holds_secret(value):  # a secret was reported with the schema's problems
            continue
        if key in section.owned:
            problems.append(_problem(place, path, f"a recipe does not set it: {section.owned[key]}", "leave it out"))
        elif key not in section.fields:
            if key in section.removed:
                text = f"{section.owner} of the pinned release has no such field"
                problems.append(_problem(place, path, text, section.removed[key]))
            elif names_secret(key) and nearest(key, known) is None:
                problems.append(_problem(place, path, "looks like a secret (value not shown)", _SECRET_FIX))
            else:
                text = f"{section.owner} of the pinned release has no such field"
                problems.append(_problem(place, path, text, did_you_mean(key, known)))
        else:
            _check_field(section, key, value, place, checked, problems)
    return checked, problems


def _check_field(
    section: NativeSection, key: str, value: Any, place: Place, checked: dict[str, Any], problems: list[Problem]
) -> None:
    field, path = section.fields[key], (section.name, key)
    try:
        result = native.check_value(field, value)
    except ValueError as error:
        fix = did_you_mean(value, field.choices) if field.choices and isinstance(value, str) else None
        shown = "" if value is None else f"{show_value(value)}: "
        text = f"{len(field.choices)} words are known here" if fix and len(field.choices) > 8 else str(error)
        problems.append(_problem(place, path, f"{shown}{text}", fix))
        return
    allowed = section.ranges.get(key)
    if allowed and isinstance(result, int | float) and not isinstance(result, bool) and not allowed.holds(result):
        problems.append(_problem(place, path, f"{show_value(value)} is outside: it is {allowed}"))
        return
    checked[key] = result


def find_train_problems(train: Mapping[str, Any], place: Place) -> list[Problem]:
    """What ``SFTConfig`` or clustertune refuses for the values of several keys together."""
    problems = []

    def add(key: str, message: str, fix: str | None = None) -> None:
        problems.append(_problem(place, ("train", key), message, fix))

    if train.get("fp16"):
        # Its scale starts at 65536 and comes down by overflows: gradients that are not finite, which end a run here.
        text = "true: its loss scale makes steps that are not finite and leaves them out, which ends a run here"
        add("fp16", text, "leave it out: bf16 is the default; float32, where a GPU has no bf16, is train.bf16=false")
    if train.get("lr_scheduler_type") in {"reduce_lr_on_plateau", "greedy"} and train.get("eval_strategy", "no") == "no":
        add("lr_scheduler_type", f"{train['lr_scheduler_type']} needs an eval_strategy", "write eval_strategy: steps")
    if train.get("dataloader_prefetch_factor") is not None and not train.get("dataloader_num_workers"):
        add("dataloader_prefetch_factor", "needs dataloader_num_workers of at least 1")
    if train.get("packing") and "max_length" in train and train["max_length"] is None:
        add("max_length", "empty, while packing fills sequences to it", "write a number of tokens")
    if train.get("pad_token") is not None and train.get("pad_token") == train.get("eos_token"):
        add("pad_token", "is the eos_token: the model would never learn to stop", "name a token of its own")
    if train.get("save_only_model"):
        add("save_only_model", "true: a run could not be resumed", "leave it out")
    problems += _check_model_init(train.get("model_init_kwargs"), place)
    named = train.get("report_to")
    for name in [named] if isinstance(named, str) else named or []:
        known = (*native.reporters(), "none", "all")
        if name not in known:
            add("report_to", f"{show_value(name)} is not a tracker of the pinned transformers", did_you_mean(name, known))
    for key in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        if isinstance(given := train.get(key), dict) and given.get("preserve_rng_state") is False:
            text = "preserve_rng_state is false: a layer with dropout, computed again, would drop other values"
            add(key, text, "leave it out: it saves nothing where there is no dropout")
    old, new = train.get("gradient_checkpointing"), train.get("activation_checkpointing")
    if old is not None and new is not None and old != new:
        add("gradient_checkpointing", f"{old}, while activation_checkpointing is {new}: they are one", "keep the second")
    return problems


def _check_model_init(given: Any, place: Place) -> list[Problem]:
    path = ("train", "model_init_kwargs")
    if not isinstance(given, dict):
        return [] if given is None else [_problem(place, path, f"{show_value(given)} is not a mapping")]
    problems = []
    for key, value in given.items():
        words = native_rules.MODEL_INIT.get(key)
        if key == QUANTIZATION:
            for inner, text, fix in quantization.find_problems(value) if value is not None else ():
                problems.append(_problem(place, (*path, key, *inner), text, fix))
        elif words is None:
            fix = did_you_mean(key, [*native_rules.MODEL_INIT, QUANTIZATION])
            problems.append(_problem(place, (*path, key), "is not taken here", fix))
        elif value not in words:
            text = f"{show_value(value)} is not one of {', '.join(words)}"
            problems.append(_problem(place, (*path, key), text, did_you_mean(str(value), words)))
    return problems


def find_quantization_problems(train: Mapping[str, Any], lora: Any, place: Place) -> list[Problem]:
    """A quantised base takes adapters only."""
    if quantization.of(train) is None or lora is not None:
        return []
    fix = "add a lora section, or leave the quantisation out"
    path = ("train", "model_init_kwargs", QUANTIZATION)
    return [_problem(place, path, "quantised weights cannot be trained themselves", fix)]


def find_lora_problems(lora: Mapping[str, Any], architecture: Mapping[str, Any] | None, place: Place) -> list[Problem]:
    """What PEFT or the chain (export, merge) refuses, and targets that the architecture does not have."""
    problems = []

    def add(key: str, message: str, fix: str | None = None) -> None:
        problems.append(_problem(place, ("lora", key), message, fix))

    for key, what in native_rules.LORA_UNSUPPORTED.items():
        if lora.get(key):
            add(key, f"{what} cannot be exported and merged", "leave it out")
    if lora.get("init_lora_weights", True) not in native_rules.LORA_PLAIN_INIT:
        add("init_lora_weights", f"{lora['init_lora_weights']} changes the base weights or trains otherwise", "leave it out")
    if lora.get("bias", "none") != "none":
        add("bias", f"{lora['bias']}: trained biases cannot be exported and merged", "write bias: none")
    if lora.get("task_type", "CAUSAL_LM") != "CAUSAL_LM":
        add("task_type", f"{lora['task_type']} is not what is trained here", "write CAUSAL_LM")
    target = lora.get("target_modules")
    if isinstance(target, str) and (lora.get("layers_to_transform") is not None or lora.get("layers_pattern") is not None):
        add("target_modules", "a pattern, which PEFT takes only without layers_to_transform and layers_pattern")
    if lora.get("layers_pattern") and lora.get("layers_to_transform") is None:
        add("layers_pattern", "needs layers_to_transform")
    if target is None or target == []:
        add("target_modules", "missing", "name the modules, such as [q_proj, v_proj], or all-linear")
    elif architecture is not None:
        _check_targets(lora, architecture, add)
    return problems


def _check_targets(
    lora: Mapping[str, Any], architecture: Mapping[str, Any], add: Callable[[str, str, str | None], None]
) -> None:
    kind, target = str(architecture["model_type"]), lora["target_modules"]
    modules = adapter_modules(architecture)
    if not is_pattern(target):
        add("target_modules", f"{show_value(target)} is no regular expression", None)
        return
    _check_head(lora, architecture, add)
    if not modules:
        return
    last = {name.split(".")[-1] for name in modules}
    if isinstance(target, str):
        if target.lower() != "all-linear" and not any(matches(target, name) for name in modules):
            add("target_modules", f"{show_value(target)} matches no module of {kind}", did_you_mean(target, last))
    else:
        _check_names("target_modules", target, modules, kind, add)
    for key in ("modules_to_save", "exclude_modules"):
        if isinstance(lora.get(key), list):
            _check_names(key, lora[key], modules, kind, add)
    layers, chosen = int(architecture["num_hidden_layers"]), lora.get("layers_to_transform")
    for index in [chosen] if isinstance(chosen, int) else chosen or []:
        if not 0 <= index < layers:
            add("layers_to_transform", f"{index} is not a layer: the model has {layers}, counted from 0", None)


def is_pattern(target: str | list[str]) -> bool:
    """Whether PEFT can match with it: names, or a text that is a regular expression."""
    try:
        re.compile(target if isinstance(target, str) else "")
    except re.error:
        return False
    return True


def _check_head(lora: Mapping[str, Any], architecture: Mapping[str, Any], add: Callable[[str, str, str | None], None]) -> None:
    """TRL multiplies by the output projection's weight itself and refuses an adapter on it (sft_trainer.py:1066)."""
    target, chosen, excluded = lora["target_modules"], lora.get("layers_to_transform"), lora.get("exclude_modules")
    if chosen not in (None, []) or (isinstance(target, str) and target.lower() == "all-linear"):
        return  # PEFT takes layers alone, and leaves the head out of all-linear
    for head in head_names(architecture):
        if matches(target, head) and not (excluded and is_pattern(excluded) and matches(excluded, head)):
            text = f"{show_value(target)} takes in {head}, of which TRL reads the weight alone: an adapter would not be trained"
            add("target_modules", text, f"leave {head} out")


def _check_names(
    key: str, names: list[str], modules: list[str], kind: str, add: Callable[[str, str, str | None], None]
) -> None:
    last = {name.split(".")[-1] for name in modules}
    for name in names:
        if not any(matches([name], module) for module in modules):
            add(key, f"{kind} has no module {show_value(name)}", did_you_mean(name, last))
