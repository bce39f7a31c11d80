"""A module in the working folder, or in the recipe's, is never imported: a cloned model may bring a ``numpy.py``."""

from __future__ import annotations

import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
CLUSTERTUNE = Path(sys.executable).with_name("clustertune")
RECIPE = REPO / "recipes" / "tiny-oasst2"
SHORT = ("train.max_steps=2", "train.eval_strategy=no", "eval.limit=1", "eval.max_gen_toks=2", "train.report_to=none")


def plant(*folders: Path) -> Path:
    """All that a Python here could import, in each folder; what is imported of it leaves its name in the file returned."""
    seen = folders[0].parent / "imported"
    own = {REPO, *folders}
    installed = [path for path in sys.path if Path(path or ".").resolve() not in own]
    names = {module.name for module in pkgutil.iter_modules(installed)} | sys.stdlib_module_names
    for folder in folders:
        for name in (names | {"sitecustomize", "usercustomize", "clustertune"}) - {"__main__"}:
            (folder / f"{name}.py").write_text(f"open({str(seen)!r}, 'a').write({name + chr(10)!r})\nraise SystemExit(99)\n")
    return seen


def command(*words: str | Path, cwd: Path, module: bool = False) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "clustertune"] if module else [str(CLUSTERTUNE)]
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    environment |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    line = [*start, *map(str, words)]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    recipe = tmp_path / "tiny-oasst2"
    shutil.copytree(RECIPE, recipe)
    shutil.copytree(RECIPE.parent / "_base", tmp_path / "_base")
    (tmp_path / "work").mkdir()
    return tmp_path / "work", recipe


def test_prepare_imports_nothing_of_the_working_folder(folders: tuple[Path, Path]) -> None:
    """By its children, too, which the server of forks makes."""
    work, recipe = folders
    seen = plant(work, recipe)
    done = command("run", recipe, "--to", "prepare", "--run-dir", work.parent / "run", cwd=work)
    assert not seen.exists(), seen.read_text()
    assert done.returncode == 0, done.stderr


def test_python_m_clustertune_imports_nothing_of_it(folders: tuple[Path, Path]) -> None:
    """But what Python's own runpy looks for there before the package is there."""
    work, recipe = folders
    for name in ("numpy", "yaml", "typer", "pydantic", "rich", "regex", "accelerate", "torch", "json", "secrets", "subprocess"):
        (work / f"{name}.py").write_text("raise SystemExit(99)")
    done = command("show", recipe, cwd=work, module=True)
    assert done.returncode == 0 and "train.learning_rate" in done.stdout + done.stderr, done.stderr


@pytest.mark.jobs
def test_no_stage_imports_anything_of_it(folders: tuple[Path, Path]) -> None:
    """All stages with their servers, ranks and samplers, then eval, chat and a second look at the run."""
    work, recipe = folders
    seen, run = plant(work, recipe), work.parent / "run"
    done = command("run", recipe, *SHORT, "--run-dir", run, cwd=work)
    assert not seen.exists(), seen.read_text()
    assert done.returncode == 0, done.stderr
    again = ("eval", run / "merged", "--limit", "1", "--max-gen-toks", "2", "--out", work.parent / "scores")
    for words in (again, ("report", run), ("watch", run, "--once"), ("chat", run, "--help")):
        done = command(*words, cwd=work)
        assert not seen.exists(), seen.read_text()
        assert done.returncode == 0, done.stderr
