"""A whole check: its measuring, the findings as one document, the verdict over it, where it is kept, and what people see."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune import console
from clustertune.check.ignored import ignored
from clustertune.check.rule import FAIL, PASS, UNKNOWN, WARN, Finding, Report, as_json, describe
from clustertune.cluster.hardware import HARDWARE, LinkFacts, NetworkFacts, read_hardware
from clustertune.cluster.schema import Cluster
from clustertune.console import escape, make_table, say
from clustertune.errors import ExitCode, Problem, UserError, raise_if
from clustertune.host.system import GIB, MIB
from clustertune.launch import node, srun, stage_jobs
from clustertune.launch.allocation import Allocation
from clustertune.launch.environment import environment
from clustertune.launch.shape import JobShape
from clustertune.manifest import write_durably
from clustertune.nccl_check.link_measure import (
    FACTS_SECONDS,
    LAUNCHED,
    MARGIN_SECONDS,
    SCHEMA,
    CheckOptions,
    CheckRecords,
    Setup,
    start,
)
from clustertune.nccl_check.link_rules import COLLECTIVES, headline_of, judge_log
from clustertune.nccl_check.nccl_log import Log, read
from clustertune.plan.machine import SUFFIX, beside, read_measured
from clustertune.process import kill_group
from clustertune.recipe.sections import parse_minutes
from clustertune.tree import ROOT

# --- where it runs ----------------------------------------------------------------------------------------------------

NODE_MODULE = "clustertune.nccl_check.link_measure"
SLACK_SECONDS = 15.0
"""For the start of a step, of a container, and of Python, and for their end."""
RECORDS = "records"
"""The folder of what nodes and ranks wrote, below that of the check."""


@dataclass(frozen=True)
class CheckTarget:
    """Where a check runs."""

    hosts: tuple[str, ...]
    address: str
    """Of the first host, as the others reach it."""
    cluster: Cluster
    command: Callable[[Path], list[str]]
    """What runs ``NODE_MODULE`` on every host, with the folder that is given."""
    job: str | None = None


def local_target(host: str, cluster: Cluster) -> CheckTarget:
    """This machine alone."""
    return CheckTarget((host,), "127.0.0.1", cluster, lambda folder: [*_node_command(folder), "--node", "0"])


def _node_command(folder: Path) -> list[str]:
    return [sys.executable, "-m", NODE_MODULE, "--folder", str(folder)]


def job_target(allocation: Allocation, cluster: Cluster, environ: Mapping[str, str]) -> CheckTarget:
    """The nodes of a Slurm job, reached by srun, in the cluster's container if it has one."""

    def command(folder: Path) -> list[str]:
        return srun.in_job(_node_command(folder), cluster, allocation, binds=[folder.parent], environ=environ)

    # Slurm's names resolve on every node: training meets by them, too.
    return CheckTarget(allocation.nodes, allocation.nodes[0], cluster, command, allocation.job_id)


def run_ranks(target: CheckTarget, folder: Path, setup: Setup) -> None:
    """Run all ranks to their end, or end them after ``setup.most_seconds``. Raises OSError where a folder cannot be written."""
    setup.write(folder)
    limit = min(setup.limit + SLACK_SECONDS + FACTS_SECONDS, setup.most_seconds)
    child = start(target.command(folder), folder / LAUNCHED, signal.SIGTERM, cwd=ROOT)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(limit)
    finally:
        if child.poll() is None:  # it took too long, or this process was asked to stop
            child.send_signal(signal.SIGTERM)  # srun ends its tasks, a node ends its ranks and leaves its record
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
            kill_group(child)


# --- what it finds ----------------------------------------------------------------------------------------------------

RESULT = "result.json"
REQUESTED = "asked for"
"""``backend_why`` of ``--backend gloo``."""
CASE_SECONDS = (10.0, 60.0)
"""Least and most that one measurement may take before it counts as hung, where it is not known to be slow."""
START_SECONDS = (30.0, 90.0)
"""Least and most that the ranks may take to find each other: Python and NCCL start from network storage."""


