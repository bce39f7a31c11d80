"""What a distribution does not carry, for this model and this recipe: refused before the queue, with what carries it.

Facts of the installed stack: accelerate 1.15 (``parallelism_config.py``, ``accelerator.py``), transformers 5.23 (the plans of
``models/*/configuration_*.py``), torch 2.13's FSDP2, PEFT 0.20 and bitsandbytes 0.50.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clustertune.config import accelerate_file as acc
from clustertune.config import quantization
from clustertune.config.checks import Place, is_pattern
from clustertune.config.modeling import carries_state, has_sdpa, parallel_plans
from clustertune.config.native import train_fields
from clustertune.config.native_rules import show_value
from clustertune.config.parameters import matches, narrowest
from clustertune.errors import Problem

_EMBEDDING = "model.embed_tokens"
"""The input embedding, as Llama's kin and most others name it; GPT-NeoX's embed_in is not looked for."""
TP_STYLES = frozenset({"colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "replicated_with_grad_allreduce"})
"""The styles of a dense plan that ``clustertune/training/tensor.py`` carries out."""
EP_STYLES = frozenset({"ep_dispatch_experts", "grouped_gemm"})
_CP_ATTENTION = ("sdpa", None)


class _Look:
    """One recipe being looked at."""

    def __init__(self, train: Mapping[str, Any], accelerate: Mapping[str, Any], file: str, place: Place) -> None:
        self.train, self.accelerate, self.file, self.place = train, accelerate, file, place
        self.sizes = acc.parallel_sizes(accelerate)
        self.kind = accelerate.get("distributed_type")
        self.problems: list[Problem] = []

    def mesh(self, axis: str, message: str, fix: str | None = None) -> None:
        self.problems.append(Problem(message, file=self.file, key=acc.key_of(axis), fix=fix))

    def of(self, path: tuple[str, ...], message: str, fix: str | None = None) -> None:
        self.problems.append(Problem(message, file=self.place(path), key=".".join(path), fix=fix))


def find_problems(
    train: Mapping[str, Any],
    lora: object,
    accelerate: Mapping[str, Any],
    architecture: Mapping[str, Any] | None,
    file: str,
    place: Place,
    *,
    zero: int | None = None,
) -> list[Problem]:
    """Everything that the strategy of ``accelerate`` (the file's mapping) cannot do of what the recipe asks.

    ``file`` names the accelerate file; ``architecture`` is None where the model is not known; ``zero`` is DeepSpeed's stage.
    """
    look = _Look(train, accelerate, file, place)
    _axes(look)
    if look.kind in ("FSDP", "DEEPSPEED"):
        _quantized(look, zero)
    if look.kind == "FSDP":
        if look.sizes.get("tp", 1) > 1:
            _tensor(look, lora if isinstance(lora, dict) else None, architecture)
        if look.sizes.get("cp", 1) > 1:
            _context(look, architecture)
    return look.problems


def _axes(look: _Look) -> None:
    """Axes that the distributed type does not read, or reads otherwise."""
    if "sp" in look.sizes:
        text = f"{look.sizes['sp']}: accelerate's sequence parallelism is DeepSpeed's Ulysses, which is not carried here"
        look.mesh("sp", text, "write parallelism_config_cp_size: context parallelism splits sequences under FSDP2")
    for axis in ("dp_shard", "tp", "cp"):
        if look.kind in ("MULTI_GPU", "NO", "DEEPSPEED") and axis in look.sizes:
            text = f"{look.sizes[axis]}, with distributed_type: {look.kind}: only FSDP2 is combined with it here"
            look.mesh(axis, text, "write distributed_type: FSDP with fsdp_version: 2")


def _quantized(look: _Look, zero: int | None) -> None:
    config = quantization.of(look.train)
    if config is None:
        return
    path = ("train", "model_init_kwargs", "quantization_config")
    version = acc.fsdp_version(look.accelerate)
    storage = str(config.get("bnb_4bit_quant_storage", "uint8"))
    if (text := quantization.cast_away(config, look.train, str(look.kind))) is not None:
        look.of((*path, "bnb_4bit_quant_storage"), text, "write bnb_4bit_quant_storage: bfloat16")
    elif config.get("load_in_4bit") and version == 2 and storage == "uint8":
        # accelerate/utils/fsdp_utils.py:800: such weights are left out of the sharding, whole on every rank.
        text = f"bnb_4bit_quant_storage is {storage}: FSDP2 would keep the whole base on every rank"
        look.of((*path, "bnb_4bit_quant_storage"), text, "write bnb_4bit_quant_storage: bfloat16")
    dtype = str((look.train.get("model_init_kwargs") or {}).get("dtype", "float32"))
    if config.get("load_in_4bit") and version == 1 and storage != dtype:
        wanted = dtype if look.train.get("bf16") is False else "bfloat16"
        text = f"bnb_4bit_quant_storage is {storage}, the model's dtype {dtype}: FSDP1 flattens weights of one type only"
        look.of(path, text, f"write bnb_4bit_quant_storage: {wanted}, and model_init_kwargs: {{dtype: {wanted}}}")
    if (
        (look.kind == "FSDP" or zero == 3)
        and not quantization.is_sharded(config)
        and (quantization.method(config) in quantization.METHODS)
    ):
        stored = "8 bits of bitsandbytes" if config.get("load_in_8bit") else quantization.method(config)
        # torch 2.13 casts what it gathers to param_dtype; transformers 5.23's FP8Linear then multiplies without the scale.
        name = "FSDP" if zero is None else "ZeRO-3"
        text = (
            f"{stored}: {name} would gather such weights without their scales, or not split them; it does bitsandbytes' 4 bits"
        )
        fix = "write {load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_quant_storage: bfloat16}, or leave it out"
        look.of(path, text, fix)
    if "tp" in look.sizes:
        look.of(path, "quantised weights are not split over tp", "leave parallelism_config_tp_size out: FSDP2 shards them")


def _tensor(look: _Look, lora: Mapping[str, Any] | None, architecture: Mapping[str, Any] | None) -> None:
    size = look.sizes["tp"]
    for key in ("modules_to_save",):
        if lora and lora.get(key):
            look.of(("lora", key), "whole modules are not trained beside an adapter under tensor parallelism", "leave it out")
    targets = (lora or {}).get("target_modules")
    if isinstance(targets, str | list) and is_pattern(targets) and matches(targets, _EMBEDDING):
        text = "embed_tokens takes no adapter under tensor parallelism"
        look.of(("lora", "target_modules"), text, "leave embed_tokens out")
    if look.train.get("torch_compile"):
        text = "true: the compiled layers were not proved together with tensor parallelism"
        look.of(("train", "torch_compile"), text, "train.torch_compile=false, or tp size 1")
    if architecture is None:
        return
    kind = str(architecture.get("model_type"))
    dense, experts = parallel_plans(kind)
    if not {"colwise", "rowwise"} <= set(dense.values()):
        look.mesh("tp", f"transformers has no tensor-parallel plan for {kind}", "leave it out")
        return
    homes = tuple(name for name, style in experts.items() if style == "ep_dispatch_experts")
    styles = {style for name, style in dense.items() if not (homes and name.startswith(homes))} | set(experts.values())
    if unknown := sorted(styles - TP_STYLES - EP_STYLES):
        look.mesh("tp", f"the plan of {kind} has {', '.join(unknown)}, which is not carried out here", "leave it out")
    for key in _divided(experts):
        value = architecture.get(key)
        if isinstance(value, int) and value % size:
            look.mesh("tp", f"{size} does not divide {key}, {value}", f"use a divisor of {value}")


def _divided(experts: Mapping[str, str]) -> list[str]:
    """The numbers of an architecture that tensor parallelism divides."""
    keys = ["num_attention_heads", "num_key_value_heads"]
    return [*keys, "num_local_experts", "num_experts"] if experts else [*keys, "intermediate_size"]


def _context(look: _Look, architecture: Mapping[str, Any] | None) -> None:
    attention = (look.train.get("model_init_kwargs") or {}).get("attn_implementation")
    path = ("train", "model_init_kwargs", "attn_implementation")
    if attention not in _CP_ATTENTION:
        text = f"{show_value(attention)}: context parallelism has an attention of its own, on torch's kernels"
        look.of(path, text, "leave it out")
    apart = "context parallelism drops what keeps packed conversations apart"  # trl/trainer/sft_trainer.py:1150
    for key, what in {
        "packing": apart,
        "eval_packing": apart,
        "padding_free": "it joins the sequences of a batch, which context parallelism would not keep apart",
        "label_smoothing_factor": "TRL smooths unshifted labels, a part of a sequence has shifted ones",
    }.items():
        if look.train.get(key):
            fix = f"train.{key}=false, or cp size 1" if "packing" in key else "leave it out, or use cp size 1"
            look.of(("train", key), f"{show_value(look.train[key])}: {what}", fix)
    if architecture is not None:
        _split_attention(look, architecture)


def _split_attention(look: _Look, architecture: Mapping[str, Any]) -> None:
    """Layers of which a part of a sequence is not computed from the others: torch's context parallelism is causal attention."""
    kind, other = str(architecture["model_type"]), "use cp size 1"
    if carries_state(kind):
        look.mesh("cp", f"layers of {kind} hand on a state, which does not go from one part of a sequence to the next", other)
    elif not has_sdpa(kind):
        look.mesh("cp", f"{kind} computes its attention without scaled_dot_product_attention, the one that is split", other)
    if architecture.get("alibi"):  # falcon's attention bias for the distance of two tokens is given as a mask
        look.mesh("cp", "alibi: true, a mask, of which the attention that is split takes none", other)
    kinds = set(architecture.get("layer_types") or ()) - {"full_attention", "sliding_attention", "chunked_attention"}
    if kinds:
        look.mesh("cp", f"the model has layers of {', '.join(sorted(kinds))}: only causal attention is split", other)
    length = look.train.get("max_length", train_fields()["max_length"].default)
    seen = narrowest(architecture)
    if seen is not None and (length is None or seen < length):
        text = f"{look.sizes['cp']}, while the model attends to {seen} tokens back and max_length is {length}"
        look.mesh("cp", text, f"train.max_length={seen} at most, or cp size 1")
