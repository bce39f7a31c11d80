"""From lm-eval's numbers to what a person reads: standard errors, the verdict on the pass marks, the tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clustertune.config.schema import FIRST_TASK, Eval
from clustertune.config.tasks import find_task, first_task
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.evaluate import punkt

RESULT = "results.json"
OLD_RESULT = f"{FIRST_TASK}.json"
"""What an evaluation was called while there was one task."""


def clustered_stderr(followed: Sequence[Sequence[bool]]) -> float | None:
    """Standard error of the share of followed instructions; one inner sequence per prompt. None for fewer than two prompts.

    The instructions of one prompt are judged on one answer and are not independent, so that the binomial formula is too
    small. Cluster-robust: sqrt(n/(n-1) * sum_i (x_i - p*m_i)^2) / sum_i m_i over n prompts with x_i of m_i followed
    (Miller 2024, arXiv:2411.00640, section 2.2). With one instruction per prompt it is lm-eval's prompt-level formula.
    """
    prompts = len(followed)
    if prompts < 2:
        return None
    total = sum(len(items) for items in followed)
    share = sum(sum(items) for items in followed) / total
    spread = sum((sum(items) - share * len(items)) ** 2 for items in followed)
    return math.sqrt(prompts / (prompts - 1) * spread) / total


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result in an evaluation's folder, that of the first releases as today's; None where there is none.

    Raises OSError and ValueError where it cannot be read.
    """
    for name in (RESULT, OLD_RESULT):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_bytes())
            return _from_old(found) if isinstance(found, dict) and "tasks" not in found else found
    return None


def _from_old(found: dict[str, Any]) -> dict[str, Any]:
    """A result from when there was one task; as it is, where it is of no known form."""
    scores, dataset, stderr, verdict, splitter = (
        value if isinstance(value := found.get(key), dict) else {} for key in ("scores", "dataset", "stderr", "pass", "punkt")
    )
    if not scores or not all(isinstance(value, int | float) for value in scores.values()):
        return found
    row: dict[str, Any] = {"n": dataset.get("prompts")}
    for name, value in scores.items():
        row |= {f"{name},none": value, f"{name}_stderr,none": stderr.get(name)}
    known = "" if "is_benchmark" in dataset else "known to be "
    whole = bool(dataset.get("is_benchmark") and not dataset.get("limited"))
    notes = [] if whole else [f"Not {known}the {first_task().title} benchmark: these numbers compare with nothing published."]
    notes += [punkt.NOTE] if splitter.get("source") == punkt.TRAINED else []
    judged = {"marks": {FIRST_TASK: verdict.get("marks") or {}}, "difference_marks": {}}
    missed = [f"{FIRST_TASK} {name}" for name in verdict.get("missed") or []]
    return {
        **found,
        "tasks": {FIRST_TASK: row},
        "details": {FIRST_TASK: {"data": [dataset.get("name")], "comparable": whole}},
        "pass": {**judged, "missed": missed, "passed": not missed},
        "notes": notes,
    }


def find_metric(row: Mapping[str, Any], name: str) -> str | None:
    """The key of a task's row that ``METRIC`` or ``METRIC,FILTER`` names; the first filter where none is given."""
    if name in row:
        return name
    return next((key for key in row if key.partition(",")[0] == name), None)


