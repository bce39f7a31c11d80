"""``clustertune sky``: a recipe as a SkyPilot task, ``launch/skypilot.yaml`` filled in."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from clustertune.cli.arguments import Overrides, RecipeArgument, Tiny, path_option
from clustertune.console import escape, say
from clustertune.errors import ExitCode, Problem, UserError, raise_if
from clustertune.manifest import require_replaceable, write_durably
from clustertune.recipe.sections import NAME
from clustertune.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.tree import ROOT

TEMPLATE = ROOT / "launch" / "skypilot.yaml"
MOUNT = "/clustertune-runs"
VOLUME = "clustertune-runs"
_GPU = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._/@%+=,-]{1,1000}")


@dataclass(frozen=True)
class SkyOptions:
    """What a recipe does not say about the machines."""

    gpu: str = "H100"
    """SkyPilot's name of the GPU."""
    volume: str | None = None
    """The SkyPilot volume that holds the runs; None: ``clustertune-runs``, or none where ``runs`` is given."""
    runs: str | None = None
    """A folder that all nodes share already, instead of a volume."""
    spot: bool = False
    """Machines that can be taken away."""


def render(resolved: Resolved, overrides: Sequence[str] = (), options: SkyOptions | None = None) -> str:
    """The task's YAML. ``overrides`` are the ``section.key=value`` that made ``resolved``.

    Raises UserError with everything that cannot be written into a task.
    """
    import jinja2

    options = options or SkyOptions()
    problems = _problems(resolved, overrides, options)
    raise_if(problems)
    slurm = resolved.recipe.slurm
    runs = options.runs or MOUNT
    # Not --run-dir of the recipe's name alone: another setting is another run, and must find another folder.
    folder = f"{runs.rstrip('/')}/{resolved.name}/{resolved.fingerprint()[:12]}"
    arguments = [Path(resolved.folder).relative_to(ROOT).as_posix(), *overrides, "--run-dir", folder]
    arguments += ["--tiny"] if resolved.tiny else []
    values = {
        "name": json.dumps(task_name(resolved)),
        "workdir": json.dumps("."),
        "nodes": slurm.nodes,
        "accelerators": None if _needs_no_gpu(resolved) else json.dumps({options.gpu: slurm.gpus_per_node}),
        "spot": json.dumps(options.spot),
        "volume": None if options.runs else json.dumps(options.volume or VOLUME),
        "runs": json.dumps(runs),
        "secrets": secrets(resolved),
        "arguments": shlex.join(arguments),
    }
    # Not HTML: every value is JSON or quoted for the shell above, and the tests parse what comes out.
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False, keep_trailing_newline=True)  # noqa: S701
    return str(environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(values))


def task_name(resolved: Resolved) -> str:
    """The recipe's name as SkyPilot and its clouds take names: lower case, digits and ``-``, a letter first, 40 at most."""
    slug = re.sub(r"[^a-z0-9]+", "-", resolved.name.lower()).strip("-")
    return f"ct-{slug}"[:40].rstrip("-")


def secrets(resolved: Resolved) -> list[str]:
    """Names of the secrets that the run cannot do without; their values never stand in the task."""
    model, data = resolved.recipe.model, resolved.recipe.data
    from_hub = (model.weights == "hub" and model.path is None) or any(part.input is None for part in data.parts)
    return ["HF_TOKEN"] if from_hub else []


def _needs_no_gpu(resolved: Resolved) -> bool:
    """A model of random weights is there to rehearse: it runs on CPUs."""
    return resolved.tiny or resolved.recipe.model.weights == "random"


def _problems(resolved: Resolved, overrides: Sequence[str], options: SkyOptions) -> list[Problem]:
    problems = []

    def refuse(text: str, key: str, fix: str) -> None:
        problems.append(Problem(text, file="command line", key=key, fix=fix))

    if not _GPU.fullmatch(options.gpu):
        refuse(f"{options.gpu!r} is not a name of a GPU", "--gpu", "`sky show-gpus` lists the names, such as H100 or A100-80GB")
    if options.volume is not None and not re.fullmatch(NAME, options.volume):
        refuse(f"{options.volume!r} is not a name of a volume", "--volume", "letters, digits, '.', '_' and '-'")
    if options.runs is not None and options.volume is not None:
        refuse("a volume or a shared folder, not both", "--runs", "leave one out")
    if options.runs is not None and not (_PLAIN_PATH.fullmatch(options.runs) and ".." not in Path(options.runs).parts):
        refuse(f"{options.runs!r} is not an absolute plain path", "--runs", "letters, digits and . _ / @ % + = , - only")
    for text in overrides:
        if not text.isprintable() or text.startswith("-"):
            refuse(f"{text!r} is not allowed in a task", "section.key=value", "printable characters, on one line")
    if not Path(resolved.folder).is_relative_to(ROOT):
        text, fix = "is outside the checkout, which is what SkyPilot copies", "move the recipe below recipes/"
        problems.append(Problem(text, file=resolved.folder, fix=fix))
    for key, path in resolved.inputs.items():
        if not path.is_relative_to(ROOT):
            text, fix = f"{path} is outside the checkout, which is what SkyPilot copies", "move it below recipes/"
            problems.append(Problem(text, file=resolved.name, key=key, fix=fix))
    return problems


def sky(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option("--gpu", help="SkyPilot's name of the GPU; `sky show-gpus` lists them.")] = "H100",
    volume: Annotated[
        str | None, typer.Option("--volume", help="A SkyPilot volume for the runs, mounted on all nodes.")
    ] = None,
    runs: Annotated[
        str | None, typer.Option("--runs", metavar="DIR", help="Folder that all nodes already share, instead of a volume.")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Use spot (preemptible) machines; the job continues elsewhere.")] = False,
    tiny: Tiny = False,
    out: Annotated[Path | None, path_option("Write the task to this file.", "--out", metavar="FILE")] = None,
) -> None:
    """The task starts launch/torchrun.sh on every node."""
    resolved = resolve.resolve(recipe, overrides or [], tiny=tiny)
    resolved.require_startable()
    text = render(resolved, overrides or [], SkyOptions(gpu=gpu, volume=volume, runs=runs, spot=spot))
    if out is None:
        typer.echo(escape(text), nl=False)
        return
    if out.is_dir():
        raise UserError("is a folder", file=str(out), key="--out", fix="give a file", code=ExitCode.CONFIG)
    require_replaceable(out, text.partition("\n")[0])
    write_durably(out, text)
    say(f"wrote {out}; sky jobs launch {out}")
