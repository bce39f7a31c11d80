"""What a recipe says with every value resolved, what is known of a cluster, and how runs are: one while it runs, or all."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

import typer

from clustertune import console
from clustertune.cli.arguments import AsJson, Overrides, Ranks, RecipeArgument, Tiny, path_argument, path_given, path_option
from clustertune.console import emit_json, reply, say
from clustertune.errors import UserError, raise_if, storage_error, storing
from clustertune.manifest import replace_ours


def show(
    recipe: RecipeArgument, overrides: Overrides = None, tiny: Tiny = False, ranks: Ranks = None, as_json: AsJson = False
) -> None:
    """Each value is shown with its origin: base, recipe, override, derived (and from what), or default."""
    from clustertune.cluster.load import load_cluster
    from clustertune.launch import container_packages
    from clustertune.plan import schedule
    from clustertune.resolve import resolve, view

    resolved = resolve.resolve(recipe, overrides or [], tiny=tiny, ranks=ranks)
    lacking = container_packages.not_built(resolved.train_args) if ranks is None and resolved.recipe.megatron is None else []
    if lacking:  # the image of this host's cluster may have it
        lacking = container_packages.not_built(resolved.train_args, load_cluster(None).container.packages)
    raise_if([*schedule.find_idle_schedule(resolved), *lacking])
    resolved.warnings.extend(schedule.check_schedule_end(resolved))
    reply(as_json, view.as_json(resolved), lambda: view.render(resolved, console.stdout))


def show_cluster(
    cluster: Annotated[
        str | None,
        typer.Argument(
            help="A name in ops/clusters, a file, or local: inspect this machine. Default: the file of this host, else local."
        ),
    ] = None,
    write: Annotated[
        Path | None, path_option("Draft a cluster file from Slurm and one inspected node; overwrites nothing.", metavar="FILE")
    ] = None,
    as_document: AsJson = False,
) -> None:

    from clustertune.cluster.load import load_cluster
    from clustertune.resolve import view

    if write is not None:
        if cluster not in (None, "local"):
            raise UserError("has a cluster file already", file="command line", key=cluster, fix="leave it out")
        text, file = _draft(write), write.absolute()
        say(f"wrote {write}: {text.count('# unknown')} lines say what could not be found out")
        cluster = str(file)
    try:
        loaded = load_cluster(cluster)
    except UserError as error:
        if write is None:
            raise
        for one in error.problems:
            say(f"still to write: {one}")
        return
    reply(as_document, loaded.model_dump(mode="json"), lambda: view.render_cluster(loaded, console.stdout))


def _draft(file: Path) -> str:
    """Write a cluster file and return its text. Raises UserError where there is no Slurm, or the file is there."""
    from clustertune.cluster import local
    from clustertune.cluster.load import load_cluster
    from clustertune.cluster.schema import LOCAL
    from clustertune.recipe.sections import NAME

    if file.suffix not in (".yaml", ".yml") or not re.fullmatch(NAME, file.stem):
        raise UserError("is not a NAME.yaml", file=str(file), fix="as ops/clusters/my-cluster.yaml")
    seen = load_cluster(LOCAL)
    if seen.slurm is None:
        fix = "call this on a login node of the cluster"
        raise UserError("no Slurm answers here: there is nothing to draft from", file=seen.source, fix=fix)
    say(f"looking at one node of partition {seen.slurm.partition} (a job of seconds)")
    facts, fault = local.look_at_one(seen)
    if facts is None:
        say(f"warning: no node was inspected: {fault}")
    text = local.draft(seen, facts, fault, file.stem, local.accounts())
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        if isinstance(error, FileExistsError):
            raise UserError("exists already", file=str(file), fix="name another file, or move it away") from None
        raise storage_error(error, "cannot be written", file) from None
    return text


EVERY_SECONDS = 3.0


def watch(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_JOB", help="A run folder, latest, a recipe, the beginning of a run's id, or a Slurm job's id."
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Show the state once and exit.")] = False,
    metrics: Annotated[
        Path | None, path_option("Also write the figures in OpenMetrics format.", "--openmetrics", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows speed against the plan, remaining time and money, stragglers, and how far an evaluation has come. Ends with the
    training or the evaluation. --json prints one document; what this machine cannot find out is null.
    """
    from clustertune.monitor import openmetrics, status_page
    from clustertune.monitor import status as statuses

    watcher = statuses.Watcher(_find(run))
    while True:
        status = watcher.look()
        if metrics is not None:
            with storing("cannot be written", metrics):
                openmetrics.write_openmetrics(metrics, status)
        if as_json:
            emit_json(status.as_dict())
            return
        if console.stderr.is_terminal and not once:
            console.stderr.clear()
        console.stderr.print(status_page.text(status), markup=False, highlight=False, soft_wrap=True)
        if once or status.state not in status_page.UNDER_WAY:
            return
        time.sleep(EVERY_SECONDS)


