"""A recipe as Megatron-Bridge takes it: plain values, section by section of its ``ConfigContainer``; and what a dry run shows.

Pure: nothing of NVIDIA's is imported. Sources, all of Megatron-Bridge 0.5.1: ``training/config.py`` (sections and their
``finalize``), ``recipes/common.py`` (``_peft_common``, ``_sft_common``), ``recipes/llama/llama3.py`` (70B and 405B),
``peft/canonical_lora.py``.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.cluster.schema import Cluster
from clustertune.errors import Problem
from clustertune.launch import megatron_image, node
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.launch.shape import train_shape
from clustertune.megatron import megatron_files
from clustertune.recipe.native_rules import lora_defaults, train_defaults
from clustertune.recipe.sections import Megatron
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir

DECAYS = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
"""transformers' schedules that Megatron has under another name or the same."""
TARGETS = {
    "q_proj": "linear_q",
    "k_proj": "linear_k",
    "v_proj": "linear_v",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1_gate",
    "up_proj": "linear_fc1_up",
    "down_proj": "linear_fc2",
}
"""PEFT's names of a Llama's layers, and those of ``CanonicalLoRA``: one pair of matrices for each, as PEFT has it. Plain
``LoRA`` of Bridge has one A for query, key and value together, which is another adapter than the recipe asks for."""
LORA_KEYS: dict[str, Any] = {"task_type": "CAUSAL_LM", "bias": "none", "init_lora_weights": True}
LORA_KEYS |= dict.fromkeys(("r", "lora_alpha", "lora_dropout", "target_modules"))
"""Keys of ``lora`` that are carried, and the value that each must have; None: any."""
CARRIED = {
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "num_train_epochs", "max_steps",
    "global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "packing", "seed",
    "adam_beta1", "adam_beta2", "adam_epsilon", "assistant_only_loss", "pad_token", "logging_steps", "eval_strategy",
    "eval_steps", "save_strategy", "save_steps", "save_total_limit",
}  # fmt: skip
"""Keys of ``train`` that mean the same here."""
WITHOUT_EFFECT = {
    "logging_first_step", "ddp_find_unused_parameters", "report_to", "run_name", "eval_on_start", "tf32", "model_init_kwargs",
    "per_device_eval_batch_size", "dataloader_num_workers", "loss_type", "use_liger_kernel",
    "ddp_timeout", "dataloader_pin_memory",
}  # fmt: skip
"""Keys that say how TRL does it; Megatron has its own way. ``report_to``: the run's metrics.jsonl is written all the same."""
WANTED = {"bf16": True, "save_only_model": False, "gradient_checkpointing": False, "activation_checkpointing": False}
"""Keys that have one possible value."""
ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused")
PLAN_FILE = "megatron.json"
"""In the attempt's folder: the configuration as it was handed over, and what came of the data."""
ADDRESS, PORT = "<node 0>", 29500
"""In a dry run, in the place of what is known once the job runs."""
EXIT_SIGNAL = "SIGUSR1"
"""What the launcher asks the ranks with to save and stop (Slurm's ``--signal``)."""


@dataclass(frozen=True)
class Counts:
    """What is known of the data once it is packed."""

    train: int
    """Rows of the train split: packed sequences, or conversations where nothing is packed."""
    eval: int


