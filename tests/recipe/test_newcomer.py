"""The page that tells how to write a recipe, followed to the letter in an empty folder."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from clustertune.resolve.resolve import resolve
from tests.command import REPO, run
from tests.test_readme import code_blocks, commands

PAGE = (REPO / "docs" / "recipes.md").read_text()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the project's bases and conversations, and the recipe of the page, made from its blocks alone."""
    shutil.copytree(REPO / "recipes" / "_base", tmp_path / "recipes" / "_base")
    folder = tmp_path / "recipes" / "my-qwen"
    folder.mkdir()
    for block in code_blocks(PAGE, "yaml"):
        first, _, body = block.partition("\n")
        (tmp_path / first.removeprefix("# ")).write_text(body)
    (model,) = code_blocks(PAGE, "json")
    (folder / "model.json").write_text(model)
    return tmp_path


def page_words(start: str) -> list[str]:
    (line,) = (line for line in commands(PAGE, "clustertune") if line.startswith(f"clustertune {start} my-qwen"))
    return shlex.split(line)[1:]


def test_the_page_makes_a_recipe(checkout: Path) -> None:
    """One folder, no code: it is planned, and what would be submitted is shown."""
    assert len((checkout / "recipes/my-qwen/recipe.yaml").read_text().splitlines()) <= 15
    done = run(*page_words("plan"), cwd=checkout)
    assert done.code == 0 and "fits" in done.out, done.err
    done = run(*page_words("submit"), "--verbose", cwd=checkout)
    assert done.code == 0 and "#SBATCH --nodes=1" in done.out, done.err
    found = resolve(checkout / "recipes/my-qwen", tiny=True, ranks=2)
    assert found.architecture["architectures"] == ["Qwen2ForCausalLM"] and found.architecture["num_hidden_layers"] == 2


def test_a_model_that_another_recipe_trains_needs_no_second_description(checkout: Path) -> None:
    """A second recipe over the same model; and a name that nobody describes is an error that names the file."""
    other = checkout / "recipes" / "my-other"
    shutil.copytree(checkout / "recipes/my-qwen", other)
    (other / "model.json").unlink()
    assert resolve(other).architecture == resolve(checkout / "recipes/my-qwen").architecture
    text = (other / "recipe.yaml").read_text()
    (other / "recipe.yaml").write_text(text.replace("Qwen2.5-7B-Instruct", "Qwen2.5-8B-Instruct"))
    done = run("show", "my-other", "--json", cwd=checkout)
    assert done.code == 2 and "my-other/model.json" in done.err


@pytest.mark.jobs
def test_the_recipe_of_the_page_runs(checkout: Path) -> None:
    """The last command of the page: trained, exported, over the model class that the newcomer brought."""
    done = run(*page_words("run"), "--json", cwd=checkout)
    assert done.code == 0, done.err
    run_dir = checkout / json.loads(done.out)["run_dir"]
    assert (run_dir / "adapter" / "adapter_model.safetensors").is_file()
