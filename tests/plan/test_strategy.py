"""A resolved recipe as the planner reads it: over which ranks things are split, and how many bytes they take."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.plan.lengths import Lengths
from clustertune.plan.predict import read_strategy, real_length
from clustertune.plan.strategy import Strategy, moments, strategy
from clustertune.resolve.resolve import resolve
from tests.command import REPO
from tests.plan.world import RECOMPUTE

RECIPE = "llama405b-oasst2"
DEEPSPEED = ["accelerate.distributed_type=DEEPSPEED", "accelerate.fsdp_config=null"]
FULL = ["lora=null"]
FLOAT = "train.model_init_kwargs.dtype=float32"
PARALLEL = "accelerate.parallelism_config.parallelism_config"
NF4 = "load_in_4bit: true, bnb_4bit_quant_type: nf4"


def read(*overrides: str, recipe: str | Path = RECIPE, **options: Any) -> Strategy:
    return strategy(resolve(recipe, overrides, **options))


def quantized(words: str) -> str:
    return f"train.model_init_kwargs.quantization_config={{{words}}}"


def check(found: Strategy, **wanted: Any) -> None:
    known = vars(found) | {key: getattr(found.recompute, field) for key, field in RECOMPUTE.items()}
    assert {key: known[key] for key in wanted} == wanted


def refused(*overrides: str, recipe: str | Path = RECIPE) -> list[str]:
    with pytest.raises(UserError) as caught:
        strategy(resolve(recipe, overrides))
    return [str(problem) for problem in caught.value.problems]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the recipe with a DeepSpeed file beside it."""
    made = tmp_path / "recipes" / RECIPE
    shutil.copytree(REPO / "recipes" / "_base", tmp_path / "recipes" / "_base")
    shutil.copytree(REPO / "recipes" / RECIPE, made)
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "nvme", "nvme_path": "auto"}}
    batch = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    (made / "deepspeed.json").write_text(json.dumps({"zero_optimization": zero, "communication_data_type": "fp32", **batch}))
    (made / "ds.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: deepspeed.json, zero3_init_flag: true}\n"
    )
    return made


def test_the_reference_recipe() -> None:
    """A frozen bfloat16 base over 16 ranks, adapters in float32, as is the sum of their gradients."""
    found = read()
    check(found, kind="FSDP2", world_size=16, ranks_per_node=8, data_parallel_size=16, replicas=1, lora=True, packing=True)
    check(found, weight_shards=16, gradient_shards=16, state_shards=16, reshard=True, checkpointed=1.0)
    check(found, micro_batch=1, accumulation=2, sequence=2048, attention="sdpa", compiled=False)
    check(found, weight_bytes=2, gather_bytes=2, trained_bytes=4, gradient_bytes=4, reduce_bytes=4, state_bytes=8)
    check(found, offload_params="none", compute="bf16")


@pytest.mark.parametrize(
    ("overrides", "weight", "gather", "trained", "gradient", "reduce", "state"),
    [
        ([], 4, 2, 4, 4, 2, 8),  # accelerate upcasts what is trained
        (["reduce_dtype=float32"], 4, 2, 4, 4, 4, 8),
        (["train.bf16=false"], 2, 2, 2, 2, 2, 4),  # pure bfloat16: nothing is upcast
        (["train.bf16=false", "train.model_init_kwargs=null"], 4, 4, 4, 4, 4, 8),
        (["accelerate.fsdp_config={fsdp_version: 1}", "accelerate.fsdp_config.fsdp_reshard_after_forward=null"],
         4, 2, 4, 4, 2, 8),
        ([*DEEPSPEED, "accelerate.deepspeed_config.zero_stage=2"], 2, 2, 2, 2, 2, 12),
        (["accelerate.distributed_type=MULTI_GPU", "accelerate.fsdp_config=null"], 2, 2, 2, 4, 2, 4),
    ],
)  # fmt: skip
def test_bytes_of_full_fine_tuning(
    overrides: list[str], weight: float, gather: float, trained: float, gradient: float, reduce: float, state: float
) -> None:
    """16 bytes a parameter are the rule and have exceptions, each of which decides whether a model fits."""
    found = read(*FULL, *overrides)
    check(found, lora=False, weight_bytes=weight, gather_bytes=gather, trained_bytes=trained, gradient_bytes=gradient)
    check(found, reduce_bytes=reduce, state_bytes=state)


def test_a_base_that_says_no_dtype_is_loaded_in_float32() -> None:
    """TRL's default doubles what a frozen base takes, and not what it moves."""
    check(read("train.model_init_kwargs=null"), weight_bytes=4, gather_bytes=2)


