"""What ``plan``, ``new``, ``doctor`` and ``nccl-check`` take: their help is shown without what they do being loaded."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from clustertune.cli.arguments import (
    AsJson,
    ClusterOption,
    DataOption,
    GpusOption,
    MethodOption,
    ModelOption,
    OptionalRecipe,
    Overrides,
    Tiny,
    path_argument,
    path_option,
    takes,
)
from clustertune.errors import ExitCode, Problem, UserError, raise_if, storage_error

# --- plan --------------------------------------------------------------------------------------------------------------

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE [section.key=value]...",
        help="A recipe, two with --compare, or run folders with --calibrate; and overrides.",
    ),
]


@dataclass(frozen=True)
class PlanArguments:
    """--advise ranks alternatives. --model plans a model without a recipe."""

    targets: Targets = None
    model: ModelOption = None
    gpus: GpusOption = None
    method: MethodOption = "lora"
    data: DataOption = None
    cluster: ClusterOption = None
    clusters: Annotated[
        str | None, typer.Option(metavar="all|A,B", help="One row a cluster, the cheapest first; --gpus counts as one.")
    ] = None
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="FILE", help="With --clusters: a page (HTML) of the rows. With --simulate: a picture (SVG)."
        ),
    ] = None
    tiny: Tiny = False
    why: Annotated[
        str | None,
        typer.Option(metavar="PART", help="Show the arithmetic of one part: step, memory, communication, hours, mfu ..."),
    ] = None
    advise: Annotated[bool, typer.Option("--advise", help="Search the strategies that fit and rank them.")] = False
    largest: Annotated[
        bool,
        typer.Option("--largest", help="The largest model, sequence length and micro batch that fit; --model names one."),
    ] = False
    within: Annotated[
        float | None,
        typer.Option(metavar="AMOUNT", help="A budget in the prices' currency: what costs more is left out, and exits with 2."),
    ] = None
    goal: Annotated[str, typer.Option(metavar="time|cost|memory", help="What --advise ranks by.")] = "time"
    nodes: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Node counts that --advise tries; the recipe's by default.")
    ] = None
    compare: Annotated[bool, typer.Option("--compare", help="Compare two recipes.")] = False
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit the planner to measured runs and save the result next to the cluster file.")
    ] = False
    nccl_check: Annotated[str | None, typer.Option(metavar="FILE", help="Use the result of an nccl-check on this cluster.")] = (
        None
    )
    lengths: Annotated[
        str | None, typer.Option(metavar="FILE", help="File with tokens per conversation, one number a line.")
    ] = None
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run two training steps of one rank at full size on fake tensors, without a GPU.")
    ] = False
    depth: Annotated[
        int | None,
        typer.Option(metavar="N", help="Layers that --simulate makes, each as wide as the recipe's; all by default."),
    ] = None
    ranks: Annotated[
        str | None,
        typer.Option(metavar="R[,R...]", help="Ranks that --simulate runs, compared: numbers, first, last, each-node."),
    ] = None
    as_document: AsJson = False

    @property
    def names(self) -> list[str]:
        """Recipes, or runs."""
        return [text for text in self.targets or [] if "=" not in text]

    @property
    def overrides(self) -> list[str]:
        return [text for text in self.targets or [] if "=" in text]


plan = takes(PlanArguments, "cli.planning:answer")

# --- new ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NewArguments:
    """LoRA target modules come from the model's architecture, the distribution from the planner. Prints every assumption."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new recipe: a folder below recipes/, or a path.")]
    model: ModelOption = None
    data: DataOption = None
    method: MethodOption = "lora"
    gpus: GpusOption = None
    cluster: ClusterOption = None
    as_json: AsJson = False
    overrides: Overrides = None


new = takes(NewArguments, "cli.planning:write_recipe")

# --- doctor ------------------------------------------------------------------------------------------------------------


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


doctor_app.command("check")(takes(DoctorArguments, "cli.doctor:answer"))


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

    results, problems = [], []
    for file in files:
        try:
            results.append((file, linter.lint_file(str(path_argument(file)))))
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
            for path, findings in results
        ]
        emit_json({"files": listing, "findings": sum(len(findings) for _, findings in results)})
    for path, findings in results if not as_json else []:
        for item in findings:
            sys.stdout.write(escape(printable(f"{path}:{item.where}: {item.rule}: {item.found} -> {item.fix}")) + "\n")
    count = sum(len(findings) for _, findings in results)
    say(f"{len(results)} files, {count} findings" if len(results) > 1 else f"{count} findings")
    raise typer.Exit(int(ExitCode.FAILED) if count else 0)


# --- nccl-check --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NcclCheckArguments:
    """Runs on this machine, or inside a Slurm job on all its nodes; --submit submits such a job. Uses NCCL between GPUs, gloo
    between CPUs. Exit 0: nothing to fix; 1: warnings, or the verdict is unknown; 2: what would stop or spoil a job.
    """

    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="With --logs: recorded NCCL logs.", show_default=False)
    ] = None
    logs: Annotated[bool, typer.Option("--logs", help="Check recorded logs only; measure nothing.")] = False
    cluster: ClusterOption = None
    seconds: Annotated[
        float | None,
        typer.Option(
            min=10,
            max=86_400,
            help="Seconds to measure. Default: 300, on CPUs 60. The command ends at most 60 s later.",
            show_default=False,
        ),
    ] = None
    largest: Annotated[
        str | None, typer.Option("--max", metavar="SIZE", help="Largest message. Default: 1G, on CPUs 64M or less.")
    ] = None
    collectives: Annotated[str | None, typer.Option(metavar="A,B", help="Only these collectives.", show_default=False)] = None
    scopes: Annotated[
        str | None, typer.Option(metavar="A,B", help="Groups of ranks to measure: world,intra,inter,pair.", show_default=False)
    ] = None
    backend: Annotated[str, typer.Option(help="nccl, gloo, or auto: NCCL if there are GPUs.")] = "auto"
    ranks: Annotated[int | None, typer.Option(min=1, max=256, help="Ranks per node. Default: one per GPU.")] = None
    nodes: Annotated[int | None, typer.Option(min=1, help="With --submit: number of nodes.")] = None
    out: Annotated[Path | None, path_option("Folder for logs and result.", "--out")] = None
    save: Annotated[bool, typer.Option("--save", help="Save the result next to the cluster file, for plan.")] = False
    submit: Annotated[bool, typer.Option("--submit", help="Submit the check as a Slurm job on whole nodes.")] = False
    wait: Annotated[bool, typer.Option("--wait", help="With --submit: wait for the verdict and print it.")] = False
    time: Annotated[str | None, typer.Option("--time", help="With --submit: the job's time limit.", show_default=False)] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")] = False
    as_json: AsJson = False


nccl_check = takes(NcclCheckArguments, "cli.nccl_check:answer")
