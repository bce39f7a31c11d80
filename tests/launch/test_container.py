"""The words that put a command into a container, and what launch/inside.sh makes of them on a node."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import CONTAINER_OPTIONS, Cluster, Container
from clustertune.errors import UserError
from clustertune.launch import container, step
from clustertune.resolve.resolve import resolve
from tests.command import REPO

REFERENCE = load_cluster(str(REPO / "ops" / "clusters" / "rno-rtxpro6000.yaml"))
SECRETS = {"HF_TOKEN": "canary-5e", "WANDB_API_KEY": "canary-5e", "APPTAINERENV_TOKEN": "canary-5e", "PLANTED": "canary-5e"}


def cluster(**keys: Any) -> Cluster:
    return REFERENCE.model_copy(update={"container": Container(**keys)})


def words(machine: Cluster, run: str = "/pool/run", *, gpus: bool = True) -> list[str]:
    environ = {"PATH": "/bin", "HOME": "/h", "LD_LIBRARY_PATH": "/l", **SECRETS}
    return step.in_step(["/v/bin/python", "-m", "x"], machine, binds=[run], nodes=2, cpus=8, gpus=gpus, environ=environ)


def test_apptainer_on_the_reference_cluster() -> None:
    """Nothing of the node but what is named: the checkout, the run, the node's disk, what the cluster file binds."""
    found = words(REFERENCE)
    at = found.index("apptainer")
    assert found[at - 1] == str(REPO / "launch/inside.sh")
    assert found[at : at + 5] == ["apptainer", "exec", "--nv", "--containall", "--cleanenv"] and "--no-home" in found
    assert found[found.index("--env") + 1] == "PYTHONNOUSERSITE=1" and found[found.index("--pwd") + 1] == str(REPO)
    assert [found[i + 1] for i, word in enumerate(found) if word == "--bind"] == [str(REPO), "/pool/run", "/tmp", "/pool"]
    assert found[-4:] == ["/pool/images/train.sif", "python3", "-m", "x"]
    assert "--nv" not in words(REFERENCE, gpus=False)
    assert "canary-5e" not in str(found) and not any(name in str(found) for name in SECRETS)


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


@pytest.mark.parametrize("runtime", sorted(CONTAINER_OPTIONS))
def test_every_option_that_a_cluster_file_may_give_is_passed(runtime: str) -> None:
    """And none contradicts what is always given."""
    for option in CONTAINER_OPTIONS[runtime]:
        found = words(cluster(runtime=runtime, image="/x.sqsh", options=(option,)))
        assert found.count(option) == 1 and f"--no-{option[2:]}" not in found


def test_other_programs_and_devices_and_none() -> None:
    """Modules are not loaded in a job that gets no environment of the login shell: the program may lie elsewhere."""
    found = words(cluster(runtime="singularity", image="/x.sif", program="/usr/lib/s/bin/singularity", options=("--rocm",)))
    assert found[found.index("exec") - 1] == "/usr/lib/s/bin/singularity" and "--nv" not in found
    found = words(cluster())
    assert found[-3:] == ["/v/bin/python", "-m", "x"] and f"--export={','.join(step.BASIC)}" in found


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_a_path_that_no_runtime_can_bind_is_refused(runtime: str) -> None:
    """Quietly another folder would be bound: ``/a:/b`` is /a under another name."""
    for path in ("/pool/a:/b", "/pool/a,b"):
        with pytest.raises(UserError, match="cannot be shown a path with"):
            words(cluster(runtime=runtime, image="/x.sqsh"), path)
    assert words(cluster(), "/pool/a,b")


DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (f"docker://nvcr.io/nvidia/nemo:26.06@{DIGEST}", f"docker://nvcr.io#nvidia/nemo:{DIGEST}"),
        (f"docker://me/train:cpu@{DIGEST}", f"docker://registry-1.docker.io#me/train:{DIGEST}"),
        (f"docker://ubuntu@{DIGEST}", f"docker://registry-1.docker.io#library/ubuntu:{DIGEST}"),
        (f"docker://r.example:5000/a/b@{DIGEST}", f"docker://r.example:5000#a/b:{DIGEST}"),
        (f"docker://localhost/x@{DIGEST}", f"docker://localhost#x:{DIGEST}"),
        ("/pool/train.sqsh", "/pool/train.sqsh"),
    ],
)
def test_a_digest_as_every_enroot_reads_it(given: str, expected: str) -> None:
    """enroot 3 takes ``@sha256:`` for a part of the name and fetches nothing."""
    assert container.enroot_name(given) == expected


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


def test_singularity_is_told_in_its_own_words(node: Node) -> None:
    """SingularityCE does not read APPTAINERENV_; an Apptainer that is called so reads either."""
    _, found = node.ask(runtime="singularity")
    assert found["SINGULARITYENV_SLURM_NODEID"] == found["APPTAINERENV_SLURM_NODEID"] == "1"
    _, found = node.ask(runtime=str(node.bin / "apptainer"))
    assert not any(name.startswith("SINGULARITYENV_") for name in found)


