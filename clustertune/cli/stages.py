"""The chain on this machine, each of its stages by itself, what is done with what they made, and how fast a recipe trains."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from clustertune import console, secrets
from clustertune.cli.arguments import (
    AsJson,
    ClusterOption,
    Device,
    Overrides,
    Ranks,
    RecipeArgument,
    TemplateArguments,
    Tiny,
    path_given,
    path_option,
    template_arguments,
)
from clustertune.console import emit_json, escape, make_table, reply, say, show_error
from clustertune.errors import ExitCode, Problem, UserError, raise_if, storing
from clustertune.manifest import write_durably
from clustertune.rundir import STAGES, RunDir, Stage, default_run_dir

if TYPE_CHECKING:
    from rich.console import Console

    from clustertune.recipe.sections import Eval
    from clustertune.resolve.resolved import Resolved


OutOption = Annotated[Path | None, path_option("The folder to write.", "--out")]


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
    finish_run(opened, links.results, as_json)


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


def text_model(
    model: Annotated[Path, path_given("The folder of the checkpoint.", "MODEL")],
    out: Annotated[Path, path_given("The output folder.", "OUT")],
    as_json: AsJson = False,
) -> None:
    """Tensors are copied as they are, under the names of the text model; train on OUT. Such as Gemma 3, Qwen2.5-VL, Qwen3-VL,
    Mistral 3 and Llama 4.
    """
    from clustertune.merge.text_model import save_text_model

    _summarise(save_text_model(model, out), as_json)


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
    chat_template_kwargs: TemplateArguments = None,
    think_end_token: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Ends a thought, which is not scored; '': score it. Default: as the chat template has it.",
            show_default=False,
        ),
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    from clustertune.data import prompts as own_prompts
    from clustertune.evaluate import run as evaluation
    from clustertune.evaluate import scores
    from clustertune.launch import cluster_paths
    from clustertune.launch.cluster_paths import existing_folder, merged_or_model, newest_merged
    from clustertune.recipe import sections

    below = cluster_paths.enter_local()
    model = newest_merged(below) if model is None else merged_or_model(model)
    options: dict[str, Any] = {
        "num_fewshot": num_fewshot,
        "max_gen_toks": max_gen_toks,
        "batch_size": batch_size,
        "limit": limit,
        "chat_template_kwargs": template_arguments(chat_template_kwargs),
        "think_end_token": think_end_token,
    }
    options |= {} if tasks is None else {"tasks": tasks.split(",")}
    prompts = None
    if data is not None and own_prompts.are_own(data, options.get("tasks", [sections.FIRST_TASK])):
        prompts, options, data = data, {"tasks": [], **options, "data": str(data.absolute())}, None
    settings = _eval_settings({**options, "apply_chat_template": apply_chat_template, "backend": backend})
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


def eval_folder(below: Path, model: Path, data: Path | None, settings: Mapping[str, Any]) -> Path:
    """``<parent>-<name>-<12 hex>`` of a model: the same command finds its result, two models of one name never share it."""
    resolved = model.resolve()
    identity = [str(resolved), str(data.resolve()) if data else None, dict(settings)]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    parts = (re.sub(r"[^A-Za-z0-9._]+", "_", part)[:40].strip("._") for part in (resolved.parent.name, resolved.name))
    return below / "-".join([*(word for word in parts if word), digest])


def _eval_settings(values: Mapping[str, Any]) -> Eval:
    """The settings of an evaluation as the command line gives them. Raises UserError."""
    from pydantic import ValidationError

    from clustertune.recipe.eval_tasks import unknown_tasks
    from clustertune.recipe.layers import did_you_mean
    from clustertune.recipe.sections import Eval

    try:
        settings = Eval.model_validate(values)
    except ValidationError as error:
        raise UserError(
            Problem(f"{item['input']!r}: {item['msg']}", file="command line", key=f"--{str(item['loc'][0]).replace('_', '-')}")
            for item in error.errors()
        ) from None
    raise_if(
        Problem(f"lm-eval has no task {task!r}", file="command line", key="--tasks", fix=did_you_mean(task, known))
        for task, known in unknown_tasks(settings.tasks).items()
    )
    return settings


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


# --- prepare -----------------------------------------------------------------------------------------------------------

MARKS = ("[[", "]]")
"""Around the trained tokens of a sample."""


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
    from clustertune.launch import cluster_paths
    from clustertune.resolve import resolve

    resolved = resolve.resolve(recipe, overrides or [])
    below = cluster_paths.enter_local()
    result = _prepared(resolved, out or below / resolved.name / "data", input_path, show_count)
    reply(as_json, result, lambda: _print_summary(result))


def _prepared(resolved: Resolved, out: Path, input_path: Path | None, samples: int) -> dict[str, Any]:
    """Make a recipe's data in ``out``. Returns the ``--json`` document.

    ``{"dir", "train", "eval", "rejected", "unused", "tokens", "sequences", "labelled_share", "tokens_per_s"}``, the last four
    null where the tokenizer is not available here; of a mixture also ``sources``, with ``samples`` also ``samples``.
    Raises UserError.
    """
    from clustertune.data import prepare as conversations
    from clustertune.data import sequences, tokens
    from clustertune.staging import bundle

    bundle.enter(resolved)
    input_path = input_path or bundle.data_input(resolved)
    seed = int(resolved.train_args["seed"])
    with secrets.lent(secrets.of_the_hub()), contextlib.redirect_stdout(sys.stderr):
        prepared = conversations.prepare(
            resolved.recipe.data, recipe_folder=Path(resolved.folder), seed=seed, out=out, input_path=input_path
        )
        keys = ("dir", "train", "eval", "rejected", "unused", "sources")
        document = {key: prepared[key] for key in keys if key in prepared} | dict.fromkeys(tokens.SUMMARY)
        try:
            with _tokenizer(resolved, out, tokens.day_of(out)) as tokenizer:
                made = tokens.make(out, tokenizer, resolved.train_args)
                sequences.check_ends(out, tokenizer, resolved.recipe.data)
                sequences.check_ids(out, tokenizer, int(resolved.architecture["vocab_size"]))
                if resolved.is_grpo:
                    sequences.check_prompts(out, resolved)
                document |= {key: made[key] for key in tokens.SUMMARY}
                for split in conversations.SPLITS:
                    document[split] = {**document[split], **made["splits"][split]}
                if samples:
                    document["samples"] = sequences.shown(out / tokens.FOLDER, tokenizer, samples, MARKS)
        except _TokenizerUnavailable as error:
            if samples:
                raise UserError(error.problems) from None
            say(f"warning: conversations only, without tokens: {error.problems[0]}")
    return document


class _TokenizerUnavailable(UserError):
    """The tokenizer is not available here; the conversations are prepared all the same."""


@contextlib.contextmanager
def _tokenizer(resolved: Resolved, dataset: Path, day: str) -> Iterator[Any]:
    """The tokenizer that a run of the recipe has, which began on this ``day``. Raises _TokenizerUnavailable, UserError."""
    from clustertune.data.tokenizer import load_tokenizer
    from clustertune.staging import needs
    from clustertune.training import base_weights

    recipe = resolved.recipe
    kinds: dict[str, Any] = {"chats": recipe.data.has_chats, "system": recipe.data.system_messages, "date": day}
    if recipe.megatron is not None:
        raise _TokenizerUnavailable("Megatron-Bridge tokenises by itself", file=resolved.name)
    if recipe.model.weights == "random":
        from clustertune.data.local_model import conversation_texts, local_tokenizer

        with tempfile.TemporaryDirectory() as folder:  # as the run saves and loads it
            texts, own = conversation_texts(dataset), resolved.chat_template is None
            local_tokenizer(resolved.architecture, texts, template=own).save_pretrained(folder)
            yield load_tokenizer(folder, None, resolved.chat_template, resolved.train_args, **kinds)
        return
    source = needs.base_of(resolved, None).source
    base_weights.check(*source, resolved)
    try:
        tokenizer = load_tokenizer(*source, resolved.chat_template, resolved.train_args, **kinds)
    except UserError as error:
        if error.problems[0].key == "model.name":
            raise _TokenizerUnavailable(error.problems) from None
        raise
    yield tokenizer


def _print_summary(document: dict[str, Any]) -> None:
    """The same for a person; samples go to stdout."""
    from clustertune.data.prepare import SPLITS

    for split in SPLITS:
        one = document[split]
        text = f"{split}: {one['conversations']:,} conversations, {one['messages']:,} messages"
        if "tokens" in one:
            text += f", {one['tokens']:,} tokens, {one['labelled']:,} of them trained, in {one['sequences']:,} sequences"
            text += f"; {one['cut']:,} cut at max_length, which leaves out {one['cut_tokens']:,} tokens" if one["cut"] else ""
            text += f", {one['dropped']:,} left out without a label in it" if one["dropped"] else ""
            text += f", {one['equal']:,} pairs left out that are equal in it" if one["equal"] else ""
        say(text)
    for part in document.get("sources", ()):
        say(f"{part['name']}: {part['conversations']:,} conversations of {part['rows']:,} rows")
    if document["tokens_per_s"] is not None:
        say(f"tokenised at {document['tokens_per_s']:,} tokens/s")
    say(f"in {document['dir']}")
    for number, sample in enumerate(document.get("samples", ()), start=1):
        sys.stdout.write(f"--- sample {number}, trained tokens between {MARKS[0]} and {MARKS[1]}\n{escape(sample)}\n")


# --- bench -------------------------------------------------------------------------------------------------------------

RESULT = "bench-result.json"
"""In the run folder: the document."""


def bench(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=2, max=100_000, help="Timed optimizer steps.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, max=10_000, help="Untimed warm-up steps.")] = 5,
    synthetic: Annotated[
        bool,
        typer.Option("--synthetic", help="Full size with random weights and generated conversations; needs no Hub."),
    ] = False,
    tiny: Tiny = False,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks on this machine. Default: as for clustertune run.")] = None,
    cluster: ClusterOption = None,
    run_dir: Annotated[Path | None, path_option("New run folder. Default: below runs/bench.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Step time, tokens/s, MFU and memory.
    Uses the ranks of clustertune run. Prints the figures beside those of plan, and writes them into the run folder.
    """
    from clustertune import bench as benches
    from clustertune import chain
    from clustertune.cluster import load
    from clustertune.launch import cluster_paths, node

    secrets.read_env(secrets.DEFAULT)
    if tiny and synthetic:
        text, fix = "--tiny scales the model down, --synthetic keeps its size", "give one of them"
        raise UserError(text, file="command line", key="--synthetic", fix=fix)
    on, path = load.load_cluster(cluster), run_dir or _new_run_path(recipe)
    with storing("--run-dir cannot be read", path):
        if path.is_dir() and any(path.iterdir()):
            text, fix = "is not empty: each benchmark needs a new folder", "give a new one, or leave it out"
            raise UserError(text, file=str(path), key="--run-dir", fix=fix)
        if above := next((part for part in (path, *path.absolute().parents) if part.exists() and not part.is_dir()), None):
            raise UserError("is a file, a run needs a folder", file=str(above), key="--run-dir", fix="give a folder")
    cluster_paths.enter(on)
    made = benches.make(recipe, overrides or (), path, warmup, steps, tiny=tiny, ranks=ranks, synthetic=synthetic)
    if synthetic and not chain.visible_gpus() and (large := benches.too_large(made)):
        fix = "run it where there are GPUs, or give a recipe folder with a smaller model.json"
        raise UserError(large, file=made.resolved.name, key="model", fix=fix)
    for warning in made.resolved.warnings:
        say(f"warning: {warning}")
    if dry_run:
        command = node.ranks_command(RunDir(path), made.measured, 1)
        plan, why = benches.predict(made, on)
        planned = f"planned on {plan.machine.name}: {plan.step.seconds:.3g} s a step" if plan else f"no plan: {why}"
        body = {"run_dir": str(path), "warmup": warmup, "steps": steps, "ranks": made.measured.world_size, "train": command}
        body["plan"] = {"step_s": plan.step.seconds, "fits": plan.fits} if plan else {"unknown": why}
        what = f"{warmup} warm-up steps, {steps} timed, on {made.measured.world_size} ranks"
        reply(as_json, body, f"run folder: {path}", what, planned, f"$ {shlex.join(command)}")
        return
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed, where it is installed, logs its import to stdout
        run = benches.train(made, chain.command_line())
        body = benches.document(made, run, on)
    file = run.path / RESULT
    with storing("cannot hold the result", file):
        write_durably(file, json.dumps(body, indent=1) + "\n")
    for line in [*benches.lines(body), f"in {file}"]:
        say(line)
    reply(as_json, body)