def find_problems(resolved: Resolved) -> list[Problem]:
    """Everything of a recipe that Megatron-Bridge does not do, each with its key."""
    problems: list[Problem] = []

    def add(key: str, message: str, fix: str) -> None:
        problems.append(Problem(message, file=resolved.name, key=key, fix=fix))

    train, defaults = resolved.train_args, train_defaults()
    for key, value in sorted(train.items()):
        if value == defaults.get(key):
            continue
        if key in WANTED and value not in (WANTED[key], None):
            add(f"train.{key}", f"{value!r}, and Megatron-Bridge runs with {WANTED[key]!r}", "leave it out")
        elif key not in (*CARRIED, *WITHOUT_EFFECT, *WANTED, "optim"):
            add(f"train.{key}", "is not carried to Megatron-Bridge", "leave it out")
    if (optim := train["optim"]) not in ADAM:
        add("train.optim", f"{optim!r}: Megatron-Bridge has Adam", f"train.optim={ADAM[0]}")
    if (decay := train["lr_scheduler_type"]) not in DECAYS:
        add("train.lr_scheduler_type", f"{decay!r} is not carried to Megatron-Bridge", f"one of {', '.join(DECAYS)}")
    if train["packing"] and train["per_device_train_batch_size"] != 1:
        fix = "train.per_device_train_batch_size=1, and a longer train.max_length"
        add("train.per_device_train_batch_size", "with packing Megatron-Bridge takes one sequence at a time", fix)
    m, micro = resolved.recipe.megatron, int(train["gradient_accumulation_steps"])
    if m and (m.virtual_pipeline_model_parallel_size or 1) > 1 and micro % (stages := m.pipeline_model_parallel_size):
        # megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving
        text = f"{micro} micro batches a step, which are not a multiple of the {stages} interleaved stages"
        fix = "a multiple, or leave megatron.virtual_pipeline_model_parallel_size out"
        add("train.global_batch_size", text, fix)
    if other := sorted({str(part.format) for part in resolved.recipe.data.parts} & {"prompt-completion", "preference", "text"}):
        text = f"{', '.join(other)} is not carried to Megatron-Bridge"
        add("data.format", text, "messages, or another format of conversations")
    if resolved.recipe.model.weights != "hub":
        add("model.weights", "random: Megatron-Bridge converts published weights", "model.weights=hub")
    return [*problems, *_lora_problems(resolved)]


