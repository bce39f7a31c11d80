"""What training refuses before its first step: EOS as padding, labels without EOS, a run that is not what was asked for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trl import SFTConfig

from clustertune.data import tokenizer as tokens
from clustertune.errors import ExitCode, UserError
from clustertune.resolve.distribution import mixed_precision
from clustertune.resolve.resolve import resolve
from clustertune.training import build, sharding
from tests.command import REPO
from tests.training.benches import fsdp


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
        (FakeTokenizer("<own>"), "</s>", r"!train\.pad_token"),
        (FakeTokenizer("<own>"), "<absent>", r"!train\.pad_token"),
        (FakeTokenizer("</s>"), None, "!never learn to stop"),
    ],
)
def test_padding_is_never_eos(tokenizer: FakeTokenizer, wanted: str | None, chosen: str) -> None:
    """The token that is chosen, or behind ``!`` why none is."""
    if not chosen.startswith("!"):
        assert tokens.choose_pad_token(tokenizer, wanted) == chosen
        return
    with pytest.raises(UserError, match=chosen[1:]):
        tokens.choose_pad_token(tokenizer, wanted)


def test_labels_without_eos_are_refused() -> None:
    tokens.check_labels([{"input_ids": [1, 2, 9], "labels": [-100, 2, 9]}], {9})
    for labels, message in (([1, 2, -100], "never learn to stop"), ([-100, -100, -100], "nothing to learn")):
        with pytest.raises(UserError, match=message):
            tokens.check_labels([{"input_ids": [1, 2, 9], "labels": labels}], {9})


WANTED, OFFLOADED = fsdp(), fsdp({"fsdp_offload_params": True})
TP, CP, HSDP = fsdp(dp_shard=2, tp=2), fsdp(dp_shard=2, cp=2), fsdp(dp_replicate=2, dp_shard=2)
ROWS = {"placements": {"dp_shard: shard 0": 9}}
SPLIT = {f"dp_shard_cp: shard 0, tp: {how}": n for how, n in (("shard 0", 80), ("shard 1", 15), ("replicate", 5))}
COPIED = {"dp_replicate: replicate, dp_shard_cp: shard 0": 9}


@pytest.mark.parametrize(
    ("given", "right", "wrong", "message"),
    [
        (WANTED, {}, {"type": "MULTI_CPU", "version": None, "sharded_share": 1.0}, "asks for FSDP"),
        (WANTED, {}, {"type": "NO", "world_size": 1, "version": None, "sharded_share": 1.0}, "1 ranks are connected"),
        (WANTED, {}, {"version": 1}, "FSDP1, the file asks for FSDP2"),
        (WANTED, {}, {"sharded_share": 1.0}, "holds 100% of the parameters"),
        (TP, {"placements": SPLIT}, {"placements": {"dp_shard_cp: shard 0, tp: replicate": 100}}, "splits 0%"),
        (TP, {"placements": SPLIT}, {"mesh": {"dp_shard": 4}}, "the mesh is dp_shard 4, the file asks for"),
        (CP, {"attention": "clustertune_context"}, {"attention": "sdpa"}, "the model calls sdpa attention"),
        (WANTED, ROWS, {"placements": {**ROWS["placements"], "whole": 1}}, "lie as 'whole'"),
        (HSDP, {"placements": COPIED, "replicas": "equal", "sharded_share": 0.5}, {"replicas": "different"}, "different ones"),
        (OFFLOADED, {**ROWS, "offloaded": 1.0}, {"offloaded": 0.0}, "0% of the parameters are kept"),
        (WANTED, ROWS, {"offloaded": 1.0}, "100% of the parameters are kept"),
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
    with pytest.raises(UserError, match=message) as caught:
        sharding.check(sharding.FoundSharding(**{**base, **wrong}), wanted)
    assert caught.value.code is ExitCode.FAILED


@pytest.mark.parametrize("fp16", [None, False, True])
@pytest.mark.parametrize("bf16", [None, False, True])
def test_one_reader_of_the_precision_says_what_trl_trains_in(bf16: bool | None, fp16: bool | None) -> None:
    """Exports, plans and policies take it from there: absent is not false. transformers refuses both."""
    if bf16 and fp16:
        return
    given = {key: value for key, value in (("bf16", bf16), ("fp16", fp16)) if value is not None}
    made = SFTConfig(output_dir="none", use_cpu=True, report_to="none", **given)
    assert mixed_precision(given) == ("bf16" if made.bf16 else "fp16" if made.fp16 else "no")


def test_recipes_train_in_bfloat16() -> None:
    """What plans, policies and exports count with. Those of a laptop are bit for bit over any ranks."""
    for folder in sorted((REPO / "recipes").glob("*/recipe.yaml")):
        wanted = "no" if folder.parent.name in ("tiny-oasst2", "tiny-dpo") else "bf16"
        assert mixed_precision(resolve(folder.parent).train_args) == wanted, folder


@pytest.mark.parametrize("key", [None, "x"])
def test_wandb_is_offline_unless_logged_in(key: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    left |= {"NETRC": str(tmp_path / "none"), "HOME": str(tmp_path), **({"WANDB_API_KEY": key} if key else {})}
    monkeypatch.setattr(os, "environ", left)
    build.set_tracker_environment(tmp_path, "run", "project")
    assert left.get("WANDB_MODE") == (None if key else "offline") and left["WANDB_RESUME"] == "allow"
