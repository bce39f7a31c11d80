"""A real Slurm for tests; tests/conftest.py has the fixtures ``slurm`` and ``slurm_session``.

Where Slurm or the right to namespaces is missing the tests are skipped with the reason; under --no-skip that is a failure.
Waits have long limits: machines are shared, and a wait that ends well ends at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertune.testbed import inside
from clustertune.testbed.cluster import ClusterFailed, TemporaryCluster, inner_ids
from clustertune.testbed.spec import ClusterSpec, can_isolate, missing

LONG = 120.0
"""Seconds that a wait for something which must come may take."""


class FaultyCluster(TemporaryCluster):
    """A cluster with whose jobs, nodes and links something can go wrong."""

    def release(self, job: int | str, timeout: float = 120) -> None:
        """Start a requeued job without the wait for its old credential.

        Released within the second in which that one was revoked, it would fail with "Job credential revoked".
        """
        self.wait(job, "PENDING", timeout)
        time.sleep(2.1)
        if self.job(job)["JobState"] == "PENDING":
            self.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)  # it may have begun just now

    def cancel_all(self, timeout: float = 60) -> None:
        """Cancel every job and wait until none is left."""
        self.run(["scancel", "--user", str(os.getuid())], check=False)
        self._until(lambda: not self.run(["squeue", "--noheader"]).stdout.strip(), timeout, "jobs are still there")

    def kill_node(self, index: int) -> None:
        """Power loss: every process of a node is gone at once, and its address and link with it where it is isolated."""
        pid = self._inits.pop(index)
        if not self.isolated:
            inside.end_descendants(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._until(lambda: not inner_ids(pid) or inside.state(pid) == "Z", 30, f"{self.names[index - 1]} is still there")

    def kill_slurmd(self, index: int) -> None:
        """Kill a node's slurmd, and not its jobs."""
        for pid in self._slurmds(index):
            os.kill(pid, signal.SIGKILL)
        self._until(lambda: not self._slurmds(index), 30, f"slurmd of {self.names[index - 1]} is still there")

    def start_slurmd(self, index: int, *, wait: bool = True) -> None:
        """Start a node's slurmd again."""
        os.kill(self._inits[index], signal.SIGUSR1)
        if wait:
            # The controller continues calling a node ready for a while when nothing answers there.
            self._until(lambda: self._slurmds(index), 30, f"slurmd of {self.names[index - 1]} did not start")
            self.wait_node(index)

    def _slurmds(self, index: int) -> list[int]:
        """A node's slurmd, which is nothing more once it is dead (a zombie has no command line)."""
        found = []
        for pid in self.processes(index, "slurmd"):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "slurmd":
                    found.append(pid)
        return found

    def processes(self, index: int, *words: str) -> list[int]:
        """Processes of a node, by the id that they have here, whose command line holds each of ``words``."""
        found = []
        for pid in inside.descendants(self._inits[index]):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if line and all(word in line for word in words):
                    found.append(pid)
        return found

    # --- the network between isolated nodes --------------------------------------------------------------------------

    def link(self, index: int, *, up: bool) -> None:
        """Cut a node's link, or fix it. The node continues without."""
        self._network_order("ip", "link", "set", f"v{index}", "up" if up else "down")

    def limit(self, rate: str | None, indices: Iterable[int] | None = None) -> None:
        """Let each node send no faster than ``rate``, in tc(8)'s words (``100mbit``); None lifts it."""
        for index in indices or self._inits:
            inside_net = ("nsenter", f"--target={inner_ids(self._inits[index])[-2]}", "--net", "tc", "qdisc")
            if rate:
                self._network_order(
                    *inside_net, "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "128kb", "latency", "100ms"
                )
            else:
                with contextlib.suppress(ClusterFailed):  # there was none
                    self._network_order(*inside_net, "del", "dev", "eth0", "root")

    def _network_order(self, *command: str) -> None:
        self._needs_isolation()
        self._started().order(run=command)

    def _needs_isolation(self) -> None:
        if not self.isolated:
            raise ClusterFailed("nodes without namespaces share this machine's network")


def need_slurm(*, isolated: bool = True) -> None:
    """Skip the test where there can be no cluster here."""
    if lacking := missing(isolated=isolated):
        pytest.skip(f"not installed: {', '.join(sorted(set(lacking.values())))} (apt-get install)")
    if isolated and can_isolate() is None:
        pytest.skip("nodes in namespaces need root or user namespaces")


def make(nodes: int | tuple[str, ...] = 2, gpus: int = 1, *, isolated: bool = True, **shape: Any) -> FaultyCluster:
    """A cluster that is not started yet; skips where it cannot be. Use it in a ``with``."""
    need_slurm(isolated=isolated)
    return FaultyCluster(ClusterSpec(nodes=nodes, gpus=gpus, isolation="netns" if isolated else "none", **shape))


def wait_for(test: Callable[[], Any], what: str, timeout: float = LONG, *, pause: float = 0.05) -> Any:
    """The first true answer of ``test``; fails the test case after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not (found := test()):
        assert time.monotonic() < end, f"{what}: not within {timeout:.0f} s"
        time.sleep(pause)
    return found


def tidy(cluster: FaultyCluster) -> None:
    """As it was: no jobs, all nodes up, links whole and fast."""
    cluster.cancel_all()
    for index in range(1, len(cluster.names) + 1):
        if index not in cluster.alive:
            cluster.start_node(index, wait=False)
        elif cluster.isolated:
            cluster.link(index, up=True)
        if not cluster.processes(index, "slurmd", "-D"):
            cluster.start_slurmd(index, wait=False)
    if cluster.isolated:
        cluster.limit(None)
    for index in range(1, len(cluster.names) + 1):
        cluster.wait_node(index)


@pytest.fixture(scope="session")
def slurm_session() -> Iterator[FaultyCluster]:
    """Two nodes with one GPU each. Tests take ``slurm``."""
    with make() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_session: FaultyCluster) -> Iterator[FaultyCluster]:
    """Two idle nodes with one GPU each, tidied up afterwards."""
    yield slurm_session
    tidy(slurm_session)
