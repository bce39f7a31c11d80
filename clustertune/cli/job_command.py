"""What Slurm starts: ``job`` on the first node of an allocation, ``node`` on every one of them for an attempt."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clustertune import secrets
from clustertune.arguments import ClusterOption, Overrides, RecipeArgument, path_option
from clustertune.cli.deferred import deferred
from clustertune.console import say
from clustertune.errors import UserError, raise_if
from clustertune.rundir import SCORES, STAGES, RunDir, require_stage

if TYPE_CHECKING:
    from clustertune.cluster.schema import Cluster
    from clustertune.resolve.resolved import Resolved
    from clustertune.rundir import Description
    from clustertune.sweep.points import Point

with deferred():
    from clustertune import chain
    from clustertune import job as program
    from clustertune.cluster import load
    from clustertune.evaluate import servers as eval_servers
    from clustertune.launch import allocation, cluster_paths, progress, serving, signal_margin
    from clustertune.launch import node as launch_node
    from clustertune.staging import bundle, staging_step
    from clustertune.sweep import points


def add(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(hidden=True)(job)
    app.command(hidden=True)(node)
    app.command(hidden=True)(part)


def job(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Scale the recipe down; one rank per GPU of the allocation.")] = False,
    cluster: ClusterOption = None,
    run_dir: Annotated[Path | None, path_option("The run's folder.")] = None,
    first: Annotated[str, typer.Option("--from", help="Begin with this stage.")] = STAGES[0],
    last: Annotated[str, typer.Option("--to", help="End after this stage.")] = STAGES[-1],
    sweep: Annotated[Path | None, path_option("Sweep folder; the array task picks the point.")] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A cache variable such as HF_HOME, for all stages.")
    ] = None,
    description: Annotated[
        int | None, typer.Option(metavar="N", help="Run what submit recorded under this number in the run's run.json.")
    ] = None,
    script: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run inside a Slurm job: what launch/run.sbatch starts.

    Checks the allocation, runs the stages, and has the job requeued if it can continue later. With --description it uses the
    recipe and cluster as submitted, even if their files have changed since; without it as they were when the job first started.
    """
    require_stage(first, "--from")
    require_stage(last, "--to")
    remaining = list(overrides or [])
    if sweep is not None:
        chosen = _point(sweep)
        recipe, remaining, tiny, run_dir = chosen.recipe, list(chosen.overrides), chosen.tiny, chosen.run_dir
    secrets.read_env(secrets.DEFAULT)
    given = allocation.read()
    if given.restart and description is None and sweep is None and (begun := _begun(given.job_id, run_dir, cluster)):
        run_dir, description = begun
    recorded = _recorded(run_dir, description, of_sweep=sweep is not None)
    machine = recorded.cluster if recorded and recorded.cluster else load.load_cluster(cluster)
    cluster_paths.load_modules(machine)
    variables = cluster_paths.enter(machine, cluster_paths.parse(env or []))
    if recorded:
        resolved = recorded.resolved
        found = recorded.evaluation
        evaluation = serving.Evaluation.of(found, RunDir(run_dir).run_json) if found and run_dir else None
    else:
        resolved = allocation.resolve_for(given, recipe, remaining, tiny=tiny)
        if (collected := _collected(resolved, machine)) is not None:
            remaining.append(f"staged={collected}")
            resolved = resolved.with_staged(collected)
        evaluation = serving.evaluation(resolved, machine)
    arguments = [recipe, *remaining, *(["--tiny"] if tiny else []), *(["--cluster", cluster] if cluster else [])]
    arguments += [word for setting in env or [] for word in ("--env", setting)]
    if sweep is None:  # what is printed to be pasted must do the same, in the same folder
        arguments += ["--run-dir", str(run_dir)] if run_dir else []
        arguments += ["--from", first] if first != STAGES[0] else []
        arguments += ["--to", last] if last != STAGES[-1] else []
    trains = STAGES.index(first) <= STAGES.index("train") <= STAGES.index(last)
    path = run_dir or chain.default_run_dir(resolved, cluster_paths.runs(machine))
    problems = allocation.check(given, resolved, machine, arguments, (first, last))
    problems += allocation.first_node_problems(machine, nodes=len(given.nodes), trains=trains)
    raise_if(problems)
    cluster_paths.make()
    if script is not None:
        take_log(path, given.name, given.job_id)
    for line in program.describe(resolved, machine, given, path, (first, last), variables):
        say(line)
    late = None
    if script is not None and trains:  # the other stages continue file by file, and need less
        said = signal_margin.given_in(script.read_text(errors="replace"))
        late = signal_margin.warning(said, resolved.recipe.slurm.signal_seconds, given.limit_minutes)
    for text in filter(None, (late, *resolved.warnings)):
        say(f"warning: {text}")
    program.run(resolved, machine, given, path, (first, last), chain.command_line(), variables, evaluation)
    say(f"done: {path}")


