"""Staging in a Slurm job: each node copies in a step of its own before the ranks; a node that cannot reads the shared storage.

``python -m clustertune.staging.staging_step RUN ATTEMPT`` is that step, one task a node; its end is the barrier. What a node
did is in ``staged-N.json`` of the attempt: its ranks read it, and rank 0 reports it in the metrics.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clustertune.cluster.schema import Cluster
from clustertune.console import say
from clustertune.errors import UserError
from clustertune.host.mounts import own_mounts
from clustertune.launch.agent import ask_anew
from clustertune.launch.attempt import AttemptPlan
from clustertune.manifest import MANIFEST, read_object, write_durably
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir
from clustertune.staging import cache, hashed_copy, needs
from clustertune.staging.cache import SourceFolder, StagedTree, Stager, StagingCache
from clustertune.staging.hashed_copy import STALL_SECONDS, amount


def record_file(folder: Path, node: int) -> Path:
    """What a node staged for an attempt."""
    return folder / f"staged-{node}.json"


def step_command(run_path: Path, attempt: int) -> list[str]:
    """What copies on a node before an attempt's ranks start."""
    return [sys.executable, "-m", "clustertune.staging.staging_step", str(run_path.resolve()), str(attempt)]


def is_on(resolved: Resolved, cluster: Cluster) -> bool:
    """Whether the nodes of a job may copy anything."""
    return cluster.storage.staging is not None and resolved.recipe.slurm.staging is not False


def _cluster(run: RunDir, resolved: Resolved) -> Cluster | None:
    """The cluster that the run's job wrote down; None where nothing is staged."""
    body = run.read().get("cluster")
    try:
        cluster = None if body is None else Cluster.model_validate(body)
    except ValueError:
        return None
    return cluster if cluster is not None and is_on(resolved, cluster) else None


def stage(run_path: Path, attempt: int, node: int) -> None:
    """Copy what the ranks of this node read, and record it.

    Never raises for what goes wrong with a copy: the ranks read the shared storage then, and the record says why.
    """
    run = RunDir(run_path)
    resolved = run.resolved()
    if (cluster := _cluster(run, resolved)) is None:
        return
    began, trees = time.perf_counter(), list[StagedTree]()
    warnings = _stage_all(run, resolved, cluster, trees)
    record = {
        "node": node,
        "host": os.uname().nodename,
        "trees": [item.as_json() for item in trees],
        "seconds": round(time.perf_counter() - began, 3),
        "warnings": warnings,
    }
    for text in warnings:
        say(f"warning: {os.uname().nodename}: {text}")
    with contextlib.suppress(OSError):
        write_durably(record_file(run.attempt(attempt), node), json.dumps(record) + "\n")
    for item in trees:
        item.release()


def _stage_all(run: RunDir, resolved: Resolved, cluster: Cluster, trees: list[StagedTree]) -> list[str]:
    """Fill ``trees``; returns messages on what could not be copied."""
    warnings, mounts = [], own_mounts()
    assert cluster.storage.staging is not None
    try:
        stager = Stager(cache.open_cache(cluster.storage.staging), deep=False)
    except UserError as error:
        return [f"nothing is staged, the ranks read the shared storage: {error.problems[0]}"]
    for source in needs.sources(resolved, run)[0]:
        try:
            if needs.is_wanted(resolved, cluster, hashed_copy.within(STALL_SECONDS, source.root, source.root.resolve), mounts):
                trees.append(_stage_one(stager, source))
        except (UserError, OSError) as error:
            problem = error.problems[0] if isinstance(error, UserError) else error
            warnings.append(f"{source.name} is not staged, the ranks read {source.root}: {problem}")
    return warnings


def _stage_one(stager: Stager, source: SourceFolder) -> StagedTree:
    made = stager.stage(source)
    if made.copied:
        rate = made.copied / max(made.seconds, 1e-9) / 1e9
        say(f"staged {source.name}: {amount(made.copied)} in {made.seconds:.1f} s, {rate:.2f} GB/s, {made.path}")
    else:
        say(f"staged {source.name}: it was there, {made.path}")
    return made


@contextlib.contextmanager
def leased(run_path: Path, plan: AttemptPlan, node: int) -> Iterator[None]:
    """Around the ranks of one node: the copies that its record names are not removed meanwhile.

    A copy that another job has removed since is taken out of the record: the ranks read the shared storage.
    """
    run, leases = RunDir(run_path), list[cache.TreeLock]()
    file = record_file(run.attempt(plan.attempt), node)
    record, cluster = read_object(file), _cluster(run, run.resolved())
    if record.get("trees") and cluster is not None and cluster.storage.staging is not None:
        with contextlib.suppress(UserError, OSError):
            on = cache.open_cache(cluster.storage.staging)
            leases = [lease for tree in record["trees"] if (lease := _lease(on, Path(tree["path"]))) is not None]
        if len(leases) < len(record["trees"]):
            keys = {lease.path.stem for lease in leases}
            record["trees"] = [tree for tree in record["trees"] if Path(tree["path"]).parent.name in keys]
            with contextlib.suppress(OSError):
                write_durably(file, json.dumps(record) + "\n")
    try:
        yield
    finally:
        for lease in leases:
            lease.close()


def _lease(on: StagingCache, path: Path) -> cache.TreeLock | None:
    """The shared lock of the tree of ``path``; None where the tree is gone."""
    lease = on.shared(path.parent.name, wait=lambda _holder: None)
    if (path.parent / MANIFEST).exists():
        return lease
    lease.close()
    return None


# --- for the ranks -----------------------------------------------------------------------------------------------------


def read_records(folder: Path, nodes: int) -> list[dict[str, Any]]:
    """What the nodes of an attempt staged, by node; those that staged nothing are left out."""
    ask_anew(folder)
    records = []
    for node in range(nodes):
        body = read_object(record_file(folder, node))
        if isinstance(body.get("trees"), list):
            records.append(body)
    return records


def local_folders(folder: Path, node: int) -> Mapping[str, Path]:
    """The folders that this node's ranks read from its own disk: ``model``, ``data``, or none."""
    for record in read_records(folder, node + 1):
        if record.get("node") == node:
            folders = {str(tree["what"]): Path(tree["path"]) for tree in record["trees"]}
            return {what: path for what, path in folders.items() if path.is_dir()}
    return {}


def main() -> None:
    """The step on one node: its number is Slurm's. Ends with 0 whatever went wrong: ranks without copies train all the same."""
    stage(Path(sys.argv[1]), int(sys.argv[2]), int(os.environ.get("SLURM_NODEID", "0")))


if __name__ == "__main__":
    main()
