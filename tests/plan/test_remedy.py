"""What would make a recipe fit: the printed overrides really do, the smallest change first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.plan.advise import Remedy, remedies
from clustertune.plan.machine import PlanMachine, machine
from clustertune.plan.predict import Plan, make_plan
from clustertune.resolve.resolve import resolve
from tests.plan.world import FSDP2, LLAMA_70B, LORA_SECTION, fsdp2, write_cluster, write_recipe

GIB = 2**30


@pytest.fixture
def hardware(tmp_path: Path) -> PlanMachine:
    """4 nodes of 8 H100."""
    return machine(load_cluster(str(write_cluster(tmp_path / "hgx.yaml", nodes=4))))


def planned(folder: Path, hardware: PlanMachine, *given: str, **recipe: Any) -> Plan:
    found = make_plan(resolve(write_recipe(folder, **recipe), given), hardware, sure=False)
    assert not found.fits
    return found


def check(plan: Plan, hardware: PlanMachine, *given: str) -> list[Remedy]:
    """Resolved again with its overrides each fits, and is the plan that was shown."""
    found = remedies(plan, given)
    assert found
    for remedy in found:
        if remedy.arguments is None:
            continue
        again = make_plan(
            resolve(plan.resolved.folder, [*given, *remedy.arguments]), hardware, lengths=plan.lengths, sure=False
        )
        assert again.fits, remedy.what
        assert again.step.seconds == pytest.approx(remedy.plan.step.seconds), remedy.what
        assert again.needed == pytest.approx(remedy.plan.needed), remedy.what
    return found


def names(found: list[Remedy]) -> str:
    return "\n".join(remedy.what for remedy in found)


def test_too_many_activations(tmp_path: Path, hardware: PlanMachine) -> None:
    """Recomputing, smaller micro batches, shorter sequences; first what changes no number of the training. A remedy is laid
    over what was given, and replaces what it says again."""
    given = ("train.activation_checkpointing=false", "train.per_device_train_batch_size=8", "train.max_length=4096")
    found = check(planned(tmp_path / "r", hardware, *given), hardware, *given)
    assert found[0].what.startswith("recompute") and "a micro batch of" in names(found)
    assert names(found).index("recompute") < names(found).index("micro batch") < names(found).index("tokens")


def test_weights_that_each_rank_holds_whole(tmp_path: Path, hardware: PlanMachine) -> None:
    """70B with DDP: split over the ranks, or quantised."""
    plan = planned(tmp_path / "r", hardware, model=LLAMA_70B, lora=LORA_SECTION, accelerate={"distributed_type": "MULTI_GPU"})
    found = names(check(plan, hardware))
    assert "FSDP2" in found and "NF4" in found and "nodes instead" not in found


@pytest.mark.parametrize("kind", ["reshard", "replicas"])
def test_weights_that_stay(kind: str, tmp_path: Path, hardware: PlanMachine) -> None:
    """Gathered weights are given back; copies in each node become one over all."""
    axes = {"parallelism_config_dp_replicate_size": 4, "parallelism_config_dp_shard_size": 8}
    given = {"reshard": fsdp2(reshard_after_forward=False), "replicas": {**FSDP2, "parallelism_config": axes}}
    plan = planned(tmp_path / "r", hardware, model=LLAMA_70B, nodes=4, accelerate=given[kind], train={"global_batch_size": 32})
    expected = {"reshard": "give the weights back", "replicas": "one copy of the weights"}
    assert expected[kind] in names(check(plan, hardware))


def test_more_nodes(tmp_path: Path, hardware: PlanMachine) -> None:
    """The fewest that suffice; where the cluster has not as many, its number and no overrides."""
    train = {"global_batch_size": 128, "per_device_train_batch_size": 4}
    plan = planned(tmp_path / "r", hardware, model=LLAMA_70B, train=train)
    found = next(remedy for remedy in check(plan, hardware) if "nodes instead" in remedy.what)
    assert found.arguments == ["slurm.nodes=4"]
    small = replace(hardware, nodes=1)
    beyond = next(remedy for remedy in remedies(planned(tmp_path / "s", small, model=LLAMA_70B, train=train)) if
                  "nodes instead" in remedy.what)  # fmt: skip
    assert beyond.arguments is None and "hgx has 1" in beyond.what


def test_what_changes_the_training_comes_last(tmp_path: Path, hardware: PlanMachine) -> None:
    """A byte too much: first what computes the same on the same nodes, then more nodes, then other weights or sequences."""
    train = {"activation_checkpointing": False, "per_device_train_batch_size": 2}
    recipe = write_recipe(tmp_path / "r", lora=LORA_SECTION, train=train)
    whole = make_plan(resolve(recipe), hardware, sure=False)
    plan = make_plan(resolve(recipe), replace(hardware, usable_bytes=int(whole.needed) - 1), sure=False)
    found = names(remedies(plan))
    words = ("recompute", "micro batch", "host memory", "2 nodes instead", "NF4", "1024 tokens")
    places = [found.index(word) for word in words]
    assert places == sorted(places), found


def test_two_changes_where_one_is_not_enough(tmp_path: Path, hardware: PlanMachine) -> None:
    """Nothing alone suffices: two together are looked for before giving up."""
    train = {"activation_checkpointing": False, "per_device_train_batch_size": 8, "max_length": 8192}
    recipe = {"model": LLAMA_70B, "lora": LORA_SECTION, "train": train}
    one = replace(hardware, nodes=1, host_bytes=300 * GIB)
    found = check(planned(tmp_path / "r", one, **recipe), one)
    assert ", and " in found[0].what


def test_nothing_helps(tmp_path: Path, hardware: PlanMachine) -> None:
    """A GPU of 2 GiB holds not even the CUDA context and a layer: no remedy is invented."""
    tiny = replace(hardware, usable_bytes=2 * GIB, nodes=1)
    plan = planned(tmp_path / "r", tiny, model=LLAMA_70B)
    assert [remedy for remedy in remedies(plan) if remedy.arguments] == []
