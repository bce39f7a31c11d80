"""What the process group really is, and proof that parameters really lie where the recipe says.

accelerate falls back without a message: to DDP on CPU, to one process where the launcher's settings are not seen, to replicas
where a tensor-parallel model was not split. So the program compares what it asked for with what it got before the first step,
on GPUs too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.recipe import accelerate_file as acc
from clustertune.replaced import in_place_of
from clustertune.resolve.resolved import Distribution
from clustertune.training import deepspeed_engine

TP_SHARE = 0.5
"""Least share of the parameters that tensor parallelism splits: all but norms, adapters' small halves and odd vocabularies."""


@dataclass(frozen=True)
class FoundSharding:
    """How this run is distributed, as found in the wrapped model."""

    type: str
    """accelerate's DistributedType: FSDP, DEEPSPEED, MULTI_GPU, MULTI_CPU, NO."""
    version: int | None
    """Of FSDP; None without it."""
    world_size: int
    mesh: dict[str, int]
    """Device mesh: dimension name to size."""
    backend: str | None
    device: str
    sharded_share: float
    """Parameter elements that this rank holds, over all: about 1/N where sharded over N ranks."""
    dtypes: dict[str, int] = field(default_factory=dict)
    """Parameter elements by dtype, over all ranks: a frozen base that was upcast to fp32 shows here."""
    placements: dict[str, int] = field(default_factory=dict)
    """Parameter elements by where they lie, such as ``dp_shard_cp: shard 0, tp: shard 1``; ``whole`` on every rank."""
    offloaded: float = 0.0
    """Share of the elements whose home is the CPU's memory, from where each layer is copied to the device to be used."""
    attention: str | None = None
    """The attention implementation that the model calls."""
    reduce_dtype: str | None = None
    """The type in which FSDP sums gradients; None where it is not FSDP's choice."""
    replicas: str | None = None
    """``equal`` or ``different``: whether ranks that should hold the same parameters do; None where nothing is held twice."""

    def as_dict(self) -> dict[str, Any]:
        """``distributed`` of run.json, beside what else the first rank tells."""
        body = asdict(self)
        return {acc.VERSION if key == "version" else key: value for key, value in body.items()}


class _Part(NamedTuple):
    """One parameter."""

    elements: int
    """Over all ranks."""
    held: int
    """On this rank."""
    dtype: torch.dtype
    place: str
    offloaded: bool = False


def set_precision(accelerator: Any, reduce_dtype: str | None) -> None:
    """Have FSDP sum gradients in ``reduce_dtype``, and leave what a model returns and its buffers in their own type.

    accelerate 1.15 casts all of it to bfloat16 (utils/dataclasses.py:2137). The log-probabilities that TRL sums are float32
    until FSDP2's root casts them: a loss of 8 then has steps of 0.06 a token. To be called before the model is prepared.
    """
    free_gathered_units()
    split_experts_evenly()
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or plugin.mixed_precision_policy is None or reduce_dtype is None:
        return
    _leave_out_what_was_not_gathered()
    dtypes = {"reduce_dtype": getattr(torch, reduce_dtype), "output_dtype": None}
    plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, **dtypes)


def _leave_out_what_was_not_gathered() -> None:
    """Have FSDP2 accumulate micro batches in another type though a group of parameters was never gathered.

    TRL's fused head takes the weight of ``lm_head`` without calling it. torch 2.13 leaves such a group out where it reduces
    (_fsdp_param_group.py:621), and raises AttributeError where it only accumulates (_fsdp_param.py:807).
    """

    @in_place_of(FSDPParam, "to_accumulated_grad_if_needed")
    def accumulate(original: Any, self: Any) -> None:
        if hasattr(self, "_unsharded_param"):
            original(self)


def split_experts_evenly() -> None:
    """Have FSDP2 split experts that are stacked in one tensor by columns where there are more ranks than experts.

    torch 2.13 splits by the first dimension, which is the expert: of Mixtral's 8 on 32 ranks, eight ranks would hold one whole
    expert of each layer, 24 nothing, and each all-gather would carry four times the bytes, mostly padding. Found by simulating
    the recipe at full size.
    """

    @in_place_of(torch.distributed.fsdp, "fully_shard")
    def fully_shard(original: Any, module: Any, **kwargs: Any) -> Any:
        mesh = kwargs.get("mesh")
        ranks = int(mesh.shape[-1]) if mesh is not None else torch.distributed.get_world_size()

        def placement(parameter: Any) -> Shard | None:
            if parameter.ndim < 3 or parameter.shape[0] >= ranks or isinstance(parameter, DTensor):
                return None
            even = [dimension for dimension in range(1, parameter.ndim) if parameter.shape[dimension] % ranks == 0]
            return Shard(even[0]) if even else None

        return original(module, **{"shard_placement_fn": placement, **kwargs})


