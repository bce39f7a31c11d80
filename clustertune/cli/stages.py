"""The chain on this machine, each of its stages by itself, and what is done with what they made."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from clustertune import console, secrets
from clustertune.cli.arguments import (
    AsJson,
    Device,
    Overrides,
    Ranks,
    RecipeArgument,
    Tiny,
    path_given,
    path_option,
)
from clustertune.console import emit_json, reply, say, show_error
from clustertune.errors import ExitCode, UserError, raise_if
from clustertune.rundir import STAGES, RunDir, Stage, default_run_dir

if TYPE_CHECKING:
    from clustertune.resolve.resolved import Resolved


OutOption = Annotated[Path | None, path_option("The folder to write.", "--out")]


def prepare(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    input_path: Annotated[
        Path | None, path_option("Use this file or folder instead of the recipe's data.", "--input", metavar="PATH")
    ] = None,
    out: OutOption = None,
    show_count: Annotated[
        int, typer.Option("--show", metavar="N", min=0, help="Print N training samples with the trained tokens marked.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Every bad row is counted and reported with file and line. Uses all cores; the result is kept and reused."""
    from clustertune.cli import preparing
    from clustertune.launch import cluster_paths
    from clustertune.resolve import resolve

    resolved = resolve.resolve(recipe, overrides or [])
    below = cluster_paths.enter_local()
    result = preparing.prepare(resolved, out or below / resolved.name / "data", input_path, show_count)
    reply(as_json, result, lambda: preparing.print_summary(result))


def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    tiny: Tiny = False,
    ranks: Ranks = None,
    run_dir: Annotated[
        Path | None, path_option("Run folder. Default: <recipe>/<fingerprint> below storage.runs, else below ./runs.")
    ] = None,
    first: Annotated[Stage, typer.Option("--from", help="Begin with this stage.")] = STAGES[0],
    last: Annotated[Stage, typer.Option("--to", help="End after this stage.")] = STAGES[-1],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stages: prepare, train, export, merge, eval, report. Finished stages are not run again."""
    from clustertune import chain
    from clustertune.launch import cluster_paths
    from clustertune.report import run_summary

    stages = STAGES[STAGES.index(first) : STAGES.index(last) + 1]
    if not stages:
        fix = f"the order is {', '.join(STAGES)}"
        raise UserError(f"{first} comes after --to {last}", file="command line", key="--from", fix=fix)
    resolved = chain.resolve_here(recipe, overrides or [], tiny=tiny, ranks=ranks)
    below = cluster_paths.enter_local()
    path = run_dir or default_run_dir(resolved, below)
    _check_before_anything_is_made(resolved, path, stages)
    if dry_run:
        for warning in resolved.warnings:
            say(f"warning: {warning}")
        _show_plan(resolved, path, stages, as_json)
        return
    with chain.taken(resolved, path) as opened:
        chain.keep_forecast(opened, resolved)
        links = chain.Chain(opened, resolved, quiet=as_json)
        links.go(first, last)
    run_summary.finish(opened, links.results, as_json)


def _check_before_anything_is_made(resolved: Resolved, path: Path, stages: tuple[str, ...]) -> None:
    from clustertune.staging import bundle

    secrets.read_env(secrets.DEFAULT)
    if path.exists() and not path.is_dir():
        raise UserError("is a file, a run needs a folder", file=str(path), fix="give another --run-dir")
    raise_if(bundle.find_problems(resolved))
    if "prepare" in stages and RunDir(path).stage("prepare") is None and (problems := bundle.missing_inputs(resolved)):
        raise UserError(problems)


def _show_plan(resolved: Resolved, path: Path, stages: tuple[str, ...], as_json: bool) -> None:
    """What ``run`` would do: its folder, its stages, and the launcher's command."""
    from clustertune.launch import node

    command = node.ranks_command(RunDir(path), resolved, 1)
    lines = [f"run folder: {path}", f"stages: {', '.join(stages)}"]
    lines += [f"train: {shlex.join(command)}"] if "train" in stages else []
    reply(as_json, {"run_dir": str(path), "stages": list(stages), "train": command}, *lines)


def export(
    source: Annotated[Path, path_given("A run folder, or one checkpoint.", "RUN|CHECKPOINT")],
    out: OutOption = None,
    base: Annotated[Path | None, path_option("Base model folder; its tokenizer is copied with the export.")] = None,
    as_json: AsJson = False,
) -> None:
    """Exports the adapter of a LoRA run, or the model if all parameters were trained."""
    from clustertune import chain
    from clustertune.launch.cluster_paths import existing_run

    _summarise(chain.export_trained(existing_run(source, "a run folder or a checkpoint"), out, base), as_json)


