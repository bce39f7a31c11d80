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
from clustertune.plan.predict import real_length
from clustertune.plan.strategy import Strategy, moments, strategy
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from tests.command import REPO
from tests.plan.world import RECOMPUTE

RECIPE = "llama405b-oasst2"
DEEPSPEED = ["accelerate.distributed_type=DEEPSPEED", "accelerate.fsdp_config=null"]
ZERO = "accelerate.deepspeed_config"
KEYS = "accelerate.fsdp_config.fsdp"
FULL = ["lora=null"]
PARALLEL = "accelerate.parallelism_config.parallelism_config"
KERNEL = "train.model_init_kwargs.attn_implementation"
TP8, TP2 = ([f"megatron.tensor_model_parallel_size={n}", f"megatron.pipeline_model_parallel_size={10 - n}"] for n in (8, 2))
SMOOTH = "train.label_smoothing_factor=0.1"
SAVE = "activation_checkpointing.save=[attention,matmul]"


def quantized(words: str) -> str:
    return f"train.model_init_kwargs.quantization_config={{{words}}}"


NF4 = "load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_quant_storage: bfloat16"


def shards(weights: int, gradients: int, states: int, **more: Any) -> dict[str, Any]:
    return {"weight_shards": weights, "gradient_shards": gradients, "state_shards": states, **more}


def sizes(weight: float, gather: float, trained: float, gradient: float, reduce: float, state: float) -> dict[str, Any]:
    """Bytes of full fine-tuning."""
    return {
        "lora": False, "weight_bytes": weight, "gather_bytes": gather, "trained_bytes": trained, "gradient_bytes": gradient,
        "reduce_bytes": reduce, "state_bytes": state,
    }  # fmt: skip


