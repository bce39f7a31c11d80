"""Rules over a resolved recipe.

Whether a job finds the base model's small files, the dataset and the benchmarks' data, and what they are; what the planner
foresees; its run folder and secrets; and the releases that are installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import operator
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

from clustertune.check.rule import (
    FAIL,
    MACHINE,
    NODES,
    RECIPE,
    REFUSED,
    RULE_ERRORS,
    SCRIPT,
    UNKNOWN,
    WARN,
    Check,
    Finding,
    Rule,
    Rules,
    Seen,
    checks,
    render_page,
    rule_of,
    run,
)
from clustertune.checkpoint import store
from clustertune.cluster.hardware import read_hardware
from clustertune.doctor.recipe_context import RecipeContext
from clustertune.errors import UserError
from clustertune.host.mounts import lies_elsewhere, mount_of
from clustertune.host.system import GIB
from clustertune.launch import serving, shape
from clustertune.plan.explanation import evaluation_memory
from clustertune.plan.predict import Plan
from clustertune.plan.schedule import START_S, TOKENS_PER_CPU_S, tokens_to_prepare
from clustertune.recipe.architecture import contradictions
from clustertune.recipe.eval_tasks import with_rows
from clustertune.recipe.findings import show_value
from clustertune.recipe.library_facts import model_facts
from clustertune.recipe.parameters import weight_bytes
from clustertune.resolve.resolved import how_to_load, is_there
from clustertune.secrets import SECRET
from clustertune.staging import needs
from clustertune.text import listed

RULES = Rules(RECIPE, __file__)

# --- what a job reads -----------------------------------------------------------------------------------------------------


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
        datasets = data_sets(names)
    except UserError:  # a name that lm-eval does not know: eval says so, and the recipe's own check
        return
    for name in sorted(set(datasets.values())):
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
    size, missing, expected = model.weights
    damaged = [f"{name}: {why}" for name, why in model.damaged.items()] if not missing else []
    fault = listed(damaged, 3, "; ", "; and")
    if missing:
        fault = f"missing or empty: {listed(missing, 4)}"
    elif not damaged and expected is not None and size < expected:
        fault = f"{size:,} bytes of weights, its index says {expected:,}"
    if fault:
        recipe = context.recipe.model
        yield Seen(FAIL, fault, f"load it again: hf download {recipe.name} --revision {recipe.revision}", str(model.path))
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
    return (context.resolved.chat_template or model.template or "") if model and model.has_tokenizer else None


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


def recipe_findings(context: RecipeContext) -> list[Finding]:
    """What the rules of recipe, stack, data and run folder find. Reads headers and small files only; imports no torch."""
    return list(run(checks(RECIPE), context, context.resolved.name))


def all_rules() -> tuple[Rule, ...]:
    """Every rule of the doctor; imports what the recipe's rules need."""
    return tuple(one.rule for one in checks(MACHINE, NODES, RULE_ERRORS, RECIPE, REFUSED, SCRIPT))


@RULES("recipe-refused", REFUSED)
def recipe_refused(error: UserError) -> Iterator[Seen]:
    """A recipe that ``resolve`` refuses: keys of another release, batches that do not divide."""
    for problem in error.problems:
        where = ": ".join(part for part in (problem.file, problem.key) if part)
        yield Seen(FAIL, problem.message, problem.fix or "", where)


@RULES("recipe-warning")
def recipe_warning(context: RecipeContext) -> Iterator[Seen]:
    """Warnings from resolving the recipe."""
    for warning in context.resolved.warnings:
        if not warning.startswith("data."):  # a missing input has a rule of its own
            yield Seen(WARN, warning)


def render() -> str:
    """The text of docs/doctor.md, which lists the rules. Imports what the recipe's rules need."""
    sections = {
        "Each machine": (MACHINE,),
        "Between the nodes of a job": (NODES, RULE_ERRORS),
        "Recipe, stack, data and runs": (RECIPE, REFUSED),
        "Batch scripts": (SCRIPT,),
    }
    rules = [(title, [one.rule for one in checks(*kinds)]) for title, kinds in sections.items()]
    return render_page(Path(__file__).with_name("page.md.jinja"), sections=rules)


