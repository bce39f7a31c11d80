"""What a strategy does not carry is refused before the queue, with the key, the reason and what to do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from clustertune.config import accelerate_file as acc
from clustertune.config import checks
from clustertune.config.resolve import resolve
from clustertune.config.values import parallel_plans
from clustertune.errors import UserError
from tests.command import REPO
from tests.conftest import TINY_LLAMA

TINY = REPO / "recipes" / "tiny-oasst2"
TP = "accelerate.parallelism_config.parallelism_config_tp_size=2"
CP = "accelerate.parallelism_config.parallelism_config_cp_size=2"
NOT_PACKED = "train.packing=false"
SP = "accelerate.parallelism_config.parallelism_config_sp_size=2"
WITHOUT = "accelerate.fsdp_config=null"
DDP = "accelerate.distributed_type=MULTI_GPU"
ZERO = ("accelerate.distributed_type=DEEPSPEED", WITHOUT, "accelerate.deepspeed_config.zero_stage=2")
QUANTIZED = "train.model_init_kwargs.quantization_config"
BASE_4BIT = "train.model_init_kwargs.quantization_config.load_in_4bit=true"


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        resolve(TINY, overrides, ranks=4)
    return "\n".join(str(problem) for problem in caught.value.problems)


@pytest.mark.parametrize("given", [[TP], [CP, NOT_PACKED], [TP, "lora=null"], []])
def test_what_the_stack_carries_resolves(given: list[str]) -> None:
    """The guards let through what trains."""
    assert resolve(TINY, given, ranks=4).world_size == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([SP], "Ulysses, which is not carried here"),
        ([SP, DDP, WITHOUT], "Ulysses, which is not carried here"),
        ([SP, *ZERO], "Ulysses, which is not carried here"),
        ([TP, DDP, WITHOUT], "only FSDP2 is combined with it here"),
        ([TP, BASE_4BIT], "quantised weights are not split over tp"),
        ([BASE_4BIT], "FSDP2 would keep the whole base on every rank"),
        ([TP, "lora.modules_to_save=[norm]"], "whole modules are not trained beside an adapter"),
        ([TP, "lora.target_modules=[q_proj, embed_tokens]"], "embed_tokens takes no adapter"),
        ([TP, "lora.target_modules='.*(q_proj|embed_tokens)'"], "embed_tokens takes no adapter"),
        ([TP, "lora.target_modules='(q_proj'"], "is not a regular expression"),
        ([TP, "train.torch_compile=true"], "not proved together with tensor parallelism"),
        ([TP.replace("=2", "=4")], "4 does not divide num_key_value_heads, 2"),
        ([CP, NOT_PACKED, "train.model_init_kwargs.attn_implementation=eager"], "has an attention of its own"),
        ([CP, NOT_PACKED, "train.label_smoothing_factor=0.1"], "smooths unshifted labels"),
        ([CP, NOT_PACKED, "train.padding_free=true"], "joins the sequences of a batch"),
        ([CP], "drops what keeps packed conversations apart"),
        ([CP, NOT_PACKED, "train.eval_packing=true"], "drops what keeps packed conversations apart"),
        ([WITHOUT, "accelerate.distributed_type=NO"], "NO starts one process; there are 4 ranks"),
        (["train.fp16=true"], "its loss scale makes steps that are not finite"),
        (["train.fp16=true", "train.bf16=false"], "its loss scale makes steps that are not finite"),
        ([TP, "train.average_tokens_across_devices=false"], "the mean over the tokens of all ranks"),
    ],
)
def test_what_it_does_not_carry_is_refused(given: list[str], message: str) -> None:
    """Each with a sentence of its own; without the check the job would fail on its nodes, or train something else."""
    assert message in refused(*given)


@pytest.mark.parametrize("file", ["accelerate.yaml", "accelerate-fsdp1.yaml"])
def test_fsdp_shards_no_quantisation_but_4_bits(file: str) -> None:
    """float8 is a floating type: FSDP2 casts it as it gathers, and the layer multiplies what has lost its scales."""
    for name in ("fp8", "fbgemm_fp8", "mxfp4", "gptq", "awq", "torchao", ""):
        words = f"{QUANTIZED}={{{f'quant_method: {name}' if name else 'load_in_8bit: true'}}}"
        message = refused(words, f"accelerate={file}")
        assert QUANTIZED in message and "FSDP would gather such weights without their scales" in message
        assert "FSDP would gather" not in refused(words, f"accelerate={file}", "accelerate.no_such=1", DDP)


FOUR = f"{QUANTIZED}={{load_in_4bit: true, bnb_4bit_quant_storage: %s}}"


@pytest.mark.parametrize(
    "given",
    [
        ("accelerate=accelerate.yaml",), ("accelerate=accelerate-fsdp1.yaml",),
        *((*ZERO[:2], f"accelerate.deepspeed_config.zero_stage={stage}") for stage in (1, 2, 3)),
    ],
)  # fmt: skip
def test_packed_weights_that_bf16_would_round_are_refused(given: tuple[str, ...]) -> None:
    """FSDP and DeepSpeed cast floating weights to bfloat16, and four packed values in a float16 are other values then."""
    for storage, dtype in itertools.product(("float16", "float32"), ("bfloat16", "float32")):
        message = refused(FOUR % storage, f"train.model_init_kwargs.dtype={dtype}", "train.bf16=true", *given)
        assert f"{QUANTIZED}.bnb_4bit_quant_storage: {storage}" in message and "bnb_4bit_quant_storage: bfloat16" in message
        assert "write bnb_4bit_quant_storage: float" not in message


def test_a_quantised_base_that_is_taken() -> None:
    """Without mixed precision, and where each rank has the model for itself; FSDP2 splits floating types only, FSDP1 one type,
    ZeRO-3 bitsandbytes' 4 bits. Followed, the advice resolves."""
    one = ["accelerate.distributed_type=NO", WITHOUT, "accelerate.parallelism_config=null"]
    assert resolve(TINY, one, ranks=1).world_size == 1
    for storage in ("uint8", "bfloat16", "float16", "float32"):
        assert resolve(TINY, [FOUR % storage, "train.bf16=true", *one], ranks=1).world_size == 1
        if storage != "uint8":
            assert resolve(TINY, [FOUR % storage, "train.bf16=false"], ranks=4).world_size == 4
    four, dtype = FOUR % "bfloat16", "train.model_init_kwargs.dtype"
    assert resolve(TINY, [four, f"{dtype}=bfloat16"], ranks=4).world_size == 4
    fsdp1 = [four, "accelerate=accelerate-fsdp1.yaml", "train.bf16=true"]
    wanted = "write bnb_4bit_quant_storage: bfloat16, and model_init_kwargs: {dtype: bfloat16}"
    assert wanted in refused(*fsdp1, f"{dtype}=float32")
    assert resolve(TINY, [*fsdp1, f"{dtype}=bfloat16"], ranks=4).world_size == 4
    for words in ("quant_method: fp8", "load_in_8bit: true"):
        message = refused(f"{QUANTIZED}={{{words}}}", *ZERO[:2], "accelerate.deepspeed_config.zero_stage=3")
        assert "ZeRO-3 would gather" in message


