"""A base that is quantised already is refused where the strategy would part it, before its weights are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clustertune.errors import ExitCode, UserError
from clustertune.resolve.resolve import resolve
from clustertune.training import base_model
from tests.training.benches import ONE, STRATEGIES, fsdp

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FLOATING = {**FOUR, "bnb_4bit_quant_storage": "bfloat16"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}
FSDP2, FSDP1, TP = fsdp(), fsdp(ONE), fsdp(tp=2)
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
    recipe = plain.recipe.model_copy(update={"lora": {"r": 4} if lora else None})
    return replace(plain, accelerate=accelerate, deepspeed=None, train_args=train_args or {}, recipe=recipe)


@pytest.mark.parametrize(
    ("stored", "accelerate", "message", "more"),
    [
        # What every rank has whole or FSDP can part is taken. transformers trains adapters over FP8 where nobody casts it.
        *((stored, way, None, {}) for stored, way in [
            (None, FSDP2), (None, TP), (None, ALONE), (FLOATING, FSDP2), (FOUR, DDP), (FOUR, zero(3)), (FP8, DDP), (FP8, ALONE),
            (FP8, zero(2)),
        ]),
        # Qwen/Qwen3-8B-FP8 and its like; what transformers does not know it would load as it is, without the scales.
        (FP8, FSDP2, "fp8 weights: FSDP casts or splits them without their scales", {}),
        (FP8, FSDP1, "fp8 weights: FSDP casts", {}),
        (FP8, TP, "fp8 weights: tensor parallelism casts", {}),
        (FP8, zero(3), "fp8 weights: DeepSpeed ZeRO-3 casts", {}),
        (EIGHT, FSDP2, "bitsandbytes weights: FSDP casts", {}),
        (FLOATING, TP, "bitsandbytes weights: tensor parallelism casts", {}),
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


def test_a_base_of_the_hub_is_asked_for_its_config_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By revision; one that is not available is left to transformers, which says why."""
    from transformers import utils

    file, calls = tmp_path / "config.json", []
    file.write_text(json.dumps({"quantization_config": FP8}))

    def cached(source: str, name: str, revision: str | None) -> str:
        calls.append((source, name, revision))
        if source == "org/gone":
            raise OSError("no such model")
        return str(file)

    monkeypatch.setattr(utils, "cached_file", cached)
    base_model.check("org/gone", "abc", resolved(FSDP2))
    with pytest.raises(UserError, match="fp8 weights: FSDP"):
        base_model.check("org/there", "abc", resolved(FSDP2))
    assert calls == [("org/gone", "config.json", "abc"), ("org/there", "config.json", "abc")]


@pytest.mark.parametrize("storage", ["bfloat16", "float16", "float32"])
def test_a_cast_loses_what_is_packed_in_another_type(storage: str) -> None:
    """What the refusal rests on: bitsandbytes' own layer before and after the cast that FSDP and DeepSpeed do."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="the package bitsandbytes")
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", quant_storage=getattr(torch, storage))
    cast = packed.to(torch.bfloat16).to(packed.dtype)
    assert torch.equal(functional.dequantize_4bit(cast, state), functional.dequantize_4bit(packed, state)) is (
        storage == "bfloat16"
    )
