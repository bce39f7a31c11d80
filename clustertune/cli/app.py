"""The command line: the table of commands, and what is around each of them.

A command is a function of a module here: arguments in, one function of the package, a table or one JSON document out. The
module is imported when the command is called; the function's docstring is the rest of the command's help. Whatever ends a
command becomes a message on stderr, one JSON document if asked for, and an exit code.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from clustertune import __version__, close_working_folder
from clustertune.console import emit_json, escape, say, show_error
from clustertune.errors import ExitCode, Problem, UserError, raise_if, storage_cause, storage_error
from clustertune.process import Stopped
from clustertune.tree import how_to_install

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Use it": {
        "new": ("cli.options:new", "Write a recipe folder for a model and its data."),
        "run": ("cli.stages:run", "Run the whole chain on this machine."),
        "submit": ("cli.jobs:submit", "Run the chain on Slurm: one job per stage."),
        "sweep": ("cli.jobs:sweep", "Run a recipe under varied settings and compare."),
        "eval": ("cli.stages:evaluate", "Score a model with lm-eval, alone or next to its base."),
        "chat": ("cli.after_training:chat", "Talk to a model in the terminal, in its own chat template."),
        "serve": ("cli.after_training:serve", "Serve a model with an OpenAI-compatible API."),
        "push": ("cli.after_training:push", "Send a run's adapter to the Hub, with its model card."),
    },
    "Look at it": {
        "show": ("cli.look:show", "Print a recipe with every value resolved."),
        "plan": ("cli.options:plan", "Predict whether a recipe fits, its hours, cost and limits."),
        "doctor": ("cli.options:doctor_app", "Look for mistakes before they cost a job."),
        "watch": ("cli.look:watch", "Follow a run: step, speed, time and money, GPUs, alerts."),
        "runs": ("cli.look:runs", "List runs with state, step, score and cost, newest first."),
        "report": ("cli.stages:report", "Write a run's one-page report, and report.json next to it."),
        "compare": ("cli.look:compare", "Compare runs side by side, and list what differs."),
        "bench": ("cli.stages:bench", "Measure a recipe's training on this machine."),
    },
    "A stage by itself": {
        "prepare": ("cli.stages:prepare", "Turn a recipe's data into conversations and tokens."),
        "export": ("cli.stages:export", "Write the adapter, or the whole model, from a checkpoint."),
        "merge": ("cli.stages:merge", "Merge an adapter into its base model."),
        "text-model": ("cli.stages:text_model", "Save the text model of a checkpoint with pictures or sound."),
        "checkpoint": ("cli.stages:checkpoint_app", "Check checkpoints."),
    },
    "Cluster; images of containers are made by make: build-sif, build-image": {
        "show-cluster": ("cli.look:show_cluster", "Check and show a cluster file, or what this machine has."),
        "setup": ("cli.cluster_commands:setup_app", "Render files that set up a node."),
        "nccl-check": ("cli.options:nccl_check", "Measure the bandwidth between GPUs and nodes, and check it."),
        "stage": ("cli.cluster_commands:stage", "Copy model and data to local disks, or into a bundle."),
        "demo-slurm": ("cli.cluster_commands:demo_slurm", "Run a scaled-down recipe on a temporary Slurm."),
        "sky": ("experimental.skypilot:sky", "Print a recipe as a SkyPilot task."),
    },
}
"""The commands as ``--help`` lists them: module and function, and the first line of the command's own help."""
HIDDEN = {
    "train": ("cli.jobs:train", "Train as one rank: what every launcher starts."),
    "job": ("cli.jobs:job", "Run inside a Slurm job: what launch/run.sbatch starts."),
    "node": ("cli.jobs:node", "Run one node's ranks of an attempt: what srun starts on every node."),
    "part": ("cli.jobs:part", "Run one stage inside a job's container; the job itself holds the run's lock."),
    "torchrun-node": (
        "cli.jobs:torchrun_node",
        "Take part in a run as one node: launch/torchrun.sh calls this, once on each node.",
    ),
}
"""What only programs start."""
COMMANDS = {name: entry for group in (*GROUPS.values(), HIDDEN) for name, entry in group.items()}


class _Commands(Mapping[str, Any]):
    """The commands of typer by name, each made when it is asked for: one imports the parts of the package that it needs."""

    def __getitem__(self, name: str) -> Any:
        place, summary = COMMANDS[name]
        module, _, function = place.partition(":")
        command = getattr(importlib.import_module(f"clustertune.{module}"), function)
        made = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
        made.callback()(lambda: None)
        if isinstance(command, typer.Typer):
            made.add_typer(command, name=name)
        else:
            text = "\n\n".join(filter(None, (summary, inspect.getdoc(command))))
            made.command(name, help=text, hidden=name in HIDDEN)(command)
        return typer.main.get_group(made).commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Grouped(TyperGroup):
    """Lists the commands in groups."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - of typer
        """The names; typer's would make every command."""
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As typer's, which would suggest what only programs start: a mistyped name is compared with what people start."""
        name, *others = args
        if name in ("train", "fit", "finetune", "fine-tune") and others and not others[0].startswith("-"):
            fix = f"clustertune run {others[0]} runs all stages, --to train the first two; clustertune submit does so on Slurm"
            raise UserError("training has no command of its own", file="command line", key=name, fix=fix)
        if name == "ops":
            fix = "clustertune setup storage|slurm --cluster NAME --node NODE --out DIR, then run the script in DIR as root"
            raise UserError("ops is replaced by setup, which renders files", file="command line", key=name, fix=fix)
        if name not in COMMANDS and not name.startswith("-"):
            known = [one for commands in GROUPS.values() for one in commands]
            close = ["run" if one == "train" else one for one in difflib.get_close_matches(name, [*known, "train"], n=1)]
            fix = f"did you mean {close[0]}?" if close else "clustertune --help lists all"
            raise UserError("there is no such command", file="command line", key=name, fix=fix)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - of typer
        """As click's, a section for each of :data:`GROUPS`."""
        width = max(len(name) for commands in GROUPS.values() for name in commands)
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), summary) for name, (_, summary) in commands.items()])


app = typer.Typer(
    cls=_Grouped,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"clustertune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """From a bare Slurm GPU cluster to an evaluated fine-tuned LLM, 7B to 405B."""


def main() -> int:
    """The entry point of ``clustertune`` and of ``python -m clustertune``."""
    return run_command(app)


# --- around every command ------------------------------------------------------------------------------------------------

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
        _require_utf8(sys.argv[1:])
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


def _require_utf8(words: Sequence[str]) -> None:
    """Raise UserError with each word that is not UTF-8: neither JSON nor YAML nor a page could name such a path."""
    fix = "rename the file or folder"
    raise_if(
        Problem(f"{os.fsencode(word)!r} is not UTF-8", file="command line", fix=fix) for word in words if not is_encodable(word)
    )


def is_encodable(text: str) -> bool:
    """Whether a text has a form in UTF-8: bytes of a name that are none are lone surrogates in it (PEP 383)."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


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
    elif isinstance(error, UnicodeEncodeError) and not is_encodable(str(error.object)):
        text = f"{escape(str(error.object), keep='')[:200]} is not UTF-8"
        known = UserError(text, fix="rename the file or folder whose name it is, or write the text in UTF-8")
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
    from clustertune.recipe import library_facts

    sections = {"train": library_facts.facts("trl")["fields"], "lora": library_facts.facts("peft")["fields"]}
    owner = section or next((known for known, keys in sections.items() if name in keys), None)
    return f"settings of a recipe are given without dashes: {owner}.{name}=VALUE" if owner else None


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
