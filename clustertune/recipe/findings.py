"""What checks and pydantic find in a file, in the terms of the person who wrote it, with the line of the key."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from clustertune.errors import Problem, UserError, raise_if
from clustertune.host.credentials import holds_secret, may_name_secret
from clustertune.recipe.layers import Document, KeyPath, did_you_mean, nearest

Found = tuple[KeyPath, str, str | None]
"""A key path, what is wrong with it, and what to do."""
Part = TypeVar("Part", bound=BaseModel)
SECRET_FIX = "take it out of the file: log in with `hf auth login` or `wandb login`, and renew what was written down"  # noqa: S105


def show_value(value: object, key: str = "") -> str:
    """A value for a message: short, in one line, and never a secret."""
    if may_name_secret(key) or holds_secret(value):
        return "the value (not shown)"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether a value is a whole number from ``least`` on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def usable(value: object, otherwise: int) -> int:
    """A positive whole number, also where it is written as text; ``otherwise`` for what the schema refuses."""
    try:
        number = int(value) if is_number(value) or isinstance(value, str) else otherwise
    except (ValueError, OverflowError):
        return otherwise
    return number if number >= 1 else otherwise


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


def as_problems(findings: Iterable[Found], document: Document) -> list[Problem]:
    """Findings in a document with their lines."""
    return [
        Problem(message, file=document.position(tuple(path)), key=key_of(document, path) or None, fix=fix)
        for path, message, fix in findings
    ]


def parse_partial(model: type[Part], value: object) -> tuple[Part | None, bool]:
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


def read_model(model: type[Part], document: Document, check: Callable[[Part], Iterable[Found]] = lambda _: ()) -> Part:
    """A whole file as a model. Raises UserError with all that pydantic or, where the types are right, ``check`` finds."""
    try:
        part = model.model_validate(document.data)
    except ValidationError as error:
        raise UserError(as_problems(schema_findings(model, error), document)) from None
    raise_if(as_problems(check(part), document))
    return part


def schema_findings(
    root: type[BaseModel], error: ValidationError, hints: Mapping[KeyPath, str] | None = None
) -> Iterator[Found]:
    """Every finding of pydantic. ``hints``: what to do about keys that are missing."""
    for item in error.errors(include_url=False):
        path = tuple(str(part) for part in item["loc"] if part != "[key]")
        kind, value = item["type"], item.get("input")
        name = next((part for part in reversed(path) if not part.isdigit()), "")
        shown, fix = show_value(value, name), None
        if kind == "extra_forbidden" and may_name_secret(name) and nearest(name, _siblings(root, path)) is None:
            message, fix = "looks like a secret and is not a key of this file (value not shown)", SECRET_FIX
        elif kind == "extra_forbidden":
            message, fix = "unknown key", did_you_mean(name, _siblings(root, path))
        elif kind == "missing":
            message, fix = "missing", (hints or {}).get(path)
        elif kind == "too_short":
            message, fix = "empty", "name at least one"
        elif kind == "literal_error":
            choices = re.findall(r"'([^']*)'", str(item.get("ctx", {}).get("expected", "")))
            unknown = item["loc"][-1] == "[key]"
            message = "unknown key" if unknown else f"{shown} is not one of {', '.join(choices)}"
            fix = did_you_mean(value, choices) if isinstance(value, str) else None
        elif kind in {"dict_type", "model_type", "model_attributes_type"}:
            message = "empty" if value is None else f"{shown} is not a section of keys and values"
        elif kind in {"tuple_type", "list_type"}:
            message, fix = f"{shown} is not a list", "write [...], or one '- ' line for each"
        else:
            text = str(item["msg"]).removeprefix("Value error, ")
            text = text.replace("Input should be", "should be").replace("Input", "it")
            message = f"{shown}{' ' if text.startswith('is ') else ': '}{text}"
            if kind == "value_error" and isinstance(value, Mapping):  # of several keys together: it names them
                message = text
            fix = "put it in quotes" if kind == "string_type" and value is not None else None
        yield path, message, fix


def _siblings(root: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys that the section of a path takes."""
    current = root
    for part in path[:-1]:
        if part in current.model_fields:
            section = _section(current.model_fields[part].annotation)
            if section is None:
                return []
            current = section
    return list(current.model_fields)


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in {Union, types.UnionType, tuple, dict}:
        return next((section for part in get_args(annotation) if (section := _section(part))), None)
    return None
