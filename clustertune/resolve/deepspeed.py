"""A recipe's DeepSpeed configuration: DeepSpeed's own JSON, checked before the queue, with what fills its ``auto``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import deepspeed_keys as keys
from clustertune.recipe.deepspeed_keys import OFFLOADS, ZERO, get
from clustertune.recipe.findings import Found
from clustertune.recipe.layers import COMMAND_LINE, did_you_mean
from clustertune.recipe.library_facts import facts
from clustertune.recipe.native_rules import is_whole, show_value
from clustertune.recipe.yamlfile import Document, leaves
from clustertune.resolve.distribution import mixed_precision
from clustertune.resolve.resolved import Derived

AUTO = "auto"

_METRICS = "leave it out: train.report_to says where metrics go"
_EXPORT = "leave it out: no checkpoint of it can be exported"
_REFUSED = {
    **dict.fromkeys(("tensorboard", "wandb", "comet", "csv_monitor"), _METRICS),
    **dict.fromkeys(("expert_parallel", "hybrid_engine", "pipeline", f"{ZERO}.zenflow"), _EXPORT),
    "autotuning": "leave it out: clustertune plan and clustertune sweep do that",
    "data_efficiency": "leave it out: a resumed run continues at the same place in the recipe's own order",
    "activation_checkpointing": "write activation_checkpointing.ratio: models of transformers do not read DeepSpeed's",
    "weight_quantization": "write train.model_init_kwargs.quantization_config",
    f"{ZERO}.cpu_offload": "write offload_optimizer: {device: cpu}",
    f"{ZERO}.cpu_offload_param": "write offload_param: {device: cpu}",
    f"{ZERO}.cpu_offload_use_pin_memory": "write pin_memory below offload_param or offload_optimizer",
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": "leave it out: weights are exported from the shards",
}
"""Keys that DeepSpeed knows and a recipe may not set, with what to do."""
_GUARD = "leave it out: a step that is not finite would be taken"
_STORE = "leave it out: checkpoints are written sharded, into one folder, and hashed"
_ONLY = (
    (f"{ZERO}.compute_grad_norm", True, _GUARD),
    ("bf16.check_grad_overflow", True, _GUARD),
    (f"{ZERO}.elastic_checkpoint", False, _STORE),
    ("checkpoint.load_universal", False, _STORE),
    ("checkpoint.use_node_local_storage", False, _STORE),
    ("checkpoint.writer", None, _STORE),
    ("checkpoint.parallel_write", None, _STORE),
    ("managed_gradient_accumulation", True, "leave it out: the Trainer takes a step after gradient_accumulation_steps"),
    ("fp16.enabled", False, "use bf16: fp16's loss scale leaves steps out, which look like steps that are not finite"),
    ("tensor_parallel.autotp_size", 1, f"use FSDP2 with {acc.size_key('tp')}"),
)
"""Keys with the one value that they may have."""
_SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""DeepSpeed's schedules (runtime/lr_schedules.py) by transformers' names."""
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "adagrad": "adagrad", "lion": "lion", "sgd": "sgd", "lamb": "lamb"}
"""DeepSpeed's optimizers by how transformers' names begin; its Adam decouples weight decay (adam_w_mode is true)."""
_OFFLOADED_AS_THEY_ARE = ("adamw", "adagrad", "lion")
"""What accelerate maps to an optimizer of the same kind on the CPU (utils/deepspeed.py, map_pytorch_optim_to_deepspeed);
everything else becomes Adam there, without a message."""

REDUCED_IN = "communication_data_type"
"""DeepSpeed's key for the type in which gradients are summed over ranks; bfloat16 under mixed precision by default."""


