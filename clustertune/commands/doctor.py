"""``clustertune doctor``: look for what goes wrong on clusters before it does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from clustertune.arguments import AsJson, ClusterOption, OptionalRecipe, Overrides, Tiny, path_argument
from clustertune.console import emit_json, escape, say
from clustertune.errors import ExitCode, Problem, UserError, storage_error


class WithDefault(TyperGroup):
    """A group whose first command is meant where none is named: ``doctor RECIPE`` is ``doctor check RECIPE``."""

    default = "check"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default in front, unless a command or the group's own help is asked for."""
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


doctor_app = typer.Typer(cls=WithDefault)


def add(app: typer.Typer) -> None:
    """Register the group."""
    app.add_typer(doctor_app, name="doctor")


@doctor_app.callback()
def _group() -> None:
    """Look for mistakes before they cost a job.

    clustertune doctor [RECIPE] [OPTIONS] is clustertune doctor check [RECIPE] [OPTIONS].
    """


@doctor_app.command()
def check(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    cluster: ClusterOption = None,
    tiny: Tiny = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=path_argument, help="The run; without it runs/<recipe>/<fingerprint>."),
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option("--ignore", metavar="RULE", help="Leave a rule out; repeatable.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show also what is as it should be.")] = False,
    place: Annotated[
        str | None, typer.Option(metavar="PLACE", help="login, here, step, container or container+step; without it, as found.")
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="In a Slurm job: this machine alone.")] = False,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="How long a machine may be looked at.")] = 30,
    python: Annotated[
        Path | None, typer.Option(metavar="FILE", parser=path_argument, help="The ranks' Python; without it this one.")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="As a Slurm job on whole nodes.")] = False,
    nodes: Annotated[int | None, typer.Option(min=1, help="With --submit: how many; without it all.")] = None,
    time: Annotated[str | None, typer.Option("--time", help="With --submit: the job's limit.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Print the rules.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", parser=path_argument, help="With --list: write the documents' page."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look at this machine, or every node of this Slurm job, and at a recipe.

    Exit 0: nothing found; 1: warnings; 2: what would stop or spoil a job. python3 -m clustertune.doctor needs no installation.
    """
    given = dict(locals())  # the options by their names, which are those of Asked
    from clustertune.commands import doctoring

    raise typer.Exit(doctoring.answer(doctoring.Asked(**given)))


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
