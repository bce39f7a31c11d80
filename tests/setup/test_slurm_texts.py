"""Slurm's files as texts: what stands in them for usual and odd clusters, and what Slurm's own parser says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clustertune.cluster.load import known_clusters, load_cluster
from clustertune.errors import UserError
from clustertune.setup.rendered import all_texts, parsed
from clustertune.setup.rendered import slurm as render_slurm
from clustertune.setup.setup_machine import tool
from tests.setup.slurm_clusters import ODD, load


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


def test_a_cluster_without_slurm_or_found_by_looking(tmp_path: Path) -> None:
    """There is nothing to make files from."""
    with pytest.raises(UserError, match="slurm"):
        cluster = load(tmp_path, {"slurm": None, "nodes": [{"name": "a", "address": "10.9.9.9", "roles": ["compute"]}]})
        render_slurm(cluster, cluster.nodes[0])
    local = load(tmp_path).model_copy(update={"name": "local"})
    with pytest.raises(UserError, match="not a plan for it"):
        render_slurm(local, local.nodes[0])
