"""Arguments that several commands share, checks of paths, and the default folder of an evaluation."""

from __future__ import annotations

import importlib
import inspect
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from clustertune.errors import UserError

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe folder, or its name below recipes/.")]
OptionalRecipe = Annotated[
    str | None, typer.Argument(metavar="RECIPE", help="A recipe folder, or its name below recipes/.", show_default=False)
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="Settings that replace the recipe's.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Scale the recipe's architecture down, with random weights.")]
Ranks = Annotated[
    int | None, typer.Option(min=1, help="Ranks on this machine. Default: the recipe's number, or 2 without a GPU.")
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="A name in ops/clusters, a file, or local: inspect this machine. Default: the file of this host, else local.",
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="HUB_ID|config.json", help="Model on the Hub, a config.json, or a recipe, to use its model."
    ),
]
DataOption = Annotated[
    str | None, typer.Option("--data", metavar="FILE|HUB_ID", help="Conversations: a file, a folder, or a dataset on the Hub.")
]
MethodOption = Annotated[str, typer.Option("--method", metavar="lora|qlora|full", help="What to train.")]
GpusOption = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="NODESxGPUSxNAME",
        help="Plan without a cluster file: such as 2x8xh100-sxm. Names are in ops/hardware.yaml.",
    ),
]
TemplateArguments = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="For the chat template, such as '{\"enable_thinking\": false}'. Default: what the training gave it.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def template_arguments(text: str | None) -> dict[str, Any]:
    """What ``--chat-template-kwargs`` says. Raises UserError."""
    from clustertune.recipe.sections import wrong_template_arguments

    try:
        arguments = json.loads(text) if text is not None else {}
        fault = wrong_template_arguments(arguments) if isinstance(arguments, dict) else "is no object"
    except (ValueError, RecursionError) as error:
        arguments, fault = {}, f"is not JSON: {error}"
    if fault:
        fix = "write an object, such as '{\"enable_thinking\": false}'"
        raise UserError(fault, file="command line", key="--chat-template-kwargs", fix=fix)
    return dict(arguments)


def takes(options: type, place: str) -> Callable[..., None]:
    """A command whose arguments are the fields of a dataclass, and whose help is the dataclass's docstring.

    ``place``: module and function of its program, which is imported when it is called, gets the dataclass, and returns the exit
    code (None: 0). So ``--help`` loads none of the package.
    """

    def command(**values: Any) -> None:
        module, _, function = place.partition(":")
        program = getattr(importlib.import_module(f"clustertune.{module}"), function)
        raise typer.Exit(program(options(**values)) or 0)

    command.__doc__ = options.__doc__
    command.__signature__ = inspect.signature(options, eval_str=True)  # type: ignore[attr-defined]
    command.__annotations__ = {}  # typer reads both
    return command


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


SharedRunDir = Annotated[
    Path | None, path_option("Run folder on storage that all nodes share. Default: below runs/.", "--run-dir")
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="auto (over all GPUs), cuda, cuda:N or cpu. Default: one GPU if the model fits.",
        show_default=False,
    ),
]
