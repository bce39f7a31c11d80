"""Checks the form of a JSON document that a user gives. A key may be missing; a key that is present must have its
type, so that later code can rely on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from clustertune.errors import Problem
from clustertune.report.content import get, is_number


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and is_number(value) and value >= 0


OBJECT, LIST, TEXT, WHOLE = "an object", "a list", "a text", "a whole number, 0 or more"
_KINDS: dict[str, Callable[[Any], bool]] = {
    OBJECT: lambda value: isinstance(value, Mapping),
    LIST: lambda value: isinstance(value, list),
    TEXT: lambda value: isinstance(value, str),
    WHOLE: _is_whole,
}

RUN = {
    "recipe": OBJECT, "recipe.name": TEXT, "recipe.world_size": WHOLE, "recipe.data_parallel_size": WHOLE,
    "recipe.distribution": OBJECT, "recipe.train_args": OBJECT, "recipe.train_args.per_device_train_batch_size": WHOLE,
    "recipe.train_args.gradient_accumulation_steps": WHOLE, "recipe.train_args.max_length": WHOLE,
    "recipe.recipe": OBJECT, "recipe.recipe.model": OBJECT, "recipe.recipe.model.name": TEXT,
    "recipe.recipe.data": OBJECT, "recipe.recipe.data.name": TEXT,
    "distributed": OBJECT, "distributed.world_size": WHOLE, "distributed.mesh": OBJECT,
    "allocation": OBJECT, "allocation.nodes": LIST, "cluster": OBJECT, "cluster.compute": OBJECT, "cluster.network": OBJECT,
    "versions": OBJECT, "host": OBJECT, "git": OBJECT, "container": OBJECT,
}  # fmt: skip
"""``run.json``: what is read of it."""


def find_problems(document: Any, form: Mapping[str, str], file: str, fix: str) -> list[Problem]:
    """All values of another kind than the form's, each with its key."""
    if not isinstance(document, Mapping):
        return [Problem(f"holds {_shown(document)}, where {OBJECT} belongs", file=file, fix=fix)]

    def wrong() -> Iterator[Problem]:
        for key, kind in form.items():
            value = get(document, *key.split("."))
            if value is not None and not _KINDS[kind](value):
                yield Problem(f"is {_shown(value)}, where {kind} belongs", file=file, key=key, fix=fix)

    return list(wrong())


def _shown(value: Any) -> str:
    """A value, cut: somebody's file may hold anything. What holds others is named by its kind."""
    if isinstance(value, Mapping | list):
        return OBJECT if isinstance(value, Mapping) else LIST
    # Python refuses to write integers of more than 4300 digits.
    too_long = isinstance(value, int) and value.bit_length() > 64
    text = "a number of more than 64 bits" if too_long else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
