"""The table at the end of a run: stages with their seconds, loss before and after, the scores, where everything lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from clustertune.ifeval import scores
from clustertune.rundir import RunDir


def render(
    run: RunDir,
    stages: Mapping[str, Mapping[str, Any]],
    losses: tuple[float | None, float | None],
    evaluation: Mapping[str, Any] | None,
    console: Console,
) -> None:
    """Print the summary of a run to ``console``."""
    table = Table(title=None, box=None, pad_edge=False)
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    table.add_column("status")
    for name, stage in stages.items():
        table.add_row(name, f"{stage['seconds']:.1f}", str(stage["status"]))
    done = [s["seconds"] for s in stages.values() if s["status"] == "done"]
    table.add_row("total", f"{sum(done):.1f}", "")
    console.print()
    console.print(table)
    if losses[0] is not None and losses[1] is not None:
        console.print(f"\neval loss: {losses[0]:.4f} before, {losses[1]:.4f} after", markup=False)
    if evaluation:
        console.print()
        scores.render(evaluation, console)
    console.print(f"\nrun      {run.path}", markup=False)
    for label, path in (("adapter", run.adapter), ("model", run.merged), ("scores", run.eval), ("report", run.report)):
        if path.exists():
            console.print(f"{label:8} {path}", markup=False)
