"""The few constants of the planner that no data sheet gives, each with what it was found from.

They are shares of a peak and counts of bytes, the same for every model. A cluster's own runs correct four of them: see
:mod:`clustertune.plan.calibration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Constants:
    """Values with their meaning and source below them.

    "Fitted" means: to 17 FSDP2 runs of Qwen2.5-14B and 32B (github.com/idriscnrs/Democratizing-LLM-FT, logs/out) and 32 rows of
    the throughput tables of torchtitan, NeMo AutoModel and Megatron-Bridge (published/runs.yaml), the logs weighted with 2 %,
    the tables with 10 to 15 % of error; docs/results/planner.md shows what is left of each, and what the fit never saw.
    """

    gemm_share: Mapping[str, float] = field(
        default_factory=lambda: {
            "volta": 0.60,
            "turing": 0.60,
            "ampere": 0.83,
            "ada": 0.70,
            "hopper": 0.596,
            "blackwell": 0.442,
            "blackwell-gddr": 0.80,
        }
    )
    """Share of the dense peak that matrix products reach in training. Fitted for ampere, hopper and blackwell; blackwell-gddr
    (compute capability 12) below the 417 of 480 TFLOP/s of a bare product of 8192 x 8192
    (github.com/zzc0721/torch-performance-test-data, issue 162); the others assumed between."""
    attention_share: float = 0.443
    """Speed of the attention kernel, as a share of what matrix products reach. Fitted: 270 TFLOP/s on an H100."""
    fp8_share: Mapping[str, float] = field(
        default_factory=lambda: {
            "volta": 1.0,
            "turing": 1.0,
            "ampere": 1.0,
            "ada": 1.0,
            "hopper": 0.98,
            "blackwell": 1.32,
            "blackwell-gddr": 1.0,
        }
    )
    """Speed of float8 products with their casts and scales, as a share of what bfloat16 reaches of its own peak. Fitted for
    hopper and blackwell, whose bfloat16 runs are of one program; the others assumed alike."""
    hbm_share: float = 0.90
    """Share of the memory's data-sheet bandwidth that a long kernel reaches. Assumed: 92 to 93 % are measured for copies."""
    compiled_hidden: float = 233.0
    """Elements of the hidden size that kernels other than matrix products read and write per token and layer, forward and
    backward, compiled or fused. Fitted; it holds launch gaps and copies of the sharding as well."""
    engine_hidden: float = 91.0
    """The same of Megatron-Core with Transformer Engine. Fitted."""
    eager_hidden: float = 546.0
    """The same where each operation is a kernel of its own. Fitted."""
    lora_passes: float = 2.4
    """Elements that LoRA's thin products, dropout and the sum with the base read and write, forward and backward, per input and
    output element of each adapted module. Fitted, at the lower end of what is possible: the tables' kernels are fused."""
    loss_bytes: float = 30.0
    """Bytes read and written per token and vocabulary entry by the cross-entropy: bf16 logits, their fp32 copy, log-softmax,
    gradient and its cast."""
    optimizer_bytes: float = 92.0
    """Bytes read and written per trained fp32 parameter by gradient clipping (4 + 8) and torch's foreach AdamW, a kernel per
    operation: decay 8, first moment 12, second 8 + 12, root 8, division 8, epsilon 8, update 16."""
    fused_optimizer_bytes: float = 40.0
    """The same where AdamW is one kernel (adamw_torch_fused): clipping, then 16 read and 12 written."""
    overlap_loss: float = 0.082
    """Share of the shorter of two things at once (computing, communicating) that still adds to the time. Fitted."""
    kept_compiled_hidden: float = 6.3
    """Elements of the hidden size that a layer keeps per token for backward, compiled; beside them queries, keys, values and
    output of attention. Fitted to the 17 runs' peaks."""
    kept_compiled_inner: float = 3.0
    """Elements of the feed-forward width: gate, up and their product."""
    dropout_mask: float = 1.0
    """Bytes per input of each adapted module that LoRA's dropout keeps beside what it lets through: its mask, on a GPU. On a
    CPU the mask has the input's type."""
    fragmentation: float = 0.03
    """What the caching allocator reserves beyond its tensors, as a share. Assumed."""
    context_gib: float = 1.6
    """CUDA context, NCCL and cuBLAS workspaces of a process, GiB. Assumed."""
    compute_scale: float = 1.0
    """Time of all kernels against the model: below 1 is faster. Calibrated."""
    intra_scale: float = 1.0
    """Bus bandwidth inside a node against the link's. Calibrated."""
    inter_scale: float = 1.0
    """Bus bandwidth between nodes against the link's. Calibrated."""
    memory_scale: float = 1.0
    """Activation bytes against the model. Calibrated."""
    deviation: Mapping[str, float] = field(default_factory=dict)
    """Standard deviation that a calibration left of each of its factors, as a share."""
    calibrated: tuple[str, ...] = ()
    """Which of these a cluster's own runs gave."""

    def gemm(self, generation: str) -> float:
        """The share for a GPU generation."""
        return self.gemm_share[generation]

    def value(self, name: str) -> float:
        """A constant by name; ``gemm_share.hopper`` for one of the shares."""
        key, _, generation = name.partition(".")
        return float(getattr(self, key)[generation] if generation else getattr(self, key))

    def with_values(self, values: Mapping[str, float]) -> Constants:
        """The same with some of them replaced. One of the shares is given as ``gemm_share.hopper``."""
        changed: dict[str, Any] = {}
        for name, value in values.items():
            key, _, generation = name.partition(".")
            changed[key] = {**changed.get(key, getattr(self, key)), generation: value} if generation else value
        return replace(self, **changed)


LENGTH_SIGMA = 0.8
"""Standard deviation of the logarithms of lengths where only their mean is known: about what chat data sets have. It is
1.1 of 687 replies of oasst2 (mean 203 tokens of 4 bytes), and 0.5 of 2,048 answers of GSM8K (mean 59)."""

# --- one quantity of a plan with the arithmetic that gave it ----------------------------------------------------------

SECONDS, BYTES = "s", "B"


@dataclass(frozen=True)
class Term:
    """A part of the step or of the memory."""

    name: str
    """What it is, in a phrase."""
    value: float
    unit: str
    formula: str = ""
    """The arithmetic with ``{name}`` where a number of :attr:`values` stands."""
    values: Mapping[str, float | int | str] = field(default_factory=dict)

    def arithmetic(self) -> str:
        """The formula with its numbers, and the result: ``8,192 tokens x ... = 0.63 s``."""
        shown = {key: number(value) for key, value in self.values.items()}
        return f"{self.formula.format(**shown)} = {quantity(self.value, self.unit)}"


def number(value: float | int | str) -> str:
    """A number as a person reads it: thousands separated, four digits that count."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}" if abs(value) < 1e9 else f"{value:.4g}"
    return f"{value:,.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    """A number with its unit; bytes as GiB, short times as ms."""
    if unit == BYTES:
        return f"{value / 2**30:.2f} GiB" if abs(value) >= 2**28 else f"{value / 2**20:.2f} MiB"
    if unit == SECONDS:
        return f"{value:,.3g} s" if abs(value) >= 1 or value == 0 else f"{value * 1e3:,.3g} ms"
    return f"{number(value)} {unit}".rstrip()


def total(terms: list[Term]) -> float:
    """The sum of the values of terms that share a unit."""
    return sum(term.value for term in terms)
