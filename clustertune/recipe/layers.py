"""From a recipe's name to its layers: base, recipe, tiny and overrides, laid over each other with the origin of each value; and
reading of YAML and JSON written by people: safe, small, without surprises, with the line of every key for error messages.

Recipes use the scalars of YAML 1.2's core schema: ``5e-5`` is a number, ``no`` is the word, ``48:00:00`` is text. PyYAML's
own YAML 1.1 reads these as text, ``false`` and 172800. Files that accelerate reads itself are read as accelerate does.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from clustertune.errors import Problem, UserError, collect_problems
from clustertune.manifest import once, read_whole
from clustertune.recipe.sections import NAME, named_bases
from clustertune.tree import ROOT

# --- files of YAML and JSON ------------------------------------------------------------------------------------------------

MAX_BYTES = 256 * 1024
"""A recipe is about 1 kB. PyYAML parses about 100 kB/s, so that this is a wait of seconds at most."""
MAX_DEPTH = 20
"""Far above any recipe, far below where PyYAML's recursion ends in a RecursionError."""

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """A parsed file: its plain values, and the line (from 1) of each key path, or another place that gave it."""

    file: str
    data: dict[str, Any]
    lines: dict[KeyPath, int | str] = field(default_factory=dict)

    def position(self, path: KeyPath) -> str:
        """``file:line`` of a key path, of its nearest parent where the key itself is not in the file."""
        for end in range(len(path), 0, -1):
            if (at := self.lines.get(path[:end])) is not None:
                return at if isinstance(at, str) else f"{self.file}:{at}"
        return self.file

    def overridden(self, top: Document | None) -> Document:
        """The values with those of ``top`` over them, where they stand; null takes a key out."""
        if top is None or not top.data:
            return self
        paths = {path[:end] for path, _ in leaves(top.data) for end in range(1, len(path) + 1)}
        lines = self.lines | dict.fromkeys(paths, top.file)
        return Document(self.file, laid_over(self.data, top.data, null_removes=True), lines)


class Emptied(dict[str, Any]):
    """A section that the command line set to null before it gave keys of it: nothing below it counts any more."""


class _Composer(Composer):
    """PyYAML's composer without aliases: what a person reads is what there is, and no file grows while it is read."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):  # type: ignore[attr-defined]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not used here", problem_mark=self._mark())
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep", problem_mark=self._mark())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _mark(self) -> yaml.Mark:
        mark: yaml.Mark = self.peek_event().start_mark  # type: ignore[attr-defined]
        return mark


class _Loader(_Composer, yaml.SafeLoader):
    """PyYAML's safe loader with that composer."""


_LOADERS: list[Any] = [_Loader]
"""Loaders to try in turn."""
if yaml.__with_libyaml__:

    class _FastLoader(_Composer, yaml.CSafeLoader):
        """The same on libyaml's scanner, which is ten times as fast: ops/hardware.yaml takes 0.01 s instead of 0.11."""

        def __init__(self, text: str) -> None:
            yaml.CSafeLoader.__init__(self, text)
            Composer.__init__(self)

    _LOADERS.insert(0, _FastLoader)

