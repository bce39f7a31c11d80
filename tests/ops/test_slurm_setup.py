"""The page that leads from bare machines to the first job: its commands, on a tree for each machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.config.cluster import load_cluster
from tests.command import run
from tests.slurm import need_slurm
from tests.tree import REPO

RNO = "rno-rtxpro6000"


def test_the_way_to_the_first_job(tmp_path: Path) -> None:
    """Storage and Slurm for every machine of the reference cluster, in the page's order; Slurm's files are one everywhere."""
    machines = [host.name for host in load_cluster(RNO).nodes]
    found = set()
    for name in machines:
        root = tmp_path / name
        root.mkdir()
        options = ["--cluster", RNO, "--node", name, "--root", root]
        assert run("ops", "storage", "apply", *options).code in (0, 1), "1: what a tree cannot do is reported"
        done = run("ops", "slurm", "apply", *options, "--json")
        assert done.code == 0, done.err
        assert "/etc/slurm/slurm.conf" in done.json["written"]
        found.add(tuple((root / "etc/slurm" / file).read_bytes() for file in ("slurm.conf", "gres.conf", "cgroup.conf")))
        hosts = (root / "etc/hosts").read_text()
        assert all(f" {other}\n" in hosts for other in machines)
        assert run("ops", "slurm", "plan", *options).code == 0
    assert len(found) == 1


def test_the_files_are_tried_where_the_page_says(tmp_path: Path) -> None:
    """plan --try before anything is written."""
    need_slurm()
    done = run("ops", "slurm", "plan", "--cluster", RNO, "--try", "--node", "rno-it-gpu0008-1", "--root", tmp_path)
    assert done.code == 1
    assert "a job ran on each" in done.err


@pytest.mark.parametrize(
    "word", ["ReturnToService=2", "MinJobAge=86400", "SlurmdTimeout=120", "UnkillableStepTimeout=180", "GraceTime=1800"]
)
def test_the_page_tells_the_figures_that_are_written(word: str) -> None:
    """A table of choices that says other figures than the file is worse than none."""
    assert word in (REPO / "docs/slurm-setup.md").read_text()
    assert word in (REPO / "tests/golden/slurm-rno-rtxpro6000.txt").read_text()
