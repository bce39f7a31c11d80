"""What pydantic finds in a cluster or hardware file, in the words of the person who wrote it."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from clustertune.config.load import did_you_mean
from clustertune.config.native_rules import show_value
from clustertune.config.yamlfile import Document
from clustertune.errors import Problem

Found = tuple[tuple[str, ...], str, str | None]
"""A key path, what is wrong with it, and what to do."""
Part = TypeVar("Part", bound=BaseModel)

_PATTERNS = {
    "name": "a name of letters, digits, '.', '_' and '-'",
    "node": "a name of letters, digits, '.', '_' and '-'",
    "interface": "the name of a network interface, as bond0",
    "partition": "a name of letters, digits, '.', '_' and '-'",
    "gres": "a GRES type name, as rtx_pro_6000",
    "max_time": "UNLIMITED or a Slurm time such as 48:00:00 or 2-00:00:00",
    "version": "a version, as 23.11.4",
    "hca": "an RDMA adapter, as mlx5_0 or mlx5_0:1",
    "gpu": "a name of letters, digits, '.', '_' and '-'",
    "image": "an absolute path of letters, digits and . _ @ + -, nor docker://NAME@sha256:DIGEST (a tag moves)",
}
_PLAIN: dict[str, tuple[str, str | None]] = {
    "extra_forbidden": ("unknown key", None),
    "missing": ("missing", None),
    "too_short": ("empty", "name at least one"),
}
_PATH = "an absolute path of letters, digits and . _ @ + - (it becomes a field of fstab and an argument)"
_PATH_KEYS = ("path", "mount", "device", "shared", "scratch", "image", "program")


def salvage(model: type[Part], value: object) -> tuple[Part | None, bool]:
    """What of a section can be read, the rest None, and whether all of it could; (None, False) where there is no section.

    One wrong key must not hide that two others contradict each other.
    """
    try:
        return model.model_validate(value), True
    except ValidationError as error:
        if not isinstance(value, Mapping):
            return None, False
        wrong = {str(item["loc"][0]) for item in error.errors() if item["loc"]} & set(model.model_fields)
        good = {key: inner for key, inner in value.items() if key in model.model_fields and key not in wrong}
        return model.model_construct(None, **good, **dict.fromkeys(wrong)), False


def place_of(document: Document, path: Sequence[str]) -> str:
    """``file:line`` of a key path."""
    return document.place(tuple(path))


def key_of(document: Document, path: Sequence[str]) -> str:
    """A key path for a message: an item of a list by its name where it has one, ``nodes[node1].address``."""
    shown = ""
    value: Any = document.data
    for part in path:
        inner: Any = None
        if isinstance(value, Mapping):
            inner = value.get(part)
            shown += f".{part}" if shown else part
        else:
            if isinstance(value, list) and part.isdigit() and int(part) < len(value):
                inner = value[int(part)]
            name = inner.get("name") or inner.get("mount") if isinstance(inner, Mapping) else None
            shown += f"[{name if isinstance(name, str) and len(name) <= 64 else part}]"
        value = inner
    return shown


def schema_problems(root: type[BaseModel], error: ValidationError, document: Document) -> list[Problem]:
    """Every finding of pydantic, with the place in the file and the nearest name."""
    found = []
    for item in error.errors(include_url=False):
        path = [str(part) for part in item["loc"] if part != "[key]"]
        message, fix = _words(item, path, root)
        found.append(Problem(message, file=place_of(document, path), key=key_of(document, path) or None, fix=fix))
    return found


def _words(item: Mapping[str, Any], path: Sequence[str], root: type[BaseModel]) -> tuple[str, str | None]:
    kind, value = item["type"], item.get("input")
    name = next((part for part in reversed(path) if not part.isdigit()), "")
    if kind in _PLAIN:
        message, fix = _PLAIN[kind]
        if kind == "extra_forbidden":
            fix = did_you_mean(path[-1], _siblings(root, path))
    elif kind == "literal_error":
        words = re.findall(r"'([^']*)'", str(item.get("ctx", {}).get("expected", "")))
        message = f"{show_value(value)} is not one of {', '.join(words)}"
        fix = did_you_mean(value, words) if isinstance(value, str) else None
    elif kind == "string_pattern_mismatch":
        message, fix = (
            f"{show_value(value)} is not {_PATTERNS.get(name) or (_PATH if name in _PATH_KEYS else 'as it must be')}",
            None,
        )
    elif kind in {"dict_type", "model_type", "model_attributes_type"}:
        message, fix = "empty" if value is None else f"{show_value(value)} is not a section of keys and values", None
    elif kind in {"tuple_type", "list_type"}:
        message, fix = f"{show_value(value)} is not a list", "write [...], or one '- ' line for each"
    else:
        text = str(item["msg"]).removeprefix("Value error, ")
        message = f"{show_value(value)}: {text.replace('Input should be', 'should be').replace('Input', 'it')}"
        fix = "put it in quotes" if kind == "string_type" and value is not None else None
    return message, fix


def _siblings(root: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys that the section of a path takes."""
    current: type[BaseModel] = root
    for part in path[:-1]:
        if part in current.model_fields:
            found = _section(current.model_fields[part].annotation)
            if found is None:
                return []
            current = found
    return list(current.model_fields)


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in {Union, types.UnionType, tuple, dict}:
        return next((found for part in get_args(annotation) if (found := _section(part))), None)
    return None
