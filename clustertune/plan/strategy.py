"""How a resolved recipe spreads a model over ranks, and how many bytes each number takes there: what the planner computes with.

Facts about bytes are read in the pinned libraries (containers/versions.env): accelerate 1.15, TRL 1.16, PEFT 0.20,
transformers 5.23, torch 2.13; of DeepSpeed and Megatron-Core in their repositories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clustertune.config import accelerate_file as acc
from clustertune.config import kernels
from clustertune.config.derive import DEFAULT_MICRO_BATCH
from clustertune.config.distribution import Distribution
from clustertune.config.resolved import Resolved
from clustertune.errors import Problem, UserError
from clustertune.plan import strategy_bytes as numbers

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
TF32 = "float32 products are counted as TF32, half the speed of bfloat16; without train.tf32=true they are slower"


@dataclass(frozen=True)
class Strategy:
    """One way to spread a training over ranks. Sizes are counts of ranks; ``*_bytes`` are bytes per parameter."""

    engine: str
    """``trl`` or ``megatron``."""
    kind: str
    """``DDP``, ``FSDP1``, ``FSDP2``, ``ZeRO-0`` to ``ZeRO-3``, ``NO`` or ``Megatron``."""
    world: int
    gpus_per_node: int
    tp: int
    pp: int
    cp: int
    """Ranks that share a sequence: ring attention, or Ulysses (accelerate's ``sp``)."""
    ep: int
    virtual: int
    """Virtual pipeline stages per GPU; 1: plain 1F1B."""
    replicas: int
    """HSDP: groups that hold a full copy; 1: none."""
    dp: int
    """Ranks that read different sequences: world / (tp pp cp)."""
    weight_shards: int
    """Over how many ranks of the dp x cp dimension each weight is split; 1: whole on each."""
    gradient_shards: int
    """The same of gradients after their reduction."""
    state_shards: int
    """The same of optimizer state."""
    reshard: bool
    """Weights are given back after forward and gathered again for backward."""
    micro_batch: int
    accumulation: int
    sequence: int
    packing: bool
    checkpointed: float
    """Share of layers whose activations are recomputed, 0 to 1."""
    checkpoint_offload: bool
    """What recomputation starts from lies in host memory."""
    compiled: bool
    attention: str
    """``sdpa``, ``eager``, or ``flash`` for every kernel that takes where conversations begin and no mask."""
    lora: bool
    weight_bytes: float
    """A parameter of the base on the GPU between uses, block scales of a quantised one included (config/quantization.py)."""
    gather_bytes: float
    """A parameter in an all-gather."""
    gradient_bytes: float
    """The gradient of a trained parameter as it is held."""
    reduce_bytes: float
    """The gradient of a trained parameter in a reduce-scatter or all-reduce."""
    state_bytes: float
    """Optimizer state of a trained parameter, with a master copy where it is kept beside."""
    master_in_weights: bool
    """A trained parameter is itself the float32 copy that the optimizer updates."""
    offload_params: str
    """``none``, ``cpu`` or ``nvme``."""
    offload_optimizer: str
    sequence_parallel: bool
    """Megatron's: activations of norms and dropout are split over tp."""
    fused_loss: bool
    """Logits are never whole."""
    notes: tuple[str, ...]
    """Assumptions made while reading."""
    trained_bytes: float = 4.0
    """A trained parameter as it is stored: of LoRA the adapter's, else ``weight_bytes``."""
    other_bytes: float = 2.0
    """A parameter that a quantised base leaves as it is: embeddings, head, norms."""
    whole_bytes: float = 0.0
    """Of ``weight_bytes``, what stays whole on every rank where weights are split (bitsandbytes' block scales)."""
    compute: str = "bf16"
    """What matrix products are computed in: ``bf16``, ``fp16``, ``fp32`` or ``fp8``."""
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
    save: tuple[str, ...] = ()
    """What recomputed layers keep beside their input: ``activation_checkpointing.save``."""
    liger: bool = False
    """Norms, rotary embeddings and gates are Liger's kernels, each one pass over its rows."""
    holds_logits: bool = False
    """The program's own variable keeps the logits through the backward pass (``logits = model(...).logits`` in a loop)."""
    whole_loss: bool = False
    """Of published runs: the loss is not compiled with the model, and its logits have a copy in float32."""
    half_loss: bool = False
    """The cross-entropy is computed on 16-bit logits as they are, without a float32 copy."""
    whole_forward: bool = False
    """The loss takes a forward pass with whole logits, and its metrics a second one without gradient."""

    @property
    def row(self) -> int:
        """Tokens of a row of attention: TRL lays the packed rows of a micro batch end to end where it keeps them apart."""
        return self.sequence * (self.micro_batch if self.packing and self.isolated else 1)

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return -(-self.world // self.gpus_per_node)


def strategy(resolved: Resolved, distribution: Distribution | None = None) -> Strategy:
    """The strategy of a resolved recipe, or of it in another distribution.

    Raises UserError with everything that the libraries would refuse on the ranks.
    """
    split = distribution or resolved.distribution
    if problems := _find_problems(resolved, split):
        raise UserError(problems)
    kept = numbers.read(resolved, split)
    recompute = split.recompute
    args = resolved.train_args
    fused, smoothed, words = _loss(args, split)
    attention, named = _attention(args, split)
    notes = [*split.notes, *kept.notes, *_recomputation_notes(resolved), *words, *_speeds(args, kept.compute, named)]
    return Strategy(
        engine="megatron" if split.kind == "Megatron" else "trl",
        kind=split.kind,
        world=split.world_size,
        gpus_per_node=split.ranks_per_node,
        tp=split.tp,
        pp=split.pp,
        cp=split.cp * split.sp,
        ep=split.ep,
        virtual=split.virtual,
        replicas=split.replicas,
        dp=split.data_parallel_size,
        weight_shards=split.weight_shards,
        gradient_shards=split.gradient_shards,
        state_shards=split.state_shards,
        reshard=split.reshard,
        micro_batch=_micro_batch(args),
        accumulation=int(args.get("gradient_accumulation_steps") or 1),
        sequence=_sequence(args),
        packing=bool(args.get("packing") or args.get("padding_free")),
        checkpointed=recompute.share,
        checkpoint_offload=recompute.offload,
        compiled=split.compiled,
        attention=attention,
        lora=resolved.recipe.lora is not None,
        weight_bytes=kept.weight,
        gather_bytes=kept.gather,
        gradient_bytes=kept.gradient,
        reduce_bytes=kept.reduce,
        state_bytes=kept.state,
        master_in_weights=kept.master_in_weights,
        offload_params=split.offload_params,
        offload_optimizer=split.offload_optimizer,
        sequence_parallel=split.sequence_parallel,
        fused_loss=fused,
        notes=tuple(dict.fromkeys(notes)),
        trained_bytes=kept.trained,
        other_bytes=kept.other,
        whole_bytes=kept.whole,
        compute=kept.compute,
        ends_apart=split.kind == "FSDP2",  # accelerate/utils/fsdp_utils.py, fsdp2_prepare_model
        isolated=split.kind != "Megatron" and kernels.packs(args),
        grouped=args.get("train_sampling_strategy") == "group_by_length",
        tiled_loss=fused,
        save=recompute.save,
        liger=bool(args.get("use_liger_kernel")) and split.kind != "Megatron",
        whole_forward=smoothed,
    )


def _speeds(args: Mapping[str, Any], compute: str, attention: str) -> list[str]:
    """Where a kernel's speed is taken from another's."""
    notes = ["flex_attention is counted as flash attention"] if attention == "flex_attention" else []
    return [*notes, TF32] if compute == "fp32" and not args.get("tf32") else notes


def _loss(args: Mapping[str, Any], split: Distribution) -> tuple[bool, bool, list[str]]:
    """Whether logits are in tiles, whether smoothed labels want them whole in a forward pass of their own, and a note."""
    if split.kind == "Megatron":
        return False, False, []
    smoothed = bool(args.get("label_smoothing_factor")) and args.get("loss_type", "nll") == "nll"
    return not smoothed, smoothed, [WHOLE_LOSS if smoothed else FUSED_LOSS]


def _micro_batch(args: Mapping[str, Any]) -> int:
    return int(args.get("per_device_train_batch_size") or DEFAULT_MICRO_BATCH)


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


def _attention(args: Mapping[str, Any], split: Distribution) -> tuple[str, str]:
    """The kind of attention, and its name in transformers."""
    if split.kind == "Megatron":
        return "flash", "flash"
    named = kernels.attention_of(args)
    return (named if named in ("eager", "sdpa") else "flash"), named


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
    if split.sp > 1 and heads % split.sp:
        add("sp", f"{split.sp} does not divide the model's {heads} attention heads", "use a size that divides it")
    length, parts = _sequence(resolved.train_args), 2 * split.cp
    # torch's context_parallel cuts a sequence into 2 x cp pieces, for equal work under a causal mask.
    if split.cp > 1 and split.sp == 1 and length % parts:
        fix = f"train.max_length={length // parts * parts}"
        add("cp", f"train.max_length {length} is no multiple of {parts} (2 x cp)", fix)
    return problems