# --- what the planner foresees, and settings that run and are wrong, or slow -------------------------------------------

TIGHT = 0.95
"""Share of a GPU's memory above which a plan is called tight: its activations are predicted within a few per cent
(docs/results/planner.md)."""
STEP_FACTOR, MARGIN_SECONDS = 1.5, 30.0
"""The step that a signal meets may be slower than planned; seconds for the way of the signal to every rank, and for its end."""
LOST_HOURS = 1.0
"""Work between two saves, hours, that is called much to lose."""
SAVING, CHEAP = 0.05, 0.01
"""Shares of the time that saving may take: above the first it is called often, at the second the next cadence is proposed."""


def hours(seconds: float) -> str:
    """Seconds as people say them."""
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


@RULES("not-planned")
def not_planned(context: RecipeContext) -> Iterator[Seen]:
    """Whether the planner can say anything."""
    if context.is_real and context.plan is None:
        yield Seen(UNKNOWN, context.no_plan)


@RULES("shape-refused")
def shape_refused(context: RecipeContext) -> Iterator[Seen]:
    """Nodes, GPUs, time and memory that the job asks for."""
    # But for the memory of a GPU where the plan says more of it.
    memory = shape.fit_problems(context.resolved, context.cluster) if context.plan is None else []
    for problem in [*shape.size_problems(context.resolved, context.cluster), *memory]:
        yield Seen(FAIL, f"{problem.key}: {problem.message}", problem.fix or "another --cluster")


@RULES("gpu-memory")
def gpu_memory(context: RecipeContext) -> Iterator[Seen]:
    """Predicted memory of a GPU."""
    if plan := context.real_plan:
        room = plan.machine.usable_bytes
        memory = f"{plan.needed / GIB:.1f} GiB at the {plan.peak.name}, a {plan.machine.gpu} has {room / GIB:.1f} GiB"
        fix = evaluation_memory(plan) or f"clustertune plan {context.resolved.name} --advise names what fits"
        if plan.needed > TIGHT * room:
            over = plan.needed > room
            yield Seen(FAIL if over else WARN, f"{'' if over else 'tight: '}predicted {memory}", fix)


@RULES("host-memory")
def host_memory(context: RecipeContext) -> Iterator[Seen]:
    """Predicted RAM of the fullest node."""
    plan = context.real_plan
    if plan is not None and plan.host_bytes > plan.machine.host_bytes:
        parts = ", ".join(f"{term.name} {term.value / GIB:,.0f} GiB" for term in plan.host)
        need, room = f"predicted {plan.host_bytes / GIB:,.0f} GiB of RAM ({parts})", f"{plan.machine.host_bytes / GIB:,.0f} GiB"
        yield Seen(FAIL, f"{need}, a node has {room}", how_to_load(context.resolved.distribution)[1])


@RULES("load-timeout")
def load_timeout(context: RecipeContext) -> Iterator[Seen]:
    """Loading against the time-out of collectives."""
    plan, limit = context.real_plan, float(context.args["ddp_timeout"])
    # Ranks that read their own rows end together: none of them waits for one that loads.
    if plan is None or context.resolved.world_size == 1 or context.resolved.distribution.reads_parts:
        return
    seconds = plan.schedule.start.value - START_S
    if seconds > limit / 2:
        size, speed = 2.0 * plan.shape.counted.total / 1e9, plan.machine.storage_read_bytes_per_s / 1e9
        text = f"{size:,.0f} GB at {speed:g} GB/s ({plan.machine.storage_note}) load in {hours(seconds)}"
        fix = f"train.ddp_timeout={math.ceil(3 * seconds / 600) * 600}, or copy the model to the nodes first (storage.staging)"
        yield Seen(FAIL if seconds > limit else WARN, f"{text}, ranks wait {hours(limit)}", fix)