def free_gathered_units() -> None:
    """Have FSDP2's forward pass keep two units in memory, not three: free the gathered buffer of the unit before.

    torch 2.13 sets its last reference but one to None in ``wait_for_unshard`` (_fsdp_param_group.py:430), and holds the buffer
    in a local variable while it copies the next unit out: 5.9 GiB of Llama-3.1-405B. Here it goes before that copy begins; the
    next all-gather waits, as in torch, until the copy out of the freed buffer has ended.
    """

    @in_place_of(FSDPParamGroup, "wait_for_unshard")
    def wait_for_unshard(original: Any, self: Any) -> None:
        state = self.comm_ctx.all_gather_state
        if self._all_gather_result and self._training_state == TrainingState.FORWARD and state is not None:
            self._wait_all_gather_streams_on_event(state.event)
            self.comm_ctx.all_gather_state = None
            del state
        original(self)


def _parts(model: Any, *, zero: bool) -> Iterator[_Part]:
    """The parameters of a wrapped model, as this rank holds them."""
    offloading = set() if zero else _offloading_parameters(model)
    for parameter in model.parameters():
        size = deepspeed_engine.elements(parameter)
        if isinstance(parameter, DTensor):
            # A DTensor may say one dtype and hold another: assigned to .data it takes over the new one's name alone.
            local = parameter.to_local()
            place = _describe(_dimensions(parameter), parameter.placements)
            offloaded = id(parameter) in offloading and local.device.type == "cpu"
            yield _Part(size, local.numel(), local.dtype, place, offloaded)
        elif hasattr(parameter, "ds_tensor"):
            held = -(-size // torch.distributed.get_world_size(parameter.ds_process_group))
            yield _Part(size, held, parameter.dtype, "zero: shard")
        else:
            yield _Part(size, size, parameter.dtype, "whole")


def _dimensions(parameter: DTensor) -> tuple[str, ...]:
    """Names of a sharded parameter's mesh. Without a parallelism_config accelerate leaves its one dimension unnamed."""
    return parameter.device_mesh.mesh_dim_names or ("dp_shard",)


def _describe(names: tuple[str, ...], placements: tuple[Any, ...]) -> str:
    """``dp_shard_cp: shard 0, tp: replicate``."""
    ways = (f"shard {one.dim}" if hasattr(one, "dim") else type(one).__name__.lower() for one in placements)
    return ", ".join(f"{name}: {way}" for name, way in zip(names, ways, strict=True))


def _offloading_parameters(model: Any) -> set[int]:
    """The parameters of FSDP2 groups that offload: on a machine without GPUs their device alone does not tell."""
    ids = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            for group in state._fsdp_param_groups:
                ids |= {id(p.sharded_param) for p in group.fsdp_params if p.offload_to_cpu}
    return ids


def checksum(model: Any) -> list[int]:
    """One number for each parameter's bits on this rank: the same bits, the same numbers."""
    sums = []
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        elements = local.detach().contiguous().view(-1).view(torch.uint8)
        words = elements[: elements.numel() // 4 * 4].view(torch.int32)
        sums.append(int(words.sum(dtype=torch.int64)) + int(elements[words.numel() * 4 :].sum(dtype=torch.int64)))
    return sums


def _replicas(model: Any, accelerator: Any, kind: str, gather: Any) -> str | None:
    """Whether the ranks that should hold the same bits do. A collective: all ranks call it, where any has to."""
    mesh = accelerator.torch_device_mesh if accelerator.parallelism_config is not None else None
    names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
    twice = kind.startswith("MULTI_") or "dp_replicate" in names
    if not twice or accelerator.num_processes == 1:
        return None
    # Ranks with the same place on every other axis hold the same part; without a mesh all do.
    axes = [name for name in names if name != "dp_replicate"]
    coordinates = tuple(mesh.get_local_rank(name) for name in axes) if kind == "FSDP" and mesh is not None else ()
    groups: dict[Any, set[Any]] = {}
    for where, sums in gather((coordinates, tuple(checksum(model)))):
        groups.setdefault(where, set()).add(sums)
    return "equal" if all(len(values) == 1 for values in groups.values()) else "different"


def inspect(model: Any, accelerator: Any, gather: Any = None) -> FoundSharding:
    """Look at the wrapped model of this rank. ``gather`` takes a value and gives every rank's (:class:`Group`'s)."""
    kind = str(accelerator.distributed_type.value)
    version = (2 if accelerator.is_fsdp2 else 1) if kind == "FSDP" else None
    parts = list(_parts(model, zero=kind == "DEEPSPEED"))
    total, dtypes, placements = sum(part.elements for part in parts), Counter[str](), Counter[str]()
    for part in parts:
        dtypes[str(part.dtype).removeprefix("torch.")] += part.elements
        placements[part.place] += part.elements
    config = getattr(getattr(accelerator.unwrap_model(model), "config", None), "_attn_implementation", None)
    return FoundSharding(
        type=kind,
        version=version,
        world_size=accelerator.num_processes,
        mesh=_mesh(model, accelerator, kind),
        backend=accelerator.state.backend,
        device=str(accelerator.device.type),
        sharded_share=sum(part.held for part in parts) / total if total else 0.0,
        dtypes=dict(dtypes),
        placements=dict(placements),
        offloaded=sum(part.elements for part in parts if part.offloaded) / total if total else 0.0,
        attention=config,
        reduce_dtype=_reduces_in(model),
        replicas=_replicas(model, accelerator, kind, gather) if gather is not None else None,
    )


def _reduces_in(model: Any) -> str | None:
    """What the wrapped model's outermost FSDP unit was given."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        policy = module._get_fsdp_state()._mp_policy
        return str(policy.reduce_dtype).removeprefix("torch.") if policy.reduce_dtype is not None else None
    return None


def _mesh(model: Any, accelerator: Any, kind: str) -> dict[str, int]:
    """The axes of accelerate's mesh above size 1, else the mesh that the parameters lie on."""
    mesh = accelerator.torch_device_mesh if kind == "FSDP" and accelerator.parallelism_config is not None else None
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)) if mesh is not None else {}
    if axes := {axis: int(sizes[axis]) for axis in acc.AXES if sizes.get(axis, 1) > 1}:
        return axes
    if (parameter := next((p for p in model.parameters() if isinstance(p, DTensor)), None)) is not None:
        return dict(zip(_dimensions(parameter), parameter.device_mesh.shape, strict=True))
    return {"dp": accelerator.num_processes}


