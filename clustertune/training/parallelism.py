"""Tensor, expert and context parallelism: what transformers and accelerate lack of them.

Tensor parallelism, and expert parallelism in the same group: every layer split as transformers' own plan for the model says.
transformers 5.23 splits a model while it loads it, and then neither resumes it nor trains an adapter on it: its forward hooks
hand DTensors to PEFT's layers. Here the loaded model, adapter included, is split instead. Parameters are DTensors for FSDP2,
the optimizer and the checkpoint; the products are taken on each rank's local part, between the two operators of Megatron-LM
(arXiv 1909.08053, section 3): the input's gradient is summed, or the partial output is.

Context parallelism: each rank of a group holds a part of every sequence, and attends to the keys and values of all. torch's
own context parallelism (which accelerate uses) rewrites three CUDA kernels of scaled_dot_product_attention and knows none of
the CPU. Here keys and values are gathered over the group before an attention that is an ordinary one, as in Llama 3's training
(arXiv 2407.21783, section 3.3.2): the same program with gloo and with NCCL, and exact. A sequence is cut into 2 N pieces, and
rank r has pieces r and 2 N - 1 - r, so that all ranks have the same number of query-key pairs under the causal mask.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from clustertune.errors import Problem, UserError
from clustertune.recipe import accelerate_file as acc
from clustertune.training.loading import empty_part, is_empty_storage, plain

STYLES = ("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "replicated_with_grad_allreduce")
"""The styles of transformers' plans (transformers/distributed/tensor_parallel.py) that are carried out here."""
EXPERTS, EXPERT_WEIGHTS = "ep_dispatch_experts", "grouped_gemm"
"""The styles of its expert plans: a module whose experts are shared out, and the weights that hold them."""
CONTEXT_ATTENTION = "clustertune_context"
"""The attention implementation's name in transformers' registry."""
_ADAPTER = re.compile(r"\.lora_(A|B)\.[^.]+$")
_BETWEEN = re.compile(r"\.(act_fn|[qk]_norm|[qk]_layernorm)$")
"""Modules with parameters that see a rank's part of the hidden values, in models whose plan does not name them: Apertus's
activation, Phi's norms of queries and keys."""
_LAYER = re.compile(r"\.\d+(?=\.|$)")


# -- tensor and expert parallelism ----------------------------------------------------------------------------------------


class _SumGradient(torch.autograd.Function):  # type: ignore[misc]
    """The identity; in backward the sum over the group, of which every rank has a part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _SumOutput(torch.autograd.Function):  # type: ignore[misc]
    """The sum over the group; in backward the identity, as every rank has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:  # noqa: ARG004
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return gradients[0], None


def sum_gradient(x: torch.Tensor, group: Any) -> torch.Tensor:
    """``x``, whose gradient is summed over the group."""
    summed: torch.Tensor = _SumGradient.apply(x, group) if torch.is_grad_enabled() and x.requires_grad else x
    return summed


sum_output: Callable[[torch.Tensor, Any], torch.Tensor] = _SumOutput.apply


@contextlib.contextmanager
def local_parameters(module: nn.Module, without: tuple[str, ...] = ()) -> Iterator[None]:
    """The module's own parameters as this rank's tensors, for the length of one forward pass; autograd goes through."""
    parameters = {name: p for name, p in module._parameters.items() if isinstance(p, DTensor) or name in without}
    for name, parameter in parameters.items():
        module._parameters[name] = None if name in without else parameter.to_local()
    try:
        yield
    finally:
        module._parameters.update(parameters)


def plan_of(model: Any) -> dict[str, str]:
    """Module or parameter, layer numbers as ``*`` -> style, for the whole model; its expert plan goes before its dense one."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    experts = dict(base.ep_plan or {})
    homes = tuple(name for name, style in experts.items() if style == EXPERTS)
    dense = {name: style for name, style in (base.tp_plan or {}).items() if not name.startswith(homes or ("\0",))}
    return {**dense, **experts}


def plain_name(name: str) -> str:
    """A module's name in the plan, from its name in a model that PEFT may have wrapped."""
    return _LAYER.sub(".*", plain(_ADAPTER.sub("", name) + ".")).removesuffix(".")


