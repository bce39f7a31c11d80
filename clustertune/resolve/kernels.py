"""Kernels and compilers by their native keys: which models and settings they take, and which packages they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import quantization
from clustertune.recipe.findings import Found, show_value
from clustertune.recipe.layers import did_you_mean
from clustertune.recipe.library_facts import facts, model_facts
from clustertune.recipe.native_rules import row_tokens
from clustertune.recipe.parameters import Values, count
from clustertune.resolve.resolved import Derived, Distribution

PACKED = "packed_varlen"
"""The attention of packed conversations, each for itself: ``clustertune/training/packing.py``."""
_KEY = "model_init_kwargs.attn_implementation"
_WIDEST = 256
"""The largest head of torch's FlashAttention, which also takes multiples of 8 only (aten, flash_attn/flash_api.cpp of 2.13)."""

LIGER_MODELS = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v4", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma4_text",
    "glm4", "gpt_oss", "granite", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "llama4_text", "ministral", "mistral",
    "mixtral", "mllama_text_model", "muse_glimmer", "nemotron", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3",
})  # fmt: skip
"""Model types of text that Liger has kernels for (liger_kernel/transformers/monkey_patch.py of 0.8.5,
MODEL_TYPE_TO_APPLY_LIGER_FN). Of others transformers says "not supported" in the log and trains without."""


def attention_of(train: Mapping[str, Any]) -> str:
    """The attention implementation that the arguments name; sdpa is transformers' default where the model supports it."""
    return str((train["model_init_kwargs"] or {}).get("attn_implementation") or "sdpa")


def packs(train: Mapping[str, Any]) -> bool:
    """Whether a micro batch is one row of conversations that TRL keeps apart: all of its packing but ``wrapped``."""
    return bool(train["padding_free"] or (train["packing"] and train["packing_strategy"] != "wrapped"))


def cannot_pack(architecture: Mapping[str, Any]) -> str | None:  # noqa: PLR0911 - a reason each
    """Why ``packed_varlen`` does not compute the attention of a model; None where it does."""
    values, kind = Values(architecture), str(architecture["model_type"])
    taken = model_facts(kind)["attention"]
    if taken is None or {"s_aux", "position_bias"} & set(taken):
        what = "sinks or a position bias" if taken else "code of its own"
        return f"the attention of {kind} has {what} in transformers"
    keys = [key for key in values.keys() if "attn" in key or "attention" in key]  # noqa: SIM118
    if on := next((key for key in keys if "drop" in key and values.get(key)), None):
        return f"it has no dropout, and the model has {on}: {values.get(on)}"
    if on := next((key for key in keys if "softcap" in key and values.get(key)), None):
        return f"it has no soft cap of scores, and the model has {on}: {values.get(on)}"
    if values.get("alibi"):
        return "it has no alibi"
    if "chunked_attention" in values.attention_types:
        return "the model attends within chunks, which it does not"
    counted = count(architecture)
    if counted is None and values.get("kv_lora_rank"):
        return f"keys and values of {kind} have heads of different sizes"
    sizes = {(one.attention.qk_dim, one.attention.v_dim) for one in counted.layers} if counted else {(values.head_dim,) * 2}
    if odd := next((pair for pair in sorted(sizes) if pair[0] != pair[1] or pair[0] % 8 or pair[0] > _WIDEST), None):
        return f"heads of {odd[0]} (keys) and {odd[1]} (values): it takes equal multiples of 8, up to {_WIDEST}"
    return None


def attention(train: Mapping[str, Any], architecture: Mapping[str, Any] | None) -> Derived | None:
    """What takes the place of sdpa where the recipe names no attention: ``packed_varlen`` where conversations are packed and it
    computes the model's, ``eager`` where transformers has no sdpa for the model."""
    stated = (train["model_init_kwargs"] or {}).get("attn_implementation")
    if stated or architecture is None:
        return None
    if packs(train) and not cannot_pack(architecture):
        reason = "packed: each conversation attends to itself alone, by torch's variable-length attention; "
        return Derived(f"train.{_KEY}", PACKED, reason + "sdpa would need a mask")
    if model_facts(kind := str(architecture["model_type"]))["sdpa"]:
        return None
    return Derived(f"train.{_KEY}", "eager", f"transformers has no scaled_dot_product_attention for {kind}")


TRACKERS = {
    "tensorboard": ("tensorboard", "tensorboardX"), "mlflow": ("mlflow", "mlflow-skinny"), "azure_ml": ("azureml-core",),
    "comet_ml": ("comet-ml",), "flyte": ("flytekit",),
}  # fmt: skip
"""Packages of trackers that are not named like them. Each callback but W&B's, without which a rank continues, raises where its
package is missing (transformers/integrations/integration_utils.py)."""
_BUILT_IN = ("wandb", "all", "none", "kubeflow")
"""Words of ``report_to`` that need nothing, take what is there, or, kubeflow, write to a server that the job's environment
names."""
_DISTRIBUTIONS = {"optimi": "torch-optimi"}
"""Packages of optimizers that are not named like their module."""

_LOADERS = {
    "bitsandbytes": ("bitsandbytes",), "torchao": ("torchao",), "fbgemm_fp8": ("fbgemm-gpu",), "gptq": ("gptqmodel",),
    "awq": ("gptqmodel",), "fp8": ("kernels",), "mxfp4": ("kernels",),
}  # fmt: skip
"""What transformers loads a quantised base with, and computes with it."""
_COMPILERS = {"tvm": ("apache-tvm",)}
"""Packages of compilers beside torch's own (``torch_compile_backend``)."""
_CACHES = {"quantized": ("optimum-quanto", "hqq")}
"""The same of ``cache_implementation`` (transformers/cache_utils.py, QuantizedCache)."""