@RULES("prepare-time")
def prepare_time(context: RecipeContext) -> Iterator[Seen]:
    """Tokenising against the time limit of its job."""
    tokens = tokens_to_prepare(context.resolved) if context.is_real else None
    if tokens is not None and context.cluster.slurm is not None:
        job = shape.stage_shapes(context.resolved, context.cluster)["prepare"]
        seconds, limit = tokens / TOKENS_PER_CPU_S / job.cpus_per_node, 60 * job.minutes
        if seconds > limit:
            text = f"about {tokens:,.0f} tokens take {hours(seconds)} on {job.cpus_per_node} cores"
            yield Seen(WARN, f"{text}, the job of prepare may run {hours(limit)}")


def _cadence(context: RecipeContext) -> tuple[int, float, float] | None:
    """Steps between two checkpoints, seconds of a step, and those of a stop to save; None where nothing is saved by steps."""
    plan = context.real_plan
    if plan is None or plan.schedule.save_steps is None:
        return None
    every, steps = plan.schedule.save_steps, plan.schedule.steps
    return min(every, steps or every), plan.step.seconds, plan.schedule.save.value


@RULES("checkpoint-interval-too-long")
def checkpoint_interval_too_long(context: RecipeContext) -> Iterator[Seen]:
    """Hours of work between two checkpoints."""
    every, step, save = _cadence(context) or (0, 1.0, 0.0)
    better = max(1, min(every - 1, int(LOST_HOURS * 3600 / 2 / step)), math.ceil(save / CHEAP / step))
    if every * step > LOST_HOURS * 3600 and better < every:
        share = 100 * save / (better * step + save)
        lost = f"a failure loses up to {hours(every * step)} of {context.resolved.world_size} GPUs"
        fix = f"train.save_steps={better}: up to {hours(better * step)} then, and saving takes {share:.1f} % of the time"
        yield Seen(WARN, f"a checkpoint every {every} steps of {step:.0f} s: {lost}", fix)


@RULES("checkpoint-interval-too-short")
def checkpoint_interval_too_short(context: RecipeContext) -> Iterator[Seen]:
    """Time that training stands still for saves."""
    every, step, save = _cadence(context) or (1, 1.0, 0.0)
    share = save / (every * step + save)
    if share > SAVING:
        text = f"a checkpoint every {every} steps of {step:.0f} s, {save:.0f} s each: {100 * share:.0f} % of the time is saving"
        assert context.plan is not None
        around = context.plan.schedule
        better = max(every + 1, math.ceil(around.checkpoint.value / step), math.ceil(around.copy_seconds / CHEAP / step))
        key = "train.save_steps" if context.recipe.save is None else "save.every"
        yield Seen(WARN, text, f"{key}={better} or so, or save.every=auto")


@RULES("signal-margin")
def signal_margin(context: RecipeContext) -> Iterator[Seen]:
    """The signal margin before the time limit, against the time of a step and a save."""
    if not context.is_real or context.cluster.slurm is None:
        return
    seconds = context.resolved.recipe.slurm.signal_seconds
    for problem in shape.signal_problems(seconds, context.minutes, file=context.where):
        yield Seen(FAIL, f"{problem.key}: {problem.message}", problem.fix or "a longer slurm.time")
    if context.plan is None:
        return
    step, save = context.plan.step.seconds, context.plan.schedule.checkpoint.value
    need = STEP_FACTOR * step + save + MARGIN_SECONDS
    if need > seconds:
        text = f"the job is signalled {seconds} s before its end; a predicted step of {step:.0f} s and"
        fix = f"slurm.signal_seconds={math.ceil(need)}"
        yield Seen(WARN, f"{text} a save of {save:.0f} s need {math.ceil(need)} s", fix)


@RULES("time-limit")
def time_limit(context: RecipeContext) -> Iterator[Seen]:
    """The time limit against the predicted hours."""
    plan = context.real_plan
    if plan is None or plan.hours is None or not context.minutes or context.cluster.slurm is None:
        return
    allowed = context.minutes / 60
    if plan.hours > allowed:
        text = f"predicted {plan.hours:.1f} h ({plan.hours * plan.low:.1f} to {plan.hours * plan.high:.1f})"
        longer, turns = math.ceil(plan.hours * plan.high), math.ceil(plan.hours / allowed)
        fix = f"slurm.time of {longer} h, or let it continue {turns} times from its checkpoints"
        yield Seen(WARN, f"{text}, slurm.time is {hours(60 * context.minutes)}", fix)


