"""A tuned model beside its base, document by document: difference, interval, verdict, and answers that changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clustertune.errors import Problem, UserError

RESAMPLES, SEED = 10_000, 1234
"""Of the bootstrap over documents."""
LEVEL = 0.95
BETTER, WORSE, SAME = "better", "worse", "no difference"
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
    verdict = up if low > 0 else down if high < 0 else SAME
    return {"base": first, "tuned": second, "difference": second - first, "ci95": [low, high], "verdict": verdict}


def pair(value: Any) -> tuple[float, float] | None:
    """A document's value of a metric as (sum, judgements); None where it is not a number nor a list of them."""
    if isinstance(value, bool | int | float):
        return float(value), 1.0
    if isinstance(value, list) and value and all(isinstance(item, bool | int | float) for item in value):
        return float(sum(value)), float(len(value))
    return None


def compare(base: Mapping[str, Any], tuned: Mapping[str, Any], members: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """``{"paired": ..., "changed": ...}`` of two evaluations.

    Each is ``{"tasks": results, "samples": samples, "higher_is_better": ...}``; ``members``: the tasks of each group. A metric
    that is not a mean over documents is left out. Raises UserError where the two were not asked the same.
    """
    before, after = _by_document(base["samples"]), _by_document(tuned["samples"])
    if {at: row["prompt_hash"] for at, row in before.items()} != {at: row["prompt_hash"] for at, row in after.items()}:
        raise UserError(
            Problem(
                "base and tuned model were asked different prompts",
                key="--base",
                fix="score both with the same tasks, limit, few-shot examples and chat template",
            )
        )
    found: dict[str, dict[str, Any]] = {}
    changed: dict[str, Any] = {}
    for name, scores in tuned["tasks"].items():
        leaves = members.get(name, [name])
        for key in (key for key in scores if "," in key and "_stderr," not in key):
            metric, _, kept = key.partition(",")
            places = [at for at in after if at[0] in leaves and at[2] == kept and metric in after[at]]
            pairs = [(pair(before[at].get(metric)), pair(after[at][metric])) for at in places]
            whole = [(first, second) for first, second in pairs if first and second]
            if not whole or len(whole) < len(pairs):
                continue
            higher = tuned.get("higher_is_better", {}).get(name, {}).get(metric) is not False
            row = interval([first for first, _ in whole], [second for _, second in whole], higher_is_better=higher)
            if abs(row["tuned"] - scores[key]) > 1e-6:  # another aggregation than the mean: perplexity, F1 over all
                continue
            found.setdefault(name, {})[key] = row
            if name not in members and not any(changed.get(name, {}).values()):
                changed[name] = _changed(places, before, after, metric, higher)
    return {"paired": found, "changed": changed}


def _by_document(samples: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int, str], Mapping[str, Any]]:
    return {(row["task"], int(row["doc_id"]), row["filter"]): row for row in samples}


def _changed(places: Sequence[Any], before: Mapping[Any, Any], after: Mapping[Any, Any], metric: str, higher: bool) -> Any:
    """The first documents whose score rose and fell, with both answers."""
    found: dict[str, list[dict[str, Any]]] = {BETTER: [], WORSE: []}
    for at in places:
        (first, of_first), (second, of_second) = (pair(rows[at][metric]) or (0.0, 1.0) for rows in (before, after))
        difference = (second / of_second - first / of_first) * (1 if higher else -1)
        side = found[BETTER if difference > 0 else WORSE]
        if difference and len(side) < SHOWN:
            prompt = str(after[at]["arguments"][0][0])[-_LENGTH:]
            side.append({"doc": at[1], "prompt": prompt, "base": _answer(before[at]), "tuned": _answer(after[at])})
    return found


def _answer(sample: Mapping[str, Any]) -> str:
    """What a model answered: its text, or the choice that it holds for the likeliest."""
    answers = [given[0] for given in sample["resps"]]
    if all(isinstance(answer, str) for answer in answers):
        return str(answers[0])[:_LENGTH]
    if len(answers) > 1:
        best = max(range(len(answers)), key=lambda i: float(answers[i][0]))
        return str(sample["arguments"][best][1]).strip()[:_LENGTH]
    return str(answers[0])
