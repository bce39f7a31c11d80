"""The verdict over a result of ``nccl-check`` and NCCL's logs, without side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from clustertune.check.nodes import JobNodes
from clustertune.check.report import grouped, run
from clustertune.check.rule import FAIL, LINKS, MACHINE, NODES, PASS, UNKNOWN, WARN, Check, Finding, checks, in_order, worst
from clustertune.nccl_check.link_context import LinkContext, names
from clustertune.nccl_check.nccl_log import Log, read

INTERFACES = ("wrong-interface", "interface", "interface-subnet", "bond", "mtu", "nodes-network")
"""The rules of interfaces, which gloo uses too."""
VERDICT = f"""
socket-fallback driver duplicate-gpu gpu-missing nccl-memory gpu-fault nvls imex p2p-hang p2p-refused small-shm shm-lost
low-memlock shm memlock interface-down {" ".join(INTERFACES)} net-plugin gdr-off adapters-unused gpudirect-rdma rdma-port
rdma-verbs nodes-differ gloo-with-gpus small-world forced-algorithm nccl-settings debug-settings nodes-driver nvlink-unused
p2p-disabled gpu-pcie pcie-p2p rdma-open rdma-timeout rdma-connect collectives-differ port-refused slow-node asymmetric
slow-pair intra-speed inter-speed wrong-result cuda rdma-link rdma-error peers-disagree descriptors collective-hung peer-lost
unexplained-error other-warning
""".split()
"""The rules for links, machines and nodes: among findings of equal severity, the first in this order becomes the headline. The
likeliest causes come first, what often follows from another fault comes last. A new rule about links needs no place here."""


def ranked() -> list[Check]:
    """The rules of ``nccl-check`` in the order of :data:`VERDICT`; those about links that it does not name come last."""
    asked = [one for one in checks(LINKS, MACHINE, NODES) if one.subject == LINKS or one.rule.id in VERDICT]
    return sorted(asked, key=lambda one: VERDICT.index(one.rule.id) if one.rule.id in VERDICT else len(VERDICT))


def judge(document: Mapping[str, Any], logs: Mapping[str, str]) -> list[Finding]:
    """What is wrong with a cluster's collectives, worst first; every rule that applies says what it saw.

    ``document`` as in :mod:`clustertune.nccl_check.link_records`, every key optional: what is absent is unknown.
    ``logs``: NCCL's logs by name, of any version. Never raises.
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
        elif context.backend == "nccl" or (context.nodes > 1 and one.rule.id in INTERFACES):
            subjects: Sequence[Any] = [several] if one.subject == NODES else several.machines
            seen = [item for subject in subjects for item in run([one], subject, getattr(subject, "where", ""))]
            found += [replace(item, where=names(places)) for item, places in grouped(seen)]
    return in_order(found)


def headline_of(document: Mapping[str, Any], log: Log, findings: Sequence[Finding]) -> str:
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
        "Written from the rules by `python -m tests.goldens`. Each rule says `pass`, `warn` or `fail`, `unknown`",
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
