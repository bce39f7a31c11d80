"""Slurm jobs, and what launchers start on nodes: ``submit``, ``job``, ``node``, ``torchrun-node``, ``train`` and ``part``.

``sweep`` is one recipe under varied settings, as a job array or here, and what came out.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clustertune import secrets
from clustertune.cli.arguments import (
    AsJson,
    ClusterOption,
    OptionalRecipe,
    Overrides,
    RecipeArgument,
    SharedRunDir,
    Tiny,
    path_option,
)
from clustertune.console import reply, say
from clustertune.errors import ExitCode, Problem, UserError, raise_if
from clustertune.rundir import SCORES, STAGES, RunDir, Stage, default_run_dir

if TYPE_CHECKING:
    from clustertune.cluster.schema import Cluster
    from clustertune.resolve.resolved import Resolved
    from clustertune.sweep import Point, Sweep


def submit(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    tiny: Tiny = False,
    cluster: ClusterOption = None,
    run_dir: Annotated[
        Path | None, path_option("Run folder. Default: <recipe>/<fingerprint> below storage.runs, else below ./runs.")
    ] = None,
    first: Annotated[Stage | None, typer.Option("--from", help="Begin with this stage.")] = None,
    last: Annotated[Stage, typer.Option("--to", help="End after this stage.")] = STAGES[-1],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; needs no Slurm.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With --dry-run: the scripts, the environment with its reasons, and all commands.")
    ] = False,
    status: Annotated[Path | None, path_option("Show the jobs of a run instead.", "--status", metavar="RUN")] = None,
    as_json: AsJson = False,
) -> None:
    """Every sbatch option is derived from the recipe and the cluster file. Finished stages are not submitted again."""
    from clustertune import submission
    from clustertune.cluster.load import load_cluster
    from clustertune.launch.cluster_paths import existing_run

    if status is not None:
        submission.show_status(existing_run(status), as_json)
        return
    if recipe is None:
        raise UserError("a recipe is missing", file="command line", fix="clustertune submit RECIPE, or --status RUN")
    plan = submission.plan_submission(recipe, overrides or [], tiny, load_cluster(cluster), run_dir, first, last)
    problems, image, notes = submission.check(plan, dry_run=dry_run)
    raise_if(problems)
    for warning in submission.warnings(plan, notes):
        say(f"warning: {warning}")
    if dry_run:
        submission.show(plan, as_json, verbose)
    else:
        submission.send(plan, image, as_json)


def job(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Scale the recipe down; one rank per GPU of the allocation.")] = False,
    cluster: ClusterOption = None,
    run_dir: Annotated[Path | None, path_option("The run's folder.")] = None,
    first: Annotated[Stage, typer.Option("--from", help="Begin with this stage.")] = STAGES[0],
    last: Annotated[Stage, typer.Option("--to", help="End after this stage.")] = STAGES[-1],
    sweep: Annotated[Path | None, path_option("Sweep folder; the array task picks the point.")] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A cache variable such as HF_HOME, for all stages.")
    ] = None,
    submitted: Annotated[bool, typer.Option("--recorded", help="Run what submit recorded in the run's run.json.")] = False,
    script: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Checks the allocation, runs the stages, and has the job requeued if it can continue later. With --recorded it uses the
    recipe and cluster as submitted, even if their files have changed since; without it as they were when the job first started.
    """
    from clustertune import chain
    from clustertune import job as program
    from clustertune.cluster import load
    from clustertune.launch import allocation, cluster_paths, serving

    remaining = list(overrides or [])
    if sweep is not None:
        chosen = _point(sweep)
        recipe, remaining, tiny, run_dir = chosen.recipe, list(chosen.overrides), chosen.tiny, chosen.run_dir
    secrets.read_env(secrets.DEFAULT)
    allocated = allocation.read()
    if allocated.restart and not submitted and sweep is None:
        folders = [run_dir] if run_dir else sorted(cluster_paths.runs(load.load_cluster(cluster)).glob("*/*"))
        before = program.begun(allocated.job_id, folders)
        run_dir, submitted = before or run_dir, before is not None
    recorded = program.recorded(run_dir, of_sweep=not submitted) if submitted or sweep is not None else None
    on = recorded.cluster if recorded and recorded.cluster else load.load_cluster(cluster)
    cluster_paths.load_modules(on)
    variables = cluster_paths.enter(on, cluster_paths.parse(env or []))
    if recorded:
        resolved = recorded.resolved
        record = recorded.evaluation
        evaluation = serving.Evaluation.of(record, RunDir(run_dir).run_json) if record and run_dir else None
    else:
        resolved = allocation.resolve_for(allocated, recipe, remaining, tiny=tiny)
        if (collected := program.collected(resolved, on)) is not None:
            remaining.append(f"staged={collected}")
            resolved = resolved.with_staged(collected)
        evaluation = serving.evaluation(resolved, on)
    arguments = [recipe, *remaining, *(["--tiny"] if tiny else []), *(["--cluster", cluster] if cluster else [])]
    arguments += [word for setting in env or [] for word in ("--env", setting)]
    if sweep is None:  # what is printed to be pasted must do the same, in the same folder
        arguments += ["--run-dir", str(run_dir)] if run_dir else []
        arguments += ["--from", first] if first != STAGES[0] else []
        arguments += ["--to", last] if last != STAGES[-1] else []
    path = run_dir or default_run_dir(resolved, cluster_paths.runs(on))
    inputs = program.JobInputs(resolved, on, allocated, path, (first, last), variables, evaluation)
    raise_if(allocation.check(allocated, resolved, on, arguments, (first, last)))
    program.start(inputs, script, chain.command_line())