STATES = ("qwen3_next", "falcon_h1", "bamba", "mamba2", "jamba", "lfm2", "minimax", "recurrent_gemma", "rwkv")


def look(architecture: dict[str, Any], *, length: Any = 64, **sizes: int) -> list[str]:
    accelerate = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": {}}
    for axis, size in sizes.items():
        accelerate["parallelism_config"][f"parallelism_config_{axis}_size"] = size  # type: ignore[index]
    train = {} if length is ... else {"max_length": length}
    return [message for _, message, _ in checks.check_strategy(train, {}, accelerate, architecture)]


@pytest.mark.parametrize(
    ("changes", "sizes", "expected"),
    [
        ({"model_type": "gpt2"}, {"tp": 2}, "transformers has no tensor-parallel plan for gpt2"),
        ({"model_type": "deepseek_v2"}, {"tp": 2}, "which is not carried out here"),
        ({"model_type": "mixtral", "num_local_experts": 3}, {"tp": 2}, "2 does not divide num_local_experts, 3"),
        ({"intermediate_size": 33}, {"tp": 2}, "2 does not divide intermediate_size, 33"),
        ({"model_type": "mistral", "sliding_window": 32}, {"cp": 2}, "attends to 32 tokens back and max_length is 64"),
        ({"layer_types": ["full_attention", "linear_attention"]}, {"cp": 2}, "layers of linear_attention"),
        ({"model_type": "llama4_text", "attention_chunk_size": 32}, {"cp": 2}, "attends to 32 tokens back"),
        ({"model_type": "olmo3", "sliding_window": 32}, {"cp": 2}, "attends to 32 tokens back"),
        ({"model_type": "gpt_oss", "num_local_experts": 2}, {"cp": 2}, "without scaled_dot_product_attention"),
        ({"model_type": "falcon", "alibi": True}, {"cp": 2}, "alibi: true, a mask"),
        *(({"model_type": kind}, {"cp": 2}, f"layers of {kind} hand on a state") for kind in STATES),
    ],
)
def test_the_model_decides_too(changes: dict[str, Any], sizes: dict[str, int], expected: str) -> None:
    """The same by the architecture alone; the model itself without the change is carried."""
    assert look(TINY_LLAMA, **sizes) == []
    assert any(expected in message for message in look({**TINY_LLAMA, **changes}, **sizes))


def test_windows_and_lengths() -> None:
    """A window that the description leaves out is the configuration class's, 4096 tokens; a length that is not said is the
    trainer's, 1024; without any cut no window is wide enough, and one that no sequence leaves is no obstacle."""
    for kind in ("gemma3_text", "mistral", "cohere2", "olmo3", "exaone4"):
        long = look({**TINY_LLAMA, "model_type": kind}, length=8192, cp=2)
        assert any("attends to 4096 tokens back and max_length is 8192" in message for message in long)
        assert look({**TINY_LLAMA, "model_type": kind}, length=4096, cp=2) == []
    mistral = {**TINY_LLAMA, "model_type": "mistral"}
    assert look({**mistral, "sliding_window": 1024}, length=..., cp=2) == []
    assert "max_length is 1024" in look({**mistral, "sliding_window": 1023}, length=..., cp=2)[0]
    assert "max_length is None" in look(mistral, length=None, cp=2)[0]
    assert look({**mistral, "sliding_window": 64}, cp=2) == []
    for more in (
        {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False},
        {"model_type": "llama4_text", "attention_chunk_size": 64},
        {"model_type": "gemma3_text", "sliding_window": 32, "layer_types": ["full_attention", "full_attention"]},
    ):
        assert look({**TINY_LLAMA, **more}, cp=2) == []


def test_the_styles_are_those_that_the_training_carries_out() -> None:
    """One list is the other's check: a style added to one alone would be refused here or fail there."""
    from clustertune.training import tensor

    assert set(tensor.STYLES) == checks.TP_STYLES
    assert {tensor.EXPERTS, tensor.EXPERT_WEIGHTS} == checks.EP_STYLES
    dense, experts = parallel_plans("mixtral")
    assert dense["layers.*.self_attn.q_proj"] == "colwise" and experts["layers.*.mlp.experts"] == "ep_dispatch_experts"
    assert acc.parallel_sizes({"parallelism_config": {"parallelism_config_tp_size": 2}}) == {"tp": 2}
