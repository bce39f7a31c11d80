"""What is wrong with a recipe's sections, each alone and its keys with one another; and what a distribution does not carry of
it, with what carries it: refused before the queue."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from clustertune.host.credentials import holds_secret
from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import native_rules, quantization
from clustertune.recipe.eval_tasks import find_task, unknown_tasks
from clustertune.recipe.findings import SECRET_FIX, Found, is_number, is_whole, schema_findings, show_value
from clustertune.recipe.layers import KeyPath, did_you_mean, nearest
from clustertune.recipe.library_facts import facts, model_facts
from clustertune.recipe.native_rules import TEMPLATE_ARGUMENTS, template_arguments
from clustertune.recipe.parameters import (
    Values,
    adapted_experts,
    adapter_modules,
    expert_parameters,
    head_names,
    is_counted,
    matches,
    narrowest,
)
from clustertune.recipe.sections import (
    FORMATS,
    OWN_PROMPTS,
    REWARD_OPTIONS,
    Data,
    Eval,
    Model,
    RecipeFile,
    Reward,
    Section,
    Slurm,
    read_section,
    wrong_template_arguments,
)

QUANTIZATION = "quantization_config"
TRANSPOSED = ("gpt_oss",)
"""Counted families whose experts are (experts, in, out) (transformers 5.23, ``use_experts_implementation``)."""
CONV1D_MODELS = ("clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt")
"""``model_type`` of the transformers models whose linear layers keep the weight transposed (Conv1D)."""
_MISSING = {
    ("model",): "write model: {name: owner/model, revision: <commit>}",
    ("data",): "write data: {name: owner/dataset, revision: <commit>, format: oasst-tree}",
    ("train",): "write train: with at least global_batch_size, or base: sft-lora",
    ("data", "format"): f"one of {', '.join(FORMATS)}",
}
"""What to write for keys that every recipe has."""


def check_schema(values: Mapping[str, Any], location: Callable[[KeyPath], str]) -> Iterator[Found]:
    """What pydantic finds in the sections, and what the model and data sections demand together. ``location`` names a line."""
    yield from _find_secrets(values, ())
    try:
        RecipeFile.model_validate(values)
    except ValidationError as error:
        for path, text, fix in schema_findings(RecipeFile, error, _MISSING):
            yield path, text, fix if fix or len(path) > 1 else _section_of(path[0])
    yield from _check_scores(values)
    yield from check_reward(values)
    yield from _check_during(values)
    yield from _check_servers(values)
    model, data = values.get("model"), values.get("data")
    if isinstance(model, dict):
        if model.get("weights", "hub") == "hub" and not model.get("path"):
            yield from _demand_revision(model, ("model",), "weights: random, or path, needs none")
        if model.get("weights") == "random" and model.get("path"):
            yield ("model", "path"), "given, while weights: random makes the weights", "leave out one"
    if isinstance(data, dict):
        yield from _check_data(data, str(values.get("trainer") or "sft"))
        other = data.get("format") not in (None, "oasst-tree")
        language, form = ("data", "language"), ("data", "format")
        # A format that is laid over a recipe's own (data.format=alpaca) leaves its language without effect: prepare says so.
        if data.get("language") and other and location(language).rsplit(":", 1)[0] == location(form).rsplit(":", 1)[0]:
            yield language, f"{data['format']} rows carry no language", "leave it out"


_OWN_SECTIONS: dict[str, type[Section]] = {"eval": Eval, "slurm": Slurm, "data": Data, "model": Model}


def _section_of(name: str) -> str | None:
    """Where a setting stands that was written at the top level, as a trainer's program takes it; None: nothing is known."""
    keys = {
        "train": facts("trl")["fields"],
        "lora": facts("peft")["fields"],
        **{section: model.model_fields for section, model in _OWN_SECTIONS.items()},
    }
    known = {key: section for section, names in reversed(keys.items()) for key in names}
    close = nearest(name, known)
    return close and f"did you mean {known[close]}.{close}?"


_READS = {"sft": "conversations and text", "dpo": "pairs of answers", "grpo": "prompts"}
"""What each trainer is given."""
_READER = {"preference": "dpo", "prompt": "grpo"}
"""Formats that one trainer alone takes; all others are for ``sft``."""


def _check_data(data: Mapping[str, Any], trainer: str) -> Iterator[Found]:
    """Each set of rows has a format and, where it comes from the Hub, a revision; a mixture has them in its parts alone."""
    sources = data.get("sources")
    mixed = isinstance(sources, list) and bool(sources)
    of_one = ("input", "format", "revision", "language", "limit", "config", "split", "columns")
    for key in of_one if mixed else ():
        if data.get(key) is not None:
            fix = "say it of one of them, or leave data.sources out: data.sources=null"
            yield ("data", key), "given beside data.sources", fix
    parts = [(("data", "sources", str(n)), part) for n, part in enumerate(sources or ())] if mixed else [(("data",), data)]
    for path, part in parts:
        if not isinstance(part, dict):
            continue
        if part.get("format") is None:
            yield (*path, "format"), "missing", _MISSING["data", "format"]
        if not part.get("input"):
            yield from _demand_revision(part, path, "a local input needs none")
        reader = _READER.get(str(part.get("format")), "sft")
        if part.get("format") in FORMATS and trainer in _READS and trainer != reader:
            own = [name for name, taker in _READER.items() if taker == trainer]
            fix = f"write {f'format: {own[0]}, or ' if own else ''}trainer: {reader}"
            yield (*path, "format"), f"{part['format']}: trainer: {trainer} takes {_READS[trainer]}", fix


