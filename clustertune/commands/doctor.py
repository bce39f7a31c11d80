"""``clustertune doctor``: look for what goes wrong on clusters before it does."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from clustertune.arguments import AsJson, path_argument
from clustertune.console import emit_json, escape, say
from clustertune.errors import ExitCode, Problem, UserError, storage_error

doctor_app = typer.Typer(no_args_is_help=True, help="Look for mistakes before they cost a job.")


def add(app: typer.Typer) -> None:
    """Register the group."""
    app.add_typer(doctor_app, name="doctor")


@doctor_app.callback()
def _group() -> None:
    """Look for mistakes before they cost a job."""


@doctor_app.command()
def sbatch(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Batch scripts.")],
    as_json: AsJson = False,
) -> None:
    """Find the known mistakes in batch scripts, each with line and remedy.

    Exit 0: none; 1: findings. It reads only: python3 -m clustertune.doctor.sbatch does the same without an installation.
    """
    from clustertune.doctor import sbatch as doctor

    found, problems = [], []
    for file in files:
        try:
            found.append((file, doctor.lint_file(str(path_argument(file)))))
        except UserError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(Problem(str(error), file=file, fix="give a batch script"))
        except OSError as error:
            problems += storage_error(error, "cannot be read", file).problems
    if problems:
        raise UserError(problems)
    if as_json:
        emit_json(doctor.as_json(found))
    for path, findings in found if not as_json else []:
        for line in doctor.report(path, findings):
            sys.stdout.write(escape(line) + "\n")
    count = sum(len(findings) for _, findings in found)
    say(f"{len(found)} files, {count} findings" if len(found) > 1 else f"{count} findings")
    if count:
        raise typer.Exit(int(ExitCode.FAILED))
