"""One submission: the jobs of a recipe's stages on a cluster, what keeps them from being sent, and what ``submit`` prints."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from clustertune import chain, lock
from clustertune.cluster.load import reference
from clustertune.cluster.schema import Cluster
from clustertune.console import aligned, duration, emit_json, escape, reply, say
from clustertune.errors import Problem, UserError
from clustertune.launch import (
    bill,
    cluster_paths,
    container,
    container_image,
    container_packages,
    megatron_image,
    serving,
    shape,
)
from clustertune.launch import stage_jobs as launch
from clustertune.launch.allocation import Allocation
from clustertune.launch.attempt import newest_attempt
from clustertune.launch.environment import Setting, environment
from clustertune.plan.constants import quantity
from clustertune.plan.schedule import check_schedule_end, find_idle_schedule
from clustertune.report import job_status
from clustertune.resolve.models import find_obstacles
from clustertune.resolve.resolved import Resolved, expand_home, is_there
from clustertune.rundir import STAGES, RunDir, default_run_dir, keep_private
from clustertune.staging import bundle
from clustertune.training.engine import engine_of
from clustertune.tree import ROOT

DONE = "every stage is finished: nothing is left to submit"
KEYS = {"models": "model.name", "datasets": "data.name"}
"""The key of a recipe by the Hub's kind of repository."""
PLANNED = "JOB"
"""Stands for a job's id where nothing was submitted yet."""


@dataclass(frozen=True)
class SubmissionPlan:
    """What a submission would send."""

    resolved: Resolved
    cluster: Cluster
    path: Path
    stages: list[str]
    jobs: list[launch.StageJob]
    variables: list[Setting]
    """Of every stage and rank: where caches lie."""
    shapes: dict[str, shape.JobShape]
    """Of the job of each stage, also of those that are finished."""
    evaluation: serving.Evaluation
    notes: list[str]
    """What else to warn of."""

    @property
    def trains(self) -> bool:
        """Whether the training is among what is submitted."""
        return "train" in self.stages


def plan_submission(
    recipe: str,
    overrides: list[str],
    tiny: bool,
    cluster: Cluster,
    run_dir: Path | None,
    first: str | None,
    last: str,
) -> SubmissionPlan:
    """Resolve and derive. Raises UserError."""
    resolved, shaped = shape.resolve_on(recipe, overrides, cluster, tiny=tiny)
    variables = cluster_paths.of_jobs(cluster)
    collected, notes = bundle.offered(resolved, cluster_paths.folder(cluster, "models"))
    if collected is not None:
        shaped += [f"staged={collected}"]
        resolved = resolved.with_staged(collected)
    path = (run_dir or default_run_dir(resolved, cluster_paths.runs(cluster))).absolute()
    finished = [stage for stage in STAGES if RunDir(path).stage(stage) is not None]
    stages = launch.left_to_do(finished, first, last)
    shapes = shape.stage_shapes(resolved, cluster)
    evaluation = serving.evaluation(resolved, cluster)
    jobs = []
    if stages:
        jobs = launch.make_jobs(
            resolved.name,
            stages,
            shapes,
            path,
            arguments=[resolved.folder, *shaped],
            flags=[
                *(["--tiny"] if tiny else []),
                "--cluster",
                reference(cluster),
                *cluster_paths.flags(variables),
                "--recorded",
            ],
            signal_seconds=resolved.recipe.slurm.signal_seconds,
        )
    return SubmissionPlan(resolved, cluster, path, stages, jobs, variables, shapes, evaluation, notes)


