"""From lm-eval's numbers to what a person reads: standard errors, the verdict on the pass marks, the tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from clustertune.console import make_table
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.manifest import read_whole
from clustertune.recipe.eval_tasks import find_task
from clustertune.recipe.sections import OWN_PROMPTS, Eval

RESULT = "results.json"
"""What an evaluation was called while there was one task."""


def clustered_stderr(followed: Sequence[Any]) -> float | None:
    """Standard error of a ratio over prompts, such as the share of followed instructions: one value per prompt, of a form that
    :func:`pair` reads. None for fewer than two prompts.

    The instructions of one prompt are judged on one answer and are not independent, so that the binomial formula is too
    small. Cluster-robust: sqrt(n/(n-1) * sum_i (x_i - p*m_i)^2) / sum_i m_i over n prompts with x_i of m_i followed
    (Miller 2024, arXiv:2411.00640, section 2.2). With one instruction per prompt it is lm-eval's prompt-level formula.
    """
    prompts = len(followed)
    if prompts < 2:
        return None
    pairs = [fraction for items in followed if (fraction := pair(items))]
    total = math.fsum(count for _, count in pairs)
    share = math.fsum(value for value, _ in pairs) / total
    spread = math.fsum((value - share * count) ** 2 for value, count in pairs)
    return math.sqrt(prompts / (prompts - 1) * spread) / total


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result in an evaluation's folder; None where there is none. Raises OSError and ValueError where it cannot be read."""
    if not (folder / RESULT).is_file():
        return None
    result: dict[str, Any] = json.loads(read_whole(folder / RESULT))
    return result


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
    return next(((metric, value) for metric, value, _ in metrics(row) if key in (None, metric)), ("", None))


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
    for required, results, suffix in (
        (settings.pass_mark, result["tasks"], ""),
        (settings.pass_difference, paired, " difference"),
    ):
        for name, marks in required.items():
            row = results.get(name, {})
            for metric, mark in marks.items():
                value = row.get(find_metric(row, metric))
                if value is None or not value >= mark:
                    missed.append(f"{name} {metric}{suffix}")
    return {"marks": settings.pass_mark, "difference_marks": settings.pass_difference, "missed": missed, "passed": not missed}


def require_pass(result: Mapping[str, Any]) -> None:
    """Raise UserError (exit 1) with every score of an evaluation that lies below its mark."""
    verdict, problems = result["pass"], []
    for miss in verdict["missed"]:
        name, metric, *of_difference = miss.split(" ")
        rows = result.get("paired", {}) if of_difference else result["tasks"]
        row = rows.get(name, {})
        entry = row.get(find_metric(row, metric))
        value = entry["difference"] if of_difference and entry else entry
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
    columns = ["task", "score", *(["verdict"] if marks else []), "value", "± stderr", *(["pass mark"] if marks else [])]
    head = ", ".join(title(name, result) for name in result["tasks"])
    table = make_table(*columns, title=head, text_columns=3 if marks else 2)
    for name, row in result["tasks"].items():
        named = {find_metric(row, metric): (metric, mark) for metric, mark in marks.get(name, {}).items()}
        for key, value, stderr in metrics(row):
            cells = [name, shown(key), _number(value), _number(stderr)]
            if marks:
                metric, mark = named.get(key, ("", None))
                text = "" if mark is None else "below" if f"{name} {metric}" in missed else "passed"
                cells = [*cells[:2], text, *cells[2:], "" if mark is None else f"{mark:.4f}"]
            table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    if result.get("paired"):
        columns = ["task", "score", "verdict", "base", "tuned", "change", "95 % interval"]
        table = make_table(*columns, title=f"beside {result['base']['model']}", text_columns=3)
        for *cells, verdict in paired_rows(result):
            table.add_row(*(Text(cell) for cell in (*cells[:2], verdict, *cells[2:])))
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


# --- paired ----------------------------------------------------------------------------------------------------------------

# A tuned model beside its base, document by document: difference, interval, verdict, and answers that changed.


RESAMPLES, SEED = 10_000, 1234
"""Of the bootstrap over documents."""
LEVEL = 0.95
BETTER, WORSE, SAME, FEW = "better", "worse", "unclear", "too few"
ENOUGH = 20
"""Documents below which there is no verdict: with so few a percentile bootstrap is much too narrow (Hesterberg 2015,
arXiv:1411.5279, section 4), and two answers that are both better have an interval of no width."""
METHOD = f"paired percentile bootstrap over documents, {RESAMPLES:,} resamples, seed {SEED}"
SHOWN = 3
"""Answers for the better and as many for the worse."""
_LENGTH = 1000
"""Characters of a prompt's end and of an answer that are shown."""
_BLOCK = 2_000_000
"""Counts drawn at once: 16 MB."""