def test_the_hubs_cache_is_seen_and_the_home_is_not(node: Node) -> None:
    """A download into a container's own home fills 64 MB of memory, and is gone."""
    given, _ = node.ask("--no-home")
    assert [given[i + 1] for i, word in enumerate(given) if word == "--bind"] == [f"{node.home}/.cache/huggingface"]
    given, found = node.ask("--bind", str(node.home), HF_HOME=str(node.home))
    assert given.count(str(node.home)) == 1 and found["APPTAINERENV_HF_HOME"] == str(node.home)


def test_words_arrive_as_they_were(node: Node) -> None:
    """Blanks in paths; and the words of the command are not read as options."""
    done = node.run("apptainer", "exec", "--pwd", "/a b", str(node.image), "python3", "--bind", "/nowhere at all")
    given = done.stdout.partition("--environment--")[0].splitlines()
    assert given[:3] == ["exec", "--pwd", "/a b"] and given[-4:] == [str(node.image), "python3", "--bind", "/nowhere at all"]


def test_what_a_node_lacks_is_told_with_its_name(node: Node) -> None:
    """All of it at once, by the node that lacks it: the runtime names the first, and no node."""
    done = node.run("apptainer", "exec", "--bind", "/not/there:/x:ro", "--bind", "/nor/there", "/no.sif", "python3")
    assert done.returncode == 2 and not done.stdout
    lines, lacking = done.stderr.splitlines(), ["/not/there", "/nor/there", "the image /no.sif"]
    assert [line.split(" has no ")[1].split(", which")[0] for line in lines] == lacking
    assert all(line.startswith(f"error: {os.uname().nodename} ") and "->" in line for line in lines)
    done = node.run("nothere", "exec", str(node.image), "python3")
    assert done.returncode == 2 and "has no nothere" in done.stderr
    assert node.run("apptainer", "run", str(node.image)).returncode == 2


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


def test_no_program_is_promised_that_is_not_there(node: Node, tmp_path: Path) -> None:
    """Apptainer unpacks the image where it finds no squashfuse."""
    few = tmp_path / "few"
    few.mkdir()
    for name in ("bash", "dirname", "env", "mkdir", "uname"):
        (few / name).symlink_to(str(shutil.which(name)))
    _, found = node.ask(PATH=f"{node.bin}:{few}")
    assert found["PATH"] == f"{node.bin}:{few}"
    (few / "squashfuse").write_text("#!/bin/sh\n")
    (few / "squashfuse").chmod(0o755)
    _, found = node.ask(PATH=f"{node.bin}:{few}")
    assert found["PATH"] == f"{REPO}/launch/fuse/squashfuse:{node.bin}:{few}"


# --- pyxis -------------------------------------------------------------------------------------------------------------


def pyxis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An srun with the plugin's options on PATH. Returns where it records what it understood."""
    program, record = tmp_path / "bin" / "srun", tmp_path / "record"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n" + (REPO / "tests/launch/pyxis_srun.py").read_text())
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYXIS_RECORD", str(record))
    monkeypatch.setenv("PYXIS_PYTHON", sys.executable)
    return record


def test_pyxis_understands_the_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program that takes exactly the options of the plugin and Slurm's that are used; it then runs the command."""
    record = pyxis(tmp_path, monkeypatch)
    monkeypatch.setenv("HF_TOKEN", "canary-5e")
    image = f"docker://nvcr.io/nvidia/nemo:26.06@{DIGEST}"
    machine = cluster(runtime="pyxis", image=image, options=("--container-writable",))
    code = "import os, sys; print(os.environ.get('HF_TOKEN'), os.getcwd(), os.environ['PYTHONNOUSERSITE'])"
    command = step.on_first_node(["/v/python", "-c", code], machine, binds=[tmp_path], host="n1", gpus=True, environ=os.environ)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, f"None {REPO} 1"), done.stderr
    recorded = json.loads(record.read_text())
    assert recorded["image"] == f"docker://nvcr.io#nvidia/nemo:{DIGEST}"
    assert [str(tmp_path)] * 2 in recorded["mounts"] and ["/tmp", "/tmp"] in recorded["mounts"]
    assert "--nodelist=n1" in recorded["options"] and "--nodes=1" in recorded["options"]


BROKEN = (
    "--container-mounts=/tmp,tmp:/x", "--container-mount=/tmp", "--container-remap-root", "--container-image=other",
    "--container-env=",
)  # fmt: skip


@pytest.mark.parametrize("broken", [None, *BROKEN])
def test_what_pyxis_would_refuse_the_stand_in_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str | None
) -> None:
    """Else the test before could not fail."""
    pyxis(tmp_path, monkeypatch)
    machine = cluster(runtime="pyxis", image="/x.sqsh")
    command = step.on_first_node(["/v/python", "-V"], machine, binds=[tmp_path], host="n1", gpus=False, environ=os.environ)
    command[1:1] = [broken] if broken else []
    assert (subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0) is (broken is None)


def test_a_point_of_a_sweep_sees_what_the_points_share(tmp_path: Path) -> None:
    """Its tokens lie beside the run folders."""
    resolved, point = resolve("tiny-oasst2"), tmp_path / "sweep" / "points" / "0001"
    point.mkdir(parents=True)
    assert container.places_of(resolved, point)[0] == point
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    assert container.places_of(resolved, point)[0] == tmp_path / "sweep"
