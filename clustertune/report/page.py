"""``report.html``: one self-contained page of a run, finished or not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clustertune.console import say
from clustertune.errors import UserError, storage_error
from clustertune.evaluate.scores import read_result
from clustertune.manifest import MANIFEST, require_whole, write_durably
from clustertune.nccl_check.check import RESULT
from clustertune.nccl_check.prolog import FOLDER
from clustertune.nccl_check.result import COLLECTIVES, SCHEMA, show_size
from clustertune.nccl_check.table import nominal_of, pair_rows, result_rows
from clustertune.report import content, plots
from clustertune.report.content import duration, percent, plain
from clustertune.report.metrics import Metrics, read_metrics
from clustertune.rundir import RunDir

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_OWN_STAGE = "report"
_WIDE = "Loss"
"""The plot that has a row of its own."""


def build(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of ``run_dir`` to ``out`` (its own ``report.html`` by default) and return the path.

    Whatever is missing or unreadable but ``run.json`` is left out or said on the page: a run that failed is the one that
    a person wants to look at. The same run gives the same bytes. Raises UserError where ``run_dir`` is no run folder, and
    with exit code 73 where the page cannot be written.
    """
    from jinja2 import Environment, StrictUndefined

    run = RunDir(run_dir)
    document = run.read()
    if not isinstance(document, dict):
        raise UserError(f"{run.run_json}: holds no run")
    page = run.report if out is None else out
    try:
        metrics = read_metrics(run.metrics)
        values = _collect(run, document, metrics)
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        html = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(values)
        page.parent.mkdir(parents=True, exist_ok=True)
        write_durably(page, html + "\n")
    except OSError as error:
        raise storage_error(error, "writing the report", page) from error
    return page


def style() -> str:
    """The style sheet that all pages share."""
    return _TEMPLATE.read_text(encoding="utf-8").partition("<style>\n")[2].partition("</style>")[0]


def _collect(run: RunDir, document: dict[str, Any], metrics: Metrics) -> dict[str, Any]:
    """Everything that the template shows."""
    resolved = document.get("recipe")
    stages = read_stages(run, metrics)
    require_whole(run.eval)
    scores = _read_scores(run.eval)
    adapter = _read_json(run.adapter / MANIFEST)
    trained = content.get(adapter, "meta", "parameters") or content.get(document, "distributed", "trainable_parameters")
    restarts = [a.start_step for a in metrics.attempts[1:] if a.start_step is not None]
    scored = content.eval_content(scores)
    if scored:
        labels, values, errors, marks = ([bar[i] for bar in scored["bars"]] for i in range(4))
        shares = [percent(value) for value in values]
        scored["svg"] = (
            plots.draw_bars("scores", labels, values, shares, errors=errors, marks=marks, limit=1.0) if labels else ""
        )
    torn = metrics.unreadable_lines
    return {
        "title": str(content.get(resolved, "name") or run.path.resolve().name),
        "subtitle": content.subtitle(document),
        "status": content.status_of(metrics, stages),
        "notes": content.warnings_of(document, metrics, adapter),
        "tiles": content.tiles(metrics, stages, scores, trained),
        "forecast": content.forecast_rows(document.get("forecast"), metrics, stages),
        "forecast_note": content.forecast_note(document["forecast"]) if document.get("forecast") else "",
        "expected": content.expected_rows(content.get(resolved, "recipe", "expect"), metrics, stages, scores, trained),
        "plots": _draw_training(metrics, restarts),
        "restarts": restarts,
        "scored": scored,
        "nccl": section(run.path, document.get("cluster")),
        "stages": _stages(stages),
        "attempts": content.attempt_rows(metrics),
        "startups": content.startup_rows(metrics),
        "checkpoints": content.checkpoint_rows(metrics, _present(run)),
        "recipe": content.recipe_rows(resolved),
        "derived": content.derived_rows(resolved),
        "environment": content.environment_rows(document),
        "architecture": [[key, plain(value)] for key, value in content.flatten(content.get(resolved, "architecture"))],
        "footer": f"From run.json and metrics.jsonl of {run.path.resolve().name}."
        + (f" {torn} lines of metrics.jsonl are no events and were passed over." if torn else ""),
    }


