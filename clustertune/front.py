"""Around every command: whatever ends it becomes words on stderr, one JSON document if asked for, and an exit code."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

import typer

from clustertune.console import emit_json, say, show_error
from clustertune.errors import ExitCode, Problem, UserError, storage_error
from clustertune.process import Stopped
from clustertune.storage import storage_cause
from clustertune.tree import how_to_install

_OF_TRAINING = {
    "accelerate", "bitsandbytes", "datasets", "deepspeed", "huggingface_hub", "jinja2", "matplotlib", "numpy", "peft", "psutil",
    "pyarrow", "pynvml", "safetensors", "tokenizers", "torch", "transformers", "trl", "wandb", "xxhash",
}  # fmt: skip
"""Modules that the extra ``train`` installs (setup.py)."""
INTERRUPTED = 130
"""What shells give for a command that Ctrl-C ended: 128 + SIGINT."""


def run_command(app: typer.Typer) -> int:
    """Run the command of this process. Returns its exit code; nothing a user can cause leaves a traceback."""
    _open_standard_files()
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which accelerate imports, warns where it has to look
        logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)  # PEFT imports it; it wants kernels of the Hub
    as_json = "--json" in sys.argv[1:]
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _stop)
    try:
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
        known = UserError(Problem("interrupted", fix="the same command goes on where this one ended"), ExitCode.AGAIN)
        show_error(known)
        if as_json:
            emit_json({**known.as_dict(), "exit_code": code})
    return int(code or 0)


def explain(error: BaseException) -> UserError:
    """Say on stderr what ended the command; the same as the error that ``--json`` describes."""
    known: UserError
    if isinstance(error, typer.TyperException):
        return _usage(error)
    if isinstance(error, UserError):
        known = error
    elif isinstance(error, Stopped):
        problem = Problem(f"stopped by {error}", fix="run the same command again: it goes on where this one ended")
        known = UserError(problem, ExitCode.AGAIN)
    elif isinstance(error, OSError) and error.errno is not None:
        known = storage_error(error, "cannot be used", error.filename or "stdout")
    elif cause := storage_cause(error):
        known = storage_error(cause, "cannot be used", ".")
    elif isinstance(error, ModuleNotFoundError) and (extra := _extra(error.name or "")):
        problem = Problem(f"the Python package {error.name} is not installed", fix=how_to_install(extra))
        known = UserError(problem, ExitCode.CONFIG)
    else:
        traceback.print_exception(error)
        text = (str(error).splitlines() or [""])[0]
        known = UserError(Problem(f"{type(error).__name__}: {text}", fix="internal error; please report it"), ExitCode.FAILED)
    show_error(known)
    return known


def _extra(module: str) -> str | None:
    """The extra of the package that brings a module; None for a module that none brings, which is a fault."""
    top = module.partition(".")[0]
    if top in ("lm_eval", "nltk", "langdetect", "immutabledict", "tenacity", "aiohttp"):
        return "eval"
    return "train" if top in _OF_TRAINING else None


def _usage(error: typer.TyperException) -> UserError:
    """What typer says of the arguments, in the form of all other errors."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "clustertune"
    text = error.format_message().replace("Value error, ", "").replace("Input should be", "must be")
    if not getattr(error, "message", ""):
        text = "an argument is missing"
    if type(error).__name__ == "NoArgsIsHelpError":
        say(text)
        return UserError(Problem(f"{command}: a command is missing"), ExitCode.CONFIG)
    usage = context.get_usage().removeprefix("Usage: ") if context else command
    known = UserError(Problem(text, file="command line", fix=f"usage: {usage}; --help explains"), ExitCode.CONFIG)
    show_error(known)
    return known


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
