"""A library's function or setting replaced for a while, where it offers no other way."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
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
