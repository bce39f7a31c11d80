"""The chain where its training stage runs on several machines, started by calls of ``launch/torchrun.sh``, one on each."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune.chain import Chain
from clustertune.checkpoint import store
from clustertune.console import say
from clustertune.errors import ExitCode
from clustertune.launch import node, progress, torchrun
from clustertune.launch.judge import Outcome, conclude
from clustertune.launch.plan import AttemptPlan, Node
from clustertune.rundir import RunDir

OUTCOME_SECONDS = 60.0
"""How long a node whose ranks have ended waits for node 0's judgement, which itself waits up to 20 s for all records."""


@dataclass(frozen=True)
class TorchrunCall:
    """This call among the calls of a run."""

    node: int
    nodes: int
    ranks_per_node: int
    master: str
    """An address of node 0 that all others reach."""
    port: int | None = None
    wait: float = 1800.0
    """Seconds to wait for the calls on the other nodes."""
    job: str | None = None
    """The id of the job that makes these calls again and again: where it makes no progress, it is stopped (exit 93)."""

    def describe(self) -> tuple[Node, dict[str, str]]:
        """This machine as the plan names it, and the environment of its ranks. Raises UserError: no way to the master."""
        address, interface = torchrun.interface_to(self.master)
        environment = torchrun.network_environment(interface) if self.nodes > 1 else {}
        # What torch's launcher sets where it starts several ranks: the sums do not depend on how many start on a node.
        environment.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        return Node(os.uname().nodename, self.master if self.node == 0 else address), environment


@dataclass
class TorchrunChain(Chain):
    """Node 0's call: all stages, of which the training takes part on every node."""

    call: TorchrunCall = field(kw_only=True)
    server: torchrun.RendezvousServer = field(kw_only=True)
    nodes: tuple[Node, ...] = ()

    def train(self) -> dict[str, Any]:
        """Wait for the calls of all nodes, then train on all of them."""
        if self.call.job:
            newest, _ = store.newest_whole(self.run.checkpoints)
            progress.check(self.run.path, self.call.job, newest.step if newest else 0)
        self.nodes = self.server.gather(self.call.wait)
        return super().train()

    def make_plan(self, attempt: int, from_step: int) -> AttemptPlan:
        """Who has called, in rank order."""
        return AttemptPlan(
            attempt=attempt,
            nodes=self.nodes,
            ranks_per_node=self.call.ranks_per_node,
            launcher="torchrun",
            job=self.call.job,
            from_step=from_step,
            port=self.call.port,
        )

    def run_attempt(self, plan: AttemptPlan) -> Outcome:
        """One attempt at training on all nodes, from its plan to its outcome."""
        folder = self.run.attempt(plan.attempt)
        plan.write(folder)
        self.server.tell(plan.attempt)
        take_part(self.run.path, plan.attempt, self.call, quiet=self.quiet)
        torchrun.await_nodes(self.run.path, plan)
        return conclude(folder, plan)


def take_part(run_path: Path, attempt: int, call: TorchrunCall, *, quiet: bool) -> int:
    """Run this node's ranks of an attempt; 0 where they ended by themselves."""
    _, environment = call.describe()
    os.environ.update(environment)  # each node's own: interfaces may have other names elsewhere
    return node.main(run_path, attempt, call.node, quiet=quiet)


def join(run_path: Path, call: TorchrunCall, *, quiet: bool) -> ExitCode:
    """Another node's call: wait for node 0's, run this node's ranks of its attempt, and end with the attempt's own code.

    Raises UserError where node 0 does not call, or its call does not fit this one.
    """
    local, _ = call.describe()
    say(f"node {call.node} waits for node 0 in {run_path}")
    attempt = torchrun.RendezvousClient(run_path, call.node, call.nodes, call.ranks_per_node, local, call.wait).join()
    if isinstance(attempt, ExitCode):
        return attempt
    ended = take_part(run_path, attempt, call, quiet=quiet)
    judged = torchrun.await_outcome(RunDir(run_path).attempt(attempt), OUTCOME_SECONDS)
    return judged if judged is not None else ExitCode.OK if ended == 0 else ExitCode.AGAIN
