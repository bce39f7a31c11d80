"""A job on nodes that are not those of its cluster file."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.launch import allocation, rendezvous
from tests.launch.machines import machine


def test_what_is_missing_is_told_at_once(tmp_path: Path) -> None:
    """Each with its key: the container failed without its name, the interface only after the preparation."""
    container = {"runtime": "apptainer", "image": str(tmp_path / "train.sif")}
    cluster = machine(container=container, network={"kind": "ethernet", "interface": "bond-none"})
    found = allocation.first_node_problems(cluster, nodes=2, trains=True)
    assert {problem.key for problem in found} >= {"container.image", "network.interface"}
    assert all(problem.fix and problem.file == "a test" for problem in found)


def test_what_is_not_needed_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node meets nobody, and a job without the training neither."""
    cluster = machine(network={"kind": "ethernet", "interface": "bond-none"})
    assert allocation.first_node_problems(cluster, nodes=1, trains=True) == []
    assert allocation.first_node_problems(cluster, nodes=2, trains=False) == []
    (tmp_path / "bond-none").mkdir()
    monkeypatch.setattr(rendezvous, "INTERFACES", tmp_path)
    assert allocation.first_node_problems(cluster, nodes=2, trains=True) == []


def test_the_runtime_must_be_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "No such file" said nothing of the container."""
    image = tmp_path / "train.sif"
    image.touch()
    cluster = machine(container={"runtime": "apptainer", "image": str(image)})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [problem.key for problem in allocation.first_node_problems(cluster, nodes=1, trains=False)] == ["container.runtime"]
    program = tmp_path / "apptainer"
    program.touch(mode=0o755)
    assert allocation.first_node_problems(cluster, nodes=1, trains=False) == []
    cluster = machine(container={"runtime": "apptainer", "image": str(image), "program": str(tmp_path / "elsewhere/apptainer")})
    assert "elsewhere/apptainer" in allocation.first_node_problems(cluster, nodes=1, trains=False)[0].message


def test_pyxis_is_looked_for_in_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the plugin srun ends with "unrecognized option", after the preparation; a registry's image is not a file."""
    cluster = machine(container={"runtime": "pyxis", "image": "docker://a/b@sha256:" + "a" * 64})
    srun = tmp_path / "srun"
    monkeypatch.setenv("PATH", str(tmp_path))
    for text, keys in (("--container-image=x", []), ("--nodes=N", ["container.runtime"])):
        srun.write_text(f"#!/bin/sh\necho '{text}'\n")
        srun.chmod(0o755)
        assert [problem.key for problem in allocation.first_node_problems(cluster, nodes=1, trains=False)] == keys