def _new_run_path(recipe: str) -> Path:
    """A new folder for each benchmark, below this machine's runs."""
    from clustertune.launch import cluster_paths

    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(recipe).name).strip("._-")[:64] or "recipe"
    below = cluster_paths.runs(cluster_paths.local_cluster())
    return below / "bench" / name / (datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ") + f"-{os.getpid()}")


# --- the end of a run -------------------------------------------------------------------------------------------------

# A table: stages with their seconds, the first and the last loss, the scores, where everything lies.


def show_summary(
    run: RunDir, stages: Mapping[str, Mapping[str, Any]], evaluation: Mapping[str, Any] | None, out: Console
) -> None:
    """Print the summary of a run to ``out``."""
    from clustertune.evaluate import scores
    from clustertune.report import content
    from clustertune.report.metrics import read_metrics

    table = make_table("stage", "status", "seconds", text_columns=2)
    for name, stage in stages.items():
        table.add_row(name, str(stage["status"]), f"{stage['seconds']:.1f}")
    done = [s["seconds"] for s in stages.values() if s["status"] == "done"]
    table.add_row("total", "", f"{sum(done):.1f}")
    out.print()
    out.print(table)
    metrics = read_metrics(run.metrics)
    name, ends = "reward of the held-out prompts", content.held_out_rewards(metrics)
    if ends is None:
        name, ends = "eval loss", content.eval_losses(metrics)
    if ends is None:
        name, ends = "training loss", content.train_losses(metrics)
    if ends is not None:
        when, values = ends
        out.print(f"\n{name}, {when}: {', '.join(f'{value:.4f}' for value in values)}", markup=False)
    if evaluation:
        out.print()
        scores.render(evaluation, out)
    out.print(f"\nrun      {run.path}", markup=False)
    for label, path in (("adapter", run.adapter), ("model", run.merged), ("scores", run.eval), ("report", run.report)):
        if path.exists():
            out.print(f"{label:8} {path}", markup=False)


def finish_run(run: RunDir, results: dict[str, dict[str, Any]], as_json: bool) -> None:
    """What a finished chain says: a table on stderr, or one document on stdout."""
    from clustertune.evaluate import scores

    result = scores.read_result(run.eval)
    stages = {name: {"seconds": r["seconds"], "status": r["status"]} for name, r in results.items()}
    document = {"run_dir": str(run.path), "stages": stages, **_scores(result)}
    reply(as_json, document, lambda: show_summary(run, stages, result, console.stderr))


def _scores(result: dict[str, Any] | None) -> dict[str, Any]:
    """``tasks``, and ``paired`` where the base was scored."""
    if result is None:
        return {"tasks": None}
    paired = {"paired": result["paired"]} if result.get("paired") else {}
    return {"tasks": result["tasks"], **paired}
