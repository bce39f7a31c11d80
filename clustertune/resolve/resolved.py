"""A recipe with everything that follows from it: what the stages of a run read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from clustertune.recipe import accelerate_file as acc
from clustertune.recipe.native_rules import lora_defaults
from clustertune.recipe.schema import CHOOSING, Recipe, is_address
from clustertune.resolve import distribution as distributions
from clustertune.resolve.distribution import Distribution

EVAL_DATA = "eval.data"
"""The key of the file of one's own prompts."""

_WITHOUT_EFFECT = {
    "report_to", "run_name", "project", "disable_tqdm", "include_num_input_tokens_seen", "include_for_metrics",
    "per_device_eval_batch_size", "prediction_loss_only", "batch_eval_metrics", "metric_for_best_model", "greater_is_better",
    "save_total_limit", "save_on_each_node", "enable_jit_checkpoint", "torch_empty_cache_steps", "skip_memory_metrics", "debug",
    "do_train", "do_eval", "do_predict", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "ddp_timeout", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph",
}  # fmt: skip
_FAMILIES_WITHOUT_EFFECT = ("log_", "logging_", "eval_", "hub_", "trackio_")
"""Training arguments that change what is shown, kept, waited for or evaluated, not what is trained: an evaluation leaves the
random state as it was (training/trainer.py). Others of their families count: ``dataloader_drop_last``, ``dataloader_in_order``
and ``dataloader_persistent_workers`` change which rows a step has, ``eval_packing`` the rows that are prepared, and
``bf16_full_eval`` and ``fp16_full_eval`` the precision that DeepSpeed trains in."""
_MEASURED = ("reduce_lr_on_plateau", "greedy")
"""Schedules that read the evaluations: with them it counts when one is, of what, and what it is judged by."""
_OF_EVALUATIONS = ("eval_", "logging_", "per_device_eval_batch_size", "metric_for_best_model", "greater_is_better")

_SAVES = ("save_strategy", "save_steps")
"""Training arguments of when to save: the section ``save`` takes their place, also in a run that is there."""


def is_there(path: Path) -> bool:
    """Whether a path can be found: a name that is too long, or behind a closed folder, is not there."""
    try:
        return path.exists()
    except OSError:
        return False


def expand_home(given: str | Path) -> Path:
    """A path with ``~`` and ``~user`` put in; as it stands where there is no such user."""
    try:
        return Path(given).expanduser()
    except RuntimeError:
        return Path(given)


def recorded_precision(record: Mapping[str, Any]) -> str:
    """``distribution.mixed_precision`` of a recorded recipe; the first version recorded the training arguments alone."""
    found = (record.get("distribution") or {}).get(acc.PRECISION)
    return str(found) if found else distributions.mixed_precision(record.get("train_args") or {})


