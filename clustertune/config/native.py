"""The fields of the installed ``SFTConfig`` and ``LoraConfig``, read from their source, and values checked against them."""

from __future__ import annotations

import ast
import json
import math
import re
import types
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from clustertune.config.remembered import remembered
from clustertune.config.schema import Number, refuse_bool
from clustertune.config.source import annotated, classes, enum_values, has_file, parse_module

UNKNOWN = object()
"""The default of a field whose source is not a plain value."""

_WHOLE = Annotated[int, BeforeValidator(refuse_bool)]
_PLAIN: dict[str, tuple[Any, str]] = {
    "int": (_WHOLE, "a whole number"),
    "float": (Number, "a number"),
    "str": (str, "text"),
    "bool": (bool, "true or false"),
    "dict": (dict[str, Any], "a mapping"),
    "list": (list[Any], "a list"),
    "Any": (Any, "any value"),
}
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
    annotation: str
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
    return _made(_fields("trl", "trainer/sft_config.py", "SFTConfig"))


@cache
def lora_fields() -> dict[str, NativeField]:
    """The fields of PEFT's ``LoraConfig`` with those of its bases."""
    return _made(_fields("peft", "tuners/lora/config.py", "LoraConfig"))


def _made(read: dict[str, dict[str, Any]]) -> dict[str, NativeField]:
    return {
        name: NativeField(
            name, item["annotation"], item.get("default", UNKNOWN), item["kinds"], item["expected"], tuple(item["choices"])
        )
        for name, item in read.items()
    }


@cache
def reporters() -> tuple[str, ...]:
    """What ``report_to`` can name: the keys of transformers' table of integrations."""
    return tuple(_reporters())


@remembered
def _reporters() -> list[str]:
    for item in parse_module("transformers", "integrations/integration_utils.py").body:
        if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "INTEGRATION_TO_CALLBACK":
            assert isinstance(item.value, ast.Dict)
            return [str(ast.literal_eval(key)) for key in item.value.keys if key is not None]
    return []


@remembered
def _fields(package: str, relative: str, name: str) -> dict[str, dict[str, Any]]:
    """By name, what :class:`NativeField` holds; a default that is no plain value is left out."""
    node = classes(parse_module(package, relative))[name]
    result: dict[str, dict[str, Any]] = {}
    for base in reversed(node.bases):
        found = _find_class(package, relative, ast.unparse(base))
        if found is not None and found[0] in {"trl", "transformers", "peft"} and _is_dataclass(found[2]):
            result |= _fields(found[0], found[1], found[2].name)
    for item in annotated(node):
        result[ast.unparse(item.target)] = _read_field(package, relative, item)
    return result


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any(ast.unparse(item).startswith("dataclass") for item in node.decorator_list)


def _find_class(package: str, relative: str, name: str) -> tuple[str, str, ast.ClassDef] | None:
    """Follow a name through ``from x import name`` to the class: its package, file and node."""
    module = parse_module(package, relative)
    if name in classes(module):
        return package, relative, classes(module)[name]
    for item in module.body:
        if isinstance(item, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in item.names):
            target = _imported_file(package, relative, item)
            return _find_class(*target, name) if target else None
    return None


def _imported_file(package: str, relative: str, item: ast.ImportFrom) -> tuple[str, str] | None:
    parts = (item.module or "").split(".") if item.module else []
    if item.level:
        folder = PurePosixPath(relative)
        for _ in range(item.level):
            folder = folder.parent
        path = folder.joinpath(*parts)
    elif parts and parts[0] in {"trl", "transformers", "peft", "accelerate"}:
        package, path = parts[0], PurePosixPath(*parts[1:])
    else:
        return None
    if package == "transformers" and str(path) == ".":
        # The package's own __init__ is lazy; the one class that TRL takes from it lies here.
        return package, "training_args.py"
    for candidate in (f"{path}.py", str(path / "__init__.py")):
        if has_file(package, candidate):
            return package, candidate
    return None


def _read_field(package: str, relative: str, item: ast.AnnAssign) -> dict[str, Any]:
    annotation = ast.unparse(item.annotation)
    default, choices = _read_default(item.value)
    if choices:
        kinds: list[Kind] = [["words", *choices]]
        words = [_one_of(choices)]
        if "None" in annotation:
            kinds.append(["none"])
    else:
        kinds, words, choices = _read_type(package, relative, item.annotation)
    known = kinds if any(kind != ["none"] for kind in kinds) else None
    found = {"annotation": annotation, "kinds": known, "expected": " or ".join(words), "choices": list(choices)}
    return found if default is UNKNOWN else {**found, "default": default}


