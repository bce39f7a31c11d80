"""The tiny recipe inside a SIF: two nodes of a real Slurm, faults, and nothing of the machine around it but what is named."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.containers import image_build as images
from clustertune.containers import pins
from clustertune.launch import container, container_packages
from clustertune.testbed.cluster import TemporaryCluster
from tests.command import REPO
from tests.containers.in_sif import cluster_file, job
from tests.launch.test_slurm_faults import preempt
from tests.slurm_job import SETTINGS, Job

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

CANARY = "canary-61c0"
PLANTED = ("PLANTED", "HF_TOKEN", "WANDB_API_KEY", "APPTAINERENV_PLANTED", "PYTHONPATH")
SHORT_EVALUATION = ["eval.max_gen_toks=4", "eval.limit=2"]
NOTHING_ELSE = {"HOME", "LD_LIBRARY_PATH", "PATH", "PWD", "LANG", "LC_CTYPE"}


@dataclass
class Seen:
    """A job that nothing happened to, and what a rank of it looked like from outside."""

    job: Job
    environ: dict[str, str] = field(default_factory=dict)
    root: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    routes: str = ""


@pytest.fixture(scope="module")
def file(cpu_sif: dict[str, Any], slurm_session: TemporaryCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cluster file. Root without every capability starts no container but in a user namespace."""
    options = ["--userns"] if os.geteuid() == 0 else []
    folder = tmp_path_factory.mktemp("insif")
    return cluster_file(folder, slurm_session, image=Path(cpu_sif["file"]), program=images.find_apptainer(), options=options)


