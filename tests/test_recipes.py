"""What every recipe folder holds, and that the schema holds nothing that no recipe needs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from clustertune.cli.app import app
from clustertune.recipe.layers import same_model
from clustertune.recipe.parameters import parameter_count
from clustertune.resolve.resolve import resolve
from tests.tree import REPO
from tools.planner_grade.data import published_models

FOLDERS = sorted(path for path in (REPO / "recipes").iterdir() if path.is_dir() and path.name != "_base")
NEEDED = ("recipe.yaml", "README.md")
MAX_LINES = 18
RUN = ("llama405b-oasst2", "llama70b-megatron", "qwen3-8b-ifeval-grpo", "smollm2-135m-oasst2")
"""One of each kind, whose commands are run as their README has them."""


def own_lines(text: str) -> int:
    """Lines that are neither blank nor a comment."""
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in text.splitlines())


def folder_faults(folder: Path) -> list[str]:
    """What a recipe folder lacks, and whether it has grown into a copy of another one."""
    faults = [f"{folder.name} has no {name}" for name in NEEDED if not (folder / name).is_file()]
    recipe = folder / "recipe.yaml"
    body = yaml.safe_load(recipe.read_text()) if recipe.is_file() else {}
    if "megatron" not in body and not (folder / "accelerate.yaml").is_file():
        faults.append(f"{folder.name} has no accelerate.yaml, with which accelerate launch starts it by hand")
    if not (folder / "model.json").is_file() and same_model(folder, body.get("model")) is None:
        faults.append(f"{folder.name} has no model.json, and no other recipe describes its model")
    if recipe.is_file() and (lines := own_lines(recipe.read_text())) > MAX_LINES:
        faults.append(f"{folder.name}/recipe.yaml has {lines} lines of its own, {MAX_LINES} are enough")
    return faults


def test_a_folder_is_complete_and_short() -> None:
    """A file that lacks is found in the queue; a long recipe is a copy, and copies drift apart."""
    assert {"tiny-oasst2", "llama405b-oasst2"} <= {folder.name for folder in FOLDERS}
    assert [fault for folder in FOLDERS for fault in folder_faults(folder)] == []


def test_a_model_is_described_once_and_has_one_revision() -> None:
    """A second description would be planned with while the first is corrected; a revision corrected in one recipe alone is
    another model."""
    models = [yaml.safe_load((folder / "recipe.yaml").read_text())["model"] for folder in FOLDERS]
    own = [model["name"] for folder, model in zip(FOLDERS, models, strict=True) if (folder / "model.json").is_file()]
    assert len(own) == len(set(own)) and set(own) == {model["name"] for model in models}
    assert len({(model["name"], model.get("revision")) for model in models}) == len(own) > 5


def test_a_described_model_has_the_published_parameters() -> None:
    """A wrong digit in model.json makes every figure of the plan wrong."""
    published = {model.name.removesuffix("-Instruct"): model.parameters for model in published_models().values()}
    seen = 0
    for folder in FOLDERS:
        resolved = resolve(folder)
        if name := resolved.recipe.model.name.removesuffix("-Instruct"):
            seen += name in published
            count = parameter_count(resolved.architecture)
            assert count == published.get(name, count), folder.name
    assert seen >= 14


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def untold_figures(expect: Mapping[str, Any], readme: str) -> list[str]:
    """Expected figures that a recipe's README gives otherwise or not at all: scores in percent, hours as ``8 h 24 min``."""
    faults = []
    for key, value in leaves(expect):
        forms = {f"{value:,}", str(value)}
        if key.startswith("tasks.") or key == "token_accuracy":
            forms = {f"{100 * value:.{digits}f} %" for digits in (1, 2)}
        elif key == "hours":
            forms = {f"{int(value)} h {round(value % 1 * 60):02} min"}
        faults += [] if any(form in readme for form in forms) else [f"{key}: {value}"]
    return faults


def test_a_readme_gives_the_figures_that_the_recipe_expects() -> None:
    """The report compares with one number while people compare with another."""
    for folder in FOLDERS:
        expect = yaml.safe_load((folder / "recipe.yaml").read_text()).get("expect", {})
        assert untold_figures(expect, (folder / "README.md").read_text()) == [], folder


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_commands_of_a_readme_are_run(folder: Path) -> None:
    """As they stand there, but for whole trainings, which other tests run: plans fit, submissions are only shown.

    Of most recipes the job's size alone is compared: tests/test_readme.py reads their commands, tests/test_goldens.py plans
    and submits them.
    """
    blocks = re.findall(r"^```sh\n(.*?)^```", (folder / "README.md").read_text(), re.M | re.S)
    seen = []
    for line in "".join(blocks).splitlines():
        words = shlex.split(line, comments=True)
        seen.append(words[0] if words[0] == "sbatch" else words[1])
        if words[0] == "sbatch":
            options, given = words[1 : words.index("launch/run.sbatch")], words[words.index("launch/run.sbatch") + 1 :]
            recipe = resolve(given[0]).recipe
            wanted, nodes = recipe.slurm, recipe.slurm.nodes + recipe.server_nodes
            sizes = {"--nodes": nodes, "--gpus-per-node": wanted.gpus_per_node, "--time": wanted.time}
            assert options == [f"{name}={value}" for name, value in sizes.items()], line
            words = ["", "submit", *given, "--dry-run"]
        elif words[1] == "nccl-check":
            words += ["--dry-run"]
        elif words[0] == "make" or words[1] in ("run", "doctor"):  # doctor: of a node of the cluster
            continue
        if folder.name in RUN:
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, f"{line}\n{done.output}"
    assert {"plan", "nccl-check", "doctor", "sbatch"} <= set(seen)
