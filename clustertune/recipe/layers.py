"""From a recipe's name to its layers: base, recipe, tiny and overrides, laid over each other with the origin of each value."""

from __future__ import annotations

import copy
import difflib
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError, collect_problems
from clustertune.recipe.sections import NAME, named_bases
from clustertune.recipe.yamlfile import Document, Emptied, KeyPath, parse_value, read_yaml
from clustertune.tree import ROOT

RECIPES = ROOT / "recipes"
"""The recipes that come with the project."""
COMMAND_LINE = "command line"
DESCRIPTION = "model.json"
"""A model's architecture, beside the recipe (recipe/architecture.py)."""
BESIDE = ("accelerate", "deepspeed")
"""Prefixes of overrides that go over a file beside the recipe: ``accelerate.mixed_precision=fp16``."""


@dataclass(frozen=True)
class Layer:
    """One source of values: its origin in ``show``, and where each of its keys stands."""

    origin: str
    document: Document


@dataclass
class Layers:
    """The layers of one recipe, from the weakest to the strongest."""

    folder: Path
    shown: str
    """The recipe folder as it is named in messages."""
    layers: list[Layer] = field(default_factory=list)
    file_overrides: dict[str, Document] = field(default_factory=dict)
    """Overrides of the accelerate and DeepSpeed files, by their prefix: ``accelerate``, ``deepspeed``."""

    def merged(self) -> tuple[dict[str, Any], dict[KeyPath, Layer]]:
        """The values on top, and for each leaf the layer that gave it."""
        values: dict[str, Any] = {}
        owners: dict[KeyPath, Layer] = {}
        for layer in self.layers:
            _lay_over(values, owners, layer.document.data, layer, ())
        return values, owners

    def position(self, path: KeyPath, owners: Mapping[KeyPath, Layer]) -> str:
        """The file (and line) to name for a key path: its owner's, else the file that should hold it."""
        for end in range(len(path), 0, -1):
            for leaf, layer in owners.items():
                if leaf[:end] == path[:end]:
                    return layer.document.position(path)
        return f"{self.shown}/recipe.yaml"


def _lay_over(
    values: dict[str, Any], owners: dict[KeyPath, Layer], top: Mapping[str, Any], layer: Layer, path: KeyPath
) -> None:
    for key, value in top.items():
        key_path = (*path, key)
        if isinstance(value, dict) and value and not isinstance(value, Emptied) and isinstance(values.get(key), dict):
            owners.pop(key_path, None)
            _lay_over(values[key], owners, value, layer, key_path)
            continue
        for leaf in [leaf for leaf in owners if leaf[: len(key_path)] == key_path]:
            del owners[leaf]
        if isinstance(value, dict) and value:
            values[key] = {}
            _lay_over(values[key], owners, value, layer, key_path)
            continue
        values[key] = copy.deepcopy(value)
        owners[key_path] = layer


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The known word that a misspelt one most likely means."""
    known = list(choices)
    lowered = {name.lower(): name for name in known}
    begun = [name for name in lowered if len(word) > 2 and name.startswith(word.lower())]
    same_letters = [name for name in lowered if sorted(name) == sorted(word.lower())]
    found = sorted(begun, key=len)[:1] or same_letters[:1] or difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """A fix that names the nearest known word, or all of them where there are few."""
    known = sorted(choices)
    close = nearest(word, known)
    if close is not None:
        return f"did you mean {close}?"
    return f"known here: {', '.join(known)}" if len(known) <= 16 else None


def find_folder(recipe: str | Path) -> tuple[Path, str]:
    """The folder of a recipe given as a folder, its ``recipe.yaml``, or a bare name below ``recipes/``; and how to call it.

    Raises UserError where there is none, with the nearest name.
    """
    given = str(recipe)
    if not given or "\0" in given or len(given) > 4096:
        raise _refused(f"{given[:60]!r} is not a recipe")
    path = Path(given)
    try:
        if path.name == "recipe.yaml" and path.is_file():
            path = path.parent
        places = [path]
        if re.fullmatch(NAME, given):
            places += [Path("recipes", given), RECIPES / given]
        elif not path.is_absolute() and path.parts[:1] == ("recipes",):
            places.append(RECIPES.parent / path)
        folder = next((folder_ for folder_ in places if (folder_ / "recipe.yaml").is_file()), None)
        folder = folder or next((folder_ for folder_ in places if folder_.is_dir()), None)
    except OSError as error:
        raise _refused(f"{given!r} cannot be read: {error.strerror or error}") from None
    if folder is None:
        known = sorted({entry.parent.name for below in (Path("recipes"), RECIPES) for entry in below.glob("*/recipe.yaml")})
        looked = ", ".join(dict.fromkeys(str(place.parent.absolute()) for place in places[1:] or places))
        raise _refused(f"there is no recipe {given!r} (looked in {looked})", did_you_mean(path.name, known))
    if not re.fullmatch(NAME, folder.resolve().name):
        text = f"the folder name {folder.resolve().name!r} becomes a path and a job name and may hold only letters, digits, "
        text += "'.', '_' and '-' (64 at most, the first a letter or digit)"
        raise UserError(Problem(text, file=str(folder), fix="rename the folder"))
    return folder.resolve(), str(folder)


def _refused(text: str, fix: str | None = None) -> UserError:
    return UserError(Problem(text, file=COMMAND_LINE, key="RECIPE", fix=fix))


def read_layers(folder: Path, shown: str, overrides: Sequence[str]) -> tuple[Layers, list[Problem]]:
    """Read base, recipe and overrides. What cannot be read is a problem, not an exception: the rest is still checked."""
    problems: list[Problem] = []
    layers = Layers(folder, shown)
    try:
        recipe = read_yaml(folder / "recipe.yaml", f"{shown}/recipe.yaml")
    except UserError as error:
        problems += error.problems
        recipe = None
    command_line, layers.file_overrides, wrong = read_overrides(overrides)
    problems += wrong
    if recipe is None:
        return layers, problems
    asking = command_line if "base" in command_line.data else recipe
    try:
        bases = named_bases(asking.data.get("base", []))
    except ValueError as error:
        problems.append(Problem(str(error), file=asking.position(("base",)), key="base"))
        del asking.data["base"]  # reported once: the schema would report it again
        bases = []
    for base in bases:
        with collect_problems(problems):
            layers.layers.append(_read_base(base, asking, folder, shown))
    layers.layers.append(Layer("recipe", recipe))
    if command_line.data:
        layers.layers.append(Layer("override", command_line))
    return layers, problems


def base_folder(folder: Path) -> Path:
    """The bases of a recipe: beside its folder, else the project's."""
    beside = folder.parent / "_base"
    return beside if beside.is_dir() else RECIPES / "_base"


