"""Imports that stand at a module's top and are carried out when they are first used: no command waits for another's modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType


class _Finder:
    """Finds this package's modules with a loader that reads them at the first look at one of their names."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith("clustertune.") else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


@contextmanager
def deferred() -> Iterator[None]:
    """Within: ``from clustertune.x import y`` gives the module ``y`` that is imported when a name of it is first asked for.

    Only whole modules: a name out of one (``from clustertune.x.y import z``) imports it at once. And only such as name things:
    the rules of one that registers rules would be missing until then. In Python 3.15 this is
    ``lazy from clustertune.x import y`` (PEP 810).
    """
    sys.meta_path.insert(0, _Finder)
    try:
        yield
    finally:
        sys.meta_path.remove(_Finder)
