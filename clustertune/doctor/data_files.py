"""The base model's small files, the dataset, the benchmarks' data: whether a job finds them, and what they are."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from clustertune.check.rule import FAIL, RECIPE, UNKNOWN, WARN, Rules, Seen, listed
from clustertune.doctor.recipe_context import RecipeContext
from clustertune.doctor.recipe_rules import hours
from clustertune.errors import UserError
from clustertune.host.mounts import lies_elsewhere
from clustertune.recipe.architecture import contradictions
from clustertune.recipe.eval_tasks import with_rows
from clustertune.recipe.findings import show_value
from clustertune.recipe.parameters import weight_bytes
from clustertune.resolve.resolved import is_there
from clustertune.staging import needs

RULES = Rules(RECIPE, __file__)


@RULES("staged-inputs")
def staged_inputs(context: RecipeContext) -> Iterator[Seen]:
    """The folder that the recipe reads model and data from."""
    for problem in context.staged_problems:
        fix = problem.fix or f"clustertune stage {context.resolved.name} --to a new folder, and staged: that one"
        text = f"{problem.key}: {problem.message}" if problem.key else problem.message
        yield Seen(FAIL, text, fix, problem.file or context.where)


def _is_empty(path: Path | None) -> bool:
    try:
        return path is None or not path.is_dir() or next(path.iterdir(), None) is None
    except OSError:
        return True


def _compared(context: RecipeContext) -> list[str]:
    """The tasks whose scores the recipe compares with something."""
    recipe = context.recipe
    return [name for name in recipe.eval.tasks if name in {*recipe.expect.tasks, *recipe.eval.pass_mark} and context.is_real]


@RULES("task-data")
def task_data(context: RecipeContext) -> Iterator[Seen]:
    """The rows of a task in eval/, where its score is compared."""
    if not context.offline or not context.inputs_seen:
        return
    for name, task in with_rows(_compared(context)).items():
        hub = task.hub
        folder = needs.snapshot(context.hub, "datasets", hub.name, hub.revision) if hub and hub.revision else None
        if hub and (folder is None or not is_there(folder / hub.file)):
            fetch = f"hf download {hub.name} {hub.file} --repo-type dataset --revision {hub.revision}"
            fetch += ", on a machine with a network"
            yield Seen(FAIL if name in context.recipe.eval.pass_mark else WARN, context.not_cached(hub.name), fetch)


@RULES("eval-tasks")
def eval_tasks(context: RecipeContext) -> Iterator[Seen]:
    """The names in eval.tasks, and their data sets."""
    names = [name for name in context.recipe.eval.tasks if name not in with_rows(context.recipe.eval.tasks)]
    if not names or not context.inputs_seen or not context.offline:
        return
    if importlib.util.find_spec("lm_eval") is None:
        yield Seen(UNKNOWN, f"lm-eval is not installed here, which knows {', '.join(names)}")
        return
    from clustertune.evaluate.tasks import data_sets

    try:
        wanted = data_sets(names)
    except UserError:  # a name that lm-eval does not know: eval says so, and the recipe's own check
        return
    for name in sorted(set(wanted.values())):
        if _is_empty(context.hub / f"datasets--{name.replace('/', '--')}" / "snapshots"):
            fix = f"hf download {name} --repo-type dataset, on a machine with a network; or clustertune stage RECIPE --to DIR"
            yield Seen(FAIL, context.not_cached(name), fix)


# --- the model ------------------------------------------------------------------------------------------------------------

MAPPED = (10, 50)
"""How many times slower weights are read through a mapping over NFS or FUSE than in order (safetensors#562)."""


@RULES("storage-silent")
def storage_silent(context: RecipeContext) -> Iterator[Seen]:
    """Folders of model, data and run answer."""
    for path in context.silent:
        yield Seen(FAIL, f"{path} does not answer", where=str(path))


@RULES("model-absent")
def model_absent(context: RecipeContext) -> Iterator[Seen]:
    """The model at its commit is in the cache."""
    recipe, model = context.recipe.model, context.model
    if not context.is_real or not context.inputs_seen:
        return
    if recipe.path is not None and model is None:
        fix = "give the folder of the weights, or leave model.path out"
        status = FAIL if context.is_ours else UNKNOWN
        yield Seen(status, f"model.path {recipe.path} is not a folder on this machine", fix)
    elif recipe.path is None and (model is None or model.config is None):
        size = weight_bytes(context.resolved.architecture)
        text = f"{recipe.name} at {recipe.revision} is not in {context.hub}" + (f" ({size / 1e9:,.0f} GB)" if size else "")
        # The cache of the jobs can be seen from another machine only where a variable names it.
        status = FAIL if context.offline else WARN if context.is_ours or not context.home_cache else UNKNOWN
        fetch = f"hf download {recipe.name} --revision {recipe.revision}, on a machine with a network; or clustertune stage"
        yield Seen(status, text + (", and HF_HUB_OFFLINE is set" if context.offline else ""), fetch)


@RULES("model-incomplete")
def model_incomplete(context: RecipeContext) -> Iterator[Seen]:
    """All weight files and the tokenizer are there."""
    model = context.model
    if model is None or not context.is_real or model.config is None:
        return
    there, missing, wanted = model.weights
    damaged = [f"{name}: {why}" for name, why in model.damaged.items()] if not missing else []
    found = listed(damaged, 3, "; ", "; and")
    if missing:
        found = f"missing or empty: {listed(missing, 4)}"
    elif not damaged and wanted is not None and there < wanted:
        found = f"{there:,} bytes of weights, its index says {wanted:,}"
    if found:
        recipe = context.recipe.model
        yield Seen(FAIL, found, f"load it again: hf download {recipe.name} --revision {recipe.revision}", str(model.path))
    if not model.has_tokenizer:
        fix = "take the tokenizer's files of the same commit; those of another one may number tokens in another way"
        yield Seen(FAIL, "no tokenizer (tokenizer.json or tokenizer.model)", fix, str(model.path))


@RULES("model-json")
def model_json(context: RecipeContext) -> Iterator[Seen]:
    """Model.json of the recipe against config.json of the model."""
    model = context.real_model
    if model and model.config is not None and (differ := contradictions(context.resolved.architecture, model.config)):
        own = f"{context.resolved.name}/model.json"
        yield Seen(FAIL, differ, f"copy these keys from {model.path / 'config.json'} into {own}", own)


def _template(context: RecipeContext) -> str | None:
    """The template that a tokenizer will be given; empty: none; None: there is no tokenizer to look at."""
    model = context.real_model
    return (model.template or context.resolved.chat_template or "") if model and model.has_tokenizer else None


@RULES("no-chat-template")
def no_chat_template(context: RecipeContext) -> Iterator[Seen]:
    """A chat template for conversations and for the tasks of the evaluation."""
    if context.model and _template(context) == "":
        yield Seen(FAIL, "the tokenizer has no chat template", where=str(context.model.path))


@RULES("eos-not-in-template")
def eos_not_in_template(context: RecipeContext) -> Iterator[Seen]:
    """The chat template ends turns with the tokenizer's EOS."""
    template, model = _template(context), context.model
    eos = model.special("eos_token") if model and template and not context.args["eos_token"] else None
    if model and template and eos is not None and eos not in template and not re.search(r"\beos_token\b", template):
        yield Seen(WARN, f"EOS is {show_value(eos)}, which the chat template never writes", where=str(model.path))


@RULES("tokenizer-mismatch")
def tokenizer_mismatch(context: RecipeContext) -> Iterator[Seen]:
    """Token ids against the rows of the embedding."""
    model = context.model
    rows = (model.config or {}).get("vocab_size") if model else None
    if model is None or not isinstance(rows, int) or not model.vocabulary:
        return
    beyond = {name: number for name, number in model.vocabulary.items() if number >= rows}
    if beyond:
        last = max(beyond, key=beyond.__getitem__)
        text = f"{len(beyond)} tokens have ids from {rows} on, the last is {show_value(last)} = {beyond[last]}"
        yield Seen(FAIL, f"{text}; the embedding has {rows} rows", where=str(model.path))


@RULES("weights-on-network")
def weights_on_network(context: RecipeContext) -> Iterator[Seen]:
    """The disk that the weights are read from."""
    size = weight_bytes(context.resolved.architecture)
    lies = context.lies_on(_real(context)) if context.is_real and context.inputs_seen else None
    # Each node copies the model to its own disk before its ranks start (clustertune/staging/staging_step.py).
    copied = context.cluster.storage.staging is not None and context.recipe.slurm.staging is not False
    if lies is None or not lies_elsewhere(lies.kind) or copied or not size:
        return
    planned = context.plan.machine.storage_read_bytes_per_s / 1e9 if context.plan else None
    text = f"{size / 1e9:,.0f} GB of weights are read from {lies.kind} at {lies.point}"
    if speed := context.cluster.storage.read_gb_s or planned:
        first, low, high = (hours(times * size / 1e9 / speed) for times in (1, *MAPPED))
        text += f": {first} if read sequentially at {speed:g} GB/s, {low} to {high} through mmap"
    yield Seen(WARN, text)


def _real(context: RecipeContext) -> Path:
    """The folder itself, links followed where it is there: caches are often a link to larger disks."""
    path = context.weights_at
    try:
        return path.resolve() if context.is_ours else path
    except (OSError, RuntimeError):
        return path
