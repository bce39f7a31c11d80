"""What trains a recipe: TRL's trainer, or an engine that a section of the recipe names, behind one protocol."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

from clustertune.cluster.schema import Cluster
from clustertune.errors import ExitCode, Problem
from clustertune.resolve.resolved import Resolved
from clustertune.training.event_log import Attempt


class Engine(Protocol):
    """Another training loop than TRL's, with the launcher, records, signals and checkpoints of every run."""

    def find_problems(self, resolved: Resolved) -> list[Problem]:
        """Settings of the recipe that this engine cannot follow."""

    def prepare(self, resolved: Resolved, run_path: Path, prepared: Path, source: tuple[str, str | None]) -> object:
        """Write the files that its ranks read. ``prepared``: the conversations; ``source``: the base model."""

    def train(self, attempt: Attempt) -> ExitCode:
        """Train one rank's part from the newest whole checkpoint, or from the base. Raises UserError."""

    def exported(self, run_path: Path) -> Path:
        """The folder that holds the trained adapter or model in HF's form."""

    def shown_document(self, resolved: Resolved, cluster: Cluster, run_path: Path) -> dict[str, Any]:
        """What ``submit --dry-run --json`` adds for this engine."""

    def shown_lines(self, resolved: Resolved, cluster: Cluster, run_path: Path) -> list[str]:
        """What ``submit --dry-run --verbose`` adds for this engine."""


def engine_of(resolved: Resolved) -> Engine | None:
    """The engine in the place of TRL's trainer; None for TRL.

    It is loaded by name, here alone: an engine imports this module and the launcher, and nothing imports an engine.
    """
    if resolved.recipe.megatron is None:
        return None
    engine: Engine = importlib.import_module("clustertune.megatron.megatron_engine").ENGINE
    return engine