@RULES("eval-gpus")
def eval_gpus(context: RecipeContext) -> Iterator[Seen]:
    """GPUs, of one node or by vLLM of several, hold the merged model for its evaluation."""
    if note := serving.evaluation(context.resolved, context.cluster).note:
        yield Seen(WARN, note)


# --- settings -------------------------------------------------------------------------------------------------------------

LORA_RATES, FULL_RATES = (1e-5, 1e-3), (1e-7, 1e-4)
"""Learning rates outside of which a fine-tuning rarely learns: TRL's guide has 2e-5 for all parameters and ten times
that for LoRA (https://huggingface.co/docs/trl/peft_integration); a factor of 20 to 50 around it."""


@RULES("nothing-saved")
def nothing_saved(context: RecipeContext) -> Iterator[Seen]:
    """Checkpoints are written."""
    strategy = str(context.args["save_strategy"])
    if strategy in ("no", "best"):
        yield Seen(FAIL, f"train.save_strategy is {strategy}: no checkpoint of the last step is certain")


@RULES("learning-rate")
def learning_rate(context: RecipeContext) -> Iterator[Seen]:
    """The size of the learning rate."""
    rate, lora = context.args["learning_rate"], context.resolved.lora is not None
    low, high = LORA_RATES if lora else FULL_RATES
    if context.is_real and isinstance(rate, int | float) and not low <= rate <= high:
        fix = f"train.learning_rate between {low:g} and {high:g}, unless it was tried"
        yield Seen(WARN, f"train.learning_rate {rate:g} for {'a LoRA' if lora else 'training all parameters'}", fix)


@RULES("loss-on-all-tokens")
def loss_on_all_tokens(context: RecipeContext) -> Iterator[Seen]:
    """Which tokens of a conversation carry a loss."""
    stated = context.resolved.origins.get("train.assistant_only_loss", "default") != "default"
    chats = ("messages", "sharegpt", "oasst-tree", "lima", "alpaca")
    formats = dict.fromkeys(str(part.format) for part in context.recipe.data.parts if part.format in chats)
    if context.is_real and formats and not context.args["assistant_only_loss"] and not stated:
        what = f"{' and '.join(formats)} conversations"
        yield Seen(WARN, f"{what}, and train.assistant_only_loss is not given: all tokens count")


def _lacks_bf16(context: RecipeContext) -> bool:
    gpu = read_hardware().gpus.get(context.cluster.compute.gpu or "")
    return gpu is not None and gpu.bf16_tflops is None


@RULES("no-bfloat16")
def no_bfloat16(context: RecipeContext) -> Iterator[Seen]:
    """No bfloat16 on GPUs without it."""
    compute, mixed = context.cluster.compute, context.resolved.distribution.mixed_precision
    if compute.gpus and mixed == "bf16" and _lacks_bf16(context):
        yield Seen(FAIL, f"train.bf16 on {compute.gpu}, which has no bfloat16")


@RULES("no-mixed-precision")
def no_mixed_precision(context: RecipeContext) -> Iterator[Seen]:
    """Bfloat16 on GPUs that have it."""
    mixed = context.resolved.distribution.mixed_precision
    if context.is_real and context.cluster.compute.gpus and mixed == "no" and not _lacks_bf16(context):
        yield Seen(WARN, "train.bf16 is false")


@RULES("packed-state")
def packed_state(context: RecipeContext) -> Iterator[Seen]:
    """Packing with layers that carry a state."""
    kinds = context.resolved.architecture.get("layer_types")
    listed = {str(kind) for kind in kinds} if isinstance(kinds, list) else set()
    states = sorted(kind for kind in listed if "attention" not in kind or "linear" in kind)
    model = str(context.resolved.architecture.get("model_type"))
    if context.args["packing"] and (states or model_facts(model)["carries_state"]):
        text = f"train.packing, and {model} has layers with a state" + (f" ({', '.join(states)})" if states else "")
        yield Seen(WARN, text)


# --- the run folder and the secrets of a run ---------------------------------------------------------------------------


