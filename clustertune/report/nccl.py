"""What a run's report shows of its links: the newest nccl-check of the run, or the one that its cluster has."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clustertune.nccl_check.check import RESULT
from clustertune.nccl_check.prolog import FOLDER
from clustertune.nccl_check.result import COLLECTIVES, SCHEMA
from clustertune.nccl_check.sizes import show_size
from clustertune.nccl_check.table import nominal_of, pair_rows, result_rows
from clustertune.report.format import plain

COLUMNS = ["scope", "collective", "#size", "#algbw GB/s", "#busbw GB/s", "#of nominal", "#median", "#spread", "result"]
TONES = {"pass": "good", "warn": "warn", "fail": "warn"}
SHOWN_FINDINGS = 12


def find(run: Path) -> dict[str, Any] | None:
    """The newest result below a run's folder; None where there is none that can be read."""
    found = []
    for path in (run / FOLDER).glob(f"*/{RESULT}"):
        try:
            document = json.loads(path.read_bytes())
            if isinstance(document, dict) and document.get("schema") == SCHEMA:
                found.append((path.stat().st_mtime, document))
        except (OSError, ValueError):
            continue
    return max(found, key=lambda pair: pair[0])[1] if found else None


def of_cluster(cluster: Any) -> dict[str, Any] | None:
    """The result beside the file of the cluster that ``run.json`` names; None where there is none."""
    source = cluster.get("source") if isinstance(cluster, Mapping) else None
    if not isinstance(source, str):
        return None
    from clustertune.config.cluster_schema import Cluster
    from clustertune.errors import UserError
    from clustertune.plan.measured import beside, read_measured

    try:
        path = beside(Cluster.model_validate(dict(cluster)))
        if path is None or not path.is_file():
            return None
        read_measured(path)  # a file that a plan refuses is not shown either
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, UserError):
        return None
    return document if isinstance(document, dict) else None


def section(run: Path, cluster: Any) -> dict[str, Any] | None:
    """What the page's section holds; None where nothing was measured, or what there is cannot be read."""
    document = find(run) or of_cluster(cluster)
    if document is None:
        return None
    try:
        return _content(document)
    except (KeyError, TypeError, ValueError, AttributeError):  # another program's file by this name
        return None


def _content(document: dict[str, Any]) -> dict[str, Any]:
    verdict = document.get("verdict") or {}
    findings = [
        [str(item["status"]).upper(), str(item["rule"]), str(item["where"]), str(item["found"]), str(item["fix"])]
        for item in verdict.get("findings", [])
        if item["status"] in ("fail", "warn")
    ]
    document = {**document, "results": [{"median_s": 0.0, "spread": 0.0, "correct": True, **e} for e in document["results"]]}
    return {
        "headline": str(verdict.get("headline", "")),
        "tone": TONES.get(str(verdict.get("status")), "plain"),
        "subtitle": (
            f"{document['backend']} over {document['transport']}, {document['nodes']} nodes with "
            f"{document['gpus_per_node']} ranks each, {document['date']}; GB/s of 10^9 bytes, as nccl-tests defines them"
        ),
        "svg": draw(document),
        "columns": COLUMNS,
        "rows": list(result_rows(document)),
        "pairs": list(pair_rows(document)),
        "findings": findings[:SHOWN_FINDINGS],
        "environment": [[name, plain(value)] for name, value in (document.get("environment") or {}).items()],
    }


def draw(document: Mapping[str, Any]) -> str:
    """busbw over size for every collective over all ranks (inside a node where there is one), with the nominal line."""
    from clustertune.report import plots

    scope = next((s for s in ("world", "intra", "inter") if any(e["scope"] == s for e in document["results"])), "")
    series = []
    for name in COLLECTIVES:
        points = sorted(
            (int(e["bytes"]), float(e["busbw_gb_s"]))
            for e in document["results"]
            if (e["scope"], e["collective"]) == (scope, name) and e["bytes"] > 0 and math.isfinite(e["busbw_gb_s"])
        )
        if points:
            series.append((name, points))
    if not series:
        return ""
    where = "all ranks" if scope != "intra" else "the ranks of a node"
    return plots.draw_sizes(
        f"busbw over size, {where}", series, unit=f"busbw, GB/s, {where}", nominal=nominal_of(document, scope), show=show_size
    )
