"""Every recipe as a SkyPilot task: fields that SkyPilot has, values that stay values, and a run that starts as written."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ConfigDict

from clustertune.experimental.skypilot import SkyOptions, render
from clustertune.resolve.resolve import resolve
from tests.launch.machines import OURS


class Fields(BaseModel):
    """After ``sky/utils/schemas.py`` of SkyPilot 0.14.1, cut to the fields that the template uses."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Autostop(Fields):
    idle_minutes: int
    down: bool


class Recovery(Fields):
    max_restarts_on_errors: int
    recover_on_exit_codes: list[int]


class Resources(Fields):
    accelerators: dict[str, int] | None = None
    cpus: str | None = None
    memory: str | None = None
    use_spot: bool
    autostop: Autostop
    job_recovery: Recovery


class Task(Fields):
    name: str
    workdir: str
    num_nodes: int
    resources: Resources
    volumes: dict[str, str] | None = None
    secrets: dict[str, None] | None = None
    """Names alone: a value would stand in the task."""
    setup: str
    run: str


def task(recipe: str, *overrides: str, tiny: bool = False, options: SkyOptions | None = None) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(render(resolve(recipe, overrides, tiny=tiny), overrides, options))
    Task.model_validate(found)
    return found


def started(found: dict[str, Any], folder: Path, rank: int = 1) -> list[str]:
    """The arguments that the task's run gives to launch/torchrun.sh, with the variables that SkyPilot sets."""
    (folder / "launch").mkdir(parents=True, exist_ok=True)
    fake = folder / "launch" / "torchrun.sh"
    fake.write_text("#!/bin/bash\nprintf '%s\\0' \"$@\" > arguments\n")
    fake.chmod(0o755)
    env = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    env |= {"SKYPILOT_TASK_ID": "sky-managed-2030-01-01_ct_3-0", "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-c", found["run"]], cwd=folder, env=env, check=True, timeout=60)
    return (folder / "arguments").read_text().split("\0")[:-1]


@pytest.mark.parametrize(("recipe", "tiny"), [*((name, False) for name in OURS), ("llama405b-oasst2", True)])
def test_every_recipe_is_a_task(recipe: str, tiny: bool, tmp_path: Path) -> None:
    found = task(recipe, tiny=tiny)
    shape = resolve(recipe, tiny=tiny).recipe
    assert found["num_nodes"] == shape.slurm.nodes
    on_cpu = tiny or shape.model.weights == "random"
    assert found["resources"].get("accelerators") == (None if on_cpu else {"H100": shape.slurm.gpus_per_node})
    assert found["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert found.get("secrets") == (None if on_cpu else {"HF_TOKEN": None})
    assert found["volumes"] == {"/clustertune-runs": "clustertune-runs"}
    arguments = started(found, tmp_path)
    assert arguments[0] == f"recipes/{recipe}" and ("--tiny" in arguments) is tiny
    assert arguments[-8:] == [
        *("--node-rank", "1", "--nodes", "2", "--master", "10.0.0.1", "--job", "sky-managed-2030-01-01_ct_3-0")
    ]
    if importlib.util.find_spec("sky") is not None:  # SkyPilot is not part of the pinned stack: its own parser, where it is
        path = tmp_path / "task.yaml"
        path.write_text(render(resolve(recipe, tiny=tiny)))
        assert importlib.import_module("sky").Task.from_yaml(str(path)).num_nodes == shape.slurm.nodes


HOSTILE = ("data.name=a'b", "data.name=$(touch x)", "data.name=`touch x`", "data.name={{ 7 * 7 }}", 'data.name="#: x"')


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_user_gives_stays_one_argument(text: str, tmp_path: Path) -> None:
    """In the template, in YAML and in the shell that runs the task."""
    found = yaml.safe_load(render(resolve("tiny-oasst2"), [text, "train.seed=1"]))
    assert started(found, tmp_path)[1:3] == [text, "train.seed=1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arguments", "launch"]
