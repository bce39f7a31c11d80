"""Slurm's commands, each with a time limit and an error as a message; nothing here needs accounting (``sacct``)."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence

from clustertune.cluster.schema import expand_hosts
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.process import captured

Run = Callable[[Sequence[str]], str]
"""A command's arguments in, its stdout out; raises UserError where it fails. Tests give their own."""

TIMEOUT_SECONDS = 60.0
"""A busy slurmctld answers late; MessageTimeout is 10 s by default and clients try again several times."""
_UNREACHABLE = ("unable to contact", "unable to connect", "connection refused", "timed out", "no route", "configuration source")
_UNKNOWN_JOB = "invalid job id"
ENDED = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
        "TIMEOUT",
    }
)  # fmt: skip
"""States from which a job does not come back by itself (squeue(1), JOB STATE CODES); in all others it runs or may yet."""


class Unreachable(UserError):
    """Slurm is not here or does not answer: what it knows cannot be asked now."""


def call(arguments: Sequence[str], *, environ: Mapping[str, str] | None = None, timeout: float = TIMEOUT_SECONDS) -> str:
    """Run one of Slurm's commands and return its stdout.

    Raises Unreachable (exit 2 where the command is absent, else 75) or UserError with Slurm's message.
    """
    try:
        done = captured(arguments, timeout, environ)
    except FileNotFoundError:
        fix = "call this on a machine with Slurm's commands; submit --dry-run needs none"
        raise Unreachable(f"{arguments[0]} is not on PATH", fix=fix) from None
    except subprocess.TimeoutExpired:
        problem = Problem(f"{arguments[0]} gave no answer in {timeout:.0f} s", fix="is slurmctld up? try again later")
        raise Unreachable(problem, ExitCode.AGAIN) from None
    if done.returncode == 0:
        return done.stdout
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    text = "; ".join(re.sub(r"^\w+: (fatal: |error: )?", "", line) for line in lines[:4])
    if any(word in text.lower() for word in _UNREACHABLE):
        fix = "is this machine part of the cluster, and slurmctld up? scontrol ping shows it"
        raise Unreachable(f"{arguments[0]}: {text}", fix=fix, code=ExitCode.AGAIN)
    raise UserError(
        f"{arguments[0]}: {text}", fix=next((advice for sign, advice in _ADVICE.items() if sign in text.lower()), None)
    )


_ADVICE = {
    "invalid partition": "sinfo lists the partitions; slurm.partition of the cluster file names the one to use",
    "invalid generic resource": "scontrol show nodes lists Gres=; slurm.gres and compute.gpus of the cluster file say what",
    "requested node configuration": "sinfo -N -l shows what the nodes have; the cluster file says more than that",
    "more nodes than permitted": "the partition has fewer nodes or a MaxNodes: sinfo and scontrol show partition show it",
    "time limit": "scontrol show partition shows MaxTime; slurm.time=HH:MM:SS asks for less",
    "account": "export SBATCH_ACCOUNT=NAME before the same command",
}
"""What to do about the refusals of sbatch that people meet most, by what they hold; the first counts."""


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for ``sbatch``: without the caller's own job, and without what replaces the script's lines.

    ``SBATCH_*`` variables win over ``#SBATCH`` lines; those by which a site charges or places jobs are left.
    """
    options = ("SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_RESERVATION", "SBATCH_CONSTRAINT", "SBATCH_CLUSTERS", "SLURM_CONF")
    foreign = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC)(_|D_|$)")
    return {name: value for name, value in environ.items() if name in options or not foreign.match(name)}


def submit(options: Sequence[str], script: str, arguments: Sequence[str]) -> str:
    """``sbatch --parsable``: the id of the new job. Raises UserError with sbatch's message."""
    command = ["sbatch", "--parsable", *options, script, *arguments]
    answer = call(command, environ=submission_environment(os.environ)).strip()
    job = answer.splitlines()[-1].partition(";")[0] if answer else ""
    if not job.isdigit():
        raise UserError(f"sbatch answered {answer[:200]!r}, not the id of a job", fix="squeue --me shows what it made")
    return job