def check(plan: SubmissionPlan, *, dry_run: bool) -> tuple[list[Problem], container_image.Image | None, list[str]]:
    """Everything that keeps it from being submitted, at once; the cluster's image as it is here, and what to warn of."""
    problems = shape.find_problems(plan.resolved, plan.cluster) if plan.trains else []
    problems += megatron_image.megatron_problems(plan.resolved, plan.cluster)
    if (engine := engine_of(plan.resolved)) is not None:
        problems += engine.find_problems(plan.resolved)
    problems += find_obstacles(plan.resolved) + _base_problems(plan)
    problems += find_idle_schedule(plan.resolved) if plan.trains else []
    wrong = bundle.find_problems(plan.resolved)
    problems += wrong
    if plan.trains and engine is None:
        here = plan.cluster.container.runtime == "none"
        args = plan.resolved.train_args
        problems += (
            container_packages.lacking_here(args, gpus=False)
            if here
            else container_packages.not_built(args, plan.cluster.container.packages)
        )
    nearest = next(path for path in (plan.path, *plan.path.parents) if path.exists())
    fix = "give another --run-dir, or correct storage.runs in the cluster file"
    if not nearest.is_dir():
        problems.append(Problem("is a file, a run needs a folder", file=str(nearest), fix=fix))
    elif not dry_run and not os.access(nearest, os.W_OK | os.X_OK):
        problems.append(Problem("you may not write there, where the run folder is to be", file=str(nearest), fix=fix))
    if not wrong and "prepare" in plan.stages:
        problems += bundle.missing_inputs(plan.resolved) + _not_reached(plan)
    if dry_run:
        return problems, None, []
    fix = "call this on a login node of the cluster; --dry-run needs no Slurm, clustertune demo-slurm brings its own"
    problems += launch.find_missing(plan.cluster, [("the run folder", plan.path)], fix)
    if plan.cluster.slurm is None:
        fix = "add a slurm section to its file, or --cluster names another one"
        problems.append(Problem(f"cluster {plan.cluster.name} has no Slurm", file=plan.cluster.source, fix=fix))
    wrong_image, image, notes = _image_problems(plan)
    return [*problems, *wrong_image], image, notes


def _not_reached(plan: SubmissionPlan) -> list[Problem]:
    """What prepare would ask the Hub for on a node that does not reach it: neither staged nor in the cache."""
    from clustertune.staging import needs

    recipe, internet = plan.resolved.recipe, plan.cluster.network.internet
    if internet == "all" or plan.resolved.tiny or recipe.staged:
        return []
    hub = needs.hub_cache({setting.name: setting.value for setting in plan.variables})
    from_hub = recipe.model.weights == "hub" and recipe.model.path is None
    asked = [("models", recipe.model.name, recipe.model.revision)] if from_hub else []
    asked += [("datasets", part.name, part.revision) for _, part in recipe.data.keyed_parts() if part.input is None]
    where = f"network.internet: {internet} of {plan.cluster.source}"
    models = cluster_paths.folder(plan.cluster, "models")
    to = f" --to {models / plan.resolved.name}" if models else " --to DIR"
    who = "on a login node" if internet == "login" else "on a machine with a network, and copy it"
    fix = f"clustertune stage {plan.resolved.folder}{to}, {who}; then submit again"
    return [
        Problem(
            f"{name} is not in {hub}, and the nodes reach no Hub ({where})",
            file=plan.resolved.name,
            key=KEYS[kind],
            fix=fix,
        )
        for kind, name, revision in asked
        if revision is not None and not is_there(needs.snapshot(hub, kind, str(name), revision))
    ]


def _base_problems(plan: SubmissionPlan) -> list[Problem]:
    """What of a base that lies here is not what the recipe says: its first job would end with it."""
    from clustertune.training import base_model, base_weights

    path = plan.resolved.recipe.model.path
    if path is None or plan.resolved.tiny or "prepare" not in plan.stages or not is_there(folder := expand_home(path)):
        return []
    try:
        base_model.check(str(folder), None, plan.resolved)
        base_weights.check(str(folder), None, plan.resolved)
    except UserError as error:
        return list(error.problems)
    return []


def _image_problems(plan: SubmissionPlan) -> tuple[list[Problem], container_image.Image | None, list[str]]:
    """What keeps the jobs from the cluster's image: it is not what its sum says, or cannot be shown the run; and the image."""
    if plan.cluster.container.runtime == "none":
        return [], None, []
    caches = cluster_paths.binds({setting.name: setting.value for setting in plan.variables})
    problems = container.unbindable([ROOT, *container.paths_of(plan.resolved, plan.path), *caches])
    try:
        return problems, *container_image.look(plan.cluster.container)
    except UserError as error:
        return [*problems, *error.problems], None, []


def warnings(plan: SubmissionPlan, notes: Sequence[str] = ()) -> list[str]:
    """What is allowed and probably not meant; ``notes``: of :func:`check`."""
    caches = [(setting.name, Path(setting.value)) for setting in plan.variables if setting.name in ("HF_HOME", "HF_HUB_CACHE")]
    unseen = map(str, cluster_paths.find_unshared(caches, plan.cluster))
    return [
        *plan.resolved.warnings,
        *plan.cluster.notes,
        *shape.warnings(plan.resolved, plan.cluster),
        *check_schedule_end(plan.resolved),
        *plan.notes,
        *notes,
        *unseen,
    ]


