"""RAM of a node: what loading takes, and what is offloaded to it."""

from __future__ import annotations

from clustertune.config.counted import ParameterCount
from clustertune.config.distribution import IN_FLIGHT
from clustertune.config.resolved import Resolved
from clustertune.plan.shape import ModelShape
from clustertune.plan.term import BYTES, Term

WEIGHTS = "offloaded weights"
RANK_HOST_BYTES = 2e9
"""Interpreter, torch and CUDA context of a rank. Measured: 0.6 GB without CUDA; the context's host side assumed."""

COPY_SHARE = 0.8
"""Of a node's free memory, what copies for saves may take: page cache and data loaders need the rest. Assumed."""


def host_parts(resolved: Resolved, shape: ModelShape) -> list[Term]:
    """What the node of rank 0 holds at most, while loading or while training, whichever is more."""
    plan = shape.strategy
    ranks = plan.ranks_per_node
    own = Term("ranks", ranks * RANK_HOST_BYTES, BYTES, "{ranks} ranks x 2 GB", {"ranks": ranks})
    resting = _offloaded(shape)
    # Rows are read into weights that lie in host memory already; a whole copy is given back as they are filled.
    there = [term for term in resting if term.name == WEIGHTS] if resolved.distribution.reads_parts else []
    loading = [*there, _loading(resolved, shape)]
    more = [t for t in max(loading, resting, key=lambda terms: sum(t.value for t in terms)) if t.value]
    return [own, *more]


def save_copy(shape: ModelShape) -> Term | None:
    """The copy of trained weights and optimizer state that a save behind training takes of a node's RAM, kept from the first
    save on; None where training waits for its saves (:mod:`clustertune.checkpoint.saving`).
    """
    plan = shape.strategy
    if not plan.kind.startswith(("FSDP", "DDP", "NO")):
        return None
    ranks = plan.ranks_per_node if plan.kind.startswith("FSDP") else 1  # where all ranks have the same, the first one saves it
    each = (4 if plan.lora else plan.weight_bytes) + plan.state_bytes
    values = {"ranks": ranks, "count": shape.local_trained, "bytes": each, "shards": plan.state_shards}
    size = ranks * shape.local_trained * each / plan.state_shards
    return Term("copy for saves", size, BYTES, "{ranks} ranks x {count} trained x {bytes} B / {shards}", values)


def _loading(resolved: Resolved, shape: ModelShape) -> Term:
    """Weights in host memory at once: a few parts (FSDP2 and ZeRO-3), all in one rank (FSDP1), or all in every rank."""
    plan, size = shape.strategy, 2.0 * shape.counted.total
    if plan.kind == "Megatron":
        return Term("loading", size / plan.world_size * plan.ranks_per_node, BYTES, "each rank reads its own shard", {})
    if resolved.distribution.reads_parts:
        largest, each = shape.counted.largest, row_bytes(resolved)
        values = {"ranks": plan.ranks_per_node, "parts": IN_FLIGHT, "count": largest, "bytes": each}
        values |= {"shards": plan.weight_shards}
        size = rows_in_flight(resolved, shape.counted, plan.ranks_per_node, plan.weight_shards)
        return Term("loading", size, BYTES, "{ranks} ranks x {parts} parts x {count} parameters x {bytes} B / {shards}", values)
    if resolved.distribution.loading == "first":
        return Term("loading", size, BYTES, "{count} parameters x 2 B in one rank", {"count": shape.counted.total})
    values = {"ranks": plan.ranks_per_node, "count": shape.counted.total}
    return Term("loading", plan.ranks_per_node * size, BYTES, "{ranks} ranks x {count} parameters x 2 B", values)


def row_bytes(resolved: Resolved) -> int:
    """Bytes that a parameter takes while it is read: in bfloat16 and, trained itself, as the float32 that FSDP2 makes of it.

    DeepSpeed makes its float32 copies later, of what lies in its place by then.
    """
    return 2 + 4 if resolved.distribution.is_fsdp and resolved.recipe.lora is None else 2


def rows_in_flight(resolved: Resolved, counted: ParameterCount, ranks: int, shards: int) -> float:
    """Bytes that the ranks of a node hold at once while each reads its part; ``shards``: ranks that share a matrix."""
    return ranks * IN_FLIGHT * counted.largest * row_bytes(resolved) / shards


def _offloaded(shape: ModelShape) -> list[Term]:
    """Shards of weights, gradients and optimizer state that live in host memory."""
    plan, ranks = shape.strategy, shape.strategy.ranks_per_node
    found = []
    if plan.offload_params == "cpu":
        each = shape.stored / shape.parameters
        values = {"ranks": ranks, "count": shape.parameters, "bytes": each, "shards": plan.weight_shards}
        size = ranks * shape.stored / plan.weight_shards
        found.append(Term(WEIGHTS, size, BYTES, "{ranks} ranks x {count} parameters x {bytes} B / {shards}", values))
        if plan.reference_bytes:
            values |= {"bytes": plan.reference_bytes}
            size = ranks * shape.parameters * plan.reference_bytes / plan.weight_shards
            text = "{ranks} ranks x {count} parameters x {bytes} B / {shards}"
            found.append(Term("offloaded reference", size, BYTES, text, values))
    if plan.offload_optimizer == "cpu":
        each = plan.state_bytes + plan.gradient_bytes
        values = {"ranks": ranks, "count": shape.local_trained, "bytes": each, "shards": plan.state_shards}
        size = ranks * shape.local_trained * each / plan.state_shards
        found.append(Term("offloaded optimizer", size, BYTES, "{ranks} ranks x {count} trained x {bytes} B / {shards}", values))
    if plan.recompute.offload:
        size = ranks * shape.tokens * shape.layers * shape.counted.hidden * 2
        values = {"ranks": ranks, "tokens": shape.tokens, "layers": shape.layers, "hidden": shape.counted.hidden}
        text = "{ranks} ranks x {tokens} tokens x {layers} layers x {hidden} x 2 B"
        found.append(Term("offloaded checkpoints", size, BYTES, text, values))
    return found
