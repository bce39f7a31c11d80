"""The temporary Slurm does what a real one does, also where it hurts, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from clustertune.testbed.cluster import ClusterFailed, TemporaryCluster
from clustertune.testbed.spec import can_isolate
from tests.command import REPO
from tests.slurm import LONG, make, need_slurm, wait_for

HEAD = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --mem=1G --requeue --open-mode=append\n"


def script(folder: Path, body: str, name: str = "job.sh", head: str = HEAD) -> Path:
    (folder / name).write_text(head + body)
    return folder / name


def submit(cluster: TemporaryCluster, folder: Path, body: str, *options: str) -> int:
    return cluster.submit(script(folder, body), options=[f"--output={folder}/out.txt", *options], cwd=folder)


def sleepers(cluster: TemporaryCluster, index: int, seconds: int = 1000) -> list[int]:
    """Processes of a node that are ``sleep SECONDS`` and nothing else: a shell's line may hold the words too."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in cluster.processes(index, f"sleep {seconds}")}
    return [pid for pid, line in lines.items() if Path(line.decode().split("\0")[0]).name == "sleep"]


def left(root: Path) -> list[str]:
    """Processes and the folder of a cluster that are still there."""
    found = [str(root)] if root.exists() else []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if str(root) in line and process.status() != psutil.STATUS_ZOMBIE:
                found.append(line)
    return found


