"""``submit`` of a Megatron recipe: container, command, configuration file and conversion, as they are printed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.launch import megatron_image
from clustertune.resolve.resolve import resolve
from tests.command import REPO, Done, run

FILE = REPO / "ops" / "clusters" / "dgx-h100.yaml"
Submit = Callable[..., Done]


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    """A dry run on 32 nodes of 8 H100, by a cluster file whose ``container`` a test chooses."""

    def start(
        recipe: str, *words: str, container: str | None = "{runtime: apptainer, image: /s/train.sif, megatron: /s/m.sif}"
    ) -> Done:
        lines = [line for line in FILE.read_text().splitlines() if not line.startswith(("container:", "slurm:"))]
        path = tmp_path / "h100.yaml"
        mine = ["slurm: {partition: gpu, max_time: UNLIMITED}", *([f"container: {container}"] if container else [])]
        path.write_text("\n".join([*lines, *mine]) + "\n")
        return run("submit", recipe, *words, "--cluster", path, "--dry-run", "--run-dir", tmp_path / "run")

    return start


@pytest.mark.parametrize(
    ("recipe", "nodes", "sizes"), [("llama70b-megatron", 8, (8, 4, 1)), ("llama405b-megatron", 32, (8, 8, 2))]
)
def test_what_would_be_done_is_printed(submit: Submit, recipe: str, nodes: int, sizes: tuple[int, int, int]) -> None:
    done = submit(recipe, "--json")
    assert done.code == 0, done.err
    command, found = done.json["node_command"], done.json["megatron"]
    assert command[0] == "srun" and f"--nodes={nodes}" in command and "/s/m.sif" in command
    assert command[command.index("/s/m.sif") + 1 :][:4] == ["python3", "-m", "clustertune", "node"]
    assert found["image"] == "/s/m.sif" and found["ranks_command"][:3] == ["python3", "-m", "clustertune.launch.elastic"]
    assert found["configuration_file"].endswith("/attempts/0001/megatron.json")
    model = found["configuration"]["model"]
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    assert tuple(model[name] for name in names) == sizes
    conversion = found["conversion"]
    assert conversion["from"]["revision"] == resolve(recipe).recipe.model.revision and conversion["ranks"] == nodes * 8
    assert conversion["exported"]["what"] == "model"


def test_only_the_ranks_run_in_nvidias_image() -> None:
    """The other stages want the project's own stack."""
    cluster = load_cluster("dgx-h100")
    cluster = cluster.model_copy(update={"container": cluster.container.model_copy(update={"megatron": "/s/m.sif"})})
    assert megatron_image.of_training(resolve("llama70b-megatron"), cluster).container.image == "/s/m.sif"
    assert megatron_image.of_training(resolve("llama405b-oasst2"), cluster) is cluster


@pytest.mark.parametrize(
    ("container", "says"),
    [
        ("{runtime: apptainer, image: /s/train.sif}", "container.megatron: missing"),
        (None, "has no container runtime"),
        ("{runtime: pyxis, image: /s/t.sqsh, megatron: /s/m.sif}", "container.megatron: a .sif, which enroot cannot open"),
        (
            f"{{runtime: apptainer, image: /s/t.sif, megatron: 'docker://a/b@sha256:{'0' * 64}'}}",
            "fetch it again on every node",
        ),
    ],
)
def test_a_cluster_without_the_right_image_is_told(submit: Submit, container: str | None, says: str) -> None:
    """It is checked like the project's own."""
    done = submit("llama70b-megatron", container=container)
    assert done.code == 2 and says in done.err


def test_what_is_not_carried_stops_it_before_the_queue(submit: Submit) -> None:
    done = submit("llama70b-megatron", "train.neftune_noise_alpha=5", "train.optim=adafactor")
    assert done.code == 2 and "train.neftune_noise_alpha" in done.err and "train.optim" in done.err


BLOCKED = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError("not in NVIDIA's image: " + name)
sys.meta_path.insert(0, Finder())
import clustertune.rank, clustertune.launch.node, clustertune.cli.app, clustertune.job
from clustertune.megatron import program, bridge, settings, megatron_files
from clustertune.training import collectives
"""


def test_a_rank_needs_nothing_that_nvidias_image_lacks() -> None:
    """TRL, lm-eval and the like are not in it: a module that imports one at its top ends 64 ranks at once."""
    blocked = {"trl", "lm_eval", "wandb", "bitsandbytes", "deepspeed", "matplotlib", "nltk", "ruamel", "jinja2"}
    script = BLOCKED.format(blocked=sorted(blocked))
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-800:]
