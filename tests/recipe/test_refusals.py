"""What a recipe cannot ask for is refused before the queue, with the key, the reason and what to do: sections against each
other, values that the libraries take and that do something else than they say, and what a distribution does not carry."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clustertune.cli.app import app
from clustertune.errors import UserError
from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import checks
from clustertune.recipe.library_facts import model_facts
from clustertune.recipe.native_rules import train_defaults
from clustertune.resolve import kernels, view
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import NOT_STARTED
from clustertune.training import base_weights
from tests.command import run
from tests.conftest import TINY_LLAMA
from tests.recipe.conftest import readable

TINY, REFERENCE = "tiny-oasst2", "llama405b-oasst2"
OWN = "activation_checkpointing"
SAVE = f"{OWN}.save=[attention,every_second_matmul]"
KERNEL = "train.model_init_kwargs.attn_implementation"
EAGER = f"{KERNEL}=eager"
INDUCTOR = "accelerate.dynamo_config={dynamo_backend: INDUCTOR}"
MESH = "accelerate.parallelism_config.parallelism_config"
TP, CP, SP = (f"{MESH}_{axis}_size=2" for axis in ("tp", "cp", "sp"))
NOT_PACKED = "train.packing=false"
WITHOUT = "accelerate.fsdp_config=null"
DDP = "accelerate.distributed_type=MULTI_GPU"
ZERO = ("accelerate.distributed_type=DEEPSPEED", WITHOUT, "accelerate.deepspeed_config.zero_stage=2")
QUANTIZED = "train.model_init_kwargs.quantization_config"
BASE_4BIT = f"{QUANTIZED}.load_in_4bit=true"
FOUR = f"{QUANTIZED}={{load_in_4bit: true, bnb_4bit_quant_storage: %s}}"
PAIRS = ["trainer=dpo", "data.format=preference", "train.packing=null", "train.assistant_only_loss=null"]


def refused(*overrides: str, recipe: str = TINY, ranks: int | None = None) -> dict[str, str]:
    """What is said by key."""
    found: dict[str, str] = {}
    for problem in readable(resolve, recipe, overrides, ranks=ranks):
        found[str(problem.key)] = found.get(str(problem.key), "") + str(problem) + "\n"
    return found


CASES: dict[tuple[str, int | None], list[tuple[list[str], str, str]]] = {
    (TINY, None): [
        # --- which layers are recomputed, and kernels
        ([f"{OWN}.save=[]"], f"{OWN}.save", ""), ([f"{OWN}.save=[scores]"], f"{OWN}.save.0", "attention"),
        (["train.liger_kernel_config={fused_linear_cross_entropy: true}"], "train.liger_kernel_config", "in tiles"),
        (["train.torch_compile_backend=eager", INDUCTOR], "train.torch_compile_backend", "is not read"),
        # --- numbers that no run can mean
        (["train.pad_to_multiple_of=1e8"], "train.pad_to_multiple_of", "1024"),
        (["train.ddp_timeout=1"], "train.ddp_timeout", "60"),
        (["eval.num_fewshot=10000"], "eval.num_fewshot", "256"),
    ],
    (TINY, 4): [
        # --- what a distribution does not carry
        ([SP], "parallelism_config_sp_size", "Ulysses, which is not carried here"),
        ([SP, DDP, WITHOUT], "parallelism_config_sp_size", "Ulysses, which is not carried here"),
        ([SP, *ZERO], "parallelism_config_sp_size", "Ulysses, which is not carried here"),
        ([TP, DDP, WITHOUT], "parallelism_config_tp_size", "only FSDP2 is combined with it here"),
        ([TP, BASE_4BIT], "quantization_config", "quantised weights are not split over tp"),
        ([BASE_4BIT], "bnb_4bit_quant_storage", "FSDP2 would keep the whole base on every rank"),
        ([TP, "lora.modules_to_save=[norm]"], "modules_to_save", "whole modules are not trained beside an adapter"),
        ([TP, "lora.target_modules=[q_proj, embed_tokens]"], "target_modules", "embed_tokens takes no adapter"),
        ([TP, "lora.target_modules='.*(q_proj|embed_tokens)'"], "target_modules", "embed_tokens takes no adapter"),
        ([TP, "lora.target_modules='(q_proj'"], "target_modules", "is not a regular expression"),
        ([TP, "train.torch_compile=true"], "torch_compile", "not proved together with tensor parallelism"),
        ([TP.replace("=2", "=4")], "tp_size", "4 does not divide num_key_value_heads, 2"),
        ([CP, NOT_PACKED, EAGER], "attn_implementation", "has an attention of its own"),
        ([CP, NOT_PACKED, "train.label_smoothing_factor=0.1"], "label_smoothing_factor", "smooths unshifted labels"),
        ([CP, NOT_PACKED, "train.padding_free=true"], "padding_free", "joins the sequences of a batch"),
        ([CP], "packing", "drops what keeps packed conversations apart"),
        ([CP, NOT_PACKED, "train.eval_packing=true"], "packing", "drops what keeps packed conversations apart"),
        ([WITHOUT, "accelerate.distributed_type=NO"], "distributed_type", "NO starts one process; there are 4 ranks"),
        (["train.fp16=true"], "train.fp16", "its loss scale makes steps that are not finite"),
        (["train.fp16=true", "train.bf16=false"], "train.fp16", "its loss scale makes steps that are not finite"),
        ([TP, "train.average_tokens_across_devices=false"], "average_tokens", "the mean over the tokens of all ranks"),
    ],
    (REFERENCE, None): [
        # --- Megatron and quantisation
        (["megatron.tensor_model_parallel_size=3"], "megatron", "does not divide 16 ranks"),
        (["megatron.tensor_model_parallel_sise=2"], "megatron", "did you mean tensor_model_parallel_size?"),
        (["megatron.fp8=e5m2"], "megatron.fp8", "e4m3"),
        ([f"{QUANTIZED}=nf4"], QUANTIZED, "not a mapping"),
        ([f"{QUANTIZED}={{quant_method: bitsandbyte}}"], f"{QUANTIZED}.quant_method", "did you mean bitsandbytes?"),
        ([f"{QUANTIZED}={{load_in_4bit: true, load_in_8bit: true}}"], QUANTIZED, "one of"),
        ([f"{QUANTIZED}={{load_in_4bit: 1}}"], f"{QUANTIZED}.load_in_4bit", "is not one of true, false"),
        ([f"{QUANTIZED}={{load_in_4bit: true, bnb_4bit_quant_typ: nf4}}"], f"{QUANTIZED}.bnb_4bit_quant_typ", "4bit_quant"),
        ([f"{QUANTIZED}={{load_in_4bit: true, bnb_4bit_quant_type: int4}}"], f"{QUANTIZED}.bnb_4bit_quant_type", "nf4"),
        ([BASE_4BIT, "lora=null"], QUANTIZED, "cannot be trained"),
        ([f"{OWN}.ratio=1.5"], f"{OWN}.ratio", "less than"),
        # --- files beside the recipe: the file has no such line
        ([f"{MESH}_tp_size=3"], "accelerate.parallelism_config", "make 3 ranks; there are 16"),
        ([f"{MESH}_dp_replicate_size=3"], "accelerate.parallelism_config", "make 3 ranks; there are 16"),
        ([f"{MESH}_dp_replicate_size=16"], "accelerate.parallelism_config", "no ranks to shard over"),
        ([f"{MESH}_dp_shard_size=1"], "accelerate.parallelism_config", "its sizes make 1 ranks; there are 16"),
        ([f"{MESH}_dp_shard_size=1", f"{MESH}_tp_size=16"], "parallelism_config", "no ranks to shard over"),
        (["deepspeed.zero_optimization.stage=3"], "deepspeed.zero_optimization.stage", "no DeepSpeed file"),
    ],
    # What accelerate says about a stated mesh it says on the nodes, once the base is loaded (parallelism_config.py:325 and on).
    ("llama70b-tp-fsdp2", None): [
        ([f"{MESH}_dp_shard_size=4"], "parallelism_config", "its sizes make 32 ranks; there are 64"),
        (PAIRS, "parallelism_config_tp_size", "computed by one rank"),
    ],
    ("llama8b-longcontext-32k", None): [
        ([f"{MESH}_dp_shard_size=1", f"{MESH}_dp_replicate_size=2"], "parallelism_config", "no ranks to shard over"),
        (PAIRS, "parallelism_config_cp_size", "computed by one rank"),
    ],
    ("llama70b-zero3-offload", None): [(PAIRS, "distributed_type", "no reference model")],
    ("llama70b-megatron", None): [(PAIRS, "trainer", "supervised fine-tuning alone")],
}  # fmt: skip
"""By recipe and ranks: overrides, the key that is named (its end), and words."""


@pytest.mark.parametrize(("recipe", "ranks"), CASES)
def test_what_cannot_be_is_refused(recipe: str, ranks: int | None) -> None:
    """Each with a sentence of its own; without the check the job would fail on its nodes, or train something else."""
    for words, key, says in CASES[recipe, ranks]:
        found = refused(*words, recipe=recipe, ranks=ranks)
        assert any(key in name and says in text for name, text in found.items()), (words, found)


def test_fsdp_shards_no_quantisation_but_4_bits() -> None:
    """float8 is a floating type: FSDP2 casts it as it gathers, and the layer multiplies what has lost its scales."""
    for name in ("fp8", "fbgemm_fp8", "mxfp4", "gptq", "awq", "torchao", ""):
        words = f"{QUANTIZED}={{{f'quant_method: {name}' if name else 'load_in_8bit: true'}}}"
        message = "".join(refused(words, ranks=4).values())
        assert QUANTIZED in message and "FSDP would gather such weights without their scales" in message
        assert "FSDP would gather" not in "".join(refused(words, "accelerate.no_such=1", DDP, ranks=4).values())


@pytest.mark.parametrize(
    "given",
    [
        ("accelerate=accelerate.yaml",),
        *((*ZERO[:2], f"accelerate.deepspeed_config.zero_stage={stage}") for stage in (1, 2, 3)),
    ],
)  # fmt: skip
def test_packed_weights_that_bf16_would_round_are_refused(given: tuple[str, ...]) -> None:
    """FSDP and DeepSpeed cast floating weights to bfloat16, and four packed values in a float16 are other values then."""
    for storage, dtype in itertools.product(("float16", "float32"), ("bfloat16", "float32")):
        message = "".join(
            refused(FOUR % storage, f"train.model_init_kwargs.dtype={dtype}", "train.bf16=true", *given, ranks=4).values()
        )
        assert f"{QUANTIZED}.bnb_4bit_quant_storage: {storage}" in message and "bnb_4bit_quant_storage: bfloat16" in message
        assert "write bnb_4bit_quant_storage: float" not in message


def test_a_quantised_base_that_is_taken() -> None:
    """Without mixed precision, and where each rank has the model for itself; FSDP2 splits floating types only,
    ZeRO-3 bitsandbytes' 4 bits. Followed, the advice resolves."""
    one = ["accelerate.distributed_type=NO", WITHOUT, "accelerate.parallelism_config=null"]
    assert resolve(TINY, one, ranks=1).world_size == 1
    for storage in ("uint8", "bfloat16", "float16", "float32"):
        assert resolve(TINY, [FOUR % storage, "train.bf16=true", *one], ranks=1).world_size == 1
        if storage != "uint8":
            assert resolve(TINY, [FOUR % storage, "train.bf16=false"], ranks=4).world_size == 4
    four, dtype = FOUR % "bfloat16", "train.model_init_kwargs.dtype"
    assert resolve(TINY, [four, f"{dtype}=bfloat16"], ranks=4).world_size == 4
    for words in ("quant_method: fp8", "load_in_8bit: true"):
        message = "".join(
            refused(f"{QUANTIZED}={{{words}}}", *ZERO[:2], "accelerate.deepspeed_config.zero_stage=3", ranks=4).values()
        )
        assert "ZeRO-3 would gather" in message


