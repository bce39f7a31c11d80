"""The base model's small files, the dataset, the benchmarks' data: whether a job finds them, and what they are."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from clustertune import manifest
from clustertune.check.rule import FAIL, UNKNOWN, WARN, Seen, listed
from clustertune.doctor.recipe_context import FolderFileSystem, RecipeContext, snapshot
from clustertune.doctor.recipe_plan import hours
from clustertune.doctor.stack_faults import trackers
from clustertune.errors import UserError
from clustertune.evaluate import punkt
from clustertune.recipe.architecture import contradictions
from clustertune.recipe.native_rules import show_value
from clustertune.recipe.parameters import weight_bytes
from clustertune.recipe.schema import is_address
from clustertune.recipe.tasks import PUNKT, needed, with_rows
from clustertune.resolve.resolved import expand_home, is_there
from clustertune.secrets import SECRET, read_env
from clustertune.staging import bundle


def staged_inputs(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the folder that the recipe reads model and data from

    Why: a recipe with staged: never uses the network: what is missing from that folder cannot be loaded
    See: https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
    """
    for problem in context.staged_problems:
        fix = problem.fix or f"clustertune stage {context.resolved.name} --to a new folder, and staged: that one"
        text = f"{problem.key}: {problem.message}" if problem.key else problem.message
        yield Seen(FAIL, text, fix, problem.file or context.where)