def _find(text: str) -> Path:
    """The run folder that is named, or that a job works in. Raises UserError."""
    from clustertune.launch import cluster_paths
    from clustertune.launch import stage_jobs as jobs
    from clustertune.launch.cluster_paths import existing_run

    if not text.isdigit() or Path(text).is_dir():
        return existing_run(path_argument(text))
    below = cluster_paths.found_runs()
    for folder in cluster_paths.run_folders(below):
        if any(str(entry.get("id")) == text for entry in jobs.read_jobs(folder)["jobs"]):
            return folder
    fix = "give the run folder: clustertune runs lists them"
    raise UserError(f"no run below {below} has a job {text}", file="command line", key="RUN_OR_JOB", fix=fix)


def runs(
    below: Annotated[Path | None, path_given("Folder of runs. Default: the cluster file's, else ./runs.", "FOLDER")] = None,
    as_json: AsJson = False,
) -> None:
    """Cost is GPU-hours, US dollars and kWh."""
    from clustertune.launch import cluster_paths
    from clustertune.monitor import status as statuses
    from clustertune.report import content

    where = below or cluster_paths.found_runs()
    summaries = []
    for folder in cluster_paths.run_folders(where):
        try:
            summaries.append(statuses.Watcher(folder).look().summary(folder))
        except UserError as error:
            say(f"note: left out: {error.problems[0]}")
    if as_json:
        emit_json(summaries)
        return
    table = console.make_table("run", "begun", "state", "step", "score", "GPU-hours", "USD", "kWh", text_columns=3)
    for row in summaries:
        steps = f"{content.number(row['step'])}/{content.number(row['steps'])}"
        score = f"{row['score_name']} {content.number(row['score'], 2)}" if row["score_name"] else content.number(None)
        spent = (content.number(row[key], 2) for key in ("gpu_hours", "usd", "kwh"))
        table.add_row(str(row["run"]), row["begun"] or "", row["state"], steps, score, *spent)
    console.stderr.print(table)
    if not summaries:
        say(f"no run below {where}")


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN_OR_JSON", help="Two or more: run folders, metrics.json files."),
    ],
    out: Annotated[
        Path | None, path_option("Write a page with plots (.html) or the table as Markdown.", "--out", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows world size, wall time, tokens per second, memory, cost. Missing values are left empty and named; runs of other
    recipes or hardware are compared with a warning.
    """
    from clustertune.report import comparison as room

    comparison = room.compare([path_argument(text) for text in runs])
    reply(as_json, comparison.as_dict(), lambda: console.stderr.print(room.table(comparison), soft_wrap=True))
    for note in comparison.notes:
        say(f"note: {note}")
    if out is not None:
        if out.suffix == ".html":
            replace_ours(out, room.page(comparison), room.PAGE_MARK)
        else:
            replace_ours(out, room.markdown(comparison), room.MARK)
        say(f"in {out}")
