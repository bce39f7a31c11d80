"""The words that put a command into a container, what launch/inside.sh makes of them on a node, and the step of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import Cluster, Container
from clustertune.errors import UserError
from clustertune.launch import srun
from tests.command import REPO
from tests.slurm import wait_for

REFERENCE = load_cluster(str(REPO / "ops" / "clusters" / "rno-rtxpro6000.yaml"))
SECRETS = {"HF_TOKEN": "canary-5e", "WANDB_API_KEY": "canary-5e", "APPTAINERENV_TOKEN": "canary-5e", "PLANTED": "canary-5e"}


def cluster(**keys: Any) -> Cluster:
    return REFERENCE.model_copy(update={"container": Container(**keys)})


def words(machine: Cluster, run: str = "/pool/run", *, gpus: bool = True) -> list[str]:
    environ = {"PATH": "/bin", "HOME": "/h", "LD_LIBRARY_PATH": "/l", **SECRETS}
    return srun.in_step(["/v/bin/python", "-m", "x"], machine, binds=[run], nodes=2, cpus=8, gpus=gpus, environ=environ)


def test_no_secret_is_on_the_line_and_no_gpu_without_one() -> None:
    """The whole line for each shipped cluster: tests/golden/."""
    found = words(REFERENCE)
    assert "canary-5e" not in str(found) and not any(name in str(found) for name in SECRETS)
    assert "--nv" not in words(REFERENCE, gpus=False)


def test_pyxis_on_the_reference_cluster() -> None:
    """As options of srun; enroot gets what srun exports, so that a library path of the host stays out."""
    found = words(cluster(runtime="pyxis", image="/pool/train.sqsh", binds=("/pool", "/a:/b:ro")))
    assert "--container-image=/pool/train.sqsh" in found and f"--container-workdir={REPO}" in found
    mounts = f"--container-mounts={REPO}:{REPO},/pool/run:/pool/run,/tmp:/tmp,/pool:/pool,/a:/b:ro"
    assert mounts in found
    assert {"--no-container-mount-home", "--no-container-remap-root", "--no-container-entrypoint"} <= set(found)
    exported = "--export=PATH,USER,LOGNAME,LANG,LC_ALL,TMPDIR,PYTHONNOUSERSITE=1"
    assert {exported, "--container-env=PYTHONNOUSERSITE"} <= set(found)
    assert found[-3:] == ["python3", "-m", "x"] and "canary-5e" not in str(found)
    assert not any(word in str(found) for word in ("apptainer", "inside.sh"))


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_a_path_that_no_runtime_can_bind_is_refused(runtime: str) -> None:
    """Quietly another folder would be bound: ``/a:/b`` is /a under another name."""
    for path in ("/pool/a:/b", "/pool/a,b"):
        with pytest.raises(UserError, match="cannot be shown a path with"):
            words(cluster(runtime=runtime, image="/x.sqsh"), path)
    assert words(cluster(), "/pool/a,b")


# --- on the node -------------------------------------------------------------------------------------------------------

STANDIN = """#!/usr/bin/env bash
printf '%s\\n' "$@"
echo --environment--
env
"""


class Node:
    """A folder with a stand-in for the runtime, and an image."""

    def __init__(self, root: Path) -> None:
        self.bin, self.image, self.home = root / "bin", root / "an image.sif", root / "home"
        for folder in (self.bin, self.home):
            folder.mkdir()
        self.image.touch()
        for name in ("apptainer", "singularity"):
            (self.bin / name).write_text(STANDIN)
            (self.bin / name).chmod(0o755)
        self.environ = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.home), "SLURM_NODEID": "1", "USER": "u"}

    def run(self, *given: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [str(REPO / "launch/inside.sh"), *given]
        environment = {**self.environ, **environ}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def ask(self, *options: str, runtime: str = "apptainer", **environ: str) -> tuple[list[str], dict[str, str]]:
        """Arguments and environment that the runtime got."""
        done = self.run(runtime, "exec", *options, str(self.image), "python3", "-m", "x", **environ)
        assert done.returncode == 0, done.stderr
        head, _, rest = done.stdout.partition("--environment--\n")
        return head.splitlines(), dict(line.split("=", 1) for line in rest.splitlines())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_only_named_variables_come_in(node: Node) -> None:
    """Neither tokens nor what would have the runtime show more than its command line says."""
    steering = {"APPTAINER_BIND": "/etc", "SINGULARITYENV_X": "1", "APPTAINER_NV": "1", "LD_PRELOAD": "", "PYTHONPATH": "/x"}
    _, found = node.ask("--containall", **SECRETS, **steering, SLURM_JOB_ID="7", CUDA_VISIBLE_DEVICES="0,1", TMPDIR="/a b")
    assert "canary-5e" not in str(found) and not set(steering) & set(found)
    passed = {name: value for name, value in found.items() if name.startswith("APPTAINERENV_")}
    assert passed == {
        "APPTAINERENV_SLURM_NODEID": "1",
        "APPTAINERENV_SLURM_JOB_ID": "7",
        "APPTAINERENV_CUDA_VISIBLE_DEVICES": "0,1",
        "APPTAINERENV_USER": "u",
        "APPTAINERENV_TMPDIR": "/a b",
        "APPTAINERENV_HF_HOME": f"{node.home}/.cache/huggingface",
    }
    assert {"PATH", "HOME"} <= set(found)


def test_the_hubs_cache_is_seen_and_the_home_is_not(node: Node) -> None:
    """A download into a container's own home fills 64 MB of memory, and is gone."""
    given, _ = node.ask("--no-home")
    assert [given[i + 1] for i, word in enumerate(given) if word == "--bind"] == [f"{node.home}/.cache/huggingface"]
    given, found = node.ask("--bind", str(node.home), HF_HOME=str(node.home))
    assert given.count(str(node.home)) == 1 and found["APPTAINERENV_HF_HOME"] == str(node.home)


