"""Scores while the training is under way: the base and the adapters of checkpoints, each beside the base, without a merge.

Where vLLM's servers run beside the trainer, they take the adapter, and the training goes on. Elsewhere it stands
still: its ranks save and end, all GPUs answer as in the stage ``eval``, and the next attempt goes on from the checkpoint, with
the same bytes as if it had never stopped. A score that was taken is not taken again.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from clustertune.checkpoint.store import Checkpoint, is_final, list_checkpoints, parse, verify
from clustertune.console import say
from clustertune.errors import UserError
from clustertune.evaluate.scores import headline, read_result
from clustertune.export.export import export
from clustertune.recipe.sections import During, Eval, Recipe
from clustertune.rundir import RunDir

BASE = "base"
"""The folder of the base's evaluation, beside those of the checkpoints, which have their names."""


def is_scored(run: RunDir, name: str) -> bool:
    """Whether the checkpoint of this name has its scores."""
    return read_result(run.scores / name) is not None


def export_adapter(run: RunDir, checkpoint: Checkpoint, base: Path) -> Path | None:
    """The folder of a checkpoint's adapter, for its scores; None where the ranks have removed the checkpoint meanwhile.

    One of a checkpoint that was passed over since is removed. Raises UserError as the export does.
    """
    adapter = run.scores / f"adapter-{checkpoint.path.name}"
    for other in run.scores.glob("adapter-*"):
        if other != adapter:
            shutil.rmtree(other)
    try:
        export(checkpoint.path, adapter, base)
    except UserError:
        if checkpoint.path.exists():
            raise
        return None
    return adapter


def take(
    run: RunDir,
    settings: Eval,
    base: Path,
    adapter: Path,
    checkpoint: Checkpoint,
    *,
    data: Path | None,
    benchmark: bool,
    beside: bool,
) -> dict[str, Any]:
    """Score the ``adapter`` of a checkpoint beside the base, and remove it; the values of the event.

    ``base``: the base model's folder; ``data`` and ``benchmark`` as :func:`clustertune.evaluate.run.evaluate` has them.
    ``beside``: the ranks train meanwhile; their GPUs are left alone, and the run is not shown as evaluating. What is on disk
    of an earlier call that was killed is used again. Raises UserError as the evaluation does.
    """
    from clustertune.evaluate.run import evaluate

    place = {"device": "cpu"} if beside else {"progress_file": run.evaluating}
    asked: dict[str, Any] = {"settings": settings, "data": data, "benchmark": benchmark, **place}
    out = run.scores / checkpoint.path.name
    scored = described(evaluate(base, out, adapter=adapter, base=base, base_out=run.scores / BASE, **asked))
    shutil.rmtree(adapter)
    say(f"scores at step {checkpoint.step}: {in_words(scored)}")
    return scored


def described(result: Mapping[str, Any]) -> dict[str, Any]:
    """Of an evaluation: each task's headline, its difference to the base with the 95 % interval, and the mean difference."""
    tasks, differences, intervals = {}, {}, {}
    for name, row in result["tasks"].items():
        key, tasks[name] = headline(name, row)
        if (paired := result.get("paired", {}).get(name, {}).get(key)) is not None:
            lower = key.partition(",")[0] in (result["details"][name].get("lower_is_better") or ())
            differences[name] = -paired["difference"] if lower else paired["difference"]
            intervals[name] = paired["ci95"]
    mean = statistics.fmean(differences.values()) if differences else None
    return {"tasks": tasks, "differences": differences, "intervals": intervals, "difference": mean}


def in_words(scored: Mapping[str, Any]) -> str:
    """``ifeval 0.4063 (+0.0312 to the base)``, task by task."""
    shown = [
        f"{name} {value:.4f}" + (f" ({scored['differences'][name]:+.4f} to the base)" if name in scored["differences"] else "")
        for name, value in scored["tasks"].items()
        if value is not None
    ]
    return ", ".join(shown)


def best(run: RunDir) -> Checkpoint | None:
    """The whole checkpoint with the largest mean difference to the base, the later one of two; None where none has one."""
    scored = []
    for checkpoint in list_checkpoints(run.checkpoints):
        result = read_result(run.scores / checkpoint.path.name)
        difference = described(result)["difference"] if result is not None else None
        if difference is not None and not verify(checkpoint.path, hashes=False):
            scored.append((difference, checkpoint))
    return max(scored)[1] if scored else None


def next_to_score(run: RunDir, recipe: Recipe) -> Checkpoint | None:
    """The newest whole checkpoint that is due, or the last step's; None where it has its scores, or nothing is scored."""
    if (during := recipe.eval.during) is None:
        return None
    for checkpoint in list_checkpoints(run.checkpoints):
        if verify(checkpoint.path, hashes=False):
            continue
        if is_final(checkpoint.path) or during.is_due(checkpoint.step, recipe.milestones):
            return None if is_scored(run, checkpoint.path.name) else checkpoint
    return None


def is_kept(run: RunDir, recipe: Recipe, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint stays whatever ``save_total_limit`` says: a milestone, the one that the servers beside the trainer
    score next, and what ``keep: best`` may choose.
    """
    during, milestones = recipe.eval.during, recipe.milestones
    if checkpoint.step in milestones or (recipe.scores_beside and checkpoint == next_to_score(run, recipe)):
        return True
    return during is not None and may_be_exported(run, during, milestones, checkpoint)


def may_be_exported(run: RunDir, during: During, milestones: Collection[int], checkpoint: Checkpoint) -> bool:
    """Whether ``keep: best`` may choose a checkpoint: the best so far, and one that is newer than the last scores."""
    if during.keep != "best":
        return False
    named = [parse(path) for path in run.scores.glob("step-*") if is_scored(run, path.name)]
    last = max((one.step for one in named if one is not None), default=0)
    return (checkpoint.step > last and during.is_due(checkpoint.step, milestones)) or checkpoint == best(run)
