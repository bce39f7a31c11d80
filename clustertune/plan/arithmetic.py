"""What the formulas of claims work with: inputs by name, counted models, published runs, and a value with its arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from clustertune.config.parameters import Counted, count
from clustertune.plan.published import PublishedRun, published_models, published_run

GB = 1e9


@dataclass(frozen=True)
class Computed:
    """A value in the claim's unit, and how it came about."""

    value: float
    arithmetic: str


@dataclass
class Inputs:
    """The inputs of a claim; remembers which were asked for."""

    values: Mapping[str, Any]
    used: set[str] = field(default_factory=set)

    def number(self, name: str, default: float | None = None) -> float:
        """A number; KeyError where it is missing and has no default."""
        self.used.add(name)
        found = self.values[name] if default is None else self.values.get(name, default)
        return float(found)

    def has(self, name: str) -> bool:
        """Whether an input is given."""
        return name in self.values

    def word(self, name: str) -> str:
        """A text."""
        self.used.add(name)
        return str(self.values[name])

    def mapping(self, name: str) -> dict[str, Any]:
        """A mapping."""
        self.used.add(name)
        return dict(self.values[name])

    def architecture(self) -> Mapping[str, Any]:
        """The config.json keys of ``model``."""
        return published_models()[self.word("model")].architecture

    def counted(self) -> Counted:
        """``model`` with its layers counted."""
        return _counted(self.word("model"))

    def parameters(self) -> float:
        """Parameters of ``model``, counted; a plain number ``parameters`` where the source names a size and no model."""
        return self.number("parameters") if self.has("parameters") else float(self.counted().total)

    def run(self, name: str = "run") -> PublishedRun:
        """A published run."""
        return published_run(self.word(name))


@cache
def _counted(model: str) -> Counted:
    counted = count(published_models()[model].architecture)
    assert counted is not None, "models.yaml holds counted families only"
    return counted


def step_seconds(run: PublishedRun) -> float:
    """The published time of a step."""
    assert run.seconds is not None, f"{run.id} has no time of a step"
    return run.seconds
