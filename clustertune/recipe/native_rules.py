"""What the dataclasses of TRL and PEFT do not say: ranges, keys that belong to other files, keys of former releases."""

from __future__ import annotations

import copy
import json
import math
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from clustertune.host.credentials import holds_secret, may_name_secret
from clustertune.recipe.findings import SECRET_FIX, Found, is_number, show_value
from clustertune.recipe.layers import did_you_mean, nearest
from clustertune.recipe.library_facts import facts
from clustertune.recipe.sections import Number, refuse_bool


def _steps_or_share(value: float) -> float:
    """A number of steps from 1, or below 1 a share of all steps (``TrainingArguments._validate_args``)."""
    if value <= 0 or (value >= 1 and value != int(value)):
        raise ValueError("must be a whole number of steps, or a share of them between 0 and 1")
    return value


def _steps_or_all(value: float) -> float:
    if value < 1 and value != -1:
        raise ValueError("must be at least 1, or -1")
    return value


# Bounds of numbers, by key: pydantic's Field, or a function that raises ValueError.

_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
"""In words, what pydantic names them."""

_SHARE = Field(ge=0, lt=1)

TRAIN_RANGES = {
    **dict.fromkeys(("learning_rate", "adam_epsilon"), Field(gt=0, lt=1)),
    **dict.fromkeys(("weight_decay", "adam_beta1", "adam_beta2", "label_smoothing_factor"), _SHARE),
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), AfterValidator(_steps_or_share)),
    "neftune_noise_alpha": Field(gt=0),
    "num_train_epochs": Field(gt=0, le=10_000),  # no rate ever falls in a schedule of a billion
    **dict.fromkeys(("max_grad_norm", "eval_delay"), Field(ge=0)),
    "dataloader_num_workers": Field(ge=0, le=512),  # each is a process on a node that others may share
    "global_batch_size": Field(ge=1, le=10**7),
    **dict.fromkeys(
        (
            *("per_device_train_batch_size", "per_device_eval_batch_size", "eval_accumulation_steps", "save_total_limit"),
            *("torch_empty_cache_steps", "dataloader_prefetch_factor"),
        ),
        Field(ge=1),
    ),
    "pad_to_multiple_of": Field(ge=1, le=1024),  # kernels ask for 8 to 256; every row is filled up to it
    "ddp_timeout": Field(ge=60),  # seconds of any collective, the first of which waits for the slowest rank's imports
    # numpy, which set_seed seeds too, takes 32 bits.
    **dict.fromkeys(("seed", "data_seed"), Field(ge=0, le=2**32 - 1)),
    "warmup_steps": AfterValidator(lambda value: value and _steps_or_share(value)),
    "max_steps": AfterValidator(_steps_or_all),
    "max_length": Field(ge=8),
}

DPO_RANGES = {
    "beta": Field(gt=0),
    "ld_alpha": Field(ge=0, le=1),
    "label_smoothing": Field(ge=0, lt=0.5),
    "discopop_tau": Field(gt=0),
}

GRPO_RANGES = {
    "num_generations": Field(ge=2),
    **dict.fromkeys(
        ("num_generations_eval", "max_completion_length", "num_iterations", "steps_per_generation", "max_prompt_length"),
        Field(ge=1),
    ),
    **dict.fromkeys(("beta", "epsilon", "epsilon_high", "entropy_coef", "top_k"), Field(ge=0)),
    "temperature": Field(gt=0),
    **dict.fromkeys(("top_p", "top_entropy_quantile"), Field(gt=0, le=1)),
    "min_p": Field(ge=0, le=1),
    "vllm_gpu_memory_utilization": Field(gt=0, lt=1),
}

LORA_RANGES = {"r": Field(ge=1, le=65536), "lora_alpha": Field(gt=0), "lora_dropout": _SHARE}

_RESUME = "a run resumes by itself from its newest whole checkpoint"