def interval(base: Any, tuned: Any, *, higher_is_better: bool = True) -> dict[str, Any]:
    """The difference of two models on the same documents.

    ``base`` and ``tuned``: arrays of shape (documents, 2), a document's score and the number of judgements that it is the
    sum of; the score of a model is their ratio (1 judgement a document: the mean). The documents are drawn with replacement,
    the same for both models (Efron and Tibshirani 1993, chapter 13; paired: Miller 2024, arXiv:2411.00640, section 4.2).
    """
    import numpy as np

    both = np.concatenate([np.asarray(base, dtype=float), np.asarray(tuned, dtype=float)], axis=1)
    documents = len(both)
    draw, drawn = np.random.default_rng(SEED), []
    for start in range(0, RESAMPLES, step := max(1, _BLOCK // documents)):
        times = draw.multinomial(documents, [1 / documents] * documents, size=min(step, RESAMPLES - start))
        sums = times @ both
        drawn.append(sums[:, 2] / sums[:, 3] - sums[:, 0] / sums[:, 1])
    low, high = (float(edge) for edge in np.quantile(np.concatenate(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    totals = both.sum(axis=0)
    first, second = float(totals[0] / totals[1]), float(totals[2] / totals[3])
    up, down = (BETTER, WORSE) if higher_is_better else (WORSE, BETTER)
    verdict = FEW if documents < ENOUGH else up if low > 0 else down if high < 0 else SAME
    return {"base": first, "tuned": second, "difference": second - first, "ci95": [low, high], "verdict": verdict}


def pair(value: Any) -> tuple[float, float] | None:
    """A document's value of a metric as (sum, judgements); None where it is not a number, a list of them, nor
    ``{"sum", "of"}``."""
    if isinstance(value, bool | int | float):
        return float(value), 1.0
    if isinstance(value, list) and value and all(isinstance(item, bool | int | float) for item in value):
        return float(sum(value)), float(len(value))
    if isinstance(value, Mapping) and value.keys() == {"sum", "of"}:
        return float(value["sum"]), float(value["of"])
    return None


def compare(base: Mapping[str, Any], tuned: Mapping[str, Any], members: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """``{"paired": ..., "changed": ...}`` of two evaluations.

    Each is ``{"tasks": results, "samples": samples, "higher_is_better": ...}``; ``members``: the tasks of each group. A metric
    that is not a mean over documents is left out. Raises UserError where the two were not asked the same.
    """
    before, after = _by_document(base["samples"]), _by_document(tuned["samples"])
    if {at: row["prompt_hash"] for at, row in before.items()} != {at: row["prompt_hash"] for at, row in after.items()}:
        raise UserError(
            "base and tuned model were asked different prompts",
            key="--base",
            fix="score both with the same tasks, limit, few-shot examples and chat template",
        )
    paired: dict[str, dict[str, Any]] = {}
    changed: dict[str, Any] = {}
    for name, scores in tuned["tasks"].items():
        leaves = members.get(name, [name])
        for key in (key for key in scores if "," in key and "_stderr," not in key):
            metric, _, kept = key.partition(",")
            places = [at for at in after if at[0] in leaves and at[2] == kept and metric in after[at]]
            pairs = [(pair(before[at].get(metric)), pair(after[at][metric])) for at in places]
            complete = [(first, second) for first, second in pairs if first and second]
            if not complete or len(complete) < len(pairs):
                continue
            higher = tuned.get("higher_is_better", {}).get(name, {}).get(metric) is not False
            row = interval([first for first, _ in complete], [second for _, second in complete], higher_is_better=higher)
            if abs(row["tuned"] - scores[key]) > 1e-6:  # another aggregation than the mean: perplexity, F1 over all
                continue
            paired.setdefault(name, {})[key] = row
            if name not in (*members, OWN_PROMPTS) and not any(changed.get(name, {}).values()):
                changed[name] = _changed(places, before, after, metric, higher)
    return {"paired": paired, "changed": changed}


def _by_document(samples: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int, str], Mapping[str, Any]]:
    return {(row["task"], int(row["doc_id"]), row["filter"]): row for row in samples}


def _changed(places: Sequence[Any], before: Mapping[Any, Any], after: Mapping[Any, Any], metric: str, higher: bool) -> Any:
    """The first documents whose score rose and fell, with both answers."""
    changes: dict[str, list[dict[str, Any]]] = {BETTER: [], WORSE: []}
    for at in places:
        (first, of_first), (second, of_second) = (pair(rows[at][metric]) or (0.0, 1.0) for rows in (before, after))
        difference = (second / of_second - first / of_first) * (1 if higher else -1)
        side = changes[BETTER if difference > 0 else WORSE]
        if difference and len(side) < SHOWN:
            prompt = str(after[at]["arguments"][0][0])[-_LENGTH:]
            side.append({"doc": at[1], "prompt": prompt, "base": _answer(before[at]), "tuned": _answer(after[at])})
    return changes


def _answer(sample: Mapping[str, Any]) -> str:
    """What a model answered: its text, or the choice that it holds for the likeliest."""
    answers = [reply[0] for reply in sample["resps"]]
    if all(isinstance(answer, str) for answer in answers):
        return str(answers[0])[:_LENGTH]
    if len(answers) > 1:
        best = max(range(len(answers)), key=lambda i: float(answers[i][0]))
        return str(sample["arguments"][best][1]).strip()[:_LENGTH]
    return str(answers[0])
