"""The commands that put an attempt onto the nodes of a Slurm job: ``srun``, one task per node, in the container if any."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from clustertune.cluster.schema import Cluster
from clustertune.launch import cluster_paths, container
from clustertune.launch.allocation import Allocation
from clustertune.process import die_with_parent, handled

BASIC = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "XDG_RUNTIME_DIR",
    "APPTAINER_CACHEDIR",
    "APPTAINER_TMPDIR",
)
"""Variables of the batch script that reach the nodes where it has them; srun passes over the others without a word."""
EXPORTED = (*BASIC, *cluster_paths.VARIABLES)
"""The variables that reach the nodes, beside Slurm's own and those that the cluster's modules changed. Whatever else a login
shell exports, tokens among it, stays behind; rank 0 reads ``.env`` itself."""


def node_command(run_path: Path, attempt: int, *, quiet: bool = False, python: str = sys.executable) -> list[str]:
    """What every node runs; which of the nodes it is, it learns there (SLURM_NODEID), not here."""
    arguments = ["node", "--run-dir", str(run_path.resolve()), "--attempt", str(attempt), *(["--quiet"] if quiet else [])]
    return [python, "-m", "clustertune", *arguments]


def srun_command(
    command: Sequence[str],
    *,
    nodes: int,
    cpus: int | None,
    gpus: bool,
    environ: Mapping[str, str],
    options: Sequence[str] = (),
    inherited: Sequence[str] = EXPORTED,
    added: Sequence[str] = (),
) -> list[str]:
    """``srun`` of one task per node.

    ``--kill-on-bad-exit``: without it a failed node leaves the others waiting in a collective. ``--cpus-per-task``: srun
    takes it from sbatch no longer (Slurm 22.05), and would leave one core per node. ``--gpu-bind=none``: each rank sees all
    GPUs of its node, else NCCL finds no peer-to-peer path (NVIDIA/nccl#1066). ``--mem=0``: the step may use all that the
    job has. ``--overlap``: what is left of an attempt that a lost node cannot end does not hold off the next one.
    ``options``: further ones; ``inherited``: the variables that are exported, ``added``: ``NAME=value`` ones. The basic ones
    are named whether or not ``environ`` has them: what a batch script starts with differs between Slurm's releases, and the
    line that ``submit --dry-run`` prints is the one that runs.
    """
    exported = dict.fromkeys([*(name for name in inherited if name in BASIC or name in environ), *added])
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        "--mem=0",
        "--overlap",
        "--kill-on-bad-exit=1",
        *(["--gpu-bind=none"] if gpus else []),
        "--unbuffered",
        f"--export={','.join(exported)}",
        *options,
        *command,
    ]


def in_step(
    command: Sequence[str],
    cluster: Cluster,
    *,
    binds: Sequence[str | Path],
    nodes: int,
    cpus: int | None,
    gpus: bool,
    environ: Mapping[str, str],
    options: Sequence[str] = (),
) -> list[str]:
    """``srun`` of ``command``, whose first word is this machine's Python, in the cluster's container if it has one.

    ``binds``: what it has to see beside the checkout and what the cluster file names. Raises UserError for what cannot be
    bound.
    """
    placed = container.wrap(command, cluster, binds=[*binds, *cluster_paths.binds(environ)], gpus=gpus)
    return srun_command(
        placed.command,
        nodes=nodes,
        cpus=cpus,
        gpus=gpus,
        environ=environ,
        options=[*options, *placed.options],
        inherited=placed.exported or (*EXPORTED, *cluster_paths.of_modules(environ)),
        added=placed.added,
    )


def in_job(
    command: Sequence[str],
    cluster: Cluster,
    allocation: Allocation,
    *,
    binds: Sequence[str | Path],
    environ: Mapping[str, str] = os.environ,
    on: Sequence[str] | None = None,
    options: Sequence[str] = (),
) -> list[str]:
    """:func:`in_step` with what a job has, on all of its nodes that train, or those named."""
    named = on if on is not None else allocation.nodes if allocation.spare else None
    nodes, options = len(named or allocation.nodes), [*options, *([f"--nodelist={','.join(named)}"] if named else [])]
    cpus, gpus = requested_cpus(environ) or allocation.cpus_per_node, bool(allocation.gpus_per_node)
    return in_step(command, cluster, binds=binds, nodes=nodes, cpus=cpus, gpus=gpus, environ=environ, options=options)


def requested_cpus(environ: Mapping[str, str]) -> int | None:
    """CPUs of a step's task on each node, as the job asked for them; None where it did not.

    Slurm gives whole cores: a job that asked for one CPU has two, and srun warns of a step that wants both.
    """
    requested = environ.get("SLURM_CPUS_PER_TASK", "")
    return int(requested) if requested.isdigit() else None


def on_first_node(
    command: Sequence[str], cluster: Cluster, *, binds: Sequence[str | Path], host: str, gpus: bool, environ: Mapping[str, str]
) -> list[str]:
    """``command`` in the cluster's container on the node of the batch script, ``host``: what the other stages run in.

    Pyxis is a part of srun: there it is a step of one task.
    """
    if cluster.container.runtime == "pyxis":
        cpus, one = requested_cpus(environ), [f"--nodelist={host}"]  # all of the job's: prepare tokenises on each of them
        return in_step(command, cluster, binds=binds, nodes=1, cpus=cpus, gpus=gpus, environ=environ, options=one)
    return list(container.wrap(command, cluster, binds=[*binds, *cluster_paths.binds(environ)], gpus=gpus).command)


# --- srun -----------------------------------------------------------------------------------------------------------------

# Run one attempt as a step of a Slurm job: start it, pass on the warning, and let go when another start has taken over.

POLL_SECONDS = 0.5
END_SECONDS = 60.0
"""How long a step may take to end after one of its nodes failed: 20 s for messages, then Slurm's KillWait (30 s)."""


def run_step(
    command: Sequence[str],
    signals: list[int],
    still_mine: Callable[[], bool],
    failed: Callable[[], bool] = lambda: False,
    ask: Callable[[], None] | None = None,
) -> int:
    """Run ``srun`` to its end. Returns its exit code; signals that came meanwhile are added to ``signals``.

    SIGUSR1 goes on through srun to every process of the step: measured on Slurm 22.05, also to those in sessions of their
    own. SIGTERM Slurm itself sends to all of them; where only the batch script got it, it is passed on as SIGUSR1, which
    asks for a save. ``failed`` tells whether a node has recorded that it failed: srun waits without end for the tasks of a node
    that lost its power and came back before Slurm noticed. ``ask`` asks the ranks for a save in place of SIGUSR1 through srun.
    """
    child = begin(command)
    since: float | None = None
    with handled(_forward(child, signals, ask)):
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(POLL_SECONDS)
            now = time.monotonic()
            if since is None and failed():
                since = now
            if (since is not None and now - since > END_SECONDS) or not still_mine():
                child.kill()
                return child.wait()


def _forward(child: subprocess.Popen[bytes], signals: list[int], ask: Callable[[], None] | None) -> Any:
    def handle(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        if ask is not None:
            with contextlib.suppress(OSError):  # a full disk: the signal then, which is better than nothing
                ask()
                return
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGUSR1)

    return handle


def begin(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start ``srun``, which ends with this process; ``options``: further arguments of Popen."""
    return subprocess.Popen(list(command), stdin=subprocess.DEVNULL, preexec_fn=_in_srun, **options)  # noqa: PLW1509 - libc only


def _in_srun() -> None:
    """Before srun begins: it ends with this process."""
    die_with_parent(signal.SIGTERM)
