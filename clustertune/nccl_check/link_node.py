"""One node of a check: ``python -m clustertune.nccl_check.link_node --folder DIR [--node N]``, which srun starts on every node.

It collects the node's facts, tries pairs of GPUs, starts the ranks and ends what is left of them when their time is over: what
they measured is in their files by then.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune.errors import UserError
from clustertune.launch.agent import await_object, read_anew
from clustertune.nccl_check.gpu_pairs import probe_pairs, start
from clustertune.nccl_check.link_schedule import FACTS, LOGS, NODE, OUTPUT, SETUP, Setup, write_whole
from clustertune.process import kill_group

FACTS_SECONDS = 20.0
LAST_WORDS_SECONDS = 5.0
"""How long the others of a node may continue after one of its ranks has failed: they find out by themselves, and say so."""
PATIENCE_SECONDS = 60.0
"""How long a node looks for the setup: an NFS client may answer from its cache of absent names for so long (acdirmax)."""
POLL_SECONDS = 0.1
STEERING = ("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_", "OMPI_MCA_")
"""Beginnings of the variables that steer the libraries, and hold no secrets."""
DEBUG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING,P2P,SHM"}
"""What makes NCCL say how it goes. Without COLL, which is a line for each call and rank."""


@dataclass
class NodeCheck:
    """The node's part of a check."""

    folder: Path
    setup: Setup
    node: int
    problems: list[str] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)
    """Variables that this node sets against what training has."""
    began: float = field(default_factory=time.monotonic)
    _checked: float = 0.0

    def run(self) -> int:
        """Exit code: 0 where all ranks ended by themselves. Raises OSError where the folder cannot be written."""
        setup, facts = self.setup, None
        codes: list[int | None] = []
        probed: list[dict[str, Any]] = []
        if setup.facts:
            facts = self._start(["clustertune.nccl_check.link_node", "--facts"], "facts.out")
        try:
            if not self._lacks_interface():
                if setup.probe and setup.backend == "nccl" and setup.ranks_per_node > 1:
                    limit = max(10.0, setup.seconds / 3)
                    environ, pairwise = environment(setup), setup.pairwise
                    found = probe_pairs(setup.ranks_per_node, setup.backend, environ, limit, pairwise=pairwise)
                    probed = [{"node": setup.hosts[self.node], **entry} for entry in found]
                if any(entry["status"] == "hung" for entry in probed):
                    # The sweep would hang as well, and tell nothing of the network.
                    self.changed["NCCL_P2P_DISABLE"] = "1"
                    self.problems.append("two GPUs hung: measured on with NCCL_P2P_DISABLE=1")
                codes = self._run_ranks()
            self._end_facts(facts)
        finally:
            self._leave_record(codes, probed)
        return 0 if codes and all(code == 0 for code in codes) else 1

    def _lacks_interface(self) -> bool:
        """gloo and NCCL report it with messages of their own, a minute later."""
        wanted, names = self.setup.interface, sorted(name for _, name in socket.if_nameindex())
        if wanted is None or wanted in names:
            return False
        there = ", ".join(names)
        self.problems.append(f"there is no interface {wanted} (it has {there}): nothing was measured")
        return True

    def _start(self, words: Sequence[str], output: str, changes: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """``words``: a module and its options besides folder and node."""
        command = [sys.executable, "-m", words[0], "--folder", str(self.folder), "--node", str(self.node), *words[1:]]
        env = {**environment(self.setup), **(changes or {}), **self.changed}
        return start(command, self.folder / output, signal.SIGKILL, env=env)

    def _run_ranks(self) -> list[int | None]:
        """Start all ranks of this node; their exit codes, negative for a signal, None where one was ended here."""
        setup, children = self.setup, []
        deadline = self.began + setup.limit
        try:
            for local in range(setup.ranks_per_node):
                rank = self.node * setup.ranks_per_node + local
                log = self.folder / LOGS.format(rank=rank)
                changes = {**DEBUG, "NCCL_DEBUG_FILE": str(log)} if setup.backend == "nccl" else {}
                words = ["clustertune.nccl_check.link_rank", "--local", str(local), "--began", repr(self.began)]
                children.append(self._start(words, OUTPUT.format(rank=rank), changes))
            while any(child.poll() is None for child in children) and time.monotonic() < deadline:
                if any(child.returncode for child in children) or self._other_failed():
                    deadline = min(deadline, time.monotonic() + LAST_WORDS_SECONDS)
                time.sleep(POLL_SECONDS)
            return [child.poll() for child in children]
        finally:
            for child in children:
                kill_group(child)

    def _other_failed(self) -> bool:
        """Whether another node's ranks have ended badly, asked once a second: a rank here may wait for them."""
        if time.monotonic() < self._checked + 1:
            return False
        self._checked = time.monotonic()
        for node in range(len(self.setup.hosts)):
            record = read_anew(self.folder / NODE.format(node=node)) if node != self.node else {}
            if record and any(code != 0 for code in record.get("codes") or [None]):
                return True
        return False

    def _end_facts(self, child: subprocess.Popen[bytes] | None) -> None:
        if child is None:
            return
        try:
            child.wait(FACTS_SECONDS)
        except subprocess.TimeoutExpired:
            self.problems.append(f"its facts took longer than {FACTS_SECONDS:.0f} s: a file system or a driver does not answer")
        finally:
            kill_group(child)
        if child.returncode > 0:
            lines = (self.folder / "facts.out").read_text(errors="replace").strip().splitlines()
            self.problems.append(f"its facts could not be collected: {lines[-1] if lines else child.returncode}")

    def _leave_record(self, codes: Sequence[int | None], probed: Sequence[Mapping[str, Any]]) -> None:
        record = {
            "node": self.node,
            "host": os.uname().nodename,
            "codes": list(codes),
            "probe": list(probed),
            "problems": self.problems,
            "python": ".".join(map(str, sys.version_info[:3])),
            "environment": steering(environment(self.setup)),
        }
        write_whole(self.folder / NODE.format(node=self.node), record)


def environment(setup: Setup) -> dict[str, str]:
    """That of training: what is there, and what is derived from the cluster."""
    return {**os.environ, **setup.environment}


def steering(values: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide how bytes go. A value with a control character or a URL's credentials is left out."""
    return {
        name: value
        for name, value in sorted(values.items())
        if name.startswith(STEERING) and value.isprintable() and "@" not in value and len(value) <= 500
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="clustertune.nccl_check.link_node")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--node", type=int, help="number of this host (default: SLURM_NODEID)")
    parser.add_argument("--facts", action="store_true", help="collect the facts only")
    given = parser.parse_args(argv)
    number = os.environ.get("SLURM_NODEID", "") if given.node is None else str(given.node)
    if not number.isdigit():
        parser.exit(2, "error: SLURM_NODEID is not set: give --node, or start it with srun\n")
    try:
        await_object(given.folder / SETUP, PATIENCE_SECONDS)
        setup = Setup.read(given.folder)
        if given.facts:
            from clustertune.host.collect import collect

            found = collect(place=setup.place, seconds=FACTS_SECONDS / 2)
            write_whole(given.folder / FACTS.format(node=int(number)), found.as_dict())
            return 0

        def stopped(number: int, _frame: object) -> None:
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, stopped)
        return NodeCheck(given.folder, setup, int(number)).run()
    except UserError as error:
        parser.exit(2, "".join(f"error: {problem}\n" for problem in error.problems))
    except OSError as error:
        parser.exit(73, f"error: {error.filename or given.folder}: {error.strerror or error}\n")


if __name__ == "__main__":
    sys.exit(main())
