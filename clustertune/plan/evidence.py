"""What a plan can be compared with: the kinds of published runs that it was graded on, and how far it was off for each.

A kind is a set of words: the engine, the kernels, the precision, the GPU, the model, what is trained, and how the model is
split. ``tools/planner_grade`` finds the words of each published run and the figures below; docs/results/planner.md shows them,
and how many runs lie in their range where nothing like them was known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from clustertune.plan.machine import PlanMachine
from clustertune.plan.strategy import ModelShape

SMALL = 4096
"""Tokens of a micro batch on one rank below which kernels are short."""
LONG = 32768
"""Tokens of a row from which attention is much of the work."""

QUANTILE = 1.28
"""Of the normal distribution: 80 % lie within."""

PLAIN = ("FSDP", "fused kernels", "bfloat16", "dense", "all parameters")
"""What most published runs are: their error is that of a program and a cluster that was never seen."""


def words(shape: ModelShape, machine: PlanMachine) -> tuple[str, ...]:
    """The kind of a plan, in words."""
    plan = shape.strategy
    engine = "Megatron-Core" if plan.is_megatron else "DeepSpeed" if plan.is_deepspeed else "FSDP" if plan.is_fsdp else "DDP"
    kernels = "fused kernels" if plan.compiled or plan.liger else "eager kernels"
    precision = {"fp8": "float8", "fp32": "float32"}.get(plan.compute, "bfloat16")
    experts = any(linear.copies > 1 for kind in shape.counted.layers for linear in kind.linears)
    trained = "all parameters" if not plan.lora else "LoRA on a quantised base" if shape.quantised else "LoRA"
    if plan.lora and shape.all_experts:
        trained = "LoRA on experts"
    more = {
        "tensor parallel": plan.tp > 1,
        "pipeline": plan.pp > 1,
        "context parallel": plan.cp > 1 or plan.sp > 1,
        "short micro batches": shape.tokens < SMALL,
        "long rows": (plan.conversation or plan.sequence) >= LONG,
        "a reference model": plan.second_forward == "reference",
        "its own answers": plan.rollouts is not None,
        "offloading": "none" not in {plan.offload_params} or plan.offload_optimizer != "none",
    }
    # One process alone has no engine: nothing is sent.
    engine = "FSDP" if engine == "DDP" and plan.world_size == 1 else engine
    split = [name for name, holds in more.items() if holds]
    return (engine, kernels, precision, machine.generation, "experts" if experts else "dense", trained, *split)


FIRST, UNSEEN = 0.1, 0.25
"""Standard deviations before any run is known: of the logarithm of a plain run's step time around the plan, and what each word
adds that no published run has. Assumed: the errors of a program that others wrote, and of a term that was never measured."""
SPREAD: Mapping[str, float] = {
    "": 0.06,
    "ampere": 0.18,
    "blackwell": 0.13,
    "context parallel": 0.18,
    "eager kernels": 0.15,
    "experts": 0.43,
    "float8": 0.14,
    "hopper": 0.11,
    "long rows": 0.21,
    "LoRA": 0.17,
    "Megatron-Core": 0.15,
    "pipeline": 0.17,
    "short micro batches": 0.25,
    "tensor parallel": 0.14,
}
"""What each word adds to the standard deviation of all kinds (``""``), from the published runs
(tools/planner_grade/held_out.py)."""
KINDS: Mapping[str, int] = {
    "FSDP, LoRA, bfloat16, dense, fused kernels, hopper": 2,
    "FSDP, LoRA, bfloat16, dense, fused kernels, hopper, tensor parallel": 4,
    "FSDP, all parameters, ampere, bfloat16, dense, eager kernels": 5,
    "FSDP, all parameters, ampere, bfloat16, dense, fused kernels": 6,
    "FSDP, all parameters, bfloat16, blackwell, dense, eager kernels": 9,
    "FSDP, all parameters, bfloat16, blackwell, dense, eager kernels, tensor parallel": 3,
    "FSDP, all parameters, bfloat16, blackwell, dense, fused kernels": 7,
    "FSDP, all parameters, bfloat16, context parallel, dense, fused kernels, hopper": 1,
    "FSDP, all parameters, bfloat16, dense, eager kernels, hopper": 4,
    "FSDP, all parameters, bfloat16, dense, eager kernels, hopper, short micro batches": 1,
    "FSDP, all parameters, bfloat16, dense, eager kernels, hopper, tensor parallel": 1,
    "FSDP, all parameters, bfloat16, dense, fused kernels, hopper": 6,
    "FSDP, all parameters, bfloat16, dense, fused kernels, hopper, tensor parallel": 2,
    "FSDP, all parameters, bfloat16, experts, fused kernels, hopper": 3,
    "FSDP, all parameters, bfloat16, experts, fused kernels, hopper, pipeline": 1,
    "FSDP, all parameters, blackwell, dense, float8, fused kernels": 1,
    "FSDP, all parameters, context parallel, dense, float8, fused kernels, hopper, long rows": 2,
    "FSDP, all parameters, dense, float8, fused kernels, hopper": 5,
    "FSDP, all parameters, dense, float8, fused kernels, hopper, long rows": 1,
    "FSDP, all parameters, dense, float8, fused kernels, hopper, pipeline, tensor parallel": 1,
    "FSDP, all parameters, dense, float8, fused kernels, hopper, tensor parallel": 2,
    "LoRA, Megatron-Core, blackwell, dense, float8, fused kernels, pipeline": 1,
    "LoRA, Megatron-Core, dense, float8, fused kernels, hopper": 2,
    "LoRA, Megatron-Core, dense, float8, fused kernels, hopper, pipeline, tensor parallel": 2,
    "Megatron-Core, all parameters, bfloat16, blackwell, experts, fused kernels": 2,
    "Megatron-Core, all parameters, bfloat16, experts, fused kernels, hopper, pipeline": 1,
    "Megatron-Core, all parameters, blackwell, context parallel, dense, float8, fused kernels, pipeline, tensor parallel": 1,
    "Megatron-Core, all parameters, blackwell, dense, float8, fused kernels": 2,
    "Megatron-Core, all parameters, blackwell, dense, float8, fused kernels, pipeline": 1,
    "Megatron-Core, all parameters, blackwell, dense, float8, fused kernels, pipeline, tensor parallel": 1,
    "Megatron-Core, all parameters, blackwell, experts, float8, fused kernels": 2,
    "Megatron-Core, all parameters, context parallel, dense, float8, fused kernels, hopper": 1,
    "Megatron-Core, all parameters, context parallel, dense, float8, fused kernels, hopper, pipeline, tensor parallel": 3,
    "Megatron-Core, all parameters, dense, float8, fused kernels, hopper": 2,
    "Megatron-Core, all parameters, dense, float8, fused kernels, hopper, pipeline": 2,
    "Megatron-Core, all parameters, dense, float8, fused kernels, hopper, pipeline, tensor parallel": 5,
    "Megatron-Core, all parameters, experts, float8, fused kernels, hopper, pipeline": 1,
}
"""Published runs by kind, its words in alphabetical order."""


def spread(kind: Iterable[str], known: Mapping[str, float] | None = None) -> float:
    """Standard deviation of the logarithm of a step time around the plan, of one kind. ``known``: by word, ``""`` for all."""
    known = SPREAD if known is None else known
    return math.hypot(known.get("", FIRST), *(known.get(word, UNSEEN) for word in kind if word not in PLAIN))


def key(kind: Iterable[str]) -> str:
    """A kind as it stands in :data:`KINDS`."""
    return ", ".join(sorted(kind))


def unlike(kind: Sequence[str]) -> list[str]:
    """The words of a kind that the published runs nearest to it do not have; empty where they have all of them and others."""
    nearest = min(KINDS, key=lambda known: (len({*kind} ^ {*known.split(", ")}), known)).split(", ")
    return [word for word in kind if word not in nearest]


def sentence(kind: Sequence[str]) -> str:
    """What published runs say of a plan of this kind."""
    named = ", ".join(kind)
    if count := KINDS.get(key(kind)):
        return f"range: {count} published run{'s are' if count > 1 else ' is'} of this kind ({named})"
    apart = " or ".join(unlike(kind))
    which = f"; of the nearest none has {apart}" if apart else ""
    why = "It is as wide as plans of unknown kinds were off, and assumed in part"
    return f"range: no published run near this ({named}){which}. {why}"
