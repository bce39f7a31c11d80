"""What ``clustertune stage`` does: copies on this node, or a bundle in one folder, and what it says about them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from clustertune import secrets
from clustertune.cluster.schema import Cluster, Staging
from clustertune.console import reply, say, show_error
from clustertune.errors import ExitCode, UserError
from clustertune.launch import cluster_paths
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir, default_run_dir
from clustertune.staging import bundle_check, bundle_fill, cache, hashed_copy, needs


def _note_other_nodes() -> None:
    """In the shell of a Slurm job of several nodes: how the others get their copies."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if nodes != "1" and "SLURM_STEP_ID" not in os.environ:
        say(f"note: only on {os.uname().nodename}; on all {nodes} nodes: srun --ntasks-per-node=1 clustertune stage ...")


def staging_of(cluster: Cluster) -> Staging:
    if cluster.storage.staging is None:
        fix = "storage: {staging: {path: /local/staging, gb: 2000}} in its file, or --cluster names another one"
        text = f"cluster {cluster.name} names no local disk to copy to"
        raise UserError(text, file=cluster.source, key="storage.staging", fix=fix)
    return cluster.storage.staging


def copy_here(resolved: Resolved, staging: Staging, run_dir: Path | None, stall: float, dry_run: bool, as_json: bool) -> None:
    """Stage on this node, byte for byte verified."""
    _note_other_nodes()
    run = RunDir(run_dir or default_run_dir(resolved, cluster_paths.runs(cluster_paths.local_cluster())))
    sources, notes = needs.sources(resolved, run)
    for note in notes:
        say(f"note: {note}")
    if not sources:
        raise UserError("nothing of this recipe can be copied yet", file=resolved.name, fix=notes[0])
    stager = cache.Stager(cache.open_cache(staging), stall)
    host = os.uname().nodename
    if dry_run:
        plans = [stager.plan(source) for source in sources]
        for plan in plans:
            there = "is there, and would be verified" if plan["there"] else f"would be copied from {plan['from']}"
            say(f"{plan['what']} {plan['name']}: {hashed_copy.amount(plan['bytes'])} in {plan['files']} files {there}")
        reply(as_json, {"host": host, "trees": plans, "notes": notes})
        return
    staged = []
    try:
        for source in sources:
            staged.append(stager.stage(source))
            body = staged[-1].as_json()
            how = "was there, and is whole" if body["reused"] else f"{body['seconds']:.1f} s, {body['gb_s']:.2f} GB/s"
            say(f"{body['what']} {body['name']}: {hashed_copy.amount(body['bytes'])}, {how}: {body['path']}")
    finally:
        for item in staged:
            item.release()
    reply(as_json, {"host": host, "trees": [item.as_json() for item in staged], "notes": notes})


def clean(staging: Staging, dry_run: bool, as_json: bool) -> None:
    """Remove the copies on this node that are not in use."""
    _note_other_nodes()
    staged = cache.open_cache(staging)
    removed: list[dict[str, Any]] = []
    in_use: list[dict[str, Any]] = []
    for tree in staged.trees():
        gone = not dry_run and staged.remove(tree, say, "as asked")
        (removed if gone else in_use).append({"path": str(staged.folder(tree.key)), "bytes": tree.bytes})
        if not gone:
            word = "would be removed unless a job uses it" if dry_run else "stays: a job uses it"
            say(f"{staged.folder(tree.key)} ({hashed_copy.amount(tree.bytes)}) {word}")
    if not removed and not in_use:
        say(f"nothing in {staged.root}")
    reply(as_json, {"host": os.uname().nodename, "removed": removed, "kept": in_use})


def collect(
    resolved: Resolved, overrides: list[str], cluster: Cluster, out: Path, rows: Path | None, stall: float,
    dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    """Everything into one folder."""
    collector = bundle_fill.Collector(resolved, cluster, out, rows, stall)
    collector.check()
    with secrets.lent(secrets.of_the_hub()):
        parts = collector.plan()
        if dry_run:
            for part in parts:
                say(bundle_fill.as_words(part.as_json()))
            summary: dict[str, Any] = {"dir": str(out), "notes": collector.notes, "parts": [part.as_json() for part in parts]}
        else:
            summary = collector.go(parts, overrides)
    for note in collector.notes:
        say(f"note: {note}" if not note.startswith("warning") else note)
    if not dry_run:
        say(f"{out}: {summary['files']} files, {hashed_copy.amount(summary['bytes'])}")
        say(f"next: clustertune stage --verify {out}, then carry it over and run with staged={out}")
    reply(as_json, summary)


def verify(folder: Path, recipe: str | None, overrides: list[str], tiny: bool, stall: float, as_json: bool) -> None:
    """Sums, and the rehearsal without network."""
    verdict = bundle_check.verify(folder, recipe, overrides, tiny=tiny, stall=stall, tell=say)
    error = UserError(verdict.problems)
    if verdict.problems:
        show_error(error)
    else:
        say(f"{folder}: complete, and nothing else is needed: run with staged={folder}")
    reply(as_json, {**verdict.as_json(), **error.as_dict(), "exit_code": 0 if not verdict.problems else int(error.code)})
    if verdict.problems:
        raise typer.Exit(int(ExitCode.CONFIG))
