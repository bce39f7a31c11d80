"""``clustertune bench``: how fast a recipe trains, against the planner and against other programs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from clustertune import secrets
from clustertune.arguments import AsJson, ClusterOption, Overrides, RecipeArgument, Tiny, path_option, takes
from clustertune.cli.deferred import deferred
from clustertune.console import emit_json, reply, say
from clustertune.errors import Problem, UserError, collect_problems, raise_if, storage_error, storing
from clustertune.rundir import RunDir

with deferred():
    from clustertune import chain
    from clustertune.bench import batch, drive, page, peer, preparation, result
    from clustertune.cluster import hardware, load, local, schema
    from clustertune.launch import allocation, cluster_paths, node
    from clustertune.recipe import parameters
    from clustertune.training import bench_schedule
TAKEN = "is another result of the same recipe, machine, ranks and overrides: nothing published is overwritten"
OTHERWISE = "--out DIR for another place, or --replace"
_SPARE = 0.9
"""Share of the free memory that random weights may take here."""
Rounds = Annotated[
    int | None,
    typer.Option(
        min=1, max=100, help="Repetitions of the whole training. Default: 1; with --against 2, in turn.", show_default=False
    ),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        metavar="trl|trl-defaults|SCRIPT.py",
        help="Compare with TRL with the recipe's arguments, TRL with its defaults, or a program. Repeatable.",
        show_default=False,
    ),
]
Interleave = Annotated[
    bool | None,
    typer.Option(
        "--interleave/--no-interleave",
        help="Alternate with TRL step by step: steadier, but needs the memory of both. Default: only on CPUs.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class BenchArguments:
    """The command line."""

    recipe: RecipeArgument
    overrides: Overrides = None
    steps: Annotated[int, typer.Option(min=2, max=100_000, help="Timed optimizer steps per round.")] = 20
    warmup: Annotated[int, typer.Option(min=1, max=10_000, help="Untimed warm-up steps.")] = 5
    profile: Annotated[int, typer.Option(min=0, max=100, help="Steps to profile after the timed ones.")] = 2
    rounds: Rounds = None
    against: Against = None
    interleave: Interleave = None
    ends: Annotated[bool, typer.Option("--ends/--no-ends", help="Evaluate and save once after the steps.")] = True
    synthetic: Annotated[
        bool,
        typer.Option("--synthetic", help="Run at full size with random weights and generated conversations; needs no Hub."),
    ] = False
    tiny: Tiny = False
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks on this machine. Default: as for clustertune run.")] = None
    cluster: ClusterOption = None
    out: Annotated[Path | None, path_option("Folder for the result. Default: docs/results/bench.", "--out")] = None
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite another result of the same name.")] = False
    run_dir: Annotated[Path | None, path_option("New run folder. Default: below runs/bench.")] = None
    submit: Annotated[bool, typer.Option("--submit", help="Run as a Slurm job on the cluster.")] = False
    time: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --submit: the job's time limit.", show_default=False)
    ] = None
    inside: Annotated[bool, typer.Option("--inside", hidden=True)] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")] = False
    as_json: AsJson = False

    @property
    def results(self) -> Path:
        """The folder of results."""
        return self.out or Path("docs", "results", "bench")

    @cached_property
    def request(self) -> preparation.BenchRequest:
        """The benchmark. Raises UserError."""
        peers, in_job = peer.peers_of(self.against or ()), self.submit or self.inside
        return preparation.BenchRequest(
            recipe=self.recipe,
            overrides=tuple(self.overrides or ()),
            tiny=self.tiny,
            ranks=self.ranks,
            schedule=bench_schedule.BenchSchedule(self.warmup, self.steps, self.profile, save=self.ends),
            rounds=self.rounds or (2 if peers else 1),
            against=peers,
            interleave=peer.take_turns(peers, local=not in_job) if self.interleave is None else self.interleave,
            synthetic=self.synthetic,
            run_path=self.run_dir or new_run_path(self.recipe, self.cluster, in_job),
            elsewhere=in_job,
            replace=self.replace,
        )


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(bench)


@takes(BenchArguments)
def bench(args: BenchArguments) -> None:
    """Measure a recipe's training: speed, memory, communication.

    Estimates the whole training. Uses the ranks of clustertune run. Warm-up is not counted; the result is compared with what
    plan predicts.
    """
    raise typer.Exit(answer(args))


def new_run_path(recipe: str, cluster: str | None, submit: bool) -> Path:
    """A new folder for each benchmark: below the cluster's folder of runs for a job, else below this machine's."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(recipe).name).strip("._-")[:64] or "recipe"
    below = cluster_paths.runs(load.load_cluster(cluster) if cluster and submit else cluster_paths.local_cluster())
    return below / "bench" / name / (datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ") + f"-{os.getpid()}")


def answer(args: BenchArguments) -> int:
    """Do what was asked. Returns the exit code. Raises UserError."""
    _check_usage(args)
    secrets.read_env(secrets.DEFAULT)
    recorded = batch.recorded(args.request) if args.inside else None
    cluster = recorded[0] if recorded else load.load_cluster(args.cluster)
    raise_if(_folder_problems(args))
    if args.submit:
        return _submit(args, cluster)
    cluster_paths.enter(cluster)
    bench = recorded[1] if recorded else preparation.make(args.request)
    _check_place(bench, args)
    if args.dry_run:
        _show(bench, args, cluster)
        return 0
    return _measure(bench, args, cluster)


def _check_usage(args: BenchArguments) -> None:
    request, problems = args.request, list[Problem]()

    def wrong(key: str, text: str, fix: str) -> None:
        problems.append(Problem(text, file="command line", key=key, fix=fix))

    if request.tiny and request.synthetic:
        wrong("--synthetic", "--tiny scales the model down, --synthetic keeps its size", "give one of them")
    if args.time is not None and not args.submit:
        wrong("--time", "is read only with --submit", "leave it out")
    if request.ranks is not None and (args.submit or args.inside):
        wrong("--ranks", "a job has a rank per GPU", "slurm.nodes=N slurm.gpus_per_node=N")
    for name in request.against:
        with collect_problems(problems):
            peer.start_of(name)
    if request.interleave and (args.submit or args.inside):
        wrong("--interleave", "is for one machine: in a job whole trainings alternate", "leave it out")
    raise_if(problems)


def _folder_problems(args: BenchArguments) -> list[Problem]:
    """Folders that cannot be made, or are not this benchmark's own."""
    found = []
    for path, key, what in ((args.request.run_path, "--run-dir", "a run needs"), (args.results, "--out", "results need")):
        try:
            there = next(part for part in (path, *path.absolute().parents) if part.exists())
            if not there.is_dir():
                found.append(Problem(f"is a file, {what} a folder", file=str(there), key=key, fix="give a folder"))
            elif key == "--run-dir" and there == path and any(path.iterdir()):
                text, fix = "is not empty: each benchmark needs a new folder", "give a new one, or leave it out"
                found.append(Problem(text, file=str(path), key=key, fix=fix))
        except OSError as error:  # a name that is too long, a folder that is closed
            raise storage_error(error, f"{key} cannot be read", path) from None
    return found


def _check_place(bench: preparation.Bench, args: BenchArguments) -> None:
    """Raise UserError for what would only be found out after minutes."""
    problems = []
    if (name := _expected_name(bench)) is not None and (args.results / f"{name}.json").exists() and not args.request.replace:
        problems.append(Problem(TAKEN, file=str(args.results / f"{name}.json"), key="--out", fix=OTHERWISE))
    if args.request.synthetic and not chain.visible_gpus() and (text := _too_large(bench)):
        fix = "run it where there are GPUs: --submit, or a recipe folder with a smaller model.json"
        problems.append(Problem(text, file=bench.whole.name, key="model", fix=fix))
    raise_if(problems)


def _expected_name(bench: preparation.Bench) -> str | None:
    """What the result will be called, as far as this process can know: the ranks say later what they run on."""
    kind: str | None = "cpu"
    if chain.visible_gpus():
        names = local.gpu_names()
        kind = hardware.recognise(names.pop()) or "gpu" if len(names) == 1 else None
    request, ranks = bench.request, bench.measured.world_size
    if kind is None:
        return None
    changed, recipe = result.changed(request), bench.whole.name
    return result.file_name(recipe, tiny=request.tiny, synthetic=request.synthetic, kind=kind, ranks=ranks, changed=changed)


def _too_large(bench: preparation.Bench) -> str | None:
    """Whether the weights alone, on every rank, exceed this machine's free memory."""
    count = parameters.parameter_count(bench.whole.architecture)
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    needed = 2 * (count or 0) * bench.measured.world_size
    if needed <= _SPARE * free:
        return None
    return (
        f"{bench.measured.world_size} ranks with {2 * (count or 0) / 1e9:.0f} GB of weights each; {free / 1e9:.0f} GB are free"
    )


def _measure(bench: preparation.Bench, args: BenchArguments, cluster: schema.Cluster) -> int:
    given = None
    if args.inside:
        given = allocation.read()
        nodes = bench.measured.recipe.slurm.nodes
        if len(given.nodes) != nodes:
            text = f"the job has {len(given.nodes)} nodes, the recipe asks for {nodes}"
            raise UserError(text, key="slurm.nodes", fix="submit it again: clustertune bench RECIPE --submit")
    for warning in bench.whole.warnings:
        say(f"warning: {warning}")
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed, where it is installed, logs its import to stdout
        found = drive.measure(bench, chain.command_line(), cluster if given else None, given)
        body = result.document(bench, found, cluster)
    _keep(bench, args.results, body)
    reply(args.as_json, body)
    return 0


def _keep(bench: preparation.Bench, out: Path, body: dict[str, Any]) -> None:
    """Write the result, and say what it is; into the run folder, with a UserError, where another one has its place."""
    name = result.name_of(body)
    recipe_file = f"{name}.recipe.json"
    body["resolved"]["file"] = recipe_file
    texts = {
        recipe_file: result.recipe_text(bench),
        f"{name}.json": json.dumps(body, indent=1) + "\n",
        f"{name}.md": page.render(body, recipe_file),
    }
    with storing("cannot hold the result", out, named=True):
        taken = [] if bench.request.replace else result.others(out, texts)
        folder = bench.request.run_path if taken else out
        result.write(folder, texts)
    _tell(body, folder / name)
    if taken:
        fix = f"copy {folder / name}.* to another place, or measure again with --replace"
        raise UserError(TAKEN, file=str(taken[0]), key="--out", fix=fix)


def _tell(body: dict[str, Any], path: Path) -> None:
    ours, used = body["ours"], body["utilisation"]
    step, rate = ours["step_s"], ours["tokens_per_s_per_gpu"]
    say(
        f"step {page.number(step['median'])} s (median of {step['n']}, standard deviation {page.number(step['stdev'])}), "
        f"{page.number(rate['mean'])} tokens/s per rank, padding {page.percent(ours['padding_share'])}"
    )
    say(f"MFU {page.percent(used['mfu'])}, HFU {page.percent(used['hfu'])}: {used['why']}")
    peak = ours["peak"]
    gpu = f"{page.number(peak['allocated_gib'])} GiB on a GPU, " if peak["allocated_gib"] else ""
    say(f"peak memory: {gpu}{page.number(peak['rss_gib'])} GiB resident set of a rank")
    if seen := ours["communication"]:
        say(f"communication not hidden: {page.percent(seen['exposed_share'])} of a profiled step")
    plan = body["plan"]
    if "unknown" in plan:
        say(f"no plan to compare with: {plan['unknown']}")
    else:
        row = plan["rows"]["step_s"]
        planned = page.number(row["plan"])
        say(f"planned on {plan['cluster']}: {planned} s a step; measured / planned {page.number(row['ratio'])}")
    ahead = body["projection"]
    if ahead["hours"] is None:
        say(f"the whole recipe: {ahead['why']}")
    else:
        gpus = f", {page.number(ahead['gpu_hours'])} GPU-hours" if ahead["gpu_hours"] is not None else ""
        say(f"the whole recipe: {ahead['steps']:,} steps, {page.number(ahead['hours'])} h{gpus}")
    if body["peers"]:
        say(page.headline(body))
    for one in body["peers"]:
        if one["ratio"]:
            speed, memory = one["ratio"]["tokens_per_s"], one["ratio"]["peak_memory"]
            say(f"against {one['what']}: {page.number(speed)} x its tokens/s, {page.number(memory)} x its peak memory")
    say(f"in {path}.json and .md")


def _show(bench: preparation.Bench, args: BenchArguments, cluster: schema.Cluster) -> None:
    """What would be run: folder, steps, command, and what the planner says about it."""
    run, schedule = RunDir(args.request.run_path), args.request.schedule
    command = node.ranks_command(run, bench.measured, 1)
    plan, why = result.predict(bench.whole, cluster, bench.lengths)
    body = {
        "run_dir": str(run.path),
        "out": str(args.results),
        "rounds": args.request.rounds,
        "schedule": {"warmup": schedule.warmup, "steps": schedule.steps, "profiled": schedule.profiled},
        "ranks": bench.measured.world_size,
        "against": list(args.request.against),
        "interleave": args.request.interleave,
        "train": command,
        "changes": {key: bench.measured.train_args.get(key) for key in ("max_steps", "eval_strategy", "save_strategy")},
        "made_up": None if bench.made is None else {"tokens": round(bench.made[0]), "conversations": bench.made[1]},
        "plan": result.brief(plan) if plan is not None else {"unknown": why},
    }
    if args.as_json:
        emit_json(body)
        return
    say(f"run folder: {run.path}; result: {args.results}")
    say(f"{args.request.rounds} x {schedule.warmup} steps of warm-up, {schedule.steps} timed, {schedule.profiled} profiled")
    if bench.made is not None:
        packed = f"{bench.made[0]:,.0f} tokens" if bench.made[0] else f"{bench.made[1]:,} conversations"
        say(f"made up: random weights of the recipe's full size, {packed}")
    for name in args.request.against:
        say(f"in turn with: {name}{', a step each' if args.request.interleave else ''}")
    say(f"train: {shlex.join(command)}")
    if plan is None:
        say(f"no plan: {why}")
    else:
        figures = result.brief(plan)
        say(
            f"planned on {plan.machine.name}: {figures['step_s']:.3g} s a step, {figures['needed_gib_per_gpu']:.1f} GiB per GPU"
        )


# --- as a job ----------------------------------------------------------------------------------------------------------


def _submit(args: BenchArguments, cluster: schema.Cluster) -> int:
    made = batch.make(args.request, cluster, args.cluster, args.results, args.time)
    if args.dry_run:
        body: dict[str, Any] = {}
        if args.as_json:
            plan, why = result.predict(made.bench.whole, cluster, made.bench.lengths)
            body["plan"] = result.brief(plan) if plan is not None else {"unknown": why}
        else:
            _show(made.bench, args, cluster)
        made.show(args.as_json, **body)
        return 0
    places = (("the run folder", made.folder), ("the result's folder", made.out))
    made.submit(cluster, args.as_json, places, out=str(args.results))
    say(f"its log: {made.folder}; the result: {args.results.absolute()}")
    return 0
