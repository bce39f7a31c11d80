"""``plan --largest``: what it names fits, and twice as much does not."""

from __future__ import annotations

from tests.plan.test_command import answer, call, refused

ALONE = ("activation_checkpointing.ratio=1", "train.per_device_eval_batch_size=1")


def test_the_longest_sequences_and_the_largest_micro_batch() -> None:
    """Of one model: each size fits as a plan of its own, and twice that does not, or is more than the model has."""
    words = ("--model", "Qwen/Qwen3-8B", "--gpus", "1x1xl40s", "--method", "qlora")
    found = answer(*words, "--largest")
    small = "train.per_device_train_batch_size=1"
    assert answer(*words, *ALONE, small, f"train.max_length={found['max_length']}")["fits"]
    if 2 * found["max_length"] <= 40960:
        assert not answer(*words, *ALONE, small, f"train.max_length={2 * found['max_length']}", code=2)["fits"]
    rows = found["micro_batch"]
    batch = f"train.global_batch_size={4 * rows}"
    assert answer(*words, *ALONE, batch, f"train.per_device_train_batch_size={rows}")["fits"]
    assert not answer(*words, *ALONE, batch, f"train.per_device_train_batch_size={2 * rows}", code=2)["fits"]


def test_the_largest_model() -> None:
    """More GPUs hold one that is no smaller; a small one none of 8B trained whole."""
    one, eight = (answer("--largest", "--gpus", f"1x{gpus}xh100-sxm") for gpus in (1, 8))
    assert one["parameters"] <= eight["parameters"] and one["needed_gib_per_gpu"] < one["usable_gib_per_gpu"]
    assert call("--largest", "--model", "Qwen/Qwen2.5-72B", "--gpus", "1x1xl4").exit_code == 2
    assert "--largest" in refused("some-recipe", "--largest")
