"""A job beside the chain's: a measurement that runs once, on whole nodes, from the body of a script of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clustertune.launch.shape import Shape
from clustertune.launch.submit import ahead_of_body, escape_pattern, header_line, split_script
from clustertune.tree import ROOT


@dataclass(frozen=True)
class BatchJob:
    """What is submitted."""

    script: str
    """The text of the sbatch file."""
    folder: Path
    """Where its file and its log go."""
    arguments: tuple[str, ...]
    """Those of the command that it runs."""

    @property
    def path(self) -> Path:
        return self.folder / "job.sbatch"

    @property
    def options(self) -> list[str]:
        """Paths, which an ``#SBATCH`` line would split at blanks, and what SBATCH_EXPORT would replace there."""
        return ["--export=NIL", f"--chdir={ROOT}", f"--output={escape_pattern(self.folder)}/%x-%j.log"]

    def command(self) -> list[str]:
        """``sbatch`` as it is called."""
        return ["sbatch", "--parsable", *self.options, str(self.path), *self.arguments]


def render(name: str, shape: Shape, note: str, source: str) -> str:
    """The sbatch file: whole nodes where they can be had, so that no neighbour is measured, and never started again.

    ``note`` says from what it was derived; ``source`` is the text of its body's file.
    """
    _, body = split_script(source)
    options = [f"--job-name={name}", *shape.options(), "--exclusive", "--no-requeue", "--export=NIL"]
    return f"#!/usr/bin/env bash\n# {note}\n" + "".join(map(header_line, options)) + ahead_of_body(shape) + body