STATES = ("qwen3_next", "falcon_h1", "bamba", "mamba2", "jamba", "lfm2", "minimax", "recurrent_gemma", "rwkv")


def look(architecture: dict[str, Any], *, length: Any = 64, **sizes: int) -> list[str]:
    accelerate = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": {}}
    for axis, size in sizes.items():
        accelerate["parallelism_config"][f"parallelism_config_{axis}_size"] = size  # type: ignore[index]
    train = train_defaults() | ({} if length is ... else {"max_length": length})
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
    from clustertune.training import parallelism

    assert set(parallelism.STYLES) == checks.TP_STYLES
    assert {parallelism.EXPERTS, parallelism.EXPERT_WEIGHTS} == checks.EP_STYLES
    dense, experts = model_facts("mixtral")["tp"], model_facts("mixtral")["ep"]
    assert dense["layers.*.self_attn.q_proj"] == "colwise" and experts["layers.*.mlp.experts"] == "ep_dispatch_experts"


# --- which layers are recomputed, and which kernels are used ---------------------------------------------------------------


def test_what_is_taken() -> None:
    """``save`` alone means all layers; a recipe without it keeps its fingerprint, and with it its run folder."""
    found = resolve(TINY, [SAVE])
    assert found.recipe.activation_checkpointing is not None and found.recipe.activation_checkpointing.ratio == 1
    assert found.train_args["activation_checkpointing"] is True
    reason = next(item.reason for item in found.derived if item.key == "train.activation_checkpointing")
    assert "4 of 4 layers; of them attention, every_second_matmul kept" in reason
    ratio = ["activation_checkpointing.ratio=0.5"]
    assert resolve(TINY, ratio).fingerprint() != resolve(TINY, [*ratio, SAVE]).fingerprint()
    assert resolve(TINY, ratio).fingerprint() == resolve(TINY, [*ratio, "activation_checkpointing.save=null"]).fingerprint()
    resolve(TINY, ["train.torch_compile=true", INDUCTOR])


