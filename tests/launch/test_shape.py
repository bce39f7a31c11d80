"""The size of each stage's job."""

from __future__ import annotations

import json

import pytest

from clustertune.launch import shape
from clustertune.resolve.resolve import resolve
from clustertune.rundir import STAGES
from tests.launch.machines import machine
from tests.launch.test_fit import with_distribution


def test_the_reference_shape() -> None:
    """Two whole nodes for the training; what needs no GPU takes none, and leaves them to others."""
    shapes = shape.stage_shapes(resolve("llama405b-oasst2"), machine())
    assert shapes["train"] == shape.JobShape(2, 8, 8, 256, None, 1440, "gpu", "rtx_pro_6000")
    assert {stage for stage in STAGES if shapes[stage].gpus_per_node} == {"train", "eval"}
    assert {stage for stage in STAGES if shapes[stage].nodes == 2} == {"train", "eval"}
    assert shapes["merge"].memory_gb == shape.PROCESS_GB + 2 * shape.MERGE_SHARD_GB


def test_options() -> None:
    """The words of sbatch; GPUs by one option only: Slurm refuses --gres and --gpus-per-node together."""
    options = shape.JobShape(2, 8, 8, 64, None, 90, "gpu", "h100").options()
    assert options == [
        "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=h100:8", "--cpus-per-task=64", "--mem=0", "--time=01:30:00",
        "--partition=gpu",
    ]  # fmt: skip
    assert shape.JobShape(1, 0, 1, 4, 16, 30).options() == [
        "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=4", "--mem=16G", "--time=00:30:00",
    ]  # fmt: skip


def test_a_part_of_a_node_takes_its_share() -> None:
    """Two of eight GPUs take a quarter of the cores and of the memory: the other six must stay usable."""
    found = shape.train_shape(resolve("tiny-oasst2"), machine())
    assert (found.gpus_per_node, found.cpus_per_node, found.memory_gb) == (2, 64, 975)


def test_memory_for_loading_is_never_less_than_it_takes() -> None:
    """A share of a node that cannot hold the weights while they are loaded is too small a share."""
    recipe = resolve("llama405b-oasst2", ["slurm.gpus_per_node=4", "slurm.nodes=4"])
    body = json.loads(json.dumps(recipe.accelerate))
    body["fsdp_config"]["fsdp_version"] = 1  # all weights in rank 0
    recipe = with_distribution(recipe, **body)
    found = shape.train_shape(recipe, machine(4, memory_gb=1000))
    assert found.memory_gb is not None
    assert found.memory_gb > 811.7e9 / shape.GIB


def test_a_tiny_run_takes_what_the_cluster_has() -> None:
    """A rehearsal runs on two GPUs as on sixteen, unless somebody names the number."""
    sizes = {
        (): (machine(1, 2), 1, 2),
        ("data.limit=9",): (machine(3, 0), 2, 2),
        ("slurm.nodes=4",): (machine(1, 2), 4, 2),
        ("slurm={nodes: 4, gpus_per_node: 3}",): (machine(1, 2), 4, 3),
    }
    for given, (cluster, nodes, ranks) in sizes.items():
        found, words = shape.resolve_on("llama405b-oasst2", given, cluster, tiny=True)
        assert (found.recipe.slurm.nodes, found.recipe.slurm.gpus_per_node) == (nodes, ranks)
        assert found.world_size == nodes * ranks and words[: len(given)] == list(given)
    assert shape.resolve_on("llama405b-oasst2", [], machine(1, 2), tiny=False)[1] == []
    assert shape.train_shape(resolve("tiny-oasst2", tiny=True), machine(memory_gb=6)).memory_gb is None


def test_without_gpus_none_are_asked_for() -> None:
    """A CPU partition knows no GRES: asking for one is refused."""
    shapes = shape.stage_shapes(resolve("tiny-oasst2"), machine(2, 0, threads=64))
    assert not any(found.gpus_per_node for found in shapes.values())
    assert not any("gpu" in option for found in shapes.values() for option in found.options() if "partition" not in option)
    assert shapes["train"].ranks_per_node == 2


def test_what_the_cluster_lacks() -> None:
    """All of it at once, with the setting that would do."""
    recipe = resolve("llama405b-oasst2", ["slurm.nodes=4", "slurm.gpus_per_node=16", "train.global_batch_size=64"])
    bounded = machine(slurm={"partition": "gpu", "gres": None, "max_time": "12:00:00"})
    keys = [problem.key for problem in shape.find_problems(recipe, bounded)]
    assert keys == ["slurm.nodes", "slurm.gpus_per_node", "slurm.time"]
    assert shape.find_problems(resolve("llama405b-oasst2"), machine()) == []


def test_no_stage_asks_for_more_time_than_there_is() -> None:
    """A short partition would refuse the helper stages, whose time nobody chose."""
    short = machine(slurm={"partition": "debug", "max_time": "00:20:00"})
    shapes = shape.stage_shapes(resolve("tiny-oasst2"), short)
    assert {found.minutes for stage, found in shapes.items() if stage != "train"} == {20}


def test_the_merged_model_must_fit_for_its_evaluation() -> None:
    """One node scores it by transformers: more than its GPUs is said, not refused, layers can wait in host memory."""
    assert shape.stage_shapes(resolve("tiny-oasst2"), machine())["eval"].gpus_per_node == 1
    assert "9 GPUs" in shape.warnings(resolve("llama405b-oasst2", ["eval.backend=hf"]), machine())[0]
    assert "container.vllm" in shape.warnings(resolve("llama405b-oasst2"), machine())[0]
    assert shape.warnings(resolve("llama405b-oasst2", tiny=True), machine()) == []
    unknown = machine(compute={"gpus": 8, "cores": 64, "threads": 128, "memory_gb": 2000})
    assert "compute.gpu" in shape.warnings(resolve("llama405b-oasst2"), unknown)[0]


@pytest.mark.parametrize("word", ["gpu --wrap=id", "a\nb", "", "-x", "a,b;c"])
def test_no_value_becomes_an_option(word: str) -> None:
    """The cluster file's schema refuses such names first; this is the last line."""
    with pytest.raises(AssertionError):
        shape.check_word(word)
