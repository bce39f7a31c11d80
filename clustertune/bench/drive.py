"""Runs a benchmark: prepare once, then rounds of this project's ranks and its peers' in turn, on this machine or in a job."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clustertune import chain, job
from clustertune.bench import peer, preparation
from clustertune.bench.preparation import Bench
from clustertune.cluster.schema import Cluster
from clustertune.console import say
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.events import read_object
from clustertune.launch import container, step
from clustertune.launch.allocation import Allocation
from clustertune.launch.plan import AttemptPlan
from clustertune.rundir import RunDir, keep_private
from clustertune.training.bench_schedule import GONE, OURS, result_file

PEERS = "peer"
"""Folder of the peers' rounds, below the run's."""


@dataclass
class Peer:
    """What the rounds of one peer left."""

    name: str
    paired: list[list[dict[str, Any]]] = field(default_factory=list)
    """Of each of its rounds what each rank of ours measured in turn with it."""
    theirs: list[list[dict[str, Any]]] = field(default_factory=list)
    failed: str | None = None
    """What ended it."""


@dataclass
class RoundsResult:
    """What the rounds left."""

    run: RunDir
    ours: list[list[dict[str, Any]]] = field(default_factory=list)
    """Of each round what each rank measured."""
    peers: list[Peer] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    nodes: int = 1


def measure(bench: Bench, command: list[str], cluster: Cluster | None = None, given: Allocation | None = None) -> RoundsResult:
    """Run all rounds. ``cluster`` and ``given``: those of the job that this runs in; without them it is this machine.

    Raises UserError where the recipe's own training fails; what ends a peer stands in the result.
    """
    path = bench.request.run_path
    chain.check_folder(bench.measured, path)
    if given is None:  # in a job the image may have what trains
        chain.require_training()
    keep_private(cluster)
    with RunDir(path).lock():
        made = _open(bench, command, cluster, given)
        found = RoundsResult(made.run, peers=[Peer(word) for word in bench.request.against])
        if made.run.stage("prepare") is None:
            made.run_stage("prepare")
        if isinstance(made, job.JobChain):
            made.check_nodes()
        for number in range(1, bench.request.rounds + 1):
            together = bench.request.interleave and any(one.failed is None for one in found.peers)
            if not together:
                say(f"round {number} of {bench.request.rounds}: {bench.measured.name}")
                _ours(made, found)
            for position, one in enumerate(found.peers):
                if one.failed is not None:
                    continue
                say(f"round {number} of {bench.request.rounds}: {one.name}{', a step each in turn' if together else ''}")
                _theirs(made, found, bench, one, f"{position}-{number}", together=together)
    return found


def _open(bench: Bench, command: list[str], cluster: Cluster | None, given: Allocation | None) -> chain.Chain:
    """The run folder, with the conversations that are made up for it, and the chain that runs in it."""
    path, resolved = bench.request.run_path, bench.measured
    if bench.made is not None and not preparation.made_file(path).exists():
        say(f"conversations made up: {preparation.make_conversations(bench):,} in {preparation.made_file(path)}")
    run = chain.open_run(resolved, path, command)
    bench.request.schedule.write(path)
    run.write_own_files(resolved)
    if given is None:
        return chain.Chain(run, resolved)
    assert cluster is not None
    job.check_image(run, cluster, given)
    return job.JobChain(run, resolved, allocation=given, cluster=cluster)


def _ours(made: chain.Chain, found: RoundsResult) -> None:
    """One training of the recipe: the launcher, program and guards of ``clustertune run``."""
    plan = made.make_plan(made.run.new_attempt(), 0)
    folder = made.run.attempt(plan.attempt)
    outcome = made.run_attempt(plan)
    if outcome.code is not ExitCode.OK:
        stopped = Problem("stopped before the last step", file=str(folder), fix="measure again")
        raise UserError(outcome.problems or [stopped], outcome.code)
    found.ours.append(_read(folder, plan.world_size))
    found.attempts.append(plan.attempt)
    found.nodes = len(plan.nodes)
    # The next round begins from the base model too, and these are not needed.
    shutil.rmtree(made.run.checkpoints, ignore_errors=True)


def _theirs(made: chain.Chain, found: RoundsResult, bench: Bench, one: Peer, name: str, *, together: bool) -> None:
    """One training by a peer on the same nodes; ``together``: a step each in turn with one of ours.

    What ends the peer does not end the benchmark.
    """
    folder = (made.run.path / PEERS / f"round-{name}").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    schedule = bench.request.schedule
    turns = folder / "turns" if together else None
    if turns is not None:  # the profiler would see two programs
        schedule = replace(schedule, profiled=0, turns=str(turns))
    plan = made.make_plan(100_000 + len(found.attempts), 0)  # a port of its own
    settings = peer.settings(made.resolved, made.run, str(made.base_folder().absolute()), schedule, one.name)
    order = peer.prepare(folder, made.run, plan, peer.start_of(one.name), settings)
    if turns is not None:
        turns.mkdir()
    child = peer.start_round(_on_nodes(made, order, plan))
    try:
        if turns is not None:
            _ours_in_turn(made, found, bench, turns)
        code = peer.await_round(child)
    finally:
        _end(child)
    records = _read(folder, plan.world_size)
    if code or len(records) < plan.world_size:
        one.failed = f"{one.name}: {peer.why(folder)} (exit code {code}; {folder})"
        say(f"warning: {one.failed}")
        return
    one.theirs.append(records)
    one.paired.append(found.ours[-1])


def _ours_in_turn(made: chain.Chain, found: RoundsResult, bench: Bench, turns: Path) -> None:
    """One training of the recipe whose steps alternate with those of a peer that was started."""
    replace(bench.request.schedule, turns=str(turns)).write(made.run.path)
    try:
        _ours(made, found)
    finally:
        bench.request.schedule.write(made.run.path)
        (turns / str(OURS)).write_text(str(GONE))


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a peer that is still there: its nodes' programs end their ranks."""
    if child.poll() is None:
        peer.await_round(child, 0.0)


def _on_nodes(made: chain.Chain, order: Path, plan: AttemptPlan) -> list[str]:
    command = peer.node_command(order)
    if not isinstance(made, job.JobChain):
        return command
    binds = container.paths_of(made.resolved, made.run.path)
    return step.in_job(command, made.cluster, made.allocation, binds=[*binds, order.parent], nodes=len(plan.nodes))


def _read(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """The ranks' files, in rank order; those that are missing or torn are left out."""
    return [body for rank in range(ranks) if (body := read_object(result_file(folder, rank)))]
