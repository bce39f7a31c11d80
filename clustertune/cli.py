"""The command line. Each command is thin: arguments in, one function of a room, a table or one JSON document out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from clustertune.console import emit_json, say, show_error, stderr
from clustertune.errors import ExitCode, Problem, UserError, storage_error
from clustertune.rundir import STAGES, RunDir

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
checkpoint_app = typer.Typer(no_args_is_help=True, help="Look at checkpoints.")
app.add_typer(checkpoint_app, name="checkpoint")


class Stage(StrEnum):
    """The chain's stages, as the command line takes them."""

    prepare = "prepare"
    train = "train"
    export = "export"
    merge = "merge"
    eval = "eval"
    report = "report"


RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe folder, or its name below recipes/.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value]...", help="Settings that replace the recipe's.")
]
Tiny = Annotated[bool, typer.Option("--tiny", help="The recipe's architecture scaled down, with random weights.")]
Ranks = Annotated[int | None, typer.Option(min=1, help="Processes here; without it, the recipe's, or 2 where there is no GPU.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Where to write.")]


def _resolve(recipe: str, overrides: list[str] | None, *, tiny: bool, ranks: int | None, here: bool) -> Any:
    from clustertune.chain import visible_gpus
    from clustertune.config.resolve import resolve

    resolved = resolve(recipe, overrides or [], tiny=tiny, ranks=ranks)
    gpus = visible_gpus()
    if ranks is None and here and (tiny or resolved.recipe.model.weights == "random") and resolved.world_size > (gpus or 2):
        resolved = resolve(recipe, overrides or [], tiny=tiny, ranks=gpus or 2)
    elif here and ranks is None and resolved.recipe.model.weights != "random" and resolved.world_size > gpus:
        fix = f"--tiny runs it here scaled down; {resolved.world_size} GPUs, or --ranks N, run it as it is"
        raise UserError(
            Problem(f"asks for {resolved.world_size} GPUs, this machine has {gpus}", file=recipe, key="slurm", fix=fix)
        )
    return resolved


@app.command()
def show(
    recipe: RecipeArgument, overrides: Overrides = None, tiny: Tiny = False, ranks: Ranks = None, as_json: AsJson = False
) -> None:
    """Print a recipe as it resolves: each value with where it came from."""
    from clustertune.config import show as view

    resolved = _resolve(recipe, overrides, tiny=tiny, ranks=ranks, here=False)
    if as_json:
        emit_json(view.as_json(resolved))
    else:
        view.render(resolved, stderr)


@app.command()
def prepare(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    input_path: Annotated[Path | None, typer.Option("--input", help="A file or folder instead of the recipe's data.")] = None,
    out: OutOption = None,
    as_json: AsJson = False,
) -> None:
    """Turn a recipe's data into conversations on disk, and report every bad row."""
    from clustertune.config.resolve import resolve
    from clustertune.data.prepare import prepare as run_prepare

    resolved = resolve(recipe, overrides or [])
    folder = out or Path("runs", resolved.name, "data")
    result = run_prepare(
        resolved.recipe.data,
        recipe_folder=Path(resolved.folder),
        seed=int(resolved.train_args.get("seed", 42)),
        out=folder,
        input_path=input_path or resolved.input_path,
    )
    if as_json:
        emit_json(result)
        return
    for split in ("train", "eval"):
        say(f"{split}: {result[split]['conversations']} conversations, {result[split]['messages']} messages")
    for reason, count in sorted(result["rejected"].items()):
        say(f"rejected, {reason}: {count}")
    say(f"in {result['dir']}")


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    tiny: Tiny = False,
    ranks: Ranks = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run's folder; without it runs/<recipe>/<fingerprint>.")] = None,
    first: Annotated[Stage, typer.Option("--from", help="Begin with this stage.")] = Stage.prepare,
    last: Annotated[Stage, typer.Option("--to", help="End after this stage.")] = Stage.report,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")] = False,
    as_json: AsJson = False,
) -> None:
    """The whole chain on this machine: prepare, train, export, merge, eval, report."""
    from clustertune import chain

    resolved = _resolve(recipe, overrides, tiny=tiny, ranks=ranks, here=True)
    for warning in resolved.warnings:
        say(f"warning: {warning}")
    path = run_dir or chain.default_run_dir(resolved, Path("runs"))
    if STAGES.index(first) > STAGES.index(last):
        raise UserError(Problem(f"{first} comes after {last}", key="--from"))
    if dry_run:
        from clustertune.launch.local import accelerate_command

        say(f"run folder: {path}")
        say(f"stages: {', '.join(STAGES[STAGES.index(first) : STAGES.index(last) + 1])}")
        say("train: " + " ".join(accelerate_command(resolved, ["train", "--run-dir", str(path), "--attempt", "1"])))
        return
    with RunDir(path).lock():
        opened = chain.open_run(resolved, path, chain.command_line())
        links = chain.Chain(opened, resolved, quiet=as_json)
        links.go(first, last)
    _finish(opened, links, as_json)


