"""What a rank does with what somebody has changed, and with hostile checkpoints: no pickle runs code."""

from __future__ import annotations

import functools
import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from clustertune import manifest
from clustertune.checkpoint import store
from clustertune.errors import UserError
from clustertune.rundir import RunDir
from tests.damage import Canary, flip_somewhere
from tests.training.benches import Bench, output_of

pytestmark = pytest.mark.timeout(900)

STRATEGIES = ["ddp", "fsdp2", "fsdp2-slices", "zero2", "zero3"]


def need(strategy: str) -> None:
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")


# -- damaged inputs ------------------------------------------------------------------------------------------------------


INPUTS = [
    "model/tiny-llama/model.safetensors", "data/train.jsonl", "model/tiny-llama/config.json",
    "model/tiny-llama/tokenizer_config.json", "model/tiny-llama/generation_config.json", "model/tiny-llama/tokenizer.json",
    "model/tiny-llama/chat_template.jinja", "data/eval.jsonl", "model/tiny-llama/MANIFEST.json", "data/MANIFEST.json",
]  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "name", "seed"),
    [
        ("fsdp2-slices", INPUTS[0], 0),
        ("ddp", INPUTS[1], 0),
        *(
            pytest.param(strategy, name, seed, marks=pytest.mark.jobs)
            for seed, strategy in enumerate(STRATEGIES, 1)
            for name in INPUTS
        ),
    ],
)
def test_a_damaged_input_is_not_trained_on(strategy: str, name: str, seed: int, bench: Bench) -> None:
    need(strategy)
    path = bench.make(strategy)
    flip_somewhere(path / name, seed)
    assert bench.go(path) == [2, 2], output_of(path)
    assert Path(name).name in output_of(path) and not list(path.glob("checkpoints/*/MANIFEST.json"))


def test_a_changed_recipe_of_a_run_is_not_followed(bench: Bench) -> None:
    path = bench.make("ddp")
    file = path / "run.json"
    body = json.loads(file.read_text())
    body["recipe"]["train_args"]["learning_rate"] *= 2
    file.write_text(json.dumps(body))
    with pytest.raises(UserError, match="its recipe was changed"):
        RunDir(path).resolved()


# -- hostile checkpoints -------------------------------------------------------------------------------------------------


def plant(checkpoint: Path, where: str, canary: Path) -> None:
    """Put a hostile pickle into one place of a checkpoint, and seal it again. ``place``: a file, or ``FOLDER!value``."""
    name, _, value = where.partition("!")
    (file,) = checkpoint.glob(name)
    if value:  # the first value of a distributed checkpoint that is not a tensor
        index = json.loads((file / ".metadata").read_bytes())
        body = io.BytesIO()
        torch.save(Canary(canary), body)
        spot = next(iter(index["values"].values()))
        shard = file / spot[0]
        spot[1:] = shard.stat().st_size, len(body.getvalue())
        with shard.open("ab") as out:
            out.write(body.getvalue())
        (file / ".metadata").write_text(json.dumps(index))
    elif file.name == ".metadata":
        file.write_bytes(pickle.dumps(Canary(canary)))
    else:
        torch.save({"python": Canary(canary)}, file)
    meta = manifest.read_manifest(checkpoint).meta
    manifest.seal(checkpoint, store.KIND, meta)


PLACES = {
    "fsdp2": ["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata", "optimizer_0!value"],
    "zero2": ["global_step*/*_rank_0_mp_rank_00_optim_states.pt", "global_step*/mp_rank_00_model_states.pt"],
    "zero3": ["global_step*/*_rank_1_mp_rank_00_optim_states.pt", "global_step*/*_rank_0_*_model_states.pt"],
}
FAST = {("fsdp2", "optimizer_0!value")}


@pytest.fixture(scope="module")
def trained(bench: Bench) -> Any:
    """A finished run of a strategy, whose last checkpoint is taken away: it resumes from step 2."""

    @functools.cache
    def one(strategy: str) -> Path:
        need(strategy)
        path = bench.train(strategy)
        shutil.rmtree(path / "checkpoints" / "step-000003")
        return path

    return one


@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        pytest.param(s, p, marks=[] if (s, p) in FAST else [pytest.mark.jobs], id=f"{s} {p}")
        for s, places in PLACES.items()
        for p in places
    ],
)
def test_a_hostile_pickle_under_a_valid_seal_never_runs(
    strategy: str, where: str, bench: Bench, trained: Any, tmp_path: Path
) -> None:
    path = shutil.copytree(trained(strategy), tmp_path / "run")
    plant(path / "checkpoints" / "step-000002", where, tmp_path / "canary")
    codes, words = bench.go(path, attempt=2), output_of(path)
    assert 2 in codes and 0 not in codes, words
    assert not (tmp_path / "canary").exists()
    assert "contains no such state" in words or "more than tensors and plain values" in words, words
