"""The modules that a model class of transformers builds, read from its source: what LoRA can be put onto."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from clustertune.config.modeling import read_source
from clustertune.config.remembered import remembered
from clustertune.config.source import classes

LEAVES = ("Linear", "Conv1D", "Embedding")
_LISTS = ("ModuleList", "Sequential")
_DEEPEST = 8


@remembered
def module_names(kind: str, top: str) -> dict[str, str]:
    """The modules of one model class that LoRA can replace: full name, with layer 0 for all layers -> class.

    Both branches of a condition count: the configuration decides. Empty where a part is made by a class that the modeling file
    does not show (``AutoModel.from_config``, a list that is filled elsewhere).
    """
    reader = _Reader(read_source(kind, "modeling"))
    reader.walk(top, "", 0)
    return {} if reader.hidden else reader.found


class _Reader:
    """One modeling file."""

    def __init__(self, module: ast.Module) -> None:
        self.known = classes(module)
        self.tables = {
            item.targets[0].id: item.value
            for item in module.body
            if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name) and isinstance(item.value, ast.Dict)
        }
        self.found: dict[str, str] = {}
        self.hidden = False

    def walk(self, name: str, prefix: str, depth: int) -> None:
        """What a class of the file builds: its own assignments to ``self``, and those of the classes it is derived from."""
        if name not in self.known or depth > _DEEPEST:
            return
        node = self.known[name]
        for base in node.bases:
            self.walk(_last(base), prefix, depth)
        for attribute, value in _built(node):
            for made, inside in self._classes(value, node):
                path = f"{prefix}{attribute}{'.0' if inside else ''}"
                leaf = self._leaf(made)
                if leaf is None:
                    self.walk(made, f"{path}.", depth + 1)
                else:
                    self.found[path] = leaf

    def _leaf(self, made: str) -> str | None:
        """Which of :data:`LEAVES` a class is or is derived from: FalconLinear, Gemma's scaled embedding."""
        if made in LEAVES:
            return made
        bases = [_last(base) for base in self.known[made].bases] if made in self.known else []
        return next((leaf for leaf in ("Linear", "Embedding") if any(base.endswith(leaf) for base in bases)), None)

    def _classes(self, value: ast.expr, node: ast.ClassDef) -> Iterator[tuple[str, bool]]:
        """The classes that an expression may make an object of, and whether it is in a list."""
        if isinstance(value, ast.IfExp):
            yield from self._classes(value.body, node)
            yield from self._classes(value.orelse, node)
        elif isinstance(value, ast.Call):
            for made in self._called(value.func, node):
                if made in _LISTS:
                    yield from ((child, True) for child in self._children(value, node))
                else:
                    yield made, False

    def _children(self, value: ast.Call, node: ast.ClassDef) -> list[str]:
        """The classes of what is in a list, or in a variable that it is made of."""
        parts: list[ast.expr] = []
        for argument in value.args:
            filled = _filled(node, argument.id) if isinstance(argument, ast.Name) else [argument]
            self.hidden |= not all(isinstance(part, ast.Call | ast.List | ast.ListComp | ast.GeneratorExp) for part in filled)
            parts += filled
        calls = [item for part in parts for item in ast.walk(part) if isinstance(item, ast.Call)]
        return sorted({child for call in calls for child in self._called(call.func, node)})

    def _called(self, function: ast.expr, node: ast.ClassDef) -> Iterator[str]:
        """The names of the classes that a called expression may be: a class, one of a table, one of two, a variable."""
        if isinstance(function, ast.IfExp):
            yield from self._called(function.body, node)
            yield from self._called(function.orelse, node)
        elif isinstance(function, ast.Subscript) and isinstance(function.value, ast.Name):
            table = self.tables.get(function.value.id)
            yield from (_last(item) for item in (table.values if table else ()))
        elif isinstance(function, ast.Name) and function.id not in self.known and (given := _variable(node, function.id)):
            chosen = [
                part for value in given for part in ([value.body, value.orelse] if isinstance(value, ast.IfExp) else [value])
            ]
            for part in chosen:
                yield from self._called(part, node) if isinstance(part, ast.Subscript) else [_last(part)]
        else:
            self.hidden |= ast.unparse(function).startswith("AutoModel") or _makes_list(node, function)
            yield _last(function)


def _built(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """``self.name = expression``, and ``self.name.append(expression)`` as a list of it."""
    for item in ast.walk(node):
        if isinstance(item, ast.Assign | ast.AnnAssign) and item.value is not None:
            for target in item.targets if isinstance(item, ast.Assign) else [item.target]:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield target.attr, item.value
        elif isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute) and item.func.attr == "append":
            home = item.func.value
            if isinstance(home, ast.Attribute) and ast.unparse(home.value) == "self":
                yield home.attr, ast.Call(ast.Name("ModuleList"), [*item.args], [])


def _filled(node: ast.ClassDef, name: str) -> list[ast.expr]:
    """What a variable that a list is made of holds: what is assigned and appended to it."""
    calls = [item for item in ast.walk(node) if isinstance(item, ast.Call) and ast.unparse(item.func) == f"{name}.append"]
    return [value for value in _variable(node, name) if ast.unparse(value) != "[]"] + [call.args[0] for call in calls]


def _makes_list(node: ast.ClassDef, function: ast.expr) -> bool:
    """Whether an expression is a method of the class that makes a list of modules (Zamba2's get_layers)."""
    named = [item for item in node.body if isinstance(item, ast.FunctionDef) and ast.unparse(function) == f"self.{item.name}"]
    return any(name in ast.unparse(item) for item in named for name in _LISTS)


def _variable(node: ast.ClassDef, name: str) -> list[ast.expr]:
    """What a class's functions assign to a variable."""
    assigned = [item for item in ast.walk(node) if isinstance(item, ast.Assign)]
    return [item.value for item in assigned if any(isinstance(to, ast.Name) and to.id == name for to in item.targets)]


def _last(expression: ast.expr) -> str:
    return ast.unparse(expression).split(".")[-1]
