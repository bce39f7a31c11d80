"""``clustertune doctor --submit``: looking at every node as a Slurm job over the body of ops/doctor/doctor.sbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertune.config.cluster_schema import Cluster
from clustertune.launch.shape import Shape
from clustertune.launch.submit import ahead_of_body, escape_pattern, header_line, split_script
from clustertune.nccl_check.batch import shape as whole_nodes
from clustertune.tree import ROOT

SCRIPT = ROOT / "ops" / "doctor" / "doctor.sbatch"


@dataclass(frozen=True)
class DoctorJob:
    """What is submitted."""

    shape: Shape
    script: str
    """The text of the sbatch file."""
    path: Path
    """Where it is written, its log beside it."""
    arguments: tuple[str, ...]
    """Those of ``clustertune doctor check`` in the job."""

    @property
    def options(self) -> list[str]:
        """Paths, which an ``#SBATCH`` line would split at blanks, and what SBATCH_EXPORT would replace there."""
        return ["--export=NIL", f"--chdir={ROOT}", f"--output={escape_pattern(self.path.parent)}/%x-%j.log"]

    def command(self) -> list[str]:
        """``sbatch`` as it is called."""
        return ["sbatch", "--parsable", *self.options, str(self.path), *self.arguments]


def make(
    cluster: Cluster, nodes: int | None, time: str | None, seconds: float, folder: Path, arguments: Sequence[str]
) -> DoctorJob:
    """The job on ``nodes`` whole nodes, all of the cluster where it is None. Raises UserError where it cannot be."""
    wanted = whole_nodes(cluster, nodes, time, seconds)
    _, body = split_script(SCRIPT.read_text())
    options = ["--job-name=doctor", *wanted.options(), "--no-requeue", "--export=NIL"]
    note = "# Derived by clustertune doctor --submit from the cluster file.\n"
    script = "#!/usr/bin/env bash\n" + note + "".join(map(header_line, options)) + ahead_of_body(wanted) + body
    return DoctorJob(wanted, script, folder.absolute() / "doctor.sbatch", tuple(arguments))
