"""``clustertune plan``: memory, time and money of a recipe before the hours are spent."""

from __future__ import annotations

import datetime
import json
import math
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clustertune import console
from clustertune.arguments import AsJson, ClusterOption, Tiny, path_argument
from clustertune.commands.new import DataOption, GpusOption, MethodOption, ModelOption
from clustertune.console import emit_json, show
from clustertune.errors import ExitCode, Problem, UserError, raise_if

if TYPE_CHECKING:
    from clustertune.config.resolved import Resolved
    from clustertune.launch.serving import Evaluation
    from clustertune.plan import calibration
    from clustertune.plan.calibration import CalibratedCluster
    from clustertune.plan.constants import Constants
    from clustertune.plan.lengths import Lengths
    from clustertune.plan.predict import Plan
    from clustertune.report.metrics import StepRecord

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE [section.key=value]...",
        help="A recipe, two with --compare, or run folders with --calibrate; and overrides.",
    ),
]


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command("plan")(plan)


def plan(
    targets: Targets = None,
    model: ModelOption = None,
    gpus: GpusOption = None,
    method: MethodOption = "lora",
    data: DataOption = None,
    cluster: ClusterOption = None,
    tiny: Tiny = False,
    why: Annotated[
        str | None,
        typer.Option(metavar="PART", help="Show the arithmetic of one part: step, memory, communication, hours, mfu ..."),
    ] = None,
    advise: Annotated[bool, typer.Option("--advise", help="Search the strategies that fit and rank them.")] = False,
    goal: Annotated[str, typer.Option(metavar="time|cost|memory", help="What --advise ranks by.")] = "time",
    nodes: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Node counts that --advise tries; the recipe's by default.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare two recipes.")] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit the planner to measured runs and save the result next to the cluster file.")
    ] = False,
    nccl_check: Annotated[
        str | None, typer.Option(metavar="FILE", help="Use the result of an nccl-check on this cluster.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="FILE", help="File with tokens per conversation, one number a line.")
    ] = None,
    as_document: AsJson = False,
) -> None:
    """Predict whether a recipe fits, its hours, cost and limits.

    --advise ranks alternatives. --model plans a model without a recipe.
    """
    request = PlanRequest(
        names=[t for t in targets or [] if "=" not in t], overrides=[t for t in targets or [] if "=" in t], cluster=cluster,
        model=model, gpus=gpus, method=method, data=data, tiny=tiny, why=why, advise=advise, goal=goal, nodes=nodes,
        compare=compare, calibrate=calibrate, nccl_check=nccl_check,
        lengths=lengths, as_document=as_document,
    )  # fmt: skip
    answer(request)


GOALS = ("time", "cost", "memory")


@dataclass(frozen=True)
class PlanRequest:
    """The command line of ``plan``."""

    names: list[str]
    overrides: list[str]
    cluster: str | None
    model: str | None
    gpus: str | None
    method: str
    data: str | None
    tiny: bool
    why: str | None
    advise: bool
    goal: str
    nodes: str | None
    compare: bool
    calibrate: bool
    nccl_check: str | None
    lengths: str | None
    as_document: bool


def answer(request: PlanRequest) -> None:
    """Do what was asked. Raises UserError; exits with 2 where a recipe does not fit."""
    from clustertune.config.cluster import load_cluster, of_gpus
    from clustertune.plan.calibration import find_calibrated
    from clustertune.plan.lengths import of_counts, read_lengths

    _check_usage(request)
    check = path_argument(request.nccl_check) if request.nccl_check else None
    known = read_lengths(path_argument(request.lengths)) if request.lengths else None
    if request.model is not None:
        _answer_model(request, known)
        return
    calibrated = find_calibrated(of_gpus(request.gpus) if request.gpus else load_cluster(request.cluster), check)
    if request.calibrate:
        _calibrate(calibrated, request.names, known, request.as_document)
        return
    size = [f"slurm.nodes={len(calibrated.cluster.compute_nodes)}", f"slurm.gpus_per_node={calibrated.cluster.compute.gpus}"]
    request = replace(request, overrides=[*(size if request.gpus else []), *request.overrides])
    if request.data is not None:
        from clustertune.data.measure import measure
        from clustertune.draft import stated

        found = measure(request.data, stated(request.overrides).get("data"))
        known = known or (of_counts(list(found.tokens.items()), found.source) if found.tokens else None)
        request = replace(
            request, overrides=[*(f"data.{key}={_yaml(value)}" for key, value in found.section.items()), *request.overrides]
        )
    _answer(request, calibrated, [_plan(calibrated, name, request.overrides, request.tiny, known) for name in request.names])