@pytest.mark.parametrize(
    ("train", "dynamo", "expected"),
    [
        ({}, {}, (False, False)), ({"torch_compile": True}, {}, (True, False)),
        ({"torch_compile_mode": "max-autotune"}, {}, (True, False)), ({}, {"dynamo_backend": "NO"}, (False, False)),
        ({}, {"dynamo_backend": "INDUCTOR"}, (True, False)),
        ({}, {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}, (True, True)),
        ({"torch_compile": True}, {"use_regional_compilation": True}, (True, True)),
        ({}, {"dynamo_use_regional_compilation": True}, (False, False)),
    ],
)  # fmt: skip
def test_whether_and_how_a_model_is_compiled(train: dict[str, Any], dynamo: dict[str, Any], expected: tuple[bool, ...]) -> None:
    """Both homes of the native key are read as the Trainer and accelerate read them."""
    assert acc.compiled(train_defaults() | train, {"dynamo_config": dynamo}) == expected
    found = replace(resolve(TINY).distribution, compiled=expected[0], compiled_by_layer=expected[1])
    assert ("as a whole" in " ".join(kernels.warnings(found))) == (expected == (True, False)), "a start of minutes"


def test_a_ratio_says_alone_which_layers_are_recomputed() -> None:
    values = view.as_json(resolve(REFERENCE, [f"{OWN}.ratio=0.5"]))["values"]
    assert values[f"{OWN}.ratio"] == {"value": 0.5, "origin": "override"}
    assert values[f"train.{OWN}"]["value"] is True and "63 of 126 layers" in values[f"train.{OWN}"]["origin"]
    assert resolve(REFERENCE, [f"{OWN}.ratio=0"]).train_args[OWN] is False


