"""What the pinned libraries take, as data: ``make library-facts`` writes ``clustertune/recipe/library_facts/*.json``.

``import trl`` takes 7 s and needs torch; a command that checks a recipe reads these files instead, in milliseconds.
They are recreated when a pin of ``containers/versions.env`` moves: tests/recipe/test_library_facts.py compares them with
the installed classes.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import re
import sys
import types
import typing
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from clustertune.recipe.library_facts import FOLDER

NAMES = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
NAMES |= {"dict": "a mapping", "list": "a list", "Any": "any value"}
PLURAL = {"a whole number": "whole numbers", "a number": "numbers", "text": "words"}
CAUSAL = ("ForCausalLM", "LMHeadModel")
DEPTH, SIZE = 8, 16
"""Layers of a model that is built to list its modules (hybrids repeat after up to 8), and any size where there is none."""


def _one_of(words: list[str]) -> str:
    return f"one of {', '.join(words if len(words) <= 12 else words[:8])}" + (", ..." if len(words) > 12 else "")


def _is_plain(value: Any) -> bool:
    """Whether JSON gives a value back as it is."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


# --- TRL and PEFT: the fields of a dataclass ---


def field_facts(cls: type) -> dict[str, dict[str, Any]]:
    """By field: the kinds of values it takes (recipe/native_rules.py), words for them, its default where it is plain."""
    hints, facts = typing.get_type_hints(cls), {}
    for item in dataclasses.fields(cls):
        kinds, expected, choices = _kinds(hints[item.name])
        if (listed := item.metadata.get("choices")) is not None:
            kinds = [["words", *map(str, listed)], *([["none"]] if ["none"] in kinds else [])]
            choices = list(map(str, listed))
            expected = _one_of(choices)
        known = kinds if any(kind != ["none"] for kind in kinds) else None
        facts[item.name] = {"kinds": known, "expected": expected, "choices": choices}
        default = item.default.value if isinstance(item.default, enum.Enum) else item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        if default is not dataclasses.MISSING and _is_plain(default):
            facts[item.name]["default"] = default
    return facts


def _kinds(hint: Any) -> tuple[list[list[Any]], str, list[str]]:
    kinds: list[list[Any]] = []
    words: list[str] = []
    choices: list[str] = []
    for part in typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else [hint]:
        values: list[Any] = []
        if part is type(None):
            kinds.append(["none"])
        elif typing.get_origin(part) is typing.Literal:
            values = list(typing.get_args(part))
            kinds += [_literal(value) for value in values]
        elif isinstance(part, type) and issubclass(part, enum.Enum):
            values = [member.value for member in part]
            kinds.append(["words", *values])
        elif (plain := _plain(part)) is not None:
            kinds.append(plain[0])
            words.append(plain[1])
        if values:
            choices += map(str, values)
            words.append(_one_of(list(map(str, values))))
    if any(kind[0] == "words" and len(kind) > 2 for kind in kinds) and "text" in words:
        # `SchedulerType | str`: the text is one of the enumeration's, whatever the annotation says.
        kinds.remove(["plain", "str"])
        words.remove("text")
    return kinds, " or ".join(words), choices


def _literal(value: Any) -> list[Any]:
    if isinstance(value, str) and "[" in value:
        # PEFT writes "pissa_niter_[number of iters]" for pissa_niter_16.
        return ["pattern", "^" + re.sub(r"\\\[.*?\\\]", r"[0-9]+", re.escape(value)) + "$"]
    return ["words", value]


def _plain(hint: Any) -> tuple[list[Any], str] | None:
    """``int``, ``list[str]``, ``dict[str, Any]`` and the like; None for other classes."""
    holder = typing.get_origin(hint)
    if holder is None:
        name = getattr(hint, "__name__", str(hint))
        return (["plain", name], NAMES[name]) if name in NAMES else None
    parts = [_plain(part) for part in typing.get_args(hint)]
    if holder not in (list, dict, tuple) or any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    words = {list: f"a list of {PLURAL.get(known[0][1], known[0][1])}", tuple: "a fixed list"}.get(holder, "a mapping")
    return ["holds", holder.__name__, [part[0] for part in known]], words


