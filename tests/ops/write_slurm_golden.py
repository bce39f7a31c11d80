"""Writes the golden Slurm files of the shipped clusters: ``python -m tests.ops.write_slurm_golden``, then read the diff."""

from __future__ import annotations

from pathlib import Path

from clustertune.config.cluster import known_clusters, load_cluster
from clustertune.ops.slurm.planning import all_texts, make_plan

GOLDEN = Path("tests", "golden")


def golden(name: str) -> str:
    """Every file of a cluster, one after the other; then those that accounting changes or adds."""
    cluster = load_cluster(name)
    without, with_it = (all_texts(make_plan(cluster, cluster.compute_nodes[0], accounting=on)) for on in (False, True))
    other = {f"{path} (--accounting)": text for path, text in with_it.items() if without.get(path) != text}
    return "".join(f"==> {path} <==\n{text}\n" for path, text in {**without, **other}.items())


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    for name in known_clusters():
        (root / GOLDEN / f"slurm-{name}.txt").write_text(golden(name))


if __name__ == "__main__":
    main()
