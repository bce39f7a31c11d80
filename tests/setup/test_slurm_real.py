"""The generated files, started: nodes idle under their names, jobs with GPUs, requeue, warnings, limits, accounting."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import Cluster
from clustertune.setup.rendered import all_texts
from clustertune.setup.setup_machine import tool
from clustertune.setup.slurm_files import GRES_CONF, SLURM_CONF
from clustertune.testbed.cluster import ClusterFailed, shape, try_out
from tests.command import run
from tests.setup.slurm_clusters import ODD, load
from tests.slurm import FaultyCluster as Slurm
from tests.slurm import need_slurm, wait_for

NAMES = ["rno-it-gpu0007-1", "rno-it-gpu0008-1"]
URGENT = "PartitionName=urgent Nodes=ALL PriorityTier=20 PreemptMode=OFF\n"


def texts_of(cluster: Cluster, *, accounting: bool = False) -> dict[str, str]:
    return all_texts(cluster, accounting=accounting)


@pytest.fixture(scope="module")
def reference() -> Iterator[Slurm]:
    """The reference cluster's files, with a partition that preempts, as an operator would add it below our block."""
    need_slurm()
    cluster = load_cluster("rno-rtxpro6000")
    texts = texts_of(cluster)
    with Slurm(shape(cluster, {**texts, SLURM_CONF: texts[SLURM_CONF] + URGENT})) as slurm:
        yield slurm


def script(folder: Path, text: str) -> Path:
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n{text}\n")
    return path


def test_the_reference_cluster_is_as_its_document_says(reference: Slurm) -> None:
    """Two nodes of 256 threads and 8 GPUs by type, their cores by socket, one partition without a limit."""
    shown = reference.run(["sinfo", "--noheader", "-p", "gpu", "-N", "-o", "%N %T %c %m %G %l %P"]).stdout.split("\n")
    expected = [f"{name} idle 256 3913728 gpu:rtx_pro_6000:8(S:0-1) infinite gpu*" for name in NAMES]
    assert shown[:2] == expected
    config = reference.run(["scontrol", "show", "config"]).stdout
    for key, value in (("JobRequeue", "1"), ("ReturnToService", "2"), ("SlurmdTimeout", "120 sec"), ("DefMemPerCPU", "15288")):
        assert any(line.split("=")[0].strip() == key and line.split("=")[1].strip() == value for line in config.splitlines()), (
            key
        )


def test_a_job_with_every_gpu_of_both_nodes(reference: Slurm, tmp_path: Path) -> None:
    """Names resolve by the generated hosts file, and each node hands out its eight GPUs."""
    body = f"srun --ntasks-per-node=1 bash -c 'echo $(hostname) $CUDA_VISIBLE_DEVICES $(getent hosts {NAMES[1]})'"
    log = tmp_path / "log"
    job = reference.submit(
        script(tmp_path, body), options=["-N2", "--gpus-per-node=rtx_pro_6000:8", "--exclusive", "-o", str(log)]
    )
    assert reference.wait(job)["JobState"] == "COMPLETED"
    lines = sorted(log.read_text().splitlines())
    assert [line.split()[:2] for line in lines] == [[name, "0,1,2,3,4,5,6,7"] for name in NAMES]
    assert all(line.endswith(NAMES[1]) for line in lines)


@pytest.mark.parametrize("options", [["--gpus-per-node=9"], ["--gpus-per-node=h100:1"], ["--mem=3823G"], ["--nodes=3"]])
def test_what_can_never_run_is_refused_at_once(options: list[str], reference: Slurm, tmp_path: Path) -> None:
    """EnforcePartLimits: a job that waits for ever looks like a busy cluster."""
    with pytest.raises(ClusterFailed):
        reference.submit(script(tmp_path, "true"), options=options)


def test_a_requeued_job_runs_again(reference: Slurm, tmp_path: Path) -> None:
    """JobRequeue, without --requeue in the script."""
    log = tmp_path / "log"
    body = 'echo run $SLURM_RESTART_COUNT\n[ -n "$SLURM_RESTART_COUNT" ] || sleep 300'
    job = reference.submit(script(tmp_path, body), options=["--open-mode=append", "-o", str(log)])
    wait_for(lambda: log.exists() and "run" in log.read_text(), "the first run")
    reference.run(["scontrol", "requeue", str(job)])
    reference.release(job)
    assert reference.wait(job)["JobState"] == "COMPLETED"
    assert [line.strip() for line in log.read_text().splitlines() if line.startswith("run")] == ["run", "run 1"]