def same_model(folder: Path, model: object) -> Path | None:
    """The recipe folder whose ``model.json`` describes the same ``model`` (the section): a model is described once.

    Looked for where the bases of ``folder`` are.
    """
    name = model.get("name") if isinstance(model, dict) else None
    if not isinstance(name, str):
        return None
    for file in sorted(base_folder(folder).parent.glob(f"*/{DESCRIPTION}")):
        recipe = file.parent / "recipe.yaml"
        try:
            found = read_yaml(recipe, str(recipe)).data.get("model") if name in recipe.read_text("utf-8") else None
        except (OSError, UnicodeDecodeError, UserError):
            continue  # a recipe that cannot be read says nothing of this one
        if isinstance(found, dict) and found.get("name") == name:
            return file.parent
    return None


def find_elsewhere(folder: Path, bases: Iterable[str], model: Mapping[str, Any]) -> list[Path]:
    """What a recipe is made of and lies outside its folder: its bases, a chat template, the description of its model."""
    shared = base_folder(folder)
    found = [shared / f"{name}.yaml" for name in bases]
    template = model.get("chat_template")
    if template and not (folder / template).is_file():
        found.append(shared / template)
    if not os.path.lexists(folder / DESCRIPTION) and (other := same_model(folder, model)) is not None:
        found += [other / "recipe.yaml", other / DESCRIPTION]
    return found


def _read_base(base: str, asking: Document, folder: Path, shown: str) -> Layer:
    where = base_folder(folder)
    known = [entry.stem for entry in where.glob("*.yaml")]
    if base not in known:
        fix = did_you_mean(base, known)
        raise UserError(Problem(f"there is no base {base!r}", file=asking.position(("base",)), key="base", fix=fix))
    name = str(Path(shown).parent / "_base" / f"{base}.yaml") if where.parent == folder.parent else f"recipes/_base/{base}.yaml"
    document = read_yaml(where / f"{base}.yaml", name)
    if "base" in document.data:
        origin, fix = document.position(("base",)), "write its values out"
        raise UserError(Problem("a base has no base of its own", file=origin, key="base", fix=fix))
    return Layer(f"base {base}", document)


def _cut_by_the_shell(overrides: Sequence[str]) -> Problem | None:
    """A value in braces or brackets that the shell cut at its blanks: the words behind it are its rest."""
    for number, text in enumerate(overrides[:-1]):
        key, _, value = text.partition("=")
        if value[:1] in ("{", "[") and value.count(value[0]) > value.count({"{": "}", "[": "]"}[value[0]]):
            whole = " ".join(overrides[number:])
            said = f"the shell has cut {value!r} off from {overrides[number + 1]!r}"
            return Problem(said, file=COMMAND_LINE, key=key, fix=f"quote it: {shlex.quote(whole)}")
    return None


def read_overrides(overrides: Sequence[str]) -> tuple[Document, dict[str, Document], list[Problem]]:
    """``section.key=value`` arguments: the recipe's, and those of each file beside it; the last of two for one key holds.

    After ``section=null`` a ``section.key=value`` begins with an empty section (:class:`Emptied`).
    """
    data: dict[str, Any] = {}
    beside: dict[str, dict[str, Any]] = {name: {} for name in BESIDE}
    problems: list[Problem] = []
    if (cut := _cut_by_the_shell(overrides)) is not None:
        return Document(COMMAND_LINE, {}), {name: Document(COMMAND_LINE, {}) for name in BESIDE}, [cut]
    for text in overrides:
        key, equals, value = text.partition("=")
        path = tuple(key.split("."))
        if not equals or not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", part) for part in path):
            shown, fix = key if equals else text, "write section.key=value, as train.seed=7"
            problems.append(Problem(f"invalid override {shown[:60]!r}", file=COMMAND_LINE, fix=fix))
            continue
        try:
            parsed = parse_value(value)
        except ValueError as error:
            problems.append(Problem(str(error), file=COMMAND_LINE, key=key))
            continue
        section = data
        if path[0] in BESIDE and len(path) > 1:
            section, path = beside[path[0]], path[1:]
        for part in path[:-1]:
            if not section.get(part, True):
                section[part] = Emptied()
            elif not isinstance(section.get(part), dict):
                section[part] = {}
            section = section[part]
        section[path[-1]] = parsed
    return Document(COMMAND_LINE, data), {name: Document(COMMAND_LINE, body) for name, body in beside.items()}, problems
