"""A library's function or setting replaced, for a while or for the rest of the process, where it offers no other way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Within: attributes of a module or an object have these values. Afterwards they are what they were."""
    # A static method of a class is put back as one.
    before = {name: inspect.getattr_static(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def in_place_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Put a function that is decorated with this in the place of ``owner``'s, for the rest of the process; once.

    It is given the original before the arguments. What stands in the place has the original as its attribute ``original``.
    """

    def put(function: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        if hasattr(original, "original"):
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        call.original = original  # type: ignore[attr-defined]
        setattr(owner, name, call)

    return put