@pytest.mark.parametrize(
    ("name", "shards", "replicas", "reshard"),
    [
        ("FULL_SHARD", 16, 1, True),
        ("SHARD_GRAD_OP", 16, 1, False),
        ("NO_SHARD", 1, 1, False),
        ("HYBRID_SHARD", 8, 2, True),
        ("HYBRID_SHARD_ZERO2", 8, 2, False),
    ],
)
def test_fsdp1(name: str, shards: int, replicas: int, reshard: bool) -> None:
    """HYBRID_SHARD holds a copy of the model on each node."""
    fsdp1 = ["accelerate=accelerate-fsdp1.yaml", f"accelerate.fsdp_config.fsdp_sharding_strategy={name}"]
    found = strategy(resolve(RECIPE, fsdp1))
    check(
        found,
        kind="FSDP1",
        weight_shards=shards,
        gradient_shards=shards,
        replicas=replicas,
        reshard=reshard,
        data_parallel_size=16,
    )


def test_hsdp_needs_only_its_replicas() -> None:
    """The ranks that are left are derived, as all numbers of ranks are."""
    found = read(f"{PARALLEL}_dp_replicate_size=2", "accelerate.fsdp_config.fsdp_reshard_after_forward=false")
    check(found, kind="FSDP2", replicas=2, weight_shards=8, state_shards=8, data_parallel_size=16, reshard=False)


def test_tensor_and_context_parallelism() -> None:
    """FSDP shards over the data-parallel and the context-parallel ranks together (accelerate's dp_shard_cp)."""
    check(read(f"{PARALLEL}_tp_size=8"), tp=8, data_parallel_size=2, weight_shards=2, accumulation=16)
    check(read(f"{PARALLEL}_cp_size=4", "train.packing=false"), cp=4, data_parallel_size=4, weight_shards=16, packing=False)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "states"), [(0, 1, 1, 1), (1, 1, 1, 16), (2, 1, 16, 16), (3, 16, 16, 16)]
)
def test_zero_stages(stage: int, weights: int, gradients: int, states: int) -> None:
    """https://arxiv.org/abs/1910.02054, figure 1."""
    found = read(*DEEPSPEED, f"accelerate.deepspeed_config.zero_stage={stage}", "train.activation_checkpointing=true")
    check(
        found, kind=f"ZeRO-{stage}", weight_shards=weights, gradient_shards=gradients, state_shards=states, reshard=stage == 3
    )
    check(found, checkpointed=1.0)


def test_a_deepspeed_file_and_what_is_laid_over_it(folder: Path) -> None:
    """Offload and reduction stand in DeepSpeed's own words; the command line replaces single values."""
    found = read("accelerate=ds.yaml", recipe=folder)
    check(
        found, kind="ZeRO-3", offload_params="cpu", offload_optimizer="nvme", reduce_bytes=4, gradient_bytes=2, state_bytes=12
    )
    words = ["deepspeed.zero_optimization.offload_param=null", "deepspeed.data_types.grad_accum_dtype=fp32"]
    check(read("accelerate=ds.yaml", *words, recipe=folder), offload_params="none", gradient_bytes=4, offload_optimizer="nvme")


def test_fsdp_offload_takes_everything() -> None:
    """CPUOffloadPolicy moves parameters, gradients and optimizer state, not the optimizer alone."""
    check(read("accelerate.fsdp_config.fsdp_offload_params=true"), offload_params="cpu", offload_optimizer="cpu")


@pytest.mark.parametrize(
    ("words", "weight", "gather", "whole"),
    [
        (f"{NF4}, bnb_4bit_quant_storage: bfloat16", 0.5625, 0.5, 0.0625),
        (f"{NF4}, bnb_4bit_use_double_quant: true, bnb_4bit_quant_storage: bfloat16", 0.5159, 0.5, 0.0159),
    ],
)
def test_a_quantised_base(words: str, weight: float, gather: float, whole: float) -> None:
    """Block scales count; bitsandbytes' stay whole on every rank. FSDP2 splits no uint8: recipe/checks.py refuses that."""
    found = read(quantized(words))
    assert (found.weight_bytes, found.whole_bytes) == pytest.approx((weight, whole), abs=1e-4)
    check(found, gather_bytes=gather, other_bytes=2)


@pytest.mark.parametrize(
    ("config", "weight", "gather"),
    [
        ({"quant_method": "fp8"}, 1.0002, 1.0),
        ({"quant_method": "fbgemm_fp8"}, 1.0002, 1.0),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, 0.5195, 0.5),
    ],
)
def test_a_base_of_another_program_is_counted(config: dict[str, Any], weight: float, gather: float) -> None:
    """FSDP would train on other weights: no recipe starts with it. What another program did is planned all the same."""
    with pytest.raises(UserError, match="FSDP would gather such weights without their scales"):
        resolve(RECIPE, [quantized(", ".join(f"{key}: {value}" for key, value in config.items()))])
    resolved = resolve(RECIPE)
    resolved.train_args["model_init_kwargs"] = {**resolved.train_args["model_init_kwargs"], "quantization_config": config}
    found = strategy(resolved)
    assert (found.weight_bytes, found.whole_bytes) == pytest.approx((weight, 0.0), abs=1e-4)
    check(found, gather_bytes=gather, other_bytes=2)


