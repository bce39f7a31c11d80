"""``plan --json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clustertune.config.cluster_schema import Cluster
from clustertune.config.hardware import Price
from clustertune.plan import explanation
from clustertune.plan.advise import Advice, reasons
from clustertune.plan.predict import GIB, Plan
from clustertune.plan.schedule import TOKENS_PER_CPU_S, tokens_to_prepare


def cost(plan: Plan, price: Price | None) -> dict[str, Any] | None:
    """Money of the whole training; None where the hours or the price are unknown."""
    return spent(None if plan.hours is None else plan.hours * plan.strategy.world_size, price)


def spent(gpu_hours: float | None, price: Price | None) -> dict[str, Any] | None:
    """Money of so many GPU-hours; None where they or the price are unknown."""
    if price is None or gpu_hours is None:
        return None
    return {
        "on_demand": None if price.on_demand is None else gpu_hours * price.on_demand,
        "spot": None if price.spot is None else gpu_hours * price.spot,
        "currency": price.currency,
        "per_gpu_hour": {"on_demand": price.on_demand, "spot": price.spot},
        "date": price.date,
        "source": price.source,
    }


def memory_parts(plan: Plan) -> dict[str, float]:
    """GiB by part at the peak; ``fragmentation`` and ``buffers`` come on top of the tensors' peak."""
    names = {
        "gathered layers": "gathered",
        "gathered embedding and head": "gathered",
        "saved layer inputs": "activations",
        "one recomputed layer": "activations",
        "adapters": "weights",
        "reference model": "reference",
    }
    parts = ("weights", *(["reference"] if plan.strategy.reference_bytes else []), "gradients", "optimizer", "activations")
    found = dict.fromkeys((*parts, "logits", "gathered", "buffers", "fragmentation"), 0.0)
    for term in [*plan.peak.parts, *plan.beside]:
        found[names.get(term.name, term.name)] += term.value / GIB
    return found


def as_json(plan: Plan, price: Price | None) -> dict[str, Any]:
    """The document of ``plan --json``. Seconds, GiB (2**30 bytes), tokens per second over all ranks, hours, money."""
    hours = plan.hours
    return {
        "recipe": plan.resolved.name,
        "cluster": plan.machine.name,
        "fits": plan.fits,
        "step_s": plan.step.seconds,
        "step_s_range": [plan.step.seconds * plan.low, plan.step.seconds * plan.high],
        "step_parts_s": plan.parts(),
        "steps": plan.schedule.steps,
        "peak_gib_per_gpu": plan.peak.bytes / GIB,
        "needed_gib_per_gpu": plan.needed / GIB,
        "usable_gib_per_gpu": plan.machine.usable_bytes / GIB,
        "peak_moment": plan.peak.name,
        "memory_parts_gib": memory_parts(plan),
        "host_gib_per_node": plan.host_bytes / GIB,
        "prepare_tokens": (made := tokens_to_prepare(plan.resolved)),
        "prepare_cpu_s": None if made is None else made / TOKENS_PER_CPU_S,
        "storage_gb": {name: size / 1e9 for name, size in plan.schedule.disk.items()},
        "parameters": plan.shape.counted.total,
        "trainable_parameters": plan.shape.trained,
        "tokens_per_s": plan.tokens_per_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s / plan.strategy.world_size,
        "mfu": plan.utilisation(hardware=False),
        "hfu": plan.utilisation(hardware=True),
        "hours": hours,
        "hours_range": None if hours is None else [hours * plan.low, hours * plan.high],
        "gpu_hours": None if hours is None else hours * plan.strategy.world_size,
        "cost": cost(plan, price),
        "bottleneck": explanation.bottleneck(plan),
        "bandwidth_source": explanation.bandwidth_source(plan),
        "communication": [
            {
                "name": w.collective.name,
                "seconds": w.term.value,
                "ranks": w.collective.group.size,
                "arithmetic": w.term.arithmetic(),
            }
            for w in plan.step.wires
        ],
        "calibrated": list(plan.constants.calibrated),
        "assumptions": explanation.assumptions(plan),
    }


def advice_json(
    advice: Advice, overrides: Mapping[str, Sequence[str]], cluster: Cluster, price: Price | None
) -> dict[str, Any]:
    """The document of ``plan --advise --json``."""
    why = {option.candidate.family: text for option, text in reasons(advice)}
    return {
        "goal": advice.goal,
        "searched": advice.searched,
        "refused": advice.refused,
        "options": [
            {
                "strategy": o.candidate.family,
                "fits": o.fits,
                "engine": "megatron" if o.strategy.kind == "Megatron" else "trl",
                "starts_here": o.starts(cluster),
                "step_s": o.step_s if o.fits else None,
                "hours": o.hours,
                "cost": spent(None if o.hours is None else o.hours * o.strategy.world_size, price),
                "needed_gib_per_gpu": o.needed / GIB,
                "nodes": o.strategy.nodes,
                "micro_batch": o.strategy.micro_batch,
                "accumulation": o.strategy.accumulation,
                "checkpointed": o.strategy.recompute.share,
                "why": why.get(o.candidate.family, o.why),
                "overrides": overrides.get(o.candidate.family),
            }
            for o in [*advice.fitting, *advice.losing]
        ],
    }