def largest_for(backend: str, nodes: int) -> int:
    """The largest size by default: nccl-tests' guide has 1 GiB or more for bandwidth; CPUs copy a few GB/s at best."""
    return GIB if backend == "nccl" else 64 * MIB if nodes > 1 else 16 * MIB


def make_setup(target: CheckTarget, options: CheckOptions) -> Setup:
    """The setup of a check's ranks."""
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
    patience = max(START_SECONDS[0], min(START_SECONDS[1], 2 * options.seconds))
    most = options.whole_seconds
    stated = {**vars(options), "most_seconds": most}
    return Setup(
        **stated,
        hosts=target.hosts,
        address=target.address,
        port=node.free_port(node.first_port(target.job or os.getpid(), 1)),
        start_seconds=min(patience, most / 2),
        case_seconds=min(max(least, min(longest, options.seconds / 4)), most / 2),
        environment={setting.name: setting.value for setting in settings},
        interface=cluster.network.interface if nodes > 1 else None,
        pairwise=not (cluster.compute.interconnect or "pcie").startswith("nvlink"),
    )


def measure(target: CheckTarget, options: CheckOptions, folder: Path) -> CheckRecords:
    """Start all ranks once and return what they measured; it ends with the first thing that hangs.

    Raises OSError where the folder cannot be written.
    """
    setup = make_setup(target, options)
    run_ranks(target, folder / RECORDS, setup)
    return CheckRecords(folder / RECORDS, setup)


def document(target: CheckTarget, options: CheckOptions, part: CheckRecords, seconds: float) -> dict[str, Any]:
    """What was found, without a verdict: :mod:`clustertune.nccl_check.link_measure` explains each key."""
    about = {
        "schema": SCHEMA,
        "cluster": target.cluster.name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "nodes": len(target.hosts),
        "gpus_per_node": options.ranks_per_node,
        "backend": options.backend,
        "backend_why": options.backend_why,
        "transport": transport(options.backend, part),
        "hosts": list(target.hosts),
        "seconds": round(seconds, 1),
    }
    if part.setup.interface:
        about["interface"] = part.setup.interface
    return {**about, **part.document()}


def transport(backend: str, part: CheckRecords) -> str:
    """How bytes go between nodes (inside one where there is one), as NCCL says; of gloo the interface that it was given."""
    if backend == "nccl":
        log = read(part.logs())
        between = [f"NET/{plugin}" for plugin, _ in log.between().most_common()] if len(part.setup.hosts) > 1 else []
        return ", ".join(between or [name for name, _ in log.transports.most_common(3)])
    interface = part.environment.get("GLOO_SOCKET_IFNAME", "")
    return f"gloo TCP on {interface}" if interface else "gloo TCP"


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
    asked = {"gpus", "gpu", "interconnect", "nvlink_domain"}
    named = {"kind", "gbit", "ports", "interface", "subnet", "hca", "environment"}
    limits: dict[str, Any] = {
        "compute": {**compute.model_dump(include=asked), "nvlink_domain": compute.nvlink_domain or 0},
        "network": network.model_dump(include=named, mode="json"),
    }
    link = hardware.links.get(compute.interconnect or "")
    if link is not None and compute.gpus > 1:
        limits["intra"] = _carries(f"links.{compute.interconnect}", link.gb_s, link.gb_s * link.share, link)
    facts = hardware.networks.get(network.kind)
    nominal = (network.gbit or 0.0) * network.ports / 8
    if facts is not None and nominal and len(cluster.compute_nodes) > 1:
        reached = min(nominal * facts.share, facts.most_gb_s or nominal)
        limits["inter"] = _carries(f"networks.{network.kind}", nominal, reached, facts)
    return limits


def _carries(key: str, nominal: float, reached: float, facts: LinkFacts | NetworkFacts) -> dict[str, Any]:
    return {
        "nominal_gb_s": nominal,
        "expected_gb_s": reached,
        "sources": [f"ops/{HARDWARE.name} {key}: {at}: {text}" for at, text in facts.sources.items() if at != "latency_us"],
        "hint": facts.hint,
    }


