"""A whole check: rounds of measuring, what they found as one document, the verdict over it, and where it is kept."""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustertune.check.log_read import read
from clustertune.check.rule import Finding, as_json
from clustertune.config.cluster_schema import Cluster
from clustertune.config.hardware import HARDWARE, LinkFacts, NetworkFacts, read_hardware
from clustertune.errors import Problem, UserError
from clustertune.launch.environment import environment
from clustertune.manifest import write_durably
from clustertune.nccl_check import gather
from clustertune.nccl_check import judge as judging
from clustertune.nccl_check.result import SCHEMA
from clustertune.nccl_check.setup import CheckOptions, CollectiveCase, Setup
from clustertune.nccl_check.target import Target, round_folder, run_round
from clustertune.plan.measured import SUFFIX, beside, read_measured

RESULT = "result.json"
REQUESTED = "asked for"
"""``backend_why`` of ``--backend gloo``."""
MAX_ROUNDS = 4
"""Starts of all ranks: one more for each thing that hung."""
CASE_SECONDS = (10.0, 60.0)
"""Least and most that one measurement may take before it counts as hung, where it is not known to be slow."""
START_SECONDS = (30.0, 90.0)
"""Least and most that the ranks may take to find each other: Python and NCCL start from network storage."""
LEAST_SECONDS = 10
MIB, GIB = 1 << 20, 1 << 30


def largest_for(backend: str, nodes: int) -> int:
    """The largest size by default: nccl-tests' guide has 1 GiB or more for bandwidth; CPUs copy a few GB/s at best."""
    return GIB if backend == "nccl" else 64 * MIB if nodes > 1 else 16 * MIB


def make_setup(target: Target, options: CheckOptions, changes: Mapping[str, str] | None = None) -> Setup:
    """The first round of a check. ``changes``: variables that take the place of those of training."""
    nodes, cluster = len(target.hosts), target.cluster
    settings = environment(
        cluster,
        world_size=nodes * options.ranks_per_node,
        ranks_per_node=options.ranks_per_node,
        cpus_per_node=options.cpus_per_node,
        job=target.job,
        cpu_only=options.backend == "gloo",
        present=options.cpus_per_node,
    )
    least, longest = CASE_SECONDS
    start = max(START_SECONDS[0], min(START_SECONDS[1], 2 * options.seconds))
    most = options.whole_seconds
    given = {**vars(options), "most_seconds": most}
    return Setup(
        **given,
        hosts=target.hosts,
        addresses=target.addresses,
        start_seconds=min(start, most / 2),
        case_seconds=min(max(least, min(longest, options.seconds / 4)), most / 2),
        environment={**{setting.name: setting.value for setting in settings}, **(changes or {})},
        interface=cluster.network.interface if nodes > 1 else None,
        numa_gpus=tuple(tuple(group) for group in cluster.compute.numa_gpus) if options.backend == "nccl" else (),
        numa_cpus=tuple(cluster.compute.numa_cpus) if options.backend == "nccl" else (),
        pairwise=not (cluster.compute.interconnect or "pcie").startswith("nvlink"),
    )


def measure(
    target: Target,
    options: CheckOptions,
    folder: Path,
    report: Callable[[str], None],
    tick: Callable[[Path], None] = lambda _: None,
) -> list[gather.Round]:
    """The rounds of a check, at least one. ``report`` receives progress, ``tick`` is called with the folder of a round now and
    then. Raises OSError where the folder cannot be written.
    """
    began, spent = time.monotonic(), 0.0
    setup = make_setup(target, options)
    rounds: list[gather.Round] = []
    for number in range(1, MAX_ROUNDS + 1):
        run_round(target, round_folder(folder, number), setup, tick)
        found = gather.read_round(round_folder(folder, number), setup)
        rounds.append(found)
        spent += found.spent
        left = options.whole_seconds - (time.monotonic() - began)
        following = next_setup(found, options.seconds - spent, left)
        if following is None or number == MAX_ROUNDS:
            break
        given_up = ", ".join(dict.fromkeys(f"{name} ({scope})" for scope, name, _ in following.skip))
        report(f"did not end: {given_up}; the rest is measured without")
        setup = following
    return rounds