def _read_default(value: ast.expr | None) -> tuple[Any, tuple[str, ...]]:
    """The default of ``= field(default=..., metadata={"choices": [...]})`` or of a plain value."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == "field"):
        return (_literal(value) if value is not None else UNKNOWN), ()
    default: Any = UNKNOWN
    choices: tuple[str, ...] = ()
    for keyword in value.keywords:
        if keyword.arg == "default":
            default = _literal(keyword.value)
        elif keyword.arg == "metadata" and isinstance(keyword.value, ast.Dict):
            for key, entry in zip(keyword.value.keys, keyword.value.values, strict=True):
                found = _literal(entry)
                if key is not None and _literal(key) == "choices" and isinstance(found, list):
                    choices = tuple(str(word) for word in found)
    return default, choices


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return UNKNOWN


def _read_type(package: str, relative: str, node: ast.expr) -> tuple[list[Kind], list[str], tuple[str, ...]]:
    """The alternatives of an annotation: their kinds, words for them, and the words of an enumeration among them."""
    kinds: list[Kind] = []
    words: list[str] = []
    choices: tuple[str, ...] = ()
    enumerated = False
    for part in _alternatives(node):
        text = ast.unparse(part)
        if text == "None":
            kinds.append(["none"])
        elif text.startswith("Literal["):
            inner = part.slice if isinstance(part, ast.Subscript) else part
            given = [ast.literal_eval(e) for e in (inner.elts if isinstance(inner, ast.Tuple) else [inner])]
            kinds += [_literal_kind(value) for value in given]
            choices += tuple(str(value) for value in given)
            words.append(_one_of(tuple(map(str, given))))
        elif (plain := _plain_kind(part)) is not None:
            kinds.append(plain[0])
            words.append(plain[1])
        elif (found := _find_class(package, relative, text)) is not None and (values := enum_values(found[2])):
            kinds.append(["words", *values])
            choices += values
            enumerated = True
            words.append(_one_of(values))
    if enumerated and "text" in words:
        # `SchedulerType | str`: the text is one of the enumeration's, whatever the annotation says.
        kinds.remove(["plain", "str"])
        words.remove("text")
    return kinds, words, choices


def _one_of(words: tuple[str, ...]) -> str:
    return f"one of {', '.join(words if len(words) <= 12 else words[:8])}" + (", ..." if len(words) > 12 else "")


def _alternatives(node: ast.expr) -> Iterable[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _alternatives(node.left)
        yield from _alternatives(node.right)
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] in {"Optional", "Union"}:
        if ast.unparse(node.value).endswith("Optional"):
            yield ast.Constant(None)
        for part in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            yield from _alternatives(part)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _alternatives(ast.parse(node.value, mode="eval").body)
    else:
        yield node


def _literal_kind(value: Any) -> Kind:
    if isinstance(value, str) and "[" in value:
        # PEFT writes "pissa_niter_[number of iters]" for pissa_niter_16.
        pattern = re.sub(r"\\\[.*?\\\]", r"[0-9]+", re.escape(value))
        return ["pattern", f"^{pattern}$"]
    return ["words", value]


def _plain_kind(node: ast.expr) -> tuple[Kind, str] | None:
    """``int``, ``list[str]``, ``dict[str, Any]`` and the like: the kind and words for it; None for other classes."""
    if isinstance(node, ast.Name):
        return (["plain", node.id], _PLAIN[node.id][1]) if node.id in _PLAIN else None
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        return None
    inner = [_plain_kind(part) for part in (node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])]
    if any(part is None for part in inner) or node.value.id not in _HOLDERS:
        return None
    parts = [part for part in inner if part is not None]
    words = {"list": f"a list of {_plural(parts[0][1])}", "tuple": "a fixed list"}.get(node.value.id, "a mapping")
    return ["holds", node.value.id, [part[0] for part in parts]], words


def _plural(words: str) -> str:
    return {"a whole number": "whole numbers", "a number": "numbers", "text": "words"}.get(words, words)


def check_value(field: NativeField, value: Any) -> Any:
    """The value as the field takes it: the text "5e-5" becomes a number, ``true`` does not.

    Raises ValueError with what the field takes.
    """
    if value is None:
        if field.kinds is None or field.default is None or _takes_none(field):
            return None
        raise ValueError(f"empty; it takes {field.expected}")
    if field.kinds is None:
        raise ValueError("takes a Python object, which a recipe cannot give")
    if not _finite(value):
        raise ValueError("not a finite number")
    try:
        checked = value if _is_plainly(field.kinds, value) else _adapter(json.dumps(field.kinds)).validate_python(value)
    except ValidationError:
        raise ValueError(f"it takes {field.expected}") from None
    # `float` fields such as logging_steps take whole numbers too, and mean them.
    return value if type(value) is int and isinstance(checked, float) else checked


def _takes_none(field: NativeField) -> bool:
    return any(ast.unparse(part) == "None" for part in _alternatives(ast.parse(field.annotation, mode="eval").body))


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return all(map(_finite, value)) if isinstance(value, list) else True


def _is_plainly(kinds: list[Kind], value: Any) -> bool:
    """Whether pydantic would give the value back as it is; to build a validator that says so takes longer than the rest."""
    if isinstance(value, str):
        return any(k == ["plain", "str"] or (k[0] == "words" and value in k[1:]) for k in kinds)
    return type(value) in {bool, int, float} and ["plain", type(value).__name__] in kinds


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    """What checks values of the kinds that are written so in JSON."""
    return TypeAdapter(reduce(lambda a, b: Union[a, b], map(_pydantic_type, json.loads(name))))  # noqa: UP007 (not all are types)


def _pydantic_type(kind: Kind) -> Any:
    sort, *given = kind
    if sort == "none":
        return None
    if sort == "plain":
        return _PLAIN[given[0]][0]
    if sort == "words":
        return Literal[tuple(given)]
    if sort == "pattern":
        return Annotated[str, Field(pattern=given[0])]
    return types.GenericAlias(_HOLDERS[given[0]], tuple(_pydantic_type(inner) for inner in given[1]))