def _check_scores(values: Mapping[str, Any]) -> Iterator[Found]:
    """Tasks that lm-eval does not know, and tasks and metrics of scores that are probably mistyped."""
    sections: dict[str, dict[str, Any]] = {
        name: section if isinstance(section := values.get(name), dict) else {} for name in ("eval", "expect")
    }
    tasks = sections["eval"].get("tasks", Eval.model_fields["tasks"].default)
    tasks = [task for task in tasks if isinstance(task, str)] if isinstance(tasks, list) else []
    for task, known_tasks in unknown_tasks(tasks).items():
        fix = did_you_mean(task, known_tasks) or "lm-eval's name of a task, a group or a tag: lm_eval ls tasks"
        yield ("eval", "tasks"), f"lm-eval has no task {task!r}", fix
    for path in (("eval", "pass_mark"), ("eval", "pass_difference"), ("expect", "tasks")):
        scores = sections[path[0]].get(path[1])
        known_here = [*tasks, *([OWN_PROMPTS] if sections["eval"].get("data") else [])]
        for task, metrics in scores.items() if isinstance(scores, dict) else ():
            part_of_a_group = any(str(task).startswith(f"{group}_") for group in tasks)
            if task not in known_here and not part_of_a_group and nearest(str(task), known_here):
                yield (*path, str(task)), "no task of this name in eval.tasks", did_you_mean(str(task), known_here)
            known = task_file.metrics if (task_file := find_task(str(task))) else ()
            filtered = {name.partition(",")[0] for name in known if "," in name}
            for metric in metrics if known and isinstance(metrics, dict) else ():
                if str(metric).removesuffix(",none") not in known and str(metric).partition(",")[0] not in filtered:
                    yield (*path, str(task), str(metric)), f"{task} has no such metric", did_you_mean(str(metric), known)


def _demand_revision(section: Mapping[str, Any], path: tuple[str, ...], otherwise: str) -> Iterator[Found]:
    if section.get("revision") is None and section.get("name") is not None:
        fix = f"pin the Hub commit of {section['name']} (40 hex digits); {otherwise}"
        yield (*path, "revision"), "missing: what comes from the Hub is pinned", fix


def _find_secrets(values: Mapping[str, Any], path: KeyPath) -> Iterator[Found]:
    for key, value in values.items():
        key_path = (*path, str(key))
        if isinstance(value, dict):
            yield from _find_secrets(value, key_path)
        elif any(holds_secret(item) for item in (value if isinstance(value, list) else [value])):
            yield key_path, "holds an access token (not shown)", SECRET_FIX


def check_train(train: Mapping[str, Any]) -> Iterator[Found]:
    """Values of the complete section whose effect no library tells in the first minute."""
    if train["fp16"]:
        # Its scale starts at 65536 and comes down by overflows: gradients that are not finite, which end a run here.
        text = "true: its loss scale makes steps that are not finite and leaves them out, which ends a run here"
        fix = "leave it out: bf16 is the default; float32, where a GPU has no bf16, is train.bf16=false"
        yield ("train", "fp16"), text, fix
    steps, warm = train["max_steps"], train["warmup_steps"]
    if 0 < steps < warm:
        text = f"{warm:g}, while max_steps is {steps}: the learning rate would never be reached"
        yield ("train", "warmup_steps"), text, "write a share of all steps, such as 0.03"
    yield from _check_arguments(train)
    yield from _check_model_init(train["model_init_kwargs"])


_EVALUATED = ("loss", "runtime", "samples_per_second", "steps_per_second")
"""What ``Trainer.evaluate`` returns here, each behind ``eval_`` (transformers 5, ``evaluation_loop`` and ``speed_metrics``)."""


_SCHEDULE_RANGES: dict[str, tuple[Callable[[float, float], bool], str]] = {
    **dict.fromkeys(("num_cycles", "power"), (lambda value, _: value > 0, "a rate that falls needs a number greater than 0")),
    **dict.fromkeys(
        ("lr_end", "min_lr"), (lambda value, rate: 0 <= value < rate, "it must be at least 0 and below train.learning_rate")
    ),
    **dict.fromkeys(
        ("min_lr_rate", "min_lr_ratio", "warmup_lr_rate"),
        (lambda value, _: 0 <= value < 1, "a share of the learning rate is at least 0 and below 1"),
    ),
    "factor": (lambda value, _: 0 < value < 1, "it must be above 0 and below 1"),
    "timescale": (lambda value, _: value >= 1, "it must be at least 1 step"),
    **dict.fromkeys(
        ("num_decay_steps", "num_stable_steps", "patience", "cooldown"), (lambda value, _: value >= 0, "it must be at least 0")
    ),
}
"""What arguments of schedules must be, and the learning rate: beyond, the rate grows, is negative, or divides by zero, most of
it without a message."""


def _outside(key: str, value: Any, rate: float) -> str | None:
    """What an argument of a schedule must be and is not; None where it is, may be empty, or is not known."""
    if key not in _SCHEDULE_RANGES or value is None:
        return None
    allowed, text = _SCHEDULE_RANGES[key]
    return None if is_number(value) and allowed(value, rate) else text