def metrics(row: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """``METRIC,FILTER``, its value and its standard error, for each metric of a task's row."""
    for key, value in row.items():
        metric, comma, kept = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            yield key, value, row.get(f"{metric}_stderr,{kept}")


def headline(name: str, row: Mapping[str, Any]) -> tuple[str, Any]:
    """The metric by which a task is known, ``METRIC,FILTER``, and its value; the first where its folder does not say."""
    task = find_task(name)
    key = find_metric(row, task.metrics[0]) if task else None
    return next(((found, value) for found, value, _ in metrics(row) if key in (None, found)), ("", None))


def shown(key: str) -> str:
    """``METRIC,FILTER`` as people see it: lm-eval's filter ``none`` says nothing."""
    return key.removesuffix(",none")


def judge(result: Mapping[str, Any], settings: Eval) -> dict[str, Any]:
    """The verdict: ``{"marks", "difference_marks", "missed": ["TASK METRIC"], "passed"}``.

    A value equal to its mark passes; no marks, no miss. What has a mark and no value misses it.
    """
    paired = {
        name: {key: row["difference"] for key, row in rows.items()} for name, rows in (result.get("paired") or {}).items()
    }
    missed = []
    for wanted, there, suffix in (
        (settings.pass_mark, result["tasks"], ""),
        (settings.pass_difference, paired, " difference"),
    ):
        for name, marks in wanted.items():
            row = there.get(name, {})
            for metric, mark in marks.items():
                value = row.get(find_metric(row, metric))
                if value is None or not value >= mark:
                    missed.append(f"{name} {metric}{suffix}")
    return {
        "marks": settings.pass_mark,
        "difference_marks": settings.pass_difference,
        "missed": missed,
        "passed": not missed,
    }


def require_pass(result: Mapping[str, Any]) -> None:
    """Raise UserError (exit 1) with every score of an evaluation that lies below its mark."""
    verdict, problems = result["pass"], []
    for miss in verdict["missed"]:
        name, metric, *of_difference = miss.split(" ")
        there = result.get("paired", {}) if of_difference else result["tasks"]
        row = there.get(name, {})
        found = row.get(find_metric(row, metric))
        value = found["difference"] if of_difference and found else found
        mark = verdict["difference_marks" if of_difference else "marks"][name][metric]
        what = f"the difference of {name} {metric} to the base" if of_difference else f"{name} {metric}"
        text = "unknown" if value is None else f"{value:.4f}"
        count = result["tasks"].get(name, {}).get("n")
        problems.append(
            Problem(
                f"{what} is {text}, the pass mark is {mark:.4f} ({count} documents)",
                file=result["model"],
                key=f"eval.{'pass_difference' if of_difference else 'pass_mark'}.{name}.{metric}",
                fix="look at samples.jsonl of the evaluation; the pass marks are in the recipe",
            )
        )
    if problems:
        raise UserError(problems, ExitCode.FAILED)


def render(result: Mapping[str, Any], console: Console) -> None:
    """The scores as tables, with what was scored above and below them."""
    marks, missed = result["pass"]["marks"], result["pass"]["missed"]
    table = Table(title=Text(", ".join(title(name, result) for name in result["tasks"])), title_justify="left")
    table.add_column("task")
    table.add_column("score")
    table.add_column("value", justify="right")
    table.add_column("± stderr", justify="right")
    if marks:
        table.add_column("pass mark", justify="right")
        table.add_column("verdict")
    for name, row in result["tasks"].items():
        named = {find_metric(row, metric): (metric, mark) for metric, mark in marks.get(name, {}).items()}
        for key, value, stderr in metrics(row):
            cells = [name, shown(key), _number(value), _number(stderr)]
            if marks:
                metric, mark = named.get(key, ("", None))
                text = "" if mark is None else "below" if f"{name} {metric}" in missed else "passed"
                cells += ["" if mark is None else f"{mark:.4f}", text]
            table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    if result.get("paired"):
        table = Table(title=Text(f"beside {result['base']['model']}"), title_justify="left")
        for head in ("task", "score", "base", "tuned", "difference", "95 % interval", "verdict"):
            table.add_column(head, justify="left" if head in ("task", "score", "verdict") else "right")
        for cells in paired_rows(result):
            table.add_row(*(Text(cell) for cell in cells))
        console.print(table)
    for line in result.get("notes") or []:
        console.print(line, markup=False)


def title(name: str, result: Mapping[str, Any]) -> str:
    """A task with its data and how many documents of it were asked."""
    data = ", ".join(str(part) for part in (result.get("details", {}).get(name, {}).get("data") or [])[:2])
    return f"{name} ({data}: {result['tasks'][name].get('n')})" if data else name


def paired_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Task, score, base, tuned, difference, interval, verdict; as text."""
    return [
        [
            name,
            shown(key),
            _number(row["base"]),
            _number(row["tuned"]),
            f"{row['difference']:+.4f}",
            f"{row['ci95'][0]:+.4f} to {row['ci95'][1]:+.4f}",
            row["verdict"],
        ]
        for name, rows in result["paired"].items()
        for key, row in rows.items()
    ]


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "-"
