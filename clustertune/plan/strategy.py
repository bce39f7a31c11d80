"""How a resolved recipe spreads a model over ranks, and how many bytes each number takes there: what the planner computes with.

Facts about bytes are read in the pinned libraries (containers/versions.env): accelerate 1.15, TRL 1.16, PEFT 0.20,
transformers 5.23, torch 2.13; of DeepSpeed and Megatron-Core in their repositories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from clustertune.errors import Problem, raise_if
from clustertune.plan.decoding import AnswerLengths
from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import quantization
from clustertune.recipe.native_rules import MAX_PROMPT, row_tokens
from clustertune.recipe.parameters import LayerKind, ParameterCount
from clustertune.recipe.parameters import count as count_parameters
from clustertune.recipe.quantization import Quantized
from clustertune.recipe.sections import Recipe
from clustertune.resolve import kernels
from clustertune.resolve.resolved import Distribution, Resolved

HALF, FULL = 2.0, 4.0
_SIZES = {"bfloat16": HALF, "float16": HALF, "float32": FULL}
_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DEFAULT_DTYPE = "float32"
"""TRL loads a model in float32 by default (trl/trainer/utils.py:1332)."""

_BLOCK = 256
"""Numbers of an 8-bit optimizer state that share a float32 scale (bitsandbytes/optim/optimizer.py, block-wise; torchao's)."""
_STATES = {
    "adamw_torch": 2, "adamw_torch_fused": 2, "adamw_torch_xla": 2, "adamw_torch_npu_fused": 2, "stable_adamw": 2,
    "grokadamw": 3, "schedule_free_adamw": 2, "schedule_free_radam": 2, "schedule_free_sgd": 1, "ademamix": 3, "sgd": 0,
    "adagrad": 1, "rmsprop": 1, "adafactor": 0, "lomo": 0, "adalomo": 0,
}  # fmt: skip
"""Numbers of the parameter's own type that an optimizer keeps for it. Adafactor's rows and columns do not count."""
_FULL_STATES = {
    "adamw_anyprecision": 2, "paged_adamw_32bit": 2, "paged_ademamix_32bit": 3, "lion_32bit": 1, "paged_lion_32bit": 1,
    "rmsprop_bnb": 1, "rmsprop_bnb_32bit": 1,
}  # fmt: skip
"""Numbers in float32 whatever the parameter's type (bitsandbytes' 32-bit states; transformers' defaults of AnyPrecision)."""
_BYTE_STATES = {
    "adamw_torch_8bit": 2, "adamw_bnb_8bit": 2, "adamw_8bit": 2, "paged_adamw_8bit": 2, "ademamix_8bit": 3,
    "paged_ademamix_8bit": 3, "lion_8bit": 1, "paged_lion_8bit": 1, "rmsprop_bnb_8bit": 1,
}  # fmt: skip

_DEEPSPEED = {"lion": "lion_32bit", "sgd": "sgd", "adagrad": "adagrad"}
"""Optimizers that a DeepSpeed file can name, beside Adam's kind."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes per parameter."""

    weight_bytes: float
    """A parameter of the base on the GPU between uses, block scales of a quantised one included (recipe/quantization.py)."""
    gather_bytes: float
    """A parameter in an all-gather."""
    gradient_bytes: float
    """The gradient of a trained parameter as it is held."""
    reduce_bytes: float
    """The gradient of a trained parameter in a reduce-scatter or all-reduce."""
    state_bytes: float
    """Optimizer state of a trained parameter, with a master copy where it is kept beside."""
    trained_bytes: float = 4.0
    """A trained parameter as it is stored: of LoRA the adapter's, else ``weight_bytes``."""
    other_bytes: float = 2.0
    """A parameter that a quantised base leaves as it is: embeddings, head, norms."""
    whole_bytes: float = 0.0
    """Of ``weight_bytes``, what stays whole on every rank where weights are split (bitsandbytes' block scales)."""
    base: Quantized | None = None
    """How the base is quantised; None: it is not."""
    compute: str = "bf16"
    """What matrix products are computed in: ``bf16``, ``fp16``, ``fp32`` or ``fp8``."""
    notes: tuple[str, ...] = ()
    """Assumptions made while reading."""


def loaded_bytes(args: Mapping[str, Any]) -> float:
    """Bytes of a parameter as it is loaded."""
    return _SIZES.get(str((args["model_init_kwargs"] or {}).get("dtype", DEFAULT_DTYPE)), FULL)


def read_sizes(resolved: Resolved, split: Distribution) -> Sizes:
    """The sizes of a resolved recipe under a distribution."""
    args = resolved.train_args
    dtype = str((args["model_init_kwargs"] or {}).get("dtype", DEFAULT_DTYPE))
    loaded, mixed = loaded_bytes(args), split.mixed_precision
    config = quantization.of(args)
    base = quantization.read(config, int(resolved.architecture["hidden_size"])) if config is not None else None
    optim = str(args["optim"])
    compute = _NAMES.get(dtype, "fp32") if mixed == "no" else mixed
    if (m := resolved.recipe.megatron) is not None:
        return _megatron("fp8" if m.fp8 is not None else "fp32" if mixed == "no" else mixed)
    if split.is_deepspeed:
        sizes = _zero(split, loaded, mixed, optim, compute)
    else:
        sizes = _torch(split, loaded, optim, compute, base, lora=resolved.lora is not None)
    sizes = replace(sizes, notes=(*sizes.notes, *_optim_notes(optim)))
    return sizes if base is None else _quantized(sizes, base, split, config or {}, count_parameters(resolved.architecture))


def moments(optim: str, number: float) -> float:
    """Bytes of optimizer state for one parameter of ``number`` bytes; transformers' names of optimizers.

    8-bit states carry a float32 scale for 256 of them; what is not known counts as AdamW, GaLore's and APOLLO's low rank too.
    """
    if optim in _BYTE_STATES:
        return _BYTE_STATES[optim] * (1 + 4 / _BLOCK)
    if optim in _FULL_STATES:
        return _FULL_STATES[optim] * FULL
    if optim == "adamw_torch_4bit":  # torchao/optim/subclass_4bit.py: two states of 4 bits, a float32 scale for 128
        return 2 * (0.5 + 4 / 128)
    return _STATES.get(optim, 2) * number


def _optim_notes(optim: str) -> list[str]:
    notes = []
    if optim.startswith("paged_"):
        notes.append(f"{optim} counts as GPU memory: pages move to the host only where there is no room")
    if optim.startswith(("galore", "apollo")):
        notes.append(f"{optim} is counted as AdamW: its low rank is not")
    return notes


def _torch(split: Distribution, loaded: float, optim: str, compute: str, base: Quantized | None, *, lora: bool) -> Sizes:
    """FSDP, DDP and one process alone. The frozen base stays as loaded, gradients end in the parameter's type.

    FSDP under mixed precision: what is trained is held in float32 (accelerate/utils/fsdp_utils.py:816 for FSDP2,
    accelerator.py:2037 for FSDP1), gathered in the 16-bit type and reduced in ``reduce_dtype`` (training/sharding.py).
    Elsewhere autocast casts weights for the moment of use. DDP holds gradients twice, in their parameters and in its buckets
    (gradient_as_bucket_view is off in accelerate/utils/dataclasses.py, DistributedDataParallelKwargs).
    """
    trained = _adapter(loaded, base) if lora else loaded
    mixed = split.is_fsdp and split.mixed_precision != "no"
    four = base is not None and base.method == "bitsandbytes" and base.packed == 0.5
    if mixed and not (four and split.kind == "FSDP2"):  # fsdp_utils.py:815 leaves adapters on a 4-bit base as they are
        trained = FULL
    twice = split.kind == "DDP" and split.world_size > 1
    reduced = _SIZES.get(split.reduce_dtype or "") if split.is_fsdp else None
    return Sizes(
        weight_bytes=loaded if lora else trained,
        gather_bytes=HALF if mixed else loaded,
        trained_bytes=trained,
        gradient_bytes=trained * (2 if twice else 1),
        reduce_bytes=reduced or trained,
        state_bytes=moments(optim, trained),
        compute=compute,
        other_bytes=loaded,
        notes=("DDP keeps gradients in its buckets as well",) if twice else (),
    )


def _adapter(loaded: float, base: Quantized | None) -> float:
    """PEFT holds adapters in float32 (autocast_adapter_dtype, peft/tuners/tuners_utils.py:2258); TRL takes them back to
    bfloat16 where bitsandbytes quantised the base (trl/trainer/sft_trainer.py:908)."""
    if base is not None and base.method == "bitsandbytes":
        return HALF
    return max(FULL, loaded)


def _zero(split: Distribution, loaded: float, mixed: str, optim: str, compute: str) -> Sizes:
    """DeepSpeed casts all weights to the 16-bit type (runtime/engine.py, _configure_distributed_model), keeps a float32 master
    of what is trained beside them (runtime/zero/stage_1_and_2.py and stage3.py), gradients in the 16-bit type unless
    data_types.grad_accum_dtype says otherwise, and reduces in communication_data_type, by default the 16-bit type."""
    if split.optimizer is not None:
        kind = split.optimizer.lower()
        optim = next((name for word, name in _DEEPSPEED.items() if word in kind), "adamw_torch")
    if mixed == "no":
        return _alike(loaded, state_bytes=moments(optim, loaded), compute=compute)
    gradient, reduce = (
        FULL if dtype_name in ("fp32", "float32") else HALF for dtype_name in (split.accumulate_dtype, split.communicate_dtype)
    )
    state = FULL + moments(optim, FULL)
    return _alike(HALF, gradient_bytes=gradient, reduce_bytes=reduce, state_bytes=state, compute=compute)


def _alike(size: float, **others: Any) -> Sizes:
    """Weights, gradients and what is trained in one type, but for ``others``."""
    names = ("weight_bytes", "gather_bytes", "trained_bytes", "gradient_bytes", "reduce_bytes", "other_bytes")
    return Sizes(**dict.fromkeys(names, size) | others)


def _quantized(
    sizes: Sizes, base: Quantized, split: Distribution, config: Mapping[str, Any], counted: ParameterCount | None
) -> Sizes:
    """A quantised base: what is not a linear layer of a block stays as loaded, and so do the matrices that the method leaves
    out (:meth:`clustertune.recipe.quantization.Quantized.converts`)."""
    notes = [f"a quantised parameter takes {base.formula} = {base.bytes:.4f} B; embeddings, head and norms are not quantised"]
    notes += [note] if (note := unconverted(base, counted)) else []
    unsharded, gather = 0.0, base.packed
    if split.is_fsdp and split.weight_shards > 1 and base.method == "bitsandbytes":
        unsharded = base.scales
        notes.append("bitsandbytes' block scales stay whole on every rank: they are not parameters")
        if not base.splits:
            # accelerate/utils/fsdp_utils.py:801 takes Params4bit in uint8 out of what FSDP2 splits.
            unsharded, gather = base.bytes, 0.0
            notes.append("FSDP2 does not split 4-bit weights stored as uint8: bnb_4bit_quant_storage: bfloat16 lets it")
    if config.get("load_in_4bit") and config.get("bnb_4bit_compute_dtype", "float32") == "float32":
        notes.append("bnb_4bit_compute_dtype is float32 by default: write bfloat16, or the products are slow")
    if base.method in ("fp8", "fbgemm_fp8"):
        notes.append("an 8-bit base is taken to be gathered in 8 bits")
    stored = replace(sizes, weight_bytes=base.bytes, gather_bytes=gather, whole_bytes=unsharded, base=base)
    return replace(stored, notes=(*sizes.notes, *notes))


def unconverted(base: Quantized, counted: ParameterCount | None) -> str:
    """What of the layers' matrices a quantisation leaves in 16 bits or more, as a sentence; empty: nothing."""
    matrices = [(kind.count * one.weights, one) for kind in (counted.layers if counted else ()) for one in kind.linears]
    left = [(size, one) for size, one in matrices if not base.converts(one)]
    if not left:
        return ""
    size, total = sum(size for size, _ in left), sum(size for size, _ in matrices)
    what = "fused experts and routers" if any(one.copies > 1 for _, one in left) else "matrices"
    names = ", ".join(sorted({one.name.rpartition(".")[2] if one.copies == 1 else one.name for _, one in left}))
    return (
        f"{base.method} leaves {size / 1e9:,.3g} of the layers' {total / 1e9:,.3g} billion weights as they are loaded: {what} "
        f"({names}) are none of the modules that it converts in the pinned transformers"
    )


def _megatron(compute: str) -> Sizes:
    """Megatron-Core: 16-bit weights, float32 main gradients, a float32 master and two moments in the optimizer
    (docs/source/api-guide/dist_optimizer.md: 18 bytes, 6 + 12 / dp with the distributed one)."""
    if compute == "fp32":
        return _alike(FULL, state_bytes=2 * FULL, compute=compute)
    return _alike(HALF, gradient_bytes=FULL, reduce_bytes=FULL, state_bytes=3 * FULL, compute=compute)


# --- the strategy of a recipe ---------------------------------------------------------------------------------------

FUSED_LOSS = (
    "TRL 1.16 computes the loss in tiles of the output head: logits are never whole (trl/trainer/utils.py:1548); other "
    "trainers and TRL before its fused head keep them"
)
WHOLE_LOGITS = "plan.whole_logits: the program holds all logits through the backward pass, and embedding and head stay gathered"
ENGINE = (
    "Megatron-Bridge: Transformer Engine's kernels and fused gate, rotary embeddings and cross-entropy. Nothing is sent beside "
    "the products, as its settings here ask for no overlap; plan.overlap_tp, overlap_dp and overlap_pp plan a run that does"
)
WHOLE_LOSS = (
    "train.label_smoothing_factor: TRL holds all logits at once, and computes each forward pass a second time for its metrics "
    "(trl/trainer/sft_trainer.py:1601)"
)
REFERENCE = (
    "trainer: dpo: a row is two sequences, and the base without its adapter computes both a second time",
    "trainer: dpo: a row is two sequences, and a second, frozen model computes both; it is sharded as the trained one is",
)
TF32 = "float32 products are counted as TF32, half the speed of bfloat16; without train.tf32=true they are slower"


LONGEST = 16_384
"""Tokens of prompt and answer together at most, of a task that is scored: few-shot prompts fit, and the cache of one sequence
stays small."""


@dataclass(frozen=True)
class Rollouts:
    """What a rank generates at a time, with ``trainer: grpo``."""

    answers: int
    prompt: int
    """Tokens at most."""
    completion: int
    """Tokens at most."""
    steps: float
    """Optimizer steps that learn from one generation."""
    vllm: float
    """The share of the GPU's memory that vLLM takes; 0: transformers generates."""
    by_servers: bool = False
    """The servers beside the trainer generate, and not the ranks."""
    known: float | None = None
    """Mean tokens of an answer, where the recipe says."""

    @property
    def lengths(self) -> AnswerLengths:
        """Of prompts, all at their longest, and answers."""
        return AnswerLengths.of(self.prompt, self.completion, self.known, "plan.answer_tokens")


@dataclass(frozen=True)
class ServersBeside:
    """vLLM's servers beside the trainer."""

    nodes: int
    """Of the job, beside those that train; each has as many GPUs."""
    gpus: int
    """That share each layer of a server."""
    answer: int
    """Tokens of a prompt and its answer at most: of the training's own answers, or of the tasks that are scored."""
    longest: int
    """Tokens of the longest prompt and answer that they take."""


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
    overlap_dp: bool = True
    """Gradients are reduced beside the backward pass."""
    overlap_pp: bool = False
    """Stages of a pipeline send beside the products."""
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
    balances_experts: bool = False
    """A loss of the routers asks for the scores of all layers."""
    answers: int = 1
    """Sequences of a row: 2 of a preference."""
    eval_batch: int = 0
    """Rows that a rank evaluates at once; 0: it never does, or it generates as in training (``trainer: grpo``)."""
    reference_bytes: float = 0.0
    """A parameter of a second, frozen model; 0: there is none."""
    rollouts: Rollouts | None = None
    """None: the model is not trained on its own answers."""
    servers: ServersBeside | None = None
    """Servers beside the trainer; None: there are none."""

    @property
    def head_again(self) -> int:
        """How often the backward pass computes the output head again: TRL's tiles do so once (trl/kernels/chunked_logprob.py),
        but for preferences, and where vLLM or the model has answered. Found by simulating."""
        tiles = self.fused_loss and self.tiled_loss and self.second_forward != "metrics"
        return int(tiles and self.answers == 1 and self.rollouts is None)

    @property
    def row(self) -> int:
        """Tokens of a row of attention: TRL lays the packed rows of a micro batch end to end where it keeps them apart."""
        return self.sequence * (self.micro_batch if self.packing and self.isolated else 1)

    @property
    def nodes(self) -> int:
        """Nodes that train."""
        return -(-self.world_size // self.ranks_per_node)

    @property
    def server_nodes(self) -> int:
        """Nodes of the job beside :attr:`nodes`."""
        return self.servers.nodes if self.servers is not None else 0

    @property
    def gpus(self) -> int:
        """That the job holds, those of servers included: all of its nodes have as many."""
        return self.world_size + self.server_nodes * self.ranks_per_node


def strategy(resolved: Resolved, distribution: Distribution | None = None) -> Strategy:
    """The strategy of a resolved recipe, or of it in another distribution, with what its ``plan`` section says of another
    program.

    Raises UserError with everything that the libraries would refuse on the ranks.
    """
    split = distribution or resolved.distribution
    raise_if(_find_problems(resolved, split))
    sizes = read_sizes(resolved, split)
    args, stated, trl = resolved.train_args, resolved.recipe.plan, split.kind != "Megatron"
    # TRL computes a smoothed loss, and only that, from whole logits.
    smoothed = trl and bool(args["label_smoothing_factor"]) and args["loss_type"] == "nll"
    tiles = trl and not smoothed
    kernel = kernels.attention_of(args) if trl else "flash"
    notes = [*split.notes, *sizes.notes, *_recomputation_notes(resolved)]
    notes += [WHOLE_LOSS] if smoothed else [FUSED_LOSS] if tiles and not stated.whole_logits else []
    notes += ["flex_attention is counted as flash attention"] if kernel == "flex_attention" else []
    notes += [REFERENCE[resolved.lora is None]] if resolved.is_dpo else []
    compared = resolved.is_dpo or bool(resolved.is_grpo and args["beta"])  # with a reference
    notes += [TF32] if sizes.compute == "fp32" and not args["tf32"] else []
    notes += [WHOLE_LOGITS] if stated.whole_logits else []
    notes += [] if trl else [ENGINE]
    if stated.reduce_dtype is not None:
        size = FULL if stated.reduce_dtype == "fp32" else HALF
        # Megatron-Core holds gradients in the type that it reduces them in (DistributedDataParallelConfig.grad_reduce_in_fp32).
        sizes = replace(sizes, reduce_bytes=size, gradient_bytes=sizes.gradient_bytes if trl else size)
    values = vars(split) | vars(sizes) | {
        "notes": tuple(dict.fromkeys(notes)),
        "compute": "fp8" if stated.fp8 else sizes.compute,
        "sequence_parallel": split.sequence_parallel or stated.sequence_parallel,
        # Megatron-Bridge fuses by hand what a compiler would: gate, norms, rotary embeddings, cross-entropy.
        "compiled": split.compiled or not trl,
    }  # fmt: skip
    return Strategy(
        **values,
        micro_batch=args["per_device_train_batch_size"],
        accumulation=args["gradient_accumulation_steps"],
        sequence=int(row_tokens(args)),
        packing=bool(args["packing"] or args["padding_free"]),
        attention=kernel if kernel in ("eager", "sdpa") else "flash",
        lora=resolved.lora is not None,
        fused_loss=tiles and not stated.whole_logits,
        overlap_tp=stated.overlap_tp,
        overlap_dp=trl or stated.overlap_dp,
        overlap_pp=stated.overlap_pp,
        reduce_each=stated.reduce_each,
        fused_optimizer="fused" in str(args["optim"]),
        # accelerate/utils/fsdp_utils.py, fsdp2_prepare_model. In TRL before 1.16 with its accelerate, and in loops like IDRIS's
        # (both hold all logits), the root keeps embedding and head gathered.
        ends_apart=split.kind == "FSDP2" and not stated.whole_logits,
        isolated=trl and kernels.packs(args),
        grouped=args["train_sampling_strategy"] == "group_by_length",
        tiled_loss=tiles,
        liger=trl and bool(args["use_liger_kernel"]),
        holds_logits=stated.whole_logits,
        second_forward="reference" if compared else "metrics" if smoothed else "",
        answers=2 if resolved.is_dpo else 1,
        eval_batch=0 if args["eval_strategy"] == "no" or resolved.is_grpo else int(args["per_device_eval_batch_size"]),
        reference_bytes=loaded_bytes(args) if compared and resolved.lora is None else 0.0,
        rollouts=_rollouts(args, resolved.recipe) if resolved.is_grpo else None,
        servers=servers_beside(resolved),
        balances_experts=trl and bool(_balance(args, resolved.architecture)),
    )


def _balance(args: Mapping[str, Any], architecture: Mapping[str, Any]) -> float:
    """The weight of the loss that spreads tokens over experts; the model's own by default (trl/trainer/sft_trainer.py:1198)."""
    own = args["router_aux_loss_coef"]
    return float(architecture.get("router_aux_loss_coef") or 0.0) if own is None else float(own)


def _rollouts(args: Mapping[str, Any], recipe: Recipe) -> Rollouts:
    """TRL's rule: without ``steps_per_generation`` a generation is for one optimizer step (GRPOConfig.__post_init__)."""
    accumulation = int(args["gradient_accumulation_steps"])
    parts = int(args["steps_per_generation"] or accumulation)
    answers, steps = int(args["per_device_train_batch_size"]) * parts, parts * int(args["num_iterations"]) / accumulation
    vllm = float(args["vllm_gpu_memory_utilization"]) if args["use_vllm"] else 0.0
    by_servers = recipe.rollout == "servers"
    return Rollouts(
        answers, int(args[MAX_PROMPT]), int(args["max_completion_length"]), steps, vllm, by_servers, recipe.plan.answer_tokens
    )


def servers_beside(resolved: Resolved) -> ServersBeside | None:
    """The servers beside the trainer of a recipe; None where it has none."""
    recipe, args = resolved.recipe, resolved.train_args
    if recipe.beside is None:
        return None
    made = int(args[MAX_PROMPT]) + int(args["max_completion_length"]) if recipe.rollout == "servers" else 0
    positions = int(resolved.architecture.get("max_position_embeddings") or LONGEST)
    scored = min(positions, LONGEST) if recipe.scores_beside else 0
    return ServersBeside(recipe.beside.nodes, recipe.beside.tensor_parallel_size, made or scored, max(made, scored))


def _recomputation_notes(resolved: Resolved) -> list[str]:
    recompute = resolved.distribution.recompute
    if recompute.selective:
        return ["selective recomputation repeats the attention alone, which flash attention does anyway"]
    if recompute.by == "none" and resolved.recipe.megatron is None and resolved.train_args["activation_offloading"]:
        # TRL 1.16 leaves out weights by their place before the model is sharded (trl/models/activation_offloading.py:686).
        gathered = ", the weights that FSDP gathers among them" if resolved.distribution.kind.startswith("FSDP") else ""
        return [f"train.activation_offloading moves what backward needs to host memory{gathered}: not counted"]
    return []


def _find_problems(resolved: Resolved, split: Distribution) -> list[Problem]:
    """What tensor, context and sequence parallelism ask of the model and of the sequences."""
    if split.is_megatron:
        return []  # resolve() has checked them
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
    length, parts = int(row_tokens(resolved.train_args)), 2 * split.cp
    # torch's context_parallel cuts a sequence into 2 x cp pieces, for equal work under a causal mask.
    if split.cp > 1 and length % parts:
        fix = f"train.max_length={length // parts * parts}"
        add("cp", f"train.max_length {length} is not a multiple of {parts} (2 x cp)", fix)
    return problems


# --- what one rank holds: the model's layers divided by tensor, pipeline and expert parallelism -----------------------


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
        """Weights of the layers are stored in less than 16 bits; embedding, head and norms are not."""
        return self.strategy.weight_bytes < 2

    def packed_of(self, kind: LayerKind) -> float:
        """Quantised parameters of one layer on one rank: matrices that the method converts, without their biases."""
        plan, base = self.strategy, self.strategy.base
        converted = [linear for linear in kind.linears if base is not None and base.converts(linear)]
        return sum(linear.weights / plan.tp / (plan.ep if linear.copies > 1 else 1) for linear in converted)

    @cached_property
    def packed(self) -> float:
        """The same of all layers on one rank; 0 where nothing is quantised."""
        return sum(kind.count * self.packed_of(kind) for kind in self.counted.layers) / self.strategy.pp

    @property
    def gathered_body(self) -> float:
        """Bytes of the layers' weights in an all-gather."""
        return self.packed * self.strategy.gather_bytes + (self.body - self.packed) * self.end_bytes

    @property
    def stored(self) -> float:
        """Bytes of the base model on one rank, before any data-parallel split."""
        plan = self.strategy
        return self.packed * plan.weight_bytes + (self.parameters - self.packed) * (
            plan.other_bytes if self.quantised else plan.weight_bytes
        )

    @property
    def gathered(self) -> float:
        """Bytes of all weights in an all-gather."""
        return self.gathered_body + self.ends * self.end_bytes

    @property
    def end_bytes(self) -> float:
        """Bytes of a parameter of embedding and head in an all-gather."""
        return min(2.0, self.strategy.other_bytes) if self.quantised else self.strategy.gather_bytes

    @cached_property
    def local_trained(self) -> float:
        """Trained parameters on one rank: everything, or its share of the adapters."""
        if not self.strategy.lora:
            return self.parameters
        return self.adapters / (self.strategy.tp * self.strategy.pp)

    @cached_property
    def split_trained(self) -> float:
        """The same as FSDP2 splits it: a matrix of LoRA with fewer rows than ranks is padded to one row a rank, and the first
        ranks hold all there are. Of 512 ranks and a rank of 16, LoRA's A takes 32 times its bytes in each all-gather."""
        plan, count = self.strategy, self.local_trained
        if not plan.lora or plan.kind != "FSDP2":
            return count
        for kind in self.counted.layers:
            for linear in kind.linears:
                is_wrapped = linear.name in self.wrapped
                if not is_wrapped and (linear.bare or linear.name.split(".")[-1] not in self.targets):
                    continue
                rank = self.rank * (linear.copies if is_wrapped else 1)
                for rows, columns in ((rank, linear.inputs), (linear.outputs, rank)):
                    count += kind.count * (-rows % plan.weight_shards) * columns / (plan.tp * plan.pp)
        return count

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
