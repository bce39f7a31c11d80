"""``activation_checkpointing`` and the kernels' keys: what is refused before the queue, each with file, key and what to do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertune.config import kernels
from clustertune.config.resolve import resolve
from clustertune.errors import UserError
from tests.command import REPO

RECIPE = "recipes/tiny-oasst2"
OFF = "accelerate.fsdp_config.fsdp_activation_checkpointing=false"
OWN = "activation_checkpointing"
SAVE = f"{OWN}.save=[attention,every_second_matmul]"
KERNEL = "train.model_init_kwargs.attn_implementation"
EAGER = f"{KERNEL}=eager"
INDUCTOR = "accelerate.dynamo_config={dynamo_backend: INDUCTOR}"


def refused(*words: str) -> dict[str, str]:
    """What is said about each key; nothing where the recipe is taken."""
    try:
        resolve(RECIPE, list(words))
    except UserError as error:
        return {str(problem.key): f"{problem.message} | {problem.fix}" for problem in error.problems}
    return {}


@pytest.mark.parametrize(
    ("words", "key", "text"),
    [
        ([OFF, f"{OWN}={{}}"], OWN, "neither ratio nor save"), ([OFF, f"{OWN}.save=[]"], f"{OWN}.save", ""),
        ([OFF, f"{OWN}.save=[scores]"], f"{OWN}.save.0", "attention"),
        ([OFF, f"{OWN}.save=[matmul,matmul]"], f"{OWN}.save", "twice"),
        ([OFF, f"{OWN}.save=[matmul,every_second_matmul]"], f"{OWN}.save", "one of the two"),
        ([OFF, SAVE, f"{OWN}.ratio=0"], f"{OWN}.save", "recomputes nothing"), ([OFF, SAVE, EAGER], f"{OWN}.save", "sdpa"),
        ([SAVE], f"{OWN}.save", "given twice"), ([f"{OWN}.ratio=0.5"], f"{OWN}.ratio", "given twice"),
        ([OFF, SAVE, f"train.{OWN}=true"], f"train.{OWN}", "given twice"),
        ([OFF, SAVE, "train.gradient_checkpointing=true"], "train.gradient_checkpointing", "given twice"),
        ([OFF, SAVE, f"train.{OWN}_kwargs={{selective: true}}"], f"train.{OWN}_kwargs.selective", "TRL's name"),
        ([OFF, SAVE, f"train.{OWN}_kwargs={{use_reentrant: true}}"], f"train.{OWN}_kwargs.use_reentrant", "reentrant"),
        (["train.liger_kernel_config={fused_linear_cross_entropy: true}"], "train.liger_kernel_config", "in tiles"),
        ([f"{KERNEL}=flash_attention_2", "train.bf16=false"], KERNEL, "16 bits"),
        (["train.torch_compile_backend=eager", INDUCTOR], "train.torch_compile_backend", "is not read"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(words: list[str], key: str, text: str) -> None:
    """Every second home of the same decision, and every policy that would keep nothing, is an error before the queue."""
    found = refused(*words)
    assert key in found and text in found[key], found


def test_every_problem_of_the_section_is_told_at_once() -> None:
    """A person fixes a file once, not once for each mistake in it."""
    words = ["activation_checkpointing.save=[matmul,matmul,every_second_matmul]", "activation_checkpointing.ratio=0"]
    with pytest.raises(UserError) as caught:
        resolve(RECIPE, [*words, "train.activation_checkpointing=true"])
    assert len(caught.value.problems) == 5


def test_what_is_taken() -> None:
    """``save`` alone means all layers; a recipe without it keeps its fingerprint, and with it its run folder."""
    found = resolve(RECIPE, [OFF, SAVE])
    assert found.recipe.activation_checkpointing is not None and found.recipe.activation_checkpointing.ratio == 1
    assert found.train_args["activation_checkpointing"] is True
    reason = next(item.reason for item in found.derived if item.key == "train.activation_checkpointing")
    assert "4 of 4 layers; of them attention, every_second_matmul kept" in reason
    ratio = [OFF, "activation_checkpointing.ratio=0.5"]
    assert resolve(RECIPE, ratio).fingerprint() != resolve(RECIPE, [*ratio, SAVE]).fingerprint()
    assert resolve(RECIPE, ratio).fingerprint() == resolve(RECIPE, [*ratio, "activation_checkpointing.save=null"]).fingerprint()
    assert not refused("train.torch_compile=true", INDUCTOR)


def test_a_model_that_liger_does_not_know_is_told(tmp_path: Path) -> None:
    """transformers trains such a model without the kernels, and says so in the log only."""
    folder = tmp_path / "own"
    folder.mkdir()
    for path in (REPO / RECIPE).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    body = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(body | {"model_type": "ernie4_5", "architectures": ["Ernie4_5ForCausalLM"]}))
    with pytest.raises(UserError) as caught:
        resolve(str(folder), ["train.use_liger_kernel=true"])
    assert any("Liger has no kernels for ernie4_5" in problem.message for problem in caught.value.problems)
    assert not refused("train.use_liger_kernel=true")


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
    found = replace(resolve(RECIPE), train_args=train, accelerate={"dynamo_config": dynamo})
    assert (found.distribution.compiled, found.distribution.compiled_by_layer) == expected
    warnings = " ".join(kernels.warnings(found.distribution))
    assert ("as a whole" in warnings) == (expected == (True, False)), "a start of minutes"


def test_a_wrapper_that_keeps_layers_from_the_compiler_is_told() -> None:
    """Found by torch's log of graph breaks, and by dropout that draws what it draws uncompiled: docs/results/dropout.md."""
    for words, expected in (([], True), ([OFF, "activation_checkpointing.ratio=0.5"], False), ([OFF], False)):
        spread = replace(resolve(RECIPE, words).distribution, compiled=True, compiled_by_layer=True)
        warnings = " ".join(kernels.warnings(spread))
        assert ("leaves the layers uncompiled" in warnings) == expected


def test_packages_are_asked_for_where_there_are_gpus_only() -> None:
    """A laptop trains with sdpa and without Liger, and needs neither package."""
    train = {"use_liger_kernel": True, "model_init_kwargs": {"attn_implementation": "flash_attention_2"}}
    assert not list(kernels.needed(train, gpus=False))
    found = {key: packages for key, _, packages in kernels.needed(train, gpus=True)}
    assert found["train.use_liger_kernel"] == ("liger-kernel",)
    assert found["train.model_init_kwargs.attn_implementation"] == ("flash-attn", "kernels")