@dataclass(frozen=True)
class Derived:
    """A value that no file states: ``reason`` is the formula with its numbers."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Resolved:
    """One recipe after layers, overrides and derivation; :meth:`as_dict` and :meth:`from_dict` carry it through JSON."""

    name: str
    """The recipe folder's name."""
    folder: str
    """The recipe folder, as an absolute path."""
    recipe: Recipe
    origins: dict[str, str]
    """For each key path of the recipe: ``base NAME``, ``recipe``, ``tiny``, ``override`` or ``default``."""
    train_args: dict[str, Any]
    """Keyword arguments of TRL's ``SFTConfig``, ``DPOConfig`` or ``GRPOConfig`` (there with ``max_prompt_length``), after
    derivation, with TRL's defaults; None is left out."""
    world_size: int
    """Ranks."""
    data_parallel_size: int
    """Ranks that read different sequences: the world size over the tensor, context and sequence parallel sizes."""
    architecture: dict[str, Any]
    """The model's ``config.json`` keys (scaled down where ``tiny``)."""
    accelerate: dict[str, Any]
    """The parsed accelerate configuration."""
    accelerate_file: str
    """Its file name in the recipe folder."""
    tiny: bool = False
    chat_template: str | None = None
    """The text of the recipe's own chat template."""
    reward_code: dict[str, str] = field(default_factory=dict)
    """The text of each file of the recipe folder that has a reward, by its name without ``.py``."""
    accelerate_overrides: dict[str, Any] = field(default_factory=dict)
    """What the command line laid over the accelerate file, by key path; null took a key out."""
    deepspeed: dict[str, Any] | None = None
    """DeepSpeed's configuration, overrides included, where the accelerate file names one."""
    deepspeed_overrides: dict[str, Any] = field(default_factory=dict)
    derived: list[Derived] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def distribution(self) -> Distribution:
        """How the training is spread over ranks: of a record, as it was recorded."""
        return distributions.read(
            self.recipe,
            self.train_args,
            self.accelerate,
            self.deepspeed,
            world=self.world_size,
            data_parallel=self.data_parallel_size,
            layers=int(self.architecture.get("num_hidden_layers", 1)),
            reduce_dtype=self.reduce_dtype,
        )

    @property
    def lora(self) -> dict[str, Any] | None:
        """The section ``lora`` with PEFT's own defaults filled in: a key that is missing is None."""
        return None if self.recipe.lora is None else {**lora_defaults(), **self.recipe.lora}

    @property
    def is_dpo(self) -> bool:
        """Whether pairs of answers are trained on, beside a reference model."""
        return self.recipe.trainer == "dpo"

    @property
    def is_grpo(self) -> bool:
        """Whether the model's own answers to prompts are trained on, by their rewards."""
        return self.recipe.trainer == "grpo"

    @property
    def reduce_dtype(self) -> str | None:
        """``float32`` or ``bfloat16``: the type in which FSDP sums gradients; None where that is not a choice."""
        derived = (str(item.value) for item in self.derived if item.key == "reduce_dtype")
        return self.recipe.reduce_dtype or next(derived, None)

    @property
    def inputs(self) -> dict[str, Path]:
        """Files and folders of the data, and of one's own prompts, by their keys: as they stand where absolute, below the
        recipe folder where they exist there, else from here. What comes from the Hub or an object store is not among them.
        """
        found = {}
        named = [(f"{key}.input", part.input) for key, part in self.recipe.data.keyed_parts()]
        for key, path in [*named, (EVAL_DATA, self.recipe.eval.data)]:
            if path is not None and not is_address(path):
                given = expand_home(path)
                beside = Path(self.folder, given)
                found[key] = beside.resolve() if is_there(beside) else given.absolute()
        return found

    def with_staged(self, folder: Path) -> Resolved:
        """The same with ``staged=folder``: it says where model and data lie, and nothing is derived from it."""
        recipe = self.recipe.model_copy(update={"staged": str(folder)})
        return replace(self, recipe=recipe, origins={**self.origins, "staged": "override"})

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` gives an equal object back."""
        return {
            **{item.name: getattr(self, item.name) for item in fields(self)},
            "recipe": self.recipe.model_dump(mode="json"),
            "derived": [vars(item) for item in self.derived],
            "distribution": self.distribution.as_dict(),
        }

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Resolved:
        """The inverse of :meth:`as_dict`. Raises KeyError, TypeError or ValueError where ``body`` is something else."""
        rest = {key: value for key, value in body.items() if key not in {"recipe", "derived", "distribution"}}
        derived = [Derived(**item) for item in body["derived"]]
        found = cls(recipe=Recipe.model_validate(body["recipe"]), derived=derived, **rest)
        vars(found)["distribution"] = Distribution.from_dict(body["distribution"])
        return found

    def fingerprint(self) -> str:
        """SHA-256 (hex) of what decides the trained weights: model, data, training, LoRA and distribution.

        Left out: names and places of the recipe, what is expected, how it is scored, wall time, trackers, when to save, and the
        shape: ranks, mesh, and so how many micro batches of a global batch fall to a rank, which a run may change between
        attempts. Megatron's is counted.
        """
        recipe = self.recipe.model_dump(mode="json")
        body = {
            "model": recipe["model"],
            "data": {
                key: value
                for key, value in recipe["data"].items()
                if key not in ("expect", "max_rejected") and (key not in CHOOSING or value is not None)
            },
            "train": {key: value for key, value in self.train_args.items() if self.counts(key) and key not in _SAVES},
            "lora": recipe["lora"],
            "world_size": self.world_size,
            "architecture": self.architecture,
            "accelerate": self.accelerate,
            "chat_template": self.chat_template,
        }
        if self.recipe.megatron is None:
            del body["world_size"]
            body["global_batch_size"] = self.recipe.train.get("global_batch_size")
            body["train"].pop("gradient_accumulation_steps", None)
            body["accelerate"] = acc.without_sizes(self.accelerate)
        # Only where they are there: recipes without them keep their fingerprints, and with these their run folders.
        recomputed = self.recipe.activation_checkpointing
        share = recomputed.model_dump(mode="json", exclude_none=True) if recomputed is not None else None
        extra = {"deepspeed": self.deepspeed, "megatron": recipe["megatron"], "ratio": share}
        extra["reduce_dtype"] = recipe["reduce_dtype"]
        extra["trainer"] = recipe["trainer"] if recipe["trainer"] != "sft" else None
        extra |= {"reward": recipe["reward"], "reward_code": self.reward_code or None} if self.is_grpo else {}
        body |= {key: value for key, value in extra.items() if value is not None}
        return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def counts(self, key: str) -> bool:
        """Whether a training argument decides the trained weights, so that a run with another value is another run."""
        measured = self.train_args["lr_scheduler_type"] in _MEASURED and key.startswith(_OF_EVALUATIONS)
        if measured or key == "eval_packing":
            return True
        return key not in _WITHOUT_EFFECT and not key.startswith(_FAMILIES_WITHOUT_EFFECT)
