"""What training refuses before its first step: EOS as padding, labels without EOS, a run that is not what was asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertune.data import tokenizer as tokens
from clustertune.errors import ExitCode, UserError
from clustertune.resolve.distribution import Distribution, mixed_precision
from clustertune.resolve.resolve import resolve
from clustertune.training import build, packing, sharding
from clustertune.training.events import EventLog
from tests.command import REPO
from tests.conftest import TINY_LLAMA


class FakeTokenizer:
    def __init__(self, pad: str | None, eos: str = "</s>", extra: tuple[str, ...] = ()) -> None:
        self.pad_token, self.eos_token = pad, eos
        self._vocabulary = {name: i for i, name in enumerate({eos, *extra, *([pad] if pad else [])})}

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary


@pytest.mark.parametrize(
    ("tokenizer", "wanted", "chosen"),
    [
        (FakeTokenizer("<own>"), None, "<own>"),
        (FakeTokenizer(None, extra=("<|finetune_right_pad_id|>",)), None, "<|finetune_right_pad_id|>"),
        (FakeTokenizer("</s>", extra=("<unk>",)), None, "<unk>"),
        (FakeTokenizer("<own>", extra=("<two>",)), "<two>", "<two>"),
    ],
)
def test_padding_is_never_eos(tokenizer: FakeTokenizer, wanted: str | None, chosen: str) -> None:
    assert tokens.choose_pad_token(tokenizer, wanted) == chosen


@pytest.mark.parametrize("wanted", ["</s>", "<absent>"])
def test_a_padding_token_that_is_eos_or_absent_is_refused(wanted: str) -> None:
    with pytest.raises(UserError, match=r"train\.pad_token"):
        tokens.choose_pad_token(FakeTokenizer("<own>"), wanted)


def test_a_tokenizer_with_nothing_but_eos_is_refused() -> None:
    with pytest.raises(UserError, match="never learn to stop"):
        tokens.choose_pad_token(FakeTokenizer("</s>"), None)


def test_labels_without_eos_are_refused() -> None:
    tokens.check_labels([{"input_ids": [1, 2, 9], "labels": [-100, 2, 9]}], {9})
    with pytest.raises(UserError, match="never learn to stop"):
        tokens.check_labels([{"input_ids": [1, 2, 9], "labels": [1, 2, -100]}], {9})
    with pytest.raises(UserError, match="nothing to learn"):
        tokens.check_labels([{"input_ids": [1, 9], "labels": [-100, -100]}], {9})


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral"])
def test_the_check_of_packing_leaves_the_random_state(model_type: str) -> None:
    import torch

    before = torch.get_rng_state()
    assert packing.is_isolated({**TINY_LLAMA, "model_type": model_type}, "sdpa")
    assert torch.equal(before, torch.get_rng_state())


def found(**changes: Any) -> sharding.FoundSharding:
    values = {"type": "FSDP", "version": 2, "world_size": 2, "mesh": {"dp_shard": 2}, "backend": "gloo", "device": "cpu"}
    values |= {"sharded_share": 0.5}
    return sharding.FoundSharding(**{**values, **changes})


WANTED = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}


def distribution(accelerate: dict[str, Any], ranks: int) -> Distribution:
    """What a recipe with this accelerate file resolves to."""
    return replace(resolve("tiny-oasst2", ranks=ranks), accelerate=accelerate).distribution


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "MULTI_CPU", "version": None, "sharded_share": 1.0}, "asks for FSDP"),
        ({"type": "NO", "world_size": 1, "version": None, "sharded_share": 1.0}, "1 ranks are connected"),
        ({"version": 1}, "FSDP1, the file asks for FSDP2"),
        ({"sharded_share": 1.0}, "holds 100% of the parameters"),
    ],
)
def test_a_silent_fallback_is_loud(changes: dict[str, Any], message: str) -> None:
    sharding.check(found(), distribution(WANTED, 2))
    with pytest.raises(UserError, match=message) as caught:
        sharding.check(found(**changes), distribution(WANTED, 2))
    assert caught.value.code is ExitCode.FAILED


def meshed(**sizes: int) -> dict[str, Any]:
    return {**WANTED, "parallelism_config": {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}}


ROWS, COPIED, CONTEXT = {"dp_shard: shard 0": 9}, {"dp_replicate: replicate, dp_shard_cp: shard 0": 9}, "clustertune_context"
SPLIT = {
    "dp_shard_cp: shard 0, tp: shard 0": 80,
    "dp_shard_cp: shard 0, tp: shard 1": 15,
    "dp_shard_cp: shard 0, tp: replicate": 5,
}
TP = meshed(dp_shard=2, tp=2)
OFFLOADED = {**WANTED, "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}}


@pytest.mark.parametrize(
    ("given", "right", "wrong", "message"),
    [
        (TP, {"placements": SPLIT}, {"placements": {"dp_shard_cp: shard 0, tp: replicate": 100}}, "splits 0%"),
        (TP, {"placements": SPLIT}, {"mesh": {"dp_shard": 4}}, "the mesh is dp_shard 4, the file asks for"),
        (meshed(dp_shard=2, cp=2), {"attention": CONTEXT}, {"attention": "sdpa"}, "the model calls sdpa attention"),
        (WANTED, {"placements": ROWS}, {"placements": {**ROWS, "whole": 1}}, "lie as 'whole'"),
        (
            meshed(dp_replicate=2, dp_shard=2), {"placements": COPIED, "replicas": "equal", "sharded_share": 0.5},
            {"replicas": "different"}, "hold different ones",
        ),
        (OFFLOADED, {"placements": ROWS, "offloaded": 1.0}, {"offloaded": 0.0}, "0% of the parameters are kept"),
        (WANTED, {"placements": ROWS}, {"offloaded": 1.0}, "100% of the parameters are kept"),
    ],
)  # fmt: skip
def test_parameters_lie_where_the_recipe_says(
    given: dict[str, Any], right: dict[str, Any], wrong: dict[str, Any], message: str
) -> None:
    """Each strategy's own mark: found, the run continues; another, it ends before the first step."""
    section = given.get("parallelism_config", {})
    mesh = {axis.split("config_")[1].removesuffix("_size"): size for axis, size in section.items()} or {"dp_shard": 4}
    base = {"world_size": 4, "mesh": mesh, "sharded_share": 0.25, **right}
    sharding.check(found(**base), distribution(given, 4))
    with pytest.raises(UserError, match=message):
        sharding.check(found(**{**base, **wrong}), distribution(given, 4))


