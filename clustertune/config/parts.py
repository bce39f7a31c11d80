"""The parts of a decoder layer: attention with grouped heads, feed-forward blocks."""

from __future__ import annotations

from dataclasses import dataclass

from clustertune.config.counted import Attention, Linear
from clustertune.config.values import Values, window

GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Part:
    """Some of a layer: its linears, its other parameters, and what it computes."""

    linears: tuple[Linear, ...]
    other: int = 0
    inner: int = 0
    """Width between up and down projection, over the experts of one token."""
    attention: Attention | None = None

    def shape(self) -> Attention:
        """The attention of a part that has one."""
        assert self.attention is not None
        return self.attention


def attention(
    values: Values,
    layer: int,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: str = "",
    fused: bool = False,
    query_factor: int = 1,
) -> Part:
    """q, k, v and o, or qkv and o where they are ``fused``.

    ``qk_norm``: "head" for one norm that all heads share, "all" for one over all heads, "optional" for the latter where
    ``use_qk_norm`` says so. ``query_factor`` 2: the query projection makes a gate too.
    """
    hidden, head, heads, groups = values.hidden, values.head_dim, values.heads, values.kv_heads
    query, keys = heads * head, groups * head
    if fused:
        linears: tuple[Linear, ...] = (Linear("self_attn.qkv_proj", hidden, query + 2 * keys, qkv_bias),)
    else:
        linears = (
            Linear("self_attn.q_proj", hidden, query_factor * query, qkv_bias),
            Linear("self_attn.k_proj", hidden, keys, qkv_bias),
            Linear("self_attn.v_proj", hidden, keys, qkv_bias),
        )
    linears += (Linear("self_attn.o_proj", query, hidden, out_bias),)
    wide = qk_norm == "all" or (qk_norm == "optional" and values.flag("use_qk_norm"))
    norms = query + keys if wide else 2 * head if qk_norm == "head" else 0
    return Part(linears, norms, attention=Attention(heads, groups, head, head, window(values, layer)))


def gated(prefix: str, hidden: int, inner: int, names: tuple[str, ...] = GATED, *, bias: bool = False) -> Part:
    """A gate and an up projection, in one matrix where ``names`` are two, and a down projection."""
    last = Linear(f"{prefix}.{names[-1]}", inner, hidden, bias)
    first = [Linear(f"{prefix}.{name}", hidden, 2 * inner if len(names) == 2 else inner, bias) for name in names[:-1]]
    return Part((*first, last), inner=inner)


def plain(prefix: str, hidden: int, inner: int, names: tuple[str, ...], *, bias: bool = False) -> Part:
    """An up and a down projection without a gate."""
    up, down = names
    return Part((Linear(f"{prefix}.{up}", hidden, inner, bias), Linear(f"{prefix}.{down}", inner, hidden, bias)), inner=inner)
