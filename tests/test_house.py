"""The rules of the tree as tests: where code may stand, how large it grows, what it may not call, what no file may say."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests import tree

ORDER = (
    ("tree",),
    ("errors", "process", "text"),
    ("bounded",),
    ("host",),
    ("console", "manifest", "replaced"),
    ("lock", "tensorfile"),
    ("recipe",),
    ("cluster",),
    ("check",),
    ("resolve",),
    ("plan", "setup", "containers"),
    ("rundir",),
    ("secrets",),
    ("launch",),
    ("nccl_check", "testbed"),
    ("data",),
    ("checkpoint",),
    ("training",),
    ("simulate",),
    ("export",),
    ("merge",),
    ("evaluate",),
    ("staging",),
    ("doctor",),
    ("report",),
    ("monitor",),
    ("chain", "rank"),
    ("sweep", "draft"),  # and the launchers
    ("submission",),
    ("bench",),
    ("cli",),
    ("__main__", "experimental", "megatron"),  # which nobody imports: a table of commands, a launcher and an engine name them
)
"""The packages and modules of ``clustertune/``, each importing only from the left; those of one place not from each other."""
LAUNCHER = re.compile(r"^class \w+\((chain\.)?Chain\):", re.MULTILINE)
"""What makes a module a launcher: it takes the place of ``sweep``."""

SHOWN_SIGNS = "\N{PLUS-MINUS SIGN}\N{RIGHTWARDS ARROW}\N{MIDDLE DOT}"
"""Signs of the report and the score table, which code may hold."""

SHELL = re.compile(r"#!.*\b(ba|da|k|z)?sh\b")
LINTED = re.compile(r"(\.sh|\.sbatch)$|^\.ci/")
"""The files that ``make lint`` gives to shellcheck."""


@pytest.fixture(autouse=True, scope="module")
def forget() -> Iterator[None]:
    """The parsed package is 150 MB."""
    yield
    tree.parsed.cache_clear()


# --- imports -----------------------------------------------------------------------------------------------------------


def imports(module: str, source: str, modules: frozenset[str]) -> Iterator[str]:
    """The modules of the package that one imports, also inside functions and for types only."""
    package = module if any(name.startswith(f"{module}.") for name in modules) else module.rpartition(".")[0]
    for node in ast.walk(tree.parsed(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "clustertune")
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            if base.split(".")[0] == "clustertune":
                yield from (f"{base}.{n.name}" if f"{base}.{n.name}" in modules else base for n in node.names)


def import_faults(package: Mapping[str, str]) -> list[str]:
    """Imports to the right, rooms without a place, and circles of modules; ``package`` is path -> source."""
    by_module = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): source for path, source in package.items()
    }
    modules = frozenset(by_module)
    rank = {name: at for at, names in enumerate(ORDER) for name in names}
    rank = {module.split(".")[1]: rank["sweep"] for module, source in by_module.items() if LAUNCHER.search(source)} | rank
    graph = {module: set(imports(module, source, modules)) - {module} for module, source in by_module.items()}
    faults = []
    for module, found in sorted(graph.items()):
        room = module.split(".")[1] if "." in module else ""
        if room and room not in rank:
            faults.append(f"{module}: {room} has no place in ORDER")
            continue
        for other in sorted(found):
            target = other.split(".")[1] if "." in other else ""
            if target and target != room and (not room or rank.get(target, len(ORDER)) >= rank[room]):
                faults.append(f"{module} imports {other}, which does not lie to its left")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        faults.append("circle: " + " -> ".join(error.args[1]))
    return faults


def test_rooms_import_only_to_their_left() -> None:
    """Else a room cannot be read, tested or replaced without those that use it, and an import breaks by its order."""
    package = tree.sources("clustertune/")
    assert len(package) > 50
    assert import_faults(package) == []


# --- names ---------------------------------------------------------------------------------------------------------------


def shared_class_names(package: Mapping[str, str]) -> dict[str, list[str]]:
    """Classes of one name in several modules, private ones too; ``package`` is path -> source."""
    modules: dict[str, set[str]] = {}
    for path, source in package.items():
        for node in ast.walk(tree.parsed(source)):
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, set()).add(path)
    return {name: sorted(found) for name, found in modules.items() if len(found) > 1}


def test_no_file_name_stands_in_two_rooms() -> None:
    names = [path.rpartition("/")[2] for path in tree.sources("clustertune/")]
    assert sorted({name for name in names if names.count(name) > 1}) == ["__init__.py", "__main__.py"]


def test_no_class_name_stands_in_two_modules() -> None:
    """A class name means one thing, so a search for it finds one class."""
    assert shared_class_names(tree.sources("clustertune/")) == {}


# --- calls that are not made ---------------------------------------------------------------------------------------------

UNSAFE_CALLS = {
    r"\b(unsafe|full)_load\b|\b(Unsafe|Full)Loader\b": "can build Python objects: safe_load",
    r"\bweights_only=(?!True\b)(?!False``)|\ballow_pickle=(?!False\b)": "lets in a pickle",
    r"\btrust_remote_code=(?!False\b)": "lets in code of a model repository",
    r"\b(joblib|dill|cloudpickle)\b|\bUnpickler\)": "runs whatever stands in the file",
    r"\btyper\.echo\((?!escape\(|f\"clustertune \{__version__\}\"\))": "may steer the terminal: console.escape",
    r"noqa:.*\b(S102|S30[127]|S506|S60[245]|T201)\b": "ruff says: data run as code, a shell, or print",
}
"""What ruff's rules S and T20 leave out: they forbid pickles, eval, a shell and print. Texts of others are printed by
:mod:`clustertune.console`, or escaped by it."""


def call_faults(path: str, text: str) -> list[str]:
    """Calls that run data as code."""
    return faults_of(path, text, UNSAFE_CALLS)


# --- what no file may say ----------------------------------------------------------------------------------------------

FORBIDDEN_TEXT = {
    # Spelt in pieces, so that this file passes its own rule.
    r"(?<![\w.])/" + r"(work|opt|home|root|mnt/c|Users)/\w": "a path of one machine",
    r"https?://[^\s)>\"']*(p[y]pi|python[h]osted|download\.pytorch\.org|/simple\b|artifactory|nexus)": "a package index",
    r"(?<!\w)(TO" + r"DO|FIX" + r"ME|XX" + r"X)(?!\w)": "work that is left",
    "NotImplemented" + "Error": "code that is not there",
    r"(?i)trust_remote_code\s*[:=]\s*tr" + "ue": "code of a model repository is run",
}


def faults_of(path: str, text: str, forbidden: Mapping[str, str]) -> list[str]:
    """Where a text has what one of the patterns describes."""
    return [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()!r}: {what}"
        for pattern, what in forbidden.items()
        for match in re.finditer(pattern, text)
    ]


def text_faults(path: str, text: str) -> list[str]:
    return faults_of(path, text, FORBIDDEN_TEXT)


def odd_characters(path: str, text: str) -> list[str]:
    """Characters that a person cannot tell from others, does not see, or cannot type."""
    allowed = SHOWN_SIGNS if path.startswith("clustertune/") else ""
    faults = []
    for number, line in enumerate(text.split("\n"), 1):
        for char in sorted(set(line)):
            plain = char.isascii() and (char.isprintable() or char == "\t")
            # Tests give names and texts of other languages to the code.
            letter = path.startswith("tests/") and unicodedata.category(char) in ("Ll", "Lu", "Lo")
            if not plain and char not in allowed and not letter and not (path.startswith("tests/") and char in SHOWN_SIGNS):
                faults.append(f"{path}:{number}: U+{ord(char):04X} {unicodedata.name(char, '')}")
    return faults


# --- shell -------------------------------------------------------------------------------------------------------------


def shell_faults(path: str, text: str) -> list[str]:
    """What is wrong with a shell file; nothing for any other file."""
    if not (LINTED.search(path) or SHELL.match(text)):
        return []
    faults = [] if LINTED.search(path) else [f"{path}: make lint does not give it to shellcheck"]
    commands = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not commands or commands[0].strip() != "set -euo pipefail":
        faults.append(f"{path}: does not begin with set -euo pipefail")
    return faults


# --- the rules over the tree -------------------------------------------------------------------------------------------


def text_files() -> dict[str, str]:
    """All texts but the data of other people, without the one address that may stand: the CPU builds of torch, which every
    machine without a GPU takes."""
    makefile = tree.texts()["Makefile"].replace("CPU_INDEX = https://download.py" + "torch.org/whl/cpu", "")
    return {path: text for path, text in tree.texts().items() if not path.endswith(".jsonl")} | {"Makefile": makefile}


RULES: dict[str, tuple[Callable[[str, str], list[str]], Callable[[], dict[str, str]]]] = {
    # A model, an adapter or a checkpoint comes from somebody else: one pickle or one shell string runs what he wrote.
    "calls": (call_faults, lambda: {p: source for p, source in tree.sources().items() if not p.startswith("tests/")}),
    # A path or an index of one machine fails on every other one; a stub is found by the first user who needs it.
    "words": (text_faults, text_files),
    # A no-break space or a curly quote that was pasted into a command looks right and fails; a bidi mark hides code.
    "characters": (odd_characters, tree.code),
    # Without set -e a failed step is skipped, and the job continues with half of what it needs.
    "shell": (shell_faults, tree.texts),
}
"""What finds the faults of a file, and the files that it looks at."""


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps_the_rule(rule: str) -> None:
    find, files = RULES[rule]
    assert [fault for path, text in files().items() for fault in find(path, text)] == []
