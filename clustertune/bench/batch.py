"""A benchmark as a Slurm job: the training's own shape over the body of launch/bench.sbatch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from clustertune.bench import peer, preparation
from clustertune.bench.preparation import Bench, BenchRequest
from clustertune.cluster.load import argument, named
from clustertune.cluster.schema import Cluster
from clustertune.errors import Problem, UserError
from clustertune.launch import batch
from clustertune.launch.shape import JobShape, resolve_on, train_shape
from clustertune.recipe.load import find_folder
from clustertune.recipe.schema import parse_minutes
from clustertune.resolve.megatron import require_startable
from clustertune.resolve.resolved import Resolved
from clustertune.tree import ROOT

SCRIPT = ROOT / "launch" / "bench.sbatch"
DESCRIPTION, SCHEMA = "description.json", "clustertune.bench-job/1"
START_MINUTES, ROUND_MINUTES = 20, 40
"""A job's limit where none is given: images and data once, then so much for each training of each program. It ends when it is
done."""


@dataclass(frozen=True, kw_only=True)
class BenchJob(batch.BatchJob):
    """What is submitted."""

    out: Path
    bench: Bench
    """What the job runs, with the shape of the job among its overrides."""


def job_folder(request: BenchRequest) -> Path:
    """Where the job's files lie: beside the run folder, which the job makes."""
    return request.run_path.absolute().with_name(request.run_path.name + ".job")


def _description(bench: Bench, cluster: Cluster) -> str:
    """What the job runs: it reads this, whatever the recipe's and the cluster's files say by then."""
    recipes = {"whole": bench.whole.as_dict(), "measured": bench.measured.as_dict()}
    return json.dumps({"schema": SCHEMA, "cluster": cluster.model_dump(mode="json"), **recipes}, indent=1) + "\n"


def recorded(request: BenchRequest) -> tuple[Cluster, Bench] | None:
    """What was decided when the job was submitted; None for a job by hand. Raises UserError where it cannot be read."""
    file = job_folder(request) / DESCRIPTION
    if not file.exists():
        return None
    try:
        body = json.loads(file.read_bytes())
        if body["schema"] != SCHEMA:
            raise ValueError(f"schema {body['schema']}, this release reads {SCHEMA}")
        recipes = (Resolved.from_dict(body[key]) for key in ("whole", "measured"))
        return Cluster.model_validate(body["cluster"]), preparation.as_made(request, *recipes)
    except (OSError, KeyError, TypeError, ValueError, RecursionError, AttributeError) as error:
        fix = "clustertune bench RECIPE --submit writes it again"
        raise UserError(Problem(f"cannot be read: {error!r}", file=str(file), fix=fix)) from None


def make(request: BenchRequest, cluster: Cluster, option: str | None, out: Path, time: str | None) -> BenchJob:
    """The job. ``option``: the value of ``--cluster``. Raises UserError."""
    if cluster.slurm is None:
        fix = "add a slurm section to its file, or --cluster names another one; without --submit it runs here"
        raise UserError(Problem(f"cluster {cluster.name} has no Slurm", file=cluster.source, key="slurm", fix=fix))
    resolved, overrides = resolve_on(request.recipe, request.overrides, cluster, tiny=request.tiny)
    require_startable(resolved)
    shape = replace(train_shape(resolved, cluster), minutes=_minutes(request, cluster, time))
    bench = preparation.make(replace(request, overrides=tuple(overrides)))
    return BenchJob(
        shape=shape,
        script=render(shape),
        folder=job_folder(request),
        arguments=tuple(arguments(request, cluster, option, out, tuple(overrides))),
        out=out.absolute(),
        bench=bench,
        beside={DESCRIPTION: _description(bench, cluster)},
    )


def _minutes(request: BenchRequest, cluster: Cluster, time: str | None) -> int:
    longest = parse_minutes(cluster.slurm.max_time) if cluster.slurm else None
    if time is None:
        wanted = START_MINUTES + ROUND_MINUTES * request.rounds * (1 + len(request.against))
        return int(min(wanted, longest) if longest else wanted)
    minutes = parse_minutes(time)
    if minutes is None or minutes < 1:
        fix = "write --time MINUTES or HH:MM:SS"
        raise UserError(Problem(f"{time!r} is not a time limit", file="command line", key="--time", fix=fix))
    if longest is not None and minutes > longest:
        text = f"{minutes:g} min, jobs of {cluster.name} run {longest:g} min at most"
        raise UserError(Problem(text, file="command line", key="--time", fix="ask for less time"))
    return int(minutes)


def render(shape: JobShape) -> str:
    """The sbatch file."""
    note = "Derived by clustertune bench --submit from the recipe and the cluster file."
    return batch.render("bench", shape, note, SCRIPT.read_text())


def arguments(request: BenchRequest, cluster: Cluster, option: str | None, out: Path, overrides: tuple[str, ...]) -> list[str]:
    """The command line of the job: what was given here, in a form that another folder understands."""
    schedule = request.schedule
    against = [name if name in peer.NAMES else str(Path(name).expanduser().absolute()) for name in request.against]
    recipe = str(find_folder(request.recipe)[0].absolute())
    command_line = [recipe, *overrides, "--inside", "--cluster", argument(option or named(cluster))]
    command_line += ["--steps", str(schedule.steps), "--warmup", str(schedule.warmup), "--profile", str(schedule.profiled)]
    command_line += ["--rounds", str(request.rounds), *(part for name in against for part in ("--against", name))]
    flags = {"tiny": request.tiny, "synthetic": request.synthetic, "no-ends": not schedule.save, "replace": request.replace}
    command_line += [f"--{flag}" for flag, given in flags.items() if given]
    return [*command_line, "--run-dir", str(request.run_path.absolute()), "--out", str(out.absolute())]
