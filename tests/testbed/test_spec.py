"""What cannot be a cluster is refused with everything that is wrong and what to do, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertune.testbed.spec import ClusterFolder, ClusterSpec


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        *(({"nodes": nodes}, words) for nodes, words in (
            (0, "0 nodes"), (17, "17 nodes"), (("a", "A"), "two nodes of one name"), (("ctl",), "'ctl' cannot be"),
            (("DEFAULT",), "'DEFAULT' cannot be"), (("a b",), "'a b' cannot be"), (("n[1-3]",), "cannot be"),
            (("a\nPartitionName=x",), "cannot be a node's name"), (("n" * 49,), "cannot be"), (("",), "cannot be"),
            (("n" + "1" * 12,), "ten digits"),
        )),
    ],
)  # fmt: skip
def test_a_shape_that_cannot_be(shape: dict[str, Any], words: str) -> None:
    """slurmctld would end with a fatal error in a log, or read a line of its file that nobody meant."""
    assert any(words in str(problem) and problem.fix for problem in ClusterSpec(**shape).problems())
    for limit in (ClusterSpec(), ClusterSpec(nodes=16, gpus=0, cpus=7), ClusterSpec(nodes=("a-1", "b.x", "n" * 48))):
        assert limit.problems() == []


def test_the_files_of_a_cluster(tmp_path: Path) -> None:
    """The settings that the behaviour rests on, and only the owner can read the key and whatever a job leaves here."""
    root = tmp_path / "ct"
    root.mkdir(mode=0o700)
    ClusterFolder(root, ClusterSpec(nodes=("a", "b.x"), gpus=2, cpus=6, grace=7), True).write()
    conf = (root / "slurm.conf").read_text()
    assert "Sockets=1 CoresPerSocket=6 ThreadsPerCore=1" in conf and "GraceTime=7" in conf
    assert "NodeName=b.x NodeAddr=10.99.0.2 " in conf and "Nodes=a,b.x" in conf
    assert (root / "gres.conf").read_text().count(f"File={root}/dev/nvidia[0-1]\n") == 2
    assert (root / "munge.key").stat().st_mode & 0o777 == 0o400
    hosts = [line for line in (root / "nsswitch.conf").read_text().splitlines() if line.strip().startswith("hosts:")]
    assert hosts == ["hosts: files"]
    assert "Gres" not in ClusterFolder(root, ClusterSpec(gpus=0), True).slurm_conf()
