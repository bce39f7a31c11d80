"""The command that starts the ranks of one node: ``accelerate launch`` with the recipe's own file, or the run's."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from clustertune.launch.plan import AttemptPlan, Node
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir


def rank_program(run_path: Path, attempt: int, *, quiet: bool) -> list[str]:
    """The arguments of the ``clustertune`` module that every rank runs."""
    return ["train", "--run-dir", str(run_path.resolve()), "--attempt", str(attempt), *(["--quiet"] if quiet else [])]


def accelerate_command(
    run: RunDir,
    resolved: Resolved,
    program: Sequence[str],
    plan: AttemptPlan | None = None,
    node: int = 0,
    address: str = "",
    port: int = 0,
    start: Sequence[str] = ("--module", "clustertune"),
) -> list[str]:
    """``accelerate launch`` for the ranks of node ``node``; ``program`` are the arguments of the ``clustertune`` module, or of
    the script that ``start`` names.

    With several nodes the rendezvous is static: the first node listens at ``address:port``. On one node port 0 lets
    accelerate take a free one: a fixed port collides after a killed run. ``--log_dir``: torch's elastic agent would leave a
    folder ``torchelastic_*`` in /tmp for every node and attempt; the ranks have logs of their own.
    """
    nodes = len(plan.nodes) if plan else 1
    rendezvous = ["--main_process_ip", address, "--same_network", "--rdzv_backend", "static"] if nodes > 1 else []
    if nodes > 1 and resolved.distribution.is_deepspeed:
        # accelerate's default starts the ranks of all nodes itself, with pdsh and a hostfile.
        rendezvous += ["--deepspeed_multinode_launcher", "standard"]
    return [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(run.accelerate_file.absolute()),
        "--num_processes",
        str(plan.world_size if plan else resolved.world_size),
        "--num_machines",
        str(nodes),
        "--machine_rank",
        str(node),
        *rendezvous,
        "--main_process_port",
        str(port),
        "--log_dir",
        os.devnull,
        *start,
        *program,
    ]


def local_plan(resolved: Resolved, attempt: int, from_step: int = 0) -> AttemptPlan:
    """All ranks on this machine."""
    local = (Node("here", "127.0.0.1"),)
    return AttemptPlan(attempt=attempt, nodes=local, ranks_per_node=resolved.world_size, from_step=from_step)
