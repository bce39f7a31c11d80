"""What a distribution does not carry, for this model and this recipe: refused before the queue, with what carries it.

Facts of the installed stack: accelerate 1.15 (``parallelism_config.py``, ``accelerator.py``), transformers 5.23 (the plans of
``models/*/configuration_*.py``), torch 2.13's FSDP2, PEFT 0.20 and bitsandbytes 0.50.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clustertune.config import accelerate_file as acc
from clustertune.config import quantization
from clustertune.config.checks import is_pattern
from clustertune.config.findings import Found
from clustertune.config.native_rules import show_value, train_fields
from clustertune.config.parameters import matches, narrowest
from clustertune.config.values import carries_state, has_sdpa, parallel_plans
from clustertune.config.yamlfile import KeyPath

_EMBEDDING = "model.embed_tokens"
"""The input embedding, as Llama's kin and most others name it; GPT-NeoX's embed_in is not looked for."""
TP_STYLES = frozenset({"colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "replicated_with_grad_allreduce"})
"""The styles of a dense plan that ``clustertune/training/tensor.py`` carries out."""
EP_STYLES = frozenset({"ep_dispatch_experts", "grouped_gemm"})
_CP_ATTENTION = ("sdpa", None)


def find_problems(
    train: Mapping[str, Any],
    lora: object,
    accelerate: Mapping[str, Any],
    architecture: Mapping[str, Any] | None,
    *,
    zero: int | None = None,
) -> Iterator[Found]:
    """Everything that the strategy of ``accelerate`` (the file's mapping) cannot do of what the recipe asks.

    ``architecture`` is None where the model is not known; ``zero`` is DeepSpeed's stage.
    """
    sizes, kind = acc.parallel_sizes(accelerate), accelerate.get("distributed_type")
    if "sp" in sizes:
        text = f"{sizes['sp']}: accelerate's sequence parallelism is DeepSpeed's Ulysses, which is not carried here"
        yield _mesh("sp"), text, "write parallelism_config_cp_size: context parallelism splits sequences under FSDP2"
    for axis in ("dp_shard", "tp", "cp"):
        if kind in ("MULTI_GPU", "NO", "DEEPSPEED") and axis in sizes:
            text = f"{sizes[axis]}, with distributed_type: {kind}: only FSDP2 is combined with it here"
            yield _mesh(axis), text, f"write distributed_type: FSDP with {acc.FSDP2}"
    config = quantization.of(train)
    if kind in ("FSDP", "DEEPSPEED") and config is not None:
        yield from _quantized(config, train, accelerate, zero)
    if kind == "FSDP" and "tp" in sizes:
        yield from _tensor(sizes["tp"], train, lora if isinstance(lora, dict) else {}, architecture)
    if isinstance(lora, dict) and lora.get("target_parameters"):
        yield from _experts(train, accelerate, zero)
    if kind == "FSDP" and "cp" in sizes:
        yield from _context(sizes["cp"], train, architecture)


def _mesh(axis: str) -> KeyPath:
    return ("accelerate", *acc.key_of(axis).split("."))


def _quantized(
    config: Mapping[str, Any], train: Mapping[str, Any], accelerate: Mapping[str, Any], zero: int | None
) -> Iterator[Found]:
    path = ("train", "model_init_kwargs", "quantization_config")
    kind, version = str(accelerate.get("distributed_type")), acc.fsdp_generation(accelerate)
    four, storage = config.get("load_in_4bit"), str(config.get("bnb_4bit_quant_storage", "uint8"))
    text = quantization.cast_away(config, train, kind)
    if text is None and four and version == 2 and storage == "uint8":
        # accelerate/utils/fsdp_utils.py:800: such weights are left out of the sharding, whole on every rank.
        text = f"bnb_4bit_quant_storage is {storage}: FSDP2 would keep the whole base on every rank"
    if text is not None:
        yield (*path, "bnb_4bit_quant_storage"), text, "write bnb_4bit_quant_storage: bfloat16"
    dtype = str((train.get("model_init_kwargs") or {}).get("dtype", "float32"))
    if four and version == 1 and storage != dtype:
        wanted = dtype if train.get("bf16") is False else "bfloat16"
        text = f"bnb_4bit_quant_storage is {storage}, the model's dtype {dtype}: FSDP1 flattens weights of one type only"
        yield path, text, f"write bnb_4bit_quant_storage: {wanted}, and model_init_kwargs: {{dtype: {wanted}}}"
    method = quantization.method(config)
    if (kind == "FSDP" or zero == 3) and not quantization.is_sharded(config) and method in quantization.METHODS:
        stored = "8 bits of bitsandbytes" if config.get("load_in_8bit") else method
        # torch 2.13 casts what it gathers to param_dtype; transformers 5.23's FP8Linear then multiplies without the scale.
        name = "FSDP" if zero is None else "ZeRO-3"
        text = f"{stored}: {name} would gather such weights without their scales, or not split them"
        fix = "write {load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_quant_storage: bfloat16}, or leave it out"
        yield path, f"{text}; it does bitsandbytes' 4 bits", fix
    if "tp" in acc.parallel_sizes(accelerate):
        fix = "leave parallelism_config_tp_size out: FSDP2 shards them"
        yield path, "quantised weights are not split over tp", fix


def _experts(train: Mapping[str, Any], accelerate: Mapping[str, Any], zero: int | None) -> Iterator[Found]:
    """Where PEFT's ``ParamWrapper``, which replaces a parameter while a layer runs, does not find it whole."""
    # Tried with PEFT 0.20: FSDP1 ends in the first step, ZeRO-3 when the adapter is made.
    path, fix = ("lora", "target_parameters"), f"write distributed_type: FSDP with {acc.FSDP2}"
    if accelerate.get("distributed_type") == "FSDP" and acc.fsdp_generation(accelerate) == 1:
        yield path, "FSDP1 has parted A and B where PEFT makes the experts' update of them", fix
    if zero == 3:
        yield path, "ZeRO-3 has parted the experts when PEFT asks for their sizes", fix
    if quantization.of(train) is not None:
        yield path, "LoRA on experts is not carried out over a quantised base", "leave the quantisation out"
    for axis in sorted({"tp", "cp"} & set(acc.parallel_sizes(accelerate))):
        yield path, f"LoRA on experts is not carried out together with {axis}", f"leave {_mesh(axis)[-1]} out"
    if train.get("torch_compile"):
        yield path, "the wrapped experts are not compiled", "train.torch_compile=false"


def _tensor(
    size: int, train: Mapping[str, Any], lora: Mapping[str, Any], architecture: Mapping[str, Any] | None
) -> Iterator[Found]:
    if lora.get("modules_to_save"):
        text = "whole modules are not trained beside an adapter under tensor parallelism"
        yield ("lora", "modules_to_save"), text, "leave it out"
    targets = lora.get("target_modules")
    if isinstance(targets, str | list) and is_pattern(targets) and matches(targets, _EMBEDDING):
        text = "embed_tokens takes no adapter under tensor parallelism"
        yield ("lora", "target_modules"), text, "leave embed_tokens out"
    if train.get("torch_compile"):
        text = "true: the compiled layers were not proved together with tensor parallelism"
        yield ("train", "torch_compile"), text, "train.torch_compile=false, or tp size 1"
    if architecture is None:
        return
    kind = str(architecture.get("model_type"))
    dense, experts = parallel_plans(kind)
    if not {"colwise", "rowwise"} <= set(dense.values()):
        yield _mesh("tp"), f"transformers has no tensor-parallel plan for {kind}", "leave it out"
        return
    homes = tuple(name for name, style in experts.items() if style == "ep_dispatch_experts")
    styles = {style for name, style in dense.items() if not (homes and name.startswith(homes))} | set(experts.values())
    if unknown := sorted(styles - TP_STYLES - EP_STYLES):
        yield _mesh("tp"), f"the plan of {kind} has {', '.join(unknown)}, which is not carried out here", "leave it out"
    divided = ("num_local_experts", "num_experts") if experts else ("intermediate_size",)
    for key in ("num_attention_heads", "num_key_value_heads", *divided):
        value = architecture.get(key)
        if isinstance(value, int) and value % size:
            yield _mesh("tp"), f"{size} does not divide {key}, {value}", f"use a divisor of {value}"


def _context(size: int, train: Mapping[str, Any], architecture: Mapping[str, Any] | None) -> Iterator[Found]:
    attention = (train.get("model_init_kwargs") or {}).get("attn_implementation")
    if attention not in _CP_ATTENTION:
        text = f"{show_value(attention)}: context parallelism has an attention of its own, on torch's kernels"
        yield ("train", "model_init_kwargs", "attn_implementation"), text, "leave it out"
    apart = "context parallelism drops what keeps packed conversations apart"  # trl/trainer/sft_trainer.py:1150
    for key, what in {
        "packing": apart,
        "eval_packing": apart,
        "padding_free": "it joins the sequences of a batch, which context parallelism would not keep apart",
        "label_smoothing_factor": "TRL smooths unshifted labels, a part of a sequence has shifted ones",
    }.items():
        if train.get(key):
            fix = f"train.{key}=false, or cp size 1" if "packing" in key else "leave it out, or use cp size 1"
            yield ("train", key), f"{show_value(train[key])}: {what}", fix
    if architecture is not None:
        length = train.get("max_length", train_fields()["max_length"].default)
        yield from ((_mesh("cp"), text, fix) for text, fix in _split_attention(size, length, architecture))


def _split_attention(size: int, length: int | None, architecture: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Layers of which a part of a sequence is not computed from the others: torch's context parallelism is causal attention."""
    kind, other = str(architecture["model_type"]), "use cp size 1"
    if carries_state(kind):
        yield f"layers of {kind} hand on a state, which does not go from one part of a sequence to the next", other
    elif not has_sdpa(kind):
        yield f"{kind} computes its attention without scaled_dot_product_attention, the one that is split", other
    if architecture.get("alibi"):  # falcon's attention bias for the distance of two tokens is given as a mask
        yield "alibi: true, a mask, of which the attention that is split takes none", other
    kinds = set(architecture.get("layer_types") or ()) - {"full_attention", "sliding_attention", "chunked_attention"}
    if kinds:
        yield f"the model has layers of {', '.join(sorted(kinds))}: only causal attention is split", other
    seen = narrowest(architecture)
    if seen is not None and (length is None or seen < length):
        text = f"{size}, while the model attends to {seen} tokens back and max_length is {length}"
        yield text, f"train.max_length={seen} at most, or cp size 1"