def _point(sweep: Path) -> Point:
    """What this task of a job array works on."""
    from clustertune.sweep import point

    text = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    if not text.isdigit():
        raise UserError("--sweep runs as a task of a job array", fix="clustertune sweep submits it")
    return point(sweep, int(text))


def train(
    run_dir: Annotated[Path, path_option("A prepared run folder.")],
    attempt: Annotated[int, typer.Option(min=1, help="Number of this attempt, the same for every rank.")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Write to the log only.")] = False,
) -> None:
    from clustertune import rank

    RunDir(run_dir).read()
    raise typer.Exit(rank.main(run_dir, attempt, quiet=quiet))


def node(
    run_dir: Annotated[Path, path_option("A prepared run folder.")],
    attempt: Annotated[int, typer.Option(min=1, help="Number of the attempt.")],
    node_rank: Annotated[int | None, typer.Option("--node", min=0, help="Number of this node. Default: SLURM_NODEID.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Write to the log only.")] = False,
) -> None:
    from clustertune.launch import node as launch_node
    from clustertune.staging import staging_step

    if node_rank is None:
        text = os.environ.get("SLURM_NODEID", "")
        if not text.isdigit():
            raise UserError(
                "the node's number is missing: SLURM_NODEID is not set", key="--node", fix="give --node, or start it with srun"
            )
        node_rank = int(text)
    raise typer.Exit(launch_node.main(run_dir, attempt, node_rank, quiet=quiet, around=staging_step.leased))


def part(
    stage: Annotated[str, typer.Argument(help="One stage of the chain.")],
    run_dir: Annotated[Path, path_option("A run folder.")],
    servers: Annotated[Path | None, path_option("The job's vLLM servers, for eval and scores.")] = None,
) -> None:
    from clustertune import chain
    from clustertune.evaluate import servers as eval_servers

    if stage not in (*STAGES, SCORES):
        raise UserError(f"{stage!r} is no stage", key="STAGE", fix=f"one of {', '.join((*STAGES, SCORES))}")
    run = RunDir(run_dir)
    with secrets.lent({eval_servers.GIVEN: str(servers)} if servers else {}):
        chain.Chain(run, run.resolved()).run_stage(stage)


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
    from clustertune.cli.stages import finish_run
    from clustertune.launch import cluster_paths

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
    finish_run(run, links.results, as_json)


def resolve_for_nodes(
    recipe: str, overrides: list[str], *, tiny: bool, nodes: int, ranks_per_node: int | None
) -> tuple[Resolved, int]:
    """The recipe for ``nodes`` machines like this one, and the ranks on each.

    Without ``ranks_per_node``: the recipe's GPUs per node; of a scaled-down model as many as this machine has, and on CPUs
    two ranks in all at least. Raises UserError where this machine has too few, or the recipe asks for another number of nodes.
    """
    from clustertune import chain
    from clustertune.resolve import resolve

    resolved = resolve.resolve(recipe, overrides, tiny=tiny)
    resolved.require_startable()
    loaded = resolved.recipe
    small, gpus = tiny or loaded.model.weights == "random", chain.visible_gpus()
    asked = loaded.slurm.gpus_per_node
    each = ranks_per_node or (min(asked, gpus) or max(1, 2 // nodes) if small else asked)
    problems = []
    if not small and nodes != loaded.slurm.nodes:
        text = f"the recipe is for {loaded.slurm.nodes} nodes, this call for {nodes}"
        problems.append(Problem(text, file=recipe, key="slurm.nodes", fix=f"slurm.nodes={nodes} makes it a run of its own"))
    if not small and ranks_per_node is None and asked > gpus:
        fix = "--tiny runs it scaled down; --ranks-per-node N runs it as it is"
        problems.append(Problem(f"needs {asked} GPUs on each node, this machine has {gpus}", file=recipe, key="slurm", fix=fix))
    raise_if(problems)
    return resolve.resolve(recipe, overrides, tiny=tiny, ranks=nodes * each), each


# --- sweep -------------------------------------------------------------------------------------------------------------


def sweep(
    recipe: OptionalRecipe = None,
    settings: Annotated[list[str] | None, typer.Argument(metavar="section.key=a,b", help="Values to vary.")] = None,
    at_once: Annotated[int | None, typer.Option("--max-parallel", min=1, help="Most jobs that run at the same time.")] = None,
    tiny: Tiny = False,
    cluster: ClusterOption = None,
    here: Annotated[bool, typer.Option("--here", help="Run on this machine, one after the other, without Slurm.")] = False,
    last: Annotated[
        Stage | None,
        typer.Option("--to", help="End each after this stage. Default: the stage that produces --metric."),
    ] = None,
    metric: Annotated[str, typer.Option("--metric", help="Sort by: eval_loss, loss, or a score: TASK.METRIC.")] = "eval_loss",
    sweep_dir: Annotated[Path | None, path_option("Sweep folder. Default: below runs/.")] = None,
    results: Annotated[Path | None, path_option("Show the results of this sweep instead.", "--results")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the points and the job; needs no Slurm.")] = False,
    as_json: AsJson = False,
) -> None:
    """Runs the grid of all values as one job array. Each point is a separate run; finished ones are not run again."""
    from clustertune import sweep as sweeps
    from clustertune.cluster import load
    from clustertune.launch.cluster_paths import existing_folder

    sweeps.check_metric(metric)
    if results is not None:
        _show_results(sweeps.read_sweep(existing_folder(results, "a sweep")), metric, as_json)
        return
    if recipe is None:
        raise UserError("a recipe is missing", file="command line", fix="clustertune sweep RECIPE section.key=a,b")
    last = last or ("train" if metric in ("eval_loss", "loss", "eval_token_accuracy") else "eval")
    options: dict[str, Any] = {"tiny": tiny, "last": last, "path": sweep_dir}
    if here:
        problems = [
            Problem("has no meaning with --here: points run here, one after the other", file="command line", key=key)
            for key, value in (("--max-parallel", at_once), ("--cluster", cluster))
            if value is not None
        ]
        raise_if(problems)
        made, resolved = sweeps.plan_here(recipe, settings or [], options)
    else:
        on = load.load_cluster(cluster)
        made, resolved, job = sweeps.plan_array(recipe, settings or [], at_once, on, options, dry_run)
    if dry_run:
        sweeps.show_plan(made, None if here else job, None if here else sweeps.total(made, resolved, on), as_json)
    elif here:
        _run_here(made, metric, as_json)
    else:
        _submit(made, resolved, on, job, as_json)


def _run_here(made: Sweep, metric: str, as_json: bool) -> None:
    from clustertune import sweep as sweeps

    failed = sweeps.run_all(made)
    _show_results(made, metric, as_json)
    if failed:
        raise typer.Exit(int(ExitCode.FAILED))


def _submit(made: Sweep, resolved: list[Resolved], cluster: Cluster, job: Any, as_json: bool) -> None:
    from clustertune import sweep as sweeps

    number = sweeps.send(made, resolved, cluster, job) if job else None
    document = {"sweep_dir": str(made.path), "job": number, "points": len(made.points), "left": len(made.left())}
    text = f"job {number}: {document['left']} of {document['points']} points" if number else "every point is finished"
    reply(as_json, document, text, f"clustertune sweep --results {shlex.quote(str(made.path))}")


def _show_results(made: Sweep, metric: str, as_json: bool) -> None:
    from clustertune import sweep as sweeps

    results = sweeps.collect(made, metric)
    reply(as_json, sweeps.as_json(made, metric, results), *sweeps.lines(made, metric, results))