def test_what_mounts_the_image_outlives_a_signal_to_all(node: Node, tmp_path: Path) -> None:
    """Slurm sends SIGTERM to every process of a step: with squashfuse gone the ranks cannot read the image while they save."""
    program = node.bin / "squashfuse_ll"
    program.write_text('#!/bin/sh\n/bin/grep SigIgn /proc/self/status\necho "$@"\n')
    program.chmod(0o755)

    def started(command: list[str], path: str) -> str:
        return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, timeout=60, check=True).stdout

    said = started(["squashfuse_ll", "-o", "offset=4"], node.ask()[1]["PATH"])
    ignored, numbers = int(said.split()[1], 16), (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    assert all(ignored >> (number - 1) & 1 for number in numbers) and "offset=4" in said
    # Apptainer's helpers get a PATH of its own: what is meant is found all the same, and never the link itself.
    link = REPO / "launch/fuse/squashfuse_ll/squashfuse_ll"
    assert "SigIgn" in started([str(link)], f"{link.parent}:{node.bin}")


# --- the step of a job -------------------------------------------------------------------------------------------------


def command(**changes: object) -> list[str]:
    words = {"nodes": 2, "cpus": 64, "gpus": True, "environ": {"PATH": "/bin", "HOME": "/h", **SECRETS}} | changes
    return srun.srun_command(["python", "x"], **words)  # type: ignore[arg-type]


def test_only_listed_variables_reach_the_nodes() -> None:
    words = command()
    listed = next(word for word in words if word.startswith("--export=")).partition("=")[2].split(",")
    assert {"PATH", "HOME"} <= set(listed) and "HF_HOME" not in listed, "a cache that nobody named is the library's own"
    assert not any("canary" in word or name in word for word in words for name in SECRETS)
    assert words == command(environ=SECRETS), "the line does not depend on what the batch script was started with"
    cached = command(environ={"HF_HOME": "/big/hf", "CUDA_HOME": "/c", "CLUSTERTUNE_MODULE_VARIABLES": "CUDA_HOME HF_TOKEN"})
    assert "--export=" + ",".join([*listed, "HF_HOME"]) in cached, "modules are of step.in_step"


STEP = """
import signal, sys, time
from pathlib import Path
def handle(number, frame):
    Path(sys.argv[1]).write_text(signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGUSR1, handle)
Path(sys.argv[1] + ".up").touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "asks", "heard"),
    [
        (signal.SIGUSR1, None, "SIGUSR1"),
        (signal.SIGTERM, None, "SIGUSR1"),  # which only the batch script got: the ranks are asked for a save
        (signal.SIGUSR1, "well", "asked"),
        (signal.SIGUSR1, "on a full disk", "SIGUSR1"),
    ],
)
def test_a_warning_reaches_the_step(tmp_path: Path, number: signal.Signals, asks: str | None, heard: str) -> None:
    """As a signal through srun, or another way where there is one, and as the signal again where that fails."""
    mark, signals, main = tmp_path / "mark", list[int](), threading.main_thread().ident or 0

    def warn() -> None:
        wait_for(Path(f"{mark}.up").exists, "the step")
        signal.pthread_kill(main, number)

    def ask() -> None:
        if asks != "well":
            raise OSError(28, "No space left on device")
        mark.write_text("asked")

    threading.Thread(target=warn, daemon=True).start()
    still_mine = lambda: asks != "well" or not mark.exists()  # noqa: E731
    srun.run_step([sys.executable, "-c", STEP, str(mark)], signals, still_mine, ask=ask if asks else None)
    assert mark.read_text() == heard and signals == [number]


@pytest.mark.parametrize("failed", [False, True])
def test_a_step_is_left(monkeypatch: pytest.MonkeyPatch, failed: bool) -> None:
    """When a later start has taken over; or where srun waits for the tasks of a node that lost its power, came back at once,
    and knows nothing of them."""
    monkeypatch.setattr(srun, "END_SECONDS", 0.5)
    began = time.monotonic()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    code = srun.run_step(command, [], lambda: failed or time.monotonic() - began < 1, lambda: failed)
    assert code == -signal.SIGKILL


def test_the_step_ends_with_the_program(tmp_path: Path) -> None:
    """A job whose program was killed is requeued: its srun must not keep the old ranks."""
    pid = tmp_path / "pid"
    child = f"import os, time; from pathlib import Path; Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(60)"
    if (parent := os.fork()) == 0:
        try:
            srun.run_step([sys.executable, "-c", child], [], lambda: True)
        finally:
            os._exit(0)
    wait_for(lambda: pid.exists() and pid.read_text(), "the step")
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_for(lambda: not Path(f"/proc/{pid.read_text()}").exists(), "the end of the step", 30)