@dataclass(frozen=True)
class RecipeValues:
    """What the recipe says about the values that DeepSpeed's file says too."""

    train: Mapping[str, Any]
    """The complete section ``train``."""
    accumulation: int
    dp: int
    """Ranks that read different sequences."""
    stated: Collection[str] = ()
    """The keys of the train section that the recipe itself has."""

    def values(self) -> Iterator[tuple[str, Any, str]]:
        """DeepSpeed's key, the value that the recipe means, and where it stands."""
        micro = self.train["per_device_train_batch_size"]
        batch = f"micro batch {micro} x accumulation {self.accumulation} x {self.dp} data-parallel ranks"
        yield "train_batch_size", self.train["global_batch_size"], f"train.global_batch_size: {batch}"
        yield "train_micro_batch_size_per_gpu", micro, "train.per_device_train_batch_size"
        yield "gradient_accumulation_steps", self.accumulation, "train.gradient_accumulation_steps"
        yield "gradient_clipping", self.train["max_grad_norm"], "train.max_grad_norm"
        yield "bf16.enabled", mixed_precision(self.train) == "bf16", "train.bf16"
        yield "fp16.enabled", mixed_precision(self.train) == "fp16", "train.fp16"
        yield "optimizer.params.lr", self.train["learning_rate"], "train.learning_rate"
        betas = [self.train["adam_beta1"], self.train["adam_beta2"]]
        yield "optimizer.params.betas", betas, "train.adam_beta1 and adam_beta2"
        yield "optimizer.params.eps", self.train["adam_epsilon"], "train.adam_epsilon"
        yield "optimizer.params.weight_decay", self.train["weight_decay"], "train.weight_decay"
        yield "scheduler.params.warmup_min_lr", 0, "transformers' default"
        yield "scheduler.params.warmup_max_lr", self.train["learning_rate"], "train.learning_rate"


Wrong = Iterator[tuple[str, str, str | None]]
"""A dotted key path, what is wrong with it, and what to do."""


def find_problems(document: Document, meant: RecipeValues) -> Iterator[Found]:
    """Everything that is wrong with the file, by itself and against the recipe's train section."""
    body = document.data
    for path, message, fix in (
        *_check_names(body),
        *_check_zero(body, lambda path: document.position(tuple(path.split("."))) == COMMAND_LINE),
        *_check_meant(body, meant),
        *_check_optimizer(body, meant),
        *_check_scheduler(body, meant),
    ):
        yield ("deepspeed", *path.split(".")), message, fix


def filled(body: Mapping[str, Any], meant: RecipeValues) -> list[Derived]:
    """The recipe's value of each ``auto``, with its reason; transformers fills in the others by the model's size."""
    return [Derived(f"deepspeed.{key}", value, reason) for key, value, reason in meant.values() if get(body, key) == AUTO]


def _check_names(body: Mapping[str, Any]) -> Wrong:
    """Keys of the top level, which DeepSpeed ignores where it does not know them; keys that a recipe may not set; and ``auto``
    that nothing fills in. DeepSpeed itself checks what is in a section."""
    known = frozenset(facts("deepspeed")["keys"]) - set(_REFUSED)
    for key in body:
        if key not in known and key not in _REFUSED:
            yield key, "DeepSpeed has no such key and would ignore it", did_you_mean(key, known)
    for path, fix in _REFUSED.items():
        if get(body, path) is not None:
            yield path, "not a recipe's to set", fix
    for path, only, fix in _ONLY:
        value = get(body, path)
        if value is not None and value != only and not (value == AUTO and path in keys.AUTO):
            yield path, f"{show_value(value)}: not carried here", fix
    for leaf, value in leaves(body):
        if value == AUTO and (path := ".".join(leaf)) not in keys.AUTO:
            text = '"auto", which nothing fills in here: DeepSpeed would take its default'
            yield path, text, "leave it out, or write a value"


