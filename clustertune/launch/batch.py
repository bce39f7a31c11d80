"""A job beside the chain's: a measurement that runs once, on whole nodes, from the body of a script of its own."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune.cluster.schema import Cluster
from clustertune.console import emit_json, say
from clustertune.errors import UserError, raise_if, storage_error
from clustertune.launch import cluster_paths, slurm
from clustertune.launch.shape import JobShape
from clustertune.launch.stage_jobs import ahead_of_body, escape_pattern, header_line, split_script
from clustertune.manifest import write_durably
from clustertune.tree import ROOT


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """What is submitted."""

    shape: JobShape
    script: str
    """The text of the sbatch file."""
    folder: Path
    """Where its file and its log go."""
    arguments: tuple[str, ...]
    """Those of the command that it runs."""
    file: str = "job.sbatch"
    beside: Mapping[str, str] = field(default_factory=dict)
    """What the job reads, by the names of files beside its own."""

    @property
    def path(self) -> Path:
        return self.folder / self.file

    @property
    def options(self) -> list[str]:
        """Paths, which an ``#SBATCH`` line would split at blanks, and what SBATCH_EXPORT would replace there."""
        return ["--export=NIL", f"--chdir={ROOT}", f"--output={escape_pattern(self.folder)}/%x-%j.log"]

    def command(self) -> list[str]:
        """``sbatch`` as it is called."""
        return ["sbatch", "--parsable", *self.options, str(self.path), *self.arguments]

    def show(self, as_json: bool, **more: Any) -> None:
        """What a dry run prints; ``more``: keys of the JSON document."""
        if as_json:
            emit_json({"file": str(self.path), "script": self.script, "command": self.command(), **more})
        else:
            sys.stdout.write(f"# {self.shape}\n# {self.path}\n{self.script}$ {shlex.join(self.command())}\n")

    def submit(self, cluster: Cluster, as_json: bool, places: tuple[tuple[str, Path], ...] = (), **more: Any) -> str:
        """Write the file and put the job into the queue; its number.

        Raises UserError where there is no sbatch, nodes would not see the checkout or one of ``places``, or storage fails.
        ``more``: keys of the JSON document.
        """
        if shutil.which("sbatch") is None:
            raise UserError("sbatch is not on PATH", fix="call this on a login node of the cluster; --dry-run needs no Slurm")
        raise_if(cluster_paths.find_unshared([*places, ("the checkout", ROOT)], cluster))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, text in {**self.beside, self.file: self.script}.items():
                write_durably(self.folder / name, text)
        except OSError as error:
            raise storage_error(error, "cannot hold the job", error.filename or self.folder) from None
        number = slurm.submit(self.options, str(self.path), self.arguments)
        if as_json:
            emit_json({"job": number, "folder": str(self.folder), **more, "command": self.command()})
        say(f"job {number}: {self.shape}")
        return number


def render(name: str, shape: JobShape, note: str, source: str, *, alone: bool = True) -> str:
    """The sbatch file; the job is never started again, and ``alone`` on its nodes, so that no neighbour is measured.

    ``note`` says from what it was derived; ``source`` is the text of its body's file.
    """
    _, body = split_script(source)
    options = [f"--job-name={name}", *shape.options(), *(["--exclusive"] if alone else []), "--no-requeue", "--export=NIL"]
    return f"#!/usr/bin/env bash\n# {note}\n" + "".join(map(header_line, options)) + ahead_of_body(shape) + body