def _check_arguments(train: Mapping[str, Any]) -> Iterator[Found]:
    """Arguments of saving, schedule and optimizer: transformers ignores a key of ``optim_args`` that it does not know."""
    schedule, optimizer = str(train["lr_scheduler_type"]), str(train["optim"])
    arguments, rate = train["lr_scheduler_kwargs"] or {}, train["learning_rate"]
    if isinstance(arguments, str):  # transformers reads an object of JSON
        yield ("train", "lr_scheduler_kwargs"), "is a text", "write a mapping, such as {num_cycles: 0.5}"
        arguments = {}
    if schedule in ("constant", "constant_with_warmup") and arguments:
        yield ("train", "lr_scheduler_kwargs"), f"the {schedule} schedule reads none", "leave it out"
    known = facts("trl")["schedules"].get(schedule)
    for key, value in arguments.items():  # one that a schedule lacks, transformers names as it makes it
        # Else a TypeError once the base is loaded.
        if known is not None and key not in known and not schedule.startswith("constant"):
            text = f"the {schedule} schedule takes no {show_value(key)}; it takes {', '.join(known) or 'none'}"
            yield ("train", "lr_scheduler_kwargs"), text, did_you_mean(key, known)
            continue
        if needed := _outside(key, value, rate if is_number(rate) else math.inf):
            text = f"{key} is {show_value(value)}: {needed}"
            yield ("train", "lr_scheduler_kwargs"), text, "see the function of this schedule in transformers/optimization.py"
    try:
        fault = wrong_template_arguments(template_arguments(train))
    except ValueError as error:
        fault = f"is not an object of JSON: {error}"
    if fault:
        yield ("train", TEMPLATE_ARGUMENTS), fault, "such as {enable_thinking: false}"
    metric = str(train["metric_for_best_model"] or "loss").removeprefix("eval_")
    reader = "save_strategy is best" if train["save_strategy"] == "best" else f"the {schedule} schedule reads it"
    if (train["save_strategy"] == "best" or schedule == "reduce_lr_on_plateau") and metric not in _EVALUATED:
        # Trainer looks for it after the first evaluation only.
        text = f"{show_value(train['metric_for_best_model'])} is no figure of an evaluation, and {reader}"
        yield ("train", "metric_for_best_model"), text, f"one of {', '.join(_EVALUATED)}"
    taken, path = facts("trl")["optimizers"].get(optimizer), ("train", "optim_args")
    for item in filter(None, str(train["optim_args"] or "").replace(" ", "").split(",")):
        key, equals, value = item.partition("=")
        if not (key and equals and value):
            yield path, f"{show_value(item)} is not of the form key=value", "write key=value, several with commas"
        elif taken is not None and key not in taken:
            text = f"{show_value(key)} has no effect with optim {optimizer}; it reads {', '.join(taken) or 'no optim_args'}"
            yield path, text, did_you_mean(key, taken) if taken else "leave it out"


def _check_model_init(options: Any) -> Iterator[Found]:
    path = ("train", "model_init_kwargs")
    if options is not None and not isinstance(options, dict):
        yield path, f"{show_value(options)} is not a mapping", None
    for key, value in options.items() if isinstance(options, dict) else ():
        choices = native_rules.MODEL_INIT.get(key)
        if key == QUANTIZATION:
            inner = quantization.find_problems(value) if value is not None else ()
            yield from (((*path, key, *rest), text, fix) for rest, text, fix in inner)
        elif choices is None:
            yield (*path, key), "is not taken here", did_you_mean(key, [*native_rules.MODEL_INIT, QUANTIZATION])
        elif value not in choices:
            text = f"{show_value(value)} is not one of {', '.join(choices)}"
            yield (*path, key), text, did_you_mean(str(value), choices)


def check_dpo(train: Mapping[str, Any], accelerate: Mapping[str, Any], *, megatron: bool) -> Iterator[Found]:
    """What is not carried here with ``trainer: dpo``. ``accelerate``: the file's mapping."""
    if train["truncation_mode"] == "keep_end":
        text = "keep_end: a pair would lose different parts of its prompt, and TRL takes it out in 2.0"
        yield ("train", "truncation_mode"), text, "leave it out"
    if megatron:
        yield ("trainer",), "dpo: Megatron-Bridge is started for supervised fine-tuning alone", "write trainer: sft"
        return
    kind, sizes = acc.distributed_type(accelerate), acc.parallel_sizes(accelerate)
    for axis in sorted({"tp", "cp"} & set(sizes)):
        text = f"{sizes[axis]}: the two answers of a pair are computed by one rank with trainer: dpo"
        yield _mesh(axis), text, "leave it out: FSDP2 shards over all ranks"
    if kind == "DEEPSPEED":
        text = "DeepSpeed has no reference model here: trainer: dpo is sharded by FSDP2"
        yield ("accelerate", acc.TYPE), text, f"{acc.USE_FSDP2}, or MULTI_GPU"


