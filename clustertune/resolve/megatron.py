"""What Megatron-Core refuses of a ``megatron`` section, and which commands start such a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clustertune.errors import Problem, raise_if
from clustertune.recipe.schema import Megatron
from clustertune.resolve.resolved import Resolved

NOT_STARTED = "is for Megatron-Bridge in its own container, which clustertune submit starts"
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def experts(architecture: Mapping[str, Any]) -> int:
    """The experts of a mixture, which families name in three ways; 0: none."""
    return next((int(architecture[key]) for key in EXPERTS if architecture.get(key)), 0)


def data_parallel(m: Megatron, world: int) -> int:
    """The ranks of ``world`` that read different sequences."""
    return max(1, world // (m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size))


def find_problems(
    m: Megatron, world: int, architecture: Mapping[str, Any] | None, train: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Everything that does not divide: a key of the section, what is wrong, and what to do.

    The rules are those of megatron/core/parallel_state.py (initialize_model_parallel), model_parallel_config.py and
    transformer/transformer_config.py.
    """
    tp, pp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size
    cp, ep = m.context_parallel_size, m.expert_model_parallel_size
    if world % (tp * pp * cp):
        text = f"tensor {tp} x pipeline {pp} x context {cp} is {tp * pp * cp}, which does not divide {world} ranks"
        yield "tensor_model_parallel_size", text, f"use a multiple of {tp * pp * cp} ranks"
    expert_tp = m.expert_tensor_parallel_size or tp
    if ep > 1 and world % (expert_tp * ep * pp):
        size = expert_tp * ep * pp
        text = f"expert tensor {expert_tp} x expert {ep} x pipeline {pp} is {size}, which does not divide {world} ranks"
        yield "expert_model_parallel_size", text, "use sizes that divide it, or set expert_tensor_parallel_size: 1"
    chunks = m.virtual_pipeline_model_parallel_size or 1
    if chunks > 1 and pp == 1:
        yield "virtual_pipeline_model_parallel_size", f"{chunks}, while there is no pipeline", "leave it out"
    if m.sequence_parallel and tp == 1:
        yield "sequence_parallel", "true, while tensor_model_parallel_size is 1", "leave it out"
    length = train["max_length"]
    parts = (2 * cp if cp > 1 else 1) * (tp if m.sequence_parallel else 1)
    if length % parts:
        fix = f"train.max_length={length // parts * parts}"
        yield "context_parallel_size", f"train.max_length {length} is not a multiple of {parts}", fix
    if architecture is not None:
        yield from _check_model(m, architecture)


def _check_model(m: Megatron, architecture: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    tp, pp, ep = m.tensor_model_parallel_size, m.pipeline_model_parallel_size, m.expert_model_parallel_size
    fix = "use a size that divides it"
    stages = pp * (m.virtual_pipeline_model_parallel_size or 1)
    layers, heads = int(architecture["num_hidden_layers"]), int(architecture["num_attention_heads"])
    ends = m.account_for_embedding_in_pipeline_split + m.account_for_loss_in_pipeline_split
    if (layers + ends) % stages:
        key = "virtual_pipeline_model_parallel_size" if stages > pp else "pipeline_model_parallel_size"
        counted = f"{layers} layers" + (f" and {ends} for embedding and loss" if ends else "")
        more = "use sizes that divide them"
        if not ends and (layers + 2) % stages == 0:
            more = "write account_for_embedding_in_pipeline_split: true and account_for_loss_in_pipeline_split: true"
        yield key, f"{counted} are not a multiple of {stages} stages", more
    groups = int(architecture.get("num_key_value_heads") or heads)
    # Where there are more ranks than key-value heads, several share one (transformer_config.py).
    for name, wrong, count in (
        ("num_attention_heads", heads % tp, heads),
        ("num_key_value_heads", groups % tp and tp % groups, groups),
    ):
        if wrong:
            yield "tensor_model_parallel_size", f"{tp} does not divide the model's {count} {name}", fix
    inner = architecture.get("intermediate_size")
    if isinstance(inner, int) and inner % tp:
        yield "tensor_model_parallel_size", f"{tp} does not divide the model's intermediate_size {inner}", fix
    number = experts(architecture)
    if ep > 1 and not number:
        yield "expert_model_parallel_size", f"{ep}, and the model has no experts", "leave it out"
    elif number % ep:
        yield "expert_model_parallel_size", f"{ep} does not divide the model's {number} experts", fix
    if number and tp > 1 and not m.sequence_parallel:
        text = "false: Megatron-Core wants it for experts with tensor parallelism"
        yield "sequence_parallel", text, "write sequence_parallel: true"


def refusals(resolved: Resolved) -> list[Problem]:
    """Why a recipe is not trained by a launcher other than Slurm's: nothing, or that it is for Megatron."""
    if resolved.recipe.megatron is None:
        return []
    return [Problem(NOT_STARTED, file=resolved.name, key="megatron", fix="clustertune submit RECIPE, or take the section out")]


def require_startable(resolved: Resolved) -> None:
    """Raises UserError for a recipe that only ``submit`` starts."""
    raise_if(refusals(resolved))
