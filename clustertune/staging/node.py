"""Staging within a training job: each node copies before its ranks start, and a node that cannot reads the shared storage.

What a node did is in ``staged-N.json`` of the attempt: its ranks read it, and rank 0 reports it in the metrics.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clustertune.cluster.schema import Cluster
from clustertune.console import say
from clustertune.errors import UserError
from clustertune.events import SCHEMA, read_object
from clustertune.host.mounts import own_mounts
from clustertune.launch.agent import ask_anew, node_record
from clustertune.launch.plan import AttemptPlan, newest_attempt
from clustertune.manifest import write_durably
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir
from clustertune.staging import cache, needs, worker
from clustertune.staging.cache import SourceFolder, StagedTree, Stager
from clustertune.staging.worker import Bounds

HEARTBEAT_SECONDS = 5.0
PEER_SECONDS = 300.0
"""How long a node waits for a peer that shows no sign: as long as it would for the first node's address."""


def record_file(folder: Path, node: int) -> Path:
    """What a node staged for an attempt."""
    return folder / f"staged-{node}.json"


def heartbeat_file(folder: Path, node: int) -> Path:
    """Touched while a node copies: the others see that it is alive."""
    return folder / f"staging-{node}.heartbeat"


@contextlib.contextmanager
def staged(run_path: Path, plan: AttemptPlan, node: int) -> Iterator[None]:
    """Around the ranks of one node: its copies are there, and are not removed meanwhile.

    Never raises for what goes wrong with a copy: the ranks read the shared storage then, and the record says why.
    """
    run, leases = RunDir(run_path), list[StagedTree]()
    folder = run.attempt(plan.attempt)
    resolved, cluster = run.resolved(), cluster_of(run)
    if cluster is None or cluster.storage.staging is None or resolved.recipe.slurm.staging is False:
        yield
        return
    began = time.perf_counter()
    with _heartbeat(heartbeat_file(folder, node)):
        warnings = _stage(run, resolved, cluster, leases)
    record = {
        "schema": SCHEMA,
        "node": node,
        "host": os.uname().nodename,
        "trees": [item.as_json() for item in leases],
        "seconds": round(time.perf_counter() - began, 3),
        "warnings": warnings,
    }
    for text in warnings:
        say(f"warning: {os.uname().nodename}: {text}")
    try:
        with contextlib.suppress(OSError):
            write_durably(record_file(folder, node), json.dumps(record) + "\n")
        _await_peers(run_path, folder, plan, node)
        yield
    finally:
        for item in leases:
            item.release()


def cluster_of(run: RunDir) -> Cluster | None:
    """The cluster that the run's job wrote down; None where no job did."""
    body = run.read().get("cluster")
    try:
        return None if body is None else Cluster.model_validate(body)
    except ValueError:
        return None


def _stage(run: RunDir, resolved: Resolved, cluster: Cluster, leases: list[StagedTree]) -> list[str]:
    """Fill ``leases``; returns messages on what could not be copied."""
    bounds, warnings = Bounds(), []
    mounts = own_mounts()
    assert cluster.storage.staging is not None
    try:
        stager = Stager(cache.open_cache(cluster.storage.staging), bounds, deep=False)
    except UserError as error:
        return [f"nothing is staged, the ranks read the shared storage: {error.problems[0]}"]
    for source in needs.sources(resolved, run)[0]:
        try:
            if needs.is_wanted(resolved, cluster, worker.locate(source.root, bounds), mounts):
                leases.append(_stage_one(stager, source))
        except (UserError, OSError) as error:
            problem = error.problems[0] if isinstance(error, UserError) else error
            warnings.append(f"{source.name} is not staged, the ranks read {source.root}: {problem}")
    return warnings


def _stage_one(stager: Stager, source: SourceFolder) -> StagedTree:
    found = stager.stage(source)
    if found.copied:
        rate = found.copied / max(found.seconds, 1e-9) / 1e9
        say(f"staged {source.name}: {worker.amount(found.copied)} in {found.seconds:.1f} s, {rate:.2f} GB/s, {found.path}")
    else:
        say(f"staged {source.name}: it was there, {found.path}")
    return found


@contextlib.contextmanager
def _heartbeat(path: Path) -> Iterator[None]:
    end = threading.Event()

    def heartbeat() -> None:
        while True:
            with contextlib.suppress(OSError):
                path.write_text(f"{time.time()}\n")
            if end.wait(HEARTBEAT_SECONDS):
                return

    thread = threading.Thread(target=heartbeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(1)


def _await_peers(run_path: Path, folder: Path, plan: AttemptPlan, node: int) -> None:
    """Until every node has staged: ranks that start before the others' are taken for hung, or give up at the rendezvous.

    A peer that shows no sign for :data:`PEER_SECONDS`, or has failed, is not waited for: the rendezvous tells that better.
    """
    waiting = {peer for peer in range(len(plan.nodes)) if peer != node}
    seen: dict[int, str] = {}
    heard = dict.fromkeys(waiting, time.monotonic())
    while waiting and newest_attempt(run_path) <= plan.attempt:
        ask_anew(folder)
        for peer in sorted(waiting):
            if record_file(folder, peer).exists() or node_record(folder, peer).get("code"):
                waiting.discard(peer)
                continue
            with contextlib.suppress(OSError):
                if (text := heartbeat_file(folder, peer).read_text()) != seen.get(peer):
                    seen[peer], heard[peer] = text, time.monotonic()
            if time.monotonic() - heard[peer] > PEER_SECONDS:
                waiting.discard(peer)
        if waiting:
            time.sleep(0.2)


# --- for the ranks -----------------------------------------------------------------------------------------------------


def read_records(folder: Path, nodes: int) -> list[dict[str, Any]]:
    """What the nodes of an attempt staged, by node; those that staged nothing are left out."""
    ask_anew(folder)
    found = []
    for node in range(nodes):
        body = read_object(record_file(folder, node))
        if isinstance(body.get("trees"), list):
            found.append(body)
    return found


def local_folders(folder: Path, node: int) -> Mapping[str, Path]:
    """The folders that this node's ranks read from its own disk: ``model``, ``data``, or none."""
    for record in read_records(folder, node + 1):
        if record.get("node") == node:
            found = {str(tree["what"]): Path(tree["path"]) for tree in record["trees"]}
            return {what: path for what, path in found.items() if path.is_dir()}
    return {}
