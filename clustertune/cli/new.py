"""``clustertune new``: a recipe folder from a model, data and GPUs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from clustertune.cli.arguments import AsJson, ClusterOption, DataOption, GpusOption, MethodOption, ModelOption, Overrides
from clustertune.console import reply
from clustertune.host.system import GIB


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
    """LoRA target modules come from the model's architecture, the distribution from the planner. Prints every assumption."""
    from clustertune import draft
    from clustertune.launch import bill
    from clustertune.plan import predict
    from clustertune.recipe import layers
    from clustertune.resolve import models, resolve, tiny

    folder = draft.target(name)
    stated = draft.stated(overrides or ())
    made_of, found, at = draft.read_options(model, data, method, gpus, cluster, needs_data=True, of_data=stated.get("data"))
    if not (stated.get("model") or {}).keys() & {"revision", "path"}:
        made_of = models.pinned(made_of)
    keys, notes = draft.look_at_tokenizer(made_of, found, stated)
    stated = layers.laid_over(keys, stated)
    shown = folder.name if "/" not in name else name
    if at.assumed and method != "qlora" and tiny.is_small(made_of.architecture):
        made = draft.on_cpus(made_of, method, found, stated)
        made.assumed.extend(notes)
        following = draft.commands(shown, ())
        with draft.folder_of(made, folder.name) as written:
            resolve.resolve(written)
            _keep(written, folder, draft.page(made, folder.name, made_of, following))
        document: dict[str, Any] = {"fits": True, "step_s": None, "hours": None, "total": None}
        text = "\nfor this machine's CPUs. Next:\n"
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
