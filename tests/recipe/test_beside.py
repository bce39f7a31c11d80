"""Overrides of the files beside a recipe: laid over them, checked like them, and written where ranks read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from clustertune.resolve import view
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir
from tests.recipe.conftest import Refuse

FSDP = "accelerate.fsdp_config"
PARALLEL = "accelerate.parallelism_config.parallelism_config"
BATCH = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
DS = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"


@pytest.fixture
def deepspeed(recipes: Path) -> Path:
    """The reference recipe with a DeepSpeed distribution beside its own."""
    folder = recipes / "llama405b-oasst2"
    (folder / "ds.yaml").write_text(DS)
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, **BATCH}))
    return folder


def test_values_are_laid_over_the_file_and_remembered() -> None:
    plain = resolve("tiny-oasst2")
    resolved = resolve(
        "tiny-oasst2", [f"{FSDP}.fsdp_reshard_after_forward=false", f"{FSDP}.fsdp_cpu_ram_efficient_loading=null"]
    )
    config = resolved.accelerate["fsdp_config"]
    assert config["fsdp_reshard_after_forward"] is False and "fsdp_cpu_ram_efficient_loading" not in config
    kept = set(plain.accelerate["fsdp_config"]) - {"fsdp_reshard_after_forward", "fsdp_cpu_ram_efficient_loading"}
    assert all(config[key] == plain.accelerate["fsdp_config"][key] for key in kept)
    section = "fsdp_config.fsdp"
    given = {f"{section}_reshard_after_forward": False, f"{section}_cpu_ram_efficient_loading": None}
    assert resolved.accelerate_overrides == given
    assert resolved.fingerprint() != plain.fingerprint()
    assert Resolved.from_dict(json.loads(json.dumps(resolved.as_dict()))) == resolved


def test_ranks_left_to_shard_over_are_derived() -> None:
    """A recipe contains no machine counts; accelerate wants their product to be the number of ranks."""
    resolved = resolve("llama405b-oasst2", [f"{PARALLEL}_dp_replicate_size=2"])
    assert resolved.accelerate["parallelism_config"]["parallelism_config_dp_shard_size"] == 8
    assert (resolved.data_parallel_size, resolved.distribution.weight_shards) == (16, 8)
    values = view.as_json(resolved)["values"]
    assert values[f"{PARALLEL}_dp_shard_size"]["origin"] == "derived: 16 ranks / (dp_replicate 2)"
    assert values[f"{PARALLEL}_dp_replicate_size"] == {"value": 2, "origin": "override"}


def test_deepspeed_s_file_takes_overrides(deepspeed: Path, refused: Refuse) -> None:
    words = ["accelerate=ds.yaml", "deepspeed.zero_optimization.stage=3", "deepspeed.bf16=null"]
    resolved = resolve(deepspeed, words)
    # The recipe trains an adapter, whose gradients are summed in float32 unless the file says another type.
    assert resolved.deepspeed == {"zero_optimization": {"stage": 3}, **BATCH, "communication_data_type": "fp32"}
    assert resolve(deepspeed, [*words, "lora=null"]).deepspeed == {"zero_optimization": {"stage": 3}, **BATCH}
    assert resolved.fingerprint() != resolve(deepspeed, words[:1]).fingerprint()
    assert view.as_json(resolved)["values"]["deepspeed.zero_optimization.stage"] == {"value": 3, "origin": "override"}
    for text in ("[1]", "{", '{"zero_optimization": 3}'):
        (deepspeed / "ds.json").write_text(text)
        assert "ds.json" in str(refused(deepspeed, ["accelerate=ds.yaml"])[0])


def test_a_run_writes_the_file_that_its_ranks_read(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    run = RunDir(tmp_path)
    plain = resolve("tiny-oasst2")
    run.write_own_files(plain)
    assert yaml.safe_load(run.accelerate_file.read_text()) == plain.accelerate
    resolved = resolve("tiny-oasst2", [f"{FSDP}.fsdp_reshard_after_forward=false", "accelerate.mixed_precision=no"])
    run.write_own_files(resolved)
    assert run.accelerate_file == tmp_path / "accelerate.yaml"
    made = load_config_from_file(str(run.accelerate_file))  # what accelerate itself makes of it
    assert made.fsdp_config["fsdp_reshard_after_forward"] is False and made.distributed_type.value == "FSDP"
    assert made.mixed_precision == "no"
    before = (tmp_path / "accelerate.yaml").stat()
    run.write_own_files(resolved)  # ranks may be reading it
    assert (tmp_path / "accelerate.yaml").stat() == before