def _lora_problems(resolved: Resolved) -> list[Problem]:
    problems = []
    defaults = lora_defaults()
    for key, value in (resolved.lora or {}).items():
        if value == defaults[key]:
            continue
        where = {"file": resolved.name, "key": f"lora.{key}"}
        if key not in LORA_KEYS or LORA_KEYS[key] not in (value, None):
            fix = f"lora.{key}={LORA_KEYS[key]}" if key in LORA_KEYS else "leave it out"
            problems.append(Problem(f"{value!r} is not carried to Megatron-Bridge", fix=fix, **where))
        if key == "target_modules":
            names = [value] if isinstance(value, str) else list(value)
            if unknown := [name for name in names if name not in TARGETS]:
                fix = f"of {', '.join(TARGETS)}"
                problems.append(Problem(f"{', '.join(unknown)}: Megatron-Bridge's LoRA has no such layer", fix=fix, **where))
    sizes = (resolved.architecture.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    if (number := next(filter(None, sizes), 0)) and resolved.lora is not None:
        text = f"on a model of {number} experts: how its adapter is exported was not checked here"
        problems.append(Problem(text, file=resolved.name, key="lora", fix="train all parameters, or take a dense model"))
    return problems


def iterations(train: Mapping[str, Any], batch: int, rows: int | None) -> int | None:
    """Optimizer steps: ``max_steps``, else whole global batches of the epochs; None where the rows are not known yet."""
    if (steps := train["max_steps"]) > 0:
        return int(steps)
    if rows is None:
        return None
    return max(1, math.floor(rows * float(train["num_train_epochs"]) / batch))


def global_batch(resolved: Resolved) -> int:
    """Sequences per optimizer step over all ranks."""
    train = resolved.train_args
    each = int(train["per_device_train_batch_size"]) * int(train["gradient_accumulation_steps"])
    return each * resolved.data_parallel_size


def share(value: float | None, total: int | None) -> int | None:
    """A number of steps, which below 1 is a share of all (transformers' rule); None where all are not known yet."""
    if value is None:
        return None
    if value < 1:
        return None if total is None else max(1, math.ceil(value * total)) if value else 0
    return int(value)


def build(resolved: Resolved, paths: Mapping[str, str | None], counts: Counts | None = None) -> dict[str, dict[str, Any]]:
    """The sections. ``paths``: ``base`` (converted checkpoint), ``data``, ``tokenizer``, ``save`` and ``load``.

    Without ``counts`` the steps that depend on the packed data are None; ``dry_run`` shows it so.
    """
    m, train = resolved.recipe.megatron, resolved.train_args
    assert m is not None
    batch = global_batch(resolved)
    steps = iterations(train, batch, counts.train if counts else None)
    each = evaluated_at_once(resolved, m, counts.eval) if counts else None
    evaluates = train["eval_strategy"] == "steps" and each != 0
    evaluated = share(train["eval_steps"], steps) if evaluates else None
    seed, length = int(train["seed"]), int(train["max_length"])
    by_steps = train["save_strategy"] == "steps"
    sections: dict[str, dict[str, Any]] = {
        "model": _model(m, length),
        "train": {
            "train_iters": steps,
            "global_batch_size": batch,
            "micro_batch_size": int(train["per_device_train_batch_size"]),
            "exit_signal_handler": True,
            "exit_signal": EXIT_SIGNAL,
            "manual_gc": True,
            "manual_gc_interval": 100,
        },
        "validation": {
            "eval_interval": evaluated,
            "eval_iters": (counts.eval // each if each and evaluated else 0) if counts else None,
            "eval_global_batch_size": each or None,
        },
        **_optimization(train, m, steps),
        "ddp": {
            "use_distributed_optimizer": m.use_distributed_optimizer,
            "check_for_nan_in_grad": True,
            "grad_reduce_in_fp32": True,
            "average_in_collective": False,
        },
        "dataset": _dataset(m, train, paths, length, seed),
        "tokenizer": {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": paths["tokenizer"]},
        "checkpoint": {
            "pretrained_checkpoint": paths["base"],
            "save": paths["save"],
            "load": paths["load"],
            "save_interval": share(train["save_steps"], steps) if by_steps else None,
            "ckpt_format": "torch_dist",
            "fully_parallel_save": True,
            "async_save": False,
        },
        "logger": {"log_interval": max(1, int(train["logging_steps"])), "tensorboard_dir": None},
        "rng": {"seed": seed},
        "mixed_precision": {"recipe": "bf16_mixed", **({"fp8": m.fp8} if m.fp8 else {})},
    }
    if resolved.lora is not None:
        sections["peft"] = _lora(resolved.lora)
    return sections


def evaluated_at_once(resolved: Resolved, m: Megatron, rows: int) -> int:
    """Sequences of one iteration of the evaluation: at most a global batch, and whole micro batches for every rank and,
    with interleaved stages, for every stage (schedules.py); 0 where there are too few for one.
    """
    stages = m.pipeline_model_parallel_size if (m.virtual_pipeline_model_parallel_size or 1) > 1 else 1
    unit = int(resolved.train_args["per_device_train_batch_size"]) * resolved.data_parallel_size * stages
    return min(global_batch(resolved), rows) // unit * unit


def sizes(m: Megatron) -> dict[str, Any]:
    """The keys of the recipe's section that say how the model is cut into parts: Megatron's own names."""
    return {key: value for key, value in m.model_dump().items() if "parallel" in key or key.startswith("account_for")}


def _model(m: Megatron, length: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        **sizes(m),
        "seq_length": length,
        # Demanded with context parallelism (ConfigContainer.validate), and what TRL computes: the mean over all tokens of
        # the global batch, not over its sequences.
        "calculate_per_token_loss": True,
        "recompute_granularity": m.recompute_granularity,
    }
    if m.recompute_granularity == "full":
        values |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return values


def _optimization(train: Mapping[str, Any], m: Megatron, steps: int | None) -> dict[str, dict[str, Any]]:
    decay = float(train["weight_decay"])
    style = DECAYS[str(train["lr_scheduler_type"])]
    return {
        "optimizer": {
            "optimizer": "adam",
            "lr": float(train["learning_rate"]),
            "min_lr": 0.0,
            "weight_decay": decay,
            "adam_beta1": float(train["adam_beta1"]),
            "adam_beta2": float(train["adam_beta2"]),
            "adam_eps": float(train["adam_epsilon"]),
            "clip_grad": float(train["max_grad_norm"]),
            "bf16": True,
            "use_distributed_optimizer": m.use_distributed_optimizer,
        },
        "scheduler": {
            "lr_decay_style": style,
            "lr_decay_iters": steps,
            "lr_warmup_iters": share(train["warmup_steps"], steps),
            "start_weight_decay": decay,
            "end_weight_decay": decay,
            "override_opt_param_scheduler": True,
        },
    }


def _dataset(m: Megatron, train: Mapping[str, Any], paths: Mapping[str, str | None], length: int, seed: int) -> dict[str, Any]:
    """The conversations in Bridge's chat form: ``training.jsonl`` and ``validation.jsonl`` below ``dataset_root``."""
    parts = 2 * m.context_parallel_size if m.context_parallel_size > 1 else 1
    packed = {"packed_sequence_size": length, "pad_seq_to_mult": parts} if train["packing"] else None
    return {
        "dataset_root": paths["data"],
        "seq_length": length,
        "seed": seed,
        "dataloader_type": "batch",
        "do_validation": True,
        "do_test": False,
        "packed_sequence_specs": packed,
        "dataset_kwargs": {
            "chat": True,
            "use_hf_tokenizer_chat_template": True,
            "answer_only_loss": bool(train["assistant_only_loss"]),
        },
    }


def _lora(lora: Mapping[str, Any]) -> dict[str, Any]:
    targets = lora["target_modules"]
    names = [targets] if isinstance(targets, str) else targets
    return {
        "target_modules": [own for name, own in TARGETS.items() if name in names],
        "dim": int(lora["r"]),
        "alpha": int(lora["lora_alpha"]),
        "dropout": float(lora["lora_dropout"]),
        "lora_A_init_method": "kaiming",  # PEFT's own: kaiming_uniform with a = sqrt(5)
        "lora_B_init_method": "zero",
    }


# -- what a dry run shows ------------------------------------------------------------------------------------------------------


def shown_document(resolved: Resolved, cluster: Cluster, run_path: Path) -> dict[str, Any]:
    """What ``submit --dry-run --json`` shows of a Megatron recipe: image, command of the ranks, conversion, configuration.

    What depends on the packed data is null.
    """
    where = megatron_files.paths(run_path)
    named: dict[str, str | None] = {key: str(path) for key, path in where.items()}
    named |= {"save": str(run_path.absolute() / "checkpoints"), "load": None}
    shape = train_shape(resolved, cluster)
    plan = AttemptPlan(1, tuple(Node(f"<node {n}>", f"<node {n}>") for n in range(shape.nodes)), shape.ranks_per_node)
    command = node.ranks_command(RunDir(run_path), resolved, 1, plan, 0, ADDRESS, PORT)
    model = resolved.recipe.model
    section = resolved.recipe.megatron
    assert section is not None
    source = {"model": model.path or model.name, "revision": model.revision}
    exported = "adapter" if resolved.lora is not None else "model"
    return {
        "image": megatron_image.of_training(resolved, cluster).container.image,
        "ranks_command": ["python3", *command[1:]],
        "conversion": {
            "from": source, "to": str(where["base"]), "ranks": resolved.world_size,
            "cut": {key: value for key, value in section.model_dump().items() if value not in (None, 1, False)},
            "exported": {"what": exported, "to": str(megatron_files.exported(run_path))},
        },
        "configuration_file": f"{run_path.absolute()}/attempts/0001/{PLAN_FILE}",
        "configuration": build(resolved, named),
    }  # fmt: skip


def shown_lines(resolved: Resolved, cluster: Cluster, run_path: Path) -> list[str]:
    """:func:`shown_document` for people. What depends on the packed data reads null, and is known once rank 0 has packed it."""
    shown = shown_document(resolved, cluster, run_path)
    conversion = shown["conversion"]
    source = conversion["from"]
    body = json.dumps(shown["configuration"], indent=1)
    return [
        "", f"# the ranks run in {shown['image']}, on node 0 of {resolved.recipe.slurm.nodes} by",
        f"$ {shlex.join(shown['ranks_command'])}",
        f"# first, once in a run: AutoBridge.from_hf_pretrained({source['model']!r}) by {conversion['ranks']} ranks",
        f"#   to {conversion['to']}",
        f"# last: the {conversion['exported']['what']} in the form of Hugging Face, to {conversion['exported']['to']}",
        f"# {shown['configuration_file']}; what is null is known once the data is packed",
        *body.splitlines(),
    ]  # fmt: skip