def test_a_megatron_recipe_needs_no_accelerate_file(recipes: Path) -> None:
    folder = recipes / REFERENCE
    (folder / "accelerate.yaml").unlink()
    words = ["megatron.tensor_model_parallel_size=8", "megatron.pipeline_model_parallel_size=2"]
    resolved = resolve(folder, words)
    assert (resolved.data_parallel_size, resolved.train_args["gradient_accumulation_steps"]) == (1, 32)
    assert view.as_json(resolved)["values"]["megatron.pipeline_model_parallel_size"]["value"] == 2


@pytest.mark.parametrize("command", [["run", "--dry-run"], ["sky"]])
def test_only_slurms_launcher_starts_it(command: list[str], tmp_path: Path) -> None:
    """The others know one image, and it is not NVIDIA's: tests/megatron/test_submit.py has the one that does."""
    done = run(command[0], REFERENCE, "megatron.tensor_model_parallel_size=8", *command[1:], cwd=tmp_path)
    assert done.code == 2 and NOT_STARTED in done.err and not list(tmp_path.iterdir())


# --- values that mean what they say --------------------------------------------------------------------------------------

REFUSED = (
    "lora.rank_pattern={zzz: 4}", "lora.rank_pattern={'(': 4}", "lora.alpha_pattern={zzz: 4}", "train.warmup_steps=20",
    "data.eval_fraction=0.999999", "train.adam_epsilon=10", "train.optim_args=foo=bar", "train.optim_args=foo",
    "train.log_level=zzz", "train.model_init_kwargs=sdpa",
    "slurm.time=00:00:00", "slurm.time='0'", "slurm.time=01:60:00", "slurm.time=1-24", "slurm.time=999-00:00:00",
    ("train.optim=sgd", "train.optim_args=betas=0.9"),
    "train.num_train_epochs=1e9",
    "train.num_train_epochs=-1", "train.dataloader_num_workers=100000", "train.lr_scheduler_kwargs={num_cycles: -3}",
    "train.lr_scheduler_kwargs=words", "train.lr_scheduler_kwargs={num_cycles: 0}",
    "eval.max_gen_toks=1000000000", "slurm.stall_seconds=1",
    ("train.save_strategy=best", "train.metric_for_best_model=nope"),
    ("train.lr_scheduler_type=cosine_warmup_with_min_lr", "train.lr_scheduler_kwargs={min_lr_rate: 5}"),
    ("train.lr_scheduler_type=polynomial", "train.lr_scheduler_kwargs={power: -1}"),
    ("train.lr_scheduler_type=polynomial", "train.lr_scheduler_kwargs={lr_end: 1}"),
    ("train.lr_scheduler_type=inverse_sqrt", "train.lr_scheduler_kwargs={timescale: 0}"),
    ("train.lr_scheduler_type=warmup_stable_decay", "train.lr_scheduler_kwargs={num_decay_steps: -3}"),
    ("train.lr_scheduler_type=constant", "train.lr_scheduler_kwargs={min_lr: 1e-6}"),
    "lora.rank_pattern={q_proj: 0}", "lora.rank_pattern={q_proj: -1}", "lora.rank_pattern={q_proj: 2.5}",
    "lora.alpha_pattern={q_proj: 0}", "train.lr_scheduler_kwargs={num_cicles: 1}", "train.lr_scheduler_kwargs={foo: 1}",
    ("train.lr_scheduler_type=reduce_lr_on_plateau", "train.metric_for_best_model=zzz"),
    "accelerate.fsdp_config.fsdp_transformer_layer_cls_to_wrap=Foo",
    "accelerate.fsdp_config.fsdp_transformer_layer_cls_to_wrap='LlamaDecoderLayer,LlamaDecoder'",
    "train.optim=adafactor", "train.optim=adagrad", "train.optim=adamw_bnb_8bit", "train.optim=paged_lion_32bit",
    "train.report_to=wandbb", "train.report_to=[wandb,tensorbord]", "train.torch_compile_backend=onnxrt",
)  # fmt: skip
TAKEN = (
    "lora.rank_pattern={q_proj: 4}", "lora.rank_pattern={'layers.[01].self_attn.q_proj': 4}",
    "lora.alpha_pattern={self_attn.v_proj: 0.5}", "train.warmup_steps=10", "train.warmup_steps=0.5",
    "train.lr_scheduler_kwargs={num_cycles: 0.5}", "train.log_level=warning",
    "accelerate.dynamo_config.dynamo_backend=INDUCTOR", "accelerate.dynamo_config.dynamo_backend=no", "slurm.time='90'",
    "slurm.time=36:00:00", "slurm.time=2-12", ("train.optim=sgd", "train.optim_args='momentum=0.9, nesterov=true'"),
    ("train.save_strategy=best", "train.metric_for_best_model=eval_loss"), "train.dataloader_num_workers=8",
    ("accelerate.distributed_type=MULTI_GPU", "accelerate.fsdp_config=null", "train.optim=rmsprop_bnb", "train.optim_args=a=1"),
    "train.optim=rmsprop", "train.metric_for_best_model=zzz",
    "accelerate.fsdp_config.fsdp_transformer_layer_cls_to_wrap='LlamaMLP,LlamaAttention'",
    "train.report_to=[wandb,tensorboard]", "train.report_to=all", "train.torch_compile_backend=inductor",
    ("train.lr_scheduler_type=cosine_with_min_lr", "train.lr_scheduler_kwargs={min_lr_rate: 0.1}"),
    ("train.lr_scheduler_type=warmup_stable_decay", "train.lr_scheduler_kwargs={num_decay_steps: 3, decay_type: linear}"),
    ("train.lr_scheduler_type=polynomial", "train.lr_scheduler_kwargs={lr_end: 0, power: 2}"),
)  # fmt: skip


