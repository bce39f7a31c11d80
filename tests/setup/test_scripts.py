"""The rendered folders: what is in them, that shellcheck and the machine take the scripts, and what the scripts leave alone."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.load import known_clusters, load_cluster
from clustertune.setup.setup_machine import tool
from clustertune.testbed.spec import search_path
from tests.command import REPO, run

NODE = ("--cluster", "rno-rtxpro6000", "--node", "rno-it-gpu0007-1")
MACHINE = """
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1"/up "$1"/work "$1"/lib "$1"/spool "$1"/log
mount -t overlay overlay -o lowerdir=/etc,upperdir="$1"/up,workdir="$1"/work /etc
mount --bind "$1"/lib /var/lib; mount --bind "$1"/spool /var/spool; mount --bind "$1"/log /var/log
cd "$2"
eval "$3"
"""
"""A machine of its own: what is written to /etc and /var is gone afterwards."""


def on_a_machine(tmp_path: Path, commands: str) -> subprocess.CompletedProcess[str]:
    """What the commands print, run as root in ``tmp_path`` with an /etc that is thrown away."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root and unshare for a machine of its own")
    (tmp_path / "machine").mkdir()
    argv = ["unshare", "--mount", "bash", "-c", MACHINE, "x", str(tmp_path / "machine"), str(tmp_path), commands]
    env = {**os.environ, "PATH": search_path()}
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env=env)


def storage_cluster(folder: Path) -> Path:
    """A cluster file of this machine alone: one brick, a folder that is bound to where users see it."""
    brick = {"node": socket.gethostname(), "path": f"{folder}/disk", "mount": f"{folder}/brick", "filesystem": "xfs", "tb": 1}
    text: dict[str, Any] = {
        "name": "test",
        "nodes": [{"name": socket.gethostname(), "address": "10.9.0.1", "roles": ["compute", "nfs"]}],
        "compute": {"gpus": 0, "cores": 2, "threads": 2, "memory_gb": 4},
        "network": {"kind": "none"},
        "storage": {"bricks": [brick], "shared": brick["mount"], "staging": {"path": f"{folder}/stage", "gb": 1}},
    }
    path = folder / "cluster.yaml"
    path.write_text(json.dumps(text))
    return path


