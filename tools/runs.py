"""What a run folder says while its command works on it; a line that a killed rank was writing is passed over.

It needs the standard library alone: ``make gpu-check`` runs where nothing else is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustertune.manifest import read_events


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind in a run's metrics, in order; none where there are no metrics yet."""
    return [event for event in read_events(run / "metrics.jsonl") if event.get("event") == kind]


def attempts(run: Path) -> list[Path]:
    """The folders of the attempts at training, in order."""
    return sorted((run / "attempts").glob("[0-9]*"))


def half_written(run: Path) -> set[Path]:
    """Checkpoint folders that have no manifest (yet)."""
    return {path for path in (run / "checkpoints").glob("*") if not (path / "MANIFEST.json").exists()}
