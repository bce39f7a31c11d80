"""The command line. Each command is thin: arguments in, one function of the package, a table or one JSON document out."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import logging
import os
import shlex
import signal
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from clustertune import close_working_folder, console, secrets
from clustertune.arguments import (
    AsJson,
    Device,
    EvalBackend,
    Overrides,
    RecipeArgument,
    Tiny,
    eval_folder,
    eval_settings,
    existing_folder,
    existing_run,
    merged_or_model,
    newest_merged,
    path_given,
    path_option,
)
from clustertune.cli import launchers
from clustertune.cli.deferred import deferred
from clustertune.console import emit_json, reply, say, show_error
from clustertune.errors import ExitCode, Problem, UserError, raise_if, storage_error
from clustertune.process import Stopped
from clustertune.rundir import STAGES, RunDir
from clustertune.storage import storage_cause
from clustertune.tree import how_to_install

if TYPE_CHECKING:
    from clustertune.resolve.resolved import Resolved

with deferred():
    from clustertune import chain, rank
    from clustertune import merge as merging
    from clustertune.cli import preparing
    from clustertune.data import prompts as own_prompts
    from clustertune.evaluate import run as evaluation
    from clustertune.evaluate import scores
    from clustertune.export import whole
    from clustertune.launch import cluster_paths, node
    from clustertune.plan import schedule
    from clustertune.recipe import library_facts, sections
    from clustertune.report import page
    from clustertune.resolve import resolve, view
    from clustertune.resolve import tiny as scaled_down
    from clustertune.staging import bundle

GROUPS = {
    "Use it": ("new", "run", "submit", "sweep", "eval", "chat", "serve", "push"),
    "Look at it": ("show", "plan", "doctor", "watch", "runs", "report", "compare", "bench"),
    "A stage by itself": ("prepare", "export", "merge", "checkpoint"),
    "Cluster; images of containers are made by make: build-sif, build-image": (
        "show-cluster",
        "setup",
        "nccl-check",
        "stage",
        "demo-slurm",
        "sky",
    ),
}
"""The commands as ``--help`` lists them."""


class _Grouped(TyperGroup):
    """Lists the commands in groups."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As typer's, which would suggest what only programs start: a mistyped name is compared with what people start."""
        name, *others = args
        if name in ("train", "fit", "finetune", "fine-tune") and others and not others[0].startswith("-"):
            fix = f"clustertune run {others[0]} runs all stages, --to train the first two; clustertune submit does so on Slurm"
            raise UserError("training has no command of its own", file="command line", key=name, fix=fix)
        if name not in self.commands and not name.startswith("-"):
            known = [one for names in GROUPS.values() for one in names]
            close = ["run" if one == "train" else one for one in difflib.get_close_matches(name, [*known, "train"], n=1)]
            fix = f"did you mean {close[0]}?" if close else "clustertune --help lists all"
            raise UserError("there is no such command", file="command line", key=name, fix=fix)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """As click's, a section for each of :data:`GROUPS`."""
        found = {
            name: command for name in self.list_commands(ctx) if (command := self.get_command(ctx, name)) and not command.hidden
        }
        grouped = {title: [name for name in names if name in found] for title, names in GROUPS.items()}
        if others := [name for name in found if not any(name in names for names in grouped.values())]:
            grouped["Others"] = others
        width = max(map(len, found), default=0)
        for title, names in grouped.items():
            with formatter.section(title):
                room = formatter.width - width - 4
                formatter.write_dl([(name.ljust(width), found[name].get_short_help_str(room)) for name in names])