def dataset_absent(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the dataset is where the recipe says

    Why: prepare fails, and with it every job that waits for it
    See: https://huggingface.co/docs/datasets/loading
    """
    if not context.inputs_seen:
        return
    for key, path in bundle.data_inputs(context.resolved).items():
        if not is_there(path):
            status = FAIL if context.is_ours or len(context.cluster.nodes) < 2 else UNKNOWN
            fix = "give a file or folder; relative ones are in the recipe's folder"
            yield Seen(status, f"{key} {path} is not there on this machine", fix)
        elif not os.access(path, os.R_OK):
            yield Seen(FAIL, f"{key} {path} cannot be read", "change who may read it")
    for key, part in context.recipe.data.keyed_parts():
        if part.input is None:
            if context.offline and _is_empty(snapshot(context.hub, "datasets", part.name, part.revision)):
                fetch = f"hf download {part.name} --repo-type dataset --revision {part.revision}, on a machine with a network"
                yield Seen(FAIL, context.not_cached(f"{part.name} at {part.revision}"), fetch)
        elif is_address(part.input) and (missing := _lacks_package(part.input)) is not None:
            yield Seen(FAIL, f"{key}.input {part.input} cannot be read: {missing}", "install it in the image")


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


def _is_empty(path: Path | None) -> bool:
    try:
        return path is None or not path.is_dir() or next(path.iterdir(), None) is None
    except OSError:
        return True


def dataset_differs(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: conversations found against data.expect

    Why: another revision or another filter gives other data: steps, loss and score are not those of the reference
    Fix: look at data.revision, language and rejected.jsonl; or correct data.expect
    See: https://huggingface.co/docs/datasets/loading
    """
    expect = context.recipe.data.expect
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
    recipe = context.recipe
    return [name for name in recipe.eval.tasks if name in {*recipe.expect.tasks, *recipe.eval.pass_mark} and context.is_real]


def task_data(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the rows of a task in eval/, where its score is compared

    Why: without them the project's own few are scored: that is not the benchmark's score
    See: https://huggingface.co/docs/huggingface_hub/guides/cli
    """
    for name, task in with_rows(_compared(context)).items() if context.offline and context.inputs_seen else ():
        hub = task.hub
        folder = snapshot(context.hub, "datasets", hub.name, hub.revision) if hub else None
        if hub and (folder is None or not is_there(folder / hub.file)):
            fetch = f"hf download {hub.name} {hub.file} --repo-type dataset --revision {hub.revision}"
            fetch += ", on a machine with a network"
            yield Seen(FAIL if name in context.recipe.eval.pass_mark else WARN, context.not_cached(hub.name), fetch)


def eval_tasks(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the names in eval.tasks, and their data sets

    Why: a name that lm-eval does not know, or a data set that is not there, ends the evaluation after the training
    See: https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/task_guide.md
    """
    own = with_rows(context.recipe.eval.tasks)
    names = [name for name in context.recipe.eval.tasks if name not in own]
    if not names or not context.inputs_seen:
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
        if _is_empty(context.hub / f"datasets--{name.replace('/', '--')}" / "snapshots"):
            fix = f"hf download {name} --repo-type dataset, on a machine with a network; or clustertune stage RECIPE --to DIR"
            yield Seen(FAIL, context.not_cached(name), fix)


def nltk_folders(context: RecipeContext) -> list[Path]:
    """Where NLTK looks for its data, in its order (nltk/data.py)."""
    given = [part for part in context.environment.get("NLTK_DATA", "").split(os.pathsep) if part]
    own = ["~/nltk_data", f"{sys.prefix}/nltk_data", f"{sys.prefix}/share/nltk_data", f"{sys.prefix}/lib/nltk_data"]
    system = ["/usr/share/nltk_data", "/usr/local/share/nltk_data", "/usr/lib/nltk_data", "/usr/local/lib/nltk_data"]
    return [expand_home(part) for part in (*given, *own, *system)]


def punkt_data(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: NLTK's punkt_tab for the tasks that need it, where their scores are compared

    Why: lm-eval downloads it where it is missing and fails after the last prompt without a network; a splitter trained here
      instead counts some sentences differently
    See: https://github.com/EleutherAI/lm-evaluation-harness/issues/2266
    """
    places = [folder / punkt.FOLDER for folder in nltk_folders(context)] if needed(_compared(context), PUNKT) else []
    found = next((path for path in places if is_there(path)), None)
    missing = [name for name in punkt.FILES if found and not is_there(found / name)]
    fix = "unpack punkt_tab.zip of nltk_data in a folder tokenizers/, and export NLTK_DATA=the folder above it"
    if places and found is None:
        status = UNKNOWN if not context.versions else WARN  # the image may have it
        yield Seen(status, f"{punkt.FOLDER} is in none of {len(places)} folders of NLTK", fix)
    elif missing:
        yield Seen(FAIL, f"it lacks {', '.join(missing)}", fix, str(found))


def wandb_mode(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: W&B's mode against the network

    Why: each start waits for a server that cannot be reached; what stays offline is in the run folder until it is synced
    Fix: export WANDB_MODE=offline, and wandb sync from a machine with a network; metrics.jsonl is complete either way
    See: https://github.com/wandb/wandb/issues/4034
    """
    mode, key = context.environment.get("WANDB_MODE", ""), context.environment.get("WANDB_API_KEY")
    reports = "wandb" in trackers(context.args.get("report_to")) and mode not in ("offline", "disabled", "dryrun")
    if reports and context.offline and (mode or key):
        said = f"WANDB_MODE={mode}" if mode else "WANDB_API_KEY is set"
        yield Seen(WARN, f"HF_HUB_OFFLINE is set, and W&B is to report ({said})")


# --- the model ------------------------------------------------------------------------------------------------------------

GATED = ("meta-llama/", "google/gemma", "mistralai/", "CohereLabs/", "bigcode/starcoder")
"""Names of models whose licence must be accepted on the Hub, as they begin."""
MAPPED = (10, 50)
"""How many times slower weights are read through a mapping over NFS or FUSE than in order (safetensors#562)."""
HOME_BYTES = 10e9
"""Above this size a model in a home folder meets quotas."""


def storage_silent(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: folders of model, data and run answer

    Why: a hard NFS mount whose server is gone holds every process that looks there, and the job with it
    Fix: fix the mount or its server: clustertune doctor says which
    See: https://man7.org/linux/man-pages/man5/nfs.5.html
    """
    for path in context.silent:
        yield Seen(FAIL, f"{path} does not answer", where=str(path))


def _remote(context: RecipeContext) -> bool:
    recipe = context.recipe.model
    return context.is_real and recipe.path is None


def _sees_cache(context: RecipeContext) -> bool:
    """Whether the cache of the jobs can be seen: from another machine only where a variable names it."""
    return context.is_ours or not context.home_cache


def _is_absent(context: RecipeContext) -> bool:
    """Whether a model of the Hub is not in the cache."""
    there = context.model is not None and context.model.config is not None
    return _remote(context) and not there and context.inputs_seen


def model_absent(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the model at its commit is in the cache

    Why: the ranks download it while the GPUs wait, or end where there is no network
    See: https://huggingface.co/docs/huggingface_hub/guides/download
    """
    recipe = context.recipe.model
    if context.is_real and recipe.path is not None and context.model is None and context.inputs_seen:
        fix = "give the folder of the weights, or leave model.path out"
        status = FAIL if context.is_ours else UNKNOWN
        yield Seen(status, f"model.path {recipe.path} is not a folder on this machine", fix)
    elif _is_absent(context):
        size = weight_bytes(context.resolved.architecture)
        text = f"{recipe.name} at {recipe.revision} is not in {context.hub}" + (f" ({size / 1e9:,.0f} GB)" if size else "")
        status = FAIL if context.offline else WARN if _sees_cache(context) else UNKNOWN
        fetch = f"hf download {recipe.name} --revision {recipe.revision}, on a machine with a network; or clustertune stage"
        yield Seen(status, text + (", and HF_HUB_OFFLINE is set" if context.offline else ""), fetch)


def gated_model(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: access to a model behind a licence

    Why: the Hub answers 401 or 403, minutes into the job
    Fix: accept the licence on the model's page, then HF_TOKEN in .env, or hf auth login
    See: https://huggingface.co/docs/hub/models-gated
    """
    name = context.recipe.model.name
    needs_access = _is_absent(context) and not context.offline and _sees_cache(context)
    if needs_access and name.startswith(GATED) and not _has_token(context):
        yield Seen(WARN, f"{name} may ask for an accepted licence, and no token is available")


def _has_token(context: RecipeContext) -> bool:
    """Whether a token of the Hub is available; its value is never read."""
    if context.environment.get(SECRET[0]) or context.environment.get("HUGGING_FACE_HUB_TOKEN"):
        return True
    try:
        return context.hub_token.is_file() or SECRET[0] in read_env(context.env_file, lambda _: None)
    except Exception:  # what is wrong with the file has a rule of its own
        return False


def model_incomplete(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: all weight files and the tokenizer are there

    Why: loading ends in the middle, or draws what is missing at random with no more than a warning
    See: https://huggingface.co/docs/safetensors/index
    """
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


def model_json(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: model.json of the recipe against config.json of the model

    Why: plan, adapter shapes and merge are made for another model
    See: https://huggingface.co/docs/transformers/main_classes/configuration
    """
    model = context.real_model
    if model and model.config is not None and (differ := contradictions(context.resolved.architecture, model.config)):
        own = f"{context.resolved.name}/model.json"
        yield Seen(FAIL, differ, f"copy these keys from {model.path / 'config.json'} into {own}", own)


def model_code(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: a model that brings its own code

    Why: code from a model repository is never run here: what transformers does not know itself cannot be loaded
    Fix: use a model whose class transformers has
    See: https://huggingface.co/docs/transformers/custom_models
    """
    model = context.real_model
    named = (model.config or {}).get("auto_map") if model else None
    if model and isinstance(named, dict) and named:
        yield Seen(WARN, f"config.json names code of its own: {', '.join(sorted(map(str, named)))}", where=str(model.path))


def _template(context: RecipeContext) -> str | None:
    """The template that a tokenizer will be given; empty: none; None: there is no tokenizer to look at."""
    model = context.real_model
    return (model.template or context.resolved.chat_template or "") if model and model.has_tokenizer else None


def no_chat_template(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: a chat template for conversations and for the tasks of the evaluation

    Why: training refuses conversations without one; a model scored without one loses most of its points (28 of 100, not 83)
    Fix: put a Jinja file beside the recipe and name it: model.chat_template
    See: https://github.com/EleutherAI/lm-evaluation-harness/issues/3161
    """
    if context.model and _template(context) == "":
        yield Seen(FAIL, "the tokenizer has no chat template", where=str(context.model.path))


def eos_not_in_template(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the chat template ends turns with the tokenizer's EOS

    Why: generation continues past the answer: the model learnt to end a turn with another token than the one that stops it
    Fix: train.eos_token: the token with which the template ends a turn
    See: https://github.com/huggingface/trl/pull/3299
    """
    template, model = _template(context), context.model
    eos = model.special("eos_token") if model and template and not context.args.get("eos_token") else None
    if model and template and eos is not None and eos not in template and not re.search(r"\beos_token\b", template):
        yield Seen(WARN, f"EOS is {show_value(eos)}, which the chat template never writes", where=str(model.path))


def tokenizer_mismatch(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: token ids against the rows of the embedding

    Why: an id beyond the last row ends the ranks with an index error or, on a GPU, with an assertion of the device
    Fix: take model and tokenizer of one commit; tokens that were added need a model whose embedding was enlarged
    See: https://huggingface.co/docs/transformers/main_classes/model
    """
    model = context.model
    rows = (model.config or {}).get("vocab_size") if model else None
    if model is None or not isinstance(rows, int) or not model.vocabulary:
        return
    beyond = {name: number for name, number in model.vocabulary.items() if number >= rows}
    if beyond:
        last = max(beyond, key=beyond.__getitem__)
        text = f"{len(beyond)} tokens have ids from {rows} on, the last is {show_value(last)} = {beyond[last]}"
        yield Seen(FAIL, f"{text}; the embedding has {rows} rows", where=str(model.path))


def _weights_lie(context: RecipeContext) -> FolderFileSystem | None:
    """The file system of the weights; None where they are not to be looked at."""
    return context.lies_on(_real(context)) if context.is_real and context.inputs_seen else None


def weights_on_network(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the disk that the weights are read from

    Why: safetensors maps files: over NFS or FUSE every 4 KiB page is a request, 10 to 50 times slower than reading in order
    Fix: storage.staging in the cluster file: clustertune stage copies the model to a disk of each node first
    See: https://github.com/huggingface/safetensors/issues/562
    """
    size, lies = weight_bytes(context.resolved.architecture), _weights_lie(context)
    # Each node copies the model to its own disk before its ranks start (clustertune/staging/staging_step.py).
    copied = context.cluster.storage.staging is not None and context.recipe.slurm.staging is not False
    if lies is None or not lies.remote or copied or not size:
        return
    planned = context.plan.machine.storage_read_bytes_per_s / 1e9 if context.plan else None
    text = f"{size / 1e9:,.0f} GB of weights are read from {lies}"
    if speed := context.cluster.storage.read_gb_s or planned:
        first, low, high = (hours(times * size / 1e9 / speed) for times in (1, *MAPPED))
        text += f": {first} if read sequentially at {speed:g} GB/s, {low} to {high} through mmap"
    yield Seen(WARN, text)


def cache_in_home(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: where the Hub's cache lies

    Why: a large model fills the quota of a home folder, and a container without it downloads everything again
    Fix: storage: {caches: DIR} in the cluster file, on shared storage; or export HF_HOME=DIR in the shell that submits
    See: https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
    """
    size = weight_bytes(context.resolved.architecture) or 0
    if context.home_cache and context.is_ours and context.inputs_seen and _remote(context) and size > HOME_BYTES:
        yield Seen(WARN, f"HF_HOME is not set: {size / 1e9:,.0f} GB go to {context.hub}")


def _real(context: RecipeContext) -> Path:
    """The folder itself, links followed where it is there: caches are often a link to larger disks."""
    path = context.weights_at
    try:
        return path.resolve() if context.is_ours else path
    except (OSError, RuntimeError):
        return path
