"""What training refuses before its first step: EOS as padding, labels without it, another run, a quantised base."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertune.data import tokenizer as tokens
from clustertune.errors import ExitCode, UserError
from clustertune.recipe.native_rules import train_defaults
from clustertune.resolve.resolve import resolve
from clustertune.training import base_model, sharding
from tests.damage import refused
from tests.training.benches import STRATEGIES, fsdp


class FakeTokenizer:
    def __init__(self, pad: str | None, *extra: str) -> None:
        self.pad_token, self.eos_token = pad, "</s>"
        self._vocabulary = {name: i for i, name in enumerate({"</s>", *extra, *([pad] if pad else [])})}

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary


@pytest.mark.parametrize(
    ("tokenizer", "wanted", "chosen"),
    [
        (FakeTokenizer("<own>"), None, "<own>"),
        (FakeTokenizer(None, "<|finetune_right_pad_id|>"), None, "<|finetune_right_pad_id|>"),
        (FakeTokenizer("</s>", "<unk>"), None, "<unk>"),
        (FakeTokenizer("<own>", "<two>"), "<two>", "<two>"),
        (FakeTokenizer("<own>"), "</s>", "</s>"),
        (FakeTokenizer("<own>"), "<absent>", r"!train\.pad_token"),
        (FakeTokenizer("</s>"), None, "</s>"),
        (FakeTokenizer(None), None, "</s>"),
    ],
)
def test_padding_is_eos_where_there_is_no_other_token(tokenizer: FakeTokenizer, wanted: str | None, chosen: str) -> None:
    """The token that is chosen, or behind ``!`` why none is."""
    if not chosen.startswith("!"):
        assert tokens.choose_pad_token(tokenizer, wanted) == chosen
        return
    with pytest.raises(UserError, match=chosen[1:]):
        tokens.choose_pad_token(tokenizer, wanted)


FSDP2, OFFLOADED = fsdp(), fsdp({"fsdp_offload_params": True})
TP, CP, HSDP = fsdp(dp_shard=2, tp=2), fsdp(dp_shard=2, cp=2), fsdp(dp_replicate=2, dp_shard=2)
ROWS = {"placements": {"dp_shard: shard 0": 9}}
SPLIT = {f"dp_shard_cp: shard 0, tp: {how}": n for how, n in (("shard 0", 80), ("shard 1", 15), ("replicate", 5))}
COPIED = {"dp_replicate: replicate, dp_shard_cp: shard 0": 9}


@pytest.mark.parametrize(
    ("given", "right", "wrong", "message"),
    [
        (FSDP2, {}, {"type": "MULTI_CPU", "version": None, "sharded_share": 1.0}, "asks for FSDP"),
        (FSDP2, {}, {"type": "NO", "world_size": 1, "version": None, "sharded_share": 1.0}, "1 ranks are connected"),
        (FSDP2, {}, {"version": 1}, "FSDP1, the file asks for FSDP2"),
        (FSDP2, {}, {"sharded_share": 1.0}, "holds 100% of the parameters"),
        (TP, {"placements": SPLIT}, {"placements": {"dp_shard_cp: shard 0, tp: replicate": 100}}, "splits 0%"),
        (TP, {"placements": SPLIT}, {"mesh": {"dp_shard": 4}}, "the mesh is dp_shard 4, the file asks for"),
        (CP, {"attention": "clustertune_context"}, {"attention": "sdpa"}, "the model calls sdpa attention"),
        (FSDP2, ROWS, {"placements": {**ROWS["placements"], "whole": 1}}, "lie as 'whole'"),
        (HSDP, {"placements": COPIED, "replicas": "equal", "sharded_share": 0.5}, {"replicas": "different"}, "different ones"),
        (OFFLOADED, {**ROWS, "offloaded": 1.0}, {"offloaded": 0.0}, "0% of the parameters are kept"),
        (FSDP2, ROWS, {"offloaded": 1.0}, "100% of the parameters are kept"),
    ],
)
def test_parameters_lie_where_the_recipe_says(
    given: dict[str, Any], right: dict[str, Any], wrong: dict[str, Any], message: str
) -> None:
    """Each strategy's own mark: found, the run continues; a fallback or another one, it ends before the first step."""
    wanted = replace(resolve("tiny-oasst2", ranks=4), accelerate=given).distribution
    base = {"type": "FSDP", "version": 2, "world_size": 4, "mesh": wanted.mesh or {"dp_shard": 4}, "backend": "gloo"}
    base |= {"device": "cpu", "sharded_share": 0.25, **right}
    sharding.check(sharding.FoundSharding(**base), wanted)
    with refused(message, ExitCode.FAILED):
        sharding.check(sharding.FoundSharding(**{**base, **wrong}), wanted)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FLOATING = {**FOUR, "bnb_4bit_quant_storage": "bfloat16"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}