def check(state: FoundSharding, distribution: Distribution) -> None:
    """Raise UserError where the run is not what the recipe asked for."""
    problems = []
    kind, world_size = distribution.type, distribution.world_size
    if state.world_size != world_size:
        text = f"{state.world_size} ranks are connected, the recipe resolved to {world_size}"
        fix = "start every rank with one launcher: clustertune run, submit or launch/torchrun.sh"
        problems.append(Problem(text, fix=fix))
    same = {kind, "MULTI_CPU"} if kind == "MULTI_GPU" and state.device == "cpu" else {kind}
    if state.type not in same and not (world_size == 1 and state.type != "DEEPSPEED"):
        problems.append(Problem(f"the run is {state.type}, the file asks for {kind}", key=acc.TYPE))
    if state.replicas == "different":
        problems.append(Problem("ranks that should start from the same parameters hold different ones"))
    if kind == "FSDP" and not problems and world_size > 1:
        problems += _fsdp_problems(state, distribution)
    if problems:
        raise UserError(problems, ExitCode.FAILED)


def _fsdp_problems(state: FoundSharding, distribution: Distribution) -> list[Problem]:
    problems, world_size = [], distribution.world_size
    if state.version != 2:
        problems.append(Problem(f"FSDP{state.version}, the file asks for FSDP2", key=acc.key_of("version")))
    mesh = distribution.mesh
    if mesh and state.mesh != mesh:
        asked, actual = (" x ".join(f"{axis} {size}" for axis, size in sizes.items()) for sizes in (mesh, state.mesh))
        problems.append(Problem(f"the mesh is {actual}, the file asks for {asked}", key=acc.MESH))
    problems += _placement_problems(state, mesh)
    shards = world_size // int(state.mesh.get("dp_replicate", 1))
    # What tp does not split is kept by each of its ranks: _placement_problems looks at that share.
    whole_over_tp = sum(n for where, n in state.placements.items() if "tp: replicate" in where)
    extra = whole_over_tp / max(1, sum(state.placements.values())) * (state.mesh.get("tp", 1) - 1)
    if state.sharded_share > 1.25 * (1 + extra) / shards:  # padding of uneven shards stays far below a quarter
        text = f"this rank holds {state.sharded_share:.0%} of the parameters, a shard of {shards} is {1 / shards:.0%}"
        problems.append(Problem(text))
    offload = distribution.offload_params == "cpu"
    if state.placements and offload != (state.offloaded > 0.99) and (offload or state.offloaded > 0):
        text = f"{state.offloaded:.0%} of the parameters are kept in the CPU's memory"
        problems.append(Problem(text, key=acc.key_of("offload_params")))
    if mesh.get("cp", 1) > 1 and state.attention is not None and state.attention != "clustertune_context":
        text = f"the model calls {state.attention} attention, which sees this rank's part of a sequence only"
        problems.append(Problem(text, key=acc.key_of("cp")))
    return problems


def _placement_problems(state: FoundSharding, mesh: Mapping[str, int]) -> list[Problem]:
    """Parameters that lie otherwise than FSDP2 on this mesh lays them."""
    if state.version != 2 or not state.placements:
        return []
    problems, total = [], sum(state.placements.values())
    for where, count in state.placements.items():
        parts = dict(part.split(": ", 1) for part in where.split(", ")) if ": " in where else {}
        sharded = [axis for axis, how in parts.items() if axis.startswith("dp_shard") and how.startswith("shard")]
        copied = parts.get("dp_replicate", "replicate") == "replicate"
        if not (sharded and copied):
            problems.append(Problem(f"{count:,} of {total:,} parameters lie as '{where}': not sharded over dp_shard"))
    if mesh.get("tp", 1) > 1:
        split = sum(count for where, count in state.placements.items() if "tp: shard" in where)
        if split < TP_SHARE * total:
            text = f"tensor parallelism splits {split / total:.0%} of the parameters: its ranks are copies of each other"
            problems.append(Problem(text, key=acc.key_of("tp")))
    return problems