@RULES("env-in-git")
def env_in_git(context: RecipeContext) -> Iterator[Seen]:
    """Git does not have the .env file."""
    path = context.env_file
    if path.parent in context.silent or not path.exists():
        return
    command = ["git", "-C", str(path.parent), "ls-files", "--error-unmatch", "--", path.name]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if subprocess.run(command, capture_output=True, timeout=5, check=False).returncode == 0:
            fix = f"git rm --cached {path.name}, name it in .gitignore, and renew every token that stood in it"
            yield Seen(FAIL, "git tracks it", fix, str(path))


@RULES("token-in-environment")
def token_in_environment(context: RecipeContext) -> Iterator[Seen]:
    """Tokens in the shell's environment."""
    named = [name for name in SECRET if context.environment.get(name)]
    if named and context.cluster.slurm is not None:
        fix = f"unset {' '.join(named)}, and keep them in {context.env_file} with mode 0600"
        yield Seen(WARN, f"{', '.join(named)} set in this shell", fix, context.resolved.name)


SPARE = 1.1
"""Filling a file system to the last byte slows it down, and others write there too."""


def existing(path: Path) -> Path:
    """The nearest folder above that is there."""
    return next((folder for folder in (path, *path.parents) if is_there(folder)), Path(path.anchor or "."))


def bytes_to_write(plan: Plan, run_dir: Path) -> dict[str, float]:
    """Bytes that the run has yet to write there, by what they are.

    Retention deletes the oldest checkpoint after the newest is whole: limit + 1 of them are there at once.
    """
    schedule = plan.schedule
    limit = plan.resolved.train_args["save_total_limit"]
    most = schedule.checkpoints if schedule.checkpoints is not None else (int(limit) if limit else 1)
    count = min(int(limit) + 1, most) if limit else most
    saved = len(store.list_checkpoints(run_dir / "checkpoints")) if is_there(run_dir / "checkpoints") else 0
    sizes = {f"{max(0, count - saved)} checkpoints": max(0, count - saved) * schedule.checkpoint_bytes}
    for name, folder in (("adapter", "adapter"), ("merged model", "merged")):
        if not is_there(run_dir / folder / "MANIFEST.json"):
            sizes[name] = schedule.disk.get(name, 0.0)
    return {name: size for name, size in sizes.items() if size}


@RULES("disk-space")
def disk_space(context: RecipeContext) -> Iterator[Seen]:
    """Room for checkpoints, adapter and merged model."""
    # A path of the cluster's machines: on another one the disk that is here in its place is another one.
    elsewhere = context.run_dir is not None and not context.is_ours and not is_there(context.run_dir.parent)
    if context.plan is None or context.run_dir is None or context.silent or elsewhere:
        return
    parts = bytes_to_write(context.plan, context.run_dir)
    need, free = sum(parts.values()), _free(context, existing(context.run_dir))
    if free is not None and SPARE * need > free:
        sizes = ", ".join(f"{name} {size / 1e9:,.1f} GB" for name, size in parts.items())
        text = f"{need / 1e9:,.1f} GB are to be written ({sizes}), {free / 1e9:,.1f} GB are free"
        yield Seen(FAIL if need > free else WARN, text if need > free else f"tight: {text}", where=str(context.run_dir))


def _free(context: RecipeContext, path: Path) -> float | None:
    """Bytes that a user may still write where ``path`` lies: what was collected of its mount, else what the system says."""
    known = [one for one in (context.facts.mounts if context.facts else ()) if one.free_bytes is not None and one.point != "/"]
    if mount := mount_of(str(path), known):
        return float(mount.free_bytes or 0)
    with contextlib.suppress(OSError):
        return float(shutil.disk_usage(path).free)
    return None


# --- what is installed: releases with known faults (releases.yaml), and what differs from the pins ---------------------

COMPARE = {"<": operator.lt, "<=": operator.le, "==": operator.eq, ">": operator.gt, ">=": operator.ge}
FAULTS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("releases.yaml").read_text(encoding="utf-8"))