TRAIN_OWNED = {
    **dict.fromkeys(("output_dir", "run_name", "logging_dir"), "the run folder decides it"),
    **dict.fromkeys(
        ("fsdp", "fsdp_config", "deepspeed", "parallelism_config", "accelerator_config"),
        "the distribution is in the recipe's accelerate.yaml",
    ),
    **dict.fromkeys(("use_cpu", "no_cuda", "local_rank", "ddp_backend"), "the launcher says so for each machine"),
    **dict.fromkeys(
        ("dataset_num_proc", "dataset_kwargs", "dataset_text_field", "remove_unused_columns"),
        "prepare makes the rows before the job, on all of its cores",
    ),
    **dict.fromkeys(
        (
            *("push_to_hub", "push_to_hub_model_id", "push_to_hub_organization", "hub_model_id", "hub_private_repo"),
            *("hub_strategy", "hub_always_push", "hub_revision"),
            *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        ),
        "a run publishes nothing",
    ),
    **dict.fromkeys(
        (
            *("activation_checkpointing", "activation_checkpointing_kwargs"),
            *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
        ),
        "the section activation_checkpointing says it: {ratio: 0} for none, {ratio: 1} for all layers",
    ),
    "hub_token": "a recipe contains no secrets",
    "overwrite_output_dir": "nothing published is ever overwritten",
    "gradient_accumulation_steps": "it is derived from global_batch_size: set that",
    "resume_from_checkpoint": _RESUME,
    "ignore_data_skip": "a resumed run continues at the same place in the data",
    "restore_callback_states_from_checkpoint": _RESUME,
    "load_best_model_at_end": "checkpoints are kept and chosen by step",
    "auto_find_batch_size": "it changes the global batch size without a message",
    "enable_jit_checkpoint": "the run saves on SIGTERM and SIGUSR1 by itself, all ranks at one step",
    "save_on_each_node": "checkpoints are sharded over all ranks in one folder",
    "trust_remote_code": "code from a model repository is never run",
    "chat_template_path": "write model.chat_template",
    "do_train": "the command decides it",
    "do_eval": "eval_strategy decides it",
    "do_predict": "the command decides it",
    # transformers 5.23 (trainer.py:2354) divides what it gathered by tp x cp: ungathered, the loss is tp x cp times it.
    "average_tokens_across_devices": "the loss is the mean over the tokens of all ranks",
    "disable_tqdm": "a bar is shown where there is a terminal",
}
"""Fields of ``SFTConfig`` that a recipe may not set, each with the reason."""

_REFERENCE = "the reference stays the base model: a checkpoint holds no other"
_BESIDE = "each attempt would compute them again before its first step: the reference is computed beside the model"

DPO_OWNED = {
    "precompute_ref_log_probs": _BESIDE,
    "precompute_ref_batch_size": _BESIDE,
    "sync_ref_model": _REFERENCE,
    "ref_model_mixup_alpha": _REFERENCE,
    "ref_model_sync_steps": _REFERENCE,
    "label_smoothing_factor": "DPOTrainer does not read it; its own is label_smoothing",
    "padding_free": "TRL 1.16 pads all the same, with a warning",  # trl/trainer/dpo_trainer.py:732
}
"""The same of ``DPOConfig``'s own."""

_SERVERS = "rollout: servers has servers of its own in the job; vllm_mode: colocate is that of the GPUs that train"
_NO_TOOLS = "the model is given no tools"

GRPO_OWNED = {
    **dict.fromkeys(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), _REFERENCE),
    **dict.fromkeys(
        ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"), _SERVERS
    ),
    "reward_weights": "the section reward says it, as weight",
    "generation_batch_size": "steps_per_generation says it",
    "label_smoothing_factor": "GRPOTrainer does not read it",
    **dict.fromkeys(
        ("log_completions", "log_unique_prompts", "num_completions_to_print", "log_multimodal"),
        "sample answers are in metrics.jsonl and in the report",
    ),
    "log_completions_hub_repo": "a run publishes nothing",
    "max_tool_calling_iterations": _NO_TOOLS,
    # It casts the model, adapters too (trl/trainer/grpo_trainer.py:1777 of 1.16), and was not tried sharded.
    **dict.fromkeys(
        ("use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged"),
        "transformers' generate is used, or vLLM: use_vllm",
    ),
    "vllm_importance_sampling_cap": "write vllm_importance_sampling_clip_max",
}
"""The same of ``GRPOConfig``'s own."""

