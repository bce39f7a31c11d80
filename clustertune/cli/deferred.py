"""Imports that stand at a module's top and are carried out when they are first used: no command waits for another's modules."""

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
"""Held while a module's code runs: a thread that asks for one of its names waits for all of them, as at any import."""


class DeferredModule(ModuleType):
    """A module whose code has not run: the first name that is asked of it runs that.

    importlib's own LazyLoader does so for ``__file__`` too, which ``inspect`` asks of all modules there are: a rank would then
    import every one, and end where one needs a package that its image lacks.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        with _RUNNING:
            # Another thread may have run it meanwhile; and its own code may ask for a name that it has not come to.
            if type(self) is DeferredModule and "__running__" not in self.__dict__:
                self.__dict__["__running__"] = True
                try:
                    self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
                    self.__class__ = ModuleType  # type: ignore[assignment]
                finally:
                    del self.__dict__["__running__"]
        return ModuleType.__getattribute__(self, name)


class _Later(Loader):
    """Makes a module and leaves its code to :class:`DeferredModule`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        module.__class__ = DeferredModule


class _Finder:
    """Finds this package's modules for :func:`deferred`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith("clustertune.") else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
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
