"""A recipe with everything that follows from it: what the stages of a run read.

How it is distributed over ranks is read once from the ecosystem's files, recorded, and only read afterwards. Facts of the
pinned libraries (containers/versions.env) are those of accelerate 1.15, torch 2.13, DeepSpeed 0.19 and Megatron-Core.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from clustertune.errors import UserError
from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import deepspeed_file as ds
from clustertune.recipe import native_rules, quantization
from clustertune.recipe.sections import ActivationCheckpointing, Megatron, Recipe, is_address

# --- how it is distributed over ranks -------------------------------------------------------------------------------------

IN_FLIGHT = 5
"""Parts of weights that a rank holds in host memory at once while it reads: four reads, and the one that is placed."""


@dataclass(frozen=True)
class Recompute:
    """Which activations are recomputed in the backward pass."""

    by: str = "none"
    """``model`` (transformers), ``megatron`` or ``none``."""
    share: float = 0.0
    """Share of the decoder layers, 0 to 1."""
    offload: bool = False
    """What recomputation starts from lies in host memory."""
    save: tuple[str, ...] = ()
    """What recomputed layers keep beside their input: ``activation_checkpointing.save``."""
    selective: bool = False
    """Megatron's: the attention alone."""


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """One way to spread a training over ranks. Sizes are counts of ranks."""

    kind: str
    """``NO``, ``DDP``, ``FSDP2``, ``ZeRO-0`` to ``ZeRO-3`` or ``Megatron``; ``FSDP1`` in published runs alone."""
    world_size: int
    ranks_per_node: int
    data_parallel_size: int
    """Ranks that read different sequences: world / (tp pp cp sp)."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """accelerate's axes above size 1, in its order: dp_replicate, dp_shard, cp, sp, tp."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    """Ranks that pass keys and values of one sequence around (ring attention)."""
    sp: int = 1
    """Ranks that split attention by heads (Ulysses)."""
    ep: int = 1
    virtual: int = 1
    """Virtual pipeline stages per GPU; 1: plain 1F1B."""
    replicas: int = 1
    """Groups that hold a full copy each (HSDP); 1: none."""
    reshard_after_forward: bool = True
    """FSDP2's key of that name."""
    weight_shards: int = 1
    """Over how many ranks each weight is split; 1: whole on each."""
    gradient_shards: int = 1
    """The same of gradients after their reduction."""
    state_shards: int = 1
    """The same of optimizer state."""
    reshard: bool = False
    """Weights are given back after forward and gathered again for backward."""
    offload_params: str = "none"
    """``none``, ``cpu`` or ``nvme``."""
    offload_optimizer: str = "none"
    sequence_parallel: bool = False
    """Megatron's: activations of norms and dropout are split over tp."""
    distributed_optimizer: bool = False
    """Megatron's: optimizer state is split over the data-parallel ranks."""
    mixed_precision: str = "no"
    """``bf16``, ``fp16`` or ``no``: what is computed in beside the weights' own type."""
    reduce_dtype: str | None = None
    """``float32`` or ``bfloat16``: the type in which FSDP sums gradients; None where that is not a choice."""
    recompute: Recompute = Recompute()
    efficient_loading: bool = False
    """FSDP: one rank at most makes the whole model in host memory."""
    loading: str = "every"
    """How weights come to the ranks: ``parts`` (each rank reads what it keeps), ``first`` (rank 0 reads all and sends it),
    ``every`` (each rank reads all) or ``bridge`` (Megatron-Bridge: each rank its shard)."""
    state_dict: str | None = None
    """FSDP's: ``SHARDED_STATE_DICT`` or ``FULL_STATE_DICT``."""
    compiled: bool = False
    compiled_by_layer: bool = False
    """Compiled once for all layers of one kind."""
    dynamic_shapes_said: bool = False
    """The file says whether lengths are dynamic for the compiler."""
    optimizer: str | None = None
    """The optimizer that DeepSpeed's file names."""
    accumulate_dtype: str | None = None
    """DeepSpeed's type of held gradients, where its file says one."""
    communicate_dtype: str | None = None
    """DeepSpeed's type of reductions, where its file says one."""
    nvme: Mapping[str, str] = field(default_factory=dict)
    """What DeepSpeed swaps to a local disk (``offload_param``, ``offload_optimizer``) and where; ``auto``: the node's own."""
    notes: tuple[str, ...] = ()
    """What is not counted, or counted as something else."""

    @property
    def is_fsdp(self) -> bool:
        return self.kind in ("FSDP1", "FSDP2")

    @property
    def is_megatron(self) -> bool:
        return self.kind == "Megatron"

    @property
    def is_deepspeed(self) -> bool:
        return self.kind.startswith("ZeRO")

    @property
    def zero_stage(self) -> int | None:
        """DeepSpeed's stage; None without DeepSpeed."""
        return int(self.kind.removeprefix("ZeRO-")) if self.is_deepspeed else None

    @property
    def type(self) -> str:
        """accelerate's ``DistributedType``."""
        if self.is_fsdp or self.is_deepspeed:
            return "FSDP" if self.is_fsdp else "DEEPSPEED"
        return {"DDP": "MULTI_GPU"}.get(self.kind, "NO")

    @property
    def reads_parts(self) -> bool:
        """Whether each rank reads only the part of the weights that it keeps (clustertune/training/loading.py)."""
        return self.loading == "parts"

    def on(self, world: int, ranks_per_node: int) -> Distribution:
        """The same distribution on another number of ranks: what is not fixed by a size is spread over all of them."""
        split = replace(
            self,
            world_size=world,
            ranks_per_node=min(ranks_per_node, world),
            data_parallel_size=max(1, world // (self.tp * self.pp * self.cp * self.sp)),
        )
        return replace(split, **_shards(split))


def format_distribution(distributed: Any) -> str | None:
    """A run's recorded distribution (``distributed`` of run.json and of ``bench``) as ``FSDP 2 (tp 2)``.

    None if ``distributed`` is anything else.
    """
    if not isinstance(distributed, Mapping) or distributed.get("type") is None:
        return None
    version, mesh = distributed.get(acc.VERSION), distributed.get("mesh")
    sizes = ", ".join(f"{name} {size}" for name, size in mesh.items()) if isinstance(mesh, Mapping) else ""
    return f"{distributed['type']}{f' {version}' if version else ''}{f' ({sizes})' if sizes else ''}"


def recomputed_layers(ratio: float, layers: int) -> tuple[int, ...]:
    """Which layers, counted from 0, are recomputed: ``ratio`` of them, rounded, spread evenly from the first."""
    count = math.floor(ratio * layers + 0.5)
    return tuple(index for index in range(layers) if -(-(index + 1) * count // layers) > -(-index * count // layers))


def read_distribution(
    recipe: Recipe,
    train: Mapping[str, Any],
    accelerate: Mapping[str, Any],
    deepspeed: Mapping[str, Any] | None,
    *,
    world: int,
    data_parallel: int,
    layers: int,
    reduce_dtype: str | None,
) -> Distribution:
    """The distribution of a checked recipe.

    ``train``: the arguments after derivation. ``deepspeed``: DeepSpeed's file, None where there is none.
    ``layers``: decoder layers.
    """
    compiled, by_layer = acc.compiled(train, accelerate)
    distribution = Distribution(
        kind=_kind(recipe, accelerate, deepspeed),
        world_size=world,
        ranks_per_node=min(recipe.slurm.gpus_per_node, world),
        data_parallel_size=data_parallel,
        mixed_precision=native_rules.mixed_precision(train),
        reduce_dtype=reduce_dtype,
        recompute=_recompute(recipe, train, layers),
        compiled=compiled,
        compiled_by_layer=by_layer,
        dynamic_shapes_said=acc.says_dynamic(accelerate),
    )
    if recipe.megatron is not None:
        distribution = _megatron(distribution, recipe.megatron)
    elif distribution.kind != "NO":
        sizes = acc.parallel_sizes(accelerate)
        distribution = replace(distribution, mesh=sizes, tp=sizes.get("tp", 1), cp=sizes.get("cp", 1), sp=sizes.get("sp", 1))
        if distribution.is_fsdp:
            distribution = _fsdp(distribution, accelerate, quantization.of(train), sizes.get("dp_replicate", 1))
        elif distribution.is_deepspeed:
            distribution = _deepspeed(distribution, accelerate, deepspeed, quantization.of(train))
    return replace(distribution, **_shards(distribution))


def _kind(recipe: Recipe, accelerate: Mapping[str, Any], deepspeed: Mapping[str, Any] | None) -> str:
    if recipe.megatron is not None:
        return "Megatron"
    kinds = {"FSDP": "FSDP2", "DEEPSPEED": f"ZeRO-{acc.zero_stage(accelerate, deepspeed)}", "MULTI_GPU": "DDP"}
    return kinds.get(acc.distributed_type(accelerate) or "NO", "NO")


def _shards(distribution: Distribution) -> dict[str, Any]:
    """Over how many ranks weights, gradients and states are split, and whether weights are given back in between."""
    world, stage = distribution.world_size, distribution.zero_stage
    if distribution.kind == "FSDP2":
        # accelerate/parallelism_config.py:132: FSDP shards over dp_shard and cp together.
        shards = max(1, world // (distribution.replicas * distribution.tp * distribution.sp))
        names = ("weight_shards", "gradient_shards", "state_shards")
        return dict.fromkeys(names, shards) | {"reshard": distribution.reshard_after_forward and shards > 1}
    if stage is not None:
        # Sequence-parallel ranks (Ulysses) are among those over which ZeRO splits (DeepSpeed's ALST).
        ranks = max(1, world // distribution.tp)
        names = ("state_shards", "gradient_shards", "weight_shards")
        return dict.fromkeys(names[:stage], ranks) | dict.fromkeys(names[stage:], 1) | {"reshard": stage >= 3 and ranks > 1}
    if distribution.distributed_optimizer:
        return {"state_shards": distribution.data_parallel_size * distribution.cp}
    return {}


def _fsdp(
    distribution: Distribution, accelerate: Mapping[str, Any], quantized: Mapping[str, Any] | None, replicas: int
) -> Distribution:
    # FSDP's offload takes parameters, gradients and optimizer state alike (torch, CPUOffloadPolicy and CPUOffload).
    offload = "cpu" if acc.fsdp_flag(accelerate, "offload_params") else "none"
    efficient, parts = acc.fsdp_flag(accelerate, "cpu_ram_efficient_loading"), why_whole(quantized) is None
    return replace(
        distribution,
        offload_params=offload,
        offload_optimizer=offload,
        efficient_loading=efficient,
        state_dict=acc.state_dict_type(accelerate),
        reshard_after_forward=acc.fsdp_flag(accelerate, "reshard_after_forward", default=True),
        loading="every" if not efficient else "parts" if parts else "first",
        replicas=replicas,
    )


def why_whole(quantized: Mapping[str, Any] | None) -> str | None:
    """Why FSDP2's ranks cannot read their parts alone; None where they can. ``quantized``: ``quantization_config``, if any."""
    storage = str((quantized or {}).get("bnb_4bit_quant_storage", "uint8"))
    if quantized and not (quantized.get("load_in_4bit") and "float" in storage):
        return "its quantisation is not 4 bit with a floating point bnb_4bit_quant_storage"
    return None


def _deepspeed(
    distribution: Distribution,
    accelerate: Mapping[str, Any],
    deepspeed: Mapping[str, Any] | None,
    quantized: Mapping[str, Any] | None,
) -> Distribution:
    body = deepspeed or {}
    secondary = ds.secondary_partition(body)
    notes = ["zero_hpz_partition_size keeps a second copy of the weights on each node: not counted"] if secondary else []
    if ds.quantizes_traffic(body):
        notes.append("quantised weights or gradients on the way (ZeRO++): not counted")
    devices = {part: acc.offload_device(accelerate, deepspeed, part) for part in ds.OFFLOADS}
    loading = "every"
    if distribution.zero_stage == 3 and quantized is None:  # a quantised base is parted after every rank has loaded it
        # What loading.why_not_parts looks for in the model itself.
        loading = "first" if secondary else "parts"
    return replace(
        distribution,
        offload_params=devices["offload_param"],
        offload_optimizer=devices["offload_optimizer"],
        loading=loading,
        optimizer=ds.text(body, "optimizer.type"),
        accumulate_dtype=ds.text(body, "data_types.grad_accum_dtype"),
        communicate_dtype=ds.text(body, "communication_data_type"),
        nvme=ds.nvme_paths(body),
        notes=tuple(notes),
    )


def _megatron(distribution: Distribution, m: Megatron) -> Distribution:
    """Weights and gradients lie whole on every data-parallel rank; the distributed optimizer splits its state over dp x cp
    (Megatron-Core, docs/source/api-guide/dist_optimizer.md)."""
    return replace(
        distribution,
        tp=m.tensor_model_parallel_size,
        pp=m.pipeline_model_parallel_size,
        cp=m.context_parallel_size,
        ep=m.expert_model_parallel_size,
        virtual=m.virtual_pipeline_model_parallel_size or 1,
        distributed_optimizer=m.use_distributed_optimizer,
        sequence_parallel=m.sequence_parallel,
        loading="bridge",
        notes=("Megatron-Bridge: the accelerate file is not used",),
    )


def _recompute(recipe: Recipe, train: Mapping[str, Any], layers: int) -> Recompute:
    if recipe.megatron is not None:
        granularity = recipe.megatron.recompute_granularity
        return Recompute(
            "megatron" if granularity else "none", float(granularity == "full"), selective=granularity == "selective"
        )
    section = recipe.activation_checkpointing or ActivationCheckpointing()
    share = len(recomputed_layers(section.ratio, layers)) / layers
    # TRL's activation_offloading moves whatever backward saves: of recomputed layers that is their input.
    offload = bool(train["activation_offloading"])
    return Recompute("model", share, offload, tuple(section.save or ())) if share else Recompute()


def how_to_load(distribution: Distribution) -> tuple[str, str]:
    """The key that decides how weights come to the ranks, and what makes each of them read its own part."""
    if distribution.is_deepspeed:
        fix = "stage 3 without zero_hpz_partition_size and without a quantised base: each rank reads its part; or fewer ranks"
        return f"{acc.SECTIONS['DEEPSPEED']} (ZeRO stage {distribution.zero_stage})", f"{fix}; offload less; more nodes"
    efficient = acc.key_of("cpu_ram_efficient_loading").rpartition(".")[2]
    fix = f"{acc.FSDP2} with {efficient}: true: each rank reads its rows; offload less; more nodes"
    return acc.SECTIONS["FSDP"], fix


# --- the recipe -----------------------------------------------------------------------------------------------------------

NOT_STARTED = "is for Megatron-Bridge in its own container, which clustertune submit starts"
EVAL_DATA = "eval.data"
"""The key of the file of one's own prompts."""

_WITHOUT_EFFECT = {
    "report_to", "run_name", "project", "disable_tqdm", "include_num_input_tokens_seen", "include_for_metrics",
    "per_device_eval_batch_size", "prediction_loss_only", "batch_eval_metrics", "metric_for_best_model", "greater_is_better",
    "save_total_limit", "save_on_each_node", "enable_jit_checkpoint", "torch_empty_cache_steps", "skip_memory_metrics", "debug",
    "do_train", "do_eval", "do_predict", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "ddp_timeout", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph",
}  # fmt: skip
_FAMILIES_WITHOUT_EFFECT = ("log_", "logging_", "eval_", "hub_", "trackio_")
"""Training arguments that change what is shown, kept, waited for or evaluated, not what is trained: an evaluation leaves the
random state as it was (training/trainer.py). Others of their families count: ``dataloader_drop_last``, ``dataloader_in_order``
and ``dataloader_persistent_workers`` change which rows a step has, ``eval_packing`` the rows that are prepared, and
``bf16_full_eval`` and ``fp16_full_eval`` the precision that DeepSpeed trains in."""
_MEASURED = ("reduce_lr_on_plateau", "greedy")
"""Schedules that read the evaluations: with them it counts when one is, of what, and what it is judged by."""
_OF_EVALUATIONS = ("eval_", "logging_", "per_device_eval_batch_size", "metric_for_best_model", "greater_is_better")

_SAVES = ("save_strategy", "save_steps")
"""Training arguments of when to save: the section ``save`` takes their place, also in a run that is there."""


def is_there(path: Path) -> bool:
    """Whether a path can be found: a name that is too long, or behind a closed folder, is not there."""
    try:
        return path.exists()
    except OSError:
        return False


def expand_home(path: str | Path) -> Path:
    """A path with ``~`` and ``~user`` put in; as it stands where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


@dataclass(frozen=True)
class Derived:
    """A value that no file states: ``reason`` is the formula with its numbers."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Resolved:
    """One recipe after layers, overrides and derivation; :meth:`as_dict` and :meth:`from_dict` carry it through JSON."""

    name: str
    """The recipe folder's name."""
    folder: str
    """The recipe folder, as an absolute path."""
    recipe: Recipe
    """The sections whose keys are clustertune's own."""
    global_batch_size: int
    """Sequences, or preferences, of an optimizer step over all ranks."""
    train_args: dict[str, Any]
    """Keyword arguments of TRL's ``SFTConfig``, ``DPOConfig`` or ``GRPOConfig`` (there with ``max_prompt_length``), after
    derivation: all that a recipe may state, TRL's default where it does not."""
    lora: dict[str, Any] | None
    """The same of PEFT's ``LoraConfig``; None: all parameters are trained."""
    origins: dict[str, str]
    """For each key path that is stated: ``base NAME``, ``recipe``, ``tiny`` or ``override``; ``default`` for our own others."""
    world_size: int
    """Ranks."""
    data_parallel_size: int
    """Ranks that read different sequences: the world size over the tensor, context and sequence parallel sizes."""
    architecture: dict[str, Any]
    """The model's ``config.json`` keys (scaled down where ``tiny``)."""
    accelerate: dict[str, Any]
    """The parsed accelerate configuration."""
    accelerate_file: str
    """Its file name in the recipe folder."""
    tiny: bool = False
    chat_template: str | None = None
    """The text of the recipe's own chat template."""
    template_date: str | None = None
    """The day that a chat template prints which reads the clock, as 2026-11-28: that of the run's begin. None: of no run."""
    row_arguments: dict[str, Any] = field(default_factory=dict)
    """What all rows of the data give the chat template alike; known once they are prepared."""
    reward_code: dict[str, str] = field(default_factory=dict)
    """The text of each file of the recipe folder that has a reward, by its name without ``.py``."""
    accelerate_overrides: dict[str, Any] = field(default_factory=dict)
    """What the command line laid over the accelerate file, by key path; null took a key out."""
    deepspeed: dict[str, Any] | None = None
    """DeepSpeed's configuration, overrides included, where the accelerate file names one."""
    deepspeed_overrides: dict[str, Any] = field(default_factory=dict)
    derived: list[Derived] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def distribution(self) -> Distribution:
        """How the training is spread over ranks."""
        derived = next((str(item.value) for item in self.derived if item.key == "reduce_dtype"), None)
        return read_distribution(
            self.recipe,
            self.train_args,
            self.accelerate,
            self.deepspeed,
            world=self.world_size,
            data_parallel=self.data_parallel_size,
            layers=int(self.architecture.get("num_hidden_layers", 1)),
            reduce_dtype=self.recipe.reduce_dtype or derived,
        )

    @property
    def is_dpo(self) -> bool:
        """Whether pairs of answers are trained on, beside a reference model."""
        return self.recipe.trainer == "dpo"

    @property
    def is_grpo(self) -> bool:
        """Whether the model's own answers to prompts are trained on, by their rewards."""
        return self.recipe.trainer == "grpo"

    @property
    def inputs(self) -> dict[str, Path]:
        """Files and folders of the data, and of one's own prompts, by their keys: as they stand where absolute, below the
        recipe folder where they exist there, else from here. What comes from the Hub or an object store is not among them.
        """
        paths = {}
        named = [(f"{key}.input", part.input) for key, part in self.recipe.data.keyed_parts()]
        for key, path in [*named, (EVAL_DATA, self.recipe.eval.data)]:
            if path is not None and not is_address(path):
                expanded = expand_home(path)
                beside = Path(self.folder, expanded)
                paths[key] = beside if is_there(beside) else expanded.absolute()
        return paths

    @property
    def template_arguments(self) -> dict[str, Any]:
        """What the chat template is given in training, and by whatever renders for the trained model."""
        return {**native_rules.template_arguments(self.train_args), **self.row_arguments}

    def with_staged(self, folder: Path) -> Resolved:
        """The same with ``staged=folder``: it says where model and data lie, and nothing is derived from it."""
        recipe = self.recipe.model_copy(update={"staged": str(folder)})
        return replace(self, recipe=recipe, origins={**self.origins, "staged": "override"})

    def require_startable(self) -> None:
        """Raise UserError for a recipe that only ``submit`` starts: one for Megatron-Bridge."""
        if self.recipe.megatron is not None:
            raise UserError(
                NOT_STARTED, file=self.name, key="megatron", fix="clustertune submit RECIPE, or take the section out"
            )

    def pinned_as(self, other: Resolved) -> Resolved:
        """The same with what was found when the run of ``other`` began and prepared its data."""
        return replace(self, template_date=other.template_date, row_arguments=other.row_arguments)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, ``distribution`` among them; :meth:`from_dict` gives an equal object back."""
        return {**_json().dump_python(self, mode="json"), "distribution": asdict(self.distribution)}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Resolved:
        """The inverse of :meth:`as_dict`. Raises ValueError where ``body`` is something else."""
        resolved: Resolved = _json().validate_python(body)
        return resolved

    def fingerprint(self) -> str:
        """SHA-256 (hex) of what decides the trained weights: model, data, training, LoRA and distribution.

        A default that the recipe states counts as one that it leaves out. Left out: names and places of the recipe, what is
        expected, how it is scored, wall time, trackers, when to save, and the shape: ranks, mesh, and so how many micro batches
        of a global batch fall to a rank, which a run may change between attempts. Megatron's is counted.
        """
        recipe, train = self.recipe.model_dump(mode="json"), self.train_args
        body = {key: recipe[key] for key in ("model", "trainer", "activation_checkpointing", "reduce_dtype", "megatron")}
        body["data"] = {key: value for key, value in recipe["data"].items() if key not in ("expect", "max_rejected")}
        body["train"] = {key: train[key] for key in train if self.counts(key) and key not in _SAVES}
        body |= {"global_batch_size": self.global_batch_size, "lora": self.lora, "architecture": self.architecture}
        body |= {"accelerate": self.accelerate, "deepspeed": self.deepspeed, "chat_template": self.chat_template}
        if self.recipe.megatron is None:
            del body["train"]["gradient_accumulation_steps"]
            body["accelerate"] = acc.without_sizes(self.accelerate)
        else:
            body["world_size"] = self.world_size
        if self.is_grpo:
            body |= {"reward": recipe["reward"], "reward_code": self.reward_code}
            body |= {"rollout": "servers"} if self.recipe.rollout == "servers" else {}  # other answers than the ranks' own
        return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def counts(self, key: str) -> bool:
        """Whether a training argument decides the trained weights, so that a run with another value is another run."""
        measured = self.train_args["lr_scheduler_type"] in _MEASURED and key.startswith(_OF_EVALUATIONS)
        if measured or key == "eval_packing":
            return True
        return key not in _WITHOUT_EFFECT and not key.startswith(_FAMILIES_WITHOUT_EFFECT)


@cache
def _json() -> TypeAdapter[Resolved]:
    return TypeAdapter(Resolved)