MAX_PROMPT = "max_prompt_length"
"""A key of ours under ``train`` with ``trainer: grpo``, once TRL's own: tokens of a prompt at most, chat template included.
TRL 1.16 takes any length, and what an over-long one needs is found by running out of memory; ``prepare`` refuses it here."""

TEMPLATE_ARGUMENTS = "chat_template_kwargs"
"""What the chat template is given: a key of ``GRPOConfig``. Here of SFT and DPO too, where TRL reads a column of this
name, which goes before the key."""

LORA_OWNED = {
    "base_model_name_or_path": "it is the recipe's model.name",
    "revision": "it is the recipe's model.revision",
    "peft_type": "it is LORA here",
    "peft_version": "the installed PEFT writes its own",
    "auto_mapping": "PEFT fills it in",
    "inference_mode": "the command decides it",
    "runtime_config": "it is not kept in an adapter",
}

MODEL_INIT: dict[str, tuple[str, ...]] = {
    "attn_implementation": ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "packed_varlen"),
    "dtype": ("bfloat16", "float16", "float32"),
}
"""What ``train.model_init_kwargs`` may say; name, revision and code of the model have their own place."""

LORA_VARIANTS = {
    "use_dora": "DoRA's magnitudes",
    "use_qalora": "QALoRA's pooled inputs",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "alora_invocation_tokens": "activated LoRA",
    "trainable_token_indices": "trained single tokens",
    "layer_replication": "replicated layers",
    "lora_bias": "biases of LoRA",
    "megatron_config": "Megatron's layers",
}
"""Variants whose update of a weight is not B A."""
LORA_UNSUPPORTED = LORA_VARIANTS | dict.fromkeys(
    ("loftq_config", "eva_config", "corda_config", "lora_ga_config"), "weights changed before training"
)
"""What cannot be exported from shards and merged into the published weights: better known before the queue."""
LORA_PLAIN_INIT = (True, False, "gaussian", "orthogonal")
"""Initializations that leave the base weights as they are (PiSSA, OLoRA, CorDA, LoftQ and others change them)."""

TRAIN_REMOVED = {
    "warmup_ratio": "write warmup_steps: a number below 1 is a share of all steps",
    "evaluation_strategy": "write eval_strategy",
    "max_seq_length": "write max_length",
    "group_by_length": "write train_sampling_strategy: group_by_length",
    "lr": "write learning_rate",
    "epochs": "write num_train_epochs",
    "batch_size": "write global_batch_size",
    "torch_dtype": "write model_init_kwargs: {dtype: bfloat16}",
    "attn_implementation": "write model_init_kwargs: {attn_implementation: sdpa}",
}
"""Keys of former releases and of other trainers, with what takes their place in the pinned stack."""

LORA_REMOVED = {
    "alpha": "write lora_alpha",
    "rank": "write r",
    "lora_r": "write r",
    "dropout": "write lora_dropout",
    "lora_target_modules": "write target_modules",
}


# --- native ---------------------------------------------------------------------------------------------------------------

# The fields of the pinned ``SFTConfig`` and ``LoraConfig``, and values checked against them.

UNKNOWN = object()
"""The default of a field that is created for each object, or is not a plain value."""

_WHOLE = Annotated[int, BeforeValidator(refuse_bool)]
_PLAIN: dict[str, Any] = {
    "int": _WHOLE, "float": Number, "str": str, "bool": bool, "dict": dict[str, Any], "list": list[Any], "Any": Any,
}  # fmt: skip
_HOLDERS: dict[str, type] = {"list": list, "dict": dict, "tuple": tuple}


Kind = list[Any]
"""One kind of value as JSON: its sort, and what belongs to it.

``["none"]``, ``["plain", "int"]``, ``["words", "a", "b"]`` (one of these), ``["pattern", "^a$"]`` (a text of this form),
``["holds", "list", [kinds of its entries]]``.
"""


@dataclass(frozen=True)
class NativeField:
    """One field of a foreign dataclass."""

    name: str
    default: Any
    """The default value, or :data:`UNKNOWN`."""
    kinds: list[Kind] | None
    """What its value may be, one of them; None where the field takes a Python object that YAML cannot give."""
    expected: str
    """What the field takes, as a phrase."""
    choices: tuple[str, ...] = ()
    """The values that it takes, where they are a closed set."""


