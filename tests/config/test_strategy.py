"""What a strategy does not carry is refused before the queue, with the key, the reason and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from clustertune.config import accelerate_file as acc
from clustertune.config import strategy
from clustertune.config.modeling import parallel_plans
from clustertune.config.resolve import resolve
from clustertune.errors import UserError
from tests.command import REPO
from tests.conftest import TINY_LLAMA

TINY = REPO / "recipes" / "tiny-oasst2"
TP = "accelerate.parallelism_config.parallelism_config_tp_size=2"
CP = "accelerate.parallelism_config.parallelism_config_cp_size=2"
NOT_PACKED = "train.packing=false"
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
    ("given", "said"),
    [
        (["accelerate.parallelism_config.parallelism_config_sp_size=2"], "Ulysses, which FSDP does not run"),
        (
            [TP, "accelerate.distributed_type=MULTI_GPU", "accelerate.fsdp_config=null"],
            "only FSDP2 is combined with it here",
        ),
        ([TP, BASE_4BIT], "quantised weights are not split over tp"),
        ([BASE_4BIT], "FSDP2 would keep the whole base on every rank"),
        ([TP, "lora.modules_to_save=[norm]"], "whole modules are not trained beside an adapter"),
        ([TP, "lora.target_modules=[q_proj, lm_head]"], "lm_head takes no adapter"),
        ([TP, "train.torch_compile=true"], "not proved together with tensor parallelism"),
        ([TP.replace("=2", "=4")], "4 does not divide num_key_value_heads, 2"),
        ([CP, NOT_PACKED, "train.model_init_kwargs.attn_implementation=eager"], "has an attention of its own"),
        ([CP, NOT_PACKED, "train.label_smoothing_factor=0.1"], "smooths unshifted labels"),
        ([CP, NOT_PACKED, "train.padding_free=true"], "joins the sequences of a batch"),
        ([CP], "drops what keeps packed conversations apart"),
    ],
)
def test_what_it_does_not_carry_is_refused(given: list[str], said: str) -> None:
    """Each with a sentence of its own; without the check the job would fail on its nodes, or train something else."""
    assert said in refused(*given)


def look(architecture: dict[str, Any], **sizes: int) -> list[str]:
    accelerate = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": {}}
    for axis, size in sizes.items():
        accelerate["parallelism_config"][f"parallelism_config_{axis}_size"] = size  # type: ignore[index]
    found = strategy.find_problems({"max_length": 64}, None, accelerate, architecture, "accelerate.yaml", ".".join)
    return [problem.message for problem in found]


@pytest.mark.parametrize(
    ("changes", "sizes", "said"),
    [
        ({"model_type": "gpt2"}, {"tp": 2}, "transformers has no tensor-parallel plan for gpt2"),
        ({"model_type": "deepseek_v2"}, {"tp": 2}, "which is not carried out here"),
        ({"model_type": "mixtral", "num_local_experts": 3}, {"tp": 2}, "2 does not divide num_local_experts, 3"),
        ({"intermediate_size": 33}, {"tp": 2}, "2 does not divide intermediate_size, 33"),
        ({"sliding_window": 32}, {"cp": 2}, "attends to 32 tokens back and max_length is 64"),
        ({"layer_types": ["full_attention", "linear_attention"]}, {"cp": 2}, "layers of linear_attention"),
    ],
)
def test_the_model_decides_too(changes: dict[str, Any], sizes: dict[str, int], said: str) -> None:
    """The same by the architecture alone; the model itself without the change is carried."""
    assert look(TINY_LLAMA, **sizes) == []
    assert any(said in message for message in look({**TINY_LLAMA, **changes}, **sizes))


@pytest.mark.parametrize("change", [{"sliding_window": 64}, {"sliding_window": 32, "use_sliding_window": False}])
def test_a_window_that_no_sequence_leaves_is_no_obstacle(change: dict[str, Any]) -> None:
    """Mistral's window of 4096 with sequences of 2048 is causal attention."""
    assert look({**TINY_LLAMA, **change}, cp=2) == []


def test_the_styles_are_those_that_the_training_carries_out() -> None:
    """One list is the other's check: a style added to one alone would be refused here or fail there."""
    from clustertune.training import tensor

    assert set(tensor.STYLES) == strategy.TP_STYLES
    assert {tensor.EXPERTS, tensor.EXPERT_WEIGHTS} == strategy.EP_STYLES
    dense, experts = parallel_plans("mixtral")
    assert dense["layers.*.self_attn.q_proj"] == "colwise" and experts["layers.*.mlp.experts"] == "ep_dispatch_experts"
    assert acc.parallel_sizes({"parallelism_config": {"parallelism_config_tp_size": 2}}) == {"tp": 2}
