"""A recipe with everything that follows from it: what the stages of a run read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from clustertune.errors import UserError
from clustertune.recipe import accelerate_file as acc
from clustertune.recipe.sections import Recipe, is_address
from clustertune.resolve import distribution as distributions
from clustertune.resolve.distribution import Distribution

NOT_STARTED = "is for Megatron-Bridge in its own container, which clustertune submit starts"
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
    """The sections whose keys are clustertune's own."""
    global_batch_size: int
    """Sequences, or preferences, of an optimizer step over all ranks."""
    train_args: dict[str, Any]
    """Keyword arguments of TRL's ``SFTConfig``, ``DPOConfig`` or ``GRPOConfig`` (there with ``max_prompt_length``), after
    derivation: all that a recipe may state, TRL's default where it does not."""
    lora: dict[str, Any] | None
    """The same of PEFT's ``LoraConfig``; None: all parameters are trained."""
    origins: dict[str, str]
    """For each key path that is stated: ``base NAME``, ``recipe``, ``tiny`` or ``override``; ``default`` for our own others."""
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
        """How the training is spread over ranks."""
        derived = next((str(item.value) for item in self.derived if item.key == "reduce_dtype"), None)
        return distributions.read(
            self.recipe,
            self.train_args,
            self.accelerate,
            self.deepspeed,
            world=self.world_size,
            data_parallel=self.data_parallel_size,
            layers=int(self.architecture.get("num_hidden_layers", 1)),
            reduce_dtype=self.recipe.reduce_dtype or derived,
        )

    @property
    def is_dpo(self) -> bool:
        """Whether pairs of answers are trained on, beside a reference model."""
        return self.recipe.trainer == "dpo"

    @property
    def is_grpo(self) -> bool:
        """Whether the model's own answers to prompts are trained on, by their rewards."""
        return self.recipe.trainer == "grpo"

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

    def require_startable(self) -> None:
        """Raise UserError for a recipe that only ``submit`` starts: one for Megatron-Bridge."""
        if self.recipe.megatron is not None:
            raise UserError(
                NOT_STARTED, file=self.name, key="megatron", fix="clustertune submit RECIPE, or take the section out"
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, ``distribution`` among them; :meth:`from_dict` gives an equal object back."""
        return {**_json().dump_python(self, mode="json"), "distribution": asdict(self.distribution)}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Resolved:
        """The inverse of :meth:`as_dict`. Raises ValueError where ``body`` is something else."""
        found: Resolved = _json().validate_python(body)
        return found

    def fingerprint(self) -> str:
        """SHA-256 (hex) of what decides the trained weights: model, data, training, LoRA and distribution.

        A default that the recipe states counts as one that it leaves out. Left out: names and places of the recipe, what is
        expected, how it is scored, wall time, trackers, when to save, and the shape: ranks, mesh, and so how many micro batches
        of a global batch fall to a rank, which a run may change between attempts. Megatron's is counted.
        """
        recipe, train = self.recipe.model_dump(mode="json"), self.train_args
        body = {key: recipe[key] for key in ("model", "trainer", "activation_checkpointing", "reduce_dtype", "megatron")}
        body["data"] = {key: value for key, value in recipe["data"].items() if key not in ("expect", "max_rejected")}
        body["train"] = {key: train[key] for key in train if self.counts(key) and key not in _SAVES}
        body |= {"global_batch_size": self.global_batch_size, "lora": self.lora, "architecture": self.architecture}
        body |= {"accelerate": self.accelerate, "deepspeed": self.deepspeed, "chat_template": self.chat_template}
        if self.recipe.megatron is None:
            del body["train"]["gradient_accumulation_steps"]
            body["accelerate"] = acc.without_sizes(self.accelerate)
        else:
            body["world_size"] = self.world_size
        if self.is_grpo:
            body |= {"reward": recipe["reward"], "reward_code": self.reward_code}
            body |= {"rollout": "servers"} if self.recipe.rollout == "servers" else {}  # other answers than the ranks' own
        return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def counts(self, key: str) -> bool:
        """Whether a training argument decides the trained weights, so that a run with another value is another run."""
        measured = self.train_args["lr_scheduler_type"] in _MEASURED and key.startswith(_OF_EVALUATIONS)
        if measured or key == "eval_packing":
            return True
        return key not in _WITHOUT_EFFECT and not key.startswith(_FAMILIES_WITHOUT_EFFECT)


@cache
def _json() -> TypeAdapter[Resolved]:
    return TypeAdapter(Resolved)
