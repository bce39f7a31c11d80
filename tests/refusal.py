"""A call that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from clustertune.errors import UserError


def problems(call: Callable[..., object], *arguments: Any, **named: Any) -> list[Any]:
    """What is wrong, each a :class:`clustertune.errors.Problem`."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    return caught.value.problems
