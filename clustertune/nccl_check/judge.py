"""The verdict over a result of ``nccl-check`` and NCCL's logs: pure, and of the standard library (Python 3.8 or later).

``python3 -m clustertune.nccl_check.judge`` writes docs/nccl-verdicts.md on stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from clustertune.health import FAIL, PASS, UNKNOWN, WARN, Finding, in_order, worst
from clustertune.nccl_check import rules_net, rules_node, rules_path, rules_run, rules_software, rules_speed
from clustertune.nccl_check.log_found import Log
from clustertune.nccl_check.log_read import read
from clustertune.nccl_check.rules import Context, page

CHECKS = (
    *rules_path.CHECKS[:1],
    rules_software.driver,
    *rules_run.CAUSES[:6],
    *rules_node.CHECKS[:5],
    *rules_net.CHECKS,
    *rules_path.CHECKS[1:],
    *(one for one in rules_software.CHECKS if one not in (rules_software.driver, rules_software.debug_variables)),
    *rules_node.CHECKS[5:],
    *rules_run.CAUSES[6:],
    *rules_speed.CHECKS,
    *rules_run.EFFECTS,
    rules_software.debug_variables,
)
"""Every rule. Of findings that are alike bad the first is the headline: what is closest to a cause stands first."""
RULES = tuple(one.rule for one in CHECKS)


def judge(document: Mapping[str, Any], logs: Mapping[str, str]) -> list[Finding]:
    """What is wrong with a cluster's collectives, worst first; every rule that applies says what it saw.

    ``document`` as in :mod:`clustertune.nccl_check.result`, every key optional: what is absent is unknown. ``logs``: NCCL's
    logs by name, of any version. Never raises.
    """
    return judge_log(document, read(logs.values()))


def judge_log(document: Mapping[str, Any], log: Log) -> list[Finding]:
    """As :func:`judge`, of logs that were read already."""
    context = Context(document, log)
    return in_order(finding for one in CHECKS for finding in one.findings(context))


def headline(document: Mapping[str, Any], log: Log, findings: Sequence[Finding]) -> str:
    """The verdict in one plain sentence."""
    status = worst(findings)
    if status in (FAIL, WARN):
        first = next(item for item in findings if item.status == status)
        more = sum(item.status in (FAIL, WARN) for item in findings) - 1
        where = f" ({first.where})" if first.where and first.where not in first.found else ""
        return f"{status.upper()}: {first.found}{where}" + (f"; {more} more finding{'s' if more > 1 else ''}" if more else "")
    context = Context(document, log)
    parts = []
    if context.nodes and context.ranks:
        many = f"{context.nodes} nodes" if context.nodes > 1 else "1 node"
        of = f"{many} of {context.ranks} rank{'s' if context.ranks > 1 else ''}"
        # The log of one rank, before NCCL said how many are on a node.
        parts.append(f"{log.ranks} ranks on {many}" if log.ranks > context.nodes * context.ranks else of)
    over = ", ".join(sorted(log.transports)) or context.text("transport")
    if over:
        parts.append(f"over {over}")
    elif log.networks:
        version = f" {log.version}" if log.version else ""
        parts.append(f"with NCCL{version} and the network {', '.join(sorted(log.networks))}")
    elif context.backend:
        parts.append(f"with {context.backend}")
    speeds = [item.found for item in findings if item.rule in ("inter-speed", "intra-speed") and item.status in (PASS, UNKNOWN)]
    said = " ".join(parts) + (": " if parts and speeds else "") + "; ".join(speeds)
    if why := context.text("not_judged"):
        return f"UNKNOWN: {why}{f' (measured: {said})' if said else ''}"
    cut = next((item.found for item in findings if item.rule == "collective-hung" and item.status == UNKNOWN), "")
    if cut:
        return f"UNKNOWN: {said}{', but ' if said else ''}{cut}"
    if not said and not any(item.status == PASS for item in findings):
        return "UNKNOWN: there is nothing here to judge"
    return f"PASS: {said or 'nothing to mend'}"


if __name__ == "__main__":
    sys.stdout.write(page(CHECKS))


__all__ = ["CHECKS", "FAIL", "PASS", "RULES", "UNKNOWN", "WARN", "headline", "judge", "judge_log"]