def read_stages(run: RunDir, metrics: Metrics) -> dict[str, dict[str, Any]]:
    """Each stage's status and seconds, by first start; the record of a finished one in ``stages/`` wins over the events.

    The report's own stage is left out: it cannot be finished while its page is written.
    """
    found: dict[str, dict[str, Any]] = {
        record.stage: {"status": record.status, "seconds": record.seconds, "tries": record.tries} for record in metrics.stages
    }
    if (run.path / "stages").is_dir():
        for path in sorted((run.path / "stages").glob("*.json")):
            record = _read_json(path)
            if isinstance(record, Mapping) and found.get(path.stem, {}).get("status") != "failed":
                stage = found.setdefault(path.stem, {"seconds": None, "tries": 1})
                stage["status"] = record.get("status", "done")
                stage["seconds"] = stage["seconds"] or record.get("seconds")
    found.pop(_OWN_STAGE, None)
    return found


def _present(run: RunDir) -> set[str]:
    """The checkpoint folders that are there, relative to the run."""
    folder = run.checkpoints
    return {f"{folder.name}/{path.name}" for path in folder.iterdir()} if folder.is_dir() else set()


def _stages(stages: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    timed = {name: float(r["seconds"]) for name, r in stages.items() if isinstance(r.get("seconds"), int | float)}
    if not stages:
        return None
    svg = plots.draw_bars("stage times", list(timed), list(timed.values()), [duration(value) for value in timed.values()])
    return {"rows": content.stage_rows(stages), "svg": svg}


def _draw_training(metrics: Metrics, restarts: list[int]) -> list[dict[str, Any]]:
    """The plots over steps; one that has no values is left out."""
    steps = metrics.steps.numbers
    at = [record.step for record in metrics.evals]

    def train(label: str, name: str, factor: float = 1.0) -> plots.Line:
        return plots.Line(label, steps, metrics.steps.column(name, factor))

    def evaluated(name: str, factor: float = 1.0) -> plots.Line:
        values = [getattr(record, name) for record in metrics.evals]
        scaled = [None if value is None else value * factor for value in values]
        return plots.Line("eval", at, scaled, plots.SECOND, marked=True)

    def wanted() -> Iterator[tuple[str, list[plots.Line], str, bool]]:  # one after the other: a line of a long run is large
        yield "Loss", [train("train", "loss"), evaluated("eval_loss")], "nats per token", False
        yield "Token accuracy", [train("train", "token_accuracy", 100), evaluated("eval_token_accuracy", 100)], "%", False
        yield "Learning rate", [train("learning rate", "learning_rate")], "", True
        yield "Gradient norm", [train("gradient norm", "grad_norm")], "before clipping", True
        yield "Throughput", [train("tokens/s", "tokens_per_second")], "tokens/s over all ranks", True
        yield "Step time", [train("step time", "seconds")], "s", True
        yield "Peak memory", [train("memory", "memory_bytes", 2**-30)], "GiB, largest of all ranks", True

    drawn = []
    for title, possible, unit, zero in wanted():
        lines = [line for line in possible if any(value is not None for value in line.values)]
        svg = plots.draw_lines(title, lines, unit=unit, zero=zero, restarts=restarts, wide=title == _WIDE) if lines else ""
        if svg:
            drawn.append({"title": title, "svg": svg, "wide": title == _WIDE})
    return drawn


def _read_scores(folder: Path) -> dict[str, Any] | None:
    """The evaluation's result, or None where there is none or it cannot be read (then said on stderr)."""
    try:
        return read_result(folder)
    except (OSError, ValueError) as error:
        say(f"warning: {folder} is left out of the report: {error}")
        return None


def _read_json(path: Path) -> Any:
    """A JSON document, or None where there is none or it cannot be read (then said on stderr)."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        say(f"warning: {path} is left out of the report: {error}")
        return None


# --- nccl -----------------------------------------------------------------------------------------------------------------

# What a run's report shows of its links: the newest nccl-check of the run, or the one that its cluster has.

COLUMNS = ["scope", "collective", "#size", "#algbw GB/s", "#busbw GB/s", "#of nominal", "#median", "#spread", "result"]
TONES = {"pass": "good", "warn": "warn", "fail": "warn"}
SHOWN_FINDINGS = 12


def find(run: Path) -> dict[str, Any] | None:
    """The newest result below a run's folder; None where there is none that can be read."""
    found = []
    for path in (run / FOLDER).glob(f"*/{RESULT}"):
        try:
            document = json.loads(path.read_bytes())
            if isinstance(document, dict) and document.get("schema") == SCHEMA:
                found.append((path.stat().st_mtime, document))
        except (OSError, ValueError):
            continue
    return max(found, key=lambda pair: pair[0])[1] if found else None


def of_cluster(cluster: Any) -> dict[str, Any] | None:
    """The result beside the file of the cluster that ``run.json`` names; None where there is none."""
    source = cluster.get("source") if isinstance(cluster, Mapping) else None
    if not isinstance(source, str):
        return None
    from clustertune.config.cluster_schema import Cluster
    from clustertune.errors import UserError
    from clustertune.plan.measured import beside, read_measured

    try:
        path = beside(Cluster.model_validate(dict(cluster)))
        if path is None or not path.is_file():
            return None
        read_measured(path)  # a file that a plan refuses is not shown either
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, UserError):
        return None
    return document if isinstance(document, dict) else None


