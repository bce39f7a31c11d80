"""Kernels and compilers by their native keys: which models and settings they take, and which packages they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clustertune.config import accelerate_file as acc
from clustertune.config.checks import Place
from clustertune.errors import Problem

LIGER_MODELS = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v4", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma4_text",
    "glm4", "gpt_oss", "granite", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "llama4_text", "ministral", "mistral",
    "mixtral", "mllama_text_model", "muse_glimmer", "nemotron", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3",
})  # fmt: skip
"""Model types of text that Liger has kernels for (liger_kernel/transformers/monkey_patch.py of 0.8.5,
MODEL_TYPE_TO_APPLY_LIGER_FN). Of others transformers says "not supported" in the log and trains without."""


def needed(train: Mapping[str, Any], *, gpus: bool) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Key, value and the packages of which one must be installed. Without GPUs the run leaves these kernels out."""
    attention = str((train.get("model_init_kwargs") or {}).get("attn_implementation", "sdpa"))
    if attention.startswith("flash_attention") and gpus:
        # transformers loads a compiled kernel from the Hub by the package kernels where flash-attn is not installed.
        yield "train.model_init_kwargs.attn_implementation", attention, ("flash-attn", "kernels")
    if train.get("use_liger_kernel") and gpus:
        yield "train.use_liger_kernel", "true", ("liger-kernel",)


def find_problems(
    train: Mapping[str, Any], architecture: Mapping[str, Any] | None, accelerate: Mapping[str, Any], file: str, place: Place
) -> Iterator[Problem]:
    """What the libraries refuse at the start of the ranks, or leave out in silence."""

    def problem(key: str, text: str, fix: str) -> Problem:
        return Problem(text, file=place(("train", *key.split("."))), key=f"train.{key}", fix=fix)

    kind = str((architecture or {}).get("model_type", ""))
    if train.get("use_liger_kernel") and kind and kind not in LIGER_MODELS:
        yield problem("use_liger_kernel", f"Liger has no kernels for {kind}", "leave it out")
    if isinstance(given := train.get("liger_kernel_config"), dict) and given.get("fused_linear_cross_entropy"):
        text = (
            "fused_linear_cross_entropy: true takes the place of the model's forward pass, in which TRL has its own fused loss"
        )
        yield problem("liger_kernel_config", text, "leave it out: TRL computes the loss in tiles")
    attention = str((train.get("model_init_kwargs") or {}).get("attn_implementation", "sdpa"))
    if attention.startswith("flash_attention") and train.get("bf16") is False and not train.get("fp16"):
        text = f"{attention} computes in 16 bits only, and bf16 is false"
        yield problem("model_init_kwargs.attn_implementation", text, "use sdpa, or train.bf16=true")
    yield from _compilers(train, accelerate, file, place)


def _compilers(train: Mapping[str, Any], accelerate: Mapping[str, Any], file: str, place: Place) -> Iterator[Problem]:
    """The Trainer hands its own backend to accelerate, which then does not look at the file's (transformers/trainer.py:796)."""
    dynamo = acc.section(accelerate, "dynamo_config")
    filed = str(dynamo.get("dynamo_backend", "")).lower()
    own = train.get("torch_compile_backend") or ("inductor" if train.get("torch_compile") else None)
    if own and filed and filed != str(own).lower():
        key = "torch_compile_backend" if train.get("torch_compile_backend") else "torch_compile"
        text = f"{show(train[key])}, while {file} has dynamo_backend: {dynamo['dynamo_backend']}: the file's is not read"
        yield Problem(text, file=place(("train", key)), key=f"train.{key}", fix="keep one of the two")


def show(value: object) -> str:
    """A value as a recipe writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def compiled(train: Mapping[str, Any], accelerate: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether the model is compiled, and whether layer by layer: once, and then taken for all layers of one kind."""
    dynamo = acc.section(accelerate, "dynamo_config")
    backend = str(dynamo.get("dynamo_backend", dynamo.get("backend", "NO"))).upper()
    named = train.get("torch_compile") or train.get("torch_compile_backend") or train.get("torch_compile_mode")
    on = bool(named) or backend not in ("NO", "NONE", "FALSE")
    regional = dynamo.get("dynamo_use_regional_compilation", dynamo.get("use_regional_compilation", False))
    return on, on and str(regional).lower() in ("true", "1", "yes")


def warnings(train: Mapping[str, Any], accelerate: Mapping[str, Any]) -> Iterator[str]:
    """What is allowed and rarely meant."""
    on, by_layer = compiled(train, accelerate)
    if on and not by_layer:
        yield (
            "the model is compiled as a whole, every layer anew, and the first step takes minutes; "
            "accelerate.dynamo_config.dynamo_use_regional_compilation=true compiles one layer for all"
        )
