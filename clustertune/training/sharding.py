"""What the process group really is, and proof that parameters really are sharded.

accelerate falls back in silence (to DDP on CPU, to one process where the launcher's settings are not seen), so the
program compares what it asked for with what it got before the first step, on GPUs too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from clustertune.errors import ExitCode, Problem, UserError


@dataclass(frozen=True)
class Distribution:
    """How this run is distributed, as found in the wrapped model."""

    type: str
    """accelerate's DistributedType: FSDP, DEEPSPEED, MULTI_GPU, MULTI_CPU, NO."""
    fsdp_version: int | None
    world_size: int
    mesh: dict[str, int]
    """Device mesh: dimension name to size."""
    backend: str | None
    device: str
    sharded_share: float
    """Parameter elements that this rank holds, over all: about 1/N where sharded over N ranks."""
    dtypes: dict[str, int] = field(default_factory=dict)
    """Parameter elements by dtype, over all ranks: a frozen base that was upcast to fp32 shows here."""


def _fsdp2_sizes(model: Any) -> tuple[int, int, dict[str, int], Counter[str]]:
    from torch.distributed.tensor import DTensor

    held, total, mesh, dtypes = 0, 0, {}, Counter[str]()
    for parameter in model.parameters():
        total += parameter.numel()
        dtypes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
        if isinstance(parameter, DTensor):
            held += parameter.to_local().numel()
            # Without a parallelism_config accelerate leaves the one dimension of its mesh unnamed.
            names = parameter.device_mesh.mesh_dim_names or ("dp_shard",)
            mesh = dict(zip(names, parameter.device_mesh.shape, strict=True))
        else:
            held += parameter.numel()
    return held, total, mesh, dtypes


def _fsdp1_sizes(model: Any, world_size: int) -> tuple[int, int, dict[str, int], Counter[str]]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    held, total, dtypes = 0, 0, Counter[str]()
    for module in FullyShardedDataParallel.fsdp_modules(model):
        if (handle := module._handle) is not None:
            size = handle.flat_param._unpadded_unsharded_size.numel()
            held, total = held + handle.flat_param.numel(), total + size
            dtypes[str(handle.flat_param.dtype).removeprefix("torch.")] += size
    return held, total, {"dp_shard": world_size}, dtypes


def inspect(model: Any, accelerator: Any) -> Distribution:
    """Look at the wrapped model of this rank."""
    kind = str(accelerator.distributed_type.value)
    version = accelerator.state.fsdp_plugin.fsdp_version if kind == "FSDP" else None
    if version == 1:
        held, total, mesh, dtypes = _fsdp1_sizes(model, accelerator.num_processes)
    else:
        held, total, mesh, dtypes = _fsdp2_sizes(model)
    return Distribution(
        type=kind,
        fsdp_version=version,
        world_size=accelerator.num_processes,
        mesh=mesh or {"dp": accelerator.num_processes},
        backend=accelerator.state.backend,
        device=str(accelerator.device.type),
        sharded_share=held / total if total else 0.0,
        dtypes=dict(dtypes),
    )


def check(found: Distribution, accelerate: dict[str, Any], world_size: int) -> None:
    """Raise UserError where the run is not what the recipe's accelerate file asked for."""
    problems = []
    wanted = str(accelerate.get("distributed_type", "NO"))
    if found.world_size != world_size:
        problems.append(
            Problem(
                f"{found.world_size} ranks are connected, the recipe resolved to {world_size}",
                fix="start every rank with one launcher: accelerate launch --num_processes, or srun through run.sbatch",
            )
        )
    same = {wanted, "MULTI_CPU"} if wanted == "MULTI_GPU" and found.device == "cpu" else {wanted}
    if found.type not in same and not (world_size == 1 and found.type in ("NO", "FSDP")):
        problems.append(Problem(f"the run is {found.type}, the file asks for {wanted}", key="distributed_type"))
    if wanted == "FSDP" and not problems and world_size > 1:
        version = int(accelerate.get("fsdp_config", {}).get("fsdp_version", 1))
        if found.fsdp_version != version:
            problems.append(Problem(f"FSDP{found.fsdp_version}, the file asks for FSDP{version}", key="fsdp_version"))
        shards = world_size // int(found.mesh.get("dp_replicate", 1))
        if found.sharded_share > 1.25 / shards:  # padding of uneven shards stays far below a quarter
            problems.append(
                Problem(f"this rank holds {found.sharded_share:.0%} of the parameters, a shard of {shards} is {1 / shards:.0%}")
            )
    if problems:
        raise UserError(problems, ExitCode.FAILED)