def judge(result: dict[str, Any], cluster: Cluster, logs: Sequence[str]) -> list[Finding]:
    """Put what is expected and the verdict into a document; its findings."""
    result["expected"] = expected(cluster)
    if why := not_judged(result, cluster):
        result["not_judged"] = why
    findings, result["verdict"] = judged(result, read(logs), ignored(cluster))
    return findings


def judged(result: Mapping[str, Any], log: Log, left_out: Sequence[str] = ()) -> tuple[list[Finding], dict[str, Any]]:
    """The findings over a document and logs, and the part of the document that reports them.

    ``left_out``: ids of rules that do not count; ``ignored`` in the document are those of them that found a fault.
    """
    report = Report(judge_log(result, log), tuple(left_out))
    headline = headline_of(result, log, report.counted)
    status = headline.partition(":")[0].lower()
    part = {"status": status, "headline": headline, "findings": as_json(report.counted), "ignored": report.ignored_faults}
    return report.counted, part


def write(result: Mapping[str, Any], path: Path) -> None:
    """The document as a file, on the device when this returns. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(result, indent=1) + "\n")


def hosts_outside(cluster: Cluster, hosts: Sequence[str]) -> list[str]:
    """The hosts that are not compute nodes of a cluster."""
    names = {host.name.lower().partition(".")[0] for host in cluster.compute_nodes}
    return [host for host in hosts if host.lower().partition(".")[0] not in names]


def not_judged(result: Mapping[str, Any], cluster: Cluster) -> str:
    """Why what was measured says nothing of the links that training takes; empty where it does."""
    has_file = beside(cluster) is not None
    if has_file and cluster.nodes and (outside := hosts_outside(cluster, result["hosts"])):
        return f"{', '.join(outside[:3])}: no compute node of {cluster.name}, of which nothing was measured"
    fallen_back = result["backend"] == "gloo" and result["backend_why"] != REQUESTED
    if fallen_back and (cluster.compute.gpus or not has_file):
        return f"{result['backend_why']}; NCCL was not touched"
    return ""


def not_kept(result: Mapping[str, Any], cluster: Cluster) -> str:
    """Why a result is not kept for plans; empty where it can be."""
    outside = hosts_outside(cluster, result["hosts"])
    gathers = [entry for entry in result["results"] if entry["collective"] == "all_gather" and entry["busbw_gb_s"] > 0]
    sound = not result["hung"] and all(entry["correct"] for entry in result["results"])
    reasons = (
        (beside(cluster) is None, f"{cluster.name} was detected: it has no cluster file to keep a result beside"),
        (result["backend"] == "gloo" and cluster.compute.gpus, "gloo between CPUs says nothing about the cluster's GPUs"),
        (outside, f"{', '.join(outside[:3])}: no compute node of {cluster.name}"),
        (result["nodes"] < min(2, len(cluster.compute_nodes)), "one node of several was measured"),
        (not sound, "something hung or was wrong: a plan would use wrong figures"),
        (not gathers, "no all_gather was measured, which is what a plan takes"),
    )
    return next((text for holds, text in reasons if holds), "")


def keep(result: Mapping[str, Any], cluster: Cluster) -> Path:
    """Keep a result beside the cluster's file, where plans look for it. Raises UserError or OSError."""
    path = beside(cluster)
    if why := not_kept(result, cluster):
        raise UserError(Problem(why, file=cluster.source, key="--save", fix="leave --save out, or run it on the cluster"))
    assert path is not None
    write(result, path)
    # A job writes for its user only; plans of all who read the cluster's file take it.
    with contextlib.suppress(OSError):
        shutil.copymode(path.with_name(f"{path.name.removesuffix(SUFFIX)}{Path(cluster.source).suffix}"), path)
    read_measured(path)
    return path


# --- before a job -----------------------------------------------------------------------------------------------------

# The short check before a training job: bounded, and never the reason why a job dies that would have trained.

FOLDER = "nccl-check"
"""In the folder of a run."""