def _yaml(value: object) -> str:
    return json.dumps(value)


def _answer_model(request: PlanRequest, known: Lengths | None) -> None:
    """The same of a model that no recipe describes: the recipe that ``new`` would write is planned."""
    from clustertune import draft
    from clustertune.commands.new import read

    of_data = draft.stated(request.overrides).get("data")
    model, data, at = read(request.model, request.data, request.method, request.gpus, request.cluster, of_data=of_data)
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", str(model.section["name"]).rpartition("/")[2]).lower()[:50] + f"-{request.method}"
    with draft.drafted(name, model, request.method, data, at) as (made, folder):
        plan = _plan(at.calibrated, str(folder), request.overrides, request.tiny, known or made.lengths)
        plan.notes.extend(made.assumed)
        _answer(request, at.calibrated, [plan])


def _answer(request: PlanRequest, calibrated: CalibratedCluster, plans: list[Plan]) -> None:
    from clustertune.launch.serving import evaluation
    from clustertune.plan import explanation

    if request.compare:
        _compare(plans, request.as_document)
    elif request.why is not None:
        lines = explanation.why(plans[0], request.why)
        if request.as_document:
            emit_json({"part": request.why, "arithmetic": lines})
        else:
            show("\n".join(lines))
    elif request.advise:
        _advise(calibrated, plans[0], request)
    else:
        _show(plans[0], tuple(request.overrides), request.as_document, evaluation(plans[0].resolved, calibrated.cluster))


def _check_usage(request: PlanRequest) -> None:
    from clustertune.config.load import did_you_mean

    names, compare, calibrate, goal = request.names, request.compare, request.calibrate, request.goal
    problems = []
    wanted = 2 if compare else 1
    if calibrate and not names:
        problems.append(
            Problem("no run was given", file="command line", key="--calibrate", fix="give run folders with metrics.jsonl")
        )
    elif request.model is not None and (names or compare or calibrate):
        text = "--model plans one model, without a recipe"
        problems.append(Problem(text, file="command line", key="--model", fix="leave the recipe, --compare or --calibrate out"))
    elif not calibrate and len(names) != wanted and request.model is None:
        text = f"{'--compare needs two recipes' if compare else 'one recipe is needed'}, got {len(names)}"
        problems.append(
            Problem(
                text,
                file="command line",
                key="RECIPE",
                fix="clustertune plan RECIPE [section.key=value]..., or --model OWNER/NAME",
            )
        )
    if sum((compare, calibrate, request.advise, request.why is not None)) > 1:
        text = "--compare, --calibrate, --advise and --why exclude each other"
        problems.append(Problem(text, file="command line", fix="ask one after the other"))
    if request.nodes is not None and not request.advise:
        fix = "add --advise, or slurm.nodes=N for a plan on so many nodes"
        problems.append(Problem("is read only with --advise", file="command line", key="--nodes", fix=fix))
    if calibrate and request.overrides:
        text = f"{request.overrides[0]}: a run is taken as it was"
        problems.append(Problem(text, file="command line", key="--calibrate", fix="leave the overrides out"))
    if request.gpus is not None and request.cluster is not None:
        text = "--gpus and --cluster exclude each other: a cluster file says which GPUs there are"
        problems.append(Problem(text, file="command line", key="--gpus", fix="leave one out"))
    if goal not in GOALS:
        problems.append(Problem(f"{goal!r} is not a goal", file="command line", key="--goal", fix=did_you_mean(goal, GOALS)))
    raise_if(problems)


