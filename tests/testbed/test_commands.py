"""``clustertune cluster`` and ``demo-slurm`` as a person types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from clustertune.errors import UserError
from clustertune.testbed import keeper
from clustertune.testbed.rehearsal import rehearse
from clustertune.testbed.spec import ClusterSpec
from tests.command import REPO, Done, run
from tests.slurm import need_slurm, wait_for
from tests.testbed.test_cluster import left

NAME = f"test-{os.getpid()}"


@pytest.fixture
def name() -> Iterator[str]:
    """A name for a cluster, which is ended afterwards."""
    need_slurm()
    yield NAME
    keeper.down(NAME)


def cluster(command: str, *words: str, name: str = NAME, cwd: Path = REPO) -> Done:
    return run("cluster", command, "--name", name, *words, cwd=cwd)


def test_up_run_status_down(name: str, tmp_path: Path) -> None:
    """It outlives the command, takes commands with their input, exit code and folder, and leaves nothing."""
    begun = cluster("up", "--nodes", "1", "--gpus", "0", "--json")
    assert begun.code == 0 and begun.json["up"] and begun.json["nodes"] == ["node1"]
    again = cluster("up")
    assert again.code == 2 and "is up already" in again.err and "cluster down --name" in again.err
    done = cluster("run", "--", "bash", "-c", "hostname; pwd; echo oops >&2; exit 7", cwd=tmp_path)
    assert (done.code, done.out, done.err) == (7, f"ctl\n{tmp_path}\n", "oops\n")
    reading = [sys.executable, "-m", "clustertune", "cluster", "run", "--name", name, "cat"]  # a script is piped into sbatch
    assert subprocess.run(reading, input=b"a\n", cwd=REPO, capture_output=True, check=True, timeout=120).stdout == b"a\n"
    assert cluster("run", "sbatch", "-o", "/dev/null", "-J", "a|b", "--wrap", "sleep 99").code == 0
    status = cluster("status", "--json").json["clusters"][0]
    assert [job["name"] for job in status["jobs"]] == ["a|b"] and status["nodes"][0]["name"] == "node1"
    shown = cluster("status")
    assert shown.code == 0 and "a|b" in shown.err and "node1: " in shown.err
    state = keeper.read(name)
    ended = cluster("down")
    assert ended.code == 0 and "nothing is left" in ended.err
    assert state and left(Path(state.root)) == [] and not state.alive
    ended, shown = cluster("down"), cluster("status")
    assert (ended.code, shown.code) == (0, 1) and "nothing to end" in ended.err and "cluster up" in shown.err


def test_two_by_name_and_a_keeper_that_is_killed(name: str) -> None:
    """Each with its own daemons; a wrong name says which there are. A killed keeper's cluster ends, and up starts a new one."""
    state, other = keeper.up(name, ClusterSpec(nodes=1, gpus=0)), f"{name}.b"
    try:
        keeper.up(other, ClusterSpec(nodes=("x",), gpus=0))
        for which, node in ((other, "x"), (name, "node1")):
            assert cluster("run", "--", "sinfo", "-h", "-o", "%N", name=which).out.split()[0] == node
        wrong = cluster("run", "--", "true", name="nobody")
        assert wrong.code == 2 and name in wrong.err and other in wrong.err
        os.kill(state.keeper, signal.SIGKILL)
        wait_for(lambda: not left(Path(state.root)), "all of it ends")
    finally:
        keeper.down(other)
    assert name in keeper.names() and other not in keeper.names()
    shown, refused = cluster("status"), cluster("run", "--", "true")
    assert shown.code == 1 and "was killed" in shown.err and "cluster up" in shown.err
    assert refused.code == 2 and "was killed" in refused.err
    assert keeper.up(name, ClusterSpec(nodes=1, gpus=0)).alive


