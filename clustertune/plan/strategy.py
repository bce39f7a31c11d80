"""How a resolved recipe spreads a model over ranks, and how many bytes each number takes there: what the planner computes with.

Facts about bytes are read in the pinned libraries (containers/versions.env): accelerate 1.15, TRL 1.16, PEFT 0.20,
transformers 5.23, torch 2.13; of DeepSpeed and Megatron-Core in their repositories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clustertune.config import accelerate_file as acc
from clustertune.config import kernels
from clustertune.config.derive import DEFAULT_MICRO_BATCH
from clustertune.config.distribution import Distribution
from clustertune.config.resolved import Resolved
from clustertune.errors import Problem, UserError
from clustertune.plan import strategy_bytes
from clustertune.plan.strategy_bytes import Sizes

DEFAULT_MAX_LENGTH = 1024
"""``SFTConfig``'s own ``max_length`` (trl/trainer/sft_config.py:202)."""
FUSED_LOSS = (
    "TRL 1.16 computes the loss in tiles of the output head: logits are never whole (trl/trainer/utils.py:1548); other "
    "trainers and TRL before its fused head keep them"
)
WHOLE_LOGITS = "plan.whole_logits: the program holds all logits through the backward pass, and embedding and head stay gathered"
WHOLE_LOSS = (
    "train.label_smoothing_factor: TRL holds all logits at once, and computes each forward pass a second time for its metrics "
    "(trl/trainer/sft_trainer.py:1601)"
)
REFERENCE = (
    "trainer: dpo: a row is two sequences, and the base without its adapter computes both a second time",
    "trainer: dpo: a row is two sequences, and a second, frozen model computes both; it is sharded as the trained one is",
)
TF32 = "float32 products are counted as TF32, half the speed of bfloat16; without train.tf32=true they are slower"