READ: list[tuple[list[str], dict[str, Any]]] = [
    # A frozen bfloat16 base over 16 ranks, adapters in float32, as is the sum of their gradients.
    ([], {
        "kind": "FSDP2", "world_size": 16, "ranks_per_node": 8, "data_parallel_size": 16, "replicas": 1, "lora": True,
        "packing": True, **shards(16, 16, 16), "reshard": True, "checkpointed": 1.0, "save": (), "micro_batch": 1,
        "accumulation": 2, "sequence": 2048, "attention": "sdpa", "compiled": False, "weight_bytes": 2, "gather_bytes": 2,
        "trained_bytes": 4, "gradient_bytes": 4, "reduce_bytes": 4, "state_bytes": 8, "offload_params": "none",
        "compute": "bf16", "fused_loss": True, "tiled_loss": True, "second_forward": "", "liger": False,
        "sequence_parallel": False, "reduce_each": False, "overlap_tp": False,
    }),
    # 16 bytes a parameter are the rule and have exceptions, each of which decides whether a model fits.
    (FULL, sizes(4, 2, 4, 4, 2, 8)),  # accelerate upcasts what is trained
    ([*FULL, "reduce_dtype=float32"], sizes(4, 2, 4, 4, 4, 8)),
    ([*FULL, "train.bf16=false"], sizes(2, 2, 2, 2, 2, 4)),  # pure bfloat16: nothing is upcast
    ([*FULL, "train.bf16=false", "train.model_init_kwargs=null"], sizes(4, 4, 4, 4, 4, 8)),
    ([*FULL, *DEEPSPEED, f"{ZERO}.zero_stage=2"], sizes(2, 2, 2, 2, 2, 12)),
    ([*FULL, "accelerate.distributed_type=MULTI_GPU", DEEPSPEED[1]], sizes(2, 2, 2, 4, 2, 4)),
    # TRL's default doubles what a frozen base takes, and not what it moves.
    (["train.model_init_kwargs=null"], {"weight_bytes": 4, "gather_bytes": 2}),
    ([f"{PARALLEL}_dp_replicate_size=2", f"{KEYS}_reshard_after_forward=false"],
     shards(8, 8, 8, kind="FSDP2", replicas=2, data_parallel_size=16, reshard=False)),
    # FSDP shards over the data-parallel and the context-parallel ranks together (accelerate's dp_shard_cp).
    ([f"{PARALLEL}_tp_size=8"], {"tp": 8, "data_parallel_size": 2, "weight_shards": 2, "accumulation": 16}),
    ([f"{PARALLEL}_cp_size=4", "train.packing=false"],
     {"cp": 4, "data_parallel_size": 4, "weight_shards": 16, "packing": False}),
    # https://arxiv.org/abs/1910.02054, figure 1
    *(([*DEEPSPEED, f"{ZERO}.zero_stage={stage}", "activation_checkpointing.ratio=1"],
       shards(*split, kind=f"ZeRO-{stage}", reshard=stage == 3, checkpointed=1.0))
      for stage, split in enumerate(((1, 1, 1), (1, 1, 16), (1, 16, 16), (16, 16, 16)))),
    # CPUOffloadPolicy moves parameters, gradients and optimizer state, not the optimizer alone.
    ([f"{KEYS}_offload_params=true"], {"offload_params": "cpu", "offload_optimizer": "cpu"}),
    # Block scales count; bitsandbytes' stay whole on every rank. TRL casts adapters on 4 bits down.
    ([quantized(NF4)], {"weight_bytes": 0.5625, "gather_bytes": 0.5, "whole_bytes": 0.0625, "other_bytes": 2,
                        "trained_bytes": 2, "state_bytes": 4, "gradient_bytes": 2}),
    ([quantized(f"{NF4}, bnb_4bit_use_double_quant: true")],
     {"weight_bytes": 0.515869140625, "gather_bytes": 0.5, "whole_bytes": 0.015869140625}),
    # FSDP's recomputation for all layers, the model's for every n-th, a recipe's ratio; offload as either says it.
    ([], {"checkpointed": 1.0, "checkpoint_offload": False}),  # TRL's default
    (["activation_checkpointing.ratio=0.5"], {"checkpointed": 0.5}),
    (["activation_checkpointing.ratio=0"], {"checkpointed": 0.0}),
    (["train.activation_offloading=true"], {"checkpoint_offload": True}),
    ([SAVE], {"checkpointed": 1.0, "save": ("attention", "matmul")}),
    ([SAVE, "activation_checkpointing.ratio=0.5"], {"checkpointed": 0.5, "save": ("attention", "matmul")}),
    # torch_compile of TRL, or accelerate's dynamo section; attention, and what of packing it keeps apart
    (["train.torch_compile=true"], {"compiled": True}),
    (["accelerate.dynamo_config.dynamo_backend=INDUCTOR"], {"compiled": True}),
    ([f"{KERNEL}=flash_attention_2"], {"attention": "flash"}),
    ([f"{KERNEL}=eager"], {"attention": "eager"}),
    ([f"{KERNEL}=packed_varlen"], {"attention": "flash", "isolated": True}),
    ([f"{KERNEL}=flex_attention"], {"attention": "flash"}),
    (["train.packing_strategy=wrapped"], {"attention": "sdpa", "packing": True, "isolated": False}),
    # kernels and losses
    (["train.use_liger_kernel=true"], {"liger": True}),
    ([SMOOTH], {"fused_loss": False, "tiled_loss": False, "second_forward": "metrics"}),
    ([SMOOTH, "train.loss_type=dft"], {"fused_loss": True, "second_forward": ""}),
    # Megatron: weights and gradients whole on each data-parallel rank, the optimizer split over dp x cp
    ([*TP8, "slurm.nodes=8", "megatron.context_parallel_size=2", "megatron.sequence_parallel=true", "megatron.fp8=hybrid",
      "megatron.virtual_pipeline_model_parallel_size=3", "megatron.recompute_granularity=full"],
     {"kind": "Megatron", "tp": 8, "pp": 2, "cp": 2, "data_parallel_size": 2, "virtual": 3, "state_shards": 4,
      "weight_shards": 1, "weight_bytes": 2, "gradient_bytes": 4, "reduce_bytes": 4, "state_bytes": 12,
      "sequence_parallel": True, "checkpointed": 1.0, "compute": "fp8", "attention": "flash"}),
    ([*TP8, "slurm.nodes=8", "megatron.use_distributed_optimizer=false"], {"state_shards": 1, "checkpointed": 0.0}),
    ([*TP8, "plan.reduce_dtype=bf16"], {"gradient_bytes": 2.0, "reduce_bytes": 2.0}),  # grad_reduce_in_fp32 is one switch
    # torchtitan and NeMo differ from accelerate in these: without them their published runs cannot be planned.
    (["plan.sequence_parallel=true"], {"sequence_parallel": True}),
    (["plan.reduce_each=true"], {"reduce_each": True}),
    (["plan.fp8=true"], {"compute": "fp8"}),
    (["plan.overlap_tp=true"], {"overlap_tp": True}),
    (["plan.whole_logits=true"], {"fused_loss": False, "holds_logits": True, "ends_apart": False}),
    (["plan.reduce_dtype=bf16"], {"reduce_bytes": 2.0, "gradient_bytes": 4.0}),
    (["reduce_dtype=bfloat16"], {"reduce_bytes": 2.0, "gradient_bytes": 4.0}),
]  # fmt: skip
"""Overrides of the reference recipe, and fields of the strategy that it has then."""