app = typer.Typer(
    cls=_Grouped,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Stage(StrEnum):
    """The chain's stages, as the command line takes them."""

    prepare = "prepare"
    train = "train"
    export = "export"
    merge = "merge"
    eval = "eval"
    report = "report"


Ranks = Annotated[
    int | None, typer.Option(min=1, help="Ranks on this machine. Default: the recipe's number, or 2 without a GPU.")
]
OutOption = Annotated[Path | None, path_option("The folder to write.", "--out")]


def _resolve(recipe: str, overrides: list[str] | None, *, tiny: bool, ranks: int | None, local: bool) -> Resolved:
    resolved = resolve.resolve(recipe, overrides or [], tiny=tiny, ranks=ranks)
    if not local:
        return resolved
    resolved.require_startable()
    gpus = chain.visible_gpus()
    small = tiny or resolved.recipe.model.weights == "random"
    on_cpus = not gpus and not small and scaled_down.is_small(resolved.architecture)
    few = gpus or scaled_down.ranks(resolved.accelerate)
    asked = resolved.world_size
    if ranks is None and (small or on_cpus) and asked > few:
        resolved = resolve.resolve(recipe, overrides or [], tiny=tiny, ranks=few)
        if on_cpus:
            slow = "; train.bf16=false is faster on most CPUs" if resolved.train_args["bf16"] else ""
            say(f"note: the recipe is for {asked} GPUs and there is none here: {few} processes train on the CPUs{slow}")
    elif ranks is None and not (small or on_cpus) and asked > gpus:
        fix = "use --tiny to run a scaled-down version, clustertune submit on a cluster, or --ranks N to force N processes"
        raise UserError(f"needs {resolved.world_size} GPUs, this machine has {gpus}", file=recipe, key="slurm", fix=fix)
    return resolved


def _version(requested: bool) -> None:
    if requested:
        from clustertune import __version__

        typer.echo(f"clustertune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """From a bare Slurm GPU cluster to an evaluated fine-tuned LLM, 7B to 405B."""


@app.command()
def show(
    recipe: RecipeArgument, overrides: Overrides = None, tiny: Tiny = False, ranks: Ranks = None, as_json: AsJson = False
) -> None:
    """Print a recipe with every value resolved.

    Each value is shown with its origin: base, recipe, override, derived (and from what), or default.
    """
    resolved = _resolve(recipe, overrides, tiny=tiny, ranks=ranks, local=False)
    raise_if(schedule.find_idle_schedule(resolved))
    resolved.warnings.extend(schedule.check_schedule_end(resolved))
    reply(as_json, view.as_json(resolved), lambda: view.render(resolved, console.stdout))


@app.command()
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
    """Turn a recipe's data into conversations and tokens.

    Every bad row is counted and reported with file and line. Uses all cores; the result is kept and reused.
    """
    resolved = resolve.resolve(recipe, overrides or [])
    below = cluster_paths.enter_local()
    result = preparing.prepare(resolved, out or below / resolved.name / "data", input_path, show_count)
    reply(as_json, result, lambda: preparing.print_summary(result))


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    tiny: Tiny = False,
    ranks: Ranks = None,
    run_dir: Annotated[
        Path | None, path_option("Run folder. Default: <recipe>/<fingerprint> below storage.runs, else below ./runs.")
    ] = None,
    first: Annotated[Stage, typer.Option("--from", help="Begin with this stage.")] = Stage.prepare,
    last: Annotated[Stage, typer.Option("--to", help="End after this stage.")] = Stage.report,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the whole chain on this machine.

    Stages: prepare, train, export, merge, eval, report. Finished stages are not run again.
    """
    stages = STAGES[STAGES.index(first) : STAGES.index(last) + 1]
    if not stages:
        fix = f"the order is {', '.join(STAGES)}"
        raise UserError(f"{first} comes after --to {last}", file="command line", key="--from", fix=fix)
    resolved = _resolve(recipe, overrides, tiny=tiny, ranks=ranks, local=True)
    below = cluster_paths.enter_local()
    path = run_dir or chain.default_run_dir(resolved, below)
    _check_before_anything_is_made(resolved, path, stages)
    if dry_run:
        for warning in resolved.warnings:
            say(f"warning: {warning}")
        _show_plan(resolved, path, stages, as_json)
        return
    with launchers.open_run(resolved, path) as opened:
        chain.keep_forecast(opened, resolved)
        links = chain.Chain(opened, resolved, quiet=as_json)
        links.go(first, last)
    launchers.finish(opened, links.results, as_json)


def _check_before_anything_is_made(resolved: Resolved, path: Path, stages: tuple[str, ...]) -> None:
    secrets.read_env(secrets.DEFAULT)
    if path.exists() and not path.is_dir():
        raise UserError("is a file, a run needs a folder", file=str(path), fix="give another --run-dir")
    raise_if(bundle.find_problems(resolved))
    if "prepare" in stages and RunDir(path).stage("prepare") is None and (problems := bundle.missing_inputs(resolved)):
        raise UserError(problems)


def _show_plan(resolved: Resolved, path: Path, stages: tuple[str, ...], as_json: bool) -> None:
    """What ``run`` would do: its folder, its stages, and the launcher's command."""
    command = node.ranks_command(RunDir(path), resolved, 1)
    lines = [f"run folder: {path}", f"stages: {', '.join(stages)}"]
    lines += [f"train: {shlex.join(command)}"] if "train" in stages else []
    reply(as_json, {"run_dir": str(path), "stages": list(stages), "train": command}, *lines)


@app.command(hidden=True)
def train(
    run_dir: Annotated[Path, path_option("A prepared run folder.")],
    attempt: Annotated[int, typer.Option(min=1, help="Number of this attempt, the same for every rank.")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Write to the log only.")] = False,
) -> None:
    """Train as one rank: what every launcher starts."""
    RunDir(run_dir).read()
    raise typer.Exit(rank.main(run_dir, attempt, quiet=quiet))


@app.command()
def export(
    source: Annotated[Path, path_given("A run folder, or one checkpoint.", "RUN|CHECKPOINT")],
    out: OutOption = None,
    base: Annotated[Path | None, path_option("Base model folder; its tokenizer is copied with the export.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the adapter, or the whole model, from a checkpoint.

    Exports the adapter of a LoRA run, or the model if all parameters were trained.
    """
    _summarise(whole.export_either(existing_run(source, "a run folder or a checkpoint"), out, base), as_json)


@app.command()
def merge(
    base: Annotated[Path, path_given("The base model's folder.", "BASE")],
    adapter: Annotated[Path, path_given("The adapter's folder.", "ADAPTER")],
    out: Annotated[Path, path_given("The output folder.", "OUT")],
    shard_size: Annotated[str, typer.Option(help="Largest output shard, such as 5GB.")] = "5GB",
    workers: Annotated[int | None, typer.Option(min=1, help="Threads.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written.")] = False,
    as_json: AsJson = False,
) -> None:
    """Merge an adapter into its base model.

    Tensors are streamed: memory does not grow with the model.
    """
    if dry_run:
        _summarise(merging.plan(base, adapter, out, shard_size=shard_size), as_json)
    else:
        _summarise(merging.merge(base, adapter, out, shard_size=shard_size, workers=workers), as_json)


@app.command("eval")
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
    backend: Annotated[EvalBackend, typer.Option(help="Inference engine for the evaluation.")] = EvalBackend.auto,
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
    """Score a model with lm-eval, alone or next to its base."""
    below = cluster_paths.enter_local()
    model = newest_merged(below) if model is None else merged_or_model(model)
    given: dict[str, Any] = {"num_fewshot": num_fewshot, "max_gen_toks": max_gen_toks, "batch_size": batch_size, "limit": limit}
    given |= {} if tasks is None else {"tasks": tasks.split(",")}
    prompts = None
    if data is not None and own_prompts.are_own(data, given.get("tasks", [sections.FIRST_TASK])):
        prompts, given, data = data, {"tasks": [], **given, "data": str(data.absolute())}, None
    settings = eval_settings({**given, "apply_chat_template": apply_chat_template, "backend": backend.value})
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


@app.command()
def report(
    run_dir: Annotated[Path, path_given("A run folder, latest, a recipe, or the beginning of a run's id.", "RUN")],
    out: Annotated[Path | None, path_option("Page to write. Default: RUN/report.html.", "--out", metavar="FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's one-page report, and report.json next to it."""
    run_dir = existing_run(run_dir)
    RunDir(run_dir).read()
    path = page.build(run_dir, out)
    reply(as_json, {"report": str(path)}, f"wrote {path}")


def _summarise(summary: dict[str, Any], as_json: bool) -> None:
    counts = {key: isinstance(value, int) and not isinstance(value, bool) for key, value in summary.items()}
    lines = [f"{key.replace('_', ' ')}: {value:,}" if counts[key] else f"{key}: {value}" for key, value in summary.items()]
    reply(as_json, summary, *lines)


_GROUPS = (
    "submit_command",
    "sweep",
    "new",
    "plan_command",
    "clusterfile",
    "rehearse",
    "doctor",
    "nccl_check",
    "setup",
    "stage",
)
_MORE = ("launchers", "watch", "talk", "push", "bench", "compare_runs", "job_command", "checkpoint")
for name in (*_GROUPS, *_MORE):  # in the order of --help
    importlib.import_module(f"clustertune.cli.{name}").add(app)


def main() -> int:
    """The entry point of ``clustertune`` and of ``python -m clustertune``."""
    return run_command(app)


# --- front ----------------------------------------------------------------------------------------------------------------

# Around every command: whatever ends it becomes a message on stderr, one JSON document if asked for, and an exit code.

_OF_TRAINING = {
    "accelerate", "bitsandbytes", "datasets", "deepspeed", "huggingface_hub", "jinja2", "matplotlib", "numpy", "peft", "psutil",
    "pyarrow", "pynvml", "safetensors", "tokenizers", "torch", "transformers", "trl", "wandb", "xxhash",
}  # fmt: skip
"""Modules that the extra ``train`` installs (setup.py)."""
INTERRUPTED = 130
"""What shells give for a command that Ctrl-C ended: 128 + SIGINT."""


def run_command(app: typer.Typer) -> int:
    """Run the command of this process. Returns its exit code; nothing a user can cause leaves a traceback."""
    close_working_folder()
    _open_standard_files()
    os.umask(os.umask(0o077) | 0o002)  # what is written here is loaded and run again: not every user may write to it
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which accelerate imports, warns where it has to look
        logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)  # PEFT imports it; it wants kernels of the Hub
    as_json = "--json" in sys.argv[1:]
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _stop)
    try:
        _require_once("--cluster", "--gpus", "--model")
        code = app(standalone_mode=False)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a warning that comes now finds nothing to save
    except BrokenPipeError:  # the reader has seen enough
        return int(ExitCode.FAILED)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        known = explain(error)
        if as_json:
            with contextlib.suppress(OSError):
                emit_json(known.as_dict())
        return int(known.code)
    if code == INTERRUPTED:  # typer takes the KeyboardInterrupt
        known = UserError("interrupted", fix="the same command continues where this one ended", code=ExitCode.AGAIN)
        show_error(known)
        if as_json:
            emit_json({**known.as_dict(), "exit_code": code})
    return int(code or 0)


def _require_once(*options: str) -> None:
    """Raise UserError where one of the options is given twice: of two values all but the last would be dropped silently."""
    words = sys.argv[1 : sys.argv.index("--") if "--" in sys.argv else None]
    for option in options:
        if sum(word == option or word.startswith(f"{option}=") for word in words) > 1:
            fix = "plan RECIPE --clusters A,B compares clusters" if option == "--cluster" else "give it once"
            raise UserError("is given more than once", file="command line", key=option, fix=fix)


def explain(error: BaseException) -> UserError:
    """Say on stderr what ended the command; the same as the error that ``--json`` describes."""
    known: UserError
    if isinstance(error, typer.TyperException):
        return _usage(error)
    if isinstance(error, UserError):
        known = error
    elif isinstance(error, Stopped):
        problem = Problem(f"stopped by {error}", fix="run the same command again: it continues where this one ended")
        known = UserError(problem, ExitCode.AGAIN)
    elif isinstance(error, OSError) and error.errno is not None:
        known = storage_error(error, "cannot be used", error.filename or "stdout")
    elif cause := storage_cause(error):
        known = storage_error(cause, "cannot be used", ".")
    elif isinstance(error, ModuleNotFoundError) and (extra := _extra(error.name or "")):
        known = UserError(f"the Python package {error.name} is not installed", fix=how_to_install(extra), code=ExitCode.CONFIG)
    else:
        traceback.print_exception(error)
        text = (str(error).splitlines() or [""])[0]
        known = UserError(f"{type(error).__name__}: {text}", fix="internal error; please report it", code=ExitCode.FAILED)
    show_error(known)
    return known


def _extra(module: str) -> str | None:
    """The extra of the package that brings a module; None for a module that none brings, which is a fault."""
    top = module.partition(".")[0]
    if top in ("lm_eval", "nltk", "langdetect", "immutabledict", "tenacity", "aiohttp"):
        return "eval"
    return "train" if top in _OF_TRAINING else None


def _usage(error: typer.TyperException) -> UserError:
    """What typer says about the arguments, in the form of all other errors."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "clustertune"
    text = error.format_message().replace("Value error, ", "").replace("Input should be", "must be")
    if not getattr(error, "message", ""):
        text = "an argument is missing"
    if type(error).__name__ == "NoArgsIsHelpError":
        say(text)
        return UserError(f"{command}: a command is missing", code=ExitCode.CONFIG)
    usage = context.get_usage().removeprefix("Usage: ") if context else command
    fix = f"usage: {usage}; --help explains"
    if (key := getattr(error, "option_name", "").lstrip("-")) and "section.key=value" in usage:
        fix = _as_override(key) or fix
    if key.replace("-", "_") in ("resume", "resume_from_checkpoint", "continue"):
        fix = "the same command again goes on from the newest checkpoint, without an option"
    known = UserError(text, file="command line", fix=fix, code=ExitCode.CONFIG)
    show_error(known)
    return known


def _as_override(key: str) -> str | None:
    """How a setting of a recipe is given that was written as an option, as accelerate and TRL's programs take it."""
    section, _, name = key.replace("-", "_").rpartition(".")
    sections = {"train": library_facts.facts("trl")["fields"], "lora": library_facts.facts("peft")["fields"]}
    found = section or next((known for known, keys in sections.items() if name in keys), None)
    return f"settings of a recipe are given without dashes: {found}.{name}=VALUE" if found else None


def _stop(number: int, _frame: FrameType | None) -> None:
    # Slurm sends SIGTERM to every process of a job, and launch/run.sbatch passes its own on: the second must not break off
    # what the first began, such as the way back into the queue.
    for again in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(again, signal.SIG_IGN)
    raise Stopped(signal.Signals(number).name)


def _open_standard_files() -> None:
    """A closed stdin, stdout or stderr (``>&-``) would be handed to the next file that is opened, and be written into."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that LC_ALL=C has no letters for is no reason to end
            stream.reconfigure(errors="backslashreplace")