@dataclass(frozen=True)
class LinkVerdict:
    """The verdict of the check before a job."""

    status: str
    """One of clustertune.check.rule.STATUSES; ``unknown``: it could not be made."""
    headline: str
    file: Path | None
    seconds: float
    findings: tuple[Finding, ...] = ()

    def event(self) -> dict[str, Any]:
        """For ``metrics.jsonl``."""
        faults = [f"{f.rule} {f.where}".strip() for f in self.findings if f.status in (FAIL, WARN)]
        return {
            "status": self.status,
            "headline": self.headline,
            "seconds": round(self.seconds, 1),
            "file": str(self.file) if self.file else None,
            "faults": faults,
        }


def options_for(seconds: float, backend: str, why: str, ranks_per_node: int, cpus_per_node: int, nodes: int) -> CheckOptions:
    """A check that is over, its start and a thing that hangs included, within ``seconds``."""
    return CheckOptions(
        backend=backend,
        backend_why=why,
        ranks_per_node=ranks_per_node,
        cpus_per_node=cpus_per_node,
        seconds=max(4.0, 0.5 * seconds),
        largest=min(largest_for(backend, nodes), 256 * MIB),
        collectives=("all_gather", "reduce_scatter", "all_reduce", "p2p"),
        scopes=("world", "intra", "pair"),
        place="step",
        most_seconds=seconds,
    )


def before_job(target: CheckTarget, options: CheckOptions, folder: Path) -> LinkVerdict:
    """Measure and judge into ``folder``. What breaks in the check itself is ``unknown``, never raised."""
    began, number = time.monotonic(), 1
    first = folder
    while folder.exists():  # the same start of a job may be made twice by hand: records are added to, and would mix
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    try:
        part = measure(target, options, folder)
        result = document(target, options, part, time.monotonic() - began)
        why = part.inconclusive
        if why:
            # The command says that this is a fault; a job that would have trained does not end for it.
            for entry in result["hung"]:
                text = str(entry["message"] or f"{entry['collective']} did not end")[:300]
                result["problems"].append({"node": target.hosts[0], "message": f"{why}: {text}"})
            result["hung"] = []
        findings = judge(result, target.cluster, part.logs())
        write(result, folder / RESULT)
        status, headline = result["verdict"]["status"], result["verdict"]["headline"]
        if why and status != FAIL:
            status, headline = UNKNOWN, f"the links could not be measured: {why} ({folder})"
        return LinkVerdict(status, headline, folder / RESULT, time.monotonic() - began, tuple(findings))
    except Exception as error:  # whatever it is: the job is worth more than the check
        text = f"the check before the job could not be made: {type(error).__name__}: {str(error)[:300]}"
        return LinkVerdict(UNKNOWN, text, None, time.monotonic() - began)


def decide(verdict: LinkVerdict, on_fail: str) -> None:
    """Raise UserError where a failed verdict is to stop the job.

    Exit 93: the recipe is right (2 would say that it is not), and on these nodes another start would end here again.
    """
    if verdict.status != FAIL or on_fail != "stop":
        return
    faults = [finding for finding in verdict.findings if finding.status == FAIL]
    problems = [
        Problem(f"{finding.rule}: {finding.where + ': ' if finding.where else ''}{finding.found}", fix=finding.fix)
        for finding in faults
    ]
    fix = "fix it, or nccl_check: {on_fail: warn} in the cluster file; clustertune nccl-check shows more"
    head = Problem(verdict.headline, file=str(verdict.file or ""), key="nccl_check.on_fail", fix=fix)
    raise UserError([head, *problems], ExitCode.STOP)


# --- as a job ---------------------------------------------------------------------------------------------------------

# A header for whole nodes over the body of ops/nccl-check/nccl-check.sbatch.

SCRIPT = ROOT / "ops" / "nccl-check" / "nccl-check.sbatch"
START_MINUTES = 5
"""For the start of the job, of containers and Python, and what is ended late."""


