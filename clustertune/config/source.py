"""Reading the installed libraries' source instead of importing it: ``import trl`` takes 7 s, parsing what is needed 0.3 s."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from clustertune.errors import Problem, UserError


@cache
def package_folder(name: str) -> Path:
    """Where an installed top-level package lies. Raises UserError where it is not installed."""
    spec = find_spec(name)  # a top-level name: nothing is imported
    if spec is None or spec.origin is None:
        raise UserError(Problem(f"the Python package {name} is not installed", fix="run make setup"))
    return Path(spec.origin).parent


@cache
def parse_module(package: str, relative: str) -> ast.Module:
    """The syntax tree of one file of an installed package. Raises UserError where the file is not there."""
    path = package_folder(package) / relative
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            Problem(f"the installed {package} has no {relative}", fix="install the pinned versions: make setup")
        ) from None


def classes(module: ast.Module) -> dict[str, ast.ClassDef]:
    """The top-level classes of a module."""
    return {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}


def annotated(node: ast.ClassDef) -> list[ast.AnnAssign]:
    """The annotated names of a class body, ``ClassVar`` and private ones left out: a dataclass's fields."""
    return [
        item
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and not item.target.id.startswith("_")
        and not ast.unparse(item.annotation).startswith(("ClassVar", "typing.ClassVar", "InitVar"))
    ]


def enum_values(node: ast.ClassDef) -> tuple[str, ...]:
    """The string values of an enumeration's members."""
    return tuple(
        item.value.value
        for item in node.body
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)
    )


def string_list(module: ast.Module, name: str) -> tuple[str, ...]:
    """The strings of a module's constant ``NAME = ["a", "b"]``."""
    for item in module.body:
        if isinstance(item, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in item.targets):
            return tuple(str(value) for value in ast.literal_eval(item.value))
    raise KeyError(name)