def test_a_gpu_takes_the_recipe_as_it_is_and_a_cpu_says_what_differs() -> None:
    recipe = {"tf32": True, "bf16": True, "model_init_kwargs": {"attn_implementation": "flash_attention_2"}}
    on_gpu = build.fit_to_device(recipe, cuda=True)
    assert recipe.items() <= on_gpu.values.items() and on_gpu.notes == []
    assert on_gpu.values["logging_nan_inf_filter"] is False
    on_cpu = build.fit_to_device(recipe, cuda=False)
    assert "tf32" not in on_cpu.values and on_cpu.values["use_cpu"] is True and on_cpu.values["bf16"] is True
    assert on_cpu.values["model_init_kwargs"]["attn_implementation"] == "sdpa" and len(on_cpu.notes) == 2


@pytest.mark.parametrize("fp16", [None, False, True])
@pytest.mark.parametrize("bf16", [None, False, True])
def test_one_reader_of_the_precision_says_what_trl_trains_in(bf16: bool | None, fp16: bool | None) -> None:
    """Exports, plans and policies take it from there: absent is not false."""
    from trl import SFTConfig

    given = {key: value for key, value in (("bf16", bf16), ("fp16", fp16)) if value is not None}
    if bf16 and fp16:
        return  # transformers refuses both
    made = SFTConfig(output_dir="none", use_cpu=True, report_to="none", **given)
    assert mixed_precision(given) == ("bf16" if made.bf16 else "fp16" if made.fp16 else "no")


def test_recipes_train_in_bfloat16() -> None:
    """What plans, policies and exports count with."""
    for folder in sorted((REPO / "recipes").glob("*/recipe.yaml")):
        # Those of a laptop are bit for bit over any ranks.
        wanted = "no" if folder.parent.name in ("tiny-oasst2", "tiny-dpo") else "bf16"
        assert mixed_precision(resolve(folder.parent).train_args) == wanted, folder


def test_a_torn_line_of_a_killed_writer_stays_apart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"event":"step","step":1}\n{"event":"st')
    log = EventLog(path, attempt=2)
    log.write("start", step=1)
    log.close()
    lines = path.read_bytes().splitlines()
    assert json.loads(lines[2])["event"] == "start" and json.loads(lines[2])["attempt"] == 2


def test_wandb_is_offline_unless_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for key in [k for k in os.environ if k.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        build.set_tracker_environment(tmp_path, "run", "project")
        assert os.environ["WANDB_MODE"] == "offline" and os.environ["WANDB_RESUME"] == "allow"
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {**os.environ, "WANDB_API_KEY": "x"})
        build.set_tracker_environment(tmp_path, "run", "project")
        assert "WANDB_MODE" not in os.environ
