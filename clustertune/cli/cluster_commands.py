"""What prepares a cluster: ``setup`` and ``stage``, and ``demo-slurm`` on a temporary one."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from clustertune.cli.arguments import AsJson, ClusterOption, OptionalRecipe, Overrides, RecipeArgument, Tiny, path_option
from clustertune.console import reply, say, show_error
from clustertune.errors import ExitCode, UserError

if TYPE_CHECKING:
    from clustertune.cluster.schema import Cluster, Staging
    from clustertune.resolve.resolved import Resolved
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

    chosen = int(nodes) if re.fullmatch(r"[0-9]{1,9}", nodes) else tuple(nodes.split(","))
    return spec.ClusterSpec(nodes=chosen, gpus=gpus, isolation=isolation)


# --- stage ------------------------------------------------------------------------------------------------------------


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
    from clustertune.staging import hashed_copy

    _check_modes(to, verify, clean, eval_data)
    stall = stall or hashed_copy.STALL_SECONDS
    if verify is not None:
        _verify(verify, recipe, overrides or [], tiny, stall, as_json)
        return
    if clean:
        _clean(_staging_of(load.load_cluster(cluster)), dry_run, as_json)
        return
    if recipe is None:
        raise UserError("a recipe is missing", file="command line", fix="clustertune stage RECIPE, --verify DIR, or --clean")
    resolved = resolve.resolve(recipe, overrides or [], tiny=tiny)
    if to is not None:
        _collect(resolved, overrides or [], load.load_cluster(cluster), to, eval_data, stall, dry_run, as_json)
    else:
        staging = _staging_of(load.load_cluster(cluster))
        _copy_here(resolved, staging, run_dir, stall, dry_run, as_json)


def _check_modes(to: Path | None, verify: Path | None, clean: bool, rows: Path | None) -> None:
    modes = [name for name, value in (("--to", to), ("--verify", verify), ("--clean", clean)) if value]
    if len(modes) > 1:
        raise UserError(f"{' and '.join(modes)} exclude each other", file="command line", fix="give one of them")
    if rows is not None and to is None:
        fix = "clustertune stage RECIPE --to DIR --eval-data FILE"
        raise UserError("--eval-data is for --to", file="command line", fix=fix)


def _note_other_nodes() -> None:
    """In the shell of a Slurm job of several nodes: how the others get their copies."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if nodes != "1" and "SLURM_STEP_ID" not in os.environ:
        say(f"note: only on {os.uname().nodename}; on all {nodes} nodes: srun --ntasks-per-node=1 clustertune stage ...")


def _staging_of(cluster: Cluster) -> Staging:
    if cluster.storage.staging is None:
        fix = "storage: {staging: {path: /local/staging, gb: 2000}} in its file, or --cluster names another one"
        text = f"cluster {cluster.name} names no local disk to copy to"
        raise UserError(text, file=cluster.source, key="storage.staging", fix=fix)
    return cluster.storage.staging


def _copy_here(resolved: Resolved, staging: Staging, run_dir: Path | None, stall: float, dry_run: bool, as_json: bool) -> None:
    """Stage on this node, byte for byte verified."""
    from clustertune.launch import cluster_paths
    from clustertune.rundir import RunDir, default_run_dir
    from clustertune.staging import cache, hashed_copy, needs

    _note_other_nodes()
    run = RunDir(run_dir or default_run_dir(resolved, cluster_paths.runs(cluster_paths.local_cluster())))
    sources, notes = needs.sources(resolved, run)
    for note in notes:
        say(f"note: {note}")
    if not sources:
        raise UserError("nothing of this recipe can be copied yet", file=resolved.name, fix=notes[0])
    stager = cache.Stager(cache.open_cache(staging), stall)
    host = os.uname().nodename
    if dry_run:
        plans = [stager.plan(source) for source in sources]
        for plan in plans:
            state = "is there, and would be verified" if plan["there"] else f"would be copied from {plan['from']}"
            say(f"{plan['what']} {plan['name']}: {hashed_copy.amount(plan['bytes'])} in {plan['files']} files {state}")
        reply(as_json, {"host": host, "trees": plans, "notes": notes})
        return
    staged = []
    try:
        for source in sources:
            staged.append(stager.stage(source))
            body = staged[-1].as_json()
            how = "was there, and is whole" if body["reused"] else f"{body['seconds']:.1f} s, {body['gb_s']:.2f} GB/s"
            say(f"{body['what']} {body['name']}: {hashed_copy.amount(body['bytes'])}, {how}: {body['path']}")
    finally:
        for item in staged:
            item.release()
    reply(as_json, {"host": host, "trees": [item.as_json() for item in staged], "notes": notes})


def _clean(staging: Staging, dry_run: bool, as_json: bool) -> None:
    """Remove the copies on this node that are not in use."""
    from clustertune.staging import cache, hashed_copy

    _note_other_nodes()
    staged = cache.open_cache(staging)
    removed: list[dict[str, Any]] = []
    in_use: list[dict[str, Any]] = []
    for tree in staged.trees():
        gone = not dry_run and staged.remove(tree, say, "as asked")
        (removed if gone else in_use).append({"path": str(staged.folder(tree.key)), "bytes": tree.bytes})
        if not gone:
            word = "would be removed unless a job uses it" if dry_run else "stays: a job uses it"
            say(f"{staged.folder(tree.key)} ({hashed_copy.amount(tree.bytes)}) {word}")
    if not removed and not in_use:
        say(f"nothing in {staged.root}")
    reply(as_json, {"host": os.uname().nodename, "removed": removed, "kept": in_use})


def _collect(
    resolved: Resolved, overrides: list[str], cluster: Cluster, out: Path, rows: Path | None, stall: float,
    dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    """Everything into one folder."""
    from clustertune import secrets
    from clustertune.staging import bundle_fill, hashed_copy

    collector = bundle_fill.Collector(resolved, cluster, out, rows, stall)
    collector.check()
    with secrets.lent(secrets.of_the_hub()):
        parts = collector.plan()
        if dry_run:
            for part in parts:
                say(bundle_fill.as_words(part.as_json()))
            summary: dict[str, Any] = {"dir": str(out), "notes": collector.notes, "parts": [part.as_json() for part in parts]}
        else:
            summary = collector.go(parts, overrides)
    for note in collector.notes:
        say(f"note: {note}" if not note.startswith("warning") else note)
    if not dry_run:
        say(f"{out}: {summary['files']} files, {hashed_copy.amount(summary['bytes'])}")
        say(f"next: clustertune stage --verify {out}, then carry it over and run with staged={out}")
    reply(as_json, summary)


def _verify(folder: Path, recipe: str | None, overrides: list[str], tiny: bool, stall: float, as_json: bool) -> None:
    """Sums, and the rehearsal without network."""
    from clustertune.staging import bundle

    verdict = bundle.verify(folder, recipe, overrides, tiny=tiny, stall=stall, tell=say)
    error = UserError(verdict.problems)
    if verdict.problems:
        show_error(error)
    else:
        say(f"{folder}: complete, and nothing else is needed: run with staged={folder}")
    reply(as_json, {**verdict.as_json(), **error.as_dict(), "exit_code": 0 if not verdict.problems else int(error.code)})
    if verdict.problems:
        raise typer.Exit(int(ExitCode.CONFIG))