def test_a_job_on_two_nodes(slurm: TemporaryCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task on a host of its own name, which the other can resolve, with its GPU and this file system.

    A job or a user around it does not steer it: the suite may itself run in a job of a real Slurm.
    """
    for variable in ("SLURM_CONF", "SLURM_JOB_ID", "SBATCH_PARTITION"):
        monkeypatch.setenv(variable, "3")
    body = "srun bash -c 'echo $SLURM_PROCID $(hostname) $CUDA_VISIBLE_DEVICES $(getent hosts node1 | cut -d\" \" -f1) $PWD'"
    assert slurm.wait(submit(slurm, tmp_path, body))["JobState"] == "COMPLETED"
    lines = sorted((tmp_path / "out.txt").read_text().splitlines())
    assert lines == [f"{i} node{i + 1} 0 10.99.0.1 {tmp_path}" for i in (0, 1)]


def test_power_loss_requeues_and_the_node_comes_back(slurm: TemporaryCluster, tmp_path: Path) -> None:
    """Nothing of the lost node continues, and the job starts again with a higher count."""
    # srun may see its broken connection before the controller misses the node: a script that ended then would have failed.
    body = "srun bash -c 'echo $SLURM_RESTART_COUNT; [ $SLURM_RESTART_COUNT ] || sleep 1000' || sleep 500\n"
    job = submit(slurm, tmp_path, body)
    [pid] = wait_for(lambda: sleepers(slurm, 2), "the job's step runs on node2")
    slurm.kill_node(2)
    assert not psutil.pid_exists(pid) and slurm.alive == {1}
    slurm.wait(job, {"PENDING"})
    slurm.start_node(2)
    slurm.release(job)
    record = slurm.wait(job)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1")
    assert (tmp_path / "out.txt").read_text().split("\n").count("1") == 2


def test_a_killed_slurmd_takes_no_job_with_it(slurm: TemporaryCluster, tmp_path: Path) -> None:
    """The daemon may be upgraded or crash while a job trains."""
    job = submit(slurm, tmp_path, f"srun bash -c 'until [ -e {tmp_path}/go ]; do sleep 0.1; done'\n")
    wait_for(lambda: slurm.processes(2, "until"), "the step runs on node2")
    [old] = slurm.processes(2, "slurmd", "-D")
    slurm.kill_slurmd(2)
    assert slurm.processes(2, "until")
    # The controller has not seen it yet, so the node's state alone does not tell that the daemon is back.
    os.kill(slurm._inits[2], signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        start = pool.submit(slurm.start_slurmd, 2)
        try:
            with pytest.raises(TimeoutError):
                start.result(timeout=1)
        finally:
            os.kill(slurm._inits[2], signal.SIGCONT)
        start.result(timeout=120)
    assert slurm.processes(2, "slurmd", "-D") not in ([], [old])
    (tmp_path / "go").touch()
    record = slurm.wait(job)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "0")


def test_a_cut_link_loses_the_node_but_not_its_processes(slurm: TemporaryCluster, tmp_path: Path) -> None:
    """The split brain: the job is requeued while its old processes still write to the shared folder."""
    job = submit(slurm, tmp_path, "srun sleep 1000\n")
    [pid] = wait_for(lambda: sleepers(slurm, 2), "the step runs on node2")
    slurm.link(2, up=False)
    slurm.wait(job, {"PENDING"})
    assert psutil.pid_exists(pid)
    slurm.link(2, up=True)
    slurm.wait_node(2)


def test_preemption_warns_and_requeues(slurm: TemporaryCluster, tmp_path: Path) -> None:
    """A job in the urgent partition takes the nodes; the other gets the signal that it asked for first."""
    body = (
        "trap 'echo warned; scontrol requeue $SLURM_JOB_ID' USR1\n[ $SLURM_RESTART_COUNT ] && exit\nsleep 1000 & wait; wait\n"
    )
    job = submit(slurm, tmp_path, body, "--signal=B:USR1@60")
    wait_for(lambda: sleepers(slurm, 1), "the job runs")
    urgent = slurm.submit(script(tmp_path, "true\n", "urgent.sh"), options=["--partition=urgent", "--output=/dev/null"])
    assert slurm.wait(urgent)["JobState"] == "COMPLETED"
    slurm.release(job)
    assert slurm.wait(job)["JobState"] == "COMPLETED"
    assert "warned" in (tmp_path / "out.txt").read_text()


def test_power_loss_without_namespaces(tmp_path: Path) -> None:
    """The step's daemon detaches from slurmd: it must be found all the same, and be gone with its node."""
    with make(("gpu007", "a.b-c"), isolated=False) as cluster:
        assert sorted(cluster.run(["srun", "--nodes=2", "printenv", "SLURMD_NODENAME"]).stdout.split()) == ["a.b-c", "gpu007"]
        job = submit(cluster, tmp_path, "srun sleep 1000\n")
        [pid] = wait_for(lambda: sleepers(cluster, 2), "the step runs on the second node")
        cluster.kill_node(2)
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        cluster.wait(job, {"PENDING"})
        cluster.start_node(2)
        cluster.release(job)
        cluster.wait(job, {"RUNNING"})
        [pid] = wait_for(lambda: sleepers(cluster, 1), "the step runs again")
        with pytest.raises(ClusterFailed, match="share this machine's network"):
            cluster.link(1, up=False)
    assert left(cluster.root) == [] and not psutil.pid_exists(pid)


OWNER = """
import json, sys, time
from tests.slurm import ClusterSpec, FaultyCluster
cluster = FaultyCluster(ClusterSpec(isolation=sys.argv[1])).start()
cluster.submit(sys.argv[2], options=["--nodes=2", "--output=/dev/null"])
while not cluster.processes(2, "sleep 4321"):
    time.sleep(0.05)
print(json.dumps([str(cluster.root), cluster.processes(2, "sleep 4321")]), flush=True)
time.sleep(1000)
"""


def test_an_owner_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """A test run that is killed must not fill the machine with daemons, and with jobs that continue for ever."""
    need_slurm(isolated=False)
    job = script(tmp_path, "#!/bin/bash\nsrun sleep 4321\n", head="")
    started, found = [], []
    with contextlib.ExitStack() as stack:
        for isolation in ("none", *(["netns"] if can_isolate() else [])):
            command = [sys.executable, "-c", OWNER, isolation, str(job)]
            owner = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(REPO)})
            started.append(stack.enter_context(owner))
        for owner in started:
            assert owner.stdout is not None
            root, steps = json.loads(owner.stdout.readline())
            assert steps
            found.append((Path(root), steps))
            os.kill(owner.pid, signal.SIGKILL)
    for root, steps in found:
        wait_for(lambda: not left(root) and not any(psutil.pid_exists(pid) for pid in steps), "all of it ends", LONG)  # noqa: B023


def test_a_start_that_fails_says_why_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason stands in the log of a daemon, in a folder that is removed."""
    from clustertune.testbed.spec import ClusterFolder

    cluster = make()
    monkeypatch.setattr(ClusterFolder, "gres_conf", lambda self: "NodeName=node1 Name=gpu File=/nowhere\n")
    with pytest.raises(ClusterFailed, match=r"(?s)did not start.*nowhere"):
        cluster.start(timeout=6)
    assert left(cluster.root) == []
