"""``clustertune plan``: memory, time and money of a recipe before the hours are spent; and ``clustertune new``: a recipe folder
from a model, data and GPUs."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clustertune import console
from clustertune.cli.arguments import (
    path_argument,
)
from clustertune.cli.options import NewArguments, PlanArguments
from clustertune.cluster import load
from clustertune.console import emit_json, reply, say, show
from clustertune.errors import ExitCode, Problem, UserError, raise_if
from clustertune.host.system import GIB
from clustertune.launch import bill, serving
from clustertune.manifest import replace_ours
from clustertune.plan import advise as advisor
from clustertune.plan import calibration, explanation, schedule
from clustertune.plan import predict as prediction
from clustertune.plan import schedule as known_lengths
from clustertune.plan.calibration import CalibratedCluster
from clustertune.plan.predict import Plan
from clustertune.plan.schedule import Lengths
from clustertune.recipe import layers, native_rules
from clustertune.recipe.parameters import parameter_count
from clustertune.resolve import models, resolve, tiny
from clustertune.resolve import overrides as recipe_source

if TYPE_CHECKING:
    from clustertune.simulate.simulator import Simulation

GOALS = ("time", "cost", "memory")


def answer(args: PlanArguments) -> None:
    """Plan what the command line names, and print it. Exits with 2 where nothing fits. Raises UserError."""
    _check_usage(args)
    check = path_argument(args.nccl_check) if args.nccl_check else None
    known = known_lengths.read_lengths(path_argument(args.lengths)) if args.lengths else None
    if args.largest:
        _largest(args)
        return
    if args.model is not None:
        _answer_model(args, known)
        return
    if args.clusters is not None:
        _compare_clusters(args, known)
        return
    calibrated = calibration.find_calibrated(load.of_gpus(args.gpus) if args.gpus else load.load_cluster(args.cluster), check)
    if args.calibrate:
        _calibrate(calibrated, args.names, known, args.as_document)
        return
    overrides = args.overrides
    if args.gpus:
        nodes, gpus = len(calibrated.cluster.compute_nodes), calibrated.cluster.compute.gpus
        overrides = [f"slurm.nodes={nodes}", f"slurm.gpus_per_node={gpus}", *overrides]
    if args.data is not None:
        from clustertune import draft  # it loads what makes a recipe, which the plan of one has no use for
        from clustertune.data import prepare

        measured = prepare.measure(args.data, draft.stated(overrides).get("data"))
        known = known or (known_lengths.of_counts(list(measured.tokens.items()), measured.source) if measured.tokens else None)
        overrides = [*(f"data.{key}={json.dumps(value)}" for key, value in measured.section.items()), *overrides]
    _answer(args, overrides, calibrated, [_plan(calibrated, name, overrides, args.tiny, known) for name in args.names])


def _compare_clusters(args: PlanArguments, known: Lengths | None) -> None:
    """The recipe on several clusters, a row each. Exit code 2 where it fits none of them."""
    from clustertune.plan import tables
    from clustertune.report import comparison as runs_page

    choices = bill.choices(args.names[0], args.overrides, bill.clusters(args.clusters or "", args.gpus), lengths=known)
    if args.within is not None:
        choices = [bill.within(one, args.within) for one in choices]
        choices.sort(key=lambda one: not one.fits)
    document = {"recipe": args.names[0], "clusters": [one.as_json() for one in choices]}
    rows = bill.cells(choices)
    reply(args.as_document, document, lambda: tables.clusters(args.names[0], bill.COLUMNS, rows, console.stdout))
    if args.out is not None:
        bills = [(one.cluster.name, one.bill) for one in choices if one.bill]
        notes = list(dict.fromkeys(billed.source for _, billed in bills if billed.source))
        notes += [f"{name}: {billed.saving}" for name, billed in bills if billed.saving]
        title = f"What {shlex.join([*args.names, *args.overrides])} takes on each cluster"
        out = path_argument(args.out)
        replace_ours(out, runs_page.table_page(title, bill.page_columns(), rows, notes), runs_page.PAGE_MARK)
        say(f"in {out}")
    _end(any(one.fits for one in choices))


def _answer_model(args: PlanArguments, known: Lengths | None) -> None:
    """The same of a model that no recipe describes: the recipe that ``new`` would write is planned."""
    from clustertune import draft

    of_data = draft.stated(args.overrides).get("data")
    model, data, at = draft.read_options(args.model, args.data, args.method, args.gpus, args.cluster, of_data=of_data)
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", str(model.section["name"]).rpartition("/")[2]).lower()[:50] + f"-{args.method}"
    known_source = model.section.keys() & {"revision", "path", "weights"}
    stated = {} if known_source else {"model": {"revision": models.NO_COMMIT}}
    with draft.drafted(name, model, args.method, data, at, stated) as (made, folder):
        plan = _plan(at.calibrated, str(folder), args.overrides, args.tiny, known or made.lengths)
        plan.notes.extend(made.assumed)
        _answer(args, args.overrides, at.calibrated, [plan])


LONGEST, MOST_ROWS = 2**20, 1024
"""Where the search of ``--largest`` ends: tokens of a sequence, rows of a micro batch."""


def _largest(args: PlanArguments) -> None:
    """The largest known model that fits the GPUs, its longest sequences, and the most rows of a micro batch; exits with 2 where
    none does. Each of the last two alone, with the recipe that ``new`` would write."""
    from clustertune import draft

    names = [args.model] if args.model is not None else [name for name in models.known_models() if "/" in name]
    found: list[tuple[int, str]] = []
    for name in names:
        made = models.find_model(name)
        found.append((parameter_count(made.architecture) or 0, name))
    for count, name in sorted(found, reverse=True):
        model, _, at = draft.read_options(name, None, args.method, args.gpus, args.cluster)
        stated = {} if model.section.keys() & {"revision", "path", "weights"} else {"model": {"revision": models.NO_COMMIT}}
        try:
            with draft.drafted("largest", model, args.method, None, at, stated) as (made_recipe, folder):
                body = _sizes_that_fit(args, str(folder), at.calibrated, model.architecture)
        except draft.NothingFits:
            continue
        body = {"model": name, "parameters": count, "method": args.method, "cluster": at.calibrated.cluster.name, **body}
        body["assumptions"] = made_recipe.assumed
        emit_json(body) if args.as_document else show(_largest_text(body, len(names)))
        return
    reply(
        args.as_document,
        {"model": None},
        lambda: show(f"none of {', '.join(names)} fits with {args.method}, nothing offloaded"),
    )
    _end(False)


def _largest_text(body: dict[str, Any], tried: int) -> str:
    room = f"{body['needed_gib_per_gpu']:.1f} of {body['usable_gib_per_gpu']:.1f} GiB a GPU"
    which = f", the largest of {tried} known models that fits" if tried > 1 else " fits"
    return (
        f"{body['model']} ({body['parameters'] / 1e9:,.3g} billion parameters, {body['method']}){which} on "
        f"{body['cluster']}: {room}\n"
        f"longest sequences: train.max_length={body['max_length']} ({body['length_limit']})\n"
        f"largest micro batch: train.per_device_train_batch_size={body['micro_batch']} of {body['rows']} tokens\n"
        "powers of two were tried, each key alone, with every layer recomputed, evaluations of one row and nothing offloaded"
    )


def _sizes_that_fit(args: PlanArguments, folder: str, calibrated: CalibratedCluster, body: Any) -> dict[str, Any]:
    """The longest rows and the largest micro batch of a drafted recipe, by powers of two, each layer recomputed."""
    from clustertune import draft

    def fits(*own: str) -> Plan | None:
        base = ["activation_checkpointing.ratio=1", "train.per_device_eval_batch_size=1", *args.overrides, *own]
        with contextlib.suppress(UserError):
            plan = _plan(calibrated, folder, base, args.tiny, None)
            offloads = (plan.strategy.offload_params, plan.strategy.offload_optimizer) != ("none", "none")
            return plan if plan.fits and not offloads else None
        return None

    def most(start: int, end: int, *key: str) -> int:
        size = start
        while 2 * size <= end and fits(*(part.format(2 * size) for part in key)) is not None:
            size *= 2
        return size

    small = "train.per_device_train_batch_size=1"
    plan = fits(small) or fits()
    if plan is None:
        raise draft.NothingFits("nothing fits", file="command line", key="--largest", fix="larger GPUs")
    rows, world = int(native_rules.row_tokens(plan.resolved.train_args)), plan.strategy.data_parallel_size
    positions = int(body.get("max_position_embeddings") or LONGEST)
    length = most(rows, min(LONGEST, positions), small, "train.max_length={0}")
    batch = most(1, MOST_ROWS, "train.per_device_train_batch_size={0}", f"train.global_batch_size={world * MOST_ROWS}")
    reason = f"the model has {positions:,} positions" if 2 * length > positions else "longer ones need more memory"
    return {
        "max_length": length,
        "length_limit": reason,
        "micro_batch": batch,
        "rows": rows,
        "nodes": plan.resolved.recipe.slurm.nodes,
        "needed_gib_per_gpu": plan.needed / GIB,
        "usable_gib_per_gpu": plan.machine.usable_bytes / GIB,
    }


def _answer(args: PlanArguments, overrides: list[str], calibrated: CalibratedCluster, plans: list[Plan]) -> None:
    bills = [bill.bill(plan, calibrated.cluster) for plan in plans]
    if args.compare:
        from clustertune.plan import tables

        documents = [explanation.as_json(plan) | {"total": billed.as_json()} for plan, billed in zip(plans, bills, strict=True)]
        document = {"plans": documents, "speedup": plans[0].step.seconds / plans[1].step.seconds}
        rows = [billed.rows(plan.machine.gpu) for plan, billed in zip(plans, bills, strict=True)]
        reply(args.as_document, document, lambda: tables.compare(plans[0], plans[1], rows, console.stdout))
        _end(all(plan.fits for plan in plans))
    elif args.why is not None:
        lines = bill.why(plans[0], bills[0], serving.evaluation(plans[0].resolved, calibrated.cluster), args.why)
        reply(args.as_document, {"part": args.why, "arithmetic": lines}, lambda: show("\n".join(lines)))
    elif args.advise and plans[0].resolved.recipe.rollout == "servers":
        _advise_splits(calibrated, plans[0], args, overrides)
    elif args.advise:
        _advise(calibrated, plans[0], bills[0], args, overrides)
    else:
        scored = serving.evaluation(plans[0].resolved, calibrated.cluster)
        simulated = _simulate(plans[0], args) if args.simulate else None
        if simulated is not None and args.out is not None:
            from clustertune.simulate import simulator

            out = path_argument(args.out)
            replace_ours(out, simulator.svg(*simulated), simulator.MARK)
            say(f"in {out}")
        budget = _budget(plans[0], bills[0], args.within) if args.within is not None else None
        _show(plans[0], bills[0], tuple(overrides), args.as_document, scored, simulated, budget)


def _budget(plan: Plan, billed: bill.Bill, amount: float) -> dict[str, Any]:
    """What of a plan a budget pays: whether the whole run, and how many steps and epochs. Raises UserError without a cost."""
    cost, steps, hours = billed.total, plan.schedule.steps, plan.hours
    if cost is None or not steps or hours is None:
        text = f"what the run costs is not known ({'no price' if billed.price is None else plan.schedule.steps_why})"
        raise UserError(
            text, file="command line", key="--within", fix="--data FILE, data.expect.train, or a price in ops/prices.yaml"
        )
    around = plan.totals() or {}
    fixed = billed.money(around.get("load", 0.0) / 3600 * plan.gpus) or 0.0  # with the evaluation, which every run has
    each = (cost - fixed) / steps
    most = max(0, math.floor((amount - fixed) / each + 1e-9)) if each > 0 else steps
    epochs = float(plan.resolved.train_args["num_train_epochs"]) if plan.resolved.train_args["max_steps"] <= 0 else None
    text = (
        f"({amount:,.2f} - {fixed:,.2f} for loading and evaluation) / {each:.4g} a step = {most:,} steps, the run has {steps:,}"
    )
    return {
        "amount": amount,
        "currency": billed.currency,
        "cost": cost,
        "within": cost <= amount,
        "steps_within": most,
        "epochs_within": None if epochs is None else epochs * most / steps,
        "arithmetic": text,
    }


def _simulate(plan: Plan, args: PlanArguments) -> tuple[Plan, Simulation]:
    """The simulation, and the plan of what was simulated: of the same depth, of full rows. Says how far it is on stderr."""
    from clustertune.simulate import simulator

    resolved = plan.resolved if args.depth is None else simulator.with_depth(plan.resolved, args.depth)
    ranks = simulator.read_ranks(args.ranks, resolved)
    longest = known_lengths.Lengths((int(native_rules.row_tokens(resolved.train_args)),), "full rows")
    same = prediction.make_plan(resolved, plan.machine, plan.constants, lengths=longest, sure=False)
    return same, simulator.simulate(
        resolved, plan.machine, ranks=ranks, tell=lambda body: console.say(simulator.progress(body))
    )


def _end(fits: bool) -> None:
    """Exit with 2 where nothing fits."""
    if not fits:
        raise typer.Exit(int(ExitCode.CONFIG))


def _largest_problems(args: PlanArguments) -> Iterator[Problem]:
    """What ``--largest`` does not go with."""
    others = (
        args.names,
        args.compare,
        args.calibrate,
        args.advise,
        args.why,
        args.clusters,
        args.simulate,
        args.within,
        args.data,
    )
    if args.largest and any(others):
        text, fix = "asks of GPUs, and of one model with --model", "leave recipes, --data and the other questions out"
        yield Problem(text, file="command line", key="--largest", fix=fix)


_MOST_MONEY = 1e15


def _budget_problems(args: PlanArguments) -> Iterator[Problem]:
    """What is wrong with ``--within``."""
    if args.within is None:
        return
    if not 0 < args.within <= _MOST_MONEY:
        text = f"{args.within:g} is not an amount of money above 0 and up to {_MOST_MONEY:g}"
        yield Problem(text, file="command line", key="--within", fix="--within 500")
    if args.compare or args.calibrate or args.why is not None or args.simulate:
        fix = "leave the other option out"
        yield Problem("goes with a plan, --advise and --clusters", file="command line", key="--within", fix=fix)


def _check_usage(args: PlanArguments) -> None:
    """Raise UserError with all that the command line contradicts itself in."""
    problems: list[Problem] = []

    def wrong(key: str | None, text: str, fix: str | None) -> None:
        problems.append(Problem(text, file="command line", key=key, fix=fix))

    needed = 2 if args.compare else 1
    if args.calibrate and not args.names:
        wrong("--calibrate", "no run was given", "give run folders with metrics.jsonl")
    elif args.model is not None and (args.names or args.compare or args.calibrate):
        wrong("--model", "--model plans one model, without a recipe", "leave the recipe, --compare or --calibrate out")
    elif not args.calibrate and len(args.names) != needed and args.model is None and not args.largest:
        text = f"{'--compare needs two recipes' if args.compare else 'one recipe is needed'}, got {len(args.names)}"
        split = any(one.startswith("=") or one.endswith("=") for one in args.overrides)
        fix = "clustertune plan RECIPE [section.key=value]..., or --model OWNER/NAME"
        wrong("RECIPE", text, "write section.key=value without blanks around the =" if split else fix)
    if sum((args.compare, args.calibrate, args.advise, args.why is not None, args.clusters is not None, args.simulate)) > 1:
        text = "--compare, --calibrate, --advise, --why, --clusters and --simulate exclude each other"
        wrong(None, text, "ask one after the other")
    for key, value in (("--depth", args.depth), ("--ranks", args.ranks)):
        if value is not None and not args.simulate:
            wrong(key, "is read only with --simulate", "add --simulate")
    if args.nodes is not None and not args.advise:
        wrong("--nodes", "is read only with --advise", "add --advise, or slurm.nodes=N for a plan on so many nodes")
    if args.calibrate and args.overrides:
        wrong("--calibrate", f"{args.overrides[0]}: a run is taken as it was", "leave the overrides out")
    if args.gpus is not None and args.cluster is not None:
        wrong("--gpus", "--gpus and --cluster exclude each other: a cluster file says which GPUs there are", "leave one out")
    if args.clusters is not None and (args.cluster is not None or args.model is not None):
        wrong("--clusters", "takes the place of --cluster, and needs a recipe", "leave --cluster or --model out")
    problems += [*_budget_problems(args), *_largest_problems(args)]
    if args.out is not None and args.clusters is None and not args.simulate:
        wrong("--out", "is read only with --clusters and --simulate", "add --clusters all, or --simulate")
    if args.goal not in GOALS:
        wrong("--goal", f"{args.goal!r} is not a goal", layers.did_you_mean(args.goal, GOALS))
    raise_if(problems)


def _plan(calibrated: CalibratedCluster, recipe: str, changes: list[str], tiny: bool, lengths: Lengths | None) -> Plan:
    resolved = resolve.resolve(recipe, changes, tiny=tiny)
    raise_if(schedule.find_idle_schedule(resolved, lengths=lengths))
    machine = calibrated.machine(resolved.recipe.slurm.nodes)
    plan = prediction.make_plan(resolved, machine, calibrated.constants, lengths=lengths)
    plan.notes.extend(schedule.check_schedule_end(resolved, lengths=lengths))
    return plan


def _show(
    plan: Plan,
    total: bill.Bill,
    overrides: tuple[str, ...],
    as_document: bool,
    scored: serving.Evaluation,
    simulated: tuple[Plan, Simulation] | None = None,
    budget: dict[str, Any] | None = None,
) -> None:
    better = [] if plan.fits else advisor.remedies(plan, overrides)
    if as_document:
        body = explanation.as_json(plan) | {"evaluation": scored.as_json(), "total": total.as_json()}
        if budget is not None:
            body["budget"] = budget
        if simulated is not None:
            from clustertune.simulate import simulator

            body["simulation"] = simulator.as_json(*simulated)
        if not plan.fits:
            body["remedies"] = [{"change": r.what, "overrides": r.arguments, "step_s": r.plan.step.seconds} for r in better]
        emit_json(body)
        return _end(plan.fits and (budget is None or budget["within"]))
    from clustertune.plan import tables  # they load rich, which a document has no use for
    from clustertune.simulate import show as simulation_show

    tables.render(plan, total.headline(), total.rows(plan.machine.gpu), console.stdout)
    show(f"\n{scored}")
    if budget is not None:
        epochs = "" if budget["epochs_within"] is None else f", {budget['epochs_within']:.2f} epochs"
        show(
            f"\nwithin {budget['amount']:,.2f} {budget['currency']}: {'yes' if budget['within'] else 'NO'}, the run costs "
            f"{budget['cost']:,.2f}; {budget['arithmetic']}{epochs}"
        )
    if not plan.fits:
        told = "It would fit with one of these, the smallest change first:" if better else "No single change would make it fit."
        show(f"\n{told}")
    for remedy in better[:6]:
        arguments = " ".join(remedy.arguments or ["not on this cluster"])
        needed = f"{remedy.plan.needed / GIB:.1f} GiB"
        show(f"  {remedy.what}: {remedy.plan.step.seconds:.3g} s a step, {needed}  ({arguments})")
    if simulated is not None:
        show("")
        simulation_show.render(*simulated, console.stdout)
    return _end(plan.fits and (budget is None or budget["within"]))


def _advise_splits(calibrated: CalibratedCluster, base_plan: Plan, args: PlanArguments, overrides: list[str]) -> None:
    """How the nodes of a job with servers may be split: each plan that fits on as many nodes, the fastest first."""
    recipe, each = base_plan.resolved.recipe, base_plan.machine.gpus_per_node
    nodes, plans = recipe.slurm.nodes + recipe.server_nodes, []
    for serving_nodes in range(1, nodes):
        for wide in (n for n in range(1, each + 1) if each % n == 0):
            own = [f"slurm.nodes={nodes - serving_nodes}", f"servers.nodes={serving_nodes}"]
            own.append(f"servers.tensor_parallel_size={wide}")
            with contextlib.suppress(UserError):  # a batch that does not divide, weights that do not fit
                plans.append((own, _plan(calibrated, args.names[0], [*overrides, *own], args.tiny, base_plan.lengths)))
    fitting = sorted((plan.step.seconds, own, plan) for own, plan in plans if plan.fits)
    rows: list[dict[str, Any]] = [
        {
            "overrides": own,
            "step_s": seconds,
            "generation_s": plan.step.generation.value if plan.step.generation else 0.0,
            "gpu_hours": None if plan.hours is None else plan.hours * plan.gpus,
        }
        for seconds, own, plan in fitting
    ]
    lines = [
        f"{row['step_s']:8.3g} s a step, {row['generation_s']:.3g} s of it generation: {' '.join(row['overrides'])}"
        for row in rows
    ]
    reply(args.as_document, {"splits": rows}, lambda: show("\n".join([f"{nodes} nodes of {each} GPUs, split:", *lines])))
    _end(bool(rows))


def _advise(calibrated: CalibratedCluster, plan: Plan, total: bill.Bill, args: PlanArguments, overrides: list[str]) -> None:
    from clustertune.plan import tables

    counts = _counts(args.nodes, plan)
    source = recipe_source.RecipeSource(plan.resolved, tuple(overrides))
    advice = advisor.advise(
        source, calibrated.machine(max(counts)), plan.constants, nodes=counts, goal=args.goal, lengths=plan.lengths,  # type: ignore[arg-type]
    )  # fmt: skip
    if args.within is not None:
        costs = {id(o): None if o.hours is None else total.money(o.hours * o.strategy.gpus) for o in advice.fitting}
        paid = [option for option in advice.fitting if (cost := costs[id(option)]) is not None and cost <= args.within]
        if not paid:
            known = min((cost for cost in costs.values() if cost is not None), default=None)
            text = "what the run costs is not known" if known is None else f"the cheapest that fits costs {known:,.2f}"
            raise UserError(
                f"{text}, the budget is {args.within:,.2f}", file="command line", key="--within", fix="fewer epochs or steps"
            )
        advice = replace(advice, fitting=paid)
    named = advisor.overrides(advice, source)
    if args.as_document:
        emit_json(explanation.advice_json(advice, named, calibrated.cluster, total.money, total.currency))
    else:
        flags = {"--model": args.model, "--data": args.data, "--gpus": args.gpus, "--cluster": args.cluster}
        flags |= {"--method": args.method} if args.model else {}
        recipe = [*args.names, *(word for key, value in flags.items() if value for word in (key, value))]
        quoted = {family: [shlex.quote(text) for text in arguments] for family, arguments in named.items()}
        tables.advice(
            advice, quoted, plan, console.stdout, recipe=shlex.join(recipe), cluster=calibrated.cluster, money=total.money,
            currency=total.currency,
        )  # fmt: skip
    _end(any(option.starts(calibrated.cluster) for option in advice.fitting))


def _counts(text: str | None, plan: Plan) -> list[int]:
    if text is None:
        return [plan.resolved.recipe.slurm.nodes]
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    beside = plan.strategy.server_nodes
    most = plan.machine.nodes - beside
    if not counts or any(not 1 <= count <= most for count in counts):
        text = f"{text!r} is not a list of node counts from 1 to {most}, which {plan.machine.name} has"
        text += f" beside {beside} of servers" if beside else ""
        raise UserError(text, file="command line", key="--nodes", fix="write --nodes 1,2,4")
    return counts


def _calibrate(calibrated: CalibratedCluster, runs: list[str], lengths: Lengths | None, as_document: bool) -> None:
    """Fit the factors to runs of this cluster, store them, show what changed."""
    from clustertune.plan import tables
    from clustertune.report.source import observe

    if calibrated.calibration is None:
        text = "a cluster found by looking has no file to keep a calibration beside"
        raise UserError(text, file="command line", key="--cluster", fix="write a cluster file: docs/clusters.md")
    fitted = calibration.fit([observe(calibrated, path_argument(run), lengths) for run in runs])
    calibration.store(calibrated.calibration, calibrated.cluster.name, datetime.date.today().isoformat(), fitted)
    document = {"file": str(calibrated.calibration), "constants": fitted.values, "deviation": fitted.deviation}
    document |= {"not_identified": fitted.left, "unexplained": calibration.unexplained(fitted)}
    kept = f"kept in {calibrated.calibration}: plans on {calibrated.cluster.name} use it from now on"
    reply(
        as_document,
        {**document, "runs": [run.model_dump() for run in fitted.runs]},
        lambda: tables.calibration(fitted, console.stdout),
        lambda: show(kept),
    )


# --- new ---------------------------------------------------------------------------------------------------------------


def write_recipe(args: NewArguments) -> None:
    """Write the folder, and print every assumption and the next commands. Raises UserError."""
    from clustertune import draft

    name, overrides = args.name, args.overrides
    folder = draft.target(name)
    stated = draft.stated(overrides or ())
    made_of, measured, at = draft.read_options(
        args.model, args.data, args.method, args.gpus, args.cluster, needs_data=True, of_data=stated.get("data")
    )
    if not (stated.get("model") or {}).keys() & {"revision", "path"}:
        made_of = models.pinned(made_of)
    unseen = draft.look_at_weights(made_of, stated)
    looked = draft.look_at_tokenizer(made_of, measured, stated)
    looked.notes.extend(unseen)
    stated = layers.laid_over(looked.keys, stated)
    shown = folder.name if "/" not in name else name
    if at.assumed and args.method != "qlora" and tiny.is_small(made_of.architecture):
        made = draft.on_cpus(made_of, args.method, measured, stated, looked.ends)
        made.assumed.extend([*looked.sentences, *draft.left_out(made, looked)])
        looked.refused.extend([*draft.to_write(made), *draft.lacking_weights(made_of, stated)])
        following = [] if looked.refused else draft.commands(shown, ())
        with draft.folder_of(made, folder.name) as written:
            resolve.resolve(written)
            _keep(written, folder, draft.page(made, folder.name, made_of, following, looked.refused))
        document: dict[str, Any] = {"fits": True, "step_s": None, "hours": None, "total": None}
        text = "\nfor this machine's CPUs."
    else:
        with draft.drafted(folder.name, made_of, args.method, measured, at, stated) as (made, written):
            made.assumed.extend([*looked.sentences, *draft.left_out(made, looked)])
            looked.refused.extend(draft.to_write(made))
            following = [] if looked.refused else draft.commands(shown, at.options)
            machine = at.calibrated.machine(int(made.recipe["slurm"]["nodes"]))
            plan = prediction.make_plan(resolve.resolve(written), machine, at.calibrated.constants, lengths=made.lengths)
            _keep(written, folder, draft.page(made, folder.name, made_of, following, looked.refused))
        total = bill.bill(plan, at.calibrated.cluster)
        document = {"fits": plan.fits, "step_s": plan.step.seconds, "hours": plan.hours, "total": total.as_json()}
        hours = f"{plan.hours:.2g} h of training" if plan.hours else f"{plan.step.seconds:.3g} s a step"
        spent = f"; all stages {headline}" if (headline := total.headline()) else ""
        memory = f"{plan.needed / GIB:.0f} of {machine.usable_bytes / GIB:.0f} GiB a GPU"
        text = f"\nplanned: {hours} on {machine.name}, {memory}{spent}."
    if overrides:
        made.assumed.append(f"said behind the options, and holds whatever stands above: {', '.join(overrides)}")
    files = sorted(path.name for path in folder.iterdir())
    document |= {"folder": str(folder), "files": files, "assumed": made.assumed, "commands": following}
    document["refused"] = looked.refused
    reply(
        args.as_json,
        document,
        f"{folder}: {', '.join(files)}",
        *(f"- {one}" for one in made.assumed),
        text + (" Before it runs:\n" if looked.refused else " Next:\n"),
        "\n".join(looked.refused or following),
    )


def _keep(written: Path, folder: Path, page: str) -> None:
    """Write the files of a draft, and its README, to the recipe's folder."""
    (written / "README.md").write_text(page, encoding="utf-8")
    shutil.copytree(written, folder, dirs_exist_ok=True)
