"""Megatron as an engine: what the run's stages and ``submit`` ask of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustertune.cluster.schema import Cluster
from clustertune.errors import ExitCode, Problem
from clustertune.megatron import megatron_files, settings
from clustertune.resolve.resolved import Resolved
from clustertune.training.engine import Engine
from clustertune.training.event_log import Attempt


class MegatronEngine:
    """The functions of this package, by the names of :class:`clustertune.training.engine.Engine`."""

    def find_problems(self, resolved: Resolved) -> list[Problem]:
        return settings.find_problems(resolved)

    def prepare(self, resolved: Resolved, run_path: Path, prepared: Path, source: tuple[str, str | None]) -> dict[str, int]:
        """Megatron-Bridge tokenises by itself: the conversations as it reads them, and the tokenizer."""
        return megatron_files.make(resolved, run_path, prepared, source)

    def train(self, attempt: Attempt) -> ExitCode:
        """NVIDIA's loop, with this rank's signals, records and checkpoints."""
        from clustertune.megatron import program

        return program.train(attempt)

    def exported(self, run_path: Path) -> Path:
        return megatron_files.exported(run_path)

    def shown_document(self, resolved: Resolved, cluster: Cluster, run_path: Path) -> dict[str, Any]:
        return settings.shown_document(resolved, cluster, run_path)

    def shown_lines(self, resolved: Resolved, cluster: Cluster, run_path: Path) -> list[str]:
        return settings.shown_lines(resolved, cluster, run_path)


ENGINE: Engine = MegatronEngine()
