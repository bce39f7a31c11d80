"""Reading the installed libraries' source instead of importing it: ``import trl`` takes 7 s, parsing what is needed 0.3 s."""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from clustertune.errors import Problem, UserError

_watching: list[set[tuple[str, str]]] = []
"""Who wants to know which files are looked at: one set of (package, file) each."""


@cache
def package_folder(name: str) -> Path:
    """Where an installed top-level package lies. Raises UserError where it is not installed."""
    spec = find_spec(name)  # a top-level name: nothing is imported
    if spec is None or spec.origin is None:
        raise UserError(Problem(f"the Python package {name} is not installed", fix="run make setup"))
    return Path(spec.origin).parent


def watch() -> set[tuple[str, str]]:
    """A set that gains the (package, file) of whatever is looked at from now on, until :func:`unwatch`."""
    seen: set[tuple[str, str]] = set()
    _watching.append(seen)
    return seen


def unwatch() -> None:
    """End the newest :func:`watch`."""
    _watching.pop()


def looked_at(package: str, relative: str) -> None:
    """Tell all who watch that something was made out of this file, or out of its absence."""
    for seen in _watching:
        seen.add((package, relative))


@cache
def _content(package: str, relative: str) -> bytes | None:
    try:
        return (package_folder(package) / relative).read_bytes()
    except FileNotFoundError:
        return None


@cache
def content_digest(package: str, relative: str) -> str | None:
    """A digest of one file of an installed package; None where there is no such file. Raises UserError, OSError."""
    content = _content(package, relative)
    return None if content is None else hashlib.blake2b(content, digest_size=16).hexdigest()


def has_file(package: str, relative: str) -> bool:
    """Whether an installed package has a file."""
    looked_at(package, relative)
    return _content(package, relative) is not None


def parse_module(package: str, relative: str) -> ast.Module:
    """The syntax tree of one file of an installed package. Raises UserError where the file is not there."""
    looked_at(package, relative)
    return _parse(package, relative)


@cache
def _parse(package: str, relative: str) -> ast.Module:
    content = _content(package, relative)
    if content is None:
        raise UserError(Problem(f"the installed {package} has no {relative}", fix="install the pinned versions: make setup"))
    return ast.parse(content.decode("utf-8"))


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
