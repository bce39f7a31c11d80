"""Scores while the training is under way: the base and the adapters of checkpoints, each beside the base, without a merge.

The training stands still for them: its ranks save and end, all GPUs answer as in the stage ``eval``, and the next attempt goes
on from the checkpoint, with the same bytes as if it had never stopped. A score that was taken is not taken again.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clustertune.checkpoint.store import Checkpoint, list_checkpoints, verify
from clustertune.console import say
from clustertune.evaluate.scores import headline, read_result
from clustertune.export.export import export
from clustertune.recipe.sections import Eval
from clustertune.rundir import RunDir

BASE = "base"
"""The folder of the base's evaluation, beside those of the checkpoints, which have their names."""


def is_scored(run: RunDir, name: str) -> bool:
    """Whether the checkpoint of this name has its scores."""
    return read_result(run.scores / name) is not None


def take(
    run: RunDir, settings: Eval, base: Path, checkpoint: Checkpoint, *, data: Path | None, benchmark: bool
) -> dict[str, Any]:
    """Score a checkpoint's adapter beside the base; the values of its event.

    ``base``: the base model's folder; ``data`` and ``benchmark`` as :func:`clustertune.evaluate.run.evaluate` has them. What is
    on disk of an earlier call that was killed is used again. Raises UserError as the export and the evaluation do.
    """
    from clustertune.evaluate.run import evaluate

    asked: dict[str, Any] = {"settings": settings, "data": data, "benchmark": benchmark, "progress_file": run.evaluating}
    adapter = run.scores / f"adapter-{checkpoint.path.name}"
    export(checkpoint.path, adapter, base)
    out = run.scores / checkpoint.path.name
    found = described(evaluate(base, out, adapter=adapter, base=base, base_out=run.scores / BASE, **asked))
    shutil.rmtree(adapter)
    say(f"scores at step {checkpoint.step}: {in_words(found)}")
    return found


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


def in_words(found: Mapping[str, Any]) -> str:
    """``ifeval 0.4063 (+0.0312 to the base)``, task by task."""
    shown = [
        f"{name} {value:.4f}" + (f" ({found['differences'][name]:+.4f} to the base)" if name in found["differences"] else "")
        for name, value in found["tasks"].items()
        if value is not None
    ]
    return ", ".join(shown)


def best(run: RunDir) -> Checkpoint | None:
    """The whole checkpoint with the largest mean difference to the base, the later one of two; None where none has one."""
    found = []
    for checkpoint in list_checkpoints(run.checkpoints):
        result = read_result(run.scores / checkpoint.path.name)
        difference = described(result)["difference"] if result is not None else None
        if difference is not None and not verify(checkpoint.path, hashes=False):
            found.append((difference, checkpoint))
    return max(found)[1] if found else None