def node_lines(plan: SubmissionPlan) -> tuple[list[dict[str, str]], list[str]]:
    """The environment of the ranks with the reason of each variable, and the command that starts every node."""
    from clustertune import job as program

    train_shape = shape.train_shape(plan.resolved, plan.cluster)
    names = tuple(host.name for host in plan.cluster.compute_nodes[: train_shape.nodes])
    allocation = Allocation(PLANNED, 0, names, train_shape.gpus_per_node, train_shape.cpus_per_node, 1, None)
    variables = environment(
        plan.cluster,
        world_size=plan.resolved.world_size,
        ranks_per_node=train_shape.ranks_per_node,
        cpus_per_node=train_shape.cpus_per_node,
        job=PLANNED,
        cpu_only=not train_shape.gpus_per_node,
    )
    environ = {setting.name: setting.value for setting in plan.variables}
    inputs = program.JobInputs(plan.resolved, plan.cluster, allocation, plan.path, ("train", "train"))
    command = inputs.step_command(newest_attempt(plan.path) + 1, environ)
    return [{"name": s.name, "value": s.value, "reason": s.reason} for s in variables], command


def commands(plan: SubmissionPlan) -> list[list[str]]:
    """The sbatch commands, with a name in place of the id that is not known yet."""
    before: list[str | None] = [None, *(f"<id of {job.stage}>" for job in plan.jobs)]
    return [job.command(after) for job, after in zip(plan.jobs, before, strict=False)]


def show(plan: SubmissionPlan, as_json: bool, verbose: bool) -> None:
    """Print what ``submit`` would do: a line for each job, or with ``verbose`` everything."""
    if as_json:
        variables, command = node_lines(plan)
        jobs = [
            {
                "stage": job.stage,
                "shape": vars(job.shape),
                "file": str(job.path),
                "script": job.script,
                "command": command_line,
            }
            for job, command_line in zip(plan.jobs, commands(plan), strict=True)
        ]
        document: dict[str, Any] = {"run_dir": str(plan.path), "cluster": plan.cluster.name, "jobs": jobs}
        document["signal_seconds"] = plan.resolved.recipe.slurm.signal_seconds
        document["evaluation"] = plan.evaluation.as_json()
        planned = bill.of_recipe(plan.resolved, plan.cluster) if plan.trains else None
        document["total"] = None if planned is None else planned[1].as_json()
        document["step_s"] = None if planned is None else planned[0].step.seconds
        document["job_environment"] = [vars(setting) for setting in plan.variables]
        if (engine := engine_of(plan.resolved)) is not None:
            document["megatron"] = engine.shown_document(plan.resolved, plan.cluster, plan.path)
        emit_json({**document, "environment": variables, "node_command": command, "warnings": warnings(plan)})
        return
    for line in lines(plan) if verbose else summary(plan):
        typer.echo(escape(line))  # what a person saves or compares


def summary(plan: SubmissionPlan) -> list[str]:
    """What would be submitted, a line for each job."""
    shown = [f"run folder: {plan.path}", f"cluster: {plan.cluster.name} ({plan.cluster.source})"]
    if not plan.jobs:
        return [*shown, DONE]
    width = max(len(job.stage) for job in plan.jobs)
    after = ["", *(f", after {job.stage}" for job in plan.jobs)]
    shown += [
        "",
        *(f"{job.stage:<{width}}  {job.shape}{then}" for job, then in zip(plan.jobs, after, strict=False)),
        *([str(plan.evaluation)] if "eval" in plan.stages else []),
        *_whole(plan),
        *_site_lines(plan),
        "",
        *([_signal(plan)] if plan.trains else []),
        "--verbose adds the scripts, the environment with its reasons, and the commands",
    ]
    return shown


def lines(plan: SubmissionPlan) -> list[str]:
    """Everything, for people. The body is the same in all scripts and is printed once."""
    shown = [f"run folder: {plan.path}", f"cluster: {plan.cluster.name} ({plan.cluster.source})"]
    if not plan.jobs:
        return [*shown, DONE]
    for number, (job, command_line) in enumerate(zip(plan.jobs, commands(plan), strict=True)):
        header, body = launch.split_script(job.script)
        text = header + body if number == 0 else f"{header}# ... and the body of launch/run.sbatch, as above"
        shown += ["", f"# {job.stage}: {job.shape}", f"# {job.path}", text.rstrip("\n"), f"$ {shlex.join(command_line)}"]
    shown += _site_lines(plan)
    if plan.variables:
        shown += ["", "# environment of every stage, and of every rank"]
        shown += [f"{setting.name}={setting.value}  # {setting.reason}" for setting in plan.variables]
    if plan.trains:
        variables, command = node_lines(plan)
        shown += ["", f"# {_signal(plan)}"]
        shown += ["# environment of every rank", *(f"{s['name']}={s['value']}  # {s['reason']}" for s in variables)]
        shown += ["# on the nodes, for each attempt", f"$ {shlex.join(command)}"]
        if (engine := engine_of(plan.resolved)) is not None:
            shown += engine.shown_lines(plan.resolved, plan.cluster, plan.path)
    return shown