def check_reward(values: Mapping[str, Any]) -> Iterator[Found]:
    """The sections ``reward`` and ``rollout`` against ``trainer``, whatever else of the recipe is wrong."""
    grpo, rewards = values.get("trainer") == "grpo", values.get("reward")
    if grpo and rewards is None:
        known = ", ".join(REWARD_OPTIONS)
        fix = f"write reward: [{next(iter(REWARD_OPTIONS))}]; there are {known}, and module:function of the recipe folder"
        yield ("reward",), "missing: trainer: grpo learns by rewards", fix
    for key in ("reward", "rollout") if not grpo else ():
        if values.get(key) is not None:
            yield (key,), f"trainer: {values.get('trainer') or 'sft'} does not read it", "write trainer: grpo, or leave it out"
    train = values.get("train")
    if grpo and values.get("rollout") == "servers":
        if values.get("lora") is None:
            text = "servers: they are given adapters; with all parameters trained the whole model would go to them in each step"
            yield ("rollout",), text, "train an adapter: lora; or write rollout: colocate"
        if isinstance(train, dict) and train.get("use_vllm"):
            yield ("train", "use_vllm"), "vLLM would generate on the GPUs that train too", "leave it out with rollout: servers"
    names = [reward.name for reward in read_rewards(rewards)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield ("reward",), f"{name} twice: rewards are logged by their names", "give each function a name of its own"
    for at, reward in enumerate(read_rewards(rewards)):
        yield from ((("reward", str(at)), text, fix) for text, fix in _check_options(reward))


def _check_during(values: Mapping[str, Any]) -> Iterator[Found]:
    """Scores while training: only of an adapter, which is scored without a merge."""
    section = read_section(Eval, values.get("eval"))
    if section is None or section.during is None:
        return
    at = ("eval", "during")
    if values.get("megatron") is not None:
        yield at, "Megatron-Bridge's checkpoints are no adapters: they are exported once, at the end", "leave it out"
    elif values.get("lora") is None:
        text = "all parameters are trained: each score would write the whole model once more"
        yield at, text, "leave it out, or train an adapter: lora"
    saved = values.get("save")
    if section.during.every == "milestone" and not (isinstance(saved, dict) and saved.get("milestones")):
        yield (
            (*at, "every"),
            "milestone: the recipe names no milestones",
            "write save: {milestones: [100, 200]}, or a number of steps",
        )


def _check_servers(values: Mapping[str, Any]) -> Iterator[Found]:
    """Servers beside the trainer that nothing would ask, or that would not take its adapters."""
    scored, trainer = read_section(Eval, values.get("eval") or {}), values.get("trainer") or "sft"
    by_servers = values.get("rollout") == "servers"
    if values.get("servers") is not None and trainer != "grpo" and scored is not None:
        if scored.during is None:
            text = f"trainer: {trainer} would ask them nothing: they score checkpoints, and eval.during asks for no scores"
            yield ("servers",), text, "write eval: {during: {every: 200}}, or leave servers out"
        elif scored.backend == "hf":
            text = "hf: the training would stop for each score, and nothing would ask the servers"
            yield ("eval", "backend"), text, "leave it out, or leave servers out"
    asked = values.get("servers") is not None and scored is not None and scored.during is not None
    lora = values.get("lora")
    if (by_servers or asked) and isinstance(lora, dict) and lora.get("modules_to_save"):
        text = f"{show_value(lora['modules_to_save'])}: vLLM takes no adapter that holds whole modules"  # lora/peft_helper.py
        yield ("lora", "modules_to_save"), text, "leave it out, or leave out the servers beside the trainer"


def read_rewards(rewards: Any) -> list[Reward]:
    """The rewards of a recipe's values that can be read; the schema says what is wrong with the others."""
    read = [read_section(Reward, one) for one in rewards] if isinstance(rewards, list) else []
    return [reward for reward in read if reward is not None]


def _check_options(reward: Reward) -> Iterator[tuple[str, str | None]]:
    """What is wrong with the options of a built-in reward, and what to do."""
    told = reward.options
    for key in ("column", "pattern", "extract"):
        if reward.module is None and key in told and not (isinstance(told[key], str) and told[key]):
            yield f"{key} {show_value(told[key])} is not a text", None
    for key in ("pattern", "extract"):
        if reward.module is None and isinstance(told.get(key), str):
            try:
                re.compile(told[key])
            except re.error as error:
                yield f"{key} is not a regular expression: {error}", "Python's form: docs.python.org/3/library/re.html"
    if reward.function == "length":
        ends = [told.get(key) for key in ("min", "max")]
        if not any(is_number(end) for end in ends) or any(end is not None and not is_whole(end) for end in ends):
            yield "length needs min, max or both, whole numbers from 1", "write {function: length, max: 200}"
        elif None not in ends and ends[0] > ends[1]:  # type: ignore[operator]
            yield f"min {ends[0]} is greater than max {ends[1]}", None
        if told.get("unit", "words") not in ("words", "characters"):
            yield f"unit {show_value(told['unit'])}", "write words or characters"
    if reward.function == "json_schema" and not isinstance(told.get("schema"), dict | None):
        yield "schema is not a mapping", "write the JSON schema as YAML, or column: the rows' column that holds it"


def check_grpo(train: Mapping[str, Any], accelerate: Mapping[str, Any], *, megatron: bool) -> Iterator[Found]:
    """What is not carried here with ``trainer: grpo``; what a group of answers does not divide ``GRPOConfig`` says itself."""
    if train["loss_type"] == "cispo" and train["epsilon_high"] is None:
        yield ("train", "epsilon_high"), "missing: loss_type cispo clips at it alone", "write epsilon_high: 5.0"
    if train["vllm_mode"] != "colocate":
        yield ("train", "vllm_mode"), f"{train['vllm_mode']}: {native_rules.GRPO_OWNED['vllm_server_host']}", "leave it out"
    if train["use_vllm"] and train["top_k"] is None:
        yield ("train", "top_k"), "empty", "write 0 for all tokens"
    if megatron:
        yield ("trainer",), "grpo: Megatron-Bridge is started for supervised fine-tuning alone", "write trainer: sft"
        return
    kind, sizes = acc.distributed_type(accelerate), acc.parallel_sizes(accelerate)
    for axis in sorted({"tp", "cp", "sp"} & set(sizes)):
        text = f"{sizes[axis]}: with trainer: grpo a rank generates and learns whole sequences"
        yield _mesh(axis), text, "leave it out: FSDP2 shards over all ranks"
    if kind == "DEEPSPEED":
        text = "DeepSpeed was not tried with generation in the ranks: trainer: grpo is sharded by FSDP2"
        yield ("accelerate", acc.TYPE), text, f"{acc.USE_FSDP2}, or MULTI_GPU"


def check_lora(lora: Mapping[str, Any], architecture: Mapping[str, Any] | None) -> Iterator[Found]:
    """What the chain (export, merge) cannot do of the complete section, and targets that PEFT leaves out without a message."""
    for key, what in native_rules.LORA_UNSUPPORTED.items():
        if lora[key]:
            yield ("lora", key), f"{what} cannot be exported and merged", "leave it out"
    if lora["init_lora_weights"] not in native_rules.LORA_PLAIN_INIT:
        text = f"{lora['init_lora_weights']} changes the base weights or trains otherwise"
        yield ("lora", "init_lora_weights"), text, "leave it out"
    if lora["bias"] != "none":
        yield ("lora", "bias"), f"{lora['bias']}: trained biases cannot be exported and merged", "write bias: none"
    if (kind := (architecture or {}).get("model_type")) in CONV1D_MODELS:
        text = f"{kind} keeps its weights transposed (Conv1D): an adapter of it cannot be merged"
        yield ("lora",), text, "train all parameters (base: sft-full; new --method full), or take another model"
    if lora["ensure_weight_tying"]:
        yield ("lora", "ensure_weight_tying"), "true: adapters of tied weights cannot be merged", "leave it out"
    if lora["task_type"] not in (None, "CAUSAL_LM"):
        yield ("lora", "task_type"), f"{lora['task_type']} is not what is trained here", "write CAUSAL_LM"
    if architecture is not None:
        yield from _check_embeddings(lora, architecture)
    target = lora["target_modules"]
    if lora["target_parameters"]:
        yield from _check_parameters(lora, architecture)
    elif not target:
        yield ("lora", "target_modules"), "missing", "name the modules, such as [q_proj, v_proj], or all-linear"
    if target and architecture is not None:
        yield from _check_targets(lora, architecture)


def _check_embeddings(lora: Mapping[str, Any], architecture: Mapping[str, Any]) -> Iterator[Found]:
    """The input embedding as a target, which the merge does not take, and either end of a model whose embeddings are one tensor
    with the head (peft #2018, #2777): the one copy would be trained alone, and whole copies end FSDP2 of accelerate 1.15 in a
    KeyError."""
    named = [name for name in adapter_modules(architecture) if _INPUT.search(name)] or [_EMBEDDING]
    target, tied = lora["target_modules"], Values(architecture).flag("tie_word_embeddings")
    for name in named:
        if is_targeted(lora, name):
            text = f"{show_value(target)} takes in {name}: LoRA on the input embedding cannot be merged"
            other = "" if tied else ", or name it in modules_to_save"
            yield ("lora", "target_modules"), text, f"leave {name} out{other}"
    for name in head_names(architecture) if tied else ():
        if is_targeted(lora, name):
            text = f"{show_value(target)} takes in {name}: input embedding and head are one tensor of this model"
            fix = f"leave {name} out, or take a model whose embeddings are not tied"
            yield ("lora", "target_modules"), f"{text} (tie_word_embeddings), and the adapter would change the head alone", fix
    saved = lora["modules_to_save"]
    if isinstance(saved, list) and tied:
        both = [name for name in (*named, *head_names(architecture)) if matches(saved, name)]
        if both:
            text = f"{', '.join(both)}: input embedding and head are one tensor of this model (tie_word_embeddings)"
            yield ("lora", "modules_to_save"), text, "leave them out, or take a model whose embeddings are not tied"


def _check_targets(lora: Mapping[str, Any], architecture: Mapping[str, Any]) -> Iterator[Found]:
    kind, target = str(architecture["model_type"]), lora["target_modules"]
    modules = adapter_modules(architecture)
    patterns = {key: lora[key] for key in ("target_modules", "exclude_modules") if isinstance(lora[key], str)}
    wrong = [(key, text) for key, text in patterns.items() if not is_pattern(text)]
    wrong += [(key, text) for key in ("rank_pattern", "alpha_pattern") for text in lora[key] if not is_pattern(text)]
    for key, text in wrong:
        yield ("lora", key), f"{show_value(text)} is not a regular expression", None
    if wrong:
        return
    if not modules:
        return
    last = {name.split(".")[-1] for name in modules}
    for key in ("target_modules", "modules_to_save", "exclude_modules"):
        for name in names if isinstance(names := lora[key], list) else ():
            if not any(matches([name], module) for module in modules):
                yield ("lora", key), f"{kind} has no module {show_value(name)}", did_you_mean(name, last)
    ends = {*head_names(architecture), *(name for name in modules if _INPUT.search(name))}
    targeted = [name for name in modules if (name not in ends if is_all_linear(target) else matches(target, name))]
    targeted += [name for name, _ in adapted_experts(architecture, lora)]
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern, value in lora[key].items():
            wanted = is_whole(value) if key == "rank_pattern" else is_number(value) and value > 0
            if not wanted:
                # PEFT refuses a rank below 1 once the base is loaded; an alpha of 0 takes the adapter away without a message.
                text = f"{pattern} is {show_value(value)}: {'a rank is a whole number from 1' if 'rank' in key else 'above 0'}"
                yield ("lora", key), text, "leave it out, or name the module in exclude_modules"
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in targeted):
                text = f"{show_value(pattern)} matches none of the modules that target_modules names: it has no effect"
                yield ("lora", key), text, did_you_mean(pattern, {name.split(".")[-1] for name in targeted})
    layers, chosen = int(architecture["num_hidden_layers"]), lora["layers_to_transform"]
    for index in [chosen] if isinstance(chosen, int) else chosen or []:
        if not 0 <= index < layers:
            text = f"{index} is not a layer: the model has {layers}, counted from 0"
            yield ("lora", "layers_to_transform"), text, None


