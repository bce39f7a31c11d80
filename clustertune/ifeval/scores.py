"""From lm-eval's numbers to what a person reads: standard errors, the verdict on the pass marks, the table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clustertune.config.schema import IFEVAL_SCORES
from clustertune.errors import ExitCode, Problem, UserError

STDERR_METHOD = {
    "prompt_level": "lm-eval's: sample standard deviation over prompts / sqrt(prompts)",
    "inst_level": "ratio estimator, instructions clustered by prompt (lm-eval gives none)",
}


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


def judge(scores: Mapping[str, float], pass_mark: Mapping[str, float]) -> dict[str, Any]:
    """The verdict: ``{"marks", "missed": [score names], "passed"}``. A score equal to its mark passes; no marks, no miss."""
    missed = [name for name, mark in pass_mark.items() if not scores[name] >= mark]
    return {"marks": dict(pass_mark), "missed": missed, "passed": not missed}


def require_pass(result: Mapping[str, Any]) -> None:
    """Raise UserError (exit 1) with every score of an evaluation that lies below its mark."""
    verdict, scores = result["pass"], result["scores"]
    problems = [
        Problem(
            f"IFEval {name} is {scores[name]:.4f}, the pass mark is {verdict['marks'][name]:.4f} "
            f"({result['dataset']['name']}, {result['dataset']['prompts']} prompts)",
            file=result["model"],
            key=f"eval.ifeval.pass_mark.{name}",
            fix="look at samples.jsonl of the evaluation; the marks stand in the recipe",
        )
        for name in verdict["missed"]
    ]
    if problems:
        raise UserError(problems, ExitCode.FAILED)


def render(result: Mapping[str, Any], console: Console) -> None:
    """The four scores as a table, with what was scored said above and below it."""
    dataset, marks = result["dataset"], result["pass"]["marks"]
    count = f"{dataset['prompts']} prompt{'s' if dataset['prompts'] != 1 else ''}"
    table = Table(title=Text(f"IFEval: {dataset['name']}, {count}"), title_justify="left")
    table.add_column("score")
    table.add_column("value", justify="right")
    table.add_column("± stderr", justify="right")
    if marks:
        table.add_column("pass mark", justify="right")
        table.add_column("verdict")
    for name in IFEVAL_SCORES:
        stderr = result["stderr"][name]
        row = [name, f"{result['scores'][name]:.4f}", "-" if stderr is None else f"{stderr:.4f}"]
        if marks:
            row += (
                [f"{marks[name]:.4f}", "below" if name in result["pass"]["missed"] else "passed"] if name in marks else ["", ""]
            )
        table.add_row(*row)
    console.print(table)
    for line in notes(result):
        console.print(line, markup=False)


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader must know beside the numbers."""
    dataset, found = result["dataset"], []
    if not dataset["is_benchmark"]:
        why = f"the first {dataset['prompts']} of its {dataset['rows']} prompts" if dataset["limited"] else "other prompts"
        found.append(f"Not the IFEval benchmark ({why}): these numbers compare with nothing published.")
    if result["punkt"]["source"] == "trained locally":
        found.append("Sentences were split with punkt parameters trained locally: counts can differ from the official ones.")
    if result["truncated_prompts"]:
        found.append(
            f"{result['truncated_prompts']} prompts lost their beginning: prompt and answer exceed the model's context."
        )
    return found
