"""The source document's stack to the version: its image is built, and the tiny recipe runs in it, twice with the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.containers import image_build as images
from clustertune.containers import pins
from clustertune.launch import container
from tests import tree
from tests.containers.in_sif import in_sif
from tests.containers.test_images import build
from tests.slurm_job import SETTINGS

pytestmark = [pytest.mark.containers, pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``make build-sif DEFINITION=reference BASE=standin``."""
    images.find_apptainer()
    return build(
        "build-sif", "--definition", "reference", "--base", "standin", "--out", tmp_path_factory.mktemp("sif") / "r.sif"
    )


def test_its_own_test(reference: dict[str, Any]) -> None:
    """Versions, two ranks that add, a few steps of LoRA."""
    command = in_sif(images.find_apptainer(), Path(reference["file"]), "python", images.SELFTEST)
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, version in pins.read()[pins.REF].items():
        assert f"{name} {version}" in done.stdout, done.stdout


def test_the_tiny_chain_twice(reference: dict[str, Any], tmp_path: Path) -> None:
    """TRL 1.2.0 draws LoRA's matrices without a seed of its own: two runs of one recipe would differ from the first step on."""
    file, program = tmp_path / "here.yaml", images.find_apptainer()
    options = "--userns" if os.geteuid() == 0 else ""
    file.write_text(
        f"name: here\nnodes: [{{name: {os.uname().nodename}, address: 127.0.0.1, roles: [login, compute]}}]\n"
        "compute: {gpus: 0, cores: 2, threads: 2, memory_gb: 8}\nnetwork: {kind: none}\n"
        f"container: {{runtime: apptainer, image: {reference['file']}, program: {program}, options: [{options}]}}\n"
    )

    def chain(name: str, *upto: str) -> bytes:
        run = tmp_path / name
        run.mkdir()
        words = ["recipes/tiny-oasst2", "--tiny", *upto, *SETTINGS[1:], "train.max_steps=2", "--run-dir", str(run)]
        started = [sys.executable, "-m", "clustertune", "run", *words]
        command = list(container.wrap(started, load_cluster(str(file)), binds=[run], gpus=False).command)
        command[command.index("exec") + 1 : command.index("exec") + 1] = ["--net", "--network=none"]
        # Of the home folder the Hub's cache alone is bound, which the evaluation writes into.
        environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        done = subprocess.run(command, cwd=tree.REPO, env=environ, capture_output=True, text=True, timeout=1500, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return (run / "adapter" / "adapter_model.safetensors").read_bytes()

    assert chain("whole") == chain("again", "--to", "export")
    assert (tmp_path / "whole" / "report.html").exists()
