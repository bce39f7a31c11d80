"""What recomputed layers keep beside their input: ``activation_checkpointing.save``, in bytes and in work that is spared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clustertune.config.counted import LayerKind
from clustertune.plan.kept import FULL, Kept
from clustertune.plan.shape import Shape

WHOLE = ("o_proj", "down_proj", "gate")
"""Projections whose result tensor parallelism leaves whole on every rank."""


@dataclass(frozen=True)
class Product:
    """One matrix product of a layer's forward pass."""

    name: str
    width: float
    """Elements of its result per token, on one rank."""
    weights: float
    """Weights that a token meets in it, on one rank: half of its FLOPs."""
    adapter: bool = False


def products(shape: Shape, kind: LayerKind) -> Iterator[Product]:
    """The products in the order in which they run, LoRA's two after the base's (peft/tuners/lora/layer.py, forward).

    All experts of one name are one grouped product (transformers' grouped_mm).
    """
    plan = shape.strategy
    for linear in kind.linears:
        name = linear.name.split(".")[-1]
        # The result of a row-parallel product is a sum over all ranks: each has it whole.
        split = 1 if name in WHOLE else plan.tp
        width, rows = linear.outputs * linear.active / split, linear.inputs * linear.active
        yield Product(name, width, rows * linear.outputs / plan.tp)
        if plan.lora and name in shape.targets:
            yield Product(f"{name}.lora_A", shape.rank * linear.active, rows * shape.rank, adapter=True)
            yield Product(f"{name}.lora_B", width, width * shape.rank, adapter=True)


@dataclass(frozen=True)
class Policy:
    """A strategy's policy on one model."""

    shape: Shape
    kept: Kept

    @property
    def save(self) -> tuple[str, ...]:
        return self.shape.strategy.recompute.save if self.shape.strategy.recompute.share else ()

    def saved(self, kind: LayerKind) -> list[Product]:
        """The products whose results are kept: all, or the first, third, fifth ... of the layer."""
        found = list(products(self.shape, kind))
        return found if "matmul" in self.save else found[::2] if "every_second_matmul" in self.save else []

    def layer(self, kind: LayerKind) -> float:
        """Bytes per token that a recomputed layer keeps beside its input."""
        return self.kept.width * sum(product.width for product in self.saved(kind)) + self._attention(kind)

    def _attention(self, kind: LayerKind) -> float:
        """The kernel's result, and of each head the logarithm of its sum in float32."""
        attention, plan = kind.attention, self.shape.strategy
        held = attention.heads * (attention.v_dim * self.kept.width + FULL) / plan.tp
        return held if "attention" in self.save else 0.0

    def taken(self, kind: LayerKind) -> float:
        """Of that, what a layer which is computed again keeps for its backward pass anyway: the same tensors."""
        attention, plan = kind.attention, self.shape.strategy
        names = {"gate_proj", "up_proj"} | (set() if self.kept.repeats else {"v_proj"})
        adapted = set(self.shape.targets) if plan.lora else set()
        width = sum(product.width for product in self.saved(kind) if product.name in names - adapted)
        if "attention" in self.save:
            width += attention.heads * attention.v_dim / plan.tp
        return self.kept.width * width

    @property
    def products_again(self) -> float:
        """Share of the layers' products that recomputation repeats, of those that are recomputed at all."""
        spared = whole = 0.0
        for kind in self.shape.counted.layers:
            whole += kind.count * sum(p.weights for p in products(self.shape, kind) if not p.adapter)
            spared += kind.count * sum(p.weights for p in self.saved(kind) if not p.adapter)
        return 1 - spared / whole

    @property
    def attention_again(self) -> float:
        """The same of attention: all or nothing."""
        return 0.0 if "attention" in self.save else 1.0
