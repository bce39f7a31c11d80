"""Settings of a recipe that run and are wrong, or slow: nothing here needs a machine."""

from __future__ import annotations

import math
from collections.abc import Iterator

from clustertune.check.rule import FAIL, RECIPE, WARN, Seen, rule
from clustertune.config import accelerate_file as acc
from clustertune.config import quantization
from clustertune.config.distribution import mixed_precision
from clustertune.config.hardware import load_hardware
from clustertune.config.values import model_facts
from clustertune.doctor import stack_faults
from clustertune.doctor.recipe_context import RecipeContext

LORA_RATES, FULL_RATES = (1e-5, 1e-3), (1e-7, 1e-4)
"""Learning rates outside of which a fine-tuning rarely learns: TRL's guide has 2e-5 for all parameters and ten times
that for LoRA (https://huggingface.co/docs/trl/peft_integration); a factor of 20 to 50 around it."""
LONG_WARMUP = 0.5
"""Share of all steps."""


@rule("double-recomputation", RECIPE)
def recomputation(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: activation checkpointing in one place only

    Why: FSDP and the model both recompute: each layer is gathered and computed once more, or the ranks end with a ValueError
    Fix: leave it to one of them, best FSDP's
    See: https://github.com/huggingface/transformers/issues/30404
    """
    args = context.resolved.train_args
    of_model = bool(args.get("activation_checkpointing") or args.get("gradient_checkpointing"))
    if context.resolved.distribution.recompute.by == "fsdp" and of_model:
        text = f"train.activation_checkpointing and {acc.key_of('activation_checkpointing')} are both true"
        yield Seen(FAIL, text)


@rule("nothing-saved", RECIPE)
def unsaved(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: checkpoints are written

    Why: without a checkpoint nothing can be exported, and a stop loses the whole run
    Fix: train.save_strategy=steps
    See: https://github.com/huggingface/transformers/issues/30491
    """
    strategy = str(context.resolved.train_args.get("save_strategy", "steps"))
    if strategy in ("no", "best"):
        yield Seen(FAIL, f"train.save_strategy is {strategy}: no checkpoint of the last step is certain")


@rule("save-only-model", RECIPE)
def only_model(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: save_only_model with sharded checkpoints

    Why: the first save looks for a file that sharded saving does not write; and a run without optimizer state cannot continue
    Fix: leave save_only_model out
    See: https://github.com/huggingface/transformers/issues/36626
    """
    if context.resolved.train_args.get("save_only_model"):
        sharded = context.resolved.distribution.state_dict == "SHARDED_STATE_DICT"
        yield Seen(FAIL, "train.save_only_model is true" + (" with SHARDED_STATE_DICT" if sharded else ""))


@rule("single-checkpoint", RECIPE)
def single_checkpoint(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: more than one checkpoint is kept

    Why: with one kept, a save that goes wrong or a node that still reads the old one leaves none
    Fix: train.save_total_limit=2 or more
    See: https://github.com/huggingface/transformers/issues/20988
    """
    if context.resolved.train_args.get("save_total_limit") == 1 and context.several_nodes:
        yield Seen(WARN, f"train.save_total_limit is 1, on {context.resolved.recipe.slurm.nodes} nodes")


@rule("learning-rate", RECIPE)
def learning_rate(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the size of the learning rate

    Why: LoRA wants about ten times the rate of full training: too small and nothing is learnt, too large and it diverges
    See: https://huggingface.co/docs/trl/peft_integration
    """
    rate = context.resolved.train_args.get("learning_rate")
    low, high = LORA_RATES if stack_faults.lora(context) else FULL_RATES
    if context.is_real and isinstance(rate, int | float) and not low <= rate <= high:
        what = "a LoRA" if stack_faults.lora(context) else "training all parameters"
        fix = f"train.learning_rate between {low:g} and {high:g}, unless it was tried"
        yield Seen(WARN, f"train.learning_rate {rate:g} for {what}", fix)


@rule("long-warmup", RECIPE)
def long_warmup(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: warm-up against the number of steps

    Why: most of the run is spent below the learning rate that was asked for
    Fix: a share of all steps, such as train.warmup_steps=0.03
    See: https://github.com/axolotl-ai-cloud/axolotl/pull/2897
    """
    steps = context.plan.schedule.steps if context.plan else None
    warm = float(context.resolved.train_args.get("warmup_steps") or 0)
    if steps:
        count = math.ceil(warm * steps) if warm < 1 else warm
        if count > LONG_WARMUP * steps:
            yield Seen(WARN, f"train.warmup_steps {warm:g} are {count:g} of {steps} steps")


@rule("loss-on-all-tokens", RECIPE)
def labels(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: which tokens of a conversation carry a loss

    Why: the model learns to write the user's turns as well; losses of the two ways cannot be compared
    Fix: train.assistant_only_loss=true, or say false where it is meant
    See: https://github.com/huggingface/trl/pull/3586
    """
    stated = context.resolved.origins.get("train.assistant_only_loss", "default") != "default"
    parts = context.resolved.recipe.data.parts
    formats = dict.fromkeys(
        str(part.format) for part in parts if part.format in ("messages", "sharegpt", "oasst-tree", "lima", "alpaca")
    )
    if context.is_real and formats and not context.resolved.train_args.get("assistant_only_loss") and not stated:
        text = f"{' and '.join(formats)} conversations, and train.assistant_only_loss is not given: all tokens count"
        yield Seen(WARN, text)


@rule("compile-shapes", RECIPE)
def shapes(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: torch.compile with batches of one shape

    Why: new lengths are compiled again, or their CUDA graphs recorded again: the gain of compiling is lost
    See: https://github.com/pytorch/pytorch/issues/188150
    """
    args = context.resolved.train_args
    compiled = context.resolved.distribution.compiled
    # Packed rows differ in length too, unless they are cut to one: bfd fills them, the last one aside.
    if compiled and not args.get("packing") and not args.get("pad_to_multiple_of"):
        text = "the model is compiled, and batches as long as their longest conversation"
        fix = f"train.packing=true, or train.pad_to_multiple_of={args.get('max_length') or 1024}"
        yield Seen(WARN, text, fix)


@rule("quantised-compute", RECIPE)
def quantised(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: what a quantised base computes in

    Why: BitsAndBytesConfig's own type is float32: products run at a fraction of the speed of bfloat16
    Fix: bnb_4bit_compute_dtype: bfloat16
    See: https://huggingface.co/docs/transformers/quantization/bitsandbytes
    """
    args = context.resolved.train_args
    config = quantization.of(args)
    if config is None or not config.get("load_in_4bit"):
        return
    key = "train.model_init_kwargs.quantization_config"
    if str(config.get("bnb_4bit_compute_dtype", "float32")) == "float32" and mixed_precision(args) == "bf16":
        text = f"{key}.bnb_4bit_compute_dtype is {'float32' if 'bnb_4bit_compute_dtype' in config else 'not given'}"
        yield Seen(WARN, text)


def _lacks_bf16(context: RecipeContext) -> bool:
    gpu = load_hardware().get(context.cluster.compute.gpu or "")
    return gpu is not None and gpu.bf16_tflops is None


@rule("no-bfloat16", RECIPE)
def no_bfloat16(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: no bfloat16 on GPUs without it

    Why: without tensor cores for it bfloat16 is emulated, slower than float32
    Fix: train.bf16=false train.model_init_kwargs.dtype=float32, or newer GPUs
    See: https://developer.nvidia.com/cuda-gpus
    """
    compute = context.cluster.compute
    if compute.gpus and mixed_precision(context.resolved.train_args) == "bf16" and _lacks_bf16(context):
        yield Seen(FAIL, f"train.bf16 on {compute.gpu}, which has no bfloat16")


@rule("no-mixed-precision", RECIPE)
def no_mixed_precision(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: bfloat16 on GPUs that have it

    Why: float32 products use no tensor cores, or a quarter of them (TF32), and weights take twice the memory
    Fix: train.bf16=true
    See: https://huggingface.co/docs/transformers/en/mixed_precision_training
    """
    mixed = mixed_precision(context.resolved.train_args)
    if context.is_real and context.cluster.compute.gpus and mixed == "no" and not _lacks_bf16(context):
        yield Seen(WARN, "train.bf16 is false")


@rule("packed-state", RECIPE)
def packed(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: packing with layers that carry a state

    Why: a mask keeps packed conversations apart in attention; recurrent layers (Mamba, linear attention, convolutions) hand
      their state from one to the next all the same
    Fix: train.packing=false
    See: https://github.com/huggingface/trl/issues/1230
    """
    kinds = context.resolved.architecture.get("layer_types")
    listed = {str(kind) for kind in kinds} if isinstance(kinds, list) else set()
    states = sorted(kind for kind in listed if "attention" not in kind or "linear" in kind)
    model = str(context.resolved.architecture.get("model_type"))
    if context.resolved.train_args.get("packing") and (states or model_facts(model)["carries_state"]):
        text = f"train.packing, and {model} has layers with a state" + (f" ({', '.join(states)})" if states else "")
        yield Seen(WARN, text)


@rule("no-evaluation", RECIPE)
def evaluation(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: an eval split where evaluation is asked for

    Why: no evaluation happens, and overfitting stays unseen
    Fix: data.eval_fraction, or train.eval_strategy=no
    See: https://huggingface.co/docs/transformers/main_classes/trainer
    """
    expect = context.resolved.recipe.data.expect
    wanted = str(context.resolved.train_args.get("eval_strategy", "no")) != "no"
    if wanted and expect is not None and expect.eval == 0:
        text = "data.expect.eval is 0, and train.eval_strategy asks for evaluations"
        yield Seen(WARN, text)


@rule("revision-not-pinned", RECIPE)
def pinned(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: commits of model and dataset

    Why: a branch moves: the next attempt trains on another model, and the cache is looked up under another name
    See: https://huggingface.co/docs/huggingface_hub/guides/download
    """
    recipe = context.resolved.recipe
    if recipe.model.weights == "hub" and recipe.model.path is None and recipe.model.revision is None:
        fix = f"model.revision: the commit of {recipe.model.name}, 40 hex digits"
        yield Seen(FAIL, f"model {recipe.model.name} without a revision", fix)
    for key, part in recipe.data.keyed_parts():
        if part.input is None and part.revision is None:
            yield Seen(
                FAIL, f"dataset {part.name} without a revision", f"{key}.revision: the commit of {part.name}, 40 hex digits"
            )
