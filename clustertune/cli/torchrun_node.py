"""``torchrun-node``: one node's part of a run without Slurm, which launch/torchrun.sh calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clustertune.cli.arguments import AsJson, Overrides, RecipeArgument, SharedRunDir, Tiny
from clustertune.console import reply
from clustertune.errors import Problem, UserError, raise_if
from clustertune.rundir import default_run_dir

if TYPE_CHECKING:
    from clustertune.resolve.resolved import Resolved


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
    run_dir: SharedRunDir = None,
    as_json: AsJson = False,
) -> None:
    from clustertune import chain, torchrun
    from clustertune.launch import cluster_paths
    from clustertune.report import run_summary

    if node_rank >= nodes:
        text = f"there is no node {node_rank} of {nodes}: they are counted from 0"
        raise UserError(text, file="command line", key="--node-rank")
    resolved, each = resolve_for_nodes(recipe, overrides or [], tiny=tiny, nodes=nodes, ranks_per_node=ranks_per_node)
    below = cluster_paths.enter_local()
    path = run_dir or default_run_dir(resolved, below)
    machine, environment = torchrun.this_machine(node_rank, nodes, master)
    call = torchrun.TorchrunCall(path, node_rank, nodes, each, machine, environment, master, port, wait, job)
    if node_rank:
        code = torchrun.join(call, quiet=as_json)
        reply(as_json, {"run_dir": str(path), "node": node_rank, "exit_code": int(code)})
        raise typer.Exit(int(code))
    with chain.taken(resolved, path) as run:
        with torchrun.RendezvousServer(call) as server:
            links = torchrun.TorchrunChain(run, resolved, quiet=as_json, server=server)
            links.go(last="train")
            server.done()
        links.go(first="export")
    run_summary.finish(run, links.results, as_json)


def resolve_for_nodes(
    recipe: str, overrides: list[str], *, tiny: bool, nodes: int, ranks_per_node: int | None
) -> tuple[Resolved, int]:
    """The recipe for ``nodes`` machines like this one, and the ranks on each.

    Without ``ranks_per_node``: the recipe's GPUs per node; of a scaled-down model as many as this machine has, and on CPUs
    two ranks in all at least. Raises UserError where this machine has too few, or the recipe asks for another number of nodes.
    """
    from clustertune import chain
    from clustertune.resolve import resolve

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