def _whole(plan: SubmissionPlan) -> list[str]:
    """What the run takes by the plan, in a line each; nothing of a tiny run, or of one that has trained already."""
    planned = bill.of_recipe(plan.resolved, plan.cluster) if plan.trains else None
    if planned is None:
        return []
    prediction, total = planned
    seconds = prediction.step.seconds
    low, high = (quantity(seconds * edge, "s") for edge in (prediction.low, prediction.high))
    step = f"planned: {quantity(seconds, 's')} a step (80 % range {low} to {high})"
    return ["", step, *(f"{name}: {text}" for name, text in total.rows(prediction.machine.gpu).items())]


def _signal(plan: SubmissionPlan) -> str:
    seconds = plan.resolved.recipe.slurm.signal_seconds
    return f"Slurm signals the job {seconds} s before its time limit so that it can save (slurm.signal_seconds)"


def _site_lines(plan: SubmissionPlan) -> list[str]:
    """What of the shell takes the place of the header: sbatch reads SBATCH_ACCOUNT and its like before a script's lines."""
    named = ("account", "qos", "constraint", "reservation")
    slurm = plan.cluster.slurm
    chosen = {name: (os.environ.get(f"SBATCH_{name.upper()}"), getattr(slurm, name, None)) for name in named}
    lines = [
        f"# --{name}={ours}: SBATCH_{name.upper()} of this shell{f', not {theirs} of slurm.{name}' if theirs else ''}"
        for name, (ours, theirs) in chosen.items()
        if ours
    ]
    return ["", *lines] if lines else []


def send(plan: SubmissionPlan, image: container_image.Image | None, as_json: bool) -> None:
    """Submit, or say why not."""
    keep_private(plan.cluster)
    opened = chain.open_run(plan.resolved, plan.path, chain.command_line(), take=False)
    folder = plan.path / "jobs"
    if image is not None:
        if note := container_image.changed(opened.read().get("container"), image):
            say(f"warning: {note}")
        opened.update(container=image.as_json())
    with lock.held(folder / "lock", "submits this run", shown=plan.path, fix="wait for it"):
        launch.require_none_live(plan.path, "jobs of this run", "clustertune submit --status")
        opened.update(environment=[vars(setting) for setting in plan.variables])
        opened.write_own_files(plan.resolved)
        opened.describe(plan.resolved, plan.cluster, plan.shapes, plan.evaluation)
        sent = launch.submit_all(opened.path, plan.jobs)
    if as_json:
        emit_json({"run_dir": str(plan.path), "jobs": sent})
        return
    for entry, job in zip(sent, plan.jobs, strict=True):
        say(f"{entry['stage']}: job {entry['id']}, {job.shape}" + (f", after {entry['after']}" if entry["after"] else ""))
    if not sent:
        say(DONE)
    say(f"run folder: {plan.path}")
    say(f"clustertune submit --status {shlex.quote(str(plan.path))}")


def show_status(path: Path, as_json: bool) -> None:
    """Print the jobs of a run, a line for each stage."""
    run = RunDir(path)
    if not run.run_json.exists() and not (path / "jobs").is_dir():
        run.read()  # says that it is none
    status = job_status.read_status(run)
    reply(as_json, {"run_dir": str(path), **status.as_dict()}, lambda: _status_lines(status), f"run folder: {path}")


def _status_lines(status: job_status.StagesStatus) -> None:
    """A table whose lines are never broken: job states are looked for by programs and people alike."""
    names = ("stage", "job", "state", "time", "nodes", "restarts", "attempts", "step", "reason")
    lines: list[tuple[str, ...]] = [names]
    for row in status.rows:
        numbers = (str(row.restarts or ""), *("" if n is None else str(n) for n in (row.attempts, row.step)))
        took = "" if row.seconds is None else duration(row.seconds)
        lines.append((row.stage, row.job or "", row.state, took, row.nodes, *numbers, row.reason))
    used = [i for i in range(len(names)) if any(line[i] for line in lines[1:])]
    for text in aligned([[line[i] for i in used] for line in lines]):
        say(text)
    if status.note:
        say(f"note: Slurm could not be asked: {status.note}")