class _Split:
    """One model being split over one group. ``upcast``: what is trained becomes float32."""

    def __init__(self, mesh: Any, *, upcast: bool) -> None:
        self.mesh, self.group, self.size = mesh, mesh.get_group(), mesh.size()
        self.upcast = upcast
        self.rank = mesh.get_local_rank()
        self._made: dict[int, nn.Parameter] = {}

    def distribute(self, module: nn.Module, name: str, dim: int | None) -> None:
        """Make a parameter that is there a DTensor over the group: split along ``dim``, or the same on all ranks.

        A tied one stays tied.
        """
        parameter = module._parameters.get(name)
        if parameter is None or isinstance(parameter, DTensor):
            return
        if id(parameter) not in self._made:
            split = self._part_of(parameter, Replicate() if dim is None else Shard(dim))
            self._made[id(parameter)] = nn.Parameter(split, requires_grad=parameter.requires_grad)
            self._made[id(self._made[id(parameter)])] = parameter  # keeps both alive: an id is not given twice
        module._parameters[name] = self._made[id(parameter)]

    def _part_of(self, parameter: nn.Parameter, placement: Replicate | Shard) -> DTensor:
        dtype = torch.float32 if self.upcast and parameter.requires_grad else parameter.dtype
        if is_empty_storage(parameter):  # read later, by rows (clustertune/training/loading.py)
            return empty_part(parameter.shape, dtype, self.mesh, placement)
        # Every rank holds the whole tensor: nothing is sent.
        return distribute_tensor(parameter.data, self.mesh, [placement], src_data_rank=None).to(dtype)

    def divides(self, module: nn.Module, name: str, dim: int) -> bool:
        parameter = module._parameters.get(name)
        return parameter is not None and parameter.shape[dim] % self.size == 0

    def colwise(self, module: nn.Module) -> None:
        """Each rank has some of the outputs; the input is whole, and so its gradient is a sum."""
        self.distribute(module, "weight", 0)
        self.distribute(module, "bias", 0)
        inner = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            with local_parameters(module):
                return inner(sum_gradient(x, self.group))

        module.forward = forward

    def rowwise(self, module: nn.Module) -> None:
        """Each rank has some of the inputs; the output is a sum, to which the bias is added once."""
        self.distribute(module, "weight", 1)
        self.distribute(module, "bias", None)
        inner = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            with local_parameters(module, without=("bias",)):
                output = sum_output(inner(x), self.group)
            bias = module._parameters.get("bias")
            return output if bias is None else output + bias.to_local()

        module.forward = forward

    def head(self, module: nn.Module) -> None:
        """The output projection: kept in parts, gathered where it is used (TRL's tiled loss takes its weight itself)."""
        self.distribute(module, "weight", 0 if self.divides(module, "weight", 0) else None)
        self.distribute(module, "bias", None)

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
            return F.linear(x, weight.full_tensor(), None if bias is None else bias.full_tensor())

        module.forward = forward

    def embedding(self, module: nn.Module) -> None:
        """Each rank has some rows of the vocabulary; the others' rows count as zero in the sum."""
        if not self.divides(module, "weight", 0) or module.max_norm is not None:
            self.replicated(module)
            return
        self.distribute(module, "weight", 0)
        own_rows = module._parameters["weight"].to_local().shape[0]
        inner = module.forward  # the module's own: Gemma's scales its rows
        if module.padding_idx is not None:  # the row that gets no gradient, where it is one of this rank's
            own = module.padding_idx - self.rank * own_rows
            module.padding_idx = own if 0 <= own < own_rows else None

        def forward(tokens: torch.Tensor) -> torch.Tensor:
            inside = tokens - self.rank * own_rows
            absent = (inside < 0) | (inside >= own_rows)
            with local_parameters(module):
                rows = inner(inside.masked_fill(absent, 0))
            return sum_output(rows.masked_fill(absent.unsqueeze(-1), 0.0), self.group)

        module.forward = forward

    def replicated(self, module: nn.Module, *, partial: bool = False) -> None:
        """The same parameters on all ranks. ``partial``: each rank's gradient covers its own heads only, and is summed."""
        for name in list(module._parameters):
            self.distribute(module, name, None)
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with local_parameters(module):
                if partial:
                    for name, parameter in list(module._parameters.items()):
                        if parameter is not None:
                            module._parameters[name] = sum_gradient(parameter, self.group)
                return inner(*args, **kwargs)

        module.forward = forward

    def experts(self, module: Any, names: list[str]) -> None:
        """Each rank has some of the experts and runs them on the tokens that the group shares; the outputs are summed.

        A route to another rank's expert gets the index that transformers' experts leave out (one past the last) and weight 0.
        """
        for name in names:
            self.distribute(module, name, 0)
        module.num_experts //= self.size
        module._is_expert_parallel = True  # transformers' grouped products look for it before they mask such routes
        own_experts, inner = module.num_experts, module.forward

        def forward(states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            away = (index // own_experts) != self.rank
            local = torch.where(away, own_experts, index % own_experts)
            weights = sum_gradient(weights, self.group).masked_fill(away, 0.0)
            with local_parameters(module):
                return sum_output(inner(sum_gradient(states, self.group), local, weights), self.group)

        module.forward = forward


def split(model: Any, mesh: Any, *, upcast: bool = False) -> dict[str, int]:
    """Split a model (PEFT's wrapper included) over the one-dimensional ``mesh``, in place.

    Every rank must hold its values whole, or leave them to be read later (:func:`empty_storage`). ``upcast``: what is
    trained becomes float32, as accelerate would make it where it trains in another precision. Of a DTensor it changes the
    dtype's name alone.

    Returns how many modules were split in which style. Raises UserError where the model has no plan, or one of its styles
    is not known here, or its sizes do not divide: the check before the queue says the same from the architecture alone.
    """
    plan, work, counts = plan_of(model), _Split(mesh, upcast=upcast), dict[str, int]()
    unknown = sorted(set(plan.values()) - {*STYLES, EXPERTS, EXPERT_WEIGHTS})
    if unknown or not {"colwise", "rowwise"} <= set(plan.values()):
        what = f"styles {', '.join(unknown)}" if unknown else "no plan"
        raise UserError(Problem(f"{type(model).__name__}: transformers' tensor-parallel plan has {what}", key="tp_size"))
    named = [(name, plain_name(name), module) for name, module in model.named_modules()]
    styles: dict[str, Callable[[Any], None]] = {
        "colwise": work.colwise,
        "rowwise": work.rowwise,
        "colwise_gather_output": work.head,
        "embedding_rowwise": work.embedding,
        "replicated_with_grad_allreduce": lambda module: work.replicated(module, partial=True),
    }
    for full, name, module in named:
        if not any(parameter is not None for parameter in module._parameters.values()):
            continue
        style = plan.get(name) or ("replicated_with_grad_allreduce" if _is_between(name, plan) else "replicated")
        adapter = _ADAPTER.search(full)
        if adapter is not None and style in ("colwise", "rowwise"):
            # The product B A x goes the way of W x: A is whole before a split of the outputs, B after one of the inputs.
            is_replicated = (adapter[1] == "A") == (style == "colwise")
            style = "replicated" if is_replicated else style
        _demand_division(module, full, style, work)
        if style == EXPERTS:
            prefix = f"{name}."
            work.experts(
                module, [p.removeprefix(prefix) for p, kind in plan.items() if p.startswith(prefix) and kind == EXPERT_WEIGHTS]
            )
        else:
            styles.get(style, work.replicated)(module)
        counts[style] = counts.get(style, 0) + 1
    work._made.clear()  # the whole parameters among them; the modules' forwards keep the rest of it alive
    return counts


def _is_between(name: str, plan: dict[str, str]) -> bool:
    home = name.rpartition(".")[0]
    before = [style for key, style in plan.items() if key.rpartition(".")[0] == home]
    return _BETWEEN.search(name) is not None and "colwise" in before


def _demand_division(module: Any, name: str, style: str, work: _Split) -> None:
    dim = {"colwise": 0, "rowwise": 1, EXPERTS: 0}.get(style)
    if dim is None:
        return
    for parameter in module.parameters(recurse=False):
        if parameter.ndim > dim and parameter.shape[dim] % work.size:
            text = f"{name}: {parameter.shape[dim]} does not divide by {work.size} tensor-parallel ranks"
            raise UserError(Problem(text, key=acc.key_of("tp"), fix="use a smaller tp size"))


# -- context parallelism --------------------------------------------------------------------------------------------------


def pieces_of(rank: int, size: int) -> tuple[int, int]:
    """The two of ``2 * size`` pieces that a rank holds."""
    return rank, 2 * size - 1 - rank


def in_order(size: int) -> list[int]:
    """Where each piece, in the order of the sequence, lies among those gathered rank by rank."""
    gathered = [piece for rank in range(size) for piece in pieces_of(rank, size)]
    return [gathered.index(piece) for piece in range(2 * size)]


def attend_over_ranks(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    group: Any,
    rank: int,
    size: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,  # noqa: ARG001 - what other implementations take
) -> tuple[torch.Tensor, None]:
    """Causal attention of this rank's queries to the keys of the whole sequence; an implementation for transformers.

    Shapes: ``query`` [batch, heads, length / size, head_dim], ``key`` and ``value`` the same with the key-value heads.
    Returns [batch, length / size, heads, head_dim]. Padding stands behind every real token, which it cannot be seen from.
    """
    assert attention_mask is None
    repeats = query.shape[1] // key.shape[1]
    expanded = []
    for tensor in (key, value):
        gathered = all_gather_tensor_autograd(tensor.contiguous(), 2, group)
        pieces = gathered.chunk(2 * size, dim=2)
        ordered = torch.cat([pieces[at] for at in in_order(size)], dim=2)
        expanded.append(ordered.repeat_interleave(repeats, dim=1) if repeats > 1 else ordered)
    length = query.shape[2] // 2
    chance = dropout if module.training else 0.0
    outputs = []
    for part, piece in zip(query.chunk(2, dim=2), pieces_of(rank, size), strict=True):
        keys, values = (tensor[:, :, : (piece + 1) * length] for tensor in expanded)
        # The queries are the last of the keys' positions: flash attention knows this mask and needs no tensor for it.
        mask = causal_lower_right(length, keys.shape[2])
        outputs.append(F.scaled_dot_product_attention(part, keys, values, attn_mask=mask, dropout_p=chance, scale=scaling))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def install_context(model: Any, mesh: Any) -> None:
    """Let a transformers model attend over the ranks of the one-dimensional ``mesh``."""
    settings = {"group": mesh.get_group(), "rank": mesh.get_local_rank(), "size": mesh.size()}
    AttentionInterface.register(CONTEXT_ATTENTION, partial(attend_over_ranks, **settings))
    AttentionMaskInterface.register(CONTEXT_ATTENTION, lambda *args, **kwargs: None)  # noqa: ARG005
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.set_attn_implementation(CONTEXT_ATTENTION)


def share_of(inputs: Mapping[str, Any], rank: int, size: int, pad_token: int) -> dict[str, Any]:
    """This rank's part of a batch: ``input_ids``, ``attention_mask`` and, made here, ``position_ids`` and ``shift_labels``.

    The labels are moved before the cut, as the last token of a piece is followed by the first of another rank's. Sequences
    are padded to a multiple of ``2 * size``.
    """
    length = inputs["input_ids"].shape[1]
    lacking = -length % (2 * size)
    fill = {"input_ids": pad_token, "attention_mask": 0, "labels": -100}
    values = {key: F.pad(tensor, (0, lacking), value=fill[key]) for key, tensor in inputs.items() if key in fill}
    positions = torch.arange(length + lacking, device=inputs["input_ids"].device)
    values["position_ids"] = positions.expand(inputs["input_ids"].shape[0], -1)
    if "labels" in values:
        values["shift_labels"] = F.pad(values.pop("labels"), (0, 1), value=-100)[:, 1:]

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        pieces = tensor.chunk(2 * size, dim=1)
        return torch.cat([pieces[piece] for piece in pieces_of(rank, size)], dim=1).contiguous()

    return {**{key: value for key, value in inputs.items() if key not in fill}, **{k: mine(v) for k, v in values.items()}}
