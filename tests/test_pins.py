"""Each version stands once, in ``containers/versions.env``, and what is installed is what stands there."""

from __future__ import annotations

import ast
import importlib.metadata
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache

from tests import tree

HOME = "containers/versions.env"
LINE = re.compile(r"(PY|DEV|BUILD|EXTRA|REF|TOOL)_([A-Z0-9_]+)=([0-9][^\s#]*)")
DATE = re.compile(r"DATE_[A-Z0-9_]+=\d{4}-\d{2}-\d{2}")

EVIDENCE = re.compile(
    r"containers/[\w-]+\.lock$|clustertune/recipe/library_facts/\w+\.json$|docs/results/|docs/doctor\.md$|"
    r"recipes/[^/]+/README\.md$|tests/(doctor|host|nccl_check)/|.*/recorded/"
)
"""Where a version is part of a measurement, of a machine's recorded facts or of a release's known fault, none of which moves
with the pin, and what is made from the pins, which tests/containers/ and tests/recipe/test_library_facts.py hold to them."""

COMES_WITH = dict.fromkeys(("fsspec", "pyarrow"), "datasets, which names the versions that it reads and writes")
"""Packages that are imported here and pinned by the one that brings them."""

PEERS = {"flash_attn"}
"""What ``make gpu-check`` compares with where it is installed. Nothing here needs it."""


def normal(name: str) -> str:
    """A package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str, *groups: str) -> dict[str, str]:
    """Package name -> version of these groups. Fails on any line that make, the shell and this would read differently, and on
    a double."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line or line.startswith("#") or DATE.fullmatch(line):
            continue
        match = LINE.fullmatch(line)
        assert match, f"no KEY=VERSION, blank line or comment: {line!r}"
        if match[1] not in groups:
            continue
        name = normal(match[2])
        assert name not in found, f"{name} is pinned twice"
        found[name] = match[3]
    return found


PINS = read_pins(tree.texts()[HOME], "PY", "DEV")
"""What make setup installs."""
IMAGES = read_pins(tree.texts()[HOME], "PY", "DEV", "EXTRA")
"""With the optional layers of images: still one version a package."""
REFERENCE = read_pins(tree.texts()[HOME], "REF")
"""The stack of the document that the reference recipe follows: other versions of the same packages."""


@cache
def without_comments(path: str, text: str) -> str:
    """The text without its comments and docstrings, lines kept: a comment may tell which version has a fault."""
    lines = text.split("\n")
    if path.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    lines[number - 1] = ""
    elif not path.endswith(".md"):
        lines = [re.sub(r"(^|\s)#.*", "", line) for line in lines]
    return "\n".join(lines)


def flat(text: str) -> str:
    """A text in which a package has one spelling. Plain search in it is a hundred times faster than a pattern of all names."""
    return text.lower().replace("_", "-").replace(".", "-")


def second_homes(path: str, text: str, pins: dict[str, str]) -> Iterator[str]:
    """Lines that fix a pinned package to a number, or that give the pinned number beside the package's name."""
    if path == HOME or EVIDENCE.match(path):
        return

    def names_in(line: str) -> Iterator[str]:
        flattened = flat(line)
        for name in (name for name in names if name in flattened):
            spelt = rf"(?i)(?<![\w-]){name.replace('-', '[-_.]')}(?![\w-])"
            fixed = re.search(rf"{spelt}(\[[\w,]*\])?[\"']?\s*(===?|~=|>=|<=|<|>|@)\s*v?\d", line)
            beside = re.search(rf"(?<![\d.]){re.escape(pins[name])}(?![\d.]*\d)", line)
            if fixed or (beside and re.search(spelt, line)):
                yield name

    names = [name for name in pins if name in flat(text)]
    numbered = enumerate(text.split("\n")) if names else ()
    suspects = [number for number, line in numbered if re.search(r"\d", line) and any(names_in(line))]
    lines = without_comments(path, text).split("\n") if suspects else []  # slow, and few files are left
    for number in suspects:
        yield from (f"{path}:{number + 1}: {name} has its version in {HOME}" for name in names_in(lines[number]))


def test_no_version_has_a_second_home() -> None:
    """A pin that appears twice is moved once: the image then runs another stack than the tests, and both look right."""
    assert [fault for path, text in tree.texts().items() for fault in second_homes(path, text, IMAGES)] == []
    # Tests and documents tell of faults in releases, and the reference's are releases like any other.
    shipped = {path: text for path, text in tree.texts().items() if not path.startswith(("tests/", "docs/"))}
    assert [fault for path, text in shipped.items() for fault in second_homes(path, text, REFERENCE)] == []


def differences(pins: dict[str, str], installed: dict[str, str | None]) -> list[str]:
    """A build's own mark (``+cpu``, ``+cu130``) does not count."""
    return [
        f"{name}: {installed.get(name)} is installed, {version} is pinned"
        for name, version in pins.items()
        if (installed.get(name) or "").partition("+")[0] != version
    ]


def test_the_installed_versions_are_the_pinned_ones() -> None:
    """Results are published with the pins: another stack would give other numbers under the same name."""
    installed = {normal(found.metadata["Name"]): found.version for found in importlib.metadata.distributions()}
    assert differences(PINS, dict(installed)) == []


brought_by = cache(importlib.metadata.packages_distributions)
"""Top-level module -> the distributions that install it; slow, asked once."""


def unpinned(source: str, pins: dict[str, str]) -> set[str]:
    """Packages that a file imports, whose distribution has no pin."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    foreign = names - set(sys.stdlib_module_names) - {"clustertune", "tests", "tools"} - set(COMES_WITH) - PEERS
    return {name for name in foreign if not any(normal(found) in pins for found in brought_by().get(name, ()))}


def test_whatever_is_imported_is_pinned() -> None:
    """What only comes along with another package goes, or changes, with its next release."""
    # setup.py is run by what builds the package: BUILD_SETUPTOOLS.
    sources = {path: text for path, text in tree.sources().items() if path != "setup.py"}
    assert {path: missing for path, text in sources.items() if (missing := unpinned(text, PINS))} == {}
