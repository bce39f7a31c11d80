"""What prepares a cluster: ``setup`` and ``stage``, and ``demo-slurm`` on a temporary one."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from clustertune.cli.arguments import AsJson, ClusterOption, OptionalRecipe, Overrides, RecipeArgument, Tiny, path_option
from clustertune.console import reply, say
from clustertune.errors import UserError

if TYPE_CHECKING:
    from clustertune.setup import rendered
    from clustertune.testbed import spec


setup_app = typer.Typer(no_args_is_help=True, help="Render files that set up a node.")

NodeOption = Annotated[
    str | None,
    typer.Option("--node", metavar="NAME", help="Machine of the cluster file. Default: this one.", show_default=False),
]
OutOption = Annotated[Path, path_option("Folder to write: new, empty, or written by setup before.", "--out")]


def _written(made: rendered.Rendered, node: str, out: Path, script: str, as_json: bool, more: dict[str, Any]) -> None:
    made.write(out)
    document = {"node": node, "out": str(out), "files": sorted(made.files), "notes": made.notes, "verified": made.verified}
    reply(as_json, document | more)
    for note in made.notes:
        say(f"note: {note}")
    say(f"verified by {made.verified}" if made.verified else "not verified: what reads these files is not installed here")
    say(f"{node}: {len(made.files)} files in {out}; read {script}, and run it as root on {node}")


@setup_app.command("storage")
def storage(out: OutOption, cluster: ClusterOption = None, node: NodeOption = None, as_json: AsJson = False) -> None:
    """Render fstab lines, exports and a script for a node."""
    from clustertune.cluster import load
    from clustertune.setup import rendered, setup_machine

    loaded = load.load_cluster(cluster)
    host = setup_machine.choose_node(loaded, node)
    _written(rendered.storage(loaded, host), host.name, out, rendered.STORAGE_SCRIPT, as_json, {})


@setup_app.command("slurm")
def slurm(
    out: OutOption,
    cluster: ClusterOption = None,
    node: NodeOption = None,
    accounting: Annotated[
        bool | None,
        typer.Option("--accounting/--no-accounting", help="Set up slurmdbd and sacct. Default: what slurm.accounting says."),
    ] = None,
    try_it: Annotated[bool, typer.Option("--try", help="Start a temporary Slurm with these files on this machine.")] = False,
    as_json: AsJson = False,
) -> None:
    """Render slurm.conf and the files around it for a node."""
    from clustertune.cluster import load
    from clustertune.setup import rendered, setup_machine
    from clustertune.testbed.cluster import try_out

    loaded = load.load_cluster(cluster)
    host = setup_machine.choose_node(loaded, node)
    made = rendered.slurm(loaded, host, accounting)
    more: dict[str, Any] = {}
    if try_it:
        more["tried"] = tried = try_out(loaded, rendered.all_texts(loaded, accounting=accounting))
        say(f"tried here: {', '.join(tried['nodes'])} idle after {tried['seconds']} s, and a job ran on each")
    _written(made, host.name, out, rendered.SLURM_SCRIPT, as_json, more)


# --- demo-slurm --------------------------------------------------------------------------------------------------------

DEMO = "recipes/llama405b-oasst2"
SCRIPT = Path("launch", "run.sbatch")


Isolation = Literal["auto", "netns", "none"]
"""How the nodes are kept apart."""

Nodes = Annotated[str, typer.Option(metavar="N|NAME,NAME", help="How many nodes (1 to 16), or their names.")]
IsolationOption = Annotated[
    Isolation, typer.Option(help="netns: each node in its own namespaces; none: not isolated; auto: netns if possible.")
]


def demo_slurm(
    recipe: RecipeArgument = DEMO,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="section.key=value", help="Settings that replace the recipe's.")
    ] = None,
    nodes: Nodes = "2",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs per node; each is one CPU process.")] = 1,
    isolation: IsolationOption = "auto",
    run_dir: Annotated[Path | None, path_option("Run folder. Default: a new one in runs/rehearsal/.")] = None,
    as_json: AsJson = False,
) -> None:
    """Starts the cluster, submits the real job script launch/run.sbatch, follows the job to its end, and stops the cluster."""
    from clustertune.launch import cluster_paths
    from clustertune.testbed.cluster import rehearse

    if not SCRIPT.is_file():
        raise UserError("no such file", file=str(SCRIPT), fix="call this in the checkout of clustertune")
    if "=" in recipe:  # the recipe is left out, and this is the first of the overrides
        recipe, overrides = DEMO, [recipe, *(overrides or [])]
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", Path(recipe).name)
    new = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = run_dir or cluster_paths.runs(cluster_paths.local_cluster()) / "rehearsal" / new
    arguments = [recipe, *(overrides or []), "--tiny", "--run-dir", str(folder.resolve())]
    ended = rehearse(_spec(nodes, gpus, isolation), SCRIPT, arguments, folder)
    document = {"job": ended.job, "state": ended.state, "run_dir": str(folder), "log": str(ended.log)}
    reply(as_json, {**document, "exit_code": ended.code})
    if ended.code:
        raise typer.Exit(ended.code)


def _spec(nodes: str, gpus: int, isolation: Isolation) -> spec.ClusterSpec:
    from clustertune.testbed import spec

    wanted = int(nodes) if re.fullmatch(r"[0-9]{1,9}", nodes) else tuple(nodes.split(","))
    return spec.ClusterSpec(nodes=wanted, gpus=gpus, isolation=isolation)


def stage(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    cluster: ClusterOption = None,
    run_dir: Annotated[Path | None, path_option("Run whose data is copied. Default: the recipe's.")] = None,
    to: Annotated[Path | None, path_option("Collect everything the recipe needs in this folder.", "--to")] = None,
    eval_data: Annotated[
        Path | None, path_option("Rows for a task that reads a file, for --to.", "--eval-data", metavar="FILE")
    ] = None,
    verify: Annotated[Path | None, path_option("Check such a folder, and test it without network.", "--verify")] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Remove the copies that no job uses.")] = False,
    tiny: Tiny = False,
    stall: Annotated[float | None, typer.Option(min=1, help="Give up after this many seconds without data.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """A bundle is for machines without network. Copies are made on this node; existing ones are verified and kept, the least
    recently used are removed to make room. Every training job copies by itself, on all of its nodes.
    """
    from clustertune.cluster import load
    from clustertune.resolve import resolve
    from clustertune.staging import hashed_copy, stage_command

    _check_modes(to, verify, clean, eval_data)
    stall = stall or hashed_copy.STALL_SECONDS
    if verify is not None:
        stage_command.verify(verify, recipe, overrides or [], tiny, stall, as_json)
        return
    if clean:
        stage_command.clean(stage_command.staging_of(load.load_cluster(cluster)), dry_run, as_json)
        return
    if recipe is None:
        raise UserError("a recipe is missing", file="command line", fix="clustertune stage RECIPE, --verify DIR, or --clean")
    resolved = resolve.resolve(recipe, overrides or [], tiny=tiny)
    if to is not None:
        stage_command.collect(resolved, overrides or [], load.load_cluster(cluster), to, eval_data, stall, dry_run, as_json)
    else:
        staging = stage_command.staging_of(load.load_cluster(cluster))
        stage_command.copy_here(resolved, staging, run_dir, stall, dry_run, as_json)


def _check_modes(to: Path | None, verify: Path | None, clean: bool, rows: Path | None) -> None:
    modes = [name for name, given in (("--to", to), ("--verify", verify), ("--clean", clean)) if given]
    if len(modes) > 1:
        raise UserError(f"{' and '.join(modes)} exclude each other", file="command line", fix="give one of them")
    if rows is not None and to is None:
        fix = "clustertune stage RECIPE --to DIR --eval-data FILE"
        raise UserError("--eval-data is for --to", file="command line", fix=fix)
