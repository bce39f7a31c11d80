"""``clustertune demo-slurm`` as a person types it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from clustertune.testbed.cluster import rehearse
from clustertune.testbed.spec import ClusterSpec
from tests.command import run
from tests.slurm import need_slurm, wait_for

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


@pytest.mark.jobs
@pytest.mark.timeout(1800)
def test_the_demo_as_it_is_told() -> None:
    """The reference recipe, tiny, through the real job script on two nodes, to its report."""
    need_slurm()
    done = run("demo-slurm", "--json")
    assert done.code == 0, done.err
    assert done.json["state"] == "COMPLETED" and (Path(done.json["run_dir"]) / "report.html").is_file()
