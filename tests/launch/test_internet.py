"""Nodes that reach no Hub: jobs are told so, and what they would ask for is refused before the queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.cluster.load import CLUSTERS, load_cluster
from clustertune.launch import cluster_paths
from tests.command import Done, run

REVISION = {"models": "0e9e39f249a16976918f6564b8830bc894c89659", "datasets": "68958e98267f5fb4a52a03ebcdae4ae59213fa7c"}


def cluster(folder: Path, internet: str) -> Path:
    """The cluster of the reference job with other nodes' network."""
    text = (CLUSTERS / "rno-rtxpro6000.yaml").read_text().replace("/pool", str(folder))
    path = folder / "place.yaml"
    path.write_text(
        text.replace("network: {", f"network: {{internet: {internet}, ", 1).replace("name: rno-rtxpro6000", "name: place")
    )
    return path


def submit(folder: Path, internet: str, *words: str) -> Done:
    return run(
        "submit", "llama8b-lima", *words, "--cluster", cluster(folder, internet), "--dry-run", "--run-dir", folder / "run"
    )


@pytest.mark.parametrize("internet", ["login", "none"])
def test_what_nobody_fetched_is_refused_with_the_command_that_does(internet: str, tmp_path: Path) -> None:
    """Model and data at once; not where the Hub is reached, of a tiny run, or once both are in the cache."""
    done = submit(tmp_path, internet)
    assert done.code == 2 and "model.name" in done.err and "data.name" in done.err and "clustertune stage" in done.err
    assert submit(tmp_path, "all").code == submit(tmp_path, internet, "--tiny").code == 0
    hub = next(
        Path(one.value) for one in cluster_paths.of_jobs(load_cluster(str(cluster(tmp_path, "all")))) if one.name == "HF_HOME"
    )
    for kind, name in (("models", "meta-llama--Llama-3.1-8B-Instruct"), ("datasets", "GAIR--lima")):
        (hub / "hub" / f"{kind}--{name}" / "snapshots" / REVISION[kind]).mkdir(parents=True)
    assert submit(tmp_path, internet).code == 0


def test_jobs_ask_no_server(tmp_path: Path) -> None:
    told = {one.name: one.value for one in cluster_paths.of_jobs(load_cluster(str(cluster(tmp_path, "login"))))}
    free = {one.name: one.value for one in cluster_paths.of_jobs(load_cluster(str(cluster(tmp_path, "all"))))}
    assert told.items() >= cluster_paths.OFFLINE.items() and not free.keys() & cluster_paths.OFFLINE.keys()