def _check_parameters(lora: Mapping[str, Any], architecture: Mapping[str, Any] | None) -> Iterator[Found]:
    """LoRA on the fused experts of a mixture, bare parameters to which some of PEFT's settings do not go (peft 0.20,
    ``ParamWrapper`` and ``_inject_parameters``)."""
    path, kind = ("lora", "target_parameters"), str((architecture or {}).get("model_type"))
    if layers := lora["layers_to_transform"]:
        text = f"{show_value(layers)}: PEFT takes the experts of all layers all the same"
        yield ("lora", "layers_to_transform"), text, "write layers_to_transform: null"
    if isinstance(lora["target_modules"], str):
        text = "a pattern or all-linear may take the experts in by their former names, and with target_parameters twice"
        yield ("lora", "target_modules"), text, "write a list of names, or [] for the experts alone"
    if architecture is None:
        return
    known = expert_parameters(architecture)
    if kind in TRANSPOSED or not known:
        text = f"{kind} keeps its experts transposed, which is not merged" if kind in TRANSPOSED else f"{kind} has no experts"
        yield path, text if is_counted(architecture) else f"the experts of {kind} are not known here", "leave it out"
        return
    ends = {".".join(name.split(".")[-3:]) for name, _ in known}
    for name in lora["target_parameters"]:
        if not any(matches([name], one) for one, _ in known):
            text = f"{kind} has no experts' parameter {show_value(name)}; it has {', '.join(sorted(ends))}"
            yield path, text, did_you_mean(str(name), ends)


