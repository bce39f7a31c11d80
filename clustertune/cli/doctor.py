"""``clustertune doctor``: look for what goes wrong on clusters before it does."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from clustertune.cli.arguments import AsJson, ClusterOption, OptionalRecipe, Overrides, Tiny, path_argument, path_option, takes


@dataclass(frozen=True)
class DoctorArguments:
    """Check this machine, or all nodes of this job, and a recipe.

    Exit 0: nothing found; 1: warnings; 2: what would stop or spoil a job.
    """

    recipe: OptionalRecipe = None
    overrides: Overrides = None
    cluster: ClusterOption = None
    tiny: Tiny = False
    run_dir: Annotated[Path | None, path_option("Run folder. Default: as for submit.")] = None
    ignore: Annotated[list[str] | None, typer.Option("--ignore", metavar="RULE", help="Skip a rule; repeatable.")] = None
    everything: Annotated[bool, typer.Option("--all", help="Also show what passed or could not be checked.")] = False
    place: Annotated[
        str | None, typer.Option(metavar="PLACE", help="Where: login, here, step, container, container+step; else detected.")
    ] = None
    here: Annotated[bool, typer.Option("--here", help="Inside a Slurm job, check only this machine.")] = False
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="Time limit for checking one machine, seconds.")] = 30
    python: Annotated[Path | None, path_option("Python of the ranks. Default: this one.", metavar="FILE")] = None
    submit: Annotated[bool, typer.Option("--submit", help="Submit the check as a Slurm job on whole nodes.")] = False
    nodes: Annotated[int | None, typer.Option(min=1, help="With --submit: number of nodes. Default: all.")] = None
    time: Annotated[str | None, typer.Option("--time", help="With --submit: the job's time limit.", show_default=False)] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")] = False
    listing: Annotated[bool, typer.Option("--list", help="Print the rules.")] = False
    out: Annotated[Path | None, path_option("With --list: write docs/doctor.md to this file.", "--out", metavar="FILE")] = None
    as_json: AsJson = False


class WithDefault(TyperGroup):
    """A group whose first command is meant where none is named: ``doctor RECIPE`` is ``doctor check RECIPE``."""

    default = "check"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default in front, unless a command or the group's own help is asked for."""
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


doctor_app = typer.Typer(cls=WithDefault)


@doctor_app.callback()
def _group() -> None:
    """Look for mistakes before they cost a job.

    clustertune doctor [RECIPE] [OPTIONS] is short for clustertune doctor check [RECIPE] [OPTIONS].
    """


doctor_app.command("check")(takes(DoctorArguments, "cli.doctor_answers:answer"))


@doctor_app.command()
def sbatch(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Batch scripts to check.")],
    as_json: AsJson = False,
) -> None:
    """Find known mistakes in batch scripts, with line and remedy.

    Exit 0: none; 1: findings. Only reads the scripts. Without an installation: uvx --from CHECKOUT clustertune doctor sbatch.
    """
    from clustertune.check import sbatch as linter
    from clustertune.check.rule import printable
    from clustertune.console import emit_json, escape, say
    from clustertune.errors import ExitCode, Problem, UserError, raise_if, storage_error

    found, problems = [], []
    for file in files:
        try:
            found.append((file, linter.lint_file(str(path_argument(file)))))
        except UserError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(Problem(str(error), file=file, fix="give a batch script"))
        except OSError as error:
            problems += storage_error(error, "cannot be read", file).problems
    raise_if(problems)
    if as_json:
        keys = {"rule": "rule", "message": "found", "remedy": "fix", "link": "link"}
        listing = [
            {"file": path, "findings": [{"line": int(i.where)} | {k: getattr(i, v) for k, v in keys.items()} for i in findings]}
            for path, findings in found
        ]
        emit_json({"files": listing, "findings": sum(len(findings) for _, findings in found)})
    for path, findings in found if not as_json else []:
        for item in findings:
            sys.stdout.write(escape(printable(f"{path}:{item.where}: {item.rule}: {item.found} -> {item.fix}")) + "\n")
    count = sum(len(findings) for _, findings in found)
    say(f"{len(found)} files, {count} findings" if len(found) > 1 else f"{count} findings")
    raise typer.Exit(int(ExitCode.FAILED) if count else 0)