def _check_zero(body: Mapping[str, Any], from_command_line: Callable[[str], bool]) -> Wrong:
    """The stage, and what may be offloaded where (deepspeed/runtime/zero/config.py, offload_config.py)."""
    zero = body.get(ZERO)
    if not isinstance(zero, Mapping) or not is_whole(stage := zero.get("stage", 0), 0):
        return
    offloads = {part: found for part in OFFLOADS if isinstance(found := zero.get(part), Mapping)}
    devices = {part: str(offload.get("device", "none")) for part, offload in offloads.items()}
    for part, text, fix in keys.offload_problems(stage, devices):
        yield f"{ZERO}.{part}.device", text, fix
    for part, device in devices.items():
        if device == "nvme" and stage == 3:
            # The place is a fact of the cluster. The command line may name another one.
            key, given = f"{ZERO}.{part}.nvme_path", offloads[part].get("nvme_path")
            named = isinstance(given, str) and given.startswith("/") and from_command_line(key)
            if given != AUTO and not named:
                text = "missing" if given is None else f"{show_value(given)}, the path of one site"
                yield key, text, 'write "auto": storage.scratch of the cluster file holds it, in a folder for each job'


def _check_meant(body: Mapping[str, Any], meant: RecipeValues) -> Wrong:
    """What the recipe says as well must be the same, and must not be left to another default."""
    missing = {
        "train_micro_batch_size_per_gpu": "DeepSpeed refuses a file without it",
        "gradient_accumulation_steps": "accelerate would take 1" if meant.accumulation != 1 else "",
        "gradient_clipping": "DeepSpeed would not clip" if meant.train["max_grad_norm"] else "",
    }
    for key, value, where in meant.values():
        given = get(body, key)
        if given is None:
            section = key.rpartition(".")[0]
            inside = section == "optimizer.params" and get(body, "optimizer") is not None
            why = missing.get(key, "") or ("DeepSpeed would take its own default" if inside else "")
            if why:
                text = f"missing, while {where.partition(':')[0]} is {show_value(value)}: {why}"
                yield key, text, f'write "{key.rpartition(".")[2]}": "auto"'
        elif given == AUTO or (key == "fp16.enabled" and given is True):
            continue
        elif given != value or isinstance(given, bool) != isinstance(value, bool):  # true is 1 for Python
            yield key, f"{show_value(given)}, while {where.partition(':')[0]} is {show_value(value)}", 'write "auto"'


def _check_optimizer(body: Mapping[str, Any], meant: RecipeValues) -> Wrong:
    named = str(meant.train["optim"])
    kind = get(body, "optimizer.type")
    if body.get("optimizer") is not None:
        wanted = _OPTIMIZERS.get(str(kind).lower())
        if not isinstance(kind, str):
            yield "optimizer.type", "missing", 'write "AdamW", or leave the optimizer out: train.optim says it'
        elif "optim" in meant.stated and (wanted is None or not named.startswith(wanted)):
            fix = "leave the optimizer out, or train.optim: two places that say it must agree"
            yield "optimizer.type", f"{show_value(kind)}, while train.optim is {named}", fix
        return
    device = get(body, f"{ZERO}.offload_optimizer.device")
    forced = body.get("zero_force_ds_cpu_optimizer", True)
    if device in ("cpu", "nvme") and forced and not named.startswith(_OFFLOADED_AS_THEY_ARE):
        fix = "train.optim=adamw_torch, or zero_force_ds_cpu_optimizer: false"
        text = f"train.optim is {named}: offloaded, accelerate makes it Adam without a message"
        yield f"{ZERO}.offload_optimizer.device", text, fix


def _check_scheduler(body: Mapping[str, Any], meant: RecipeValues) -> Wrong:
    if body.get("scheduler") is None:
        return
    kind, named = get(body, "scheduler.type"), str(meant.train["lr_scheduler_type"])
    if _SCHEDULERS.get(str(kind)) != named:
        fix = "leave the scheduler out: train.lr_scheduler_type says it"
        yield "scheduler.type", f"{show_value(kind)}, while train.lr_scheduler_type is {named}", fix
    elif get(body, "scheduler.params.warmup_type") != "linear":
        text = "not linear, as train's warm-up is: DeepSpeed's default is a logarithm"
        yield "scheduler.params.warmup_type", text, 'write "warmup_type": "linear", or leave the scheduler out'
