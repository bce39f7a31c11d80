"""What a model is made of, counted from its architecture: matrices, norms, attention, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """One matrix of a layer, or all experts' matrices of one name."""

    name: str
    """As in the module tree of the installed transformers, below the layer: ``self_attn.q_proj``, ``mlp.experts.down_proj``."""
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    """How many of it the layer has (experts)."""
    active: float = 1.0
    """How many of the copies one token passes through (experts per token)."""
    bare: bool = False
    """A bare parameter, not a linear module: the fused experts and the routers of transformers 5."""

    @property
    def size(self) -> int:
        """Parameters of one copy."""
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)

    @property
    def parameters(self) -> int:
        """Parameters of all copies."""
        return self.copies * self.size


@dataclass(frozen=True)
class Attention:
    """What a layer's attention computes; ``qk_dim`` and ``v_dim`` are per head."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window: int | None = None
    """Tokens that a token sees (sliding window or chunk); None: all before it."""


@dataclass(frozen=True)
class LayerKind:
    """Layers that are the same."""

    count: int
    linears: tuple[Linear, ...]
    other: int
    """Parameters beside the linears in one layer: norms, sinks."""
    attention: Attention
    inner: int
    """Width between the up and down projections, summed over the experts that a token passes through."""

    @property
    def parameters(self) -> int:
        """Parameters of one layer."""
        return sum(linear.parameters for linear in self.linears) + self.other

    @property
    def active(self) -> float:
        """Parameters of one layer that one token passes through."""
        return sum(linear.active * linear.size for linear in self.linears) + self.other

    @property
    def active_matmul(self) -> float:
        """Multiply-adds of one token in one layer's linears (attention's own products are not among them)."""
        return sum(linear.active * linear.inputs * linear.outputs for linear in self.linears)


@dataclass(frozen=True)
class ParameterCount:
    """The parameters of a model, exact."""

    layers: tuple[LayerKind, ...]
    hidden: int
    vocabulary: int
    embedding: int
    """Parameters of the token embedding, and of learned positions where there are such."""
    head: int
    """Parameters of the output head; 0 where it is the token embedding (tied)."""
    other: int
    """The final norm."""
    tied: bool

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(kind.count * kind.parameters for kind in self.layers) + self.embedding + self.head + self.other

    @property
    def active(self) -> int:
        """Parameters that one token passes through: its experts, the output head (also a tied one), no embedding row.

        As the gpt-oss model card counts (arXiv 2508.10925, table 1: 3.61B and 5.13B). Qwen3-30B-A3B's 3.3B and
        DeepSeek-V3's 37B hold the embedding as well.
        """
        layers = sum(kind.count * kind.active for kind in self.layers)
        return round(layers) + self.vocabulary * self.hidden + self.other

    @property
    def largest(self) -> int:
        """Parameters of the largest matrix; all experts' matrices of one name are one parameter of transformers."""
        return max([self.embedding, *(part.parameters for kind in self.layers for part in kind.linears)])

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return sum(kind.count for kind in self.layers)
