"""What one node of an attempt runs: find the others, then start and watch this node's ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch import cluster_paths, rendezvous
from clustertune.launch.agent import Agent, await_object, leave_record
from clustertune.launch.attempt import PLAN, AttemptPlan, check_fence, newest_attempt
from clustertune.launch.environment import make_own_folder
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir

PATIENCE_SECONDS = 60.0
"""How long a node looks for the plan: an NFS client may answer from its cache of absent names for so long (acdirmax)."""


Around = Callable[[Path, AttemptPlan, int], contextlib.AbstractContextManager[None]]
"""Given the run folder, the plan and the node: what has to be there while the node's ranks run, such as its staged copies."""


def _nothing(_run_path: Path, _plan: AttemptPlan, _node: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def main(run_path: Path, attempt: int, node: int, *, quiet: bool, around: Around = _nothing) -> int:
    """Run node ``node`` of an attempt. Returns 0 where its ranks ended by themselves: their records say how.

    ``around`` is entered before the nodes meet. Any other code tells the launcher that the other nodes have to be ended too.
    """
    folder = RunDir(run_path).attempt(attempt)
    stack = contextlib.ExitStack()
    try:
        plan = _read_plan(folder)
        check_fence(run_path, attempt)
        cluster_paths.make()
        _check_interface(plan, node)
        own = make_own_folder(plan.environment)
        stack.enter_context(around(run_path, plan, node))
        address, port = rendezvous.meet(folder, plan, node, lambda: newest_attempt(run_path) > plan.attempt)
    except UserError as error:
        leave_record(folder, node, error.code, error.problems)
        raise  # the message is still printed where the folder cannot be seen
    run = RunDir(run_path)
    resolved = run.resolved()
    agent = Agent(run_path, plan, node, patient=True)
    command = ranks_command(run, resolved, attempt, plan, node, address, port, quiet=quiet)
    environment = {**rendezvous.environment_between(plan, node), **plan.environment}
    try:
        with stack:
            code = agent.run(command, quiet=quiet or node > 0, environment=environment)
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
    if code is ExitCode.OK:
        return 0
    agent.linger()
    return int(code)


def _read_plan(folder: Path) -> AttemptPlan:
    await_object(folder / PLAN, PATIENCE_SECONDS)
    try:
        return AttemptPlan.read(folder)
    except UserError as error:
        text, fix = f"timed out after {PATIENCE_SECONDS:g} s", "put the run folder on storage that all nodes share"
        raise UserError([*error.problems, Problem(text, file=str(folder), fix=fix)]) from None


def _check_interface(plan: AttemptPlan, node: int) -> None:
    """NCCL and gloo fail with messages of their own, minutes later, where the interface is not there."""
    if plan.interface is not None and (text := rendezvous.missing_interface(plan.interface)):
        fix = "network.interface of the cluster file must be the name on every compute node"
        raise UserError(f"{plan.nodes[node].name} {text}", fix=fix)


# --- the command of the ranks ---------------------------------------------------------------------------------------------


def rank_program(run_path: Path, attempt: int, *, quiet: bool) -> list[str]:
    """The arguments of the ``clustertune`` module that every rank runs."""
    return ["train", "--run-dir", str(run_path.resolve()), "--attempt", str(attempt), *(["--quiet"] if quiet else [])]


def ranks_command(
    run: RunDir,
    resolved: Resolved,
    attempt: int,
    plan: AttemptPlan | None = None,
    node: int = 0,
    address: str = "",
    port: int = 0,
    *,
    quiet: bool = False,
) -> list[str]:
    """torchrun for the ranks of node ``node``, all of them where there is no ``plan``, with the program of a rank.

    With several nodes the rendezvous is static: node 0 listens at ``address:port``. On one node torch takes a free port, under
    an address that needs no resolver. ``--log-dir``: torch's elastic agent would leave a folder ``torchelastic_*`` in /tmp for
    every node and attempt; the ranks have logs of their own.
    """
    nodes, ranks = (len(plan.nodes), plan.ranks_per_node) if plan else (1, resolved.world_size)
    static = ["--rdzv-backend", "static", "--master-addr", address, "--master-port", str(port)]
    return [
        sys.executable, "-m", "clustertune.launch.elastic",
        "--nnodes", str(nodes), "--nproc-per-node", str(ranks), "--node-rank", str(node),
        "--max-restarts", "0", "--log-dir", os.devnull,
        *(static if nodes > 1 else ["--standalone", "--local-addr", "127.0.0.1"]),
        "--module", "clustertune", *rank_program(run.path, attempt, quiet=quiet),
    ]  # fmt: skip