def test_adapters_on_a_4_bit_base_are_bfloat16_under_fsdp2_only() -> None:
    """TRL casts them down, FSDP1 up again, FSDP2 leaves them."""
    words = quantized(f"{NF4}, bnb_4bit_quant_storage: bfloat16")
    check(read(words), trained_bytes=2, state_bytes=4, gradient_bytes=2)
    check(read(words, "accelerate=accelerate-fsdp1.yaml"), trained_bytes=4, state_bytes=8)


@pytest.mark.parametrize(
    ("optim", "number", "size"),
    [
        ("adamw_torch_fused", 4, 8), ("adamw_torch", 2, 4), ("adamw_bnb_8bit", 4, 2.03125), ("adamw_torch_4bit", 4, 1.0625),
        ("paged_adamw_32bit", 2, 8), ("paged_adamw_8bit", 2, 2.03125), ("lion_32bit", 2, 4), ("sgd", 4, 0),
        ("adafactor", 4, 0), ("galore_adamw", 4, 8),
    ],
)  # fmt: skip
def test_optimizer_states(optim: str, number: float, size: float) -> None:
    """8-bit states carry a scale for 256 of them; 32-bit ones of bitsandbytes are float32 whatever they update."""
    assert moments(optim, number) == size


def test_recomputation() -> None:
    """FSDP's for all layers, the model's for every n-th, a recipe's ratio; offload as either says it."""
    off = "accelerate.fsdp_config.fsdp_activation_checkpointing=false"
    check(read(off), checkpointed=1.0, checkpoint_offload=False)  # TRL's default
    check(read(off, "train.activation_checkpointing=false"), checkpointed=0.0)
    check(read(off, "activation_checkpointing.ratio=0.5"), checkpointed=0.5)
    check(read(off, "activation_checkpointing.ratio=0"), checkpointed=0.0)
    check(read(off, "train.activation_checkpointing_kwargs={every_n_layers: 3, offload: true}"), checkpointed=42 / 126)
    check(read(off, "train.activation_checkpointing_kwargs={offload: true}"), checkpoint_offload=True)
    check(read("accelerate.fsdp_config.fsdp_activation_checkpointing_offload=true"), checkpoint_offload=True)


def test_compilation_and_attention() -> None:
    """torch_compile of TRL, or accelerate's dynamo section."""
    check(read("train.torch_compile=true"), compiled=True)
    check(read("accelerate.dynamo_config.dynamo_backend=INDUCTOR"), compiled=True)
    check(read("train.model_init_kwargs.attn_implementation=flash_attention_2"), attention="flash")
    check(read("train.model_init_kwargs.attn_implementation=eager"), attention="eager")
    check(read("train.model_init_kwargs.attn_implementation=packed_varlen"), attention="flash", isolated=True)
    check(read("train.model_init_kwargs.attn_implementation=flex_attention"), attention="flash")
    check(read("train.packing_strategy=wrapped"), attention="sdpa", packing=True, isolated=False)


def test_megatron() -> None:
    """Weights and gradients whole on each data-parallel rank, the optimizer split over dp x cp."""
    sizes = ["megatron.tensor_model_parallel_size=8", "megatron.pipeline_model_parallel_size=2", "slurm.nodes=8"]
    more = ["megatron.context_parallel_size=2", "megatron.sequence_parallel=true", "megatron.fp8=hybrid"]
    found = read(*sizes, *more, "megatron.virtual_pipeline_model_parallel_size=3", "megatron.recompute_granularity=full")
    check(found, kind="Megatron", tp=8, pp=2, cp=2, data_parallel_size=2, virtual=3, state_shards=4, weight_shards=1)
    check(found, weight_bytes=2, gradient_bytes=4, reduce_bytes=4, state_bytes=12, sequence_parallel=True, checkpointed=1.0)
    check(found, compute="fp8", attention="flash")
    check(read(*sizes, "megatron.use_distributed_optimizer=false"), state_shards=1, checkpointed=0.0)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["accelerate.distributed_type=NO", "accelerate.fsdp_config=null"], "starts one process"),
        ([f"{PARALLEL}_cp_size=4", "train.packing=false", "train.max_length=2044"], "train.max_length=2040"),
        ([*DEEPSPEED, "accelerate.deepspeed_config.zero_stage=7"], "no ZeRO stage 7"),
        (
            [*DEEPSPEED, "accelerate.deepspeed_config={zero_stage: 2, offload_param_device: cpu}"],
            "parameters are offloaded from stage 3 on, here it is 2",
        ),
        (
            [*DEEPSPEED, "accelerate.deepspeed_config={zero_stage: 2, offload_optimizer_device: nvme}"],
            "nvme takes state of stage 3 only, here it is 2",
        ),
    ],
)
def test_what_the_ranks_would_refuse(overrides: list[str], says: str) -> None:
    """Better said by a plan of a moment than by 128 ranks in the queue."""
    assert any(says in problem for problem in refused(*overrides))