def _plan(calibrated: CalibratedCluster, recipe: str, changes: list[str], tiny: bool, lengths: Lengths | None) -> Plan:
    from clustertune.config.resolve import resolve
    from clustertune.plan.predict import make_plan

    resolved = resolve(recipe, changes, tiny=tiny)
    return make_plan(resolved, calibrated.machine(resolved.recipe.slurm.nodes), calibrated.constants, lengths=lengths)


def _show(found: Plan, given: tuple[str, ...], as_document: bool, scored: Evaluation) -> None:
    from clustertune.config.hardware import price
    from clustertune.launch.shape import merge_seconds
    from clustertune.plan import explanation
    from clustertune.plan.advise import remedies
    from clustertune.plan.predict import GIB

    money = price(found.machine.gpu)
    better = [] if found.fits else remedies(found, given)
    merge = merge_seconds(found.resolved)
    whole = None if found.hours is None else found.hours * found.strategy.world_size
    whole = None if whole is None or scored.gpu_hours is None else whole + scored.gpu_hours
    if as_document:
        body = explanation.as_json(found, money) | {
            "evaluation": scored.as_json(),
            "merge": {"seconds": merge, "gpu_hours": 0.0},
        }
        body["total"] = {"gpu_hours": whole, "cost": explanation.spent(whole, money)}
        if not found.fits:
            body["remedies"] = [{"change": r.what, "overrides": r.arguments, "step_s": r.plan.step.seconds} for r in better]
        emit_json(body)
    else:
        from clustertune.plan import tables

        tables.render(found, money, console.stdout)
        show(f"\nmerge: about {max(1, merge / 60):.0f} min on a node's CPUs, no GPU" if merge else "")
        show(str(scored))
        if whole is not None:
            spent = explanation.money(explanation.spent(whole, money))
            show(f"in all: {whole:,.1f} GPU-hours" + (f", {spent}" if spent else ""))
    if found.fits:
        return
    if not as_document:
        show(
            "\nIt would fit with one of these, the smallest change first:"
            if better
            else "\nNo single change would make it fit."
        )
        for remedy in better[:6]:
            arguments = " ".join(remedy.arguments or ["not on this cluster"])
            show(f"  {remedy.what}: {remedy.plan.step.seconds:.3g} s a step, {remedy.plan.needed / GIB:.1f} GiB  ({arguments})")
    raise typer.Exit(int(ExitCode.CONFIG))


def _compare(plans: list[Plan], as_document: bool) -> None:
    from clustertune.config.hardware import price
    from clustertune.plan import explanation

    one, other = plans
    if as_document:
        emit_json(
            {
                "plans": [explanation.as_json(p, price(p.machine.gpu)) for p in plans],
                "speedup": one.step.seconds / other.step.seconds,
            }
        )
    else:
        from clustertune.plan import tables

        tables.compare(one, other, [price(p.machine.gpu) for p in plans], console.stdout)
    if not (one.fits and other.fits):
        raise typer.Exit(int(ExitCode.CONFIG))


def _advise(calibrated: CalibratedCluster, found: Plan, request: PlanRequest) -> None:
    from clustertune.config.hardware import price
    from clustertune.config.overrides import RecipeSource
    from clustertune.plan import advise as advisor
    from clustertune.plan import explanation

    counts = _counts(request.nodes, found)
    source = RecipeSource(found.resolved, tuple(request.overrides))
    advice = advisor.advise(
        source, calibrated.machine(max(counts)), found.constants, nodes=counts, goal=request.goal, lengths=found.lengths,  # type: ignore[arg-type]
    )  # fmt: skip
    named = advisor.overrides(advice, source)
    if request.as_document:
        emit_json(explanation.advice_json(advice, named, calibrated.cluster, price(found.machine.gpu)))
    else:
        from clustertune.plan import tables

        given = {"--model": request.model, "--data": request.data, "--gpus": request.gpus, "--cluster": request.cluster}
        given |= {"--method": request.method} if request.model else {}
        recipe = [*request.names, *(word for key, value in given.items() if value for word in (key, value))]
        quoted = {family: [shlex.quote(text) for text in arguments] for family, arguments in named.items()}
        money = price(found.machine.gpu)
        tables.advice(advice, quoted, found, console.stdout, recipe=shlex.join(recipe), cluster=calibrated.cluster, price=money)
    if not any(option.starts(calibrated.cluster) for option in advice.fitting):
        raise typer.Exit(int(ExitCode.CONFIG))


