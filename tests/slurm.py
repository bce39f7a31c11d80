"""A real Slurm for tests: ``from tests.slurm import slurm, slurm_session`` in a module or a conftest gives the fixtures.

Where Slurm or the right to namespaces is missing the tests are skipped with the reason; under --no-skip that is a failure.
Waits have long limits: machines are shared, and a wait that ends well ends at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clustertune.cluster.cluster import Cluster
from clustertune.cluster.spec import Spec, can_isolate, missing

LONG = 120.0
"""Seconds that a wait for something which must come may take."""


def need_slurm(*, isolated: bool = True) -> None:
    """Skip the test where there can be no cluster here."""
    if lacking := missing(isolated=isolated):
        pytest.skip(f"not installed: {', '.join(sorted(set(lacking.values())))} (apt-get install)")
    if isolated and can_isolate() is None:
        pytest.skip("nodes in namespaces need root or user namespaces")


def make(nodes: int | tuple[str, ...] = 2, gpus: int = 1, *, isolated: bool = True, **shape: Any) -> Cluster:
    """A cluster that is not started yet; skips where it cannot be. Use it in a ``with``."""
    need_slurm(isolated=isolated)
    return Cluster(Spec(nodes=nodes, gpus=gpus, isolation="netns" if isolated else "none", **shape))


def wait_for(test: Callable[[], Any], what: str, timeout: float = LONG) -> Any:
    """The first true answer of ``test``; fails the test case after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not (found := test()):
        assert time.monotonic() < end, f"{what}: not within {timeout:.0f} s"
        time.sleep(0.05)
    return found


def tidy(cluster: Cluster) -> None:
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
def slurm_session() -> Iterator[Cluster]:
    """Two nodes with one GPU each. Tests take ``slurm``."""
    with make() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_session: Cluster) -> Iterator[Cluster]:
    """Two idle nodes with one GPU each, tidied up afterwards."""
    yield slurm_session
    tidy(slurm_session)
