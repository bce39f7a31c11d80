"""Arguments that several commands share, checks of paths, and the default folder of an evaluation."""

from __future__ import annotations

import inspect
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from clustertune.errors import Problem, UserError, raise_if

if TYPE_CHECKING:
    from clustertune.recipe.sections import Eval

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe folder, or its name below recipes/.")]
OptionalRecipe = Annotated[
    str | None, typer.Argument(metavar="RECIPE", help="A recipe folder, or its name below recipes/.", show_default=False)
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="Settings that replace the recipe's.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Scale the recipe's architecture down, with random weights.")]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="A name in ops/clusters, a file, or local: inspect this machine. Default: the file of this host, else local.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]

T = TypeVar("T")


def takes(options: Callable[..., T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Makes a command of a function whose one argument is a dataclass: the dataclass's fields are the command's arguments."""

    def decorate(program: Callable[[T], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            program(options(**given))

        command.__name__, command.__doc__ = program.__name__, program.__doc__
        command.__signature__ = inspect.signature(options, eval_str=True)  # type: ignore[attr-defined]
        command.__annotations__ = {}  # typer reads both
        return command

    return decorate


_MAX_NAME = 255
"""Bytes of one name and of a whole path below: what Linux takes (limits.h)."""
_MAX_PATH = 4095


def path_argument(value: str | Path) -> Path:
    """The path that an argument names. Raises UserError where it cannot be one, or is an option that lost its value."""
    text = str(value)
    problem = fix = None
    if not text:
        problem = "an empty path"
    elif text.startswith("-"):
        problem, fix = f"{text!r} is given where a path is expected", f"write ./{text} if that is its name"
    elif any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in text):
        problem, fix = f"{text!r} holds a line break, a control character or bytes that are not UTF-8", "rename it"
    elif len(text.encode()) > _MAX_PATH or any(len(part.encode()) > _MAX_NAME for part in Path(text).parts):
        problem = f"{text!r} is longer than a path can be"
    if problem:
        raise UserError(problem, file="command line", fix=fix)
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text!r}: there is no such user here", file="command line", fix="write ./~...") from None


def path_option(help_text: str, *names: str, metavar: str = "DIR") -> Any:
    """An option that names a file or folder."""
    return typer.Option(*names, metavar=metavar, parser=path_argument, help=help_text)


def path_given(help_text: str, metavar: str) -> Any:
    """An argument that names a file or folder."""
    return typer.Argument(metavar=metavar, parser=path_argument, help=help_text)


def existing_folder(path: Path, what: str) -> Path:
    """``path``, which must be a folder. ``what`` names the kind that is wanted. Raises UserError.

    ``runs/NAME/ID`` is looked for in the cluster's folder for runs too.
    """
    from clustertune.launch import cluster_paths

    path = cluster_paths.existing(path)
    if path.is_dir():
        return path
    message = "is a file, not a folder" if path.exists() else "no such folder"
    raise UserError(message, file=str(path), fix=f"give the path of {what}")


def existing_run(path: Path, what: str = "a run folder") -> Path:
    """A run's folder, or the run that ``latest``, a recipe's name or the beginning of an id names. Raises UserError.

    ``what`` names what is wanted where other folders are taken too.
    """
    from clustertune.launch import cluster_paths

    if not path.exists() and (run := cluster_paths.named_run(str(path))) is not None:
        return run
    try:
        found = existing_folder(path, what)
    except UserError as error:
        below = cluster_paths.found_runs()
        names = ", ".join(list(dict.fromkeys(folder.parent.name for folder in cluster_paths.run_folders(below)))[:8])
        fix = (
            f"give {what}, latest, the beginning of a run's id, or a recipe that has run: {names or f'none has below {below}'}"
        )
        raise UserError(error.problems[0].message, file=str(path), fix=fix) from None
    inside = [] if what != "a run folder" or (found / "run.json").is_file() else cluster_paths.run_folders(found)
    if inside:
        names = ", ".join(str(folder) for folder in inside[:3])
        raise UserError(f"is no run folder; it holds {len(inside)}", file=str(found), fix=f"give one: {names}")
    return found


def merged_or_model(path: Path) -> Path:
    """A model's folder; of a run, its merged model. Raises UserError."""
    found = existing_run(path, "a run or a model")
    if not (found / "run.json").is_file():
        return found
    if not (found / "merged" / "config.json").is_file():
        raise UserError("has no merged model yet", file=str(found), fix=f"clustertune run ... --run-dir {found} --to merge")
    return found / "merged"


def newest_merged(below: Path) -> Path:
    """The merged model that was finished last in a folder of runs. Raises UserError where there is none."""
    from clustertune.manifest import MANIFEST

    found = [path for path in below.glob(f"*/*/merged/{MANIFEST}") if path.is_file()]
    if not found:
        fix = "make demo first, or name a folder: make eval-ifeval MODEL=DIR, clustertune eval DIR"
        raise UserError("no merged model in this folder of runs", file=str(below), fix=fix)
    return max(found, key=lambda path: path.stat().st_mtime_ns).parent


def eval_folder(below: Path, model: Path, data: Path | None, settings: Mapping[str, Any]) -> Path:
    """``<parent>-<name>-<12 hex>`` of a model: the same command finds its result, two models of one name never share it."""
    import hashlib  # loads OpenSSL

    resolved = model.resolve()
    identity = [str(resolved), str(data.resolve()) if data else None, dict(settings)]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    parts = (re.sub(r"[^A-Za-z0-9._]+", "_", part)[:40].strip("._") for part in (resolved.parent.name, resolved.name))
    return below / "-".join([*(word for word in parts if word), digest])


Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="auto (over all GPUs), cuda, cuda:N or cpu. Default: one GPU if the model fits.",
        show_default=False,
    ),
]


class EvalBackend(StrEnum):
    """What answers in an evaluation."""

    auto = "auto"
    hf = "hf"
    vllm = "vllm"


def eval_settings(values: Mapping[str, Any]) -> Eval:
    """The settings of an evaluation as the command line gives them. Raises UserError."""
    from pydantic import ValidationError

    from clustertune.recipe.eval_tasks import unknown_tasks
    from clustertune.recipe.layers import did_you_mean
    from clustertune.recipe.sections import Eval

    try:
        found = Eval.model_validate(values)
    except ValidationError as error:
        raise UserError(
            Problem(f"{item['input']!r}: {item['msg']}", file="command line", key=f"--{str(item['loc'][0]).replace('_', '-')}")
            for item in error.errors()
        ) from None
    raise_if(
        Problem(f"lm-eval has no task {task!r}", file="command line", key="--tasks", fix=did_you_mean(task, known))
        for task, known in unknown_tasks(found.tasks).items()
    )
    return found
