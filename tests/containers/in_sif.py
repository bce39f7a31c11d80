"""A command in a SIF; a cluster file for the temporary Slurm whose ranks run in a SIF, and jobs on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from clustertune.testbed.cluster import TemporaryCluster
from tests.slurm_job import RECIPE, SETTINGS, Job


def cluster_file(
    folder: Path, slurm: TemporaryCluster, *, image: Path, program: str, options: Sequence[str], extra: str = ""
) -> Path:
    """``insif.yaml``: the nodes as they are, and the container."""
    hosts = "".join(
        f"  - {{name: {name}, address: {name}, roles: [compute{', slurmctld, login' if index == 0 else ''}]}}\n"
        for index, name in enumerate(slurm.names)
    )
    file = folder / "insif.yaml"
    file.write_text(
        f"name: insif\nnodes:\n{hosts}"
        "compute: {gpus: 1, gpu: rtx-pro-6000-blackwell-server, interconnect: none, cores: 2, threads: 2, memory_gb: 16}\n"
        "network: {interface: eth0, kind: ethernet, gbit: 10}\n"
        "slurm: {partition: gpu, gres: rtx_pro_6000}\n"
        f"container: {{runtime: apptainer, image: {image}, program: {program}, options: [{', '.join(options)}]}}\n{extra}"
    )
    return file


def job(slurm: TemporaryCluster, run: Path, file: Path, *, to: str = "export") -> Job:
    """The tiny recipe as a job of two nodes in the container."""
    return Job(slurm, run, words=[RECIPE, "--tiny", "--cluster", str(file), "--to", to, *SETTINGS])


def in_sif(program: str, image: Path, *command: str) -> list[str]:
    """A command in a SIF that sees nothing of this machine: no home, no environment, no network."""
    # Root on a machine without every capability (a container, a small VM) may not start it otherwise.
    user = ["--userns"] if os.geteuid() == 0 else []
    alone = ["--containall", "--cleanenv", "--no-home", "--net", "--network", "none"]
    return [program, "exec", *user, *alone, str(image), *command]
