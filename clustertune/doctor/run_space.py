"""Room for what a run writes: checkpoints with the one that is being written, adapter, merged model."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from clustertune.check.rule import FAIL, RECIPE, WARN, Seen, rule
from clustertune.checkpoint import store
from clustertune.config.resolved import is_there
from clustertune.doctor.recipe_context import Context
from clustertune.plan.predict import Plan

SPARE = 1.1
"""Filling a file system to the last byte slows it down, and others write there too."""
ALL_KEPT = 1e12
"""Bytes of checkpoints, without a limit on them, that are worth a word."""


def existing(path: Path) -> Path:
    """The nearest folder above that is there."""
    return next((folder for folder in (path, *path.parents) if is_there(folder)), Path(path.anchor or "."))


def needed(plan: Plan, run_dir: Path) -> dict[str, float]:
    """Bytes that the run has yet to write there, by what they are.

    Retention deletes the oldest checkpoint after the newest is whole: limit + 1 of them are there at once.
    """
    schedule = plan.schedule
    limit = plan.resolved.train_args.get("save_total_limit")
    most = schedule.checkpoints if schedule.checkpoints is not None else (int(limit) if limit else 1)
    count = min(int(limit) + 1, most) if limit else most
    there = len(store.list_checkpoints(run_dir / "checkpoints")) if is_there(run_dir / "checkpoints") else 0
    found = {f"{max(0, count - there)} checkpoints": max(0, count - there) * schedule.checkpoint_bytes}
    for name, folder in (("adapter", "adapter"), ("merged model", "merged")):
        if not is_there(run_dir / folder / "MANIFEST.json"):
            found[name] = schedule.disk.get(name, 0.0)
    return {name: size for name, size in found.items() if size}


@rule("disk-space", RECIPE)
def room(context: Context) -> Iterator[Seen]:
    """Looks at: room for checkpoints, adapter and merged model

    Why: a save that finds the disk full ends the run (exit 73); a merge ends after hours
    Fix: free space, give a --run-dir elsewhere, or lower train.save_total_limit
    See: https://huggingface.co/docs/transformers/main_classes/trainer
    """
    if context.plan is None or context.run_dir is None or context.silent:
        return
    if not context.is_ours and not is_there(context.run_dir.parent):
        return  # a path of the cluster's machines: the disk that is here in its place is another one
    parts = needed(context.plan, context.run_dir)
    need, free = sum(parts.values()), _free(context, existing(context.run_dir))
    if free is None:
        return
    words = ", ".join(f"{name} {size / 1e9:,.1f} GB" for name, size in parts.items())
    text = f"{need / 1e9:,.1f} GB are to be written ({words}), {free / 1e9:,.1f} GB are free"
    if need > free:
        yield Seen(FAIL, text, where=str(context.run_dir))
    elif SPARE * need > free:
        yield Seen(WARN, f"tight: {text}", where=str(context.run_dir))


def _free(context: Context, path: Path) -> float | None:
    """Bytes that a user may still write where ``path`` lies: what was collected of its mount, else what the system says."""
    for mount in sorted(context.facts.mounts if context.facts else [], key=lambda m: -len(m.point)):
        if path.is_relative_to(mount.point) and mount.free_bytes is not None and mount.point != "/":
            return float(mount.free_bytes)
    with contextlib.suppress(OSError):
        return float(shutil.disk_usage(path).free)
    return None


@rule("checkpoints-kept", RECIPE)
def kept(context: Context) -> Iterator[Seen]:
    """Looks at: a limit on the checkpoints that are kept

    Why: without one every save stays, until the disk is full
    Fix: train.save_total_limit=3
    See: https://huggingface.co/docs/transformers/main_classes/trainer
    """
    plan = context.plan if context.is_real else None
    if plan is None or context.resolved.train_args.get("save_total_limit") or not plan.schedule.checkpoints:
        return
    size = plan.schedule.checkpoints * plan.schedule.checkpoint_bytes
    if size > ALL_KEPT:
        text = f"train.save_total_limit is not given: {plan.schedule.checkpoints} checkpoints, {size / 1e12:,.1f} TB"
        yield Seen(WARN, text)
