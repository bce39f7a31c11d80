"""Where a job's caches, models and runs lie: by cluster file and shell, seen by every rank; the checkout stays clean."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from clustertune.testbed.cluster import TemporaryCluster
from tests.command import REPO
from tests.slurm_job import SETTINGS, SHAPE, Job

pytestmark = pytest.mark.timeout(1200)
FILE = """
name: here
nodes:
  - {{name: login1, address: 10.99.0.254, roles: [login, slurmctld]}}
  - {{name: node1, address: 10.99.0.1, roles: [compute]}}
  - {{name: node2, address: 10.99.0.2, roles: [compute]}}
compute: {{gpus: 1, gpu: h100-sxm, cores: 1, threads: 2, memory_gb: 20, interconnect: none}}
network: {{interface: eth0, kind: ethernet, gbit: 100}}
storage: {{{storage}}}
slurm: {{partition: gpu, account: abc@h100, qos: normal{slurm}}}
doctor: {{preflight: false}}
"""


def cluster_file(folder: Path, storage: str, slurm: str = "") -> Path:
    path = folder / "here.yaml"
    path.write_text(FILE.format(storage=storage, slurm=slurm))
    return path


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of its own under git: what a job leaves in it can be seen."""
    root = tmp_path_factory.mktemp("job places") / "checkout"
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=REPO, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        if name and (REPO / name).is_file() and not name.startswith(("tests/", "docs/")):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, root / name)
    (root / ".venv").symlink_to(REPO / ".venv")
    git(root, "init", "--quiet")
    (root / ".git" / "info" / "exclude").write_text("/.venv\n")
    git(root, "add", "--all")
    git(root, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--message=t")
    return root


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


def left_in(root: Path) -> list[str]:
    """What is not git's, ignored files too, but for Python's bytecode."""
    lines = git(root, "status", "--porcelain", "--ignored", "--untracked-files=all").splitlines()
    return [line for line in lines if "__pycache__" not in line and not line.endswith(" .venv")]


def environment_of(pid: int) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return {name: value for name, _, value in pairs}


def all_ranks(job: Job, seen: list[dict[str, str]]) -> bool:
    """Whether the ranks of both nodes are there at once; what they were started with into ``seen``."""
    try:
        seen[:] = [environment_of(job.rank(node)) for node in (1, 2)]
    except (IndexError, OSError):
        return False
    return all(seen)


@pytest.mark.jobs
def test_a_submitted_job(slurm: TemporaryCluster, checkout: Path) -> None:
    """``submit`` by a cluster file that gives folders by a variable of this shell; paths have blanks.

    Every rank sees the folders; the dry run prints the line of srun that ran, letter by letter; the checkout stays clean.
    """
    big, seen = checkout.parent / "big disk", list[dict[str, str]]()
    big.mkdir()
    file = cluster_file(checkout.parent, 'caches: "$BIG/hf cache", runs: "${BIG}/my runs"')
    words = [checkout / ".venv/bin/python", "-m", "clustertune", "submit", "tiny-oasst2", "--tiny", *SETTINGS, "slurm.nodes=2"]
    words += ["--cluster", str(file), "--to", "train"]
    given = {"BIG": str(big), "CANARY": "canary-77"}
    dry = subprocess.run(
        [*words, "--dry-run", "--verbose"],
        cwd=checkout,
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    done = slurm.run(words, cwd=checkout, env=given)
    run = next(Path(line.removeprefix("run folder: ")) for line in done.stderr.splitlines() if line.startswith("run folder: "))
    job = Job(slurm, run, id=json.loads((run / "jobs" / "jobs.json").read_text())["jobs"][-1]["id"])
    job.until(lambda: all_ranks(job, seen), "the ranks")
    found, log = job.end(), next((run / "logs").glob("*-train-*")).read_text()
    assert found["JobState"] == "COMPLETED", log
    assert run.parent == big / "my runs" / "tiny-oasst2" and (big / "hf cache").is_dir()
    for environment in seen:
        assert environment["HF_HOME"] == str(big / "hf cache")
        assert not [name for name in environment if "CANARY" in name or environment[name] == "canary-77"]
    body = json.loads((run / "run.json").read_text())
    variables = {entry["name"]: entry for entry in body["environment"]}
    assert variables["HF_HOME"]["value"] == str(big / "hf cache") and "storage.caches" not in body["command"]
    ran = next(line for line in log.splitlines() if line.startswith("on every node: ")).removeprefix("on every node: ")
    printed = next(line for line in dry.stdout.splitlines() if line.startswith("$ srun"))
    assert shlex.split(printed[2:]) == shlex.split(ran)
    assert f"HF_HOME={big}/hf cache  # storage.caches of" in dry.stdout
    assert "#SBATCH --account=abc@h100\n#SBATCH --qos=normal\n" in dry.stdout
    assert left_in(checkout) == []


@pytest.mark.jobs
def test_by_hand(slurm: TemporaryCluster, checkout: Path, tmp_path: Path) -> None:
    """``sbatch launch/run.sbatch`` takes over HF_HOME as exported; its log stays where it was submitted."""
    file = cluster_file(tmp_path, f"caches: {tmp_path}/unused, runs: {tmp_path}/runs")
    exported = {"HF_HOME": str(tmp_path / "mine"), "CANARY": "canary-78"}
    words = ["tiny-oasst2", "--tiny", "--to", "prepare", *SETTINGS, "--cluster", str(file)]
    number = slurm.submit("launch/run.sbatch", *words, options=SHAPE, cwd=checkout, env=exported)
    job = Job(slurm, tmp_path, id=number)
    found = job.end()
    log = checkout / f"clustertune-{number}.log"
    assert found["JobState"] == "COMPLETED"
    text = log.read_text()
    log.unlink()
    assert f"HF_HOME={tmp_path}/mine  # exported by" in text and f"says {tmp_path}/unused" in text and "canary-78" not in text
    assert (tmp_path / "mine").is_dir() and not (tmp_path / "unused").exists()
    assert left_in(checkout) == []
