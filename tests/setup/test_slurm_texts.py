"""Slurm's files as texts: what stands in them for usual and odd clusters, and what Slurm's own parser says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clustertune.cluster.load import known_clusters, load_cluster
from clustertune.errors import UserError
from clustertune.launch.slurm import expand_hosts
from clustertune.setup import slurm_files as slurm
from clustertune.setup.rendered import all_texts
from clustertune.setup.rendered import slurm as render_slurm
from clustertune.setup.setup_machine import tool
from clustertune.setup.verify import parsed
from tests.setup.slurm_clusters import ODD, load


@pytest.mark.parametrize("name", [*known_clusters(), *ODD])
def test_clusters_keep_every_name_and_address(name: str, tmp_path: Path) -> None:
    """A thousand nodes, other widths, hyphens: nobody is lost or gets another's address, and no line is endless."""
    cluster = load(tmp_path, ODD[name]) if name in ODD else load_cluster(name)
    if cluster.slurm is None or cluster.controller is None:
        return
    lines = slurm.conf_lines(cluster, version=None, accounting=False)
    assert max(map(len, lines)) < 2000
    found = []
    for names, addresses in slurm.node_lines(cluster.compute_nodes):
        left = expand_hosts(names)
        right = addresses.split(",") if ":" in addresses else expand_hosts(addresses) if addresses else left
        found += list(zip(left, right, strict=True))
    assert found == [(host.name, host.address) for host in cluster.compute_nodes]
    partition = next(line for line in lines if line.startswith("PartitionName="))
    nodes = re.search(r" Nodes=(\S+)", partition)
    assert nodes
    assert nodes[1] == "ALL" or expand_hosts(nodes[1]) == [host.name for host in cluster.compute_nodes]


@pytest.mark.parametrize("odd", ["", *ODD])
def test_slurms_own_parser_takes_the_files(odd: str, tmp_path: Path) -> None:
    """The generated keys, nodes and GPUs through slurmd -G: one unknown key makes every command of a cluster fail."""
    if not tool("slurmd"):
        pytest.skip("not installed: slurmd (apt-get install)")
    clusters = [load(tmp_path, ODD[odd])] if odd else [load_cluster(name) for name in known_clusters()]
    for cluster in clusters:
        for accounting in (False, True):
            texts = all_texts(cluster, accounting=accounting)
            assert parsed(cluster, texts) == ""


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("slurm", "PreemptParametersX=send_user_signal"), ("slurm", "NodeName=x CPUs=two"),
        ("gres", "Name=gpu Fileses=/dev/null"), ("cgroup", "ConstrainEverything=yes"),
    ],
)  # fmt: skip
def test_the_parser_refuses_what_is_wrong(name: str, line: str) -> None:
    """A check that takes everything is none; and its words name the file, not the folder it was tried in."""
    if not tool("slurmd"):
        pytest.skip("not installed: slurmd (apt-get install)")
    cluster, path = load_cluster("rno-rtxpro6000"), f"/etc/slurm/{name}.conf"
    texts = all_texts(cluster)
    found = parsed(cluster, {**texts, path: texts[path] + line + "\n"})
    assert "/tmp" not in found and re.search(r"unrecognized key|CPUs|[Pp]arsing error", found)


CORES = [
    ("socket by socket", {}, ["0-15", "0-15", "16-31", "16-31"], "socket by socket"),
    (
        "CPUs numbered in turn",
        {"numa_cpus": [",".join(map(str, range(n, 64, 2))) for n in (0, 1)]},
        ["0-15"] * 2 + ["16-31"] * 2,
        "",
    ),
    ("second NUMA node has the first CPUs", {"numa_cpus": ["16-31,48-63", "0-15,32-47"]}, ["16-31"] * 2 + ["0-15"] * 2, ""),
    ("GPUs in turn", {"numa_gpus": [[0, 2], [1, 3]]}, ["0-15", "16-31", "0-15", "16-31"], ""),
    ("no threads", {"threads": 32, "numa_cpus": ["0-15", "16-31"]}, ["0-15"] * 2 + ["16-31"] * 2, ""),
    ("four NUMA nodes", ODD["four NUMA nodes"]["compute"], ["0-15", "0-15", "16-31", "16-31"], "widened"),
    ("one socket", {"sockets": 1}, [""] * 4, "one socket"),
    ("not told", {"numa_cpus": None}, [""] * 4, "compute.numa_cpus"),
    ("GPUs not told", {"numa_gpus": None}, [""] * 4, "compute.numa_gpus"),
    ("half a core", {"numa_cpus": ["0-14,32-47", "15-31,48-63"]}, [""] * 4, "no whole number"),
]


@pytest.mark.parametrize(("compute", "cores", "expected"), [row[1:] for row in CORES], ids=[row[0] for row in CORES])
def test_cores_next_to_gpus(compute: dict[str, object], cores: list[str], expected: str, tmp_path: Path) -> None:
    """gres.conf counts cores from the first socket on: thread numbers of Linux there would name cores that do not exist."""
    cluster = load(tmp_path, {"compute": compute})
    found, note = slurm.gpu_cores(cluster.compute)
    assert found == cores
    assert expected in note


def test_a_cluster_without_slurm_or_found_by_looking(tmp_path: Path) -> None:
    """There is nothing to make files from."""
    with pytest.raises(UserError, match="slurm"):
        cluster = load(tmp_path, {"slurm": None, "nodes": [{"name": "a", "address": "10.9.9.9", "roles": ["compute"]}]})
        render_slurm(cluster, cluster.nodes[0])
    local = load(tmp_path).model_copy(update={"name": "local"})
    with pytest.raises(UserError, match="not a plan for it"):
        render_slurm(local, local.nodes[0])