TP_ALL = fsdp(tp=2)
DDP, ALONE = STRATEGIES["ddp"][1], STRATEGIES["alone"][1]


def zero(stage: int) -> dict[str, Any]:
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage}}


def check(
    folder: Path, stored: Any, accelerate: dict[str, Any], wanted: Any = None, *, lora: bool = True, part: str | None = None
) -> None:
    """As a rank does it, of a base whose config.json holds ``stored`` (in its section ``part``)."""
    body = {"model_type": "llama", "quantization_config": stored}
    (folder / "config.json").write_text(json.dumps({"model_type": "outer", part: body} if part else body))
    train = {"model_init_kwargs": {"quantization_config": wanted}} if wanted else {}
    base_model.check(str(folder), None, resolved(accelerate, lora=lora, train_args=train))


def resolved(accelerate: dict[str, Any], *, lora: bool = True, train_args: Any = None) -> Any:
    plain = resolve("tiny-oasst2")
    train = train_defaults() | (train_args or {})
    return replace(plain, accelerate=accelerate, deepspeed=None, train_args=train, lora=plain.lora if lora else None)


@pytest.mark.parametrize(
    ("stored", "accelerate", "message", "more"),
    [
        # What every rank has whole or FSDP can part is taken. transformers trains adapters over FP8 where nobody casts it.
        *((stored, way, None, {}) for stored, way in [
            (None, FSDP2), (None, TP_ALL), (None, ALONE), (FLOATING, FSDP2), (FOUR, DDP), (FOUR, zero(3)), (FP8, DDP),
            (FP8, ALONE), (FP8, zero(2)),
        ]),
        # Qwen/Qwen3-8B-FP8 and its like; what transformers does not know it would load as it is, without the scales.
        (FP8, FSDP2, "fp8 weights: FSDP casts or splits them without their scales", {}),
        (FP8, TP_ALL, "fp8 weights: tensor parallelism casts", {}),
        (FP8, zero(3), "fp8 weights: DeepSpeed ZeRO-3 casts", {}),
        (EIGHT, FSDP2, "bitsandbytes weights: FSDP casts", {}),
        (FLOATING, TP_ALL, "bitsandbytes weights: tensor parallelism casts", {}),
        (FOUR, FSDP2, "bnb_4bit_quant_storage is uint8", {}),
        ({**FOUR, "bnb_4bit_quant_storage": "float16"}, FSDP2, "float16: with train.bf16 FSDP casts it to bfloat16", {}),
        ({**FOUR, "bnb_4bit_quant_storage": "float32"}, zero(3), "float32: with train.bf16 DeepSpeed casts it", {}),
        ({"quant_method": "mxfp4"}, DDP, "transformers does not train over mxfp4 weights", {}),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ALONE, "does not load modelopt weights", {}),
        # transformers ends with a traceback about classes for the first, and late for the second.
        (FP8, ALONE, r"quantised already \(fp8\), the recipe asks for bitsandbytes", {"wanted": FLOATING}),
        (FP8, ALONE, "there is no lora section", {"lora": False}),
        (FP8, FSDP2, "fp8 weights: FSDP casts", {"part": "text_config"}),
        # The recipe's own quantisation of a base that is not quantised: an older run folder may ask for it.
        (None, FSDP2, None, {"wanted": FLOATING}),
        (None, FSDP2, "fp8 weights: FSDP casts", {"wanted": {"quant_method": "fp8"}}),
    ],
)  # fmt: skip
def test_a_base_is_taken_or_refused_by_the_file_that_says_so(
    tmp_path: Path, stored: Any, accelerate: dict[str, Any], message: str | None, more: dict[str, Any]
) -> None:
    if message is None:
        check(tmp_path, stored, accelerate, **more)
        return
    with pytest.raises(UserError, match=message) as caught:
        check(tmp_path, stored, accelerate, **more)
    [problem] = caught.value.problems
    by_file = (str(tmp_path / "config.json"), "quantization_config")
    assert (problem.file, problem.key) == (by_file if stored else (None, base_model.RECIPE_KEY))
    assert caught.value.code is ExitCode.CONFIG and "not quantised" in (problem.fix or "")
