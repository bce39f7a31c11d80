"""The strategies that a recipe could use on a cluster: what ``--advise`` searches.

Each distribution is asked for with overrides and read back from the recipe that they make, so that a candidate is what the
printed overrides give, and what the libraries refuse is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from clustertune.config import quantization
from clustertune.config.counted import Counted
from clustertune.config.distribution import Recompute
from clustertune.config.overrides import Layout, Source, distribution, share, sizes
from clustertune.config.resolved import Resolved
from clustertune.errors import UserError
from clustertune.plan.machine import Machine
from clustertune.plan.predict import read_strategy
from clustertune.plan.strategy import Strategy

RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of recomputed layers."""
MICRO = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Candidate:
    """One strategy with the name of its family, and the recipe that has it."""

    family: str
    strategy: Strategy
    resolved: Resolved
    """With the candidate's distribution; micro batch and recomputation are the strategy's."""
    layout: tuple[str, ...]
    """The overrides of the distribution."""
    ratio: float
    """Share of recomputed layers as a recipe says it."""

    def arguments(self, start: Resolved) -> list[str]:
        """The overrides that make it of the recipe ``start``."""
        return [*self.layout, *sizes(start, self.strategy.micro_batch, self.ratio, self.strategy.kind)]


@dataclass(frozen=True)
class Refused:
    """A family that the recipe cannot have here."""

    family: str
    why: str


def candidates(source: Source, counted: Counted, machine: Machine, nodes: list[int]) -> Iterator[Candidate | Refused]:
    """All combinations that divide: distribution, sizes, micro batch and recomputation, on each of ``nodes``.

    The global batch stays; of LoRA the base may be quantised.
    """
    start = source.resolved
    for count in nodes:
        for base in _bases(start):
            for family, layout in _layouts(start, counted, machine, count, base):
                name = f"{family} {base}" if base and layout.kind != "Megatron" else family
                arguments = distribution(start, layout)
                try:
                    changed = source.changed([*arguments, *sizes(start, 1, 1.0, layout.kind)])
                    used = read_strategy(changed)
                except UserError as error:
                    yield Refused(name, error.problems[0].message)
                    continue
                yield from _sizes(Candidate(name, used, changed, tuple(arguments), 1.0))


def _bases(start: Resolved) -> tuple[str, ...]:
    """How the base may be loaded: as it is where all of it is trained."""
    if start.recipe.lora is None:
        return ("",)
    own = quantization.of(start.train_args)
    return ("bf16", "nf4") if own is None or own.get("load_in_4bit") else ("bf16", "")


def _sizes(found: Candidate) -> Iterator[Candidate]:
    """Micro batches and shares of recomputation of one distribution, of which micro batch 1 with all layers is given."""
    used = found.strategy
    for micro in (size for size in MICRO if used.accumulation % size == 0):
        accumulation = used.accumulation // micro
        if used.virtual > 1 and accumulation % used.pp:
            continue  # the interleaved schedule takes whole rounds of micro batches
        for ratio in RATIOS:
            if ratio not in (0.0, 1.0) and used.kind not in ("FSDP1", "FSDP2"):
                continue
            recomputed = share(found.resolved, ratio, used.kind)
            by = used.recompute.by if ratio == 1 else "model"  # FSDP's own takes all layers
            recompute = replace(used.recompute, share=recomputed, by=by) if recomputed else Recompute()
            changed = replace(used, micro_batch=micro, accumulation=accumulation, recompute=recompute)
            yield replace(found, strategy=changed, ratio=ratio)


def _layouts(start: Resolved, counted: Counted, machine: Machine, nodes: int, base: str) -> Iterator[tuple[str, Layout]]:
    """Families and distributions of one number of nodes."""
    each = start.recipe.slurm.gpus_per_node
    world, inner = nodes * each, min(machine.domain, each)
    plain = Layout("FSDP2", nodes, base=base)
    offloaded = replace(plain, offload_params="cpu", offload_optimizer="cpu")
    if world == 1:
        yield "one GPU", Layout("NO", nodes, base=base)
        yield "one GPU with CPU offload", offloaded
        return
    yield "DDP", Layout("DDP", nodes, base=base)
    yield "FSDP2", plain
    yield "FSDP2 without resharding", replace(plain, reshard=False)
    yield "FSDP2 with CPU offload", offloaded
    for shards in sorted({inner, inner // 2, 2 * inner} - {0, 1}):
        if world % shards == 0 and world > shards:
            yield f"HSDP {shards} x {world // shards}", replace(plain, replicas=world // shards)
    if base == "nf4":
        return
    for stage in (1, 2):
        yield f"ZeRO-{stage}", Layout(f"ZeRO-{stage}", nodes, base=base)
    yield "ZeRO-3 with CPU optimizer", Layout("ZeRO-3", nodes, base=base, offload_optimizer="cpu")
    nvme = Layout("ZeRO-3", nodes, base=base, offload_params="nvme", offload_optimizer="nvme")
    yield "ZeRO-3 on NVMe", nvme
    for size in (2, 4, 8):
        if size <= inner and world > size and world % size == 0:
            if _splits_heads(counted, size):
                yield f"TP {size} x FSDP2 {world // size}", replace(plain, tp=size)
            yield f"CP {size} x FSDP2 {world // size}", replace(plain, cp=size)
    yield from _megatron(counted, nodes, world, inner, base)


def _splits_heads(counted: Counted, size: int) -> bool:
    return all(kind.attention.kv_heads % size == 0 and kind.attention.heads % size == 0 for kind in counted.layers)


def _megatron(counted: Counted, nodes: int, world: int, inner: int, base: str) -> Iterator[tuple[str, Layout]]:
    """Megatron-Core: tensor, pipeline (plain and interleaved) and expert parallelism with the distributed optimizer."""
    layers = counted.num_layers
    experts = max((linear.copies for kind in counted.layers for linear in kind.linears), default=1)
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16):
            shared, ends = tp * pp, layers % pp > 0
            pieces = layers + 2 * ends  # 126 layers of Llama 405B, embedding and loss are 128
            if tp > inner or not _splits_heads(counted, tp) or world % shared or pieces % pp or world < shared:
                continue
            layout = Layout("Megatron", nodes, base=base, tp=tp, pp=pp, ends=ends)
            if shared > 1:
                yield f"TP {tp} x PP {pp}", layout
            for virtual in (2, 4):
                if pp > 1 and pieces % (pp * virtual) == 0:
                    yield f"TP {tp} x PP {pp} interleaved", replace(layout, virtual=virtual)
            for ep in (2, 4, 8):
                if experts > 1 and experts % ep == 0 and world // shared % ep == 0:
                    yield f"TP {tp} x PP {pp} x EP {ep}", replace(layout, ep=ep)