def cancel(jobs: Sequence[str], run: Run = call) -> None:
    """Cancel jobs; those that have ended are not an error. Raises UserError where Slurm cannot be reached."""
    if jobs:
        run(["scancel", *jobs])


def show_job(job: str, run: Run = call) -> dict[str, str] | None:
    """What the controller knows of a job; None where it has forgotten it. Raises Unreachable as :func:`show_jobs` does."""
    records = show_jobs(job, run)
    return next((record for record in records if record.get("JobId") == job), next(iter(records), None))


def show_jobs(job: str, run: Run = call) -> list[dict[str, str]]:
    """The same of all tasks of an array; empty where it is forgotten (``MinJobAge`` seconds after its end).

    The id of one task of an array is that of the whole, by which the controller tells of all of them (seen on 22.05).
    Raises Unreachable where the controller cannot be asked.
    """
    try:
        return parse_jobs(run(["scontrol", "show", "job", job]))
    except UserError as error:
        if not isinstance(error, Unreachable) and _UNKNOWN_JOB in str(error).lower():
            return []
        raise


def requeue(job: str, run: Run = call) -> None:
    """Put a running job back into the queue under its id; of an array's task ``ARRAY_TASK``, else all its tasks go."""
    run(["scontrol", "requeue", job])


def hostnames(expression: str, run: Run = call) -> list[str]:
    """The names that a node list means: by ``scontrol``, or by its own rules where that is not available."""
    try:
        names = run(["scontrol", "show", "hostnames", expression]).split()
    except UserError:
        names = []
    return names or expand_hosts(expression)


def format_minutes(minutes: float) -> str:
    """``HH:MM:SS``, rounded up to a second; days are written as hours, as people do (``48:00:00``)."""
    seconds = -int(-minutes * 60 // 1)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def is_running(job: str, run: Run = call) -> bool:
    """Whether a job runs now; False where that cannot be asked. One that is ending counts no more: its processes are killed."""
    try:
        record = show_job(job, run) or {}
    except UserError:
        return False
    return record.get("JobState") in ("RUNNING", "SUSPENDED")


# --- records --------------------------------------------------------------------------------------------------------------

# What ``scontrol show job`` says, as records. It needs no accounting database, and users may not have one.

_FREE_LINES = ("Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment", "SystemComment", "Dependency")
"""Keys with a line to themselves, whose values hold what a user typed."""


_NAME_END = re.compile(r"\n(?=   UserId=\S+ GroupId=\S+ MCS_label=.*\n   Priority=\d+ )")
"""Where the job's name ends: Slurm takes one with line breaks."""


def parse_jobs(text: str) -> list[dict[str, str]]:
    """The records of ``scontrol show job`` (several for an array).

    The form of several lines is read and not ``-o``: there a job's name, command or folder with blanks and equal signs cannot
    be separated from the keys after it.
    """
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n(?=JobId=)", text):
        if blocks and not _NAME_END.search(blocks[-1]):  # the break was part of the name
            blocks[-1] += "\n\n" + block
        else:
            blocks.append(block)
    return [parse_job(block) for block in blocks if _NAME_END.search(block)]


def parse_job(text: str) -> dict[str, str]:
    """One record."""
    head, rest = _NAME_END.split(text.strip("\n"), maxsplit=1)
    ids, _, name = head.partition(" JobName=")
    record = {**_pairs(ids), "JobName": name}
    for line in rest.split("\n"):
        key, equals, value = line.strip().partition("=")
        pairs = {key: value} if key in _FREE_LINES else _pairs(line)
        # The first stands: what follows a free text may be part of it.
        record = {**pairs, **record} if equals else record
    return record


def _pairs(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)