def section(run: Path, cluster: Any) -> dict[str, Any] | None:
    """What the page's section holds; None where nothing was measured, or what there is cannot be read."""
    document = find(run) or of_cluster(cluster)
    if document is None:
        return None
    try:
        return _content(document)
    except (KeyError, TypeError, ValueError, AttributeError):  # another program's file by this name
        return None


def _content(document: dict[str, Any]) -> dict[str, Any]:
    verdict = document.get("verdict") or {}
    findings = [
        [str(item["status"]).upper(), str(item["rule"]), str(item["where"]), str(item["found"]), str(item["fix"])]
        for item in verdict.get("findings", [])
        if item["status"] in ("fail", "warn")
    ]
    document = {**document, "results": [{"median_s": 0.0, "spread": 0.0, "correct": True, **e} for e in document["results"]]}
    return {
        "headline": str(verdict.get("headline", "")),
        "tone": TONES.get(str(verdict.get("status")), "plain"),
        "subtitle": (
            f"{document['backend']} over {document['transport']}, {document['nodes']} nodes with "
            f"{document['gpus_per_node']} ranks each, {document['date']}; GB/s of 10^9 bytes, as nccl-tests defines them"
        ),
        "svg": draw(document),
        "columns": COLUMNS,
        "rows": list(result_rows(document)),
        "pairs": list(pair_rows(document)),
        "findings": findings[:SHOWN_FINDINGS],
        "environment": [[name, plain(value)] for name, value in (document.get("environment") or {}).items()],
    }


def draw(document: Mapping[str, Any]) -> str:
    """busbw over size for every collective over all ranks (inside a node where there is one), with the nominal line."""
    from clustertune.report import plots

    scope = next((s for s in ("world", "intra", "inter") if any(e["scope"] == s for e in document["results"])), "")
    series = []
    for name in COLLECTIVES:
        points = sorted(
            (int(e["bytes"]), float(e["busbw_gb_s"]))
            for e in document["results"]
            if (e["scope"], e["collective"]) == (scope, name) and e["bytes"] > 0 and math.isfinite(e["busbw_gb_s"])
        )
        if points:
            series.append((name, points))
    if not series:
        return ""
    where = "all ranks" if scope != "intra" else "the ranks of a node"
    return plots.draw_sizes(
        f"busbw over size, {where}", series, unit=f"busbw, GB/s, {where}", nominal=nominal_of(document, scope), show=show_size
    )
