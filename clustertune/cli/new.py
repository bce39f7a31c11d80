"""``clustertune new``: a recipe folder from a model, data and GPUs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from clustertune.arguments import AsJson, ClusterOption, Overrides
from clustertune.cli.deferred import deferred
from clustertune.console import reply
from clustertune.errors import Problem, UserError, collect_problems, raise_if
from clustertune.host.system import GIB

with deferred():
    from clustertune import draft
    from clustertune.data import measure
    from clustertune.launch import bill
    from clustertune.plan import predict
    from clustertune.recipe import accelerate_file, layers, sections
    from clustertune.resolve import models, resolve, tiny

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


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command("new")(new)


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new recipe: a folder below recipes/, or a path.")],
    model: ModelOption = None,
    data: DataOption = None,
    method: MethodOption = "lora",
    gpus: GpusOption = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Write a recipe folder for a model and its data.

    LoRA target modules come from the model's architecture, the distribution from the planner. Prints every assumption.
    """
    folder = _target(name)
    stated = draft.stated(overrides or ())
    made_of, found, at = read(model, data, method, gpus, cluster, needs_data=True, of_data=stated.get("data"))
    if not (stated.get("model") or {}).keys() & {"revision", "path"}:
        made_of = models.pinned(made_of)
    keys, notes = draft.look_at_tokenizer(made_of, found, stated)
    stated = accelerate_file.merged(keys, stated)
    shown = folder.name if "/" not in name else name
    if at.assumed and method != "qlora" and tiny.is_small(made_of.architecture):
        made, seconds = draft.on_cpus(made_of, method, found, stated)
        made.assumed.extend(notes)
        following = draft.commands(shown, ())
        with draft.folder_of(made, folder.name) as written:
            resolve.resolve(written)
            _keep(written, folder, draft.page(made, folder.name, made_of, following))
        document: dict[str, Any] = {"fits": True, "step_s": None, "hours": seconds and seconds / 3600, "total": None}
        hours = f"about {max(1, round(seconds / 60))} min of training" if seconds else "a training"
        text = f"\nplanned: {hours} on this machine's CPUs. Next:\n"
    else:
        following = draft.commands(shown, at.options)
        with draft.drafted(folder.name, made_of, method, found, at, stated) as (made, written):
            made.assumed.extend(notes)
            machine = at.calibrated.machine(int(made.recipe["slurm"]["nodes"]))
            plan = predict.make_plan(resolve.resolve(written), machine, at.calibrated.constants, lengths=made.lengths)
            _keep(written, folder, draft.page(made, folder.name, made_of, following))
        whole = bill.bill(plan, at.calibrated.cluster)
        document = {"fits": plan.fits, "step_s": plan.step.seconds, "hours": plan.hours, "total": whole.as_json()}
        hours = f"{plan.hours:.2g} h of training" if plan.hours else f"{plan.step.seconds:.3g} s a step"
        spent = f"; all stages {headline}" if (headline := whole.headline()) else ""
        memory = f"{plan.needed / GIB:.0f} of {machine.usable_bytes / GIB:.0f} GiB a GPU"
        text = f"\nplanned: {hours} on {machine.name}, {memory}{spent}. Next:\n"
    if overrides:
        made.assumed.append(f"said behind the options, and holds whatever stands above: {', '.join(overrides)}")
    files = sorted(path.name for path in folder.iterdir())
    document |= {"folder": str(folder), "files": files, "assumed": made.assumed, "commands": following}
    reply(as_json, document, f"{folder}: {', '.join(files)}", *(f"- {one}" for one in made.assumed), text, "\n".join(following))


def _keep(written: Path, folder: Path, page: str) -> None:
    """Write the files of a draft, and its README, to the recipe's folder."""
    (written / "README.md").write_text(page, encoding="utf-8")
    shutil.copytree(written, folder, dirs_exist_ok=True)


def read(
    model: str | None, data: str | None, method: str, gpus: str | None, cluster: str | None, *,
    needs_data: bool = False, of_data: Mapping[str, Any] | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """What the options name: the model, the measured data (None without), the place. Raises UserError with every problem.

    ``of_data``: keys of the section ``data`` that the command line states.
    """

    problems: list[Problem] = []
    if method not in draft.METHODS:
        fix = layers.did_you_mean(method, draft.METHODS)
        problems.append(Problem(f"{method!r} is not a method", file="command line", key="--method", fix=fix))
    if model is None:
        fix = f"--model OWNER/NAME or a config.json; known without the Hub: {', '.join(models.known_models())}"
        problems.append(Problem("missing", file="command line", key="--model", fix=fix))
    if data is None and needs_data:
        fix = "--data FILE, a folder, or a dataset of the Hub"
        problems.append(Problem("missing", file="command line", key="--data", fix=fix))
    if gpus is not None and cluster is not None:
        text = "--gpus and --cluster exclude each other: a cluster file says which GPUs there are"
        problems.append(Problem(text, file="command line", key="--gpus", fix="leave one out"))
    lookups = ((models.find_model, (model,)), (measure.measure, (data, of_data)), (draft.where, (gpus, cluster)))
    found: list[Any] = [None] * len(lookups)
    for index, (look, given) in enumerate(lookups):
        with collect_problems(problems):
            found[index] = look(*given) if index == len(lookups) - 1 or given[0] else None  # type: ignore[operator]
    raise_if(problems)
    return found[0], found[1], found[2]


def _target(name: str) -> Path:

    folder = Path(name) if "/" in name else Path("recipes", name)
    text = fix = None
    if not re.fullmatch(sections.NAME, folder.name):
        text = "must be letters, digits, '.', '_' and '-', 64 at most, the first a letter or digit"
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        text, fix = "exists already: nothing is overwritten", "choose another name, or remove it"
    elif not folder.parent.is_dir() and "/" in name:
        text, fix = f"{folder.parent} is not a folder", "make it first"
    if text:
        raise UserError(text, file=str(folder), key="NAME", fix=fix)
    return folder
