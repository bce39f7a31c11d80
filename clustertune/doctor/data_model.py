"""The base model's small files: tokenizer, chat template, special tokens, sizes of the weights, and the disk they lie on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from clustertune.check.rule import FAIL, UNKNOWN, WARN, Finding, Rule, finding
from clustertune.config.native_rules import show_value
from clustertune.config.parameters import weight_bytes
from clustertune.data.tokenizer import PADS
from clustertune.doctor.recipe_context import Context, Lies
from clustertune.doctor.recipe_model import has_generation_marks
from clustertune.doctor.recipe_plan import hours
from clustertune.secrets import SECRET, read_env

GATED = ("meta-llama/", "google/gemma", "mistralai/", "CohereLabs/", "bigcode/starcoder")
"""Names of models whose licence must be accepted on the Hub, as they begin."""
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
"""What adapter shapes, merge and plan follow from."""
MAPPED = (10, 50)
"""How many times slower weights are read through a mapping over NFS or FUSE than in order (safetensors#562)."""
HOME_BYTES = 10e9
"""Above this size a model in a home folder meets quotas."""

SILENT = Rule(
    "storage-silent",
    "folders of model, data and run answer",
    "a hard NFS mount whose server is gone holds every process that looks there, and the job with it",
    "https://man7.org/linux/man-pages/man5/nfs.5.html",
)
ABSENT = Rule(
    "model-absent",
    "the model at its commit is in the cache",
    "the ranks download it while the GPUs wait, or end where there is no network",
    "https://huggingface.co/docs/huggingface_hub/guides/download",
)
INCOMPLETE = Rule(
    "model-incomplete",
    "all weight files and the tokenizer are there",
    "loading ends in the middle, or draws what is missing at random with no more than a warning",
    "https://huggingface.co/docs/safetensors/index",
)
NO_TOKEN = Rule(
    "gated-model",
    "access to a model behind a licence",
    "the Hub answers 401 or 403, minutes into the job",
    "https://huggingface.co/docs/hub/models-gated",
)
OTHER_SIZE = Rule(
    "model-json",
    "model.json of the recipe against config.json of the model",
    "plan, adapter shapes and merge are made for another model",
    "https://huggingface.co/docs/transformers/main_classes/configuration",
)
OWN_CODE = Rule(
    "model-code",
    "a model that brings its own code",
    "code from a model repository is never run here: what transformers does not know itself cannot be loaded",
    "https://huggingface.co/docs/transformers/custom_models",
)
TEMPLATE = Rule(
    "no-chat-template",
    "a chat template for conversations and for IFEval",
    "training refuses conversations without one; a model scored without one loses most of its points (28 against 83)",
    "https://github.com/EleutherAI/lm-evaluation-harness/issues/3161",
)
MARKS = Rule(
    "template-without-marks",
    "generation marks in the chat template, for a loss on the assistant's words",
    "no token carries a label and nothing is learnt, or the ranks end at their start",
    "https://github.com/huggingface/trl/issues/4879",
)
PADDING = Rule(
    "pad-is-eos",
    "a padding token that is not EOS",
    "labels at padding are masked, and EOS with them: the model never learns to stop",
    "https://github.com/huggingface/trl/issues/1623",
)
STOP = Rule(
    "eos-not-in-template",
    "the chat template ends turns with the tokenizer's EOS",
    "generation goes on past the answer: what was learnt at the end of a turn is not what stops it",
    "https://github.com/huggingface/trl/pull/3299",
)
VOCABULARY = Rule(
    "tokenizer-mismatch",
    "token ids against the rows of the embedding",
    "an id beyond the last row ends the ranks with an index error or, on a GPU, with an assertion of the device",
    "https://huggingface.co/docs/transformers/main_classes/model",
)
MAPPING = Rule(
    "weights-on-network",
    "the disk that the weights are read from",
    "safetensors maps files: over NFS or FUSE a request for each page of 4 KiB, 10 to 50 times slower than in order",
    "https://github.com/huggingface/safetensors/issues/562",
)
UNMAPPABLE = Rule(
    "pool-without-mmap",
    "a mergerfs pool that lets files be mapped",
    "with its page cache off a file on it cannot be mapped: loading ends with 'No such device'",
    "https://github.com/trapexit/mergerfs/issues/674",
)
HOME = Rule(
    "cache-in-home",
    "where the Hub's cache lies",
    "a large model fills the quota of a home folder, and a container without it downloads everything again",
    "https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables",
)

RULES = (
    SILENT, ABSENT, INCOMPLETE, NO_TOKEN, OTHER_SIZE, OWN_CODE, TEMPLATE, MARKS, PADDING, STOP, VOCABULARY, MAPPING, UNMAPPABLE,
    HOME,
)  # fmt: skip


def check(context: Context) -> Iterator[Finding]:
    """Everything about the base model."""
    for look in LOOKS:
        yield from look(context)


def _silent(context: Context) -> Iterator[Finding]:
    for path in context.silent:
        fix = "fix the mount or its server: clustertune ops storage check says which"
        yield finding(SILENT, FAIL, f"{path} does not answer", fix, where=str(path))


def _remote(context: Context) -> bool:
    recipe = context.resolved.recipe.model
    return context.is_real and recipe.path is None


def _absent(context: Context) -> Iterator[Finding]:
    recipe, model = context.resolved.recipe.model, context.model
    if context.silent or context.staged_problems:
        return
    if context.is_real and recipe.path is not None and model is None:
        fix = "give the folder of the weights, or leave model.path out"
        status = FAIL if context.is_ours else UNKNOWN
        yield finding(ABSENT, status, f"model.path {recipe.path} is no folder on this machine", fix, where=context.name)
    if not _remote(context) or (model is not None and model.config is not None):
        return
    size = weight_bytes(context.resolved.architecture)
    much = f" ({size / 1e9:,.0f} GB)" if size else ""
    fetch = f"hf download {recipe.name} --revision {recipe.revision}, where the network is; or clustertune stage"
    text = f"{recipe.name} at {recipe.revision} is not in {context.hub}{much}"
    if context.offline:
        yield finding(ABSENT, FAIL, f"{text}, and HF_HUB_OFFLINE is set", fetch, where=context.name)
        return
    # From a machine of none of the cluster's the cache of its jobs cannot be seen, unless a variable names it.
    seen = context.is_ours or not context.home_cache
    yield finding(ABSENT, WARN if seen else UNKNOWN, text, fetch, where=context.name)
    if seen and recipe.name.startswith(GATED) and not _has_token(context):
        fix = "accept the licence on the model's page, then HF_TOKEN in .env, or hf auth login"
        yield finding(
            NO_TOKEN, WARN, f"{recipe.name} may ask for an accepted licence, and no token is at hand", fix, where=context.name
        )


def _has_token(context: Context) -> bool:
    """Whether a token of the Hub is at hand; its value is looked at by nobody."""
    if context.environment.get(SECRET[0]) or context.environment.get("HUGGING_FACE_HUB_TOKEN"):
        return True
    try:
        return context.hub_token.is_file() or SECRET[0] in read_env(context.env_file, lambda _: None)
    except Exception:  # what is wrong with the file has a rule of its own
        return False


def _incomplete(context: Context) -> Iterator[Finding]:
    model = context.model
    if model is None or not context.is_real or model.config is None:
        return
    there, missing, wanted = model.weights
    fetch = (
        f"load it again: hf download {context.resolved.recipe.model.name} --revision {context.resolved.recipe.model.revision}"
    )
    if missing:
        named = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        yield finding(INCOMPLETE, FAIL, f"missing or empty: {named}", fetch, where=str(model.path))
    elif model.damaged:
        named = "; ".join(f"{name}: {why}" for name, why in list(model.damaged.items())[:3])
        more = f"; and {len(model.damaged) - 3} more" if len(model.damaged) > 3 else ""
        yield finding(INCOMPLETE, FAIL, f"{named}{more}", fetch, where=str(model.path))
    elif wanted is not None and there < wanted:
        text = f"{there:,} bytes of weights, its index says {wanted:,}"
        yield finding(INCOMPLETE, FAIL, text, fetch, where=str(model.path))
    if not model.has_tokenizer:
        fix = "take the tokenizer's files of the same commit; those of another one may number tokens in another way"
        yield finding(INCOMPLETE, FAIL, "no tokenizer (tokenizer.json or tokenizer.model)", fix, where=str(model.path))


def _config(context: Context) -> Iterator[Finding]:
    model = context.model
    if model is None or model.config is None or not context.is_real:
        return
    ours, theirs = context.resolved.architecture, model.config
    differ = [key for key in SIZES if key in ours and key in theirs and ours[key] != theirs[key]]
    if differ:
        words = ", ".join(f"{key} {ours[key]} (config.json: {theirs[key]})" for key in differ)
        fix = f"copy these keys from {model.path / 'config.json'} into {context.resolved.name}/model.json"
        yield finding(OTHER_SIZE, FAIL, words, fix, where=f"{context.resolved.name}/model.json")
    if isinstance(theirs.get("auto_map"), dict) and theirs["auto_map"]:
        text = f"config.json names code of its own: {', '.join(sorted(map(str, theirs['auto_map'])))}"
        yield finding(OWN_CODE, WARN, text, "use a model whose class transformers has", where=str(model.path))


def _template(context: Context) -> Iterator[Finding]:
    model, own = context.model, context.resolved.chat_template
    if model is None or not model.has_tokenizer or not context.is_real:
        return
    template = model.template or own
    if template is None:
        fix = "put a Jinja file beside the recipe and name it: model.chat_template"
        yield finding(TEMPLATE, FAIL, "the tokenizer has no chat template", fix, where=str(model.path))
        return
    if context.resolved.train_args.get("assistant_only_loss") and not has_generation_marks(template):
        # TRL 1.16 puts its own training template in for the ones that it knows letter by letter, and refuses all others.
        text = "train.assistant_only_loss, and the template has no {% generation %}: TRL knows a few such templates by heart"
        fix = "a template with {% generation %} around the assistant's words, as model.chat_template; else the ranks refuse it"
        yield finding(MARKS, WARN, text, fix, where=str(model.path))
    eos = model.special("eos_token")
    if eos is not None and eos not in template and not re.search(r"\beos_token\b", template):
        text = f"EOS is {show_value(eos)}, which the chat template never writes"
        fix = "train.eos_token: the token with which the template ends a turn"
        if not context.resolved.train_args.get("eos_token"):
            yield finding(STOP, WARN, text, fix, where=str(model.path))


def _padding(context: Context) -> Iterator[Finding]:
    model = context.model
    if model is None or model.vocabulary is None or not context.is_real:
        return
    eos, own, known = model.special("eos_token"), model.special("pad_token"), model.vocabulary
    given = context.resolved.train_args.get("pad_token")
    others = [name for name in PADS if name in known and name != eos]
    fix = f"train.pad_token={others[0] if others else 'a token of the vocabulary that no text uses'}"
    if given is not None and given not in known:
        yield finding(PADDING, FAIL, f"train.pad_token {show_value(given)} is not in the vocabulary", fix, where=context.name)
    elif given is not None and given == eos:
        yield finding(PADDING, FAIL, f"train.pad_token {show_value(given)} is also EOS", fix, where=context.name)
    elif given is None and (own is None or own == eos) and not others:
        what = f"is EOS ({show_value(eos)})" if own else "is missing"
        yield finding(PADDING, FAIL, f"the tokenizer's pad_token {what}", fix, where=str(model.path))


def _vocabulary(context: Context) -> Iterator[Finding]:
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
        fix = "take model and tokenizer of one commit; tokens that were added need a model whose embedding was enlarged"
        yield finding(VOCABULARY, FAIL, text, fix, where=str(model.path))


def _disk(context: Context) -> Iterator[Finding]:
    if not context.is_real or context.silent or context.staged_problems:
        return
    size, lies = weight_bytes(context.resolved.architecture), context.lies_on(_real(context))
    if lies.kind == "fuse.mergerfs" and _cannot_map(lies):
        fix = "mount the pool with cache.files=auto-full, partial or full (mergerfs 2.40 and before: not off, no direct_io)"
        yield finding(UNMAPPABLE, FAIL, f"{_real(context)} lies on {lies}, its page cache is off", fix, where=str(lies.point))
    elif lies.remote and not _copied(context) and size:
        speed = context.cluster.storage.read_gb_s or (
            context.plan.machine.storage_read_bytes_per_s / 1e9 if context.plan else None
        )
        words = f"{size / 1e9:,.0f} GB of weights are read from {lies}"
        if speed:
            first = size / 1e9 / speed
            low, high = (hours(times * first) for times in MAPPED)
            words += f": {hours(first)} in order at {speed:g} GB/s, {low} to {high} if mapped"
        fix = "storage.staging in the cluster file: clustertune stage copies the model to a disk of each node first"
        yield finding(MAPPING, WARN, words, fix, where=context.name)
    if context.home_cache and _remote(context) and context.is_ours and (size or 0) > HOME_BYTES:
        fix = "storage: {caches: DIR} in the cluster file, on shared storage; or export HF_HOME=DIR in the shell that submits"
        yield finding(
            HOME, WARN, f"HF_HOME is not set: {(size or 0) / 1e9:,.0f} GB go to {context.hub}", fix, where=context.name
        )


def _copied(context: Context) -> bool:
    """Each node copies the model to its own disk before its ranks start (clustertune/staging/node.py)."""
    return context.cluster.storage.staging is not None and context.resolved.recipe.slurm.staging is not False


def _real(context: Context) -> Path:
    """The folder itself, links followed where it is there: caches are often a link to larger disks."""
    path = context.weights_at
    try:
        return path.resolve() if context.is_ours else path
    except (OSError, RuntimeError):
        return path


def _cannot_map(lies: Lies) -> bool:
    """Whether mergerfs hands out files that cannot be mapped: its page cache is off, or it is told to go around it."""
    options = {option.partition("=")[0]: option.partition("=")[2] for option in lies.options}
    return options.get("cache.files", "") == "off" or "direct_io" in options


LOOKS = (_silent, _absent, _incomplete, _config, _template, _padding, _vocabulary, _disk)