def job_shape(cluster: Cluster, nodes: int | None, time: str | None, seconds: float) -> JobShape:
    """Whole nodes, all of the cluster by default: a neighbour's traffic would be measured, too. Raises UserError."""
    most = len(cluster.compute_nodes)
    problems: list[Problem] = []
    if cluster.slurm is None:
        fix = "add a slurm section to its file, or --cluster names another one; without --submit it runs here"
        raise UserError(Problem(f"cluster {cluster.name} has no Slurm", file=cluster.source, key="slurm", fix=fix))

    def wrong(text: str, key: str, fix: str) -> None:
        problems.append(Problem(text, file="command line", key=key, fix=fix))

    count = most if nodes is None else nodes
    if count > most:
        wrong(f"{count} nodes, cluster {cluster.name} has {most}", "--nodes", f"at most --nodes {most}")
    usual = math.ceil(seconds / 60) + START_MINUTES
    minutes = usual if time is None else parse_minutes(time)
    longest = parse_minutes(cluster.slurm.max_time)
    if minutes is None or minutes < 1:
        wrong(f"{time!r} is not a time limit", "--time", "write --time MINUTES or HH:MM:SS")
    elif minutes * 60 < seconds + MARGIN_SECONDS:
        wrong(f"{minutes:g} min are too short for --seconds {seconds:g} and the start of a job", "--time", f"--time {usual}")
    elif longest is not None and minutes > longest:
        text = f"{minutes:g} min, jobs of {cluster.name} run {longest:g} min at most"
        wrong(text, "--time", "ask for less time, or give fewer --seconds")
    raise_if(problems)
    compute = cluster.compute
    return JobShape(
        nodes=count,
        gpus_per_node=compute.gpus,
        ranks_per_node=compute.gpus or 1,
        cpus_per_node=compute.threads,
        memory_gb=None,
        minutes=math.ceil(minutes or 0),
        partition=cluster.slurm.partition,
        gres=cluster.slurm.gres,
        site=cluster.slurm.site_options(),
        modules=cluster.slurm.modules,
    )


def make_job(shape: JobShape, folder: Path, arguments: Sequence[str]) -> stage_jobs.BatchJob:
    """The job. ``arguments`` are those of the command that it runs; its folder is added."""
    note = "Derived by clustertune nccl-check --submit from the cluster file."
    script = stage_jobs.render_alone("nccl-check", shape, note, SCRIPT.read_text())
    job_arguments = (*arguments, "--out", str(folder.absolute()))
    return stage_jobs.BatchJob(shape=shape, script=script, folder=folder.absolute(), arguments=job_arguments)


# --- for people -------------------------------------------------------------------------------------------------------

# The document of a check for people: the largest sizes of each collective, the slow ones of the pairs, the verdict.

COLUMNS = ["scope", "collective", "size", "algbw", "busbw", "of nominal", "median", "spread", "result"]
PAIR_COLUMNS = ["from", "to", "size", "GB/s", "of the median pair", "spread"]
SHOWN_SIZES = 3
SHOWN_PAIRS = 5
"""Of the slowest pairs; ``--json`` and result.json have all."""


def show(result: Mapping[str, Any]) -> None:
    """Print what was measured, on what, how fast, and the verdict."""
    for line in head(result):
        say(line)
    for title, columns, rows in (
        (None, COLUMNS, [*result_rows(result)]),
        ("slowest pairs of nodes, one way", PAIR_COLUMNS, [*pair_rows(result)]),
    ):
        table = make_table(*columns, title=title, text_columns=2)
        for row in rows:
            table.add_row(*map(escape, row))
        if rows:
            console.stderr.print(table)
    for line in (*notes(result), *verdict(result.get("verdict") or {})):
        say(line)


def head(result: Mapping[str, Any]) -> Iterator[str]:
    """What was measured, on what."""
    each, nodes = result["gpus_per_node"], result["nodes"]
    unit = "GPUs" if result["backend"] == "nccl" else "CPU ranks"
    on = f"{nodes} nodes with {each} {unit} each" if nodes > 1 else f"{each} {unit} of one node"
    yield f"{result['backend']} over {result['transport']}: {on}, {result['seconds']:g} s ({result.get('backend_why', '')})"
    yield "busbw as nccl-tests defines it, GB/s of 10^9 bytes; the slowest rank's median"