def test_what_cannot_be_started_is_said(name: str) -> None:
    """The keeper is another process: its words must come back, all of them."""
    done = cluster("up", "--nodes", "17", "--gpus", "99")
    assert done.code == 2 and "17 nodes" in done.err and "99 GPUs" in done.err
    assert keeper.read(name) is None
    bad = cluster("up", name="../x")
    assert bad.code == 2 and "cannot be a cluster's name" in bad.err


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared folder for temporary files anybody can make ours first, and say which namespaces we enter as root."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    keeper.folder().chmod(0o777)
    with pytest.raises(UserError, match="only you can read and write"):
        keeper.folder()
    (tmp_path / f"clustertune-{os.getuid()}").rmdir()
    (tmp_path / f"clustertune-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(UserError, match="only you can read and write"):
        keeper.folder()


def test_another_process_of_the_keepers_id_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reboot the id of a keeper that is gone may be anybody's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(["sleep", "60"]) as other:
        before = keeper.started(other.pid) - 1
        found = keeper.KeeperState("old", other.pid, before, str(tmp_path / "gone"), other.pid, None, ["n1"], 0)
        (keeper.folder() / "old.json").write_text(json.dumps(asdict(found)))
        assert keeper.down("old") == found and keeper.read("old") is None
        assert other.poll() is None, "a process that is not the cluster's was killed"
        other.kill()


SCRIPT = '#!/bin/bash\n#SBATCH --requeue --open-mode=append\necho $SLURM_JOB_NUM_NODES $SLURM_GPUS_ON_NODE "$@"\n'


@pytest.mark.parametrize(("body", "state", "code"), [("exit 93", "FAILED", 93), ("kill -9 $$", "FAILED", 1)])
def test_a_rehearsal(body: str, state: str, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The job gets its size and its arguments, its log is shown, and its end is the command's; hurtful names included."""
    need_slurm()
    script, run_dir = tmp_path / "a b.sh", tmp_path / "runs" / "100%j x"
    script.write_text(f"{SCRIPT}{body}\n")
    run_dir.parent.mkdir()
    run_dir.with_name("100%j x.log").write_text("of an earlier one\n")
    ended = rehearse(ClusterSpec(nodes=2, gpus=3), script, ["a b", "c=$HOME;#"], run_dir)
    assert (ended.state, ended.code, ended.log) == (state, code, tmp_path / "runs" / "100%j x.log")
    shown = capfd.readouterr().err
    assert "  | 2 3 a b c=$HOME;#" in shown and "of an earlier one" not in shown and f"job {ended.job}: {state}" in shown


@pytest.fixture
def restored_sigint() -> Iterator[None]:
    """As in a terminal: a process that a script starts in the background inherits that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_rehearsal(tmp_path: Path, restored_sigint: None) -> None:
    """With the cluster and the job that runs on it."""
    need_slurm()
    script = tmp_path / "job.sh"
    script.write_text(f"{SCRIPT}touch {tmp_path}/begun\nsleep 1000\n")

    def interrupt() -> None:
        wait_for((tmp_path / "begun").exists, "the job runs")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        rehearse(ClusterSpec(nodes=1), script, [], tmp_path / "run")
    thread.join()
    wait_for(lambda: {child.pid for child in psutil.Process().children(recursive=True)} <= before, "all of it ends")


def test_the_demo_needs_the_checkout(tmp_path: Path) -> None:
    """The job script lies there."""
    done = run("demo-slurm", "--json", cwd=tmp_path)
    assert done.code == 2 and "in the checkout" in done.err and json.loads(done.out)["exit_code"] == 2


@pytest.mark.jobs
@pytest.mark.timeout(1800)
def test_the_demo_as_it_is_told() -> None:
    """The reference recipe, tiny, through the real job script on two nodes, to its report."""
    need_slurm()
    done = run("demo-slurm", "--json")
    assert done.code == 0, done.err
    assert done.json["state"] == "COMPLETED" and (Path(done.json["run_dir"]) / "report.html").is_file()
