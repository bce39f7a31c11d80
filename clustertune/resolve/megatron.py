"""What Megatron-Core refuses of a ``megatron`` section, and which commands start such a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clustertune.errors import Problem, raise_if
from clustertune.recipe.sections import Megatron
from clustertune.resolve.resolved import Resolved

NOT_STARTED = "is for Megatron-Bridge in its own container, which clustertune submit starts"
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def experts(architecture: Mapping[str, Any]) -> int:
    """The experts of a mixture, which families name in three ways; 0: none."""
    return next((int(architecture[key]) for key in EXPERTS if architecture.get(key)), 0)


def data_parallel(m: Megatron, world: int) -> int:
    """The ranks of ``world`` that read different sequences."""
    return max(1, world // (m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size))


def find_problems(m: Megatron, world: int) -> Iterator[tuple[str, str, str]]:
    """A key of the section, what is wrong, and what to do: sizes that do not divide the ranks. Megatron-Core says at its start
    what does not divide the model (parallel_state.py, transformer_config.py)."""
    tp, pp, cp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size, m.context_parallel_size
    if world % (tp * pp * cp):
        text = f"tensor {tp} x pipeline {pp} x context {cp} is {tp * pp * cp}, which does not divide {world} ranks"
        yield "tensor_model_parallel_size", text, f"use a multiple of {tp * pp * cp} ranks"


def refusals(resolved: Resolved) -> list[Problem]:
    """Why a recipe is not trained by a launcher other than Slurm's: nothing, or that it is for Megatron."""
    if resolved.recipe.megatron is None:
        return []
    return [Problem(NOT_STARTED, file=resolved.name, key="megatron", fix="clustertune submit RECIPE, or take the section out")]


def require_startable(resolved: Resolved) -> None:
    """Raises UserError for a recipe that only ``submit`` starts."""
    raise_if(refusals(resolved))
