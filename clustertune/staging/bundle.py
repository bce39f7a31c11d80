"""One folder with everything that a recipe needs from outside: what lies where in it, and how a run reads from it alone.

``hub/`` is a cache of the Hub (plain files in place of links, as huggingface_hub itself makes where links cannot be):
``HF_HUB_CACHE`` names it for any program. ``model/``, ``data/`` and ``eval/`` hold what was named by path, ``container/`` the
image, ``recipes/`` the recipe. ``MANIFEST.json`` is written last; ``SHA256SUMS`` says the same to ``sha256sum --check``.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustertune.data.prompts import read_prompts
from clustertune.errors import Problem, UserError, collect_problems, raise_if
from clustertune.manifest import MANIFEST, Manifest, read_manifest
from clustertune.resolve.resolved import EVAL_DATA, Resolved, expand_home, is_there

KIND = "parcel"
HUB, MODEL, DATA, EVAL, CONTAINER, RECIPES, SUMS = (
    *("hub", "model", "data", "eval", "container", "recipes"),
    "SHA256SUMS",
)
OWN = "own prompts"
"""What a bundle calls the part that ``eval.data`` names."""
STAGED = "staged"
"""The recipe key that names a bundle."""


def read(folder: Path) -> Manifest:
    """The manifest of a bundle. Raises UserError where the folder is none."""
    try:
        return read_manifest(folder, KIND)
    except UserError as error:
        fix = f"clustertune stage RECIPE --to {folder} makes it"
        raise UserError([*error.problems, Problem("is not a folder of staged inputs", file=str(folder), fix=fix)]) from None


def parts(found: Manifest) -> dict[str, Any]:
    """What a bundle holds: ``model``, ``data``, ``benchmark``, ... with name, revision and path."""
    held = found.meta.get("parts")
    return held if isinstance(held, dict) else {}


def model_folder(folder: Path) -> Path | None:
    """The base model in a bundle; None where its recipe makes its own."""
    return _part(folder, "model")


def data_input(resolved: Resolved) -> Path | None:
    """The file or folder with a recipe's conversations in its bundle; None where they lie where the recipe says.

    A recipe scaled down has conversations of its own, which come with the project.
    """
    folder = staged_folder(resolved)
    if folder is None or bool(read(folder).meta.get("tiny")) != resolved.tiny:
        return None
    return _part(folder, "data")


def data_inputs(resolved: Resolved) -> dict[str, Path]:
    """Files and folders with a recipe's conversations by their keys, of its bundle where it has one; none of the Hub."""
    staged, prompts = data_input(resolved), eval_data(resolved)
    if staged is None:
        return resolved.inputs
    return {"data.input": staged, **({EVAL_DATA: prompts} if prompts else {})}


def eval_data(resolved: Resolved) -> Path | None:
    """The file of a recipe's own prompts, of its bundle where it has one; None: the recipe names none."""
    folder = staged_folder(resolved)
    return (folder and _part(folder, OWN)) or resolved.inputs.get(EVAL_DATA)


def missing_inputs(resolved: Resolved) -> list[Problem]:
    """Those of them that are not there, and every bad row of one's own prompts."""
    problems = [
        Problem("no such file or folder", file=str(path), key=key, fix=f"{key}=PATH names another")
        for key, path in data_inputs(resolved).items()
        if not is_there(path)
    ]
    if (path := eval_data(resolved)) is not None and is_there(path):
        with collect_problems(problems):
            read_prompts(path, EVAL_DATA)
    return problems


def prompts(resolved: Resolved) -> Path | None:
    """The file of prompts in a recipe's bundle; None: the benchmark in the cache, or the project's own."""
    folder = staged_folder(resolved)
    return _part(folder, "benchmark") if folder else None


def _part(folder: Path, what: str) -> Path | None:
    found = parts(read(folder)).get(what) or {}
    return folder / found["path"] if found.get("path") else None


def staged_folder(resolved: Resolved) -> Path | None:
    """The bundle that a recipe reads from, as an absolute path."""
    return expand_home(resolved.recipe.staged).absolute() if resolved.recipe.staged else None


def find_problems(resolved: Resolved) -> list[Problem]:
    """What keeps a recipe from running on the bundle that it names: none there, or one of another model or dataset."""
    folder = staged_folder(resolved)
    if folder is None:
        return []
    if not expand_home(str(resolved.recipe.staged)).is_absolute():
        fix = f"staged={folder}"
        return [Problem("is relative, and jobs run elsewhere", file=str(resolved.recipe.staged), key=STAGED, fix=fix)]
    try:
        held = parts(read(folder))
    except UserError as error:
        return error.problems
    problems: list[Problem] = []
    if resolved.tiny:  # makes its model, and its conversations come with the project
        return problems
    for what, own in (("model", _model_of(resolved)), ("data", _data_of(resolved))):
        have = {key: (held.get(what) or {}).get(key) for key in own}
        if have != own and own["name"] is not None:
            text = f"holds {_as_text(have)}, the recipe asks for {_as_text(own)}"
            fix = "stage the recipe again into a new folder, or name its folder: staged=DIR"
            problems.append(Problem(text, file=str(folder), key=what, fix=fix))
    return problems


def offered(resolved: Resolved, models: Path | None) -> tuple[Path | None, list[str]]:
    """The bundle for a recipe in the cluster's folder of models, under the recipe's name, and why it is skipped.

    It is taken where only this user can have written it: who names ``staged=DIR`` trusts the folder, this is found by its name.
    """
    if models is None or resolved.recipe.staged or resolved.tiny or resolved.recipe.model.weights == "random":
        return None, []
    folder = models / resolved.name
    try:
        if not (folder / MANIFEST).is_file():
            return None, []
        found = folder.stat()
    except OSError as error:
        return None, [f"{folder} is skipped: {error.strerror or error}"]
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        return None, [f"{folder} is skipped: others can write there -> staged={folder} takes it all the same"]
    recipe = resolved.recipe.model_copy(update={STAGED: str(folder)})
    if problems := find_problems(replace(resolved, recipe=recipe)):
        return None, [f"{folder} is skipped: {problems[0].message}"]
    return folder, []


def _model_of(resolved: Resolved) -> dict[str, Any]:
    model = resolved.recipe.model
    if model.weights == "random":  # made by the run
        return {"name": None}
    return {"name": model.name, "revision": model.revision}


def _data_of(resolved: Resolved) -> dict[str, Any]:
    data = resolved.recipe.data
    return {"name": data.name, "revision": None if data.input or data.sources else data.revision}


def _as_text(found: dict[str, Any]) -> str:
    name, revision = found.get("name"), found.get("revision")
    return f"{name}@{revision[:12]}" if revision else str(name)


def variables(folder: Path) -> dict[str, str]:
    """The environment in which every library finds what it needs in a bundle, and asks no server."""
    return {"HF_HUB_CACHE": str(folder / HUB), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


def enter(resolved: Resolved, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have this process, and all that it starts, read from the recipe's bundle. Call before a library of the Hub is loaded.

    Nothing happens for a recipe without one. Raises UserError where it does not fit the recipe.
    """
    folder = staged_folder(resolved)
    if folder is None:
        return
    raise_if(find_problems(resolved))
    ours = variables(folder)
    if environ.get("WANDB_MODE"):
        del ours["WANDB_MODE"]
    environ.update(ours)