_CORE = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}
"""The core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema): form of a scalar, and its first characters."""
_CORE_RESOLVERS: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
"""As PyYAML's loaders keep them: by the first character, tags and forms."""
for _tag, (_pattern, _first) in _CORE.items():
    for _letter in [*_first, *([""] if _tag == "null" else [])]:
        _CORE_RESOLVERS.setdefault(_letter, []).append((f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$")))


def read_yaml(path: Path, shown: str, *, core: bool = True) -> Document:
    """Parse a YAML file whose top level must be a mapping with text keys.

    ``shown`` is the file's name in messages; ``core=False`` reads scalars by YAML 1.1, as accelerate does.
    Raises UserError with every problem found (one only where the text does not parse).
    """
    return parse_yaml(read_text(path, shown), shown, core=core)


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Key path and value of everything in a mapping that is not a section; an empty section is a value."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path, value


_OF_A_RECIPE = ("accelerate.yaml", "model.json")
_HOW_MADE = "clustertune new NAME --model MODEL --data FILE writes a whole recipe; or copy it from one of the same model"


def read_text(path: Path, shown: str) -> str:
    """The UTF-8 text of a small file. Raises UserError where it is absent, unreadable, too large or not text."""
    try:
        if not path.is_file():
            kind = "is not a file" if path.exists() else "does not exist"
            raise UserError(
                Problem(kind, file=shown, fix=_HOW_MADE if path.name in _OF_A_RECIPE and not path.exists() else None)
            )
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise UserError(
                Problem(f"{size} bytes; a configuration file holds at most {MAX_BYTES}", file=shown, fix="give the right file")
            )
        return read_whole(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(Problem(f"not UTF-8 text (byte {error.start})", file=shown, fix="save the file as UTF-8")) from None
    except OSError as error:
        raise UserError(Problem(f"cannot be read: {error.strerror or error}", file=shown)) from None
    except ValueError as error:  # a NUL byte in a path
        raise UserError(Problem(f"is not a path: {error}", file=repr(shown))) from None


def parse_json(text: str, shown: str, fix: str | None = None) -> Any:
    """JSON without repeated keys, and without constants such as NaN. Raises UserError with the line where there is one."""
    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise UserError(Problem(f"not valid JSON: {error.msg}", file=f"{shown}:{error.lineno}", fix=fix)) from None
    except RecursionError:
        raise UserError(Problem("not valid JSON: nested too deep", file=shown, fix=fix)) from None
    except ValueError as error:
        raise UserError(Problem(f"not valid JSON: {str(error).splitlines()[0]}", file=shown, fix=fix)) from None


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def parse_yaml(text: str, shown: str, *, core: bool = True) -> Document:
    """As :func:`read_yaml`, from text."""
    try:
        node = _compose(text, core)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{shown}:{mark.line + 1}" if mark else shown
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise UserError(Problem(f"not valid YAML: {what}", file=where, fix=_syntax_hint(what))) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(Problem(f"not valid YAML: {first}", file=shown)) from None
    if node is None:
        raise UserError(Problem("empty", file=shown, fix="at the top level write key: value"))
    if not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        where = f"{shown}:{node.start_mark.line + 1}"
        raise UserError(Problem(f"holds {kind}, not sections", file=where, fix="at the top level write key: value"))
    builder = _Builder(shown, core)
    data = builder.mapping(node, ())
    if builder.problems:
        raise UserError(builder.problems)
    return Document(shown, data, builder.lines)


def _compose(text: str, core: bool) -> yaml.Node | None:
    """The nodes of a text. What libyaml refuses is read again by PyYAML's own scanner: its message names the place better."""
    for make in _LOADERS:
        try:
            loader = make(text)
            if core:
                loader.yaml_implicit_resolvers = _CORE_RESOLVERS
            node: yaml.Node | None = loader.get_single_node()
            return node
        except (yaml.YAMLError, ValueError, RecursionError):
            if make is _LOADERS[-1]:
                raise
    raise AssertionError("the last loader returns or raises")


def parse_value(text: str) -> Any:
    """The value of a ``key=value`` override, typed as in a recipe. Raises ValueError in one line."""
    try:
        document = parse_yaml(f"value: {text}" if not text.startswith(("\n", " ")) else f"value:{text}", "")
    except UserError as error:
        raise ValueError(error.problems[0].message) from None
    if list(document.data) != ["value"]:
        raise ValueError("holds more than one value")
    return document.data["value"]


def _syntax_hint(what: str) -> str | None:
    if "\\t" in what or "'\t'" in what:
        return "indent with spaces, not tabs"
    if "mapping values are not allowed" in what:
        return "put quotes around text that holds ': ', and check the indentation"
    if "expected <block end>" in what:
        return "indent the keys of one section by the same number of blanks"
    if "expected ','" in what or "expected the node content" in what:
        return "close every bracket, brace and quote, and put quotes around text that holds one"
    return None


class _Builder:
    """Turns nodes into plain values, and notes lines, repeated keys and tags."""

    def __init__(self, shown: str, core: bool) -> None:
        self.shown = shown
        self.core = core
        self.lines: dict[KeyPath, int | str] = {}
        self.problems: list[Problem] = []

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                self._add("a key must be plain text", line, path)
                continue
            key = str(key_node.value)
            if key in result:
                before = self.lines[(*path, key)]
                self._add(f"appears twice, first in line {before}", line, (*path, key), "keep one of the two")
                continue
            self.lines[(*path, key)] = line
            result[key] = self.value(value_node, (*path, key))
        return result

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            for index, child in enumerate(node.value):
                self.lines[(*path, str(index))] = child.start_mark.line + 1
            return [self.value(child, (*path, str(index))) for index, child in enumerate(node.value)]
        line = node.start_mark.line + 1
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if not isinstance(node, yaml.ScalarNode) or kind not in {"str", "int", "float", "bool", "null", "timestamp"}:
            self._add(f"the tag {node.tag!r} is not used here", line, path, "write a plain value")
            return None
        try:
            return self._scalar(kind, str(node.value))
        except ValueError as error:
            self._add(f"not a value: {error}", line, path)
            return None

    def _scalar(self, kind: str, text: str) -> Any:
        if kind in {"str", "timestamp"}:
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() in {"true", "yes", "on", "y"}
        if kind == "int" and self.core:
            return int(text[:400])
        constructor = yaml.constructor.SafeConstructor()
        node = yaml.ScalarNode(f"tag:yaml.org,2002:{kind}", text)
        return constructor.construct_yaml_int(node) if kind == "int" else constructor.construct_yaml_float(node)

    def _add(self, message: str, line: int, path: KeyPath, fix: str | None = None) -> None:
        self.problems.append(Problem(message, file=f"{self.shown}:{line}", key=".".join(path) or None, fix=fix))


# --- the layers of a recipe ------------------------------------------------------------------------------------------------

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
        """The values on top, and for each leaf the layer that gave it: the weakest layer's first."""
        values: dict[str, Any] = {}
        for layer in self.layers:
            values = laid_over(values, layer.document.data)
        owners: dict[KeyPath, Layer] = {}
        paths = [path for path, _ in leaves(values) if path]
        newest = [max(at for at, layer in enumerate(self.layers) if _has(layer.document.data, path)) for path in paths]
        for at, layer in enumerate(self.layers):
            owners |= {path: layer for path, owner in zip(paths, newest, strict=True) if owner == at}
        return values, owners

    def position(self, path: KeyPath, owners: Mapping[KeyPath, Layer]) -> str:
        """The file (and line) to name for a key path: its owner's, else the file that should hold it."""
        for end in range(len(path), 0, -1):
            for leaf, layer in owners.items():
                if leaf[:end] == path[:end]:
                    return layer.document.position(path)
        return f"{self.shown}/recipe.yaml"


def laid_over(below: Mapping[str, Any], top: Mapping[str, Any], *, null_removes: bool = False) -> dict[str, Any]:
    """``below`` with ``top`` over it, section by section; an empty section replaces one.

    ``null_removes``: null takes a key out.
    """
    result = dict(below)
    for key, value in top.items():
        under = result.get(key)
        if isinstance(value, dict) and value:
            kept = under if isinstance(under, dict) and not isinstance(value, Emptied) else {}
            result[key] = laid_over(kept, value, null_removes=null_removes)
        elif value is None and null_removes:
            result.pop(key, None)
        else:
            result[key] = copy.deepcopy(value)
    return result


def _has(data: Any, path: KeyPath) -> bool:
    """Whether a key path stands in the values of a file."""
    for key in path:
        if not isinstance(data, Mapping) or key not in data:
            return False
        data = data[key]
    return True


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The known word that a misspelt one most likely means."""
    known = list(choices)
    lowered = {name.lower(): name for name in known}
    begun = [name for name in lowered if len(word) > 2 and name.startswith(word.lower())]
    same_letters = [name for name in lowered if sorted(name) == sorted(word.lower())]
    near = sorted(begun, key=len)[:1] or same_letters[:1] or difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return lowered[near[0]] if near else None


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
    name = str(recipe)
    if not name or "\0" in name or len(name) > 4096:
        raise _refused(f"{name[:60]!r} is not a recipe")
    path = Path(name)
    try:
        if path.name == "recipe.yaml" and path.is_file():
            path = path.parent
        places = [path]
        if re.fullmatch(NAME, name):
            places += [Path("recipes", name), RECIPES / name]
        elif not path.is_absolute() and path.parts[:1] == ("recipes",):
            places.append(RECIPES.parent / path)
        folder = next((folder_ for folder_ in places if (folder_ / "recipe.yaml").is_file()), None)
        folder = folder or next((folder_ for folder_ in places if folder_.is_dir()), None)
    except OSError as error:
        raise _refused(f"{name!r} cannot be read: {error.strerror or error}") from None
    if folder is None:
        known = sorted({entry.parent.name for below in (Path("recipes"), RECIPES) for entry in below.glob("*/recipe.yaml")})
        looked = ", ".join(dict.fromkeys(str(place.parent.absolute()) for place in places[1:] or places))
        raise _refused(f"there is no recipe {name!r} (looked in {looked})", did_you_mean(path.name, known))
    place = folder.resolve() if ".." in folder.parts else folder.absolute()  # a link keeps the name that it was given
    if not re.fullmatch(NAME, place.name):
        text = f"the folder name {place.name!r} becomes a path and a job name and may hold only letters, digits, "
        text += "'.', '_' and '-' (64 at most, the first a letter or digit)"
        raise UserError(Problem(text, file=str(folder), fix="rename the folder"))
    return place, str(folder)


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
            section = read_yaml(recipe, str(recipe)).data.get("model") if name in read_whole(recipe).decode() else None
        except (OSError, UnicodeDecodeError, UserError):
            continue  # a recipe that cannot be read says nothing of this one
        if isinstance(section, dict) and section.get("name") == name:
            return file.parent
    return None


def find_elsewhere(folder: Path, bases: Iterable[str], model: Mapping[str, Any]) -> list[Path]:
    """What a recipe is made of and lies outside its folder: its bases, a chat template, the description of its model."""
    shared = base_folder(folder)
    paths = [shared / f"{name}.yaml" for name in bases]
    template = model.get("chat_template")
    if template and not (folder / template).is_file():
        paths.append(shared / template)
    if not os.path.lexists(folder / DESCRIPTION) and (other := same_model(folder, model)) is not None:
        paths += [other / "recipe.yaml", other / DESCRIPTION]
    return paths


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
            joined = " ".join(overrides[number:])
            what = f"the shell has cut {value!r} off from {overrides[number + 1]!r}"
            return Problem(what, file=COMMAND_LINE, key=key, fix=f"quote it: {shlex.quote(joined)}")
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
