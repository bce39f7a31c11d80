"""What a tiny run of each recipe must have been: for the tests that start them on a Slurm."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from clustertune.chain import export_trained
from clustertune.export.export import read_types
from clustertune.recipe import quantization
from clustertune.rundir import RunDir
from clustertune.staging import needs
from tests.command import events
from tests.launch.machines import OURS

STEPS = 2
WORDS = [
    f"train.max_steps={STEPS}",
    "train.eval_steps=100",
    "train.eval_on_start=false",
    "train.report_to=none",
]


def words(recipe: str) -> list[str]:
    """So short that every recipe can be run; ``--tiny`` does the rest."""
    longest = "max_completion_length=16" if recipe in GRPO else "max_length=64"
    return [*WORDS, f"train.{longest}"]


@dataclass(frozen=True)
class Wanted:
    """A run, and what it must have been."""

    recipe: str
    kind: str
    mesh: dict[str, int]
    placements: frozenset[str]
    overrides: tuple[str, ...] = ()
    ranks: int = 2
    """Two where one axis is enough; a mesh of two axes takes four."""
    offloaded: float = 0.0


GRPO = {name for name in OURS if name.endswith("grpo")}
WHOLE = frozenset({"whole"})
SHARDS = frozenset({"dp_shard: shard 0"})
JOINT = "dp_shard_cp: shard 0"
ZERO = frozenset({"zero: shard"})


def _fsdp(recipe: str, *overrides: str, placements: frozenset[str] = SHARDS, offloaded: float = 0.0) -> Wanted:
    return Wanted(recipe, "FSDP", {"dp_shard": 2}, placements, overrides, offloaded=offloaded)


RUNS = {name: _fsdp(name) for name in OURS} | {
    "llama405b-oasst2-hsdp-qlora": Wanted(
        "llama405b-oasst2-hsdp-qlora",
        "FSDP",
        {"dp_replicate": 2, "dp_shard": 2},
        frozenset({f"dp_replicate: replicate, {JOINT}"}),
        ranks=4,
    ),
    "llama1b-oasst2": Wanted("llama1b-oasst2", "MULTI_CPU", {"dp": 2}, WHOLE),
    "llama1b-oasst2-zero1": Wanted("llama1b-oasst2", "DEEPSPEED", {"dp": 2}, WHOLE, ("accelerate=accelerate-zero1.yaml",)),
    "llama1b-oasst2-zero2": Wanted("llama1b-oasst2", "DEEPSPEED", {"dp": 2}, WHOLE, ("accelerate=accelerate-zero2.yaml",)),
    "llama8b-qlora-1gpu": Wanted("llama8b-qlora-1gpu", "NO", {"dp": 1}, WHOLE, ranks=1),
    "llama8b-longcontext-32k": Wanted("llama8b-longcontext-32k", "FSDP", {"dp_shard": 2, "cp": 2}, frozenset({JOINT}), ranks=4),
    "llama70b-fsdp2": _fsdp("llama70b-fsdp2", offloaded=1.0),
    "llama70b-tp-fsdp2": Wanted(
        "llama70b-tp-fsdp2",
        "FSDP",
        {"dp_shard": 2, "tp": 2},
        frozenset(f"{JOINT}, tp: {how}" for how in ("shard 0", "shard 1", "replicate")),
        ranks=4,
    ),
    "llama70b-zero3-offload": Wanted("llama70b-zero3-offload", "DEEPSPEED", {"dp": 2}, ZERO),
    "llama70b-zero-infinity": Wanted("llama70b-zero-infinity", "DEEPSPEED", {"dp": 2}, ZERO),
    "mixtral8x7b-tulu3-ep": Wanted(
        "mixtral8x7b-tulu3",
        "FSDP",
        {"dp_shard": 2, "tp": 2},
        frozenset(f"{JOINT}, tp: {how}" for how in ("shard 0", "shard 1", "replicate")),
        ("accelerate=accelerate-ep.yaml",),
        ranks=4,
    ),
}
"""Every recipe that our own program trains, with each of its distribution files: two ranks of FSDP2, if not said otherwise."""


def judge(name: str, path: Path) -> None:
    """Check what a run was, by its own record, against what the recipe says it must be; and the types of what is published.

    A trained model has those of its base, tensor by tensor; an adapter the type in which it is trained: float32, and bfloat16
    beside a quantised base (trl/trainer/sft_trainer.py:911).
    """
    wanted = RUNS[name]
    body = json.loads((path / "run.json").read_bytes())
    found = body["distributed"]
    assert (found["type"], found["world_size"]) == (wanted.kind, wanted.ranks)
    assert found["mesh"] == wanted.mesh
    assert set(found["placements"]) == wanted.placements
    assert found["replicas"] in (None, "equal")
    assert found["offloaded"] == wanted.offloaded
    architecture = body["recipe"]["architecture"]
    assert architecture["num_hidden_layers"] == 2 and architecture["hidden_size"] == 128
    steps = events(path, "step")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    # Random weights know nothing: the loss begins at the logarithm of the vocabulary, 8.3 for 4,096 tokens, or of two answers.
    # Of rewards it is about 0, and where all answers are worth the same nothing is learnt.
    low, high = {"dpo": (0.4, 1.0), "grpo": (-5, 5)}.get(body["recipe"]["recipe"]["trainer"], (7.5, 9))
    assert all(math.isfinite(event["loss"]) and low < event["loss"] < high for event in steps), steps
    (stop,) = events(path, "stop")
    assert stop["reason"] == "finished" and stop["exit_code"] == 0
    resolved = RunDir(path).resolved()
    base = needs.base_of(resolved, RunDir(path)).find()
    assert base is not None
    named, stored = read_types(base)
    out = Path(export_trained(path)["out"])
    published = read_types(out)
    assert named == "bfloat16" and set(stored.values()) == {named}
    if resolved.lora is None:
        assert published == (named, stored)
        return
    from safetensors.torch import load_file

    factors = load_file(out / "adapter_model.safetensors")  # also those of experts, which PEFT trains otherwise than modules
    if wanted.recipe not in GRPO:
        assert [name for name, value in factors.items() if ".lora_B" in name and not value.any()] == []
    assert any(".experts." in name for name in factors) == bool(resolved.lora.get("target_parameters"))
    trained = "float32" if quantization.of(resolved.train_args) is None else "bfloat16"
    assert published == (trained, dict.fromkeys(published[1], trained))