def is_targeted(lora: Mapping[str, Any], name: str) -> bool:
    """Whether PEFT puts an adapter on the embedding or the head of this full name (peft 0.20, ``check_target_module_exists``).

    all-linear leaves both out; ``layers_to_transform`` keeps a list of names to the layers.
    """
    target, excluded = lora["target_modules"], lora["exclude_modules"]
    saved = [one for one in lora["modules_to_save"] or () if is_pattern(str(one))]
    if not target or is_all_linear(target) or not is_pattern(target):
        return False
    if excluded and is_pattern(excluded) and matches(excluded, name):
        return False
    if any(re.match(rf"(^|.*\.){one}($|\..*)", name) for one in saved):  # trained whole, without an adapter
        return False
    if not isinstance(target, str) and lora["layers_to_transform"] not in (None, []):
        return name in target  # a whole name is taken in any layer
    return matches(target, name)


def is_all_linear(target: object) -> bool:
    """Whether ``target_modules`` is PEFT's word for all linear modules but the head."""
    return isinstance(target, str) and target.lower() == "all-linear"


def is_pattern(target: str | list[str]) -> bool:
    """Whether PEFT can match with it: names, or a text that is a regular expression."""
    try:
        re.compile(target if isinstance(target, str) else "")
    except re.error:
        return False
    return True


# --- what a distribution does not carry, for this model and this recipe ------------------------------------------------------
# Facts of the installed stack: accelerate 1.15 (``parallelism_config.py``, ``accelerator.py``), transformers 5.23 (the plans of
# ``models/*/configuration_*.py``), torch 2.13's FSDP2, PEFT 0.20 and bitsandbytes 0.50.