def needed(train: Mapping[str, Any], *, gpus: bool) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Key, value and the packages of which one must be installed. Without GPUs the run leaves kernels out."""
    named = attention_of(train)
    if named.startswith("flash_attention") and gpus:
        # transformers loads a compiled kernel from the Hub by the package kernels where flash-attn is not installed.
        yield f"train.{_KEY}", named, ("flash-attn-3" if named.endswith("_3") else "flash-attn", "kernels")
    if train["use_liger_kernel"] and gpus:
        yield "train.use_liger_kernel", "true", ("liger-kernel",)
    config = quantization.of(train)
    if config and (loaders := _LOADERS.get(method := quantization.method(config))) and (gpus or "kernels" not in loaders):
        yield "train.model_init_kwargs.quantization_config", method, loaders
    if module := facts("trl")["optimizer_modules"].get(optimizer := str(train["optim"])):
        yield "train.optim", optimizer, (_DISTRIBUTIONS.get(module, module.replace("_", "-")),)
    if (compiler := str(train["torch_compile_backend"]).lower()) in _COMPILERS:
        yield "train.torch_compile_backend", compiler, _COMPILERS[compiler]
    if train.get("use_vllm"):
        yield "train.use_vllm", "true", ("vllm",)
    if (cache := train.get("cache_implementation")) in _CACHES:
        yield "train.cache_implementation", str(cache), _CACHES[str(cache)]
    for tracker in trackers(train):
        if tracker not in _BUILT_IN:
            yield "train.report_to", tracker, TRACKERS.get(tracker, (tracker,))


def trackers(train: Mapping[str, Any]) -> list[str]:
    """The words of ``report_to``."""
    named = train["report_to"]
    return [str(one) for one in ([named] if isinstance(named, str) else named or [])]


def find_problems(
    train: Mapping[str, Any], architecture: Mapping[str, Any] | None, accelerate: Mapping[str, Any], file: str
) -> Iterator[Found]:
    """What the libraries refuse at the start of the ranks, or leave out without a message. ``file``: the accelerate file."""
    attention = ("train", *_KEY.split("."))
    known = facts("trl")["trackers"]
    for tracker in trackers(train):
        if tracker not in known:
            text = f"{show_value(tracker)} is no tracker of transformers: {', '.join(known)}"
            yield ("train", "report_to"), text, did_you_mean(tracker, known)
    compilers, compiler = facts("trl")["compilers"], train["torch_compile_backend"]
    if compiler is not None and compiler.lower() not in compilers:
        text = f"{show_value(compiler)} is no compiler that the pinned torch has and accelerate takes: {', '.join(compilers)}"
        yield ("train", "torch_compile_backend"), text, did_you_mean(compiler, compilers)
    kind = str((architecture or {}).get("model_type", ""))
    if train["use_liger_kernel"] and kind and kind not in LIGER_MODELS:
        yield ("train", "use_liger_kernel"), f"Liger has no kernels for {kind}", "leave it out"
    if isinstance(config := train["liger_kernel_config"], dict) and config.get("fused_linear_cross_entropy"):
        text = "fused_linear_cross_entropy: true takes the place of the model's forward pass, in which TRL has its own "
        yield ("train", "liger_kernel_config"), f"{text}fused loss", "leave it out: TRL computes the loss in tiles"
    named = attention_of(train)
    if named == PACKED and architecture is not None and (why := cannot_pack(architecture)):
        yield attention, f"{PACKED}: {why}", "leave it out: sdpa is taken"
    # The Trainer hands its own backend to accelerate, which then does not look at the file's (transformers/trainer.py:796).
    filed = acc.dynamo_backend(accelerate)
    own = train["torch_compile_backend"] or ("inductor" if train["torch_compile"] else None)
    if own and filed and filed.lower() != str(own).lower():
        key = "torch_compile_backend" if train["torch_compile_backend"] else "torch_compile"
        shown = str(train[key]).lower() if isinstance(train[key], bool) else train[key]
        text = f"{shown}, while {file} has {acc.BACKEND}: {filed}: the file's is not read"
        yield ("train", key), text, "keep one of the two"


def mask_warnings(train: Mapping[str, Any], architecture: Mapping[str, Any]) -> Iterator[str]:
    """What packing costs where a mask keeps conversations apart, and why it does."""
    if not packs(train) or attention_of(train) not in ("sdpa", "eager"):
        return
    named, why = (train["model_init_kwargs"] or {}).get("attn_implementation"), cannot_pack(architecture)
    because = [f"the recipe names {named}"] if named else []
    because += [f"{PACKED} cannot compute it: {why}"] if why else []
    fix = "train.packing=false avoids it" if why else f"remove train.{_KEY} to use {PACKED}, which attends per conversation"
    row = train["per_device_train_batch_size"] * row_tokens(train)
    yield (
        f"{attention_of(train)} with packing uses a full {row:,} x {row:,} attention mask per micro batch and head "
        f"({'; '.join(because)}): {fix}"
    )


def warnings(distribution: Distribution) -> Iterator[str]:
    """What is allowed and rarely meant."""
    if distribution.compiled and not distribution.compiled_by_layer:
        yield (
            "the model is compiled as a whole, every layer again, and the first step takes minutes; "
            f"accelerate.{acc.BY_LAYER}=true compiles one layer for all"
        )