def test_a_preempted_job_is_warned_at_once(reference: Slurm, tmp_path: Path) -> None:
    """Its --signal comes long before its own time limit, and the grace time is ours: without the word it would hear nothing."""
    log = tmp_path / "log"
    body = "trap 'echo warned; exit 0' USR1\necho up\nfor i in $(seq 1500); do sleep 0.2; done"
    everything = ["-N2", "--gpus-per-node=8", "--exclusive"]
    reference.submit(script(tmp_path, body), options=[*everything, "--signal=B:USR1@600", "-o", str(log)])
    wait_for(lambda: log.exists() and "up" in log.read_text(), "the job")
    other = reference.submit(script(tmp_path, "true"), options=[*everything, "-p", "urgent", "-o", os.devnull])
    assert reference.wait(other)["JobState"] == "COMPLETED"
    assert "warned" in log.read_text()
    reference.cancel_all()  # 24.11 puts the first one back into the queue, 22.05 lets it end


def test_locked_memory_is_slurmds_and_not_the_login_shells(reference: Slurm, tmp_path: Path) -> None:
    """Submitted from a shell with 64 KiB: RDMA and pinned buffers would fail in the job; other limits come along."""
    if not shutil.which("prlimit"):
        pytest.skip("not installed: util-linux (apt-get install)")
    log = tmp_path / "log"
    limited = ["prlimit", "--memlock=65536:65536", "--core=0:0", "sbatch", "--parsable", "-o", str(log)]
    done = reference.run([*limited, str(script(tmp_path, "srun bash -c 'ulimit -l; ulimit -c'"))])
    assert reference.wait(done.stdout.strip())["JobState"] == "COMPLETED"
    slurmd = reference.run(["bash", "-c", "cat /proc/$(pgrep -x slurmd | head -1)/limits"], node=1).stdout
    own = next(line.split()[3] for line in slurmd.splitlines() if line.startswith("Max locked memory"))
    expected = own if own == "unlimited" else str(int(own) // 1024)
    assert expected != "64"
    assert log.read_text().split() == [expected, "0"]


QUICK = ("CPU only", "one machine is all", "a thousand", "names for addresses")
STARTED = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.jobs]) for name in ODD if name != "IPv6"]
"""The network of a temporary cluster is IPv4. Most are left to ``make test-jobs``: each takes seconds, and every one of the
files goes through Slurm's own parser anyway."""


@pytest.mark.parametrize("odd", STARTED)
def test_odd_clusters_start(odd: str, tmp_path: Path) -> None:
    """Of a thousand nodes four are started, under their names; the others stand in the file, and are down."""
    need_slurm()
    cluster = load(tmp_path, ODD[odd])
    done = try_out(cluster, texts_of(cluster))
    assert done["nodes"] == [host.name for host in cluster.compute_nodes[:4]]


def test_cores_of_half_a_socket_are_what_newer_slurms_refuse(tmp_path: Path) -> None:
    """The cores of the generated file reach slurmd as sockets: S:0-1, that is both; with none it would say nothing."""
    need_slurm()
    cluster = load(tmp_path, ODD["four NUMA nodes"])
    texts = texts_of(cluster)
    assert "Cores=0-15" in texts[GRES_CONF]
    with Slurm(shape(cluster, texts, nodes=1)) as slurm:
        assert "gpu:h100:4(S:0-1)" in slurm.run(["sinfo", "-N", "--noheader", "-o", "%G"]).stdout


def test_setup_tries_the_files(tmp_path: Path) -> None:
    """The command that an operator calls before he writes anything."""
    need_slurm()
    done = run("setup", "slurm", "--cluster", "rno-rtxpro6000", "--node", NAMES[0], "--out", tmp_path, "--try", "--json")
    assert (done.code, done.json["tried"]["nodes"]) == (0, NAMES)
    assert (tmp_path / "setup-slurm.sh").exists()


# --- accounting ---------------------------------------------------------------------------------------------------------------


@pytest.mark.jobs
def test_accounting_counts_a_job(tmp_path: Path) -> None:
    """slurmdbd, MariaDB whose user is known by its socket, and sacct with the GPUs; there is no password anywhere."""
    need_slurm()
    if lacking := [name for name in ("slurmdbd", "mariadbd", "mariadb-install-db") if not tool(name)]:
        pytest.skip(f"not installed: {', '.join(lacking)} (apt-get install slurmdbd mariadb-server-core mariadb-client-core)")
    cluster = load_cluster("rno-rtxpro6000")
    with Slurm(shape(cluster, texts_of(cluster, accounting=True))) as slurm:
        options = ["-N2", "--gpus-per-node=8", "--exclusive", "-o", os.devnull]
        job = slurm.submit(script(tmp_path, "srun true"), options=options)
        assert slurm.wait(job)["JobState"] == "COMPLETED"
        question = ["sacct", "-X", "--noheader", "--parsable2", "-j", str(job), "-o", "Cluster,State,AllocTRES"]
        answer = wait_for(lambda: "COMPLETED" in (told := slurm.run(question).stdout) and told, "sacct")
        assert answer.startswith("rno-rtxpro6000|COMPLETED|")
        assert "gres/gpu=16" in answer
        assert not [
            path for path in slurm.root.glob("*.conf") if "StoragePass=" in path.read_text() and "munge" not in path.read_text()
        ]