def _begun(job: str, run_dir: Path | None, cluster: str | None) -> tuple[Path, int] | None:
    """Run folder and description of a job by hand that is started again; None if its first start recorded none.

    Recipe and cluster file may have been edited since: another recipe would be another run, from its first step.
    """
    from clustertune.events import read_object

    folders = [run_dir] if run_dir else sorted(cluster_paths.runs(load.load_cluster(cluster)).glob("*/*"))
    for folder in folders:
        if read_object(folder / progress.OWNER).get("job") == job and RunDir(folder).run_json.exists():
            body = RunDir(folder).read()
            return (folder, int(body["description"])) if body.get("cluster") else None
    return None


def _recorded(run_dir: Path | None, number: int | None, *, of_sweep: bool) -> Description | None:
    """What ``submit``, or ``sweep`` for a point, decided; None for a job by hand.

    Raises UserError where the run folder does not say it.
    """
    if of_sweep and run_dir is not None and RunDir(run_dir).run_json.exists():
        body = RunDir(run_dir).read()
        number = body.get("description") if body.get("cluster") else None
    if number is None:
        return None
    if run_dir is None:
        raise UserError("--description needs --run-dir", file="command line", key="--description", fix="add --run-dir")
    found = RunDir(run_dir).description(number)
    if found.cluster is None:
        text = f"description {number} has no cluster"
        raise UserError(text, file=str(RunDir(run_dir).run_json), key="cluster", fix="clustertune submit again")
    return found


def _collected(resolved: Resolved, machine: Cluster) -> Path | None:
    """What lies for the recipe in the cluster's folder of models.

    ``submit`` has looked into one that only its shell can name.
    """
    try:
        found, notes = bundle.offered(resolved, cluster_paths.folder(machine, "models"))
    except UserError as error:
        found, notes = None, [str(error.problems[0])]
    for note in notes:
        say(f"note: {note}")
    return found


def take_log(run: Path, name: str, job: str) -> None:
    """Move the log of a job by hand from the checkout, where the header of launch/run.sbatch has it begin, to the run's others.

    A log of another name was chosen, and stays as it is. The batch script is asked to follow (SIGUSR2).
    """
    written, wanted = Path.cwd() / f"{name}-{job}.log", run.resolve() / "logs" / f"{name}-{job}.log"
    try:
        if written.is_symlink() or not written.is_file() or not written.samefile("/proc/self/fd/1"):
            return
        wanted.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        handle = os.open(wanted, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)  # of an earlier start too: requeued jobs append
        os.write(handle, written.read_bytes())
        for stream in (1, 2):
            os.dup2(handle, stream)
        os.close(handle)
        os.kill(os.getppid(), signal.SIGUSR2)
        written.unlink()
    except OSError as error:
        say(f"note: the log stays at {written}: {error}")


def _point(sweep: Path) -> Point:
    """What this task of a job array works on."""
    text = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    if not text.isdigit():
        raise UserError("--sweep runs as a task of a job array", fix="clustertune sweep submits it")
    return points.point(sweep, int(text))


def node(
    run_dir: Annotated[Path, path_option("A prepared run folder.")],
    attempt: Annotated[int, typer.Option(min=1, help="Number of the attempt.")],
    node_rank: Annotated[int | None, typer.Option("--node", min=0, help="Number of this node. Default: SLURM_NODEID.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Write to the log only.")] = False,
) -> None:
    """Run one node's ranks of an attempt: what srun starts on every node."""
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
    """Run one stage inside a job's container; the job itself holds the run's lock."""
    if stage != SCORES:
        require_stage(stage)
    run = RunDir(run_dir)
    with secrets.lent({eval_servers.GIVEN: str(servers)} if servers else {}):
        chain.Chain(run, run.resolved()).run_stage(stage)
