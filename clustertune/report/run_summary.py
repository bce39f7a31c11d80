"""The table at the end of a run: stages with their seconds, the first and the last loss, the scores, where everything lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from clustertune import console as output
from clustertune.console import make_table, reply
from clustertune.evaluate import scores
from clustertune.report import content
from clustertune.report.metrics import read_metrics
from clustertune.rundir import RunDir


def render(
    run: RunDir,
    stages: Mapping[str, Mapping[str, Any]],
    evaluation: Mapping[str, Any] | None,
    console: Console,
) -> None:
    """Print the summary of a run to ``console``."""
    table = make_table("stage", "status", "seconds", text_columns=2)
    for name, stage in stages.items():
        table.add_row(name, str(stage["status"]), f"{stage['seconds']:.1f}")
    done = [s["seconds"] for s in stages.values() if s["status"] == "done"]
    table.add_row("total", "", f"{sum(done):.1f}")
    console.print()
    console.print(table)
    metrics = read_metrics(run.metrics)
    name, found = "reward of the held-out prompts", content.held_out_rewards(metrics)
    if found is None:
        name, found = "eval loss", content.eval_losses(metrics)
    if found is None:
        name, found = "training loss", content.train_losses(metrics)
    if found is not None:
        when, values = found
        console.print(f"\n{name}, {when}: {', '.join(f'{value:.4f}' for value in values)}", markup=False)
    if evaluation:
        console.print()
        scores.render(evaluation, console)
    console.print(f"\nrun      {run.path}", markup=False)
    for label, path in (("adapter", run.adapter), ("model", run.merged), ("scores", run.eval), ("report", run.report)):
        if path.exists():
            console.print(f"{label:8} {path}", markup=False)


def finish(run: RunDir, results: dict[str, dict[str, Any]], as_json: bool) -> None:
    """What a finished chain says: a table on stderr, or one document on stdout."""
    found = scores.read_result(run.eval)
    stages = {name: {"seconds": r["seconds"], "status": r["status"]} for name, r in results.items()}
    document = {"run_dir": str(run.path), "stages": stages, **_scores(found)}
    reply(as_json, document, lambda: render(run, stages, found, output.stderr))


def _scores(found: dict[str, Any] | None) -> dict[str, Any]:
    """``tasks``, and ``paired`` where the base was scored."""
    if found is None:
        return {"tasks": None}
    paired = {"paired": found["paired"]} if found.get("paired") else {}
    return {"tasks": found["tasks"], **paired}