@pytest.fixture(scope="module")
def quiet(slurm_session: TemporaryCluster, file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """The whole chain, with tokens in the job's own environment. Read only."""
    found = Seen(job(slurm_session, tmp_path_factory.mktemp("quiet") / "r", file))
    found.job.words = [*(word for word in found.job.words if word not in ("--to", "export")), *SHORT_EVALUATION]
    before = dict(os.environ)
    os.environ.update(dict.fromkeys(PLANTED, CANARY))
    found.job.options.append(f"--export={','.join(PLANTED)}")
    try:
        found.job.submit()
    finally:
        os.environ.clear()
        os.environ.update(before)
    found.job.until(lambda: len(found.job.steps()) >= 2, "the first steps")
    process = Path(f"/proc/{found.job.rank(2)}")
    words = (process / "environ").read_bytes().decode().split("\0")
    found.environ = dict(word.split("=", 1) for word in words if "=" in word)
    found.root = {path.name for path in (process / "root").iterdir()}
    found.links = {line.split(":")[0].strip() for line in (process / "net/dev").read_text().splitlines()[2:]}
    found.routes = (process / "net/route").read_text()
    ended = found.job.end()
    assert ended["JobState"] == "COMPLETED", found.job.text
    yield found


def test_the_tiny_recipe_over_two_nodes(quiet: Seen, cpu_sif: dict[str, Any]) -> None:
    """Every stage in the image, whose sum and versions the run keeps."""
    run = quiet.job.run
    hosts = [json.loads((run / f"attempts/0001/rank-{rank}.json").read_bytes())["host"] for rank in (0, 1)]
    assert hosts == ["node1", "node2"] and quiet.job.steps() == list(range(1, 17))
    assert ".singularity.d" in quiet.root, "the rank is in the image"
    recorded = json.loads((run / "run.json").read_bytes())["container"]
    assert (recorded["image"], recorded["sha256"], recorded["checked"]) == (cpu_sif["file"], cpu_sif["sha256"], True)
    assert recorded["python"].startswith("3.")
    pinned = pins.read()[pins.PY]
    assert {name: version.partition("+")[0] for name, version in recorded["packages"].items()} == pinned
    assert "warning: the image" not in quiet.job.text
    for made in ("adapter/adapter_model.safetensors", "merged/MANIFEST.json", "eval/results.json", "report.html"):
        assert (run / made).exists(), made


def test_no_token_reaches_a_rank(quiet: Seen) -> None:
    """The job had them in its environment; inside is what Slurm and the plan say, and the runtime's own."""
    assert CANARY not in str(quiet.environ) and not {"PLANTED", "HF_TOKEN", "WANDB_API_KEY"} & set(quiet.environ)
    assert quiet.environ["SLURM_NODEID"] == "1" and quiet.environ["PYTHONNOUSERSITE"] == "1"
    assert quiet.environ["GLOO_SOCKET_IFNAME"] == "eth0", "the plan's environment does"
    left = [path for path in quiet.job.run.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    assert left == [] and CANARY not in quiet.job.text


def test_the_nodes_reach_each_other_and_nothing_else(quiet: Seen) -> None:
    """No route leads out of the network between them: nothing was fetched."""
    assert quiet.links == {"lo", "eth0"}
    assert not [line for line in quiet.routes.splitlines()[1:] if line.split()[1] == "00000000"]


@pytest.mark.long
def test_warned_and_killed_in_the_container_it_ends_with_the_same_bytes(
    slurm: TemporaryCluster,
    quiet: Seen,
    file: Path,
    tmp_path: Path,
) -> None:
    """The warning reaches the ranks through the container's first process; a killed rank does not leave the others hanging."""
    found = job(slurm, tmp_path / "r", file).submit()
    found.until(lambda: len(found.steps()) >= 3, "the first steps")
    slurm.run(["scancel", "--batch", "--signal=USR1", str(found.id)])
    slurm.release(found.id)
    found.until(lambda: "resume from" in found.text, "the resume after the warning")
    warned = found.attempts()
    found.until(lambda: len(found.steps(warned)) >= 3, "steps of the second start")
    assert min(found.steps(warned)) == max(found.steps(1)) + 1, "warned in time nothing is lost"
    os.kill(found.rank(2), signal.SIGKILL)
    ended = found.end()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), found.text
    assert "rank 1 on node2 failed first: killed (SIGKILL" in found.text
    assert found.adapter() == quiet.job.adapter()
    left = [pid for node in (1, 2) for pid in slurm.processes(node, "clustertune", str(found.run))]
    assert left == []


# --- by hand, without Slurm --------------------------------------------------------------------------------------------


def inside(file: Path, binds: Sequence[Path], *words: str, more: Sequence[str] = (), **environ: str) -> str:
    """What ``python3 WORDS`` prints in the container, as a job would start it."""
    command = list(container.wrap([sys.executable, *words], load_cluster(str(file)), binds=binds, gpus=False).command)
    command[command.index("exec") + 1 : command.index("exec") + 1] = more
    environment = {"PATH": os.environ["PATH"], **environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


LOOK = """
import json, os, subprocess, sys
site = subprocess.run(["/usr/bin/python3", "-c", "import site; print(site.ENABLE_USER_SITE)"], capture_output=True, text=True)
print(json.dumps({"environ": dict(os.environ), "site": site.stdout.strip(), "secret": os.path.exists(sys.argv[1]),
                  "dev": os.listdir("/dev"), "path": sys.path, "pid": os.getpid()}))
"""


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file in the real home folder: a test's own lies below /tmp, which the container sees."""
    folder = Path(tempfile.mkdtemp(prefix=".clustertune-test-", dir=Path.home()))
    (folder / "secret").write_text(CANARY)
    yield folder / "secret"
    shutil.rmtree(folder)


def test_what_a_program_inside_sees(file: Path, secret: Path, tmp_path: Path) -> None:
    """Neither the caller's environment, nor his home and its packages, nor this machine's devices and processes."""
    packages = tmp_path / ".local/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "typer.py").write_text("raise SystemExit('shadowed')\n")
    planted = {**dict.fromkeys(PLANTED, CANARY), "HOME": str(tmp_path), "SLURM_NODEID": "3"}
    seen = json.loads(inside(file, [], "-c", LOOK, str(secret), **planted).splitlines()[-1])
    assert CANARY not in str(seen["environ"]) and seen["environ"]["SLURM_NODEID"] == "3"
    named = {name for name in seen["environ"] if not name.startswith(("APPTAINER_", "SINGULARITY_"))}
    assert named <= {*NOTHING_ELSE, "SLURM_NODEID", "HF_HOME", "PYTHONNOUSERSITE", "PROMPT_COMMAND", "PS1", "SHLVL", "_"}, named
    assert (seen["site"], seen["secret"]) == ("False", False) and "kmsg" not in seen["dev"] and seen["pid"] < 1000
    assert not any(".local" in entry for entry in seen["path"])
    # Also where the home folder is bound.
    seen = json.loads(inside(file, [secret.parent], "-c", LOOK, str(secret), **planted).splitlines()[-1])
    assert (seen["site"], seen["secret"]) == ("False", True)
    inside(file, [tmp_path], "-c", "import typer; assert 'local/venv' in typer.__file__", **planted)


def test_the_chain_without_any_network(file: Path, tmp_path: Path) -> None:
    """Two ranks over loopback; whatever asked for a host would fail."""
    run = tmp_path / "run"
    run.mkdir()
    words = ["recipes/tiny-oasst2", "--tiny", "--to", "export", *SETTINGS[1:], "train.max_steps=2", "--run-dir", str(run)]
    none = ["--net", "--network=none"]
    probe = "import socket; socket.create_connection(('192.0.2.1', 80), 2)"
    with pytest.raises(AssertionError, match="unreachable"):
        inside(file, [run], "-c", probe, more=none)
    inside(file, [run], "-m", "clustertune", "run", *words, more=none)
    assert (run / "adapter" / "adapter_model.safetensors").exists()


READ_LATER = """
import signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
print("ready", flush=True)
while not asked:
    time.sleep(0.05)
time.sleep(0.5)
import sqlite3, xml.dom.minidom, nltk
print("still reads", flush=True)
"""


def test_a_signal_to_every_process_leaves_the_image_readable(file: Path) -> None:
    """As Slurm signals a step: the image's mount must outlive what the ranks save on."""
    command = list(container.wrap([sys.executable, "-c", READ_LATER], load_cluster(str(file)), binds=[], gpus=False).command)
    with subprocess.Popen(
        command,
        env={"PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as started:
        assert started.stdout is not None
        before = next((line for line in started.stdout if line == "ready\n"), "")
        names = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
                if int(rest.split()[3]) == started.pid:
                    names[int(stat.parent.name)] = name
        for number in (signal.SIGUSR1, signal.SIGTERM):
            for pid in names:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        output, _ = started.communicate(timeout=120)
    assert before and (started.returncode, output.splitlines()[-1:]) == (0, ["still reads"]), output


@pytest.mark.long
def test_preempted_in_the_container_nothing_is_lost(slurm: TemporaryCluster, quiet: Seen, file: Path, tmp_path: Path) -> None:
    """Slurm sends SIGTERM to every process of the step, squashfuse with it, and requeues the job."""
    found = job(slurm, tmp_path / "r", file).submit()
    found.until(lambda: len(found.steps()) >= 3, "the first steps")
    preempt(slurm, found)
    ended = found.end()
    assert ended["JobState"] == "COMPLETED", found.text
    assert min(found.steps(found.attempts())) == max(found.steps(1)) + 1, "saved in time nothing is done twice"
    assert found.adapter() == quiet.job.adapter()


def test_an_image_that_lacks_packages_is_told_before_the_first_stage(file: Path, tmp_path: Path) -> None:
    """The image's other Python has none of them: what the first start of a job would say about such an image."""
    code = "import os; os.execv('/usr/bin/python3', ['/usr/bin/python3', '-m', 'clustertune.launch.inventory'])"
    found = container_packages.parse(inside(file, [], "-c", code))
    assert found is not None
    problems, _ = container_packages.judge(found, pins.read(), "x.sif")
    assert {"the image has no torch", "the image has no pydantic"} <= {p.message.partition(" (")[0] for p in problems}


def test_everything_is_bound_from_the_checkout(file: Path) -> None:
    """The code is mounted, not baked: what runs is this checkout's."""
    output = inside(file, [], "-c", "import clustertune; print(clustertune.__file__)")
    assert output.strip().splitlines()[-1] == str(REPO / "clustertune" / "__init__.py")
