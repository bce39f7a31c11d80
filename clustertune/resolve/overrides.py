"""The recipe overrides that make a distribution: what a person adds to the command line, and what ``--advise`` tries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import quantization
from clustertune.recipe.sections import Megatron
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved, recomputed_layers

NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": "true",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": "true",
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "bfloat16",
}
"""transformers' BitsAndBytesConfig; the storage type must be one float type for FSDP to shard it
(https://huggingface.co/docs/bitsandbytes/fsdp_qlora)."""
NVME = "/local_nvme"
"""The folder in accelerate's own examples of NVMe offload; a person writes the node's."""
_QUANTISATION = "train.model_init_kwargs.quantization_config"


@dataclass(frozen=True)
class RequestedLayout:
    """A distribution that overrides can ask for. The sizes are those of :class:`clustertune.plan.strategy.Strategy`."""

    kind: str
    """``NO``, ``DDP``, ``FSDP2``, ``ZeRO-1`` to ``ZeRO-3`` or ``Megatron``."""
    nodes: int
    replicas: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    virtual: int = 1
    ends: bool = False
    """Embedding and loss count as a layer each where a pipeline is cut."""
    reshard: bool = True
    offload_params: str = "none"
    offload_optimizer: str = "none"
    base: str = ""
    """``bf16`` or ``nf4``: how the base is loaded; empty: as the recipe says."""


@dataclass(frozen=True)
class RecipeSource:
    """A recipe as it was named on the command line."""

    resolved: Resolved
    overrides: tuple[str, ...] = ()
    """The overrides with which it was resolved."""

    def all(self, arguments: Sequence[str]) -> list[str]:
        """The overrides given before, but those that ``arguments`` replace, and ``arguments``."""
        keys = [argument.partition("=")[0] for argument in arguments]
        kept = [text for text in self.overrides if not any(f"{text.partition('=')[0]}.".startswith(f"{key}.") for key in keys)]
        return [*kept, *arguments]

    def changed(self, arguments: Sequence[str]) -> Resolved:
        """The recipe with more overrides. Raises UserError where it is refused with them."""
        return resolve(self.resolved.folder, self.all(arguments), tiny=self.resolved.tiny)


def distribution(resolved: Resolved, layout: RequestedLayout) -> list[str]:
    """The overrides that turn a recipe's distribution into ``layout``."""
    overrides = [f"slurm.nodes={layout.nodes}"] if layout.nodes != resolved.recipe.slurm.nodes else []
    overrides += loaded(resolved, layout.base)
    if layout.kind == "Megatron":
        return [*overrides, *_megatron(resolved, layout)]
    if resolved.recipe.megatron is not None:
        overrides.append("megatron=null")
    family = layout.kind.partition("-")[0]
    named = {"FSDP2": "FSDP", "ZeRO": "DEEPSPEED", "DDP": "MULTI_GPU", "NO": "NO"}[family]
    if named != acc.distributed_type(resolved.accelerate):
        overrides.append(f"accelerate.{acc.TYPE}={named}")
    for kind, section in acc.SECTIONS.items():
        if kind != named and acc.section(resolved.accelerate, section):
            overrides.append(f"accelerate.{section}=null")
    if family == "FSDP2":
        return overrides + _fsdp(resolved, layout) + _axes(resolved, layout)
    if acc.section(resolved.accelerate, acc.MESH):
        overrides.append(f"accelerate.{acc.MESH}=null")
    return overrides + (_zero(resolved, layout) if family == "ZeRO" else [])


def sizes(resolved: Resolved, micro_batch: int, ratio: float, kind: str) -> list[str]:
    """The overrides of the micro batch, and of the share of layers that are recomputed under a distribution ``kind``."""
    overrides = []
    if micro_batch != resolved.train_args["per_device_train_batch_size"]:
        overrides.append(f"train.per_device_train_batch_size={micro_batch}")
    return overrides + recomputation(resolved, ratio, kind)


def recomputation(resolved: Resolved, ratio: float, kind: str) -> list[str]:
    """Recompute ``ratio`` of the layers."""
    recipe, overrides = resolved.recipe, list[str]()
    section = recipe.activation_checkpointing
    if kind == "Megatron":
        overrides = ["activation_checkpointing=null"] if section is not None else []
        granularity, known = ("full" if ratio else None), recipe.megatron.recompute_granularity if recipe.megatron else None
        return overrides if granularity == known else [*overrides, f"megatron.recompute_granularity={granularity or 'null'}"]
    known_ratio = 1.0 if section is None else section.ratio
    return (
        overrides
        if known_ratio == ratio and recipe.megatron is None
        else [f"activation_checkpointing.ratio={ratio:g}", *overrides]
    )


def share(resolved: Resolved, ratio: float, kind: str) -> float:
    """The share of layers that ``ratio`` really recomputes: whole layers."""
    layers = int(resolved.architecture["num_hidden_layers"])
    return ratio if kind == "Megatron" else len(recomputed_layers(ratio, layers)) / layers


def loaded(resolved: Resolved, base: str) -> list[str]:
    """The overrides with which the base is loaded in 16 bits (``bf16``), or quantised to NF4 (``nf4``)."""
    own = quantization.of(resolved.train_args)
    init = resolved.train_args["model_init_kwargs"] or {}
    half = "float16" if resolved.train_args["fp16"] else "bfloat16"
    overrides = []
    if base and str(init.get("dtype", "")) != half:
        overrides.append(f"train.model_init_kwargs.dtype={half}")
    if base == "bf16" and own is not None:
        overrides.append(f"{_QUANTISATION}=null")
    if base == "nf4" and own is None:
        overrides += [f"{_QUANTISATION}.{key}={half if value == 'bfloat16' else value}" for key, value in NF4.items()]
    return overrides


def loading(method: str) -> dict[str, object]:
    """``train.model_init_kwargs`` of an adapter's base: bfloat16, with ``qlora`` quantised to NF4."""
    four = {key: value == "true" or value for key, value in NF4.items() if key != "quant_method"}
    return {"dtype": "bfloat16", **({_QUANTISATION.rpartition(".")[2]: four} if method == "qlora" else {})}


def _megatron(resolved: Resolved, layout: RequestedLayout) -> list[str]:
    known = resolved.recipe.megatron or Megatron()
    values = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "account_for_embedding_in_pipeline_split": layout.ends,
        "account_for_loss_in_pipeline_split": layout.ends,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "sequence_parallel": layout.tp > 1,
        "use_distributed_optimizer": True,
    }
    overrides = _changes("megatron", known.model_dump(), values)
    needs_one = not overrides and resolved.recipe.megatron is None
    return [f"megatron.tensor_model_parallel_size={layout.tp}"] if needs_one else overrides