GLOBAL_BATCH = NativeField("global_batch_size", UNKNOWN, [["plain", "int"]], "a whole number of sequences")
"""The one key of ``train`` that is not TRL's."""


@cache
def train_fields(trainer: str = "sft") -> dict[str, NativeField]:
    """The fields of TRL's ``SFTConfig``, ``DPOConfig`` or ``GRPOConfig`` with those of its bases, by the ``trainer``."""
    known, other = facts("trl")["fields"], facts("trl").get(trainer)
    if other is not None:
        known = {name: field for name, field in (known | other["fields"]).items() if name not in other["lacks"]}
    fields = _fields(known)
    fields[TEMPLATE_ARGUMENTS] = _fields(facts("trl")["grpo"]["fields"])[TEMPLATE_ARGUMENTS]
    if trainer == "grpo":
        fields[MAX_PROMPT] = NativeField(MAX_PROMPT, 512, [["plain", "int"]], "a whole number")
    return fields


OWNED = {"sft": {}, "dpo": DPO_OWNED, "grpo": GRPO_OWNED}
"""By trainer, what a recipe may not set beside :data:`TRAIN_OWNED`."""


def row_tokens(train: Mapping[str, Any]) -> Any:
    """Tokens of a sequence at most, of ``train`` with its defaults: ``max_length``; with GRPO a prompt and its completion."""
    return train[MAX_PROMPT] + train["max_completion_length"] if MAX_PROMPT in train else train["max_length"]


def template_arguments(train: Mapping[str, Any]) -> dict[str, Any]:
    """What a complete section ``train`` gives the chat template. TRL takes an object, or a text that holds one.

    Raises ValueError where a text does not.
    """
    value = train[TEMPLATE_ARGUMENTS]
    arguments = json.loads(value) if isinstance(value, str) else value or {}
    if not isinstance(arguments, dict):
        raise ValueError(f"{show_value(value)} is no object")
    return arguments


def mixed_precision(train: Mapping[str, Any]) -> str:
    """What a run computes in beside its float32 weights: ``bf16``, ``fp16`` or ``no``; the one reader of these arguments.

    TRL switches bf16 on where neither it nor fp16 is given (TRL 1.16, trainer/base_config.py:108).
    """
    if train["bf16"] or (train["bf16"] is None and not train["fp16"]):
        return "bf16"
    return "fp16" if train["fp16"] else "no"


@cache
def lora_fields() -> dict[str, NativeField]:
    """The fields of PEFT's ``LoraConfig`` with those of its bases."""
    return _fields(facts("peft")["fields"])


def train_defaults(trainer: str = "sft") -> dict[str, Any]:
    """What TRL takes for each key of ``train`` that a recipe leaves out. The one place that knows it.

    Of ``dpo`` and ``grpo`` too it has all keys of SFTConfig, so that a reader need not ask for the trainer: neither packs.
    """
    return _defaults(train_fields(), set(TRAIN_OWNED)) | _defaults(train_fields(trainer), {*TRAIN_OWNED, *OWNED[trainer]})


def lora_defaults() -> dict[str, Any]:
    """What PEFT takes for each key of ``lora`` that a recipe leaves out. The one place that knows it."""
    return _defaults(lora_fields(), set(LORA_OWNED))


def _defaults(fields: Mapping[str, NativeField], owned: Collection[str]) -> dict[str, Any]:
    return {name: copy.copy(field.default) for name, field in fields.items() if name not in owned}


