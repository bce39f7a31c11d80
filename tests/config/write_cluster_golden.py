"""Writes the golden documents of the shipped clusters: ``python -m tests.config.write_cluster_golden``, then read the diff."""

from __future__ import annotations

import json
from pathlib import Path

from clustertune.config.cluster import known_clusters, load_cluster
from clustertune.config.cluster_show import as_json

GOLDEN = Path("tests", "golden")


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    for name in known_clusters():
        text = json.dumps(as_json(load_cluster(name)), indent=1) + "\n"
        (root / GOLDEN / f"cluster-{name}.json").write_text(text)


if __name__ == "__main__":
    main()
