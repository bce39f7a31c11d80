"""The short check before a training job: bounded, and never the reason why a job dies that would have trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.check.rule import FAIL, UNKNOWN, WARN, Finding
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.nccl_check import check, gather
from clustertune.nccl_check.setup import CheckOptions
from clustertune.nccl_check.target import Nodes

FOLDER = "nccl-check"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "p2p")
FACTOR = 16
ITERATIONS = 10


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
        smallest=check.MIB,
        largest=min(check.largest_for(backend, nodes), 256 * check.MIB),
        factor=FACTOR,
        iterations=ITERATIONS,
        warmup=2,
        collectives=COLLECTIVES,
        scopes=("world", "intra", "pair"),
        place="step",
        most_seconds=seconds,
    )


def run(target: Nodes, options: CheckOptions, folder: Path, report: Callable[[str], None]) -> LinkVerdict:
    """Measure and judge into ``folder``. What breaks in the check itself is ``unknown``, never raised."""
    began, number = time.monotonic(), 1
    wanted = folder
    while folder.exists():  # the same start of a job may be made twice by hand: records are added to, and would mix
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    try:
        rounds = check.measure(target, options, folder, report)
        found = check.document(target, options, rounds, time.monotonic() - began)
        why = rounds[0].inconclusive
        if why:
            # The command says that this is a fault; a job that would have trained does not end for it.
            found["problems"] += [{"node": target.hosts[0], "message": f"{why}: {_as_text(entry)}"} for entry in found["hung"]]
            found["hung"] = []
        findings = check.judge(found, target.cluster, gather.logs(rounds[0]))
        file = folder / check.RESULT
        check.write(found, file)
        verdict = found["verdict"]
        if why and verdict["status"] != FAIL:
            text = f"the links could not be measured: {why} ({folder})"
            return LinkVerdict(UNKNOWN, text, file, time.monotonic() - began, tuple(findings))
        return LinkVerdict(verdict["status"], verdict["headline"], file, time.monotonic() - began, tuple(findings))
    except Exception as error:  # whatever it is: the job is worth more than the check
        text = f"the check before the job could not be made: {type(error).__name__}: {str(error)[:300]}"
        return LinkVerdict(UNKNOWN, text, None, time.monotonic() - began)


def _as_text(entry: Mapping[str, Any]) -> str:
    return str(entry["message"] or f"{entry['collective']} did not end")[:300]


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