def filled(defaults: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """A section with the library's ``defaults`` in it: for a key that is null, too."""
    values = {key: value for key, value in stated.items() if value is not None}
    return values | {key: value for key, value in defaults.items() if key not in values}


def _fields(listed: dict[str, Any]) -> dict[str, NativeField]:
    return {
        name: NativeField(name, item.get("default", UNKNOWN), item["kinds"], item["expected"], tuple(item["choices"]))
        for name, item in listed.items()
    }


def check_value(field: NativeField, value: Any) -> Any:
    """The value as the field takes it: the text "5e-5" becomes a number, ``true`` does not.

    Raises ValueError with what the field takes.
    """
    if value is None:
        if field.kinds is None or field.default is None or ["none"] in field.kinds:
            return None
        raise ValueError(f"empty; it takes {field.expected}")
    if field.kinds is None:
        raise ValueError("takes a Python object, which a recipe cannot give")
    if not _finite(value):
        raise ValueError("not a finite number")
    try:
        checked = _adapter(json.dumps(field.kinds)).validate_python(value)
    except ValidationError:
        raise ValueError(f"it takes {field.expected}") from None
    # `float` fields such as logging_steps take whole numbers too, and mean them.
    return value if type(value) is int and isinstance(checked, float) else checked


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return all(map(_finite, value)) if isinstance(value, list) else True


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    """What checks values of the kinds that are written so in JSON."""
    return TypeAdapter(reduce(lambda a, b: Union[a, b], map(_pydantic_type, json.loads(name))))  # noqa: UP007 (not all are types)


def _pydantic_type(kind: Kind) -> Any:
    sort, *choices = kind
    if sort == "none":
        return None
    if sort == "plain":
        return _PLAIN[choices[0]]
    if sort == "words":
        return Literal[tuple(choices)]
    if sort == "pattern":
        return Annotated[str, Field(pattern=choices[0])]
    return types.GenericAlias(_HOLDERS[choices[0]], tuple(_pydantic_type(inner) for inner in choices[1]))


# --- a section against them -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NativeSection:
    """One section whose keys are a foreign dataclass's."""

    name: str
    owner: str
    fields: dict[str, NativeField]
    owned: Mapping[str, str]
    removed: Mapping[str, str]
    ranges: Mapping[str, Any]

    def check(self, field: NativeField, value: Any) -> Any:
        """The value as the field takes it. Raises ValueError with what it takes."""
        result = check_value(field, value)
        if field.name in self.ranges and is_number(result):
            try:
                TypeAdapter(Annotated[float, self.ranges[field.name]]).validate_python(result)
            except ValidationError as error:
                kind, limit = next(iter(error.errors()[0]["ctx"].items()))
                raise ValueError(f"must be {_BOUNDS[kind]} {limit:g}" if kind in _BOUNDS else str(limit)) from None
        return result


def train_section(trainer: str = "sft") -> NativeSection:
    """The section ``train`` of a recipe with this ``trainer``."""
    owned = TRAIN_OWNED | OWNED[trainer]
    ranges = TRAIN_RANGES | {"dpo": DPO_RANGES, "grpo": GRPO_RANGES}.get(trainer, {})
    fields = {**train_fields(trainer), "global_batch_size": GLOBAL_BATCH}
    return NativeSection("train", f"{trainer.upper()}Config", fields, owned, TRAIN_REMOVED, ranges)


def lora_section() -> NativeSection:
    """The section ``lora``."""
    return NativeSection("lora", "LoraConfig", lora_fields(), LORA_OWNED, LORA_REMOVED, LORA_RANGES)


def check(section: NativeSection, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Found]]:
    """The values of a section as the foreign dataclass takes them, and everything that is wrong with them."""
    checked: dict[str, Any] = {}
    findings: list[Found] = []
    known = set(section.fields) - set(section.owned)
    for key, value in values.items():
        path, fix = (section.name, key), None
        if holds_secret(value):  # reported with the schema's problems
            continue
        if value is None and key not in section.fields and key in train_fields():
            continue  # of a base for the other trainer, taken out
        if key in section.owned:
            findings.append((path, f"not allowed in a recipe: {section.owned[key]}", "leave it out"))
        elif key in section.fields:
            field = section.fields[key]
            try:
                checked[key] = section.check(field, value)
            except ValueError as error:
                fix = did_you_mean(value, field.choices) if field.choices and isinstance(value, str) else None
                shown = "" if value is None else f"{show_value(value)}: "
                known_words = f"{len(field.choices)} values are known here" if fix and len(field.choices) > 8 else str(error)
                findings.append((path, f"{shown}{known_words}", fix))
        elif key not in section.removed and may_name_secret(key) and nearest(key, known) is None:
            findings.append((path, "looks like a secret (value not shown)", SECRET_FIX))
        else:
            fix = section.removed.get(key) or did_you_mean(key, known)
            findings.append((path, f"unknown key: not a field of {section.owner} in the pinned release", fix))
    return checked, findings
