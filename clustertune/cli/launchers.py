"""Commands behind the other launchers: ``torchrun-node`` (``launch/torchrun.sh`` calls it) and ``sky``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clustertune import console
from clustertune.arguments import AsJson, Overrides, RecipeArgument, Tiny, path_option
from clustertune.cli.deferred import deferred
from clustertune.console import reply, say
from clustertune.errors import ExitCode, Problem, UserError, raise_if
from clustertune.rundir import RunDir, keep_private

if TYPE_CHECKING:
    from clustertune.resolve.resolved import Resolved

with deferred():
    from clustertune import chain, summary, torchrun
    from clustertune.evaluate import scores
    from clustertune.launch import cluster_paths, skypilot
    from clustertune.resolve import resolve

RunDirOption = Annotated[
    Path | None, path_option("Run folder on storage that all nodes share. Default: below runs/.", "--run-dir")
]


def add(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("torchrun-node", hidden=True)(torchrun_node)
    app.command()(sky)


def torchrun_node(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    node_rank: Annotated[int, typer.Option("--node-rank", min=0, help="This node's number, from 0.")] = 0,
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=10_000, help="How many nodes take part.")] = 1,
    master: Annotated[str, typer.Option("--master", help="Node 0's address, as the others reach it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1024, max=65000, help="Rendezvous port on node 0.")] = 29400,
    ranks_per_node: Annotated[
        int | None, typer.Option("--ranks-per-node", min=1, help="Ranks per node. Default: its number of GPUs.")
    ] = None,
    wait: Annotated[float, typer.Option("--wait", min=1, help="Seconds to wait for the calls on the other nodes.")] = 1800.0,
    job: Annotated[str | None, typer.Option("--job", help="Id of the job, if it repeats these calls after failures.")] = None,
    tiny: Tiny = False,
    run_dir: RunDirOption = None,
    as_json: AsJson = False,
) -> None:
    """Take part in a run as one node: launch/torchrun.sh calls this, once on each node."""
    if node_rank >= nodes:
        text = f"there is no node {node_rank} of {nodes}: they are counted from 0"
        raise UserError(text, file="command line", key="--node-rank")
    resolved, each = resolve_for_nodes(recipe, overrides or [], tiny=tiny, nodes=nodes, ranks_per_node=ranks_per_node)
    below = cluster_paths.enter_local()
    path = run_dir or chain.default_run_dir(resolved, below)
    machine, environment = torchrun.this_machine(node_rank, nodes, master)
    call = torchrun.TorchrunCall(path, node_rank, nodes, each, machine, environment, master, port, wait, job)
    if node_rank:
        code = torchrun.join(call, quiet=as_json)
        reply(as_json, {"run_dir": str(path), "node": node_rank, "exit_code": int(code)})
        raise typer.Exit(int(code))
    with open_run(resolved, path) as run:
        with torchrun.RendezvousServer(call) as server:
            links = torchrun.TorchrunChain(run, resolved, quiet=as_json, server=server)
            links.go(last="train")
            server.done()
        links.go(first="export")
    finish(run, links.results, as_json)


@contextmanager
def open_run(resolved: Resolved, path: Path) -> Iterator[RunDir]:
    """The run folder of a command on this machine, taken and locked while the context lasts."""
    for warning in resolved.warnings:
        say(f"warning: {warning}")
    chain.check_folder(resolved, path)  # before anything is written there: it may be no run folder at all
    chain.require_training(RunDir(path))
    keep_private()
    with RunDir(path).lock():
        yield chain.open_run(resolved, path, chain.command_line())


def resolve_for_nodes(
    recipe: str, overrides: list[str], *, tiny: bool, nodes: int, ranks_per_node: int | None
) -> tuple[Resolved, int]:
    """The recipe for ``nodes`` machines like this one, and the ranks on each.

    Without ``ranks_per_node``: the recipe's GPUs per node; of a scaled-down model as many as this machine has, and on CPUs
    two ranks in all at least. Raises UserError where this machine has too few, or the recipe asks for another number of nodes.
    """
    found = resolve.resolve(recipe, overrides, tiny=tiny)
    found.require_startable()
    recipe_given = found.recipe
    small, gpus = tiny or recipe_given.model.weights == "random", chain.visible_gpus()
    wanted = recipe_given.slurm.gpus_per_node
    each = ranks_per_node or (min(wanted, gpus) or max(1, 2 // nodes) if small else wanted)
    problems = []
    if not small and nodes != recipe_given.slurm.nodes:
        text = f"the recipe is for {recipe_given.slurm.nodes} nodes, this call for {nodes}"
        problems.append(Problem(text, file=recipe, key="slurm.nodes", fix=f"slurm.nodes={nodes} makes it a run of its own"))
    if not small and ranks_per_node is None and wanted > gpus:
        fix = "--tiny runs it scaled down; --ranks-per-node N runs it as it is"
        problems.append(
            Problem(f"needs {wanted} GPUs on each node, this machine has {gpus}", file=recipe, key="slurm", fix=fix)
        )
    raise_if(problems)
    return resolve.resolve(recipe, overrides, tiny=tiny, ranks=nodes * each), each


def ray_train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Ranks. Default: the recipe's number, or 2 on CPUs.")
    ] = None,
    max_failures: Annotated[int, typer.Option(min=-1, help="Restarts by Ray; -1: restart while there is progress.")] = -1,
    tiny: Tiny = False,
    run_dir: RunDirOption = None,
    as_json: AsJson = False,
) -> None:
    """Run the whole chain, the training on Ray Train: launch/ray_train.py calls this."""
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        fix = "make setup installs it (DEV_RAY in containers/versions.env)"
        raise UserError("Ray is not installed", file=sys.executable, fix=fix)
    from clustertune import raytrain

    resolved = resolve.resolve(recipe, overrides or [], tiny=tiny, ranks=workers)
    resolved.require_startable()
    if workers is None and (tiny or resolved.recipe.model.weights == "random"):
        resolved = resolve.resolve(
            recipe, overrides or [], tiny=tiny, ranks=min(resolved.world_size, chain.visible_gpus() or 2)
        )
    below = cluster_paths.enter_local()
    with open_run(resolved, run_dir or chain.default_run_dir(resolved, below)) as run:
        links = raytrain.RayChain(run, resolved, quiet=as_json, max_failures=max_failures)
        links.go(last="prepare")
        with raytrain.cluster(resolved.world_size) if links.train_is_due() else nullcontext(False) as gpus:
            links.use_gpu = gpus
            links.go(first="train", last="train")
        links.go(first="export")
    finish(run, links.results, as_json)


def finish(run: Any, results: dict[str, dict[str, Any]], as_json: bool) -> None:
    """What a finished chain says: a table on stderr, or one document on stdout."""
    found = scores.read_result(run.eval)
    stages = {name: {"seconds": r["seconds"], "status": r["status"]} for name, r in results.items()}
    document = {"run_dir": str(run.path), "stages": stages, **_scores(found)}
    reply(as_json, document, lambda: summary.render(run, stages, found, console.stderr))


def _scores(found: dict[str, Any] | None) -> dict[str, Any]:
    """``tasks``, and ``paired`` where the base was scored."""
    if found is None:
        return {"tasks": None}
    paired = {"paired": found["paired"]} if found.get("paired") else {}
    return {"tasks": found["tasks"], **paired}


def sky(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option("--gpu", help="SkyPilot's name of the GPU; `sky show-gpus` lists them.")] = "H100",
    volume: Annotated[
        str | None, typer.Option("--volume", help="A SkyPilot volume for the runs, mounted on all nodes.")
    ] = None,
    runs: Annotated[
        str | None, typer.Option("--runs", metavar="DIR", help="Folder that all nodes already share, instead of a volume.")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Use spot (preemptible) machines; the job continues elsewhere.")] = False,
    tiny: Tiny = False,
    out: Annotated[Path | None, path_option("Write the task to this file.", "--out", metavar="FILE")] = None,
) -> None:
    """Print a recipe as a SkyPilot task.

    The task starts launch/torchrun.sh on every node.
    """
    resolved = resolve.resolve(recipe, overrides or [], tiny=tiny)
    resolved.require_startable()
    text = skypilot.render(resolved, overrides or [], skypilot.SkyOptions(gpu=gpu, volume=volume, runs=runs, spot=spot))
    if out is None:
        typer.echo(text, nl=False)
        return
    if out.is_dir():
        raise UserError("is a folder", file=str(out), key="--out", fix="give a file", code=ExitCode.CONFIG)
    from clustertune.manifest import require_replaceable, write_durably

    require_replaceable(out, text.partition("\n")[0])
    write_durably(out, text)
    say(f"wrote {out}; sky jobs launch {out}")