def next_setup(found: gather.Round, left: float, most: float) -> Setup | None:
    """The round after one in which something hung, without that; None where there is no fault, no time or nothing to win.

    ``left``: seconds for measuring; ``most``: for everything.
    """
    setup = found.setup
    broken = [step for step in found.broken if not found.cut_off(step)]
    if not broken or min(left, most) < LEAST_SECONDS or len(found.up) < setup.world_size:
        return None
    skip = {*setup.skip, *((step.case["scope"], step.case["collective"], int(step.case["turn"])) for step in broken)}
    if sum(scope == "pair" for scope, _, _ in skip) > 1:  # a node that hangs with one hangs with all
        scopes = tuple(scope for scope in setup.scopes if scope != "pair")
    else:
        scopes = setup.scopes
    incomplete = {id(step) for step in found.broken}
    whole = [(CollectiveCase(**step.case), step) for step in found.steps if id(step) not in incomplete]
    keys = {case.key for case, _ in whole}
    known = {
        (case.scope, case.collective, case.turn, case.back, case.bytes, max(float(d["median_s"]) for d in step.done.values()))
        for case, step in whole
    }
    changed = {name: value for node in found.nodes for name, value in (node.get("changed") or {}).items()}
    return replace(
        setup,
        seconds=left,
        most_seconds=most,
        scopes=scopes,
        skip=tuple(sorted(skip)),
        done=tuple(sorted({*setup.done, *keys})),
        known=tuple(sorted({*setup.known, *known})),
        environment={**setup.environment, **changed},
        facts=False,
        probe=False,
    )


def document(target: Target, options: CheckOptions, rounds: list[gather.Round], seconds: float) -> dict[str, Any]:
    """What was found, without a verdict: :mod:`clustertune.nccl_check.result` explains each key."""
    first, measured = rounds[0], gather.measurements(rounds)
    hung, problems = gather.faults(rounds)
    logs = gather.logs(first)
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "cluster": target.cluster.name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "nodes": len(target.hosts),
        "gpus_per_node": options.ranks_per_node,
        "backend": options.backend,
        "backend_why": options.backend_why,
        "transport": transport(options.backend, first, logs),
        "hosts": list(target.hosts),
        "seconds": round(seconds, 1),
        "connect_s": first.connected,
        **measured,
        "p2p_probe": [entry for node in first.nodes for entry in node.get("probe", [])],
        "hung": hung,
        "left_out": gather.left_out(rounds, measured),
        "problems": problems,
        "facts": gather.facts(rounds),
        "software": gather.software(first),
        "environment": gather.steering(first),
    }
    if first.setup.interface:
        found["interface"] = first.setup.interface
    return found


def transport(backend: str, part: gather.Round, logs: Mapping[str, str]) -> str:
    """How bytes go between nodes (inside one where there is one), as NCCL says; of gloo the interface that it was given."""
    if backend == "nccl":
        log = read(logs.values())
        between = [f"NET/{plugin}" for plugin, _ in log.between().most_common()] if len(part.setup.hosts) > 1 else []
        return ", ".join(between or [name for name, _ in log.transports.most_common(3)])[:200]
    interface = gather.steering(part).get("GLOO_SOCKET_IFNAME", "")
    return f"gloo TCP on {interface}"[:200] if interface else "gloo TCP"


def expected(cluster: Cluster) -> dict[str, Any]:
    """What a check on ``cluster`` should find, from its file and ops/hardware.yaml: what measurements are judged against.

    The same figures as the planner's for a cluster that was not measured (``clustertune.plan.machine``): nominal speed by the
    share of it that healthy clusters were seen to reach. ``measured_gb_s`` of the cluster file is left aside: it may be what is
    wrong.

    ``intra``: an all-gather inside a node, GB/s for each GPU; ``inter``: over several nodes, GB/s for each node and direction
    (all its ports). Each has ``nominal_gb_s``, ``expected_gb_s``, ``sources`` and ``hint``, and is left out where the cluster
    file does not say enough. ``network`` and ``compute``: what the rules ask of the cluster file. Raises UserError where
    ops/hardware.yaml cannot be read.
    """
    compute, network, hardware = cluster.compute, cluster.network, read_hardware()
    found: dict[str, Any] = {
        "compute": {
            "gpus": compute.gpus,
            "gpu": compute.gpu,
            "interconnect": compute.interconnect,
            "nvlink_domain": compute.nvlink_domain or 0,
        },
        "network": {
            "kind": network.kind,
            "gbit": network.gbit,
            "ports": network.ports,
            "interface": network.interface,
            "subnet": network.subnet,
            "hca": list(network.hca),
        },
    }
    link = hardware.links.get(compute.interconnect or "")
    if link is not None and compute.gpus > 1:
        found["intra"] = _carries(f"links.{compute.interconnect}", link.gb_s, link.gb_s * link.share, link)
    facts = hardware.networks.get(network.kind)
    nominal = (network.gbit or 0.0) * network.ports / 8
    if facts is not None and nominal and len(cluster.compute_nodes) > 1:
        reached = min(nominal * facts.share, facts.most_gb_s or nominal)
        found["inter"] = _carries(f"networks.{network.kind}", nominal, reached, facts)
    return found


