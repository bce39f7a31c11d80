"""Sections that say how a training is spread: recomputation by a ratio, a quantised base, Megatron."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from clustertune.config import show
from clustertune.config.distribution import recomputed_layers
from clustertune.config.megatron import NOT_STARTED
from clustertune.config.resolve import resolve
from tests.command import run
from tests.config.conftest import Refuse

RECIPE = "llama405b-oasst2"
OFF = "accelerate.fsdp_config.fsdp_activation_checkpointing=false"
QUANTIZED = "train.model_init_kwargs.quantization_config"


def test_the_chosen_layers_are_spread_evenly() -> None:
    """As transformers' every_n_layers chooses them where the ratio is 1 / n; gaps differ by one at most."""
    known: dict[tuple[float, int], tuple[int, ...]] = {(0, 4): (), (1, 4): (0, 1, 2, 3), (0.5, 8): (0, 2, 4, 6)}
    known |= {(0.25, 8): (0, 4), (0.5, 2): (0,), (0.1, 10): (0,)}
    assert {given: recomputed_layers(*given) for given in known} == known
    for layers, tenths in itertools.product((1, 2, 7, 32, 126), range(1, 10)):
        gaps = [after - before for before, after in itertools.pairwise((*recomputed_layers(tenths / 10, layers), layers))]
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_ratio_says_alone_which_layers_are_recomputed(refused: Refuse) -> None:
    ratio = "activation_checkpointing.ratio=0.5"
    assert "twice" in refused(RECIPE, [ratio])[0].message
    for other in ("train.activation_checkpointing=true", "train.activation_checkpointing_kwargs={every_n_layers: 2}"):
        assert "twice" in refused(RECIPE, [ratio, OFF, other])[0].message
    assert refused(RECIPE, [OFF, "activation_checkpointing.ratio=1.5"])
    resolved = resolve(RECIPE, [ratio, OFF])
    assert resolved.train_args["activation_checkpointing"] is True
    assert resolve(RECIPE, ["activation_checkpointing.ratio=0", OFF]).train_args["activation_checkpointing"] is False
    values = show.as_json(resolved)["values"]
    assert values["activation_checkpointing.ratio"] == {"value": 0.5, "origin": "override"}
    assert "63 of 126 layers" in values["train.activation_checkpointing"]["origin"]


def test_recipes_without_these_sections_keep_their_fingerprint() -> None:
    """It names the run folder: a new release must find the runs of the last."""
    plain = resolve(RECIPE)
    assert plain.fingerprint() == resolve(RECIPE, ["activation_checkpointing=null", "megatron=null"]).fingerprint()
    assert plain.fingerprint() != resolve(RECIPE, ["megatron.tensor_model_parallel_size=8"]).fingerprint()


@pytest.mark.parametrize(
    ("words", "key", "says"),
    [
        ("nf4", "", "not a mapping"),
        ("{quant_method: bitsandbyte}", ".quant_method", "did you mean bitsandbytes?"),
        ("{load_in_4bit: true, load_in_8bit: true}", "", "one of"),
        ("{load_in_4bit: 1}", ".load_in_4bit", "is not one of true, false"),
        ("{load_in_4bit: true, bnb_4bit_quant_typ: nf4}", ".bnb_4bit_quant_typ", "bnb_4bit_quant_type"),
        ("{load_in_4bit: true, bnb_4bit_quant_type: int4}", ".bnb_4bit_quant_type", "nf4"),
    ],
)
def test_a_quantisation_is_checked(refused: Refuse, words: str, key: str, says: str) -> None:
    found = next(p for p in refused(RECIPE, [f"{QUANTIZED}={words}"]) if p.key == f"{QUANTIZED}{key}")
    assert says in str(found)
    frozen = refused(RECIPE, [f"{QUANTIZED}={{load_in_4bit: true}}", "lora=null"])
    assert any("cannot be trained" in problem.message for problem in frozen)


def test_every_size_that_does_not_divide_is_told_at_once(refused: Refuse) -> None:
    words = [
        "megatron.tensor_model_parallel_size=3", "megatron.pipeline_model_parallel_size=4",
        "megatron.virtual_pipeline_model_parallel_size=2", "megatron.expert_model_parallel_size=2",
        "megatron.sequence_parallel=true", "train.activation_checkpointing=true",
    ]  # fmt: skip
    text = "\n".join(map(str, refused(RECIPE, words)))
    for says in (
        "does not divide 16 ranks", "126 layers are not a multiple of 8 stages", "128 num_attention_heads",
        "8 num_key_value_heads", "intermediate_size 53248", "the model has no experts", "not a multiple of 3",
        "Megatron does not read it",
    ):  # fmt: skip
        assert says in text, text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["megatron.virtual_pipeline_model_parallel_size=2"], "there is no pipeline"),
        (["megatron.sequence_parallel=true"], "tensor_model_parallel_size is 1"),
        (["megatron.context_parallel_size=2", "train.max_length=2046"], "not a multiple of 4"),
        (["megatron.tensor_model_parallel_sise=2"], "did you mean tensor_model_parallel_size?"),
        (["megatron.fp8=e5m2"], "e4m3"),
    ],
)
def test_what_megatron_refuses(refused: Refuse, words: list[str], says: str) -> None:
    assert any(says in str(problem) for problem in refused(RECIPE, words))


def test_a_megatron_recipe_needs_no_accelerate_file(recipes: Path) -> None:
    folder = recipes / RECIPE
    (folder / "accelerate.yaml").unlink()
    words = ["megatron.tensor_model_parallel_size=8", "megatron.pipeline_model_parallel_size=2"]
    resolved = resolve(folder, words)
    assert (resolved.data_parallel_size, resolved.train_args["gradient_accumulation_steps"]) == (1, 32)
    assert show.as_json(resolved)["values"]["megatron.pipeline_model_parallel_size"]["value"] == 2


@pytest.mark.parametrize("command", [["run", "--dry-run"], ["sky"]])
def test_only_slurms_launcher_starts_it(command: list[str], tmp_path: Path) -> None:
    """The others know one image, and it is not NVIDIA's: tests/megatron/test_submit.py has the one that does."""
    done = run(command[0], RECIPE, "megatron.tensor_model_parallel_size=8", *command[1:], cwd=tmp_path)
    assert done.code == 2 and NOT_STARTED in done.err and not list(tmp_path.iterdir())