@dataclass(frozen=True, kw_only=True)
class Strategy(Distribution, Sizes):
    """A distribution with what decides time and memory beside it. Sizes are counts of ranks."""

    micro_batch: int
    accumulation: int
    sequence: int
    """Tokens of a row: packed rows have this length, padded ones at most."""
    packing: bool
    attention: str
    """``sdpa``, ``eager``, or ``flash`` for every kernel that takes where conversations begin and no mask."""
    lora: bool
    fused_loss: bool
    """Logits are never whole."""
    overlap_tp: bool = False
    """Tensor-parallel collectives run beside the products (asynchronous TP)."""
    reduce_each: bool = False
    """Gradients are reduced after every micro batch, not only after the last of a step."""
    fused_optimizer: bool = False
    """AdamW is one kernel."""
    ends_apart: bool = False
    """Embedding and head are FSDP units of their own and the embedding is given back after use; else they are the root's, which
    stays gathered."""
    isolated: bool = False
    """Packed conversations do not see each other: attention gets a mask, or their lengths."""
    conversation: float = 0.0
    """Tokens of the packed conversation that a token is in, on average over tokens; 0: not known, at most ``sequence``."""
    grouped: bool = False
    """Micro batches hold conversations of like length (train_sampling_strategy: group_by_length)."""
    tiled_loss: bool = False
    """A fused loss is TRL's, which has a tile of the logits and adds up the head's gradient in float32."""
    liger: bool = False
    """Norms, rotary embeddings and gates are Liger's kernels, each one pass over its rows."""
    holds_logits: bool = False
    """The program's own variable keeps the logits through the backward pass (``logits = model(...).logits`` in a loop)."""
    whole_loss: bool = False
    """Of published runs: the loss is not compiled with the model, and its logits have a copy in float32."""
    half_loss: bool = False
    """The cross-entropy is computed on 16-bit logits as they are, without a float32 copy."""
    second_forward: str = ""
    """What a second forward pass, without gradient, is for: ``metrics`` (of a loss from whole logits) or the ``reference``."""
    answers: int = 1
    """Sequences of a row: 2 of a preference."""
    reference_bytes: float = 0.0
    """A parameter of a second, frozen model; 0: there is none."""

    @property
    def row(self) -> int:
        """Tokens of a row of attention: TRL lays the packed rows of a micro batch end to end where it keeps them apart."""
        return self.sequence * (self.micro_batch if self.packing and self.isolated else 1)

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return -(-self.world_size // self.ranks_per_node)


def strategy(resolved: Resolved, distribution: Distribution | None = None) -> Strategy:
    """The strategy of a resolved recipe, or of it in another distribution.

    Raises UserError with everything that the libraries would refuse on the ranks.
    """
    split = distribution or resolved.distribution
    if problems := _find_problems(resolved, split):
        raise UserError(problems)
    sizes = strategy_bytes.read(resolved, split)
    args, trl = resolved.train_args, split.kind != "Megatron"
    # TRL computes a smoothed loss, and only that, from whole logits.
    smoothed = trl and bool(args.get("label_smoothing_factor")) and args.get("loss_type", "nll") == "nll"
    tiles = trl and not smoothed
    kernel = kernels.attention_of(args) if trl else "flash"
    notes = [*split.notes, *sizes.notes, *_recomputation_notes(resolved)]
    notes += [WHOLE_LOSS if smoothed else FUSED_LOSS] if trl else []
    notes += ["flex_attention is counted as flash attention"] if kernel == "flex_attention" else []
    notes += [REFERENCE[resolved.recipe.lora is None]] if resolved.is_dpo else []
    notes += [TF32] if sizes.compute == "fp32" and not args.get("tf32") else []
    made = Strategy(
        **vars(split) | vars(sizes),
        micro_batch=int(args.get("per_device_train_batch_size") or DEFAULT_MICRO_BATCH),
        accumulation=int(args.get("gradient_accumulation_steps") or 1),
        sequence=_sequence(args),
        packing=bool(args.get("packing") or args.get("padding_free")),
        attention=kernel if kernel in ("eager", "sdpa") else "flash",
        lora=resolved.recipe.lora is not None,
        fused_loss=tiles,
        ends_apart=split.kind == "FSDP2",  # accelerate/utils/fsdp_utils.py, fsdp2_prepare_model
        isolated=trl and kernels.packs(args),
        grouped=args.get("train_sampling_strategy") == "group_by_length",
        tiled_loss=tiles,
        liger=trl and bool(args.get("use_liger_kernel")),
        second_forward="reference" if resolved.is_dpo else "metrics" if smoothed else "",
        answers=2 if resolved.is_dpo else 1,
        reference_bytes=strategy_bytes.loaded_bytes(args) if resolved.is_dpo and resolved.recipe.lora is None else 0.0,
    )
    return replace(made, notes=tuple(dict.fromkeys(notes)))


def _sequence(args: Mapping[str, Any]) -> int:
    """Tokens of a row: packed rows have this length, padded ones at most."""
    return int(args.get("max_length") or DEFAULT_MAX_LENGTH)


def _recomputation_notes(resolved: Resolved) -> list[str]:
    recompute = resolved.distribution.recompute
    if recompute.selective:
        return ["selective recomputation repeats the attention alone, which flash attention does anyway"]
    if recompute.by == "none" and resolved.recipe.megatron is None and resolved.train_args.get("activation_offloading"):
        # TRL 1.16 leaves out weights by their place before the model is sharded (trl/models/activation_offloading.py:686).
        gathered = ", the weights that FSDP gathers among them" if resolved.distribution.kind.startswith("FSDP") else ""
        return [f"train.activation_offloading moves what backward needs to host memory{gathered}: not counted"]
    return []


def _find_problems(resolved: Resolved, split: Distribution) -> list[Problem]:
    """What tensor, context and sequence parallelism ask of the model and of the sequences."""
    if split.kind == "Megatron":
        return []  # resolve() has checked them: clustertune/config/megatron.py
    problems = []
    architecture = resolved.architecture
    file = f"{resolved.name}/{resolved.accelerate_file}"

    def add(axis: str, text: str, fix: str | None = None) -> None:
        problems.append(Problem(text, file=file, key=acc.key_of(axis), fix=fix))

    heads = int(architecture["num_attention_heads"])
    counts = {"num_attention_heads": heads, "num_key_value_heads": int(architecture.get("num_key_value_heads") or heads)}
    for name, count in counts.items():
        if count % split.tp:
            add("tp", f"{split.tp} does not divide the model's {count} {name}", "use a size that divides it")
    length, parts = _sequence(resolved.train_args), 2 * split.cp
    # torch's context_parallel cuts a sequence into 2 x cp pieces, for equal work under a causal mask.
    if split.cp > 1 and length % parts:
        fix = f"train.max_length={length // parts * parts}"
        add("cp", f"train.max_length {length} is no multiple of {parts} (2 x cp)", fix)
    return problems
