"""One node of a check: ``python -m clustertune.nccl_check.node --folder DIR [--node N]``, which srun starts on every node.

It collects the node's facts, tries pairs of GPUs, starts the ranks and ends what is left of them when their time is over: what
they measured is in their files by then.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune import process
from clustertune.errors import UserError
from clustertune.launch.agent import await_object, read_anew
from clustertune.nccl_check.setup import FACTS, LOGS, NODE, OUTPUT, SETUP, Setup, tournament, write_whole
from clustertune.process import kill_group

# --- pairs of GPUs ----------------------------------------------------------------------------------------------------

# The first step between two GPUs: an all-reduce of each pair in processes of their own, with a time limit.
#
# On cards without NVLink a PCIe switch or an IOMMU that redirects peer-to-peer traffic lets the very first collective hang for
# ever (NVIDIA/nccl#1999 and many others): two processes find that out in seconds, where all ranks would wait for a watchdog.


PAIR_SECONDS = 60.0
"""What a pair may take, the start of Python included."""
ELEMENTS = 1 << 20


def probe_pairs(
    gpus: int, backend: str, environ: Mapping[str, str], limit: float, *, pairwise: bool, seconds: float = PAIR_SECONDS
) -> list[dict[str, Any]]:
    """``gpus``, ``status``, ``seconds`` and ``message`` of each pair of a node; none begins later than ``limit`` s from now.

    ``pairwise``: every pair; else the first one. ``seconds``: what one may take.
    """
    deadline, found, why = time.monotonic() + limit, [], ""
    for turn in tournament(gpus) if pairwise else [[(0, 1)]]:
        why = why or ("no time was left" if time.monotonic() >= deadline else "")
        if why:
            found += [{"gpus": list(pair), "status": "skipped", "seconds": 0.0, "message": why} for pair in turn]
            continue
        most = min(seconds, max(10.0, deadline - time.monotonic()))
        with tempfile.TemporaryDirectory(prefix="clustertune-probe-") as folder:
            began = time.monotonic()
            running = [(pair, _start_pair(pair, backend, environ, Path(folder))) for pair in turn]
            try:
                found += [_end_pair(pair, children, began, most, Path(folder)) for pair, children in running]
            finally:
                for _, children in running:
                    for child in children:
                        kill_group(child)
        if any(entry["status"] == "hung" for entry in found):
            why = "a pair hung before"
    return found


def _start_pair(pair: tuple[int, int], backend: str, environ: Mapping[str, str], folder: Path) -> list[subprocess.Popen[bytes]]:
    store, children = folder / f"pair-{pair[0]}-{pair[1]}", []
    for rank, gpu in enumerate(pair):
        command = [sys.executable, "-m", "clustertune.nccl_check.node", "--folder", str(store)]
        command += ["--pair", str(gpu), str(rank), backend]
        out = folder / f"{store.name}-{rank}.out"
        children.append(start(command, out, signal.SIGKILL, env=environ, stdout=subprocess.DEVNULL))
    return children


def _end_pair(
    pair: tuple[int, int], children: Sequence[subprocess.Popen[bytes]], began: float, limit: float, folder: Path
) -> dict[str, Any]:
    status, message = "ok", ""
    while any(child.poll() is None for child in children) and not any(child.returncode for child in children):
        if time.monotonic() - began > limit:
            status, message = "hung", f"an all-reduce of two did not end within {limit:.0f} s"
            break
        time.sleep(0.05)
    for child in children:
        kill_group(child)
    if status == "ok" and any(child.returncode for child in children):
        status = "failed"
        for rank, child in enumerate(children):
            lines = (folder / f"pair-{pair[0]}-{pair[1]}-{rank}.out").read_text(errors="replace").strip().splitlines()
            if child.returncode not in (0, -signal.SIGKILL) and lines:
                message = lines[-1][:400]
                break
    return {"gpus": list(pair), "status": status, "seconds": round(time.monotonic() - began, 2), "message": message}


def try_pair(store: Path, gpu: int, rank: int, backend: str) -> int:
    """One of the two processes: exit 0 where the sum is right."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", gpu) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=600)  # the parent's is shorter
    dist.init_process_group(backend, store=dist.FileStore(str(store), 2), rank=rank, world_size=2, timeout=limit)
    value = torch.full((ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(value)
    right = bool((value == 3).all())
    sys.stderr.write("" if right else "the sum is wrong\n")
    sys.stderr.flush()
    os._exit(0 if right else 1)  # nothing is left to end in order


# --- a node -----------------------------------------------------------------------------------------------------------

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
    """The node's part of a round."""

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
            facts = self._start(["clustertune.nccl_check.node", "--facts"], "facts.out")
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
                words = ["clustertune.nccl_check.rank", "--local", str(local), "--began", repr(self.began)]
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


def start(command: Sequence[str], output: Path, last: signal.Signals, **given: Any) -> subprocess.Popen[bytes]:
    """Start a program that writes to the end of ``output`` and gets signal ``last`` when this process ends. Raises OSError.

    ``given``: further arguments of Popen, such as where its stdout goes instead.
    """
    with output.open("ab") as out:
        return process.start(command, last, **{"stdout": out, "stderr": out, **given})


def main(argv: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="clustertune.nccl_check.node")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--node", type=int, help="number of this host (default: SLURM_NODEID)")
    parser.add_argument("--facts", action="store_true", help="collect the facts only")
    parser.add_argument("--pair", nargs=3, metavar=("GPU", "RANK", "BACKEND"), help="be one of a pair that meets in the folder")
    given = parser.parse_args(argv)
    if given.pair:
        return try_pair(given.folder, int(given.pair[0]), int(given.pair[1]), given.pair[2])
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
