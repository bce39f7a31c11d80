"""The base model's small files: tokenizer, chat template, special tokens, sizes of the weights, and the disk they lie on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from clustertune.check.rule import FAIL, RECIPE, UNKNOWN, WARN, Seen, rule
from clustertune.config.architecture import contradictions
from clustertune.config.native_rules import show_value
from clustertune.config.parameters import weight_bytes
from clustertune.data.tokenizer import PADS
from clustertune.doctor.recipe_context import FolderFileSystem, RecipeContext
from clustertune.doctor.recipe_model import has_generation_marks
from clustertune.doctor.recipe_plan import hours
from clustertune.secrets import SECRET, read_env

GATED = ("meta-llama/", "google/gemma", "mistralai/", "CohereLabs/", "bigcode/starcoder")
"""Names of models whose licence must be accepted on the Hub, as they begin."""
MAPPED = (10, 50)
"""How many times slower weights are read through a mapping over NFS or FUSE than in order (safetensors#562)."""
HOME_BYTES = 10e9
"""Above this size a model in a home folder meets quotas."""


@rule("storage-silent", RECIPE)
def silent(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: folders of model, data and run answer

    Why: a hard NFS mount whose server is gone holds every process that looks there, and the job with it
    Fix: fix the mount or its server: clustertune ops storage check says which
    See: https://man7.org/linux/man-pages/man5/nfs.5.html
    """
    for path in context.silent:
        yield Seen(FAIL, f"{path} does not answer", where=str(path))


def _remote(context: RecipeContext) -> bool:
    recipe = context.resolved.recipe.model
    return context.is_real and recipe.path is None


def _sees_cache(context: RecipeContext) -> bool:
    """Whether the cache of the jobs can be seen: from another machine only where a variable names it."""
    return context.is_ours or not context.home_cache


def _is_absent(context: RecipeContext) -> bool:
    """Whether a model of the Hub is not in the cache."""
    there = context.model is not None and context.model.config is not None
    return _remote(context) and not there and not context.silent and not context.staged_problems


@rule("model-absent", RECIPE)
def absent(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the model at its commit is in the cache

    Why: the ranks download it while the GPUs wait, or end where there is no network
    See: https://huggingface.co/docs/huggingface_hub/guides/download
    """
    recipe = context.resolved.recipe.model
    if context.is_real and recipe.path is not None and context.model is None:
        if not context.silent and not context.staged_problems:
            fix = "give the folder of the weights, or leave model.path out"
            status = FAIL if context.is_ours else UNKNOWN
            yield Seen(status, f"model.path {recipe.path} is not a folder on this machine", fix)
    elif _is_absent(context):
        size = weight_bytes(context.resolved.architecture)
        much = f" ({size / 1e9:,.0f} GB)" if size else ""
        text = f"{recipe.name} at {recipe.revision} is not in {context.hub}{much}"
        text += ", and HF_HUB_OFFLINE is set" if context.offline else ""
        status = FAIL if context.offline else WARN if _sees_cache(context) else UNKNOWN
        fetch = f"hf download {recipe.name} --revision {recipe.revision}, on a machine with a network; or clustertune stage"
        yield Seen(status, text, fetch)


@rule("gated-model", RECIPE)
def gated(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: access to a model behind a licence

    Why: the Hub answers 401 or 403, minutes into the job
    Fix: accept the licence on the model's page, then HF_TOKEN in .env, or hf auth login
    See: https://huggingface.co/docs/hub/models-gated
    """
    name = context.resolved.recipe.model.name
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


@rule("model-incomplete", RECIPE)
def incomplete(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: all weight files and the tokenizer are there

    Why: loading ends in the middle, or draws what is missing at random with no more than a warning
    See: https://huggingface.co/docs/safetensors/index
    """
    model = context.model
    if model is None or not context.is_real or model.config is None:
        return
    there, missing, wanted = model.weights
    fetch = (
        f"load it again: hf download {context.resolved.recipe.model.name} --revision {context.resolved.recipe.model.revision}"
    )
    if missing:
        named = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        yield Seen(FAIL, f"missing or empty: {named}", fetch, str(model.path))
    elif model.damaged:
        named = "; ".join(f"{name}: {why}" for name, why in list(model.damaged.items())[:3])
        more = f"; and {len(model.damaged) - 3} more" if len(model.damaged) > 3 else ""
        yield Seen(FAIL, f"{named}{more}", fetch, str(model.path))
    elif wanted is not None and there < wanted:
        text = f"{there:,} bytes of weights, its index says {wanted:,}"
        yield Seen(FAIL, text, fetch, str(model.path))
    if not model.has_tokenizer:
        fix = "take the tokenizer's files of the same commit; those of another one may number tokens in another way"
        yield Seen(FAIL, "no tokenizer (tokenizer.json or tokenizer.model)", fix, str(model.path))


@rule("model-json", RECIPE)
def other_size(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: model.json of the recipe against config.json of the model

    Why: plan, adapter shapes and merge are made for another model
    See: https://huggingface.co/docs/transformers/main_classes/configuration
    """
    model = context.real_model
    if model is None or model.config is None:
        return
    if differ := contradictions(context.resolved.architecture, model.config):
        fix = f"copy these keys from {model.path / 'config.json'} into {context.resolved.name}/model.json"
        yield Seen(FAIL, differ, fix, f"{context.resolved.name}/model.json")


@rule("model-code", RECIPE)
def own_code(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: a model that brings its own code

    Why: code from a model repository is never run here: what transformers does not know itself cannot be loaded
    Fix: use a model whose class transformers has
    See: https://huggingface.co/docs/transformers/custom_models
    """
    model = context.real_model
    named = (model.config or {}).get("auto_map") if model else None
    if model and isinstance(named, dict) and named:
        text = f"config.json names code of its own: {', '.join(sorted(map(str, named)))}"
        yield Seen(WARN, text, where=str(model.path))


def _template(context: RecipeContext) -> str | None:
    """The template that a tokenizer will be given; empty: none; None: there is no tokenizer to look at."""
    model = context.real_model
    return (model.template or context.resolved.chat_template or "") if model and model.has_tokenizer else None


@rule("no-chat-template", RECIPE)
def no_template(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: a chat template for conversations and for the tasks of the evaluation

    Why: training refuses conversations without one; a model scored without one loses most of its points (28 of 100, not 83)
    Fix: put a Jinja file beside the recipe and name it: model.chat_template
    See: https://github.com/EleutherAI/lm-evaluation-harness/issues/3161
    """
    if context.model and _template(context) == "":
        yield Seen(FAIL, "the tokenizer has no chat template", where=str(context.model.path))


@rule("template-without-marks", RECIPE)
def no_marks(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: generation marks in the chat template, for a loss on the assistant's turns

    Why: no token carries a label and nothing is learnt, or the ranks end at their start
    Fix: a template with {% generation %} around the assistant's turns, as model.chat_template; else the ranks refuse it
    See: https://github.com/huggingface/trl/issues/4879
    """
    template = _template(context)
    if context.model and template and context.resolved.train_args.get("assistant_only_loss"):
        # TRL 1.16 puts its own training template in for the ones that it knows letter by letter, and refuses all others.
        text = "train.assistant_only_loss, and the template has no {% generation %}: TRL knows a few such templates by heart"
        yield from [] if has_generation_marks(template) else [Seen(WARN, text, where=str(context.model.path))]


@rule("eos-not-in-template", RECIPE)
def no_eos(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the chat template ends turns with the tokenizer's EOS

    Why: generation goes on past the answer: what was learnt at the end of a turn is not what stops it
    Fix: train.eos_token: the token with which the template ends a turn
    See: https://github.com/huggingface/trl/pull/3299
    """
    template, model = _template(context), context.model
    if not template or model is None or context.resolved.train_args.get("eos_token"):
        return
    eos = model.special("eos_token")
    if eos is not None and eos not in template and not re.search(r"\beos_token\b", template):
        yield Seen(WARN, f"EOS is {show_value(eos)}, which the chat template never writes", where=str(model.path))


@rule("pad-is-eos", RECIPE)
def padding(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: a padding token that is not EOS

    Why: labels at padding are masked, and EOS with them: the model never learns to stop
    See: https://github.com/huggingface/trl/issues/1623
    """
    model = context.model
    if model is None or model.vocabulary is None or not context.is_real:
        return
    eos, own, known = model.special("eos_token"), model.special("pad_token"), model.vocabulary
    given = context.resolved.train_args.get("pad_token")
    others = [name for name in PADS if name in known and name != eos]
    fix = f"train.pad_token={others[0] if others else 'a token of the vocabulary that no text uses'}"
    if given is not None and given not in known:
        yield Seen(FAIL, f"train.pad_token {show_value(given)} is not in the vocabulary", fix)
    elif given is not None and given == eos:
        yield Seen(FAIL, f"train.pad_token {show_value(given)} is also EOS", fix)
    elif given is None and (own is None or own == eos) and not others:
        what = f"is EOS ({show_value(eos)})" if own else "is missing"
        yield Seen(FAIL, f"the tokenizer's pad_token {what}", fix, str(model.path))


@rule("tokenizer-mismatch", RECIPE)
def vocabulary(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: token ids against the rows of the embedding

    Why: an id beyond the last row ends the ranks with an index error or, on a GPU, with an assertion of the device
    Fix: take model and tokenizer of one commit; tokens that were added need a model whose embedding was enlarged
    See: https://huggingface.co/docs/transformers/main_classes/model
    """
    model = context.model
    rows = (model.config or {}).get("vocab_size") if model else None
    if model is None or not isinstance(rows, int) or not model.vocabulary:
        return
    name, last = max(model.vocabulary.items(), key=lambda item: item[1])
    if last >= rows:
        beyond = sum(number >= rows for number in model.vocabulary.values())
        text = (
            f"{beyond} tokens have ids from {rows} on, the last is {show_value(name)} = {last}; the embedding has {rows} rows"
        )
        yield Seen(FAIL, text, where=str(model.path))


def _weights_lie(context: RecipeContext) -> FolderFileSystem | None:
    """The file system of the weights; None where they are not to be looked at."""
    if not context.is_real or context.silent or context.staged_problems:
        return None
    return context.lies_on(_real(context))


def _unmappable(lies: FolderFileSystem) -> bool:
    """Whether mergerfs hands out files that cannot be mapped: its page cache is off, or its options bypass the page cache."""
    options = {option.partition("=")[0]: option.partition("=")[2] for option in lies.options}
    return lies.kind == "fuse.mergerfs" and (options.get("cache.files", "") == "off" or "direct_io" in options)


@rule("weights-on-network", RECIPE)
def mapping(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the disk that the weights are read from

    Why: safetensors maps files: over NFS or FUSE every 4 KiB page is a request, 10 to 50 times slower than reading in order
    Fix: storage.staging in the cluster file: clustertune stage copies the model to a disk of each node first
    See: https://github.com/huggingface/safetensors/issues/562
    """
    size, lies = weight_bytes(context.resolved.architecture), _weights_lie(context)
    if lies is None or _unmappable(lies) or not lies.remote or _copied(context) or not size:
        return
    planned = context.plan.machine.storage_read_bytes_per_s / 1e9 if context.plan else None
    speed = context.cluster.storage.read_gb_s or planned
    text = f"{size / 1e9:,.0f} GB of weights are read from {lies}"
    if speed:
        first = size / 1e9 / speed
        low, high = (hours(times * first) for times in MAPPED)
        text += f": {hours(first)} if read sequentially at {speed:g} GB/s, {low} to {high} through mmap"
    yield Seen(WARN, text)


@rule("pool-without-mmap", RECIPE)
def unmappable(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: a mergerfs pool that lets files be mapped

    Why: with its page cache off a file on it cannot be mapped: loading ends with 'No such device'
    Fix: mount the pool with cache.files=auto-full, partial or full (mergerfs 2.40 and before: not off, no direct_io)
    See: https://github.com/trapexit/mergerfs/issues/674
    """
    lies = _weights_lie(context)
    if lies and _unmappable(lies):
        yield Seen(FAIL, f"{_real(context)} is on {lies}, its page cache is off", where=lies.point)


@rule("cache-in-home", RECIPE)
def home(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: where the Hub's cache lies

    Why: a large model fills the quota of a home folder, and a container without it downloads everything again
    Fix: storage: {caches: DIR} in the cluster file, on shared storage; or export HF_HOME=DIR in the shell that submits
    See: https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
    """
    size = weight_bytes(context.resolved.architecture) or 0
    seen = context.home_cache and context.is_ours and not context.silent and not context.staged_problems
    if seen and _remote(context) and size > HOME_BYTES:
        yield Seen(WARN, f"HF_HOME is not set: {size / 1e9:,.0f} GB go to {context.hub}")


def _copied(context: RecipeContext) -> bool:
    """Each node copies the model to its own disk before its ranks start (clustertune/staging/node.py)."""
    return context.cluster.storage.staging is not None and context.resolved.recipe.slurm.staging is not False


def _real(context: RecipeContext) -> Path:
    """The folder itself, links followed where it is there: caches are often a link to larger disks."""
    path = context.weights_at
    try:
        return path.resolve() if context.is_ours else path
    except (OSError, RuntimeError):
        return path