_INPUT = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)$")
_EMBEDDING = "model.embed_tokens"
"""The input embedding, as Llama's kin and most others name it; GPT-NeoX's embed_in is not looked for."""
TP_STYLES = frozenset({"colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "replicated_with_grad_allreduce"})
"""The styles of a dense plan that ``clustertune/training/parallelism.py`` carries out."""
EP_STYLES = frozenset({"ep_dispatch_experts", "grouped_gemm"})


def check_quantization(train: Mapping[str, Any], lora: object) -> Iterator[Found]:
    """Quantised weights that nothing would be trained beside."""
    if quantization.of(train) is not None and lora is None:
        fix = "add a lora section, or leave the quantisation out"
        yield ("train", "model_init_kwargs", QUANTIZATION), "quantised weights cannot be trained themselves", fix


def check_strategy(
    train: Mapping[str, Any],
    lora: Mapping[str, Any] | None,
    accelerate: Mapping[str, Any],
    architecture: Mapping[str, Any] | None,
    *,
    zero: int | None = None,
) -> Iterator[Found]:
    """Everything that the strategy of ``accelerate`` (the file's mapping) cannot do of what the recipe asks.

    ``architecture`` is None where the model is not known; ``zero`` is DeepSpeed's stage.
    """
    sizes, kind = acc.parallel_sizes(accelerate), acc.distributed_type(accelerate)
    if "sp" in sizes:
        text = f"{sizes['sp']}: accelerate's sequence parallelism is DeepSpeed's Ulysses, which is not carried here"
        yield _mesh("sp"), text, f"write {acc.size_key('cp')}: context parallelism splits sequences under FSDP2"
    for axis in ("dp_shard", "tp", "cp"):
        if kind in ("MULTI_GPU", "NO", "DEEPSPEED") and axis in sizes:
            text = f"{sizes[axis]}, with {acc.TYPE}: {kind}: only FSDP2 is combined with it here"
            yield _mesh(axis), text, acc.USE_FSDP2
    if kind == "FSDP" and architecture is not None:
        yield from _wrapped(accelerate, architecture)
    if kind == "FSDP" and (why := sharded_optimizer(str(train["optim"]))):
        whole = f"accelerate.{acc.TYPE}=MULTI_GPU accelerate.fsdp_config=null, with the whole model on every GPU"
        fix = f"train.optim=adamw_torch_fused; or {whole}"
        yield ("train", "optim"), f"{train['optim']}: {why}", fix
    config = quantization.of(train)
    if kind in ("FSDP", "DEEPSPEED") and config is not None:
        yield from _quantized(config, train, accelerate, zero)
    if kind == "FSDP" and "tp" in sizes:
        yield from _tensor(sizes["tp"], train, lora, architecture)
    if lora and lora["target_parameters"]:
        yield from _experts(train, accelerate)
    if kind == "FSDP" and "cp" in sizes:
        yield from _context(sizes["cp"], train, architecture)


def sharded_optimizer(name: str) -> str | None:
    """Why an optimizer does not step, or cannot be saved, under FSDP2; None where it does both, or was not tried.

    All of transformers 5.23 that the pinned stack can make took three steps on two ranks, with and without LoRA:
    docs/results/optimizers.md.
    """
    if facts("trl")["optimizer_modules"].get(name) == "bitsandbytes":
        return "bitsandbytes' kernels take no DTensor, and FSDP2's parameters are DTensors: the first step would fail"
    return {
        "adafactor": "transformers' Adafactor mixes tensors with FSDP2's DTensors: the first step would fail",
        "adagrad": "torch makes Adagrad's state ahead of the sharding: no checkpoint could be saved",
    }.get(name)


def _wrapped(accelerate: Mapping[str, Any], architecture: Mapping[str, Any]) -> Iterator[Found]:
    """Classes that FSDP2 is to shard by and the model does not have: accelerate looks for them once the base is loaded."""
    section, key = acc.section(accelerate, "fsdp_config"), "fsdp_transformer_layer_cls_to_wrap"
    named, policy = section.get(key), str(section.get("fsdp_auto_wrap_policy") or "TRANSFORMER_BASED_WRAP")
    known = model_facts(str(architecture["model_type"]))["classes"]
    for name in str(named).split(",") if named and policy == "TRANSFORMER_BASED_WRAP" else ():
        if name.strip() not in known:
            layers = [one for one in known if one.endswith(("DecoderLayer", "Block"))]
            text = f"{show_value(name.strip())} is no class of {architecture['model_type']} in transformers"
            yield ("accelerate", "fsdp_config", key), text, did_you_mean(name, known) or f"one of {', '.join(layers)}"


def _mesh(axis: str) -> KeyPath:
    return ("accelerate", *acc.key_of(axis).split("."))


def _quantized(
    config: Mapping[str, Any], train: Mapping[str, Any], accelerate: Mapping[str, Any], zero: int | None
) -> Iterator[Found]:
    path = ("train", "model_init_kwargs", QUANTIZATION)
    kind = str(acc.distributed_type(accelerate))
    four, storage = config.get("load_in_4bit"), str(config.get("bnb_4bit_quant_storage", "uint8"))
    text = quantization.cast_away(config, train, kind)
    if text is None and four and kind == "FSDP" and storage == "uint8":
        # accelerate/utils/fsdp_utils.py:800: such weights are left out of the sharding, whole on every rank.
        text = f"bnb_4bit_quant_storage is {storage}: FSDP2 would keep the whole base on every rank"
    if text is not None:
        yield (*path, "bnb_4bit_quant_storage"), text, "write bnb_4bit_quant_storage: bfloat16"
    method = quantization.method(config)
    if (kind == "FSDP" or zero == 3) and not quantization.is_sharded(config) and method in quantization.METHODS:
        stored = "8 bits of bitsandbytes" if config.get("load_in_8bit") else method
        # torch 2.13 casts what it gathers to param_dtype; transformers 5.23's FP8Linear then multiplies without the scale.
        name = "FSDP" if zero is None else "ZeRO-3"
        text = f"{stored}: {name} would gather such weights without their scales, or not split them"
        fix = "write {load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_quant_storage: bfloat16}, or leave it out"
        yield path, f"{text}; it does bitsandbytes' 4 bits", fix
    if "tp" in acc.parallel_sizes(accelerate):
        fix = f"leave {acc.size_key('tp')} out: FSDP2 shards them"
        yield path, "quantised weights are not split over tp", fix


def _experts(train: Mapping[str, Any], accelerate: Mapping[str, Any]) -> Iterator[Found]:
    """Where PEFT's ``ParamWrapper``, which replaces a parameter while a layer runs, does not find it whole (PEFT 0.20)."""
    path = ("lora", "target_parameters")
    if quantization.of(train) is not None:
        yield path, "LoRA on experts is not carried out over a quantised base", "leave the quantisation out"
    for axis in sorted({"tp", "cp"} & set(acc.parallel_sizes(accelerate))):
        yield path, f"LoRA on experts is not carried out together with {axis}", f"leave {_mesh(axis)[-1]} out"


def _tensor(
    size: int, train: Mapping[str, Any], lora: Mapping[str, Any] | None, architecture: Mapping[str, Any] | None
) -> Iterator[Found]:
    if lora and lora["modules_to_save"]:
        text = "whole modules are not trained beside an adapter under tensor parallelism"
        yield ("lora", "modules_to_save"), text, "leave it out"
    targets = lora["target_modules"] if lora else None
    if targets and is_pattern(targets) and matches(targets, _EMBEDDING):
        text = "embed_tokens takes no adapter under tensor parallelism"
        yield ("lora", "target_modules"), text, "leave embed_tokens out"
    if train["torch_compile"]:
        text = "true: the compiled layers were not proved together with tensor parallelism"
        yield ("train", "torch_compile"), text, "train.torch_compile=false, or tp size 1"
    if architecture is None:
        return
    kind = str(architecture.get("model_type"))
    dense, experts = model_facts(kind)["tp"], model_facts(kind)["ep"]
    if not {"colwise", "rowwise"} <= set(dense.values()):
        yield _mesh("tp"), f"transformers has no tensor-parallel plan for {kind}", "leave it out"
        return
    homes = tuple(name for name, style in experts.items() if style == "ep_dispatch_experts")
    styles = {style for name, style in dense.items() if not (homes and name.startswith(homes))} | set(experts.values())
    if unknown := sorted(styles - TP_STYLES - EP_STYLES):
        yield _mesh("tp"), f"the plan of {kind} has {', '.join(unknown)}, which is not carried out here", "leave it out"
    divided = ("num_local_experts", "num_experts") if experts else ("intermediate_size",)
    for key in ("num_attention_heads", "num_key_value_heads", *divided):
        value = architecture.get(key)
        if isinstance(value, int) and value % size:
            yield _mesh("tp"), f"{size} does not divide {key}, {value}", f"use a divisor of {value}"


def _context(size: int, train: Mapping[str, Any], architecture: Mapping[str, Any] | None) -> Iterator[Found]:
    attention = (train["model_init_kwargs"] or {}).get("attn_implementation")
    if attention not in ("sdpa", None):
        text = f"{show_value(attention)}: context parallelism has an attention of its own, on torch's kernels"
        yield ("train", "model_init_kwargs", "attn_implementation"), text, "leave it out"
    apart = "context parallelism drops what keeps packed conversations apart"  # trl/trainer/sft_trainer.py:1150
    for key, what in {
        "packing": apart,
        "eval_packing": apart,
        "padding_free": "it joins the sequences of a batch, which context parallelism would not keep apart",
        "label_smoothing_factor": "TRL smooths unshifted labels, a part of a sequence has shifted ones",
    }.items():
        if train[key]:
            fix = f"train.{key}=false, or cp size 1" if "packing" in key else "leave it out, or use cp size 1"
            yield ("train", key), f"{show_value(train[key])}: {what}", fix
    if architecture is not None:
        length = native_rules.row_tokens(train)
        yield from ((_mesh("cp"), text, fix) for text, fix in _split_attention(size, length, architecture))


def _split_attention(size: int, length: int | None, architecture: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Layers of which a part of a sequence is not computed from the others: torch's context parallelism is causal attention."""
    kind, other = str(architecture["model_type"]), "use cp size 1"
    if model_facts(kind)["carries_state"]:
        yield f"layers of {kind} hand on a state, which does not go from one part of a sequence to the next", other
    elif not model_facts(kind)["sdpa"]:
        yield f"{kind} computes its attention without scaled_dot_product_attention, the one that is split", other
    if architecture.get("alibi"):  # falcon's attention bias for the distance of two tokens is given as a mask
        yield "alibi: true, a mask, of which the attention that is split takes none", other
    kinds = set(architecture.get("layer_types") or ()) - {"full_attention", "sliding_attention", "chunked_attention"}
    if kinds:
        yield f"the model has layers of {', '.join(sorted(kinds))}: only causal attention is split", other
    seen = narrowest(architecture)
    if seen is not None and (length is None or seen < length):
        text = f"{size}, while the model attends to {seen} tokens back and max_length is {length}"
        yield text, f"train.max_length={seen} at most, or cp size 1"
