"""Bytes of a weight, a gradient and its optimizer state on a GPU and on the way, as the libraries keep them.

File and line are of the pinned releases: accelerate 1.15, TRL 1.16, PEFT 0.20, transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clustertune.config import quantization
from clustertune.config.distribution import Distribution
from clustertune.config.quantization import Quantized
from clustertune.config.resolved import Resolved

HALF, FULL = 2.0, 4.0
_SIZES = {"bfloat16": HALF, "float16": HALF, "float32": FULL}
_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DEFAULT_DTYPE = "float32"
"""TRL loads a model in float32 where nothing is said (trl/trainer/utils.py:1332)."""
_DEFAULT_OPTIM = "adamw_torch_fused"

_BLOCK = 256
"""Numbers of an 8-bit optimizer state that share a float32 scale (bitsandbytes/optim/optimizer.py, block-wise; torchao's)."""
_STATES = {
    "adamw_torch": 2, "adamw_torch_fused": 2, "adamw_torch_xla": 2, "adamw_torch_npu_fused": 2, "stable_adamw": 2,
    "grokadamw": 3, "schedule_free_adamw": 2, "schedule_free_radam": 2, "schedule_free_sgd": 1, "ademamix": 3, "sgd": 0,
    "adagrad": 1, "rmsprop": 1, "adafactor": 0, "lomo": 0, "adalomo": 0,
}  # fmt: skip
"""Numbers of the parameter's own type that an optimizer keeps for it. Adafactor's rows and columns do not count."""
_FULL_STATES = {
    "adamw_anyprecision": 2, "paged_adamw_32bit": 2, "paged_ademamix_32bit": 3, "lion_32bit": 1, "paged_lion_32bit": 1,
    "rmsprop_bnb": 1, "rmsprop_bnb_32bit": 1,
}  # fmt: skip
"""Numbers in float32 whatever the parameter's type (bitsandbytes' 32-bit states; transformers' defaults of AnyPrecision)."""
_BYTE_STATES = {
    "adamw_torch_8bit": 2, "adamw_bnb_8bit": 2, "adamw_8bit": 2, "paged_adamw_8bit": 2, "ademamix_8bit": 3,
    "paged_ademamix_8bit": 3, "lion_8bit": 1, "paged_lion_8bit": 1, "rmsprop_bnb_8bit": 1,
}  # fmt: skip

_DEEPSPEED = {"lion": "lion_32bit", "sgd": "sgd", "adagrad": "adagrad"}
"""Optimizers that a DeepSpeed file can name, beside Adam's kind."""


@dataclass(frozen=True)
class Numbers:
    """Bytes per parameter; see :class:`clustertune.plan.strategy.Strategy`."""

    weight: float
    gather: float
    trained: float
    gradient: float
    reduce: float
    state: float
    master_in_weights: bool
    compute: str
    other: float
    whole: float = 0.0
    notes: tuple[str, ...] = ()


def read(resolved: Resolved, split: Distribution) -> Numbers:
    """The sizes of a resolved recipe under a distribution."""
    args, lora = resolved.train_args, resolved.recipe.lora is not None
    init = args.get("model_init_kwargs") or {}
    dtype = str(init.get("dtype", DEFAULT_DTYPE))
    loaded = _SIZES.get(dtype, FULL)
    mixed = split.mixed_precision
    config = quantization.of(args)
    base = quantization.read(config, int(resolved.architecture["hidden_size"])) if config is not None else None
    optim = str(args.get("optim", _DEFAULT_OPTIM))
    compute = _NAMES.get(dtype, "fp32") if mixed == "no" else mixed
    if split.kind == "Megatron":
        return _megatron(resolved, mixed)
    if split.is_deepspeed:
        found = _zero(split, loaded, mixed, optim, compute)
    elif split.is_fsdp:
        reduced = _SIZES.get(split.reduce_dtype or "")
        found = _fsdp(loaded, mixed, optim, compute, lora=lora, base=base, version=split.kind[-1], reduced=reduced)
    else:
        found = _plain(split, split.world_size, loaded, optim, compute, lora=lora, base=base)
    found = replace(found, notes=(*found.notes, *_optim_notes(optim)))
    if base is None:
        return found
    return _quantized(found, base, split, config or {})


def moments(optim: str, number: float) -> float:
    """Bytes of optimizer state for one parameter of ``number`` bytes; transformers' names of optimizers.

    8-bit states carry a float32 scale for 256 of them; what is not known counts as AdamW, GaLore's and APOLLO's low rank too.
    """
    if optim in _BYTE_STATES:
        return _BYTE_STATES[optim] * (1 + 4 / _BLOCK)
    if optim in _FULL_STATES:
        return _FULL_STATES[optim] * FULL
    if optim == "adamw_torch_4bit":  # torchao/optim/subclass_4bit.py: two states of 4 bits, a float32 scale for 128
        return 2 * (0.5 + 4 / 128)
    return _STATES.get(optim, 2) * number


def _optim_notes(optim: str) -> list[str]:
    notes = []
    if optim.startswith("paged_"):
        notes.append(f"{optim} counts as GPU memory: pages move to the host only where there is no room")
    if optim.startswith(("galore", "apollo")):
        notes.append(f"{optim} is counted as AdamW: its low rank is not")
    return notes


def _fsdp(
    loaded: float,
    mixed: str,
    optim: str,
    compute: str,
    *,
    lora: bool,
    base: Quantized | None,
    version: str,
    reduced: float | None,
) -> Numbers:
    """Under mixed precision what is trained is held in float32: accelerate/utils/fsdp_utils.py:816 (FSDP2), accelerator.py:2037
    (FSDP1). The frozen base stays as loaded. The all-gather runs in the 16-bit type, the reduction in the recipe's
    ``reduce_dtype`` (``reduced``, bytes; training/sharding.py sets it). Gradients end in the parameter's type."""
    four = base is not None and base.method == "bitsandbytes" and base.packed == 0.5
    half = mixed != "no"
    as_made = _adapter(loaded, base) if lora else loaded
    # fsdp_utils.py:815 leaves adapters on a 4-bit base as they are.
    trained = FULL if half and not (four and version == "2") else as_made
    moved = HALF if half else loaded
    return Numbers(
        weight=loaded if lora else trained,
        gather=moved,
        trained=trained,
        gradient=trained,
        reduce=reduced or trained,
        state=moments(optim, trained),
        master_in_weights=trained == FULL,
        compute=compute,
        other=loaded,
    )


def _adapter(loaded: float, base: Quantized | None) -> float:
    """PEFT holds adapters in float32 (autocast_adapter_dtype, peft/tuners/tuners_utils.py:2258); TRL takes them back to
    bfloat16 where bitsandbytes quantised the base (trl/trainer/sft_trainer.py:908)."""
    if base is not None and base.method == "bitsandbytes":
        return HALF
    return max(FULL, loaded)


def _zero(split: Distribution, loaded: float, mixed: str, optim: str, compute: str) -> Numbers:
    """DeepSpeed casts all weights to the 16-bit type (runtime/engine.py, _configure_distributed_model), keeps a float32 master
    of what is trained beside them (runtime/zero/stage_1_and_2.py and stage3.py), gradients in the 16-bit type unless
    data_types.grad_accum_dtype says otherwise, and reduces in communication_data_type, by default the 16-bit type."""
    if split.optimizer is not None:
        kind = split.optimizer.lower()
        optim = next((name for word, name in _DEEPSPEED.items() if word in kind), "adamw_torch")
    if mixed == "no":
        return Numbers(loaded, loaded, loaded, loaded, loaded, moments(optim, loaded), loaded == FULL, compute, loaded)
    gradient, reduce = _stated(split.accumulate_dtype), _stated(split.communicate_dtype)
    return Numbers(HALF, HALF, HALF, gradient, reduce, FULL + moments(optim, FULL), False, compute, HALF)


def _stated(value: object) -> float:
    return FULL if value in ("fp32", "float32") else HALF


def _plain(
    split: Distribution, world: int, loaded: float, optim: str, compute: str, *, lora: bool, base: Quantized | None
) -> Numbers:
    """Weights stay as loaded, autocast casts for the moment of use. DDP holds gradients twice, in their parameters and in its
    buckets (gradient_as_bucket_view is off in accelerate/utils/dataclasses.py, DistributedDataParallelKwargs)."""
    trained = _adapter(loaded, base) if lora else loaded
    twice = split.kind == "DDP" and world > 1
    return Numbers(
        weight=loaded,
        gather=loaded,
        trained=trained,
        gradient=trained * (2 if twice else 1),
        reduce=trained,
        state=moments(optim, trained),
        master_in_weights=trained == FULL,
        compute=compute,
        other=loaded,
        notes=("DDP keeps gradients in its buckets as well",) if twice else (),
    )


def _quantized(found: Numbers, base: Quantized, split: Distribution, config: Mapping[str, Any]) -> Numbers:
    """A quantised base: what is not a linear layer of a block stays as loaded."""
    notes = [f"a quantised parameter takes {base.formula} = {base.bytes:.4f} B; embeddings, head and norms are not quantised"]
    whole, gather = 0.0, base.packed
    if split.is_fsdp and split.weight_shards > 1 and base.method == "bitsandbytes":
        whole = base.scales
        notes.append("bitsandbytes' block scales stay whole on every rank: they are no parameters")
        if not base.splits:
            # accelerate/utils/fsdp_utils.py:801 takes Params4bit in uint8 out of what FSDP2 splits.
            whole, gather = base.bytes, 0.0
            notes.append("FSDP2 does not split 4-bit weights stored as uint8: bnb_4bit_quant_storage: bfloat16 lets it")
    if config.get("load_in_4bit") and config.get("bnb_4bit_compute_dtype", "float32") == "float32":
        notes.append("bnb_4bit_compute_dtype is float32 by default: write bfloat16, or the products are slow")
    if base.method in ("fp8", "fbgemm_fp8"):
        notes.append("an 8-bit base is taken to be gathered in 8 bits")
    return replace(found, weight=base.bytes, gather=gather, whole=whole, notes=(*found.notes, *notes))


def _megatron(resolved: Resolved, mixed: str) -> Numbers:
    """Megatron-Core: 16-bit weights, float32 main gradients, a float32 master and two moments in the optimizer
    (docs/source/api-guide/dist_optimizer.md: 18 bytes, 6 + 12 / dp with the distributed one)."""
    m = resolved.recipe.megatron
    assert m is not None
    compute = "fp8" if m.fp8 is not None else "fp32" if mixed == "no" else mixed
    if compute == "fp32":
        return Numbers(FULL, FULL, FULL, FULL, FULL, 2 * FULL, True, compute, FULL)
    return Numbers(HALF, HALF, HALF, FULL, FULL, 3 * FULL, False, compute, HALF)