def read(*overrides: str, recipe: str | Path = RECIPE) -> Strategy:
    return strategy(resolve(recipe, overrides))


def check(found: Strategy, wanted: dict[str, Any]) -> None:
    known = vars(found) | {key: getattr(found.recompute, field) for key, field in RECOMPUTE.items()}
    assert {key: known[key] for key in wanted} == wanted


@pytest.mark.parametrize(("overrides", "wanted"), READ)
def test_what_a_recipe_says_is_what_is_planned(overrides: list[str], wanted: dict[str, Any]) -> None:
    found = read(*overrides)
    check(found, wanted)
    assert any("label_smoothing_factor" in note for note in found.notes) == (SMOOTH in overrides and not found.fused_loss)


def test_a_deepspeed_file_and_what_is_laid_over_it(tmp_path: Path) -> None:
    """Offload and reduction stand in DeepSpeed's own words; the command line replaces single values."""
    for name in ("_base", RECIPE):
        shutil.copytree(REPO / "recipes" / name, tmp_path / name)
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "nvme", "nvme_path": "auto"}}
    batch = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    folder = tmp_path / RECIPE
    (folder / "deepspeed.json").write_text(json.dumps({"zero_optimization": zero, "communication_data_type": "fp32", **batch}))
    config = "{deepspeed_config_file: deepspeed.json, zero3_init_flag: true}"
    (folder / "ds.yaml").write_text(f"distributed_type: DEEPSPEED\ndeepspeed_config: {config}\n")
    given = {"kind": "ZeRO-3", "offload_params": "cpu", "offload_optimizer": "nvme", "reduce_bytes": 4, "gradient_bytes": 2}
    check(read("accelerate=ds.yaml", recipe=folder), given | {"state_bytes": 12})
    words = ["deepspeed.zero_optimization.offload_param=null", "deepspeed.data_types.grad_accum_dtype=fp32"]
    check(read("accelerate=ds.yaml", *words, recipe=folder), given | {"offload_params": "none", "gradient_bytes": 4})


