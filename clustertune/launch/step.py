"""The commands that put an attempt onto the nodes of a Slurm job: ``srun``, one task per node, in the container if any."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

EXPORTED = (
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
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_DATASETS_CACHE",
    "WANDB_MODE",
    "APPTAINER_CACHEDIR",
    "APPTAINER_TMPDIR",
)
"""The variables that reach the nodes, beside Slurm's own. Whatever else a login shell exports, tokens among it, stays behind;
rank 0 reads ``.env`` itself."""


def node_command(run_path: Path, attempt: int, *, quiet: bool = False, python: str = sys.executable) -> list[str]:
    """What every node runs; which of the nodes it is, it learns there (SLURM_NODEID), not here."""
    words = ["node", "--run-dir", str(run_path.resolve()), "--attempt", str(attempt), *(["--quiet"] if quiet else [])]
    return [python, "-m", "clustertune", *words]


def srun_command(command: Sequence[str], *, nodes: int, cpus: int | None, gpus: bool, environ: Mapping[str, str]) -> list[str]:
    """``srun`` of one task per node.

    ``--kill-on-bad-exit``: without it a failed node leaves the others waiting in a collective. ``--cpus-per-task``: srun
    takes it from sbatch no longer (Slurm 22.05), and would leave one core per node. ``--gpu-bind=none``: each rank sees all
    GPUs of its node, else NCCL finds no peer-to-peer path (NVIDIA/nccl#1066). ``--mem=0``: the step may use all that the
    job has. ``--overlap``: what is left of an attempt that a lost node cannot end does not hold off the next one.
    """
    exported = [name for name in EXPORTED if name in environ]
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
        f"--export={','.join(exported) or 'NIL'}",
        *command,
    ]


def container_command(
    command: Sequence[str], *, runtime: str, image: str | None, binds: Sequence[str], gpus: bool, repo: Path
) -> list[str]:
    """``command`` inside the cluster's container; as it stands where there is none.

    ``--no-home`` and PYTHONNOUSERSITE: packages in ``~/.local`` would shadow the image's (Apptainer mounts the home folder).
    The environment is not cleaned: srun exports an allow-list already, and the node learns from Slurm's variables which one
    it is. The first word, this machine's Python, becomes the image's.
    """
    if runtime == "none":
        return list(command)
    assert image is not None
    places = list(dict.fromkeys([str(repo), *binds]))
    return [
        runtime,
        "exec",
        *(["--nv"] if gpus else []),
        "--no-home",
        "--env",
        "PYTHONNOUSERSITE=1",
        "--pwd",
        str(repo),
        *(word for place in places for word in ("--bind", place)),
        image,
        "python3",
        *command[1:],
    ]
