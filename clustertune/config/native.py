"""The fields of the pinned ``SFTConfig`` and ``LoraConfig``, and values checked against them."""

from __future__ import annotations

import json
import math
import types
from dataclasses import dataclass
from functools import cache, reduce
from typing import Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from clustertune.config.library_facts import facts
from clustertune.config.schema import Number, refuse_bool

UNKNOWN = object()
"""The default of a field that is made anew for each object, or is not a plain value."""

_WHOLE = Annotated[int, BeforeValidator(refuse_bool)]
_PLAIN: dict[str, Any] = {
    "int": _WHOLE, "float": Number, "str": str, "bool": bool, "dict": dict[str, Any], "list": list[Any], "Any": Any,
}  # fmt: skip
_HOLDERS: dict[str, type] = {"list": list, "dict": dict, "tuple": tuple}


Kind = list[Any]
"""One kind of value as JSON: its sort, and what belongs to it.

``["none"]``, ``["plain", "int"]``, ``["words", "a", "b"]`` (one of these), ``["pattern", "^a$"]`` (a text of this form),
``["holds", "list", [kinds of its entries]]``.
"""


@dataclass(frozen=True)
class NativeField:
    """One field of a foreign dataclass."""

    name: str
    default: Any
    """The default value, or :data:`UNKNOWN`."""
    kinds: list[Kind] | None
    """What its value may be, one of them; None where the field takes a Python object that YAML cannot give."""
    expected: str
    """What the field takes, in words."""
    choices: tuple[str, ...] = ()
    """The words that it takes, where they are numbered."""


@cache
def train_fields() -> dict[str, NativeField]:
    """The fields of TRL's ``SFTConfig`` with those of its bases."""
    return _fields("trl")


@cache
def lora_fields() -> dict[str, NativeField]:
    """The fields of PEFT's ``LoraConfig`` with those of its bases."""
    return _fields("peft")


def _fields(library: str) -> dict[str, NativeField]:
    return {
        name: NativeField(name, item.get("default", UNKNOWN), item["kinds"], item["expected"], tuple(item["choices"]))
        for name, item in facts(library)["fields"].items()
    }


def reporters() -> tuple[str, ...]:
    """What ``report_to`` can name: the keys of transformers' table of integrations."""
    return tuple(facts("trl")["reporters"])


def schedule_arguments(name: str) -> list[str]:
    """What ``lr_scheduler_kwargs`` may hold for a schedule of transformers."""
    return list(facts("trl")["schedulers"][name])


def optimizer_arguments(name: str) -> list[str] | None:
    """The keys that transformers reads from ``optim_args`` for an optimizer; None where it passes all of them on."""
    found = facts("trl")["optimizers"].get(name)
    return None if found is None else list(found)


def check_value(field: NativeField, value: Any) -> Any:
    """The value as the field takes it: the text "5e-5" becomes a number, ``true`` does not.

    Raises ValueError with what the field takes.
    """
    if value is None:
        if field.kinds is None or field.default is None or ["none"] in field.kinds:
            return None
        raise ValueError(f"empty; it takes {field.expected}")
    if field.kinds is None:
        raise ValueError("takes a Python object, which a recipe cannot give")
    if not _finite(value):
        raise ValueError("not a finite number")
    try:
        checked = _adapter(json.dumps(field.kinds)).validate_python(value)
    except ValidationError:
        raise ValueError(f"it takes {field.expected}") from None
    # `float` fields such as logging_steps take whole numbers too, and mean them.
    return value if type(value) is int and isinstance(checked, float) else checked


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return all(map(_finite, value)) if isinstance(value, list) else True


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    """What checks values of the kinds that are written so in JSON."""
    return TypeAdapter(reduce(lambda a, b: Union[a, b], map(_pydantic_type, json.loads(name))))  # noqa: UP007 (not all are types)


def _pydantic_type(kind: Kind) -> Any:
    sort, *given = kind
    if sort == "none":
        return None
    if sort == "plain":
        return _PLAIN[given[0]]
    if sort == "words":
        return Literal[tuple(given)]
    if sort == "pattern":
        return Annotated[str, Field(pattern=given[0])]
    return types.GenericAlias(_HOLDERS[given[0]], tuple(_pydantic_type(inner) for inner in given[1]))
