"""What root runs holds nothing that a name brought; and ``setup --out`` replaces only what setup wrote."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.errors import UserError
from clustertune.setup import rendered
from tests.command import run
from tests.setup import slurm_clusters

NAMES = ["a\ntouch HERE\n", "a\r\ntouch HERE", "a$(touch HERE)", "a`touch HERE`", "a'; touch HERE; '", "a\u2028touch HERE"]


@pytest.mark.parametrize("name", NAMES)
def test_the_path_of_a_cluster_file_is_no_command(name: str, tmp_path: Path) -> None:
    """Each line of a script is run as root: no file name adds one."""
    plain, odd = tmp_path / "plain", tmp_path / name.replace("HERE", "there")
    plain.mkdir()
    odd.mkdir()
    texts = []
    for folder in (plain, odd):
        cluster = load_cluster(str(slurm_clusters.write(folder)))
        texts.append(rendered.slurm(cluster, cluster.nodes[0]).files[rendered.SLURM_SCRIPT])
    commands = [[line for line in text.splitlines() if not line.startswith("#")] for text in texts]
    assert commands[0] == commands[1]
    subprocess.run(["bash", "-n"], input=texts[1].encode(), check=True)


@pytest.mark.parametrize("link", ["the folder", "a file"])
def test_setup_follows_no_link(link: str, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()
    (other / "kept").write_text("mine")
    if link == "the folder":
        out.symlink_to(other)
    else:
        out.mkdir()
        (out / rendered.SLURM_SCRIPT).write_text("")
        (out / "slurm.conf").symlink_to(other / "kept")
    cluster = load_cluster(str(slurm_clusters.write(tmp_path)))
    with pytest.raises(UserError):
        rendered.slurm(cluster, cluster.nodes[0]).write(out)
    assert (other / "kept").read_text() == "mine" and len(list(other.iterdir())) == 1


def test_setup_replaces_what_it_wrote_and_nothing_else(tmp_path: Path) -> None:
    out, cluster = tmp_path / "out", load_cluster(str(slurm_clusters.write(tmp_path)))
    made = rendered.slurm(cluster, cluster.nodes[0])
    made.write(out)
    made.write(out)
    script = out / rendered.SLURM_SCRIPT
    ours = script.read_text()
    script.write_text(f"{ours}umount /mine\n")
    with pytest.raises(UserError, match=rendered.SLURM_SCRIPT):
        made.write(out)
    script.write_text(ours)
    (out / "slurm.conf").write_text("edited by hand")
    with pytest.raises(UserError, match=r"slurm\.conf"):
        made.write(out)
    assert (out / "slurm.conf").read_text() == "edited by hand"
    (out / "slurm.conf").unlink()
    made.write(out)
    assert (out / "slurm.conf").read_text() == made.files["slurm.conf"]


@pytest.mark.parametrize("subnet", ["0.0.0.0/0", "::/0", "0.0.0.0/1", "128.0.0.0/1", "8.0.0.0/8", "10.0.0.0/7", "2000::/3"])
def test_a_subnet_of_strangers_is_refused(subnet: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_cluster(str(slurm_clusters.write(tmp_path, {"network": {"subnet": subnet}})))
    assert any(problem.key == "network.subnet" and problem.fix for problem in caught.value.problems)


@pytest.mark.parametrize("value", [1e308, -1e308, 10**400, 10**30, 1e-320, float("nan"), float("inf"), -1])
@pytest.mark.parametrize("key", ["compute.memory_gb", "compute.cores", "network.gbit", "compute.mtbf_hours"])
def test_a_number_that_no_machine_has_is_refused_with_its_key(key: str, value: Any, tmp_path: Path) -> None:
    section, _, name = key.partition(".")
    with pytest.raises(UserError) as caught:
        load_cluster(str(slurm_clusters.write(tmp_path, {section: {name: value}})))
    assert any(problem.key == key and problem.file for problem in caught.value.problems)


@pytest.mark.parametrize("words", [["show"], ["plan"], ["report"], ["watch", "--once"], ["runs"], ["setup", "slurm", "--out"]])
def test_a_path_that_is_not_utf_8_is_named(words: list[str], tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    done = run(*words, folder)
    assert done.code == 2 and "internal error" not in done.err and "Traceback" not in done.err and "UTF-8" in done.err