def test_refused_with_its_key_or_taken() -> None:
    """Arguments belong to their optimizer and schedule."""
    for given in (*REFUSED, *TAKEN):
        words = ["train.max_steps=10", *([given] if isinstance(given, str) else given)]
        if given in TAKEN:
            resolve(TINY, words)
            continue
        assert set(refused(*words)) == {words[-1].split("=", 1)[0]}


def test_a_base_that_lies_here_is_compared_before_the_queue(
    recipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, recipe = tmp_path / "base", recipes / "tiny-oasst2" / "recipe.yaml"
    recipe.with_name("conversations.jsonl").touch()
    recipe.write_text(recipe.read_text().replace("weights: random", f"path: {base}"))
    base.mkdir()
    config = json.loads((recipes / "tiny-oasst2" / "model.json").read_text())
    (base / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<pad>": 0, "<eos>": 1}}}))
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(base)
    right = ["train.pad_token=<pad>", "train.eos_token=<eos>"]
    for change, given, key in (
        ({}, right, None),
        ({"num_hidden_layers": 5}, right, "model.json"),
        ({"text_config": config | {"hidden_size": 4096}}, right, "4096"),
    ):
        (base / "config.json").write_text(json.dumps(config | change))
        done = CliRunner().invoke(app, ["submit", str(recipe.parent), "--dry-run", *given])
        error = done.exception
        refusal = isinstance(error, UserError) and error.code == 2 and str(key) in str(error)
        assert refusal if key else done.exit_code == 0, (error, done.output)
    (base / "config.json").write_text(json.dumps(config))
    (base / "model.safetensors").write_bytes(bytes(8))
    words = ["submit", str(recipe.parent), "--dry-run", *right]
    assert "is not a whole" in str(CliRunner().invoke(app, words).exception)
    monkeypatch.setattr(base_weights, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, words)  # from a login node without the stack
    assert done.exit_code == 0 and "not compared with config.json here" in " ".join(done.output.split())


def test_scores_of_tasks_that_are_not_evaluated() -> None:
    """A mistyped task or metric; the parts of a group and tasks of other names are lm-eval's to know."""
    for override, message in (
        ("eval.pass_mark={ifevla: {prompt_level_strict_acc: 0.5}}", "did you mean ifeval"),
        ("eval.pass_mark={ifeval: {prompt_strict_acc: 0.5, x: 0.5}}", "no such metric"),
        ("expect.tasks={ifeval: {prompt_level_strct_acc: 0.5}}", "did you mean prompt_level_strict_acc"),
    ):
        with pytest.raises(UserError, match=message):
            resolve("tiny-oasst2", [override])
    resolve("tiny-oasst2", ["eval.tasks=[mmlu]", "eval.pass_mark={mmlu_law: {acc: 0.5}, gsm8k: {exact_match: 0.5}}"])


# --- preferences -----------------------------------------------------------------------------------------------------------

OF_DPO = {
    "packing": "true", "completion_only_loss": "true", "padding_free": "true", "precompute_ref_log_probs": "true",
    "sync_ref_model": "true", "label_smoothing_factor": "0.1", "truncation_mode": "keep_end", "beta": "0", "ld_alpha": "1.5",
}  # fmt: skip
"""Key of ``train`` -> value."""


def test_what_is_not_carried_of_preferences_is_refused() -> None:
    for key, value in OF_DPO.items():
        assert list(refused(f"train.{key}={value}", recipe="tiny-dpo")) == [f"train.{key}"]


def test_the_plan_counts_both_answers_and_the_reference() -> None:
    """Of full training a second model in the type that it is loaded in, sharded; of LoRA none, and a second forward pass."""

    def plan(*more: str) -> dict[str, float]:
        words = ("slurm.nodes=4", "train.per_device_train_batch_size=1", "accelerate.fsdp_config.fsdp_offload_params=false")
        done = run("plan", "llama70b-fsdp2", *words, *more, "--gpus", "4x8xh200-sxm", "--json")
        assert done.code == 0, done.err
        body = json.loads(done.out)
        return {**body["memory_parts_gib"], "compute": body["step_parts_s"]["compute"], "tokens": body["prepare_tokens"]}

    one, pairs = plan("train.packing=false"), plan(*PAIRS)
    assert pairs["tokens"] == 2 * one["tokens"]
    # float32 (nothing else is said there) over 32 ranks, and the head that stays gathered.
    assert "reference" not in one and 70.6e9 * 4 / 32 / 2**30 < pairs["reference"] < 1.3 * 70.6e9 * 4 / 32 / 2**30
    # A forward pass of three beside backward and recomputation: 5 of each of two sequences for 4 of one.
    assert 2.2 < pairs["compute"] / one["compute"] < 3
    lora = ["lora={target_modules: [q_proj]}", "train.model_init_kwargs.dtype=bfloat16"]
    adapter, alone = plan(*PAIRS, *lora), plan("train.packing=false", *lora)
    assert "reference" not in adapter and 2.2 < adapter["compute"] / alone["compute"] < 3.2