def test_hybrid_shard_needs_whole_nodes() -> None:
    """torch forms its groups from the GPUs of a node."""
    words = ["accelerate=accelerate-fsdp1.yaml", "train.global_batch_size=12"]
    words += ["accelerate.fsdp_config.fsdp_sharding_strategy=HYBRID_SHARD"]
    with pytest.raises(UserError, match="needs whole nodes"):
        resolve(RECIPE, words, ranks=12)


def test_a_plan_of_a_run_reads_what_the_run_resolved() -> None:
    """A run folder that was copied from elsewhere is planned without its recipe's files."""
    from clustertune.resolve.resolved import Resolved

    resolved = resolve(RECIPE, [f"{PARALLEL}_dp_replicate_size=2"])
    again = Resolved.from_dict(json.loads(json.dumps(resolved.as_dict())))
    assert dataclasses.asdict(strategy(again)) == dataclasses.asdict(strategy(resolved))


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("plan.sequence_parallel=true", {"sequence_parallel": True}),
        ("plan.reduce_each=true", {"reduce_each": True}),
        ("plan.fp8=true", {"compute": "fp8"}),
        ("plan.overlap_tp=true", {"overlap_tp": True}),
        ("plan.whole_logits=true", {"fused_loss": False}),
        ("plan.reduce_dtype=bf16", {"reduce_bytes": 2.0, "gradient_bytes": 4.0}),
        ("reduce_dtype=bfloat16", {"reduce_bytes": 2.0, "gradient_bytes": 4.0}),
        ("train.seed=1", {"sequence_parallel": False, "reduce_each": False, "compute": "bf16", "overlap_tp": False,
                          "fused_loss": True, "reduce_bytes": 4.0}),
    ],
)  # fmt: skip
def test_a_run_of_another_program(override: str, wanted: dict[str, Any]) -> None:
    """torchtitan and NeMo differ from accelerate in these: without them their published runs cannot be planned."""
    check(read_strategy(resolve(RECIPE, [override])), **wanted)


def test_megatron_holds_gradients_as_it_reduces_them() -> None:
    """grad_reduce_in_fp32 is one switch for both; 2 bytes less for each parameter."""
    sizes = ["megatron.tensor_model_parallel_size=8", "megatron.pipeline_model_parallel_size=2"]
    check(read_strategy(resolve(RECIPE, sizes)), gradient_bytes=4.0, reduce_bytes=4.0)
    check(read_strategy(resolve(RECIPE, [*sizes, "plan.reduce_dtype=bf16"])), gradient_bytes=2.0, reduce_bytes=2.0)


def test_126_layers_over_8_stages() -> None:
    """Embedding and loss make 128 of them, as Megatron-Bridge cuts Llama 405B; without that Megatron-Core refuses."""
    sizes = ["megatron.tensor_model_parallel_size=2", "megatron.pipeline_model_parallel_size=8"]
    with pytest.raises(UserError, match="126 layers are not a multiple of 8 stages") as caught:
        resolve(RECIPE, sizes)
    assert "account_for_loss_in_pipeline_split: true" in str(caught.value.problems[0].fix)
    ends = [f"megatron.account_for_{end}_in_pipeline_split=true" for end in ("embedding", "loss")]
    check(read(*sizes, *ends), pp=8)
    with pytest.raises(UserError, match="126 layers and 1 for embedding and loss"):
        resolve(RECIPE, [*sizes, ends[0]])


def test_conversations_of_like_length_pad_less() -> None:
    """group_by_length: a micro batch is as long as its conversations, not as the longest of random ones."""
    lengths = Lengths((100, 900), "test")
    given = ["train.packing=false", "train.per_device_train_batch_size=2"]
    random, _ = real_length(read(*given), lengths)
    grouped, (note,) = real_length(read(*given, "train.train_sampling_strategy=group_by_length"), lengths)
    assert (random.sequence, grouped.sequence) == (700, 500) and "grouped by length" in note


def test_float32_is_said_to_be_tf32() -> None:
    """torch computes full float32 products unless train.tf32 allows less: many times slower than what is counted."""
    says = "counted as TF32"
    assert any(says in note for note in read("train.bf16=false", "train.tf32=false", *FULL, FLOAT).notes)
    assert not any(says in note for note in read("train.bf16=false", "train.tf32=true", *FULL, FLOAT).notes)
    assert not any(says in note for note in read().notes)
