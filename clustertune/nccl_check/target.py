"""Where a check runs: on this machine, on the nodes of a Slurm job, or on machines that are each given their number."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from clustertune.config.cluster_schema import Cluster
from clustertune.launch import step
from clustertune.launch.allocation import Allocation
from clustertune.nccl_check.node import FACTS_SECONDS, start
from clustertune.nccl_check.setup import END, LAUNCHED, NODE, SETUP, Setup, await_file, write_whole
from clustertune.process import kill_group
from clustertune.tree import ROOT

NODE_MODULE = "clustertune.nccl_check.node"
SLACK_SECONDS = 15.0
"""For the start of a step, of a container, and of Python, and for their end."""


@dataclass(frozen=True)
class LocalNode:
    """One node of its own number: the only one, or the first of several that were started by hand."""

    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    cluster: Cluster
    job: str | None = None

    def command(self, folder: Path) -> list[str]:
        """What runs the first node of a round."""
        return [sys.executable, "-m", NODE_MODULE, "--folder", str(folder), "--node", "0"]


@dataclass(frozen=True)
class Nodes:
    """The nodes of a Slurm job, reached by srun, in the cluster's container if it has one."""

    allocation: Allocation
    cluster: Cluster
    gpus: bool
    environ: Mapping[str, str]

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.allocation.nodes

    @property
    def addresses(self) -> tuple[str, ...]:
        """Slurm's names, which resolve on every node: training meets by them, too."""
        return self.allocation.nodes

    @property
    def job(self) -> str | None:
        return self.allocation.job_id

    def command(self, folder: Path) -> list[str]:
        """``srun`` of the node's program."""
        # Slurm gives whole cores: a job that asked for one CPU has two, and srun warns of a step that wants both.
        requested = self.environ.get("SLURM_CPUS_PER_TASK", "")
        return step.in_step(
            [sys.executable, "-m", NODE_MODULE, "--folder", str(folder)],
            self.cluster,
            binds=[folder.parent],
            nodes=len(self.hosts),
            cpus=int(requested) if requested.isdigit() else self.allocation.cpus_per_node,
            gpus=self.gpus,
            environ=self.environ,
        )


Target = LocalNode | Nodes


TICK_SECONDS = 0.5
RECORD_SECONDS = 12.0
"""How long the other nodes may take to end what is left of a round: they notice within a second that this one has ended."""


def run_round(target: Target, folder: Path, setup: Setup, tick: Callable[[Path], None] = lambda _: None) -> None:
    """Run a round to its end, or end it. Raises OSError where its folder cannot be written.

    It is ended at the latest after its ``most_seconds``. ``tick`` is called with the folder now and then.
    """
    setup.write(folder)
    began = time.monotonic()
    limit = min(setup.limit + SLACK_SECONDS + (FACTS_SECONDS if setup.facts else 0), setup.most_seconds)
    child = start(target.command(folder), folder / LAUNCHED, signal.SIGTERM, cwd=ROOT)
    try:
        while child.poll() is None and time.monotonic() - began < limit:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(TICK_SECONDS)
            tick(folder)
    finally:
        if child.poll() is None:  # it took too long, or this process was asked to stop
            child.send_signal(signal.SIGTERM)  # srun ends its tasks, a node ends its ranks and leaves its record
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
            kill_group(child)
    if isinstance(target, LocalNode) and len(target.hosts) > 1:  # srun waits for all nodes by itself
        until = min(time.monotonic(), began + setup.most_seconds) + RECORD_SECONDS
        for node in range(len(target.hosts)):
            await_file(folder / NODE.format(node=node), until - time.monotonic())


def round_folder(folder: Path, number: int) -> Path:
    """Of the rounds of a check, counted from 1."""
    return folder / f"round-{number}"


def finish(target: Target, folder: Path) -> None:
    """Tell nodes that were started by hand that there is no further round. Raises OSError."""
    if isinstance(target, LocalNode) and len(target.hosts) > 1:
        write_whole(folder / END, {})


def join(folder: Path, node: int, seconds: float) -> int:
    """Take part as one of the other nodes until the first one says that it is over. Returns the number of rounds.

    ``seconds``: how long to wait for a round or for the end. Raises TimeoutError where neither comes.
    """
    number = 1
    while True:
        following = round_folder(folder, number)
        deadline = time.monotonic() + seconds
        while not (following / SETUP).exists():
            if (folder / END).exists():
                return number - 1
            if time.monotonic() > deadline:
                raise TimeoutError(f"{following / SETUP} did not come within {seconds:.0f} s")
            await_file(following / SETUP, 0.5)
        command = [sys.executable, "-m", NODE_MODULE, "--folder", str(following), "--node", str(node)]
        setup = Setup.read(following)
        limit = setup.limit + SLACK_SECONDS + FACTS_SECONDS
        child = start(command, following / f"launch-{node}.out", signal.SIGTERM, cwd=ROOT)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(limit)
        finally:
            kill_group(child)
        number += 1
        seconds = min(seconds, setup.most_seconds + RECORD_SECONDS + SLACK_SECONDS)  # the first node ends its round by then
