"""The verdict over a result of ``nccl-check`` and NCCL's logs, without side effects.

``python3 -m clustertune.nccl_check.judge`` writes docs/nccl-verdicts.md on stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from clustertune.check.links import INTERFACES, LinkContext, names, ranked
from clustertune.check.log_read import Log, read
from clustertune.check.nodes import JobNodes
from clustertune.check.report import grouped, run
from clustertune.check.rule import FAIL, LINKS, NODES, PASS, UNKNOWN, WARN, Finding, in_order, worst


def judge(document: Mapping[str, Any], logs: Mapping[str, str]) -> list[Finding]:
    """What is wrong with a cluster's collectives, worst first; every rule that applies says what it saw.

    ``document`` as in :mod:`clustertune.nccl_check.result`, every key optional: what is absent is unknown. ``logs``: NCCL's
    logs by name, of any version. Never raises.
    """
    return judge_log(document, read(logs.values()))


def judge_log(document: Mapping[str, Any], log: Log) -> list[Finding]:
    """As :func:`judge`, of logs that were read already."""
    context = LinkContext(document, log)
    several = JobNodes(context.machines)
    found: list[Finding] = []
    for one in ranked():
        if one.subject == LINKS:
            found += one(context)
        elif context.backend == "nccl" or (context.nodes > 1 and one.rule.id in INTERFACES.split()):
            subjects: Sequence[Any] = [several] if one.subject == NODES else several.machines
            seen = [item for subject in subjects for item in run([one], subject, getattr(subject, "where", ""))]
            found += [replace(item, where=names(places)) for item, places in grouped(seen)]
    return in_order(found)


def headline(document: Mapping[str, Any], log: Log, findings: Sequence[Finding]) -> str:
    """The verdict in one plain sentence."""
    status = worst(findings)
    if status in (FAIL, WARN):
        first = next(item for item in findings if item.status == status)
        more = sum(item.status in (FAIL, WARN) for item in findings) - 1
        where = f" ({first.where})" if first.where and first.where not in first.found else ""
        return f"{status.upper()}: {first.found}{where}" + (f"; {more} more finding{'s' if more > 1 else ''}" if more else "")
    context = LinkContext(document, log)
    parts = []
    if context.nodes and context.ranks:
        many = f"{context.nodes} nodes" if context.nodes > 1 else "1 node"
        of = f"{many} of {context.ranks} rank{'s' if context.ranks > 1 else ''}"
        # The log of one rank, before NCCL logged how many are on a node.
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
    text = " ".join(parts) + (": " if parts and speeds else "") + "; ".join(speeds)
    if why := context.text("not_judged"):
        return f"UNKNOWN: {why}{f' (measured: {text})' if text else ''}"
    cut = next((item.found for item in findings if item.rule == "collective-hung" and item.status == UNKNOWN), "")
    if cut:
        return f"UNKNOWN: {text}{', but ' if text else ''}{cut}"
    if not text and not any(item.status == PASS for item in findings):
        return "UNKNOWN: there is nothing here to judge"
    return f"PASS: {text or 'nothing to fix'}"


def page() -> str:
    """The rules as a page of the docs."""
    rules = [one.rule for one in ranked() if one.subject == LINKS]
    hosts = [f"`{one.rule.id}`" for one in ranked() if one.subject != LINKS]
    lines = [
        "# What nccl-check judges",
        "",
        "Written from the rules by `python3 -m clustertune.nccl_check.judge`. Each rule says `pass`, `warn` "
        "or `fail`, `unknown`",
        "where what it looks at could not be seen, and nothing where it does not apply. The verdict is the worst of them, or",
        "`unknown` where nothing could be judged. Exit codes, as of the doctor: 0 pass, 1 warnings or unknown, 2 failures.",
        "Rules named in `doctor: {ignore: [...]}` of the cluster file do not count. The same rules judge recorded logs of any",
        "size and number alone (`-` is standard input):",
        "",
        "```sh",
        "clustertune nccl-check --logs nccl.log",
        "```",
        "",
        f"These {len(rules)} rules look at what was measured and at NCCL's log, what is closest to a cause first. What",
        "the nodes report of themselves is judged by rules of the [doctor](doctor.md), with the same verdict as there:",
        f"{', '.join(hosts)}.",
        "",
    ]
    for one in rules:
        lines += [f"## {one.id}", "", f"{one.title}. {one.why}", "", f"What to do: {one.fix}.", "", f"<{one.link}>", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(page())
