"""The nodes of an allocation, each looked at in one step; before a job's ranks start, what would stop them ends the job."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from clustertune.check.ignored import ignored
from clustertune.check.machines import Expects, JobNodes, Machine, cluster_findings
from clustertune.check.rule import FAIL, MACHINE, NODES, Finding, Report, checks, worst
from clustertune.cluster.schema import Cluster, same_host
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.host import collect
from clustertune.host.facts import CONTAINER_STEP, STEP, HostFacts
from clustertune.launch import srun
from clustertune.launch.allocation import Allocation
from clustertune.process import end
from clustertune.tree import ROOT

# --- the nodes ------------------------------------------------------------------------------------------------------------

START_SECONDS = 60.0
"""What a step may take to start on many nodes, a container to be mounted, and Python to be read from a shared disk."""
END_SECONDS = 5.0
MAX_BYTES = 256 << 20
"""Of what a step says: the facts of a thousand nodes are some 10 MB."""


@dataclass
class NodeReports:
    """What the nodes reported."""

    facts: dict[str, HostFacts] = field(default_factory=dict)
    """By Slurm's name of the node."""
    faults: dict[str, str] = field(default_factory=dict)
    """Why a node reported nothing."""
    started: float = 0.0
    ended: float = 0.0
    """Seconds since 1970 before and after, by this machine's clock."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return max(0.0, self.ended - self.started)


def collector(cluster: Cluster, nodes: Sequence[str], seconds: float) -> list[str]:
    """The command that prints a machine's facts in lines."""
    storage = cluster.storage
    pool, staging = storage.pool, storage.staging
    folders = [storage.shared, storage.scratch, pool.mount if pool else None, staging.path if staging else None]
    # from the environment, not found by looking: what a container sees of Slurm's variables is what is named to it
    place = STEP if cluster.container.runtime == "none" else CONTAINER_STEP
    names = nodes if len(nodes) <= 64 else ()
    return collect.probe_command(place, seconds, folders=[folder for folder in dict.fromkeys(folders) if folder], names=names)


def step_command(cluster: Cluster, allocation: Allocation, binds: Sequence[str], seconds: float) -> list[str]:
    """``srun`` of the collector on every node, as the ranks are started, but that one node's failure ends no other."""
    command = srun.in_job(collector(cluster, allocation.nodes, seconds), cluster, allocation, binds=binds)
    return ["--kill-on-bad-exit=0" if word == "--kill-on-bad-exit=1" else word for word in command if word != "--unbuffered"]


def look(cluster: Cluster, allocation: Allocation, *, binds: Sequence[str] = (), seconds: float = 20.0) -> NodeReports:
    """Ask all nodes at once. A node that does not answer in time is named in ``faults``, and raises nothing.

    Raises UserError where the container cannot be shown a folder.
    """
    command = step_command(cluster, allocation, binds, seconds)
    looked = NodeReports(started=time.time())
    # Files, not pipes: what is left of a step that was killed may hold its end of a pipe for as long as it hangs.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            late = _run(command, out, err, seconds + START_SECONDS)
        except OSError as error:
            looked.ended = time.time()
            looked.faults = dict.fromkeys(allocation.nodes, f"srun: {error.strerror or error}")
            return looked
        looked.ended = time.time()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(MAX_BYTES).decode(errors="replace"))
    hosts, looked.faults, others = collect.decode(texts[0].splitlines())
    lines = [line.strip() for line in [*texts[1].splitlines(), *others] if line.strip()]
    for node in allocation.nodes:
        name = same_host(node, hosts)
        if name is not None:
            looked.facts[node] = hosts[name]
        else:
            own = [line for line in lines if node in line] or lines
            reason = own[-1][:300] if own else "it printed nothing"
            looked.faults.setdefault(node, f"no answer within {seconds + START_SECONDS:.0f} s" if late else reason)
    return looked


def _run(command: Sequence[str], out: IO[bytes], err: IO[bytes], seconds: float) -> bool:
    """Run the step. Returns whether it did not end in time: it is asked to then, and killed."""
    child = srun.begin(command, stdout=out, stderr=err, cwd=ROOT)
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    finally:
        end(child, END_SECONDS)
    return False


def findings(looked: NodeReports, cluster: Cluster, nodes: Sequence[str], expects: Expects) -> list[Finding]:
    """What the rules find on each node, between them, and of those that did not answer."""
    silent = {name: looked.faults.get(name, "no answer") for name in nodes if name not in looked.facts}
    plain = cluster.model_dump(mode="json")
    machines = [Machine(facts, plain, expects) for facts in looked.facts.values()]
    return cluster_findings(JobNodes(machines, silent, looked.started, looked.ended))


# --- before a job ---------------------------------------------------------------------------------------------------------

SECONDS = 50.0
"""How long a node may look; a healthy one takes less than one, with eight GPUs some. Without persistence mode the driver
wakes one GPU after the other: only beyond host.devices.SMI_SECONDS it is known to hang."""


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
) -> Report:
    """Look at every node, say what is not as it should be, and log what was found.

    Raises UserError for a failure of a rule that stops jobs: exit 2, or 75 where nodes only did not answer, such as one that
    has just lost its power: the job may continue later, or on others.

    ``ranks``: of one node; ``gpus``: whether each uses one. ``log`` takes the name of an event and its fields. Rules that
    the cluster file ignores neither stop a job nor warn.
    """
    left_out = ignored(cluster)
    expects = Expects(gpus=ranks if gpus else None, cpus=allocation.cpus_per_node, nodes=len(allocation.nodes), launched=True)
    looked = look(cluster, allocation, binds=[str(path.resolve()) for path in binds], seconds=seconds)
    report = Report(findings(looked, cluster, allocation.nodes, expects), left_out)
    for line in report.lines():
        say(line)
    say(f"doctor: {len(looked.facts)} of {len(allocation.nodes)} nodes, {looked.seconds:.1f} s: {report.summary()}")
    lines = [f"{item.rule} {item.where}".strip() for item in report.faults]
    log("doctor", verdict=worst(report.counted), nodes=len(looked.facts), seconds=round(looked.seconds, 3), faults=lines[:100])
    every = [item for item in report.faults if item.status == FAIL]
    # What else fails (a full branch, an error of a GPU that may have been reset since) is in the log, and the job continues.
    stops = {one.rule.id for one in checks(MACHINE, NODES) if one.rule.stops}
    failed = [item for item in every if item.rule in stops]
    if every and not failed:
        say("doctor: the job continues: none of these failures is certain to stop it")
    if failed:
        gone = all(item.rule == "node-silent" for item in failed)
        raise UserError([_problem(item) for item in failed], ExitCode.AGAIN if gone else ExitCode.CONFIG)
    return report


def _problem(item: Finding) -> Problem:
    leave_out = f"or doctor: {{ignore: [{item.rule}]}} in the cluster file"
    return Problem(f"{item.rule}: {item.found}", file=item.where or None, fix=f"{item.fix}; {leave_out}")
