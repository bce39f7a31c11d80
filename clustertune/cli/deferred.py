"""Imports that stand at the top of a module and happen at their first use: a command loads only the modules that it needs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_RUNNING = threading.RLock()
"""Held while a module's code runs: another thread that looks up a name in it waits until all names are there."""


class DeferredModule(ModuleType):
    """A module whose code has not run yet. Its code runs when a name is first looked up in it.

    importlib's own LazyLoader also runs it for ``__file__``, which ``inspect`` looks up in every module: a rank would import
    all of them, and would fail on one that needs a package which its image lacks.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        with _RUNNING:
            # Another thread may have run it in the meantime. Its own code may also look up a name before it is defined.
            if type(self) is DeferredModule and "__running__" not in self.__dict__:
                self.__dict__["__running__"] = True
                try:
                    self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
                    self.__class__ = ModuleType  # type: ignore[assignment]
                finally:
                    del self.__dict__["__running__"]
        return ModuleType.__getattribute__(self, name)


class _Later(Loader):
    """Creates a :class:`DeferredModule` instead of running the module's code."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        module.__class__ = DeferredModule


class _Finder:
    """Finds the modules of this package and gives them the loader above."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith("clustertune.") else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


@contextmanager
def deferred() -> Iterator[None]:
    """Inside this context ``from clustertune.x import y`` gives the module ``y``, whose code runs at its first use.

    Only a whole module is deferred: ``from clustertune.x.y import z`` imports ``y`` at once. A module that holds rules must not
    be deferred, because rules are found by looking through the modules. Python 3.15 has the same as ``lazy from`` (PEP 810).
    """
    sys.meta_path.insert(0, _Finder)
    try:
        yield
    finally:
        sys.meta_path.remove(_Finder)