def _counts(text: str | None, found: Plan) -> list[int]:
    if text is None:
        return [found.resolved.recipe.slurm.nodes]
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or any(not 1 <= count <= found.machine.nodes for count in counts):
        text = f"{text!r} is not a list of node counts from 1 to {found.machine.nodes}, which {found.machine.name} has"
        raise UserError(text, file="command line", key="--nodes", fix="write --nodes 1,2,4")
    return counts


def _calibrate(calibrated: CalibratedCluster, runs: list[str], lengths: Lengths | None, as_document: bool) -> None:
    """Fit the factors to runs of this cluster, store them, show what changed."""
    from clustertune.plan import calibration

    if calibrated.calibration is None:
        text = "a cluster found by looking has no file to keep a calibration beside"
        raise UserError(text, file="command line", key="--cluster", fix="write a cluster file: docs/clusters.md")
    found = calibration.fit([_observe(calibrated, path_argument(run), lengths) for run in runs])
    calibration.store(calibrated.calibration, calibrated.cluster.name, datetime.date.today().isoformat(), found)
    if as_document:
        emit_json(
            {
                "file": str(calibrated.calibration),
                "constants": found.values,
                "deviation": found.deviation,
                "not_identified": found.left,
                "unexplained": calibration.unexplained(found),
                "runs": [run.model_dump() for run in found.runs],
            }
        )
        return
    from rich.text import Text

    from clustertune.plan import tables

    tables.calibration(found, console.stdout)
    console.stdout.print(
        Text(f"kept in {calibrated.calibration}: plans on {calibrated.cluster.name} use it from now on"), soft_wrap=True
    )


def _observe(calibrated: CalibratedCluster, folder: Path, lengths: Lengths | None) -> calibration.Observation:
    """A run folder as an observation: the median step behind the first ones, and the peak of memory."""

    import statistics

    from clustertune.plan import calibration
    from clustertune.plan.predict import make_plan
    from clustertune.report.content import WARM_UP
    from clustertune.report.metrics import read_metrics
    from clustertune.rundir import RunDir

    run = RunDir(folder)
    resolved = run.resolved()
    steps = [s for s in read_metrics(run.metrics).steps if s.seconds and 0 < s.seconds < math.inf]
    times = [float(s.seconds or 0) for s in steps[WARM_UP:]]
    if len(times) < 3:
        text = f"has {len(steps)} timed steps; 5 are needed, 20 suffice"
        raise UserError(text, file=str(run.metrics), key="step", fix="let the run continue, or give another")
    peaks = [s.memory_bytes for s in steps if s.memory_bytes]
    where = calibrated.machine(resolved.recipe.slurm.nodes)
    lengths = lengths or _lengths_seen(resolved, steps)

    def predict(constants: Constants) -> tuple[float, float]:
        made = make_plan(resolved, where, constants, lengths=lengths, sure=False)
        return made.step.seconds, made.peak.bytes

    return calibration.Observation(folder.name, statistics.median(times), max(peaks) if peaks else None, predict)


def _lengths_seen(resolved: Resolved, steps: list[StepRecord]) -> Lengths | None:
    """The mean length of a padded run's conversations, from the tokens that it counted: else its factor of computing would hold
    the padding that a plan assumes where nothing is known."""
    from clustertune.plan.lengths import Lengths
    from clustertune.plan.predict import read_strategy

    counted = [s for s in steps if s.tokens and s.step]
    if read_strategy(resolved).packing or not counted:
        return None
    last = max(counted, key=lambda s: s.step)
    rows = last.step * int(resolved.recipe.train["global_batch_size"])
    return Lengths((max(1, round((last.tokens or 0) / rows)),), "tokens of metrics.jsonl")