@pytest.mark.parametrize(
    ("config", "weight", "gather"),
    [
        ({"quant_method": "fp8"}, 1.0002, 1.0), ({"quant_method": "fbgemm_fp8"}, 1.0002, 1.0),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, 0.5195, 0.5),
    ],
)  # fmt: skip
def test_a_base_of_another_program_is_counted(config: dict[str, Any], weight: float, gather: float) -> None:
    """No recipe starts with it (tests/recipe/test_refusals.py). What another program did is planned all the same."""
    resolved = resolve(RECIPE)
    resolved.train_args["model_init_kwargs"] = {**resolved.train_args["model_init_kwargs"], "quantization_config": config}
    found = strategy(resolved)
    assert (found.weight_bytes, found.whole_bytes) == pytest.approx((weight, 0.0), abs=1e-4)
    check(found, {"gather_bytes": gather, "other_bytes": 2})


def test_optimizer_states() -> None:
    """8-bit states carry a scale for 256 of them; 32-bit ones of bitsandbytes are float32 whatever they update."""
    known = {
        ("adamw_torch_fused", 4): 8, ("adamw_torch", 2): 4, ("adamw_bnb_8bit", 4): 2.03125, ("adamw_torch_4bit", 4): 1.0625,
        ("paged_adamw_32bit", 2): 8, ("paged_adamw_8bit", 2): 2.03125, ("lion_32bit", 2): 4, ("sgd", 4): 0,
        ("adafactor", 4): 0, ("galore_adamw", 4): 8,
    }  # fmt: skip
    assert {given: moments(*given) for given in known} == known


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["accelerate.distributed_type=NO", DEEPSPEED[1]], "starts one process"),
        ([f"{PARALLEL}_cp_size=4", "train.packing=false", "train.max_length=2044"], "train.max_length=2040"),
        ([*DEEPSPEED, f"{ZERO}.zero_stage=7"], "no ZeRO stage 7"),
        ([*DEEPSPEED, f"{ZERO}={{zero_stage: 2, offload_param_device: cpu}}"], "offloaded from stage 3 on, here it is 2"),
        ([*DEEPSPEED, f"{ZERO}={{zero_stage: 2, offload_optimizer_device: nvme}}"], "of stage 3 only, here it is 2"),
    ],
)  # fmt: skip
def test_what_the_ranks_would_refuse(overrides: list[str], says: str) -> None:
    """Better said by a plan of a moment than by 128 ranks in the queue."""
    with pytest.raises(UserError) as caught:
        read(*overrides)
    assert any(says in str(problem) for problem in caught.value.problems)


def test_126_layers_over_8_stages() -> None:
    """With both ends counted as layers."""
    ends = [f"megatron.account_for_{end}_in_pipeline_split=true" for end in ("embedding", "loss")]
    check(read(*TP2, *ends), {"pp": 8})


def test_a_plan_of_a_run_reads_what_the_run_resolved() -> None:
    """A run folder that was copied from elsewhere is planned without its recipe's files."""
    resolved = resolve(RECIPE, [f"{PARALLEL}_dp_replicate_size=2"])
    again = Resolved.from_dict(json.loads(json.dumps(resolved.as_dict())))
    assert dataclasses.asdict(strategy(again)) == dataclasses.asdict(strategy(resolved))


def test_conversations_of_like_length_pad_less() -> None:
    """group_by_length: a micro batch is as long as its conversations, not as the longest of random ones."""
    lengths = Lengths((100, 900), "test")
    given = ["train.packing=false", "train.per_device_train_batch_size=2"]
    random, _ = real_length(read(*given), lengths)
    grouped, (note,) = real_length(read(*given, "train.train_sampling_strategy=group_by_length"), lengths)
    assert (random.sequence, grouped.sequence) == (700, 500) and "grouped by length" in note


def test_float32_is_said_to_be_tf32() -> None:
    """torch computes full float32 products unless train.tf32 allows less: many times slower than what is counted."""
    float32 = ["train.bf16=false", "train.model_init_kwargs.dtype=float32", *FULL]
    for words, said in (([*float32, "train.tf32=false"], True), ([*float32, "train.tf32=true"], False), ([], False)):
        assert any("counted as TF32" in note for note in read(*words).notes) == said