@pytest.mark.parametrize("cluster", known_clusters())
def test_every_cluster_of_the_project(cluster: str, tmp_path: Path) -> None:
    """Each role's folder: files for what its script names, and no word for shellcheck."""
    loaded = load_cluster(cluster)
    kinds = ["slurm", *(["storage"] if loaded.storage.bricks else [])]
    nodes = {host.roles: host.name for host in loaded.nodes}.values()
    for kind, node in ((kind, node) for kind in kinds for node in nodes):
        out = tmp_path / node / kind
        done = run("setup", kind, "--cluster", cluster, "--node", node, "--out", out, "--json")
        assert done.code == 0, done.err
        assert done.json["files"] == sorted(path.name for path in out.iterdir())
        script = (out / f"setup-{kind}.sh").read_text()
        assert all(name == f"setup-{kind}.sh" or name in script for name in done.json["files"])
    checker = REPO / ".venv/bin/shellcheck"
    if not checker.exists():
        pytest.skip("needs shellcheck (make venv)")
    done_check = subprocess.run([checker, *tmp_path.rglob("*.sh")], capture_output=True, text=True, check=False)
    assert done_check.returncode == 0, done_check.stdout


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    """Names such as hosts and fstab would be written over; the same folder again is setup's own."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/fstab").write_text("mine\n")
    for out in (tmp_path / "notes", "/etc", "/etc/absent", tmp_path / "notes/fstab"):
        done = run("setup", "storage", *NODE, "--out", out)
        assert done.code == 2 and "--out" in done.err
    assert (tmp_path / "notes/fstab").read_text() == "mine\n"
    assert [run("setup", "storage", *NODE, "--out", tmp_path / "own").code for _ in range(2)] == [0, 0]
    assert run("setup", "slurm", *NODE, "--out", tmp_path / "own").code == 0


def test_the_storage_script_on_a_machine(tmp_path: Path) -> None:
    """Other lines of fstab stay, a second run changes nothing, and the brick is mounted with its folders."""
    made = run("setup", "storage", "--cluster", storage_cluster(tmp_path), "--out", tmp_path / "out")
    assert made.code == 0, made.err
    done = on_a_machine(
        tmp_path,
        """
        mkdir disk
        printf '# mine\\n/dev/nowhere /nowhere xfs noauto 0 0' > /etc/fstab
        out/setup-storage.sh
        cp /etc/fstab first; findmnt -n -o OPTIONS --mountpoint "$PWD/brick" > mounted
        out/setup-storage.sh
        cmp first /etc/fstab; ls /etc/fstab.* | wc -l > copies; stat -c '%a %n' brick/models stage > modes
        """,
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "first").read_text().splitlines()
    assert lines[:2] == ["# mine", "/dev/nowhere /nowhere xfs noauto 0 0"] and len(lines) == 5
    assert (tmp_path / "mounted").read_text() and (tmp_path / "copies").read_text().strip() == "1"
    assert (tmp_path / "modes").read_text().split("\n")[:2] == ["1777 brick/models", "1777 stage"]


@pytest.mark.parametrize("text", ["/dev/sdx {}/brick xfs defaults 0 0\n", "a\n# BEGIN clustertune\nmine\n"])
def test_the_storage_script_refuses_to_lose_a_line(tmp_path: Path, text: str) -> None:
    """A line of others for our mount point, and a marker without its end: fstab stays as it is."""
    assert run("setup", "storage", "--cluster", storage_cluster(tmp_path), "--out", tmp_path / "out").code == 0
    (tmp_path / "before").write_text(text.format(tmp_path))
    done = on_a_machine(
        tmp_path, "mkdir disk; cp before /etc/fstab; out/setup-storage.sh || echo code $?; cmp before /etc/fstab"
    )
    assert done.returncode == 0 and "code 2" in done.stdout, done.stderr


def test_the_slurm_script_on_a_machine(tmp_path: Path) -> None:
    """Owners and modes; a foreign slurm.conf is kept as a dated copy; a second run makes none."""
    if not tool("slurmctld"):
        pytest.skip("needs slurmctld and its user")
    assert run("setup", "slurm", *NODE, "--accounting", "--out", tmp_path / "out").code == 0
    done = on_a_machine(
        tmp_path,
        """
        mkdir -p /etc/slurm; echo mine > /etc/slurm/slurm.conf; printf '127.0.0.1 localhost' > /etc/hosts
        out/setup-slurm.sh
        out/setup-slurm.sh
        cmp out/slurm.conf /etc/slurm/slurm.conf; cat /etc/slurm/slurm.conf.*; head -1 /etc/hosts
        grep -c rno-it-gpu0008-1 /etc/hosts
        stat -c '%U %a %n' /var/spool/slurmd /var/log/slurm /etc/slurm/slurm.conf
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "mine", "127.0.0.1 localhost", "1",
        "root 755 /var/spool/slurmd", "slurm 755 /var/log/slurm", "root 644 /etc/slurm/slurm.conf",
    ]  # fmt: skip


def test_exportfs_takes_the_lines(tmp_path: Path) -> None:
    """Its own parser, which refuses an unknown word."""
    if not tool("exportfs"):
        pytest.skip("needs exportfs")
    assert run("setup", "storage", *NODE, "--out", tmp_path / "out").code == 0
    done = on_a_machine(
        tmp_path,
        """
        mkdir -p /var/lib/nfs /etc/exports.d; touch /var/lib/nfs/etab /var/lib/nfs/rmtab; : > /etc/exports
        cp out/exports /etc/exports.d/x.exports; exportfs -ar 2>&1 | grep -c 'unknown keyword' || true
        sed 's/sec=sys/sec=sys,nonsense/' out/exports > /etc/exports.d/x.exports; exportfs -ar 2>&1 | grep -c nonsense || true
        """,
    )
    assert done.stdout.splitlines()[0] == "0" and done.stdout.splitlines()[1] != "0", done.stdout + done.stderr
