"""What one rank holds and computes: the model's layers divided by tensor, pipeline and expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from clustertune.config.counted import LayerKind, ParameterCount
from clustertune.plan.strategy import Strategy


@dataclass(frozen=True)
class ModelShape:
    """The model over one strategy. Counts are parameters, of the rank that has most of them, before any data-parallel split."""

    counted: ParameterCount
    strategy: Strategy
    trained: int
    """Trained parameters of the whole model."""
    adapters: int
    """LoRA's parameters of the whole model; 0 without LoRA."""
    rank: int = 1
    """LoRA's rank: adapters / rank is the sum of inputs and outputs of all adapted modules."""

    targets: tuple[str, ...] = ()
    """The last parts of the names of the modules that LoRA adapts."""

    wrapped: tuple[str, ...] = ()
    """The parameters of fused experts that LoRA adapts, by their names below a layer."""

    dropout: float = 0.0
    """LoRA's dropout."""

    cudnn_attention: bool = False
    """Under a mask sdpa may run in cuDNN's kernel, and attention's output is kept twice: in IDRIS's runs on H100 and GB200 by
    0.078 GiB (8,192 tokens of 5,120 elements) in each layer that was not recomputed, on A100 not at all."""

    @property
    def layers(self) -> float:
        """Layers on one rank."""
        return sum(kind.count for kind in self.counted.layers) / self.strategy.pp

    @property
    def tokens(self) -> float:
        """Tokens of a micro batch that one rank computes."""
        return self.strategy.micro_batch * self.strategy.answers * self.strategy.sequence / self.strategy.cp

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step over all ranks, padding included."""
        plan = self.strategy
        return plan.micro_batch * plan.answers * plan.accumulation * plan.sequence * plan.data_parallel_size

    def layer(self, kind: LayerKind) -> float:
        """Parameters of one layer on one rank."""
        plan = self.strategy
        dense = sum(linear.parameters for linear in kind.linears if linear.copies == 1)
        experts = sum(linear.parameters for linear in kind.linears if linear.copies > 1)
        return dense / plan.tp + experts / (plan.tp * plan.ep) + kind.other

    @cached_property
    def body(self) -> float:
        """Parameters of all layers on one rank."""
        return sum(kind.count * self.layer(kind) for kind in self.counted.layers) / self.strategy.pp

    @cached_property
    def largest(self) -> float:
        """Parameters of the largest layer on one rank."""
        return max(self.layer(kind) for kind in self.counted.layers)

    @property
    def ends(self) -> float:
        """Parameters of embedding, head and last norm on one rank; of a pipeline the heavier end."""
        counted, plan = self.counted, self.strategy
        both = counted.embedding + counted.head + counted.other
        if plan.pp > 1:
            both = max(counted.embedding, (counted.embedding if counted.tied else counted.head) + counted.other)
        return both / plan.tp

    @property
    def parameters(self) -> float:
        """All of the base model's parameters on one rank."""
        return self.body + self.ends

    @property
    def quantised(self) -> bool:
        """The layers' weights are stored in less than 16 bits; embedding, head and norms are not."""
        return self.strategy.weight_bytes < 2

    @property
    def stored(self) -> float:
        """Bytes of the base model on one rank, before any data-parallel split."""
        plan = self.strategy
        return self.body * plan.weight_bytes + self.ends * (plan.other_bytes if self.quantised else plan.weight_bytes)

    @property
    def gathered(self) -> float:
        """Bytes of all weights in an all-gather."""
        plan = self.strategy
        return self.body * plan.gather_bytes + self.ends * (min(2.0, plan.other_bytes) if self.quantised else plan.gather_bytes)

    @cached_property
    def local_trained(self) -> float:
        """Trained parameters on one rank: everything, or its share of the adapters."""
        if not self.strategy.lora:
            return self.parameters
        return self.adapters / (self.strategy.tp * self.strategy.pp)

    def experts(self, kind: LayerKind) -> int:
        """Parameters of one layer's experts that LoRA adapts. PEFT runs them from a copy with the update in it (peft 0.20,
        ``ParamWrapper``), in every forward pass."""
        return sum(linear.copies * linear.inputs * linear.outputs for linear in kind.linears if linear.name in self.wrapped)

    @cached_property
    def all_experts(self) -> float:
        """The same of all layers."""
        return float(sum(kind.count * self.experts(kind) for kind in self.counted.layers))

    @cached_property
    def per_token(self) -> float:
        """LoRA's parameters that each token passes through: those of modules. Experts' A and B make an update of weights."""
        if not self.wrapped:
            return float(self.adapters)
        sizes = ((kind, linear) for kind in self.counted.layers for linear in kind.linears if linear.name in self.wrapped)
        return self.adapters - self.rank * sum(k.count * one.copies * (one.inputs + one.outputs) for k, one in sizes)

    @property
    def head_weights(self) -> float:
        """Elements of the output projection."""
        return float(self.counted.vocabulary * self.counted.hidden)
