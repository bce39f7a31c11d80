"""Documents that were read and committed, and what must be true of every recipe whatever they say."""

from __future__ import annotations

from functools import cache

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.launch import shape
from clustertune.plan.calibration import find_calibrated
from clustertune.plan.predict import Plan, make_plan
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.submission import SubmissionPlan, plan_submission
from tests import goldens
from tests.goldens import GOLDEN, PLANS, RUNS
from tests.launch.machines import REPO, cluster_of


@pytest.mark.parametrize("name", sorted({*goldens.documents(), *(path.name for path in GOLDEN.iterdir())}))
def test_the_document_is_the_one_that_was_read(name: str) -> None:
    """A difference is a change of meaning to review; ``make golden`` writes them again, and no other file is there."""
    assert goldens.documents()[name]() == (GOLDEN / name).read_text()


# --- every recipe ------------------------------------------------------------------------------------------------------

resolved = cache(lambda name, tiny: resolve(name, tiny=tiny))


def axes(found: Resolved) -> dict[str, int]:
    section = (found.accelerate or {}).get("parallelism_config") or {}
    return {key.removeprefix("parallelism_config_").removesuffix("_size"): int(value) for key, value in section.items()}


@pytest.mark.parametrize(("name", "tiny"), RUNS)
def test_what_is_resolved_fits_together(name: str, tiny: bool) -> None:
    """World size, axes, micro batch and accumulation give the batch that the recipe names; activations are recomputed once,
    and checkpoints are sharded."""
    found = resolved(name, tiny)
    slurm, train = found.recipe.slurm, found.train_args
    assert found.world_size == slurm.nodes * (slurm.gpus_per_node or 1) or tiny or found.world_size == slurm.nodes
    shared = found.world_size // found.data_parallel_size
    assert shared * found.data_parallel_size == found.world_size
    if found.recipe.megatron is None:
        sizes = axes(found)
        assert shared == sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("sp", 1)
    micro, accumulation = train.get("per_device_train_batch_size", 8), train["gradient_accumulation_steps"]
    assert micro * accumulation * found.data_parallel_size == found.global_batch_size
    fsdp = (found.accelerate or {}).get("fsdp_config") or {}
    assert fsdp.get("fsdp_state_dict_type", "SHARDED_STATE_DICT") == "SHARDED_STATE_DICT"
    if found.lora is not None and fsdp and train.get("bf16", True):
        assert found.distribution.reduce_dtype == "float32"


@pytest.mark.parametrize("name", [name for name, tiny in RUNS if tiny])
def test_a_tiny_run_is_short_and_another_run(name: str) -> None:
    whole, tiny = resolved(name, False), resolved(name, True)
    assert tiny.fingerprint() != whole.fingerprint() and tiny.train_args["max_steps"] <= 20
    assert tiny.recipe.model.weights == "random" and tiny.accelerate["distributed_type"] == whole.accelerate["distributed_type"]


@cache
def plan(recipe: str, *overrides: str, cluster: str | None = None) -> Plan:
    calibrated = find_calibrated(load_cluster(cluster or cluster_of(recipe)))
    found = resolve(recipe, overrides)
    return make_plan(found, calibrated.machine(found.recipe.slurm.nodes), calibrated.constants)


@pytest.mark.parametrize("case", PLANS, ids="-".join)
def test_every_recipe_fits_the_machine_that_it_is_for(case: tuple[str, ...]) -> None:
    """GPUs and hosts hold it, its weights are split over the ranks that the file names, and hours follow from steps."""
    recipe, cluster, *overrides = case
    found = plan(recipe, *overrides, cluster=cluster)
    used, world = found.strategy, found.resolved.world_size
    assert found.fits and 0 < found.needed <= found.machine.usable_bytes and found.host_bytes <= found.machine.host_bytes
    assert used.world_size == world and world % used.weight_shards == 0 and used.weight_shards <= world
    if found.resolved.accelerate and axes(found.resolved).get("dp_shard"):
        assert used.weight_shards == axes(found.resolved)["dp_shard"] * axes(found.resolved).get("cp", 1)
    assert 0 < found.utilisation(hardware=False) <= found.utilisation(hardware=True) < 0.7
    if found.schedule.steps is not None:
        assert found.hours and found.hours * 3600 >= found.schedule.steps * found.step.seconds
        assert found.schedule.checkpoints and found.schedule.checkpoints >= 1


@cache
def submission(recipe: str, tiny: bool) -> SubmissionPlan:
    return plan_submission(recipe, [], tiny, load_cluster(cluster_of(recipe)), REPO / "runs" / "X", None, "report")


@pytest.mark.parametrize(("name", "tiny"), RUNS)
def test_every_job_has_the_shape_of_its_recipe(name: str, tiny: bool) -> None:
    """Nodes and GPUs as resolved, a warning early enough, requeue, nothing of the caller's environment, no secret."""
    found = submission(name, tiny)
    assert [job.stage for job in found.jobs] == ["prepare", "train", "export", "merge", "eval", "report"]
    for before, job in zip([None, *found.jobs], found.jobs, strict=False):
        assert {"#SBATCH --requeue", "#SBATCH --open-mode=append", "#SBATCH --export=NIL"} <= set(job.script.splitlines())
        command = job.command("7" if before else None)
        assert ("--dependency=afterok:7" in command) == (before is not None)
        assert "hf_" not in job.script.replace("hf_cache", "") and f"#SBATCH --partition={job.shape.partition}" in job.script
    train = found.jobs[1]
    trains = train.shape.nodes - found.resolved.recipe.server_nodes
    assert trains * train.shape.ranks_per_node == found.resolved.world_size
    assert train.shape.gpus_per_node <= found.cluster.compute.gpus
    assert f"#SBATCH --nodes={train.shape.nodes}\n" in train.script
    given = shape.signal_given(train.script)
    assert given == found.resolved.recipe.slurm.signal_seconds and given * 2 < train.shape.minutes * 60


@pytest.mark.parametrize(("name", "tiny"), RUNS)
def test_every_rank_is_told_how_to_reach_the_others(name: str, tiny: bool) -> None:
    """Several nodes: the interface of the cluster file, exactly. One node: none. Its caches are the job's own in any case."""
    text = goldens.submission(name, tiny)
    lines = dict(line.partition("  # ")[0].split("=", 1) for line in text.splitlines() if line[:1].isupper() and "  # " in line)
    interface = load_cluster(cluster_of(name)).network.interface
    several = submission(name, tiny).jobs[1].shape.nodes > 1
    wanted = f"={interface}" if several and interface else None
    assert lines.get("NCCL_SOCKET_IFNAME") == wanted
    assert lines.get("GLOO_SOCKET_IFNAME") == (interface if wanted else None)
    assert "clustertune-JOB" in lines["TRITON_CACHE_DIR"] and int(lines["OMP_NUM_THREADS"]) >= 1
    assert not {"HF_TOKEN", "WANDB_API_KEY"} & lines.keys()
