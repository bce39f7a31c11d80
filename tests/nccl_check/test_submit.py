"""The check as a Slurm job: its script, and the job itself on a real Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clustertune.check.rule import EXIT
from clustertune.cli import nccl_check
from clustertune.doctor.sbatch import lint
from clustertune.errors import UserError
from clustertune.nccl_check import check
from clustertune.testbed.cluster import ThrowawayCluster
from tests.command import REPO, run
from tests.launch.machines import CLUSTER_FILES, machine
from tests.nccl_check.command_line import command_line, job
from tests.slurm import slurm, slurm_session  # noqa: F401 - fixtures


def test_the_command_prints_what_it_would_submit() -> None:
    """Without Slurm, and without leaving anything behind; what it is on each cluster stands in the goldens."""
    before = set((REPO / "runs").glob("nccl-check/*"))
    done = run("nccl-check", "--submit", "--cluster", CLUSTER_FILES[0], "--nodes", "2", "--dry-run", "--json")
    assert done.code == 0 and "#SBATCH --nodes=2\n" in done.json["script"] and done.json["command"][0] == "sbatch"
    assert set((REPO / "runs").glob("nccl-check/*")) == before


def test_the_scripts_have_no_known_mistake() -> None:
    """By the project's own lint of batch scripts."""
    for text in (job(CLUSTER_FILES[0]).script, check.SCRIPT.read_text()):
        assert lint(text, "job.sbatch", REPO) == []


@pytest.mark.parametrize(
    ("nodes", "time", "seconds", "words"),
    [
        (9, None, 300, "9 nodes"),
        (None, "3", 300, "too short"),
        (None, "soon", 300, "not a time"),
        (None, None, 90_000, "at most"),
    ],
)
def test_what_cannot_be_submitted(nodes: int | None, time: str | None, seconds: float, words: str) -> None:
    """Before the queue, each with its option; a cluster without Slurm can still be measured here."""
    cluster = machine(slurm={"partition": "gpu", "gres": None, "max_time": "12:00:00"})
    with pytest.raises(UserError, match=words) as error:
        check.job_shape(cluster, nodes, time, seconds)
    assert "--" in str(error.value)
    with pytest.raises(UserError, match="no Slurm"):
        check.job_shape(machine(slurm=None), nodes, time, seconds)


def test_the_job_gets_what_was_given() -> None:
    """Another check than the one that was asked for would be worse than none."""
    cluster = machine()
    words = command_line(cluster="a/b.yaml", seconds=77.0, largest="8M", collectives="p2p", tune=True, save=True)
    found = nccl_check.arguments(words, cluster)
    assert found[:2] == ["--cluster", str(Path("a/b.yaml").absolute())]
    assert " ".join(found[2:]) == "--seconds 77 --max 8M --collectives p2p --save --tune"


def cluster_file(folder: Path, extra: str = "") -> Path:
    """The throw-away Slurm as a file; its GPUs are names only."""
    path = folder / "thrown.yaml"
    path.write_text(
        "name: thrown\nnodes:\n"
        "  - {name: node1, address: node1, roles: [compute]}\n  - {name: node2, address: node2, roles: [compute]}\n"
        "  - {name: ctl, address: ctl, roles: [slurmctld, login]}\n"
        "compute: {gpus: 0, interconnect: none, cores: 1, threads: 2, memory_gb: 8}\n"
        f"network: {{interface: eth0, kind: ethernet, gbit: 1}}\nslurm: {{partition: gpu}}\n{extra}"
    )
    return path


@pytest.mark.jobs
@pytest.mark.timeout(900)
def test_on_two_nodes_of_a_real_slurm(slurm: ThrowawayCluster, tmp_path: Path) -> None:  # noqa: F811
    """``--submit`` as a user calls it: ranks by srun on both nodes, the verdict and the result on the first."""
    file, out = cluster_file(tmp_path), tmp_path / "out"
    slurm.limit("200mbit")
    try:
        given = {"--cluster": str(file), "--seconds": "40", "--max": "4M", "--out": str(out)}
        words = ["nccl-check", "--submit", "--json", "--wait", *(word for pair in given.items() for word in pair)]
        done = slurm.run([sys.executable, "-m", "clustertune", *words], cwd=REPO, check=False, timeout=800)
    finally:
        slurm.limit(None)
    log = "".join(path.read_text() for path in out.glob("nccl-check-*.log"))
    document = json.loads((out / "result.json").read_text())
    assert document["hosts"] == ["node1", "node2"], log
    status = document["verdict"]["status"]
    assert done.returncode == EXIT[status] and json.loads(done.stdout)["verdict"]["status"] == status
    assert {facts["place"] for facts in document["facts"]} == {"step"}
    assert document["verdict"]["status"] in ("pass", "warn", "fail")
    one_way = [e for e in document["per_pair"] if e["collective"] == "p2p" and e["bytes"] >= 1 << 20]
    assert one_way
    for entry in one_way:
        assert entry["busbw_gb_s"] == pytest.approx(0.95 * 0.025, rel=0.2)
    assert "busbw" in log
    assert (tmp_path / "thrown.nccl-check.json").exists()


def test_the_script_says_where_to_call_it(tmp_path: Path) -> None:
    """sbatch in another folder: the words, exit 2, no traceback."""
    done = subprocess.run(["bash", str(check.SCRIPT)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "is not a checkout of clustertune" in done.stderr
