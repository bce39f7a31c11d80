"""Before the ranks of a job start: every node is looked at for some seconds, and what would stop the training is reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clustertune.check import report as reports
from clustertune.check.machine import Expects
from clustertune.check.rule import FAIL, Finding, worst
from clustertune.config.cluster_schema import Cluster
from clustertune.config.load import did_you_mean
from clustertune.doctor import nodes, recipe_findings
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch.allocation import Allocation

SECONDS = 50.0
"""How long a node may look; a healthy one takes less than one, with eight GPUs some. Without persistence mode the driver
wakes one GPU after the other: only beyond host.gpus.SMI_SECONDS it is known to hang."""

STOPS = frozenset(
    """
    node-silent gpu-driver gpu-count gpu-compute-mode cuda-init driver-cuda interface nodes-network rdma-port rdma-verbs memlock
    shm glibc mount-silent mount-missing mount-read-only scratch nodes-packages
    """.split()  # noqa: SIM905 (one word a rule is what a person can read and extend)
)
"""Rules whose failure is sure to stop or spoil the job that is about to start. What else fails (a full brick, an error of a GPU
that may have been reset since, a name that nobody may ask for) is written to the log, and the job continues."""


def ignored(cluster: Cluster) -> tuple[str, ...]:
    """The rules that the cluster file leaves out. Raises UserError for names that are not rules."""
    check_rules(cluster.doctor.ignore, cluster.source, "doctor.ignore")
    return tuple(cluster.doctor.ignore)


def check_rules(names: Sequence[str], file: str, key: str) -> None:
    """Raises UserError with every name that is not a rule, and the nearest one."""
    if not names:
        return
    known = [rule.id for rule in recipe_findings.all_rules()]
    problems = [
        Problem(f"there is no rule {name!r}", file=file, key=key, fix=did_you_mean(name, known) or "clustertune doctor --list")
        for name in dict.fromkeys(names)
        if name not in known
    ]
    if problems:
        raise UserError(problems)


def check(
    cluster: Cluster,
    allocation: Allocation,
    ranks: int,
    *,
    gpus: bool,
    binds: Sequence[Path],
    say: Callable[[str], None],
    log: Callable[..., Any],
    seconds: float = SECONDS,
) -> reports.Report:
    """Look at every node, say what is not as it should be, and log what was found.

    Raises UserError for a failure of :data:`STOPS`: exit 2, or 75 where nodes only did not answer, as one that has just lost
    its power: the job may continue later, or on others.

    ``ranks``: of one node; ``gpus``: whether each uses one. ``log`` takes the name of an event and its fields. Rules that
    the cluster file ignores neither stop a job nor warn.
    """
    left_out = ignored(cluster)
    expects = Expects(gpus=ranks if gpus else None, cpus=allocation.cpus_per_node, nodes=len(allocation.nodes), launched=True)
    looked = nodes.look(cluster, allocation, binds=[str(path.resolve()) for path in binds], seconds=seconds)
    report = reports.Report(nodes.findings(looked, cluster, allocation.nodes, expects), left_out)
    for line in report.lines():
        say(line)
    say(f"doctor: {len(looked.facts)} of {len(allocation.nodes)} nodes, {looked.seconds:.1f} s: {report.summary()}")
    lines = [f"{item.rule} {item.where}".strip() for item in report.faults]
    log("doctor", verdict=worst(report.counted), nodes=len(looked.facts), seconds=round(looked.seconds, 3), faults=lines[:100])
    every = [item for item in report.faults if item.status == FAIL]
    failed = [item for item in every if item.rule in STOPS]
    if every and not failed:
        say("doctor: the job continues: nothing of this is sure to stop it")
    if failed:
        gone = all(item.rule == "node-silent" for item in failed)
        raise UserError([_problem(item) for item in failed], ExitCode.AGAIN if gone else ExitCode.CONFIG)
    return report


def _problem(item: Finding) -> Problem:
    leave_out = f"or doctor: {{ignore: [{item.rule}]}} in the cluster file"
    return Problem(f"{item.rule}: {item.found}", file=item.where or None, fix=f"{item.fix}; {leave_out}")
