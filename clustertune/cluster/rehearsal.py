"""A job from submission to its end on a throw-away Slurm, in one call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertune.cluster.cluster import Cluster, Failed
from clustertune.cluster.follow import Tail, follow
from clustertune.cluster.spec import Spec
from clustertune.console import say
from clustertune.errors import ExitCode, Problem, UserError


@dataclass(frozen=True)
class Ended:
    """What became of a rehearsal."""

    job: int
    state: str
    """Slurm's word, such as COMPLETED."""
    code: int
    """The job's exit code; 1 where it ended by a signal."""
    log: Path
    """What the job wrote."""


def rehearse(shape: Spec, script: Path, arguments: Sequence[str], run_dir: Path) -> Ended:
    """Submit ``script ARGUMENTS`` on a cluster of this shape, which is the job's size too, and follow it to its end.

    The job's log is ``RUN_DIR.log``. The cluster is ended in any case. Raises UserError where there can be none, or where
    Slurm refuses the job.
    """
    log = run_dir.with_name(f"{run_dir.name}.log").resolve()
    log.parent.mkdir(parents=True, exist_ok=True)
    before = log.stat().st_size if log.exists() else 0  # of an earlier rehearsal with the same run folder
    try:
        began = time.monotonic()
        with Cluster(shape) as cluster:
            kind = "each in namespaces of its own" if cluster.isolated else "side by side: no namespaces here"
            say(f"a Slurm of {', '.join(cluster.names)} ({kind}) is up after {time.monotonic() - began:.1f} s")
            options = ["--export=NIL", f"--nodes={len(cluster.names)}", f"--output={str(log).replace('%', '%%')}"]
            options += [f"--gpus-per-node={shape.gpus}"] if shape.gpus else []
            job = cluster.submit(script, *arguments, options=options)
            say(f"job {job}: sbatch {' '.join([*options, str(script), *arguments])}")
            record = follow(cluster, job, Tail(log, before))
    except Failed as error:
        raise UserError(Problem(str(error)), ExitCode.FAILED) from None
    state = record["JobState"]
    number = int(record.get("ExitCode", "0:0").partition(":")[0])
    code = 0 if state == "COMPLETED" else number or int(ExitCode.FAILED)
    say(f"the Slurm is gone again; the job ended as {state}: {run_dir}, its log {log}")
    return Ended(job, state, code, log)
