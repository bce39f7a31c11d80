"""The dataset, the benchmarks' data and the sentence splitter: whether a job finds them, and what they were found to hold."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from clustertune import manifest
from clustertune.check.rule import FAIL, RECIPE, UNKNOWN, WARN, Seen, rule
from clustertune.config.resolved import expand_home, is_there
from clustertune.config.schema import is_address
from clustertune.config.tasks import PUNKT, needed, with_rows
from clustertune.doctor.recipe_context import RecipeContext
from clustertune.doctor.recipe_model import snapshot
from clustertune.errors import UserError
from clustertune.evaluate import punkt
from clustertune.staging import bundle


@rule("staged-inputs", RECIPE)
def staged(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the folder that the recipe reads model and data from

    Why: a recipe with staged: asks nothing of the network: what is not in that folder is nowhere
    See: https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
    """
    for problem in context.staged_problems:
        fix = problem.fix or f"clustertune stage {context.resolved.name} --to a new folder, and staged: that one"
        text = f"{problem.key}: {problem.message}" if problem.key else problem.message
        yield Seen(FAIL, text, fix, problem.file or context.where)


@rule("dataset-absent", RECIPE)
def dataset(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the dataset is where the recipe says

    Why: prepare fails, and with it every job that waits for it
    See: https://huggingface.co/docs/datasets/loading
    """
    if context.silent or context.staged_problems:
        return
    for key, path in bundle.data_inputs(context.resolved).items():
        if not is_there(path):
            status = FAIL if context.is_ours or len(context.cluster.nodes) < 2 else UNKNOWN
            yield Seen(
                status,
                f"{key} {path} is not there on this machine",
                "give a file or folder; relative ones are in the recipe's folder",
            )
        elif not os.access(path, os.R_OK):
            yield Seen(FAIL, f"{key} {path} cannot be read", "change who may read it")
    for key, part in context.resolved.recipe.data.keyed_parts():
        if part.input is not None and is_address(part.input):
            if (missing := _lacks_package(part.input)) is not None:
                yield Seen(FAIL, f"{key}.input {part.input} cannot be read: {missing}", "install it in the image")
        elif part.input is None and context.offline and _is_absent(snapshot(context.hub, "datasets", part.name, part.revision)):
            text = f"{part.name} at {part.revision} is not in {context.hub}, and HF_HUB_OFFLINE is set"
            fix = f"hf download {part.name} --repo-type dataset --revision {part.revision}, on a machine with a network"
            yield Seen(FAIL, text, fix)


def _lacks_package(address: str) -> str | None:
    """Why fsspec cannot open such an address here, such as that s3fs is not installed; None where it can."""
    if importlib.util.find_spec("fsspec") is None:
        return None
    import fsspec

    try:
        fsspec.get_filesystem_class(address.split(":", maxsplit=1)[0])
    except (ImportError, ValueError) as error:
        return str(error)
    return None


def _is_absent(path: Path | None) -> bool:
    try:
        return path is None or not path.is_dir() or next(path.iterdir(), None) is None
    except OSError:
        return True


@rule("dataset-differs", RECIPE)
def expected(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: conversations found against data.expect

    Why: another revision or another filter gives other data: steps, loss and score are not those of the reference
    Fix: look at data.revision, language and rejected.jsonl; or correct data.expect
    See: https://huggingface.co/docs/datasets/loading
    """
    expect = context.resolved.recipe.data.expect
    if expect is None or context.run_dir is None:
        return
    try:
        meta = manifest.read_manifest(context.run_dir / "data", "dataset").meta
        found = {split: int(meta[split]["conversations"]) for split in ("train", "eval")}
    except (UserError, KeyError, TypeError, ValueError):
        return  # not prepared yet
    for split, count in found.items():
        wanted = getattr(expect, split)
        if wanted is not None and wanted != count:
            text = f"{count:,} {split} conversations were prepared, data.expect says {wanted:,}"
            yield Seen(WARN, text, where=str(context.run_dir / "data"))


def _compared(context: RecipeContext) -> list[str]:
    """The tasks whose scores the recipe compares with something."""
    recipe = context.resolved.recipe
    return [name for name in recipe.eval.tasks if name in {*recipe.expect.tasks, *recipe.eval.pass_mark} and context.is_real]


@rule("task-data", RECIPE)
def own_rows(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the rows of a task in eval/, where its score is compared

    Why: without them the project's own few are scored: that is not the benchmark's score
    See: https://huggingface.co/docs/huggingface_hub/guides/cli
    """
    if context.silent or context.staged_problems or not context.offline:
        return
    for name, task in with_rows(_compared(context)).items():
        if (hub := task.hub) is None:
            continue
        folder = snapshot(context.hub, "datasets", hub.name, hub.revision)
        if folder is None or not is_there(folder / hub.file):
            fix = (
                f"hf download {hub.name} {hub.file} --repo-type dataset --revision {hub.revision}, on a machine with a network"
            )
            text = f"{hub.name} is not in {context.hub}, and HF_HUB_OFFLINE is set"
            yield Seen(FAIL if name in context.resolved.recipe.eval.pass_mark else WARN, text, fix)


@rule("eval-tasks", RECIPE)
def tasks(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the names in eval.tasks, and their data sets

    Why: a name that lm-eval does not know, or a data set that is not there, ends the evaluation after the training
    See: https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/task_guide.md
    """
    own = with_rows(context.resolved.recipe.eval.tasks)
    names = [name for name in context.resolved.recipe.eval.tasks if name not in own]
    if not names or context.silent or context.staged_problems:
        return
    if importlib.util.find_spec("lm_eval") is None:
        yield Seen(UNKNOWN, f"lm-eval is not installed here, which knows {', '.join(names)}")
        return
    from clustertune.evaluate.tasks import data_sets

    try:
        wanted = data_sets(names)
    except UserError as error:
        for problem in error.problems:
            yield Seen(FAIL, problem.message, problem.fix or "eval.tasks holds lm-eval's names")
        return
    for name in sorted(set(wanted.values())) if context.offline else ():
        snapshots = context.hub / f"datasets--{name.replace('/', '--')}" / "snapshots"
        if _is_absent(snapshots):
            text = f"{name} is not in {context.hub}, and HF_HUB_OFFLINE is set"
            fix = f"hf download {name} --repo-type dataset, on a machine with a network; or clustertune stage RECIPE --to DIR"
            yield Seen(FAIL, text, fix)


def nltk_folders(context: RecipeContext) -> list[Path]:
    """Where NLTK looks for its data, in its order (nltk/data.py)."""
    given = [part for part in context.environment.get("NLTK_DATA", "").split(os.pathsep) if part]
    own = ["~/nltk_data", f"{sys.prefix}/nltk_data", f"{sys.prefix}/share/nltk_data", f"{sys.prefix}/lib/nltk_data"]
    system = ["/usr/share/nltk_data", "/usr/local/share/nltk_data", "/usr/lib/nltk_data", "/usr/local/lib/nltk_data"]
    return [expand_home(part) for part in (*given, *own, *system)]


@rule("punkt-data", RECIPE)
def splitter(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: NLTK's punkt_tab for the tasks that need it, where their scores are compared

    Why: lm-eval downloads it where it is missing and fails after the last prompt without a network; a splitter trained here
      instead counts some sentences otherwise than the official one
    See: https://github.com/EleutherAI/lm-evaluation-harness/issues/2266
    """
    if not needed(_compared(context), PUNKT):
        return
    places = [folder / punkt.FOLDER for folder in nltk_folders(context)]
    found = next((path for path in places if is_there(path)), None)
    fix = "unpack punkt_tab.zip of nltk_data in a folder tokenizers/, and export NLTK_DATA=the folder above it"
    if found is None:
        status = UNKNOWN if not context.versions else WARN  # the image may have it
        text = f"{punkt.FOLDER} is in none of {len(places)} folders of NLTK"
        yield Seen(status, text, fix)
    elif missing := [name for name in punkt.FILES if not is_there(found / name)]:
        yield Seen(FAIL, f"it lacks {', '.join(missing)}", fix, str(found))


@rule("wandb-mode", RECIPE)
def tracker(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: W&B's mode against the network

    Why: each start waits for a server that cannot be reached; what stays offline is in the run folder until it is synced
    Fix: export WANDB_MODE=offline, and wandb sync from a machine with a network; metrics.jsonl is complete either way
    See: https://github.com/wandb/wandb/issues/4034
    """
    given = context.resolved.train_args.get("report_to")
    named = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    mode = context.environment.get("WANDB_MODE", "")
    if "wandb" not in named or mode in ("offline", "disabled", "dryrun"):
        return
    if context.offline and (mode or context.environment.get("WANDB_API_KEY")):
        text = f"HF_HUB_OFFLINE is set, and W&B is to report ({'WANDB_MODE=' + mode if mode else 'WANDB_API_KEY is set'})"
        yield Seen(WARN, text)
