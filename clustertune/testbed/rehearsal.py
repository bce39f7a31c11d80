"""A job from submission to its end on a temporary Slurm, in one call."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.cluster import schema as cluster_schema
from clustertune.console import say
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch.slurm import ENDED as DONE
from clustertune.setup.slurm_files import GRES_CONF, HOSTS, SLURM_CONF, SLURMDBD_CONF
from clustertune.testbed.cluster import ClusterFailed, TemporaryCluster
from clustertune.testbed.spec import ClusterSpec, GivenFiles


@dataclass(frozen=True)
class RehearsalResult:
    """What became of a rehearsal."""

    job: int
    state: str
    """Slurm's word, such as COMPLETED."""
    code: int
    """The job's exit code; 1 where it ended by a signal."""
    log: Path
    """What the job wrote."""


def rehearse(shape: ClusterSpec, script: Path, arguments: Sequence[str], run_dir: Path) -> RehearsalResult:
    """Submit ``script ARGUMENTS`` on a cluster of this shape, which is the job's size too, and follow it to its end.

    The job's log is ``RUN_DIR.log``. The cluster is ended in any case. Raises UserError where there can be none, or where
    Slurm refuses the job.
    """
    log = run_dir.with_name(f"{run_dir.name}.log").resolve()
    log.parent.mkdir(parents=True, exist_ok=True)
    before = log.stat().st_size if log.exists() else 0  # of an earlier rehearsal with the same run folder
    try:
        began = time.monotonic()
        with TemporaryCluster(shape) as cluster:
            kind = "each in namespaces of its own" if cluster.isolated else "not isolated: no namespaces on this machine"
            say(f"a Slurm of {', '.join(cluster.names)} ({kind}) is up after {time.monotonic() - began:.1f} s")
            options = ["--export=NIL", f"--nodes={len(cluster.names)}", f"--output={str(log).replace('%', '%%')}"]
            options += [f"--gpus-per-node={shape.gpus}"] if shape.gpus else []
            job = cluster.submit(script, *arguments, options=options)
            say(f"job {job}: sbatch {' '.join([*options, str(script), *arguments])}")
            record = follow(cluster, job, AddedLines(log, before))
    except ClusterFailed as error:
        raise UserError(Problem(str(error)), ExitCode.FAILED) from None
    state = record["JobState"]
    number = int(record.get("ExitCode", "0:0").partition(":")[0])
    code = 0 if state == "COMPLETED" else number or int(ExitCode.FAILED)
    say(f"the temporary Slurm is stopped; the job ended as {state}: {run_dir}, its log {log}")
    return RehearsalResult(job, state, code, log)


# --- follow ---------------------------------------------------------------------------------------------------------------

# Follow a job to its end: what state it is in and why, and what it writes.

_LOOK = 0.5
"""Seconds between two looks."""


class AddedLines:
    """The lines that are added to a file, which need not be there yet."""

    def __init__(self, path: Path, at: int = 0) -> None:
        self.path, self._at = path, at

    def lines(self, *, rest: bool = False) -> list[str]:
        """The whole lines since the last call; with ``rest`` an unfinished one too."""
        added = self.path.read_bytes()[self._at :] if self.path.exists() else b""
        whole = added if rest else added[: added.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole.decode(errors="replace").splitlines()


def follow(cluster: TemporaryCluster, job: int, log: AddedLines) -> dict[str, str]:
    """Say what changes until the job has ended. Returns its last record, with its state under ``JobState``."""
    began, shown = time.monotonic(), ""
    while True:
        record = cluster.job(job)
        ended = record["JobState"] in DONE
        for line in log.lines(rest=ended):
            say(f"  | {line}")
        if (now := describe(record)) != shown or ended:
            shown = now
            say(f"[{time.monotonic() - began:.0f} s] job {job}: {now}")
        if ended:
            return record
        time.sleep(_LOOK)


def describe(record: dict[str, str]) -> str:
    """A job's state in Slurm's words, with why it waits, where it runs or how it ended."""
    state, restarts = record["JobState"], record.get("Restarts", "0")
    code = record.get("ExitCode", "0:0")
    more = {"PENDING": record.get("Reason", ""), "RUNNING": f"on {record.get('NodeList', '?')}"}.get(state, "")
    more = f"exit code {code}" if state in DONE and code != "0:0" else "" if more == "None" else more
    return ", ".join(filter(None, [state, more, f"restarted {restarts} x" if restarts != "0" else ""]))


# --- tryout ---------------------------------------------------------------------------------------------------------------

# Start the files that were made for a cluster as a temporary Slurm here, before a machine of that cluster gets them.

NODES = 4
"""Of a cluster with more only so many are started; the others stand in the files, and are down."""


def given(cluster: cluster_schema.Cluster, texts: Mapping[str, str]) -> GivenFiles:
    """The generated files (path to text) in the form that a temporary cluster takes."""
    assert cluster.slurm
    return GivenFiles(
        slurm_conf=texts[SLURM_CONF],
        gres_conf=texts[GRES_CONF] if cluster.compute.gpus else "",
        hosts=texts[HOSTS],
        dbd_conf=texts.get(SLURMDBD_CONF),
        partition=cluster.slurm.partition,
    )


def shape(cluster: cluster_schema.Cluster, texts: Mapping[str, str], nodes: int = NODES) -> ClusterSpec:
    """A temporary cluster of the first ``nodes`` compute nodes, under their own names."""
    names = tuple(host.name for host in cluster.compute_nodes[:nodes])
    return ClusterSpec(nodes=names, gpus=cluster.compute.gpus, isolation="netns", given=given(cluster, texts))


def try_out(cluster: cluster_schema.Cluster, texts: Mapping[str, str]) -> dict[str, Any]:
    """Start Slurm with the files, run a job on all started nodes that takes all of their GPUs, and end it again.

    Returns the names of the nodes, and the seconds until all were idle. Raises UserError where it cannot be started here, or
    does not work, with Slurm's own message.
    """
    began = time.monotonic()
    try:
        with TemporaryCluster(shape(cluster, texts)) as slurm:
            seconds = time.monotonic() - began
            gpus = [f"--gpus-per-node={cluster.compute.gpus}"] if cluster.compute.gpus else []
            command = ["srun", f"--nodes={len(slurm.names)}", "--ntasks-per-node=1", "--exclusive", *gpus, "hostname"]
            seen = slurm.run(command, timeout=120).stdout.split()
    except ClusterFailed as error:
        raise UserError(Problem(str(error), fix="the lines above are Slurm's own"), ExitCode.FAILED) from None
    if sorted(seen) != sorted(slurm.names):
        text = f"a job on {', '.join(slurm.names)} ran on {', '.join(seen) or 'none'}"
        raise UserError(Problem(text, fix="compare the names with what hostname prints there"), ExitCode.FAILED)
    return {"nodes": slurm.names, "seconds": round(seconds, 2)}