def _finish(opened: RunDir, links: Any, as_json: bool) -> None:
    import json

    from clustertune import chain, summary

    scores = None
    if (opened.eval / "ifeval.json").is_file():
        scores = json.loads((opened.eval / "ifeval.json").read_bytes())
    stages = {name: {"seconds": r["seconds"], "status": r["status"]} for name, r in links.results.items()}
    if as_json:
        emit_json({"run_dir": str(opened.path), "stages": stages, "ifeval": scores["scores"] if scores else None})
        return
    summary.render(opened, stages, chain.losses(opened), scores, stderr)


@app.command()
def train(
    run_dir: Annotated[Path, typer.Option(help="A prepared run folder.")],
    attempt: Annotated[int, typer.Option(min=1, help="Number of this attempt; every rank gets the same.")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Log only.")] = False,
) -> None:
    """One rank of the training: what accelerate launch, torchrun and srun start."""
    from clustertune import rank

    RunDir(run_dir).read()
    raise typer.Exit(rank.main(run_dir, attempt, quiet=quiet))


@app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run folder, or one checkpoint.")],
    out: OutOption = None,
    as_json: AsJson = False,
) -> None:
    """Write the LoRA adapter of a sharded checkpoint as PEFT loads it."""
    from clustertune.adapter.export import export as run_export
    from clustertune.checkpoint.store import find_checkpoint

    checkpoint = find_checkpoint(source)
    target = out or (source / "adapter" if checkpoint != source else checkpoint.parent.parent / "adapter")
    _summarise(run_export(checkpoint, target), as_json)


@app.command()
def merge(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The base model's folder.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="The adapter's folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    shard_size: Annotated[str, typer.Option(help="Largest output shard, such as 5GB.")] = "5GB",
    workers: Annotated[int | None, typer.Option(min=1, help="Shards written side by side.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written.")] = False,
    as_json: AsJson = False,
) -> None:
    """Merge an adapter into its base, streaming: memory does not grow with the model."""
    from clustertune.merge import merge as run_merge
    from clustertune.merge import plan

    if dry_run:
        _summarise(plan(base, adapter, out, shard_size=shard_size), as_json)
    else:
        _summarise(run_merge(base, adapter, out, shard_size=shard_size, workers=workers), as_json)


@app.command("eval")
def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A merged model's folder.")],
    data: Annotated[
        Path | None, typer.Option(help="IFEval prompts, JSON lines; without it google/IFEval or the project's own.")
    ] = None,
    out: OutOption = None,
    max_gen_toks: Annotated[int, typer.Option(min=1, help="Tokens generated per prompt at most.")] = 1280,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts generated side by side.")] = 8,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Score only the first prompts; never for a published number.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score a model on IFEval with lm-eval."""
    from clustertune.config.schema import IFEval
    from clustertune.ifeval.evaluate import evaluate as run_evaluate
    from clustertune.ifeval.scores import render

    settings = IFEval(max_gen_toks=max_gen_toks, batch_size=batch_size, limit=limit)
    result = run_evaluate(model, out or Path("runs", "eval", model.resolve().name), settings=settings, data=data)
    if as_json:
        emit_json(result)
    else:
        render(result, stderr)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: OutOption = None,
    as_json: AsJson = False,
) -> None:
    """Write the run's one-page report."""
    from clustertune.report.page import build

    RunDir(run_dir).read()
    path = build(run_dir, out)
    if as_json:
        emit_json({"report": str(path)})
    else:
        say(f"wrote {path}")


@checkpoint_app.command("verify")
def checkpoint_verify(
    path: Annotated[Path, typer.Argument(help="A checkpoint folder, or a run.")], as_json: AsJson = False
) -> None:
    """Compare every file of a checkpoint with its manifest; reads no pickle."""
    from clustertune.checkpoint.store import find_checkpoint, verify

    if not path.is_dir():
        raise UserError(Problem("is no folder", file=str(path)))
    checkpoint = find_checkpoint(path)
    problems = verify(checkpoint)
    if as_json:
        emit_json({"checkpoint": str(checkpoint), "whole": not problems, "problems": [str(p) for p in problems]})
    elif not problems:
        say(f"{checkpoint}: whole")
    if problems:
        if not as_json:
            show_error(UserError(problems))
        raise typer.Exit(int(ExitCode.CONFIG))


def _summarise(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(summary)
        return
    for key, value in summary.items():
        say(
            f"{key.replace('_', ' ')}: {value:,}"
            if isinstance(value, int) and not isinstance(value, bool)
            else f"{key}: {value}"
        )


@contextlib.contextmanager
def _errors_for_people(as_json: bool) -> Iterator[None]:
    """Everything that a user can cause ends in words and an exit code."""
    import errno

    try:
        yield
    except UserError as error:
        show_error(error)
        if as_json:
            emit_json(error.as_dict())
        raise SystemExit(int(error.code)) from None
    except BrokenPipeError:
        raise SystemExit(int(ExitCode.FAILED)) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EIO):
            raise
        known = storage_error(error, "the storage failed", Path(error.filename or "."))
        show_error(known)
        if as_json:
            emit_json(known.as_dict())
        raise SystemExit(int(ExitCode.STORAGE)) from None
    except KeyboardInterrupt:
        say("interrupted; the same command goes on where this one ended")
        raise SystemExit(130) from None


def main() -> int:
    """The entry point of ``clustertune`` and of ``python -m clustertune``."""
    with _errors_for_people("--json" in sys.argv):
        app(standalone_mode=True)
    return 0