def nominal_of(result: Mapping[str, Any], scope: str) -> float | None:
    """What the links of a scope carry nominally, GB/s; None where it is unknown."""
    level = (result.get("expected") or {}).get("intra" if scope == "intra" else "inter") or {}
    value = level.get("nominal_gb_s")
    return float(value) if isinstance(value, int | float) and value > 0 else None


def result_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """The largest sizes of every collective, worded."""
    kinds = dict.fromkeys((entry["scope"], entry["collective"]) for entry in result["results"])
    for scope, name in sorted(kinds, key=lambda kind: ("world intra inter".find(kind[0]), COLLECTIVES.index(kind[1]))):
        same = [entry for entry in result["results"] if (entry["scope"], entry["collective"]) == (scope, name)]
        nominal = nominal_of(result, scope)
        for entry in sorted(same, key=lambda entry: -int(entry["bytes"]))[:SHOWN_SIZES]:
            share = f"{entry['busbw_gb_s'] / nominal:.0%}" if nominal else ""
            speed = [f"{entry['algbw_gb_s']:.4g}", f"{entry['busbw_gb_s']:.4g}", share]
            took = [f"{entry['median_s'] * 1e3:.4g} ms", f"{entry['spread']:.0%}", "ok" if entry["correct"] else "WRONG"]
            yield [scope, name, show_size(entry["bytes"]), *speed, *took]


def pair_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """The slowest pairs one way, each beside the median of all pairs."""
    sized = sorted(result.get("per_pair", []), key=lambda entry: int(entry["bytes"]))
    ways = {tuple(entry["nodes"]): entry for entry in sized if entry["collective"] == "p2p"}.values()  # the largest of each
    middle = statistics.median([entry["busbw_gb_s"] for entry in ways] or [0.0])
    for entry in sorted(ways, key=lambda entry: float(entry["busbw_gb_s"]))[:SHOWN_PAIRS]:
        share = f"{entry['busbw_gb_s'] / middle:.0%}" if middle else ""
        yield [*entry["nodes"], show_size(entry["bytes"]), f"{entry['busbw_gb_s']:.4g}", share, f"{entry['spread']:.0%}"]


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """What did not end, what was left out, what else went wrong."""
    for entry in result.get("hung", []):
        where = f" on {', '.join(entry['hosts'])}" if entry["hosts"] else ""
        size = f" of {show_size(entry['bytes'])}" if entry["bytes"] else ""
        text = f": {entry['message']}" if entry["message"] else ""
        yield f"did not end: {entry['collective']} ({entry['scope']}){size}{where}{text}"
    for entry in result.get("problems", []):
        yield f"{entry['node']}: {entry['message']}"
    for entry in result.get("left_out", []):
        yield f"left out: {entry['collective']} ({entry['scope']}) of {show_size(entry['bytes'])}: {entry['reason']}"


def verdict(document: Mapping[str, Any]) -> Iterator[str]:
    """The findings, worst first; those that passed are counted."""
    findings = [Finding(**item) for item in document.get("findings", [])]
    for item in findings:
        if item.status in (FAIL, WARN):
            yield from describe(item, [item.where] if item.where else [])
    statuses = [item.status for item in findings]
    yield str(document.get("headline", ""))
    yield f"{statuses.count(PASS)} rules passed, {statuses.count(UNKNOWN)} could not be seen here"


# --- sizes ----------------------------------------------------------------------------------------------------------------

# Sizes as people write them: ``1K``, ``64M``, ``1GiB``; a K is 1024, as in nccl-tests.

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,15})([kmgt]?)(i?b)?", text.strip().lower())
    if match is None or not int(match[1]):
        raise ValueError(f"{text[:40]!r} is not a size")
    return int(match[1]) << (10 * _UNITS[match[2]])


def show_size(size: int) -> str:
    """The shortest form, with one decimal where it is not a whole number of a unit."""
    value, unit = float(size), 0
    while value >= 1024 and unit < 3:
        value, unit = value / 1024, unit + 1
    names = ("B", "KiB", "MiB", "GiB")
    return f"{value:.0f} {names[unit]}" if value == int(value) or value >= 100 else f"{value:.1f} {names[unit]}"