def trl_facts() -> dict[str, Any]:
    """SFTConfig's fields, how DPOConfig's and GRPOConfig's differ, the arguments of optimizers."""
    from trl import DPOConfig, GRPOConfig, SFTConfig

    fields = field_facts(SFTConfig)
    return {
        "trl": version("trl"),
        "fields": fields,
        "dpo": _difference(fields, field_facts(DPOConfig)),
        "grpo": _difference(fields, field_facts(GRPOConfig)),
        "optimizers": optimizer_facts(),
        "optimizer_modules": optimizer_modules(),
        "trackers": tracker_names(),
        "compilers": compiler_names(),
        "schedules": schedule_arguments(),
    }


def _difference(fields: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """What the fields of another of TRL's configurations are where they are not those of ``SFTConfig``, and which it lacks."""
    return {
        "fields": {name: field for name, field in others.items() if field != fields.get(name)},
        "lacks": [name for name in fields if name not in others],
    }


def optimizer_facts() -> dict[str, list[str] | None]:
    """By optimizer: the keys that transformers reads from ``optim_args``; None where it passes all of them on."""
    from transformers import trainer_optimizer

    by_optimizer: dict[str, list[str] | None] = {}
    for name, handler in trainer_optimizer._OPTIMIZER_HANDLERS.items():
        source = inspect.getsource(handler)
        if handler is trainer_optimizer._get_bitsandbytes_optimizer and "rmsprop" not in name.value:
            # One function for four kinds: RMSprop takes all, AdEMAMix reads some, AdamW and Lion none.
            source = source.replace("additional_optim_kwargs = ctx.optim_args", "") if "ademamix" in name.value else ""
        if re.search(r"optim_args\)|= ctx\.optim_args$|\*\*ctx\.optim_args", source, re.MULTILINE):
            by_optimizer[name.value] = None
            continue
        loops = re.findall(r"for key in \((.*?)\):\n\s+if key in ctx\.optim_args", source)
        keys = re.findall(r"optim_args(?:\.get\(|\.pop\(|\[)\"(\w+)\"", source)
        by_optimizer[name.value] = list(dict.fromkeys([*keys, *(key for loop in loops for key in re.findall(r"\w+", loop))]))
    return by_optimizer


def optimizer_modules() -> dict[str, str]:
    """By optimizer: the module that transformers imports it from, where that is neither torch nor transformers."""
    from transformers import trainer_optimizer

    by_optimizer = {}
    for name, handler in trainer_optimizer._OPTIMIZER_HANDLERS.items():
        found = re.findall(r"from (\w+)[\w.]* import", inspect.getsource(handler))
        if foreign := [module for module in found if module not in ("torch", "transformers")]:
            by_optimizer[name.value] = foreign[0]
    return by_optimizer


def tracker_names() -> list[str]:
    """What ``report_to`` may name: transformers' callbacks, and its words for all and none of them."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    return [*INTEGRATION_TO_CALLBACK, "all", "none"]


def compiler_names() -> list[str]:
    """The backends of torch.compile that accelerate takes and the installed torch has."""
    import torch
    from accelerate.utils import DynamoBackend

    return sorted({one.value.lower() for one in DynamoBackend} & set(torch._dynamo.list_backends(())))


def schedule_arguments() -> dict[str, list[str] | None]:
    """By schedule: the keys of ``lr_scheduler_kwargs`` that its function takes beside what the Trainer gives it; None where it
    hands all of them on."""
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    given = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
    taken = {kind.value: list(inspect.signature(function).parameters) for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items()}
    return {kind: None if "kwargs" in names else [name for name in names if name not in given] for kind, names in taken.items()}


def peft_facts() -> dict[str, Any]:
    """LoraConfig's fields."""
    from peft import LoraConfig

    return {"peft": version("peft"), "fields": field_facts(LoraConfig)}


# --- accelerate and DeepSpeed: the keys of their files ---


def accelerate_facts() -> dict[str, Any]:
    """The keys of accelerate's file, and the options of ``accelerate launch``."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    names = [name for action in launch_command_parser()._actions for name in action.option_strings]
    options = {name[2:] for name in names if re.fullmatch(r"--\w+", name)}
    return {
        "accelerate": version("accelerate"),
        "keys": [item.name for item in dataclasses.fields(ClusterConfig)],
        # fsdp_ignored_modules is read with getattr, without an option of its own
        "options": sorted({*options, "fsdp_ignored_modules"}),
    }


def deepspeed_facts() -> dict[str, Any]:
    """The keys of DeepSpeed's file."""
    from deepspeed.runtime import config, constants

    # DeepSpeed has no list of its top level: it asks the dictionary of the whole file for each key.
    keys = re.findall(r"param_dict(?:\.get\(|,\s*)([A-Z_0-9]+|\"\w+\"|'\w+')", inspect.getsource(config))
    names = {**vars(constants), **vars(config)}
    top = {names.get(word, word.strip("\"'")) for word in keys} | set(READ_ELSEWHERE)
    return {
        "deepspeed": version("deepspeed"),
        "keys": sorted(key for key in top if isinstance(key, str)),
    }


READ_ELSEWHERE = (
    "activation_checkpointing", "aio", "autotuning", "bf16", "bfloat16", "comet", "comms_logger", "communication_data_type",
    "csv_monitor", "data_efficiency", "expert_parallel", "flops_profiler", "fp16", "optimizer", "scheduler",
    "sequence_parallel_size", "tensor_parallel", "tensorboard", "timers", "torch_autocast", "wandb", "weight_quantization",
)  # fmt: skip
"""Keys of the top level for which other modules of 0.19.8 ask (deepspeed/*/config.py, runtime/*.py, monitor/, comm/)."""


# --- transformers: its causal language models ---


def model_kinds() -> list[str]:
    """The model types with a causal language model."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MAPPED

    root = Path(transformers.__file__).parent / "models"
    heads = re.compile(rf"^class \w+({'|'.join(CAUSAL)})\(", re.MULTILINE)
    kinds = []
    for kind in CONFIG_MAPPING:
        home = model_type_to_module_name(kind)
        source = root / home / f"modeling_{home}.py"
        # A folder with several models may hold the head of another: a kind counts that is named like it, or is mapped.
        if source.is_file() and (kind in MAPPED or (home == kind and heads.search(source.read_text()))):
            kinds.append(kind)
    return sorted(kinds)


def model_facts(kind: str) -> dict[str, Any]:
    """What one model type takes and is made of."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]
    module = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
    source, own = inspect.getsource(module), inspect.getsource(sys.modules[config.__module__])
    classes = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    classes = {name: value for name, value in classes.items() if inspect.isclass(value)}
    hints = {name: hint for name, hint in config.__annotations__.items() if name[0] != "_" and "ClassVar" not in str(hint)}
    # Keys of published files that are read and no fields: Qwen3-Next's full_attention_interval, Qwen3-MoE's head_dim.
    read = re.findall(r"kwargs\.(?:get|pop|setdefault)\(\s*\"(\w+)\"", own)
    read += re.findall(r"getattr\(\s*[\w.]*config,\s*\"(\w+)\"", source)
    aliases = dict(config.attribute_map)
    keys = {"model_type", *aliases, *aliases.values(), *hints, *read} - set(base_keys())
    defaults = {name: getattr(config, name) for name in hints if name in vars(config) and _is_plain(vars(config)[name])}
    flags = {name for value in classes.values() for name, on in vars(value).items() if on is True}
    calls = re.findall(r"\battention_interface\(\n(.*?)\n {8}\)", source, re.DOTALL)
    backend = {"_supports_attention_backend", "_supports_flash_attn"} <= flags
    return {
        "keys": sorted(keys),
        "types": {name: _annotation(hint) for name, hint in hints.items()},
        "defaults": defaults,
        "aliases": aliases,
        "classes": list(classes),
        # State spaces, linear attention, convolutions; MiniMax and LFM2 show it only by what they are made of.
        "carries_state": "_is_stateful" in flags or '"linear_attention"' in source or "causal_conv1d" in source,
        "sdpa": "_supports_sdpa" in flags,
        # The arguments that reach whichever attention is chosen; None where it cannot be chosen.
        "attention": sorted({word for call in calls for word in re.findall(r"^ {12}(\w+)=", call, re.M)}) if backend else None,
        "tp": dict(config.base_model_tp_plan or {}),
        "ep": dict(getattr(config, "base_model_ep_plan", None) or {}),
        "modules": {name: modules(config, value) for name, value in classes.items() if name.endswith(CAUSAL)},
    }  # fmt: skip


def base_keys() -> list[str]:
    """The keys that every configuration takes."""
    from transformers.configuration_utils import PreTrainedConfig

    return [name for name, hint in PreTrainedConfig.__annotations__.items() if name[0] != "_" and "ClassVar" not in str(hint)]


def _annotation(hint: Any) -> str:
    text = hint if isinstance(hint, str) else hint.__name__ if type(hint) is type else str(hint)
    return re.sub(r"\b\w+\.(?:\w+\.)*", "", text)


def modules(config: Any, model: Any) -> dict[str, str]:
    """The modules that LoRA can replace, of the default configuration and of each that differs from it in one choice:
    name, with 0 for every layer -> class. Empty where the model cannot be built here."""
    import torch
    from transformers.pytorch_utils import Conv1D

    absent = [name for name in config.__annotations__ if getattr(config, name, 0) is None]
    sizes = {name: SIZE for name in absent if _hint(config, name) == "int | None"}
    classes: dict[str, str] = {}
    for variant in _variants(config):
        for more in ({}, sizes):
            try:
                with torch.device("meta"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    built = model(config(**{**more, **variant}))
            except Exception:  # noqa: S112 - a choice that the model does not take
                continue
            for name, module in built.named_modules():
                for leaf in (torch.nn.Linear, Conv1D, torch.nn.Embedding):
                    if isinstance(module, leaf):
                        classes[re.sub(r"\.\d+(?=\.|$)", ".0", name)] = leaf.__name__
            break
    return classes


def _hint(config: Any, name: str) -> str:
    return _annotation(config.__annotations__[name])


def _variants(config: Any) -> Iterator[dict[str, Any]]:
    """Arguments of a configuration: the defaults, then each switch the other way, each size and list given or left out, and all
    layers of each kind."""
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES

    yield {}
    depth = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    for name in config.__annotations__:
        hint, default = _hint(config, name), getattr(config, name, None)
        if name in ("layer_types", "mlp_layer_types"):
            yield from ({depth: DEPTH, name: [kind] * DEPTH} for kind in ALLOWED_LAYER_TYPES)
        elif isinstance(default, bool):
            yield {depth: DEPTH, name: not default}
        elif hint == "int | None" or (hint == "int" and default == 0):
            yield {depth: DEPTH, name: None if default else SIZE}
        elif hint == "list[int] | None":
            yield {depth: DEPTH, name: [0]}


def transformers_facts(kinds: list[str]) -> dict[str, Any]:
    """All model types, the keys that all take, and the names of activations and rotary embeddings."""
    from transformers.activations import ACT2CLS
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    facts = {}
    for kind in kinds:
        sys.stderr.write(f"{kind}\n")
        facts[kind] = model_facts(kind)
    named = {"activations": sorted(ACT2CLS), "rope_types": sorted([*ROPE_INIT_FUNCTIONS, "default", "mrope"])}
    return {"transformers": version("transformers"), "keys": base_keys(), **named, "models": facts}


def lm_eval_facts() -> dict[str, Any]:
    """The names of lm-eval's tasks, groups and tags, in one line."""
    from lm_eval.tasks import TaskManager

    return {"lm_eval": version("lm_eval"), "tasks": " ".join(sorted(TaskManager().task_index))}


def write(name: str, facts: dict[str, Any]) -> None:
    """One file: a line for each model, so that a difference can be read."""
    models = facts.pop("models", None)
    text = json.dumps(facts, indent=1)
    if models is not None:
        lines = ",\n".join(f"  {json.dumps(kind)}: {json.dumps(known, sort_keys=True)}" for kind, known in models.items())
        text = text[:-2] + f',\n "models": {{\n{lines}\n }}\n}}'
    (FOLDER / f"{name}.json").write_text(text + "\n")


def main() -> None:
    """Write all files."""
    for facts in (trl_facts, peft_facts, accelerate_facts, deepspeed_facts, lm_eval_facts):
        write(facts.__name__.removesuffix("_facts"), facts())
    write("transformers", transformers_facts(model_kinds()))


if __name__ == "__main__":
    main()
