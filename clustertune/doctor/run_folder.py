"""The run folder and the secrets of a run: where it lies, the room that it needs, who has the tokens."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from clustertune.check.rule import FAIL, RECIPE, WARN, Rules, Seen
from clustertune.checkpoint import store
from clustertune.doctor.recipe_context import RecipeContext
from clustertune.plan.predict import Plan
from clustertune.resolve.resolved import is_there
from clustertune.secrets import SECRET

RULES = Rules(RECIPE, __file__)


@RULES("env-in-git")
def env_in_git(context: RecipeContext) -> Iterator[Seen]:
    """Git does not have the .env file."""
    path = context.env_file
    if path.parent in context.silent or not path.exists():
        return
    command = ["git", "-C", str(path.parent), "ls-files", "--error-unmatch", "--", path.name]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if subprocess.run(command, capture_output=True, timeout=5, check=False).returncode == 0:
            fix = f"git rm --cached {path.name}, name it in .gitignore, and renew every token that stood in it"
            yield Seen(FAIL, "git tracks it", fix, str(path))


@RULES("token-in-environment")
def token_in_environment(context: RecipeContext) -> Iterator[Seen]:
    """Tokens in the shell's environment."""
    named = [name for name in SECRET if context.environment.get(name)]
    if named and context.cluster.slurm is not None:
        fix = f"unset {' '.join(named)}, and keep them in {context.env_file} with mode 0600"
        yield Seen(WARN, f"{', '.join(named)} set in this shell", fix, context.resolved.name)


SPARE = 1.1
"""Filling a file system to the last byte slows it down, and others write there too."""


def existing(path: Path) -> Path:
    """The nearest folder above that is there."""
    return next((folder for folder in (path, *path.parents) if is_there(folder)), Path(path.anchor or "."))


def needed(plan: Plan, run_dir: Path) -> dict[str, float]:
    """Bytes that the run has yet to write there, by what they are.

    Retention deletes the oldest checkpoint after the newest is whole: limit + 1 of them are there at once.
    """
    schedule = plan.schedule
    limit = plan.resolved.train_args["save_total_limit"]
    most = schedule.checkpoints if schedule.checkpoints is not None else (int(limit) if limit else 1)
    count = min(int(limit) + 1, most) if limit else most
    there = len(store.list_checkpoints(run_dir / "checkpoints")) if is_there(run_dir / "checkpoints") else 0
    found = {f"{max(0, count - there)} checkpoints": max(0, count - there) * schedule.checkpoint_bytes}
    for name, folder in (("adapter", "adapter"), ("merged model", "merged")):
        if not is_there(run_dir / folder / "MANIFEST.json"):
            found[name] = schedule.disk.get(name, 0.0)
    return {name: size for name, size in found.items() if size}


@RULES("disk-space")
def disk_space(context: RecipeContext) -> Iterator[Seen]:
    """Room for checkpoints, adapter and merged model."""
    # A path of the cluster's machines: on another one the disk that is here in its place is another one.
    elsewhere = context.run_dir is not None and not context.is_ours and not is_there(context.run_dir.parent)
    if context.plan is None or context.run_dir is None or context.silent or elsewhere:
        return
    parts = needed(context.plan, context.run_dir)
    need, free = sum(parts.values()), _free(context, existing(context.run_dir))
    if free is not None and SPARE * need > free:
        sizes = ", ".join(f"{name} {size / 1e9:,.1f} GB" for name, size in parts.items())
        text = f"{need / 1e9:,.1f} GB are to be written ({sizes}), {free / 1e9:,.1f} GB are free"
        yield Seen(FAIL if need > free else WARN, text if need > free else f"tight: {text}", where=str(context.run_dir))


def _free(context: RecipeContext, path: Path) -> float | None:
    """Bytes that a user may still write where ``path`` lies: what was collected of its mount, else what the system says."""
    for mount in sorted(context.facts.mounts if context.facts else [], key=lambda m: -len(m.point)):
        if path.is_relative_to(mount.point) and mount.free_bytes is not None and mount.point != "/":
            return float(mount.free_bytes)
    with contextlib.suppress(OSError):
        return float(shutil.disk_usage(path).free)
    return None