def _carries(key: str, nominal: float, reached: float, facts: LinkFacts | NetworkFacts) -> dict[str, Any]:
    return {
        "nominal_gb_s": nominal,
        "expected_gb_s": reached,
        "sources": [
            f"ops/{HARDWARE.name} {key}: {name}: {source}" for name, source in facts.sources.items() if name != "latency_us"
        ],
        "hint": facts.hint,
    }


def judge(found: dict[str, Any], cluster: Cluster, logs: Mapping[str, str]) -> list[Finding]:
    """Put what is expected and the verdict into a document; its findings."""
    found["expected"] = expected(cluster)
    if why := not_judged(found, cluster):
        found["not_judged"] = why
    findings, found["verdict"] = verdict(found, logs)
    return findings


def verdict(found: Mapping[str, Any], logs: Mapping[str, str]) -> tuple[list[Finding], dict[str, Any]]:
    """The findings over a document and logs, and the part of the document that tells them."""
    log = read(logs.values())
    findings = judging.judge_log(found, log)
    headline = judging.headline(found, log, findings)
    return findings, {
        "status": headline.partition(":")[0].lower(),
        "headline": headline,
        "findings": as_json(findings),
    }


def write(found: Mapping[str, Any], path: Path) -> None:
    """The document as a file, on the device when this returns. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(found, indent=1) + "\n")


def strangers_to(cluster: Cluster, hosts: Sequence[str]) -> list[str]:
    """The hosts that are not compute nodes of a cluster."""
    names = {host.name.lower().partition(".")[0] for host in cluster.compute_nodes}
    return [host for host in hosts if host.lower().partition(".")[0] not in names]


def not_judged(found: Mapping[str, Any], cluster: Cluster) -> str:
    """Why what was measured says nothing of the links that training takes; empty where it does."""
    has_file = beside(cluster) is not None
    if has_file and cluster.nodes and (strangers := strangers_to(cluster, found["hosts"])):
        return f"{', '.join(strangers[:3])}: no compute node of {cluster.name}, of which nothing was measured"
    fallen_back = found["backend"] == "gloo" and found["backend_why"] != REQUESTED
    if fallen_back and (cluster.compute.gpus or not has_file):
        return f"{found['backend_why']}; NCCL was not touched"
    return ""


def not_kept(found: Mapping[str, Any], cluster: Cluster) -> str:
    """Why a result is not kept for plans; empty where it can be."""
    strangers = strangers_to(cluster, found["hosts"])
    gathers = [entry for entry in found["results"] if entry["collective"] == "all_gather" and entry["busbw_gb_s"] > 0]
    whole = not found["hung"] and all(entry["correct"] for entry in found["results"])
    reasons = (
        (beside(cluster) is None, f"{cluster.name} was found by looking: it has no file to keep a result beside"),
        (found["backend"] == "gloo" and cluster.compute.gpus, "gloo between CPUs says nothing about the cluster's GPUs"),
        (strangers, f"{', '.join(strangers[:3])}: no compute node of {cluster.name}"),
        (found["nodes"] < min(2, len(cluster.compute_nodes)), "one node of several was measured"),
        (not whole, "something hung or was wrong: a plan would take its figures for good"),
        (not gathers, "no all_gather was measured, which is what a plan takes"),
    )
    return next((text for holds, text in reasons if holds), "")


def keep(found: Mapping[str, Any], cluster: Cluster) -> Path:
    """Keep a result beside the cluster's file, where plans look for it. Raises UserError or OSError."""
    path = beside(cluster)
    if why := not_kept(found, cluster):
        raise UserError(Problem(why, file=cluster.source, key="--save", fix="leave --save out, or run it on the cluster"))
    assert path is not None
    write(found, path)
    # A job writes for its user only; plans of all who read the cluster's file take it.
    with contextlib.suppress(OSError):
        shutil.copymode(path.with_name(f"{path.name.removesuffix(SUFFIX)}{Path(cluster.source).suffix}"), path)
    read_measured(path)
    return path