def merge(
    base: Annotated[Path, path_given("The base model's folder.", "BASE")],
    adapter: Annotated[Path, path_given("The adapter's folder.", "ADAPTER")],
    out: Annotated[Path, path_given("The output folder.", "OUT")],
    shard_size: Annotated[str, typer.Option(help="Largest output shard, such as 5GB.")] = "5GB",
    workers: Annotated[int | None, typer.Option(min=1, help="Threads.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tensors are streamed: memory does not grow with the model."""
    from clustertune import merge as merging

    if dry_run:
        _summarise(merging.plan(base, adapter, out, shard_size=shard_size), as_json)
    else:
        _summarise(merging.merge(base, adapter, out, shard_size=shard_size, workers=workers), as_json)


def evaluate(
    model: Annotated[
        Path | None, path_given("Run or model folder. Default: the newest merged model of a run.", "RUN|MODEL")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="LIST", help="lm-eval tasks, separated by commas. Default: that of a recipe.")
    ] = None,
    data: Annotated[
        Path | None,
        path_option("Your own prompts (.jsonl, .csv, .txt), or rows of the task.", metavar="FILE"),
    ] = None,
    base: Annotated[Path | None, path_option("Second model, scored on the same prompts and compared.", metavar="MODEL")] = None,
    adapter: Annotated[Path | None, path_option("A LoRA adapter, applied without merging.")] = None,
    backend: Annotated[Literal["auto", "hf", "vllm"], typer.Option(help="Inference engine for the evaluation.")] = "auto",
    out: OutOption = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question. Default: the task's number.")
    ] = None,
    max_gen_toks: Annotated[int | None, typer.Option(min=1, help="Token limit per answer. Default: the task's number.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size.")] = 8,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Score only the first documents of each task; never for a published number.")
    ] = None,
    apply_chat_template: Annotated[bool, typer.Option(help="Apply the model's chat template.")] = True,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    from clustertune.data import prompts as own_prompts
    from clustertune.evaluate import run as evaluation
    from clustertune.evaluate import scores
    from clustertune.evaluate.by_command import eval_folder, eval_settings
    from clustertune.launch import cluster_paths
    from clustertune.launch.cluster_paths import existing_folder, merged_or_model, newest_merged
    from clustertune.recipe import sections

    below = cluster_paths.enter_local()
    model = newest_merged(below) if model is None else merged_or_model(model)
    given: dict[str, Any] = {"num_fewshot": num_fewshot, "max_gen_toks": max_gen_toks, "batch_size": batch_size, "limit": limit}
    given |= {} if tasks is None else {"tasks": tasks.split(",")}
    prompts = None
    if data is not None and own_prompts.are_own(data, given.get("tasks", [sections.FIRST_TASK])):
        prompts, given, data = data, {"tasks": [], **given, "data": str(data.absolute())}, None
    settings = eval_settings({**given, "apply_chat_template": apply_chat_template, "backend": backend})
    used = {**settings.model_dump(mode="json"), "device": device}
    beside = {"adapter": str(adapter.resolve()) if adapter else None, "base": str(base.resolve()) if base else None}
    folder = out or eval_folder(below / "eval", model, data, {**used, **beside})
    base_out = base and eval_folder(below / "eval", base, data, {**used, "beside": str(adapter or model)})
    result = evaluation.evaluate(
        model,
        folder,
        settings=settings,
        data=data,
        prompts=prompts,
        device=device,
        adapter=adapter and existing_folder(adapter, "an adapter"),
        base=base and existing_folder(base, "the base model"),
        base_out=base_out,
    )
    reply(as_json, {**result, "dir": str(folder)}, lambda: scores.render(result, console.stderr), f"in {folder}")


def report(
    run_dir: Annotated[Path, path_given("A run folder, latest, a recipe, or the beginning of a run's id.", "RUN")],
    out: Annotated[Path | None, path_option("Page to write. Default: RUN/report.html.", "--out", metavar="FILE")] = None,
    as_json: AsJson = False,
) -> None:
    from clustertune.launch.cluster_paths import existing_run
    from clustertune.report import page

    run_dir = existing_run(run_dir)
    RunDir(run_dir).read()
    path = page.build(run_dir, out)
    reply(as_json, {"report": str(path)}, f"wrote {path}")


def _summarise(summary: dict[str, Any], as_json: bool) -> None:
    counts = {key: isinstance(value, int) and not isinstance(value, bool) for key, value in summary.items()}
    lines = [f"{key.replace('_', ' ')}: {value:,}" if counts[key] else f"{key}: {value}" for key, value in summary.items()]
    reply(as_json, summary, *lines)


checkpoint_app = typer.Typer(no_args_is_help=True, help="Check checkpoints.")


@checkpoint_app.command("verify")
def verify(path: Annotated[Path, path_given("A checkpoint folder, or a run.", "PATH")], as_json: AsJson = False) -> None:
    """Compare a checkpoint's files with its manifest.

    Reads no pickle. Given a run, checks every checkpoint that has a manifest; one without was never finished.
    """
    from clustertune.checkpoint import store
    from clustertune.launch.cluster_paths import existing_run

    try:
        checkpoint, problems, notes = store.verify_all(existing_run(path, "a checkpoint or a run folder"))
    except UserError as error:
        checkpoint, problems, notes = None, error.problems, []
    for note in notes:
        say(f"note: {note}")
    if problems:
        show_error(UserError(problems))
    else:
        say(f"{checkpoint}: whole")
    if as_json:
        newest = str(checkpoint) if checkpoint else None
        emit_json({"checkpoint": newest, "whole": not problems, "problems": [str(p) for p in problems]})
    if problems:
        raise typer.Exit(int(ExitCode.CONFIG))