def _changes(section: str, known: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """The overrides that give keys of a section their ``values``; none of a key that has its own."""
    words = {key: "null" if value is None else str(value) for key, value in values.items() if known.get(key) != value}
    return [f"{section}.{key}={word.lower() if isinstance(values[key], bool) else word}" for key, word in words.items()]


def _fsdp(resolved: Resolved, layout: RequestedLayout) -> list[str]:
    config = acc.fsdp_settings(resolved.accelerate)
    overrides = [f"accelerate.{acc.key_of('version')}=2"] if not config else []
    if not config:
        # Without a policy the whole model is one unit, which is gathered at once.
        overrides.append(f"accelerate.{acc.key_of('auto_wrap_policy')}=TRANSFORMER_BASED_WRAP")
        overrides.append(f"accelerate.{acc.key_of('cpu_ram_efficient_loading')}=true")
    overrides += _flag(resolved, "reshard_after_forward", layout.reshard, default=True)
    return overrides + _flag(resolved, "offload_params", layout.offload_params == "cpu")


def _flag(resolved: Resolved, key: str, value: bool, *, default: bool = False) -> list[str]:
    """A true-or-false key of ``fsdp_config``; nothing where it says so already."""
    config, known = acc.fsdp_settings(resolved.accelerate), acc.fsdp_flag(resolved.accelerate, key, default=default)
    # From another distribution: the recipe's file may hold keys that were taken out before.
    return [] if known == value and config else [f"accelerate.{acc.key_of(key)}={str(value).lower()}"]


def _axes(resolved: Resolved, layout: RequestedLayout) -> list[str]:
    """The sizes of ``parallelism_config``; none where all ranks shard."""
    known = acc.section(resolved.accelerate, acc.MESH)
    world = layout.nodes * resolved.recipe.slurm.gpus_per_node
    if layout.replicas * layout.tp * layout.cp == 1:
        return [f"accelerate.{acc.MESH}=null"] if known else []
    shards = world // (layout.replicas * layout.tp * layout.cp)
    by_axis = {"dp_replicate": layout.replicas, "dp_shard": shards, "tp": layout.tp, "cp": layout.cp, "sp": 1}
    values = {acc.size_key(axis): size for axis, size in by_axis.items()}
    return _changes(f"accelerate.{acc.MESH}", dict.fromkeys(values, 1) | known, values)


def _zero(resolved: Resolved, layout: RequestedLayout) -> list[str]:
    """DeepSpeed through accelerate's own keys; a file of the recipe would be the only one that is read."""
    devices = {"offload_param": layout.offload_params, "offload_optimizer": layout.offload_optimizer}
    section, stage = acc.SECTIONS["DEEPSPEED"], int(layout.kind.removeprefix("ZeRO-"))
    known = acc.NO_OFFLOAD | acc.section(resolved.accelerate, section)
    return _changes(f"accelerate.{section}", known, acc.zero_keys(known, stage, devices, NVME))