def holds(version: str, ranges: str) -> bool:
    """Whether a version lies in ``>=1.2,<1.4``; False for what is not a version.

    Local parts (``+cpu``, ``+cu130``) do not count. A release candidate of 1.4 lies below 1.4, which ``SpecifierSet`` denies
    (PEP 440): it has the faults of the releases before it.
    """
    try:
        installed = Version(Version(version).public)
    except InvalidVersion:
        return False
    parts = [re.fullmatch(r"\s*(<=|>=|==|<|>)\s*(\S+)\s*", part) for part in ranges.split(",")]
    return all(part is not None and COMPARE[part[1]](installed, Version(part[2])) for part in parts)


def _init(context: RecipeContext, key: str, default: str) -> str:
    return str((context.args["model_init_kwargs"] or {}).get(key, default))


def _loads_all(c: RecipeContext) -> bool:
    """Whether all ranks of a node together hold more than the node, if each makes the whole model."""
    need = (weight_bytes(c.resolved.architecture) or 0) * c.recipe.slurm.gpus_per_node
    return c.is_real and c.resolved.distribution.efficient_loading and need > c.cluster.compute.memory_gb * GIB


CONDITIONS: dict[str, Callable[[RecipeContext], bool]] = {
    "real": lambda c: c.is_real,
    "offline": lambda c: c.offline,
    "lora": lambda c: c.resolved.lora is not None,
    "full": lambda c: c.resolved.lora is None,
    "fsdp2": lambda c: c.resolved.distribution.kind == "FSDP2",
    "full_state_dict": lambda c: c.resolved.distribution.state_dict == "FULL_STATE_DICT",
    "mixed": lambda c: c.resolved.distribution.mixed_precision != "no",
    "half": lambda c: _init(c, "dtype", "") in ("bfloat16", "float16"),
    "loads_all": _loads_all,
    "packed_by_mask": lambda c: bool(c.args["packing"]) and "flash" not in _init(c, "attn_implementation", "sdpa"),
    "accumulates": lambda c: int(c.args["gradient_accumulation_steps"]) > 1,
    "gpus": lambda c: c.cluster.compute.gpus > 0 and c.resolved.world_size > 1,
    "arm": lambda c: c.arch == "aarch64",
    "punkt": lambda c: "ifeval" in c.recipe.eval.tasks,
}
"""What ``when`` of a row may name."""


def _made(name: str, row: Mapping[str, Any]) -> Check:
    packages = ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if row["package"] == "nccl" else (row["package"],)

    def look(context: RecipeContext) -> Iterator[Seen]:
        for package in packages:
            version = context.version(package) or ""
            status = next((status for ranges, status in row["versions"].items() if holds(version, ranges)), "")
            if status and all(CONDITIONS[word](context) for word in row.get("when", "").split()):
                yield Seen(status, f"{package} {version}: {row['found']}", where=context.versions_of)

    title = f"{row['package']} {' or '.join(row['versions'])}"
    return Check(rule_of(name, {**row, "title": title}), look, RECIPE)


@RULES("stack-unseen")
def stack_unseen(context: RecipeContext) -> Iterator[Seen]:
    """Whether the ranks' packages can be seen from here."""
    if not context.versions:
        yield Seen(UNKNOWN, f"the versions are those of {context.versions_of}", where=context.resolved.name)


RULES += [_made(name, row) for name, row in FAULTS.items()]


@RULES("versions-differ")
def versions_differ(context: RecipeContext) -> Iterator[Seen]:
    """Installed versions against containers/versions.env."""
    # The reference image has an older stack, whole: it is held against its own pins.
    differ = min((_differences(context, pins) for pins in (context.pins, context.reference_pins) if pins), key=len, default=[])
    if differ:
        yield Seen(WARN, ", ".join(differ), where=context.versions_of)


def _differences(context: RecipeContext, pins: Mapping[str, str]) -> list[str]:
    seen = {name: context.version(name) for name in pins}
    # torch 2.13.0+cpu is 2.13.0, built for another device.
    others = {name: version for name, version in seen.items() if version and version.partition("+")[0] != pins[name]}
    return [f"{name} {version} (pinned {pins[name]})" for name, version in sorted(others.items())]
