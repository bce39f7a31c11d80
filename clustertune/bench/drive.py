"""Runs a benchmark: prepare once, then rounds of this project's ranks and of a peer's in turn, on this machine or in a job."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune import chain, job
from clustertune.bench import ask, peer
from clustertune.bench.ask import Bench
from clustertune.config.cluster_schema import Cluster
from clustertune.console import say
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch import container, step
from clustertune.launch.allocation import Allocation
from clustertune.launch.plan import Plan
from clustertune.rundir import RunDir
from clustertune.training.course import result_file

PEERS = "peer"
"""Folder of a peer's rounds, below the run's."""


@dataclass
class Found:
    """What the rounds left."""

    run: RunDir
    ours: list[list[dict[str, Any]]] = field(default_factory=list)
    """Of each round what each rank measured."""
    theirs: list[list[dict[str, Any]]] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    nodes: int = 1
    failed: str | None = None
    """What ended the peer."""


def measure(bench: Bench, command: list[str], cluster: Cluster | None = None, given: Allocation | None = None) -> Found:
    """Run all rounds. ``cluster`` and ``given``: those of the job that this runs in; without them it is this machine.

    Raises UserError where the recipe's own training fails; what ends a peer is told in the result.
    """
    path = bench.asked.run_path
    chain.check_folder(bench.measured, path)
    with RunDir(path).lock():
        made = _open(bench, command, cluster, given)
        found = Found(made.run)
        if made.run.stage("prepare") is None:
            made.run_stage("prepare")
        if isinstance(made, job.JobChain):
            made.check_nodes()
        for number in range(1, bench.asked.rounds + 1):
            say(f"round {number} of {bench.asked.rounds}: {bench.measured.name}")
            _ours(made, found)
            if bench.asked.against is not None and found.failed is None:
                say(f"round {number} of {bench.asked.rounds}: {bench.asked.against}")
                _theirs(made, found, bench, number)
    return found


def _open(bench: Bench, command: list[str], cluster: Cluster | None, given: Allocation | None) -> chain.Chain:
    """The run folder, with the conversations that are made up for it, and the chain that runs in it."""
    path, resolved = bench.asked.run_path, bench.measured
    if bench.made is not None and not ask.made_file(path).exists():
        say(f"conversations made up: {ask.make_conversations(bench):,} in {ask.made_file(path)}")
    run = chain.open_run(resolved, path, command)
    bench.asked.course.write(path)
    run.write_own_files(resolved)
    if given is None:
        return chain.Chain(run, resolved)
    assert cluster is not None
    job.check_image(run, cluster, given)
    return job.JobChain(run, resolved, allocation=given, cluster=cluster)


def _ours(made: chain.Chain, found: Found) -> None:
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
    # The next round begins from the base model too, and nobody wants these.
    shutil.rmtree(made.run.checkpoints, ignore_errors=True)


def _theirs(made: chain.Chain, found: Found, bench: Bench, number: int) -> None:
    """One training by the peer on the same nodes. What ends it does not end the benchmark."""
    assert bench.asked.against is not None
    folder = made.run.path / PEERS / f"round-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    plan = made.make_plan(100_000 + number, 0)  # a port of its own
    told = peer.settings(made.resolved, made.run, str(made.base_folder().absolute()), bench.asked.course)
    order = peer.prepare(folder, made.run, plan, peer.start_of(bench.asked.against), told)
    code = peer.run_round(_on_nodes(made, order, plan))
    records = _read(folder, plan.world_size)
    if code or len(records) < plan.world_size:
        found.failed = f"{bench.asked.against}: {peer.why(folder)} (exit code {code}; {folder})"
        say(f"warning: {found.failed}")
        return
    found.theirs.append(records)


def _on_nodes(made: chain.Chain, order: Path, plan: Plan) -> list[str]:
    words = peer.node_command(order)
    if not isinstance(made, job.JobChain):
        return words
    asked = os.environ.get("SLURM_CPUS_PER_TASK", "")
    binds = container.places_of(made.resolved, made.run.path)
    return step.in_step(
        words,
        made.cluster,
        binds=[*binds, order.parent],
        nodes=len(plan.nodes),
        cpus=int(asked) if asked.isdigit() else made.allocation.cpus_per_node,
        gpus=bool(made.allocation.gpus_per_node),
        environ=os.environ,
    )


def _read(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """The ranks' files, in rank order; those that are missing or torn are left out."""

    def found() -> Iterator[dict[str, Any]]:
        for rank in range(ranks):
            with contextlib.suppress(OSError, ValueError):
                body = json.loads(result_file(folder, rank).read_bytes())
                if isinstance(body, dict):
                    yield body

    return list(found())
