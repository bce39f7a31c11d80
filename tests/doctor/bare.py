"""What a bare Python must be able to run: the modules that a program imports, and whether 3.8 takes them."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests import tree

OLD = ("3.8", "3.9")
LATER = re.compile(
    r"\.remove(prefix|suffix)\(|\bzip\(.*\bstrict=|\bslots=|\bkw_only=|import .*\bcache\b|\bmatch \w+:|\.is_relative_to\("
    r"|(?m:^\w+ = (?:Callable|Iterable|Iterator|Mapping|Sequence)\[)"
)
"""What came after 3.8 and is no matter of grammar."""


def imported(text: str) -> set[str]:
    """The modules that a source names in its imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{name.name}" for name in node.names}
    return found


def closure(*starts: str) -> dict[str, str]:
    """The files of the package that these import, with themselves and the packages above, path to source."""
    sources = tree.sources("clustertune/")
    modules = {path[:-3].replace("/", ".").removesuffix(".__init__"): path for path in sources}
    left, found = list(starts), {}
    while left:
        path = left.pop()
        if path in found:
            continue
        found[path] = sources[path]
        names = imported(sources[path])
        parents = [".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 1)]
        left += [modules[name] for name in {*names, *parents} if name in modules]
    return found


def faults(sources: dict[str, str]) -> list[str]:
    """What keeps the files from running on Python 3.8 with nothing installed."""
    found = []
    for path, text in sources.items():
        try:
            ast.parse(text, path, feature_version=(3, 8))
        except SyntaxError as error:
            found.append(f"{path}: {error}")
        for name in imported(text):
            if name.split(".")[0] not in {*sys.stdlib_module_names, "clustertune"}:
                found.append(f"{path}: {name}")
        if later := LATER.search(text):
            found.append(f"{path}: {later.group()}")
    return found


def interpreters() -> list[str]:
    """Old interpreters of this machine."""
    found = [path for version in OLD if (path := shutil.which(f"python{version}"))]
    for version in OLD:
        found += [str(path) for path in sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))]
    return [path for path in found if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0]
