"""A recipe's DeepSpeed configuration, DeepSpeed's own JSON: what may stand in it, and what is wrong with it.

DeepSpeed takes an unknown key of the top level without a message (runtime/config.py asks for the ones that it knows).
It refuses one of ``zero_optimization``, ``bf16`` and ``fp16`` only when the model is being wrapped. It reads ``auto`` where
nothing fills it in as if the key were not there (runtime/config_utils.py, DeepSpeedConfigModel.__init__).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from clustertune.recipe import native_rules
from clustertune.recipe.findings import Found, is_whole, show_value
from clustertune.recipe.layers import COMMAND_LINE, Document, did_you_mean, leaves
from clustertune.recipe.library_facts import facts

ZERO = "zero_optimization"
ALIGNMENT = f"{ZERO}.parameter_alignment"
OFFLOADS = ("offload_param", "offload_optimizer")

FILLED = frozenset(
    (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "bf16.enabled", "fp16.enabled", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.offload_param.nvme_path", "zero_optimization.offload_optimizer.nvme_path",
    )
)  # fmt: skip
"""Keys whose ``auto`` is filled in: transformers (integrations/deepspeed.py, HfTrainerDeepSpeedConfig) and accelerate
(utils/dataclasses.py, DeepSpeedPlugin.__post_init__; accelerator.py, _prepare_deepspeed)."""


def get(body: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of a configuration; None where there is none."""
    value: Any = body
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def text(body: Mapping[str, Any], path: str) -> str | None:
    """The same as a word."""
    value = get(body, path)
    return None if value is None else str(value)


def secondary_partition(body: Mapping[str, Any]) -> bool:
    """Whether a second copy of the weights is split over the ranks of each node (ZeRO++'s hpZ)."""
    size = str(get(body, f"{ZERO}.zero_hpz_partition_size"))
    return size.isdecimal() and int(size) > 1


def quantizes_traffic(body: Mapping[str, Any]) -> bool:
    """Whether weights or gradients travel quantised (ZeRO++)."""
    return any(bool(get(body, f"{ZERO}.zero_quantized_{what}")) for what in ("weights", "gradients"))


def offload_problems(stage: int, devices: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """What a ZeRO stage does not offload: the part of ``devices``, what is wrong, and what to do
    (deepspeed/runtime/zero/config.py, offload_config.py)."""
    for part, lowest, what in (("offload_param", 3, "parameters are"), ("offload_optimizer", 1, "optimizer state is")):
        device = devices.get(part)
        if device in ("cpu", "nvme") and stage < lowest:
            yield part, f"{what} offloaded from stage {lowest} on, here it is {stage}", "use stage 3, or leave it out"
        elif device == "nvme" and stage < 3:
            yield part, f"nvme takes state of stage 3 only, here it is {stage}", "use cpu"


def nvme_paths(body: Mapping[str, Any]) -> dict[str, str]:
    """What is swapped to a local disk, and where: a folder or ``auto``."""
    on_disk = [part for part in OFFLOADS if get(body, f"{ZERO}.{part}.device") == "nvme"]
    return {part: str(get(body, f"{ZERO}.{part}.nvme_path")) for part in on_disk}


def move_to_memory(body: dict[str, Any]) -> list[str]:
    """Have what is swapped to a disk offloaded to host memory in a configuration; returns what was moved."""
    moved = list(nvme_paths(body))
    for part in moved:
        section = get(body, f"{ZERO}.{part}")
        section.pop("nvme_path", None)
        section["device"] = "cpu"
    return moved


def keep_own_optimizer(body: dict[str, Any]) -> bool:
    """Have torch's optimizer offloaded instead of DeepSpeed's Adam; whether the configuration offloads one of its own."""
    own = get(body, f"{ZERO}.offload_optimizer.device") == "cpu" and "optimizer" not in body
    if own:
        body["zero_force_ds_cpu_optimizer"] = False
    return own


# --- what is wrong with a file ----------------------------------------------------------------------------------------

AUTO = "auto"

_METRICS = "leave it out: train.report_to says where metrics go"
_EXPORT = "leave it out: no checkpoint of it can be exported"
_REFUSED = {
    **dict.fromkeys(("tensorboard", "wandb", "comet", "csv_monitor"), _METRICS),
    **dict.fromkeys(("expert_parallel", "hybrid_engine", "pipeline", f"{ZERO}.zenflow"), _EXPORT),
    "autotuning": "leave it out: clustertune plan and clustertune sweep do that",
    "data_efficiency": "leave it out: a resumed run continues at the same place in the recipe's own order",
    "activation_checkpointing": "write activation_checkpointing.ratio: models of transformers do not read DeepSpeed's",
    "scheduler": "leave it out: train.lr_scheduler_type says it",
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
    ("tensor_parallel.autotp_size", 1, "use FSDP2 with parallelism_config_tp_size"),
)
"""Keys with the one value that they may have."""
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "adagrad": "adagrad", "lion": "lion", "sgd": "sgd", "lamb": "lamb"}
"""DeepSpeed's optimizers by how transformers' names begin; its Adam decouples weight decay (adam_w_mode is true)."""
_OFFLOADED_AS_THEY_ARE = ("adamw", "adagrad", "lion")
"""What accelerate maps to an optimizer of the same kind on the CPU (utils/deepspeed.py, map_pytorch_optim_to_deepspeed);
everything else becomes Adam there, without a message."""

REDUCED_IN = "communication_data_type"
"""DeepSpeed's key for the type in which gradients are summed over ranks; bfloat16 under mixed precision by default."""


def meant(train: Mapping[str, Any], accumulation: int, dp: int) -> list[tuple[str, Any, str]]:
    """What the recipe says about values that DeepSpeed's file says too: DeepSpeed's key, the value, and where it stands.

    ``train``: the complete section. ``dp``: ranks that read different sequences.
    """
    micro, precision = train["per_device_train_batch_size"], native_rules.mixed_precision(train)
    batch = f"micro batch {micro} x accumulation {accumulation} x {dp} data-parallel ranks"
    return [
        ("train_batch_size", train["global_batch_size"], f"train.global_batch_size: {batch}"),
        ("train_micro_batch_size_per_gpu", micro, "train.per_device_train_batch_size"),
        ("gradient_accumulation_steps", accumulation, "train.gradient_accumulation_steps"),
        ("gradient_clipping", train["max_grad_norm"], "train.max_grad_norm"),
        ("bf16.enabled", precision == "bf16", "train.bf16"),
        ("fp16.enabled", precision == "fp16", "train.fp16"),
        ("optimizer.params.lr", train["learning_rate"], "train.learning_rate"),
        ("optimizer.params.betas", [train["adam_beta1"], train["adam_beta2"]], "train.adam_beta1 and adam_beta2"),
        ("optimizer.params.eps", train["adam_epsilon"], "train.adam_epsilon"),
        ("optimizer.params.weight_decay", train["weight_decay"], "train.weight_decay"),
    ]


Wrong = Iterator[tuple[str, str, str | None]]
"""A dotted key path, what is wrong with it, and what to do."""


def find_problems(
    document: Document, values: Collection[tuple[str, Any, str]], train: Mapping[str, Any], stated: Collection[str]
) -> Iterator[Found]:
    """Everything that is wrong with the file, by itself and against the recipe's complete section ``train``.

    ``values``: those of :func:`meant`. ``stated``: the keys of ``train`` that the recipe itself has.
    """
    body = document.data
    for path, message, fix in (
        *_check_names(body),
        *_check_zero(body, lambda path: document.position(tuple(path.split("."))) == COMMAND_LINE),
        *_check_meant(body, values),
        *_check_optimizer(body, train, stated),
    ):
        yield ("deepspeed", *path.split(".")), message, fix


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
        if value is not None and value != only and not (value == AUTO and path in FILLED):
            yield path, f"{show_value(value)}: not carried here", fix
    for leaf, value in leaves(body):
        if value == AUTO and (path := ".".join(leaf)) not in FILLED:
            text = '"auto", which nothing fills in here: DeepSpeed would take its default'
            yield path, text, "leave it out, or write a value"


def _check_zero(body: Mapping[str, Any], from_command_line: Callable[[str], bool]) -> Wrong:
    """The stage, and what may be offloaded where (deepspeed/runtime/zero/config.py, offload_config.py)."""
    zero = body.get(ZERO)
    if not isinstance(zero, Mapping) or not is_whole(stage := zero.get("stage", 0), 0):
        return
    offloads = {part: section for part in OFFLOADS if isinstance(section := zero.get(part), Mapping)}
    devices = {part: str(offload.get("device", "none")) for part, offload in offloads.items()}
    for part, text, fix in offload_problems(stage, devices):
        yield f"{ZERO}.{part}.device", text, fix
    for part, device in devices.items():
        if device == "nvme" and stage == 3:
            # The place is a fact of the cluster. The command line may name another one.
            key, path = f"{ZERO}.{part}.nvme_path", offloads[part].get("nvme_path")
            named = isinstance(path, str) and path.startswith("/") and from_command_line(key)
            if path != AUTO and not named:
                text = "missing" if path is None else f"{show_value(path)}, the path of one site"
                yield key, text, 'write "auto": storage.scratch of the cluster file holds it, in a folder for each job'


def _check_meant(body: Mapping[str, Any], values: Collection[tuple[str, Any, str]]) -> Wrong:
    """What the recipe says as well must be the same, and must not be left to another default."""
    recipe = {key: value for key, value, _ in values}
    missing = {
        "train_micro_batch_size_per_gpu": "DeepSpeed refuses a file without it",
        "gradient_accumulation_steps": "accelerate would take 1" if recipe["gradient_accumulation_steps"] != 1 else "",
        "gradient_clipping": "DeepSpeed would not clip" if recipe["gradient_clipping"] else "",
    }
    for key, value, where in values:
        stated = get(body, key)
        if stated is None:
            section = key.rpartition(".")[0]
            inside = section == "optimizer.params" and get(body, "optimizer") is not None
            why = missing.get(key, "") or ("DeepSpeed would take its own default" if inside else "")
            if why:
                text = f"missing, while {where.partition(':')[0]} is {show_value(value)}: {why}"
                yield key, text, f'write "{key.rpartition(".")[2]}": "auto"'
        elif stated == AUTO or (key == "fp16.enabled" and stated is True):
            continue
        elif stated != value or isinstance(stated, bool) != isinstance(value, bool):  # true is 1 for Python
            yield key, f"{show_value(stated)}, while {where.partition(':')[0]} is {show_value(value)}", 'write "auto"'


def _check_optimizer(body: Mapping[str, Any], train: Mapping[str, Any], stated: Collection[str]) -> Wrong:
    named = str(train["optim"])
    kind = get(body, "optimizer.type")
    if body.get("optimizer") is not None:
        prefix = _OPTIMIZERS.get(str(kind).lower())
        if not isinstance(kind, str):
            yield "optimizer.type", "missing", 'write "AdamW", or leave the optimizer out: train.optim says it'
        elif "optim" in stated and (prefix is None or not named.startswith(prefix)):
            fix = "leave the optimizer out, or train.optim: two places that say it must agree"
            yield "optimizer.type", f"{show_value(kind)}, while train.optim is {named}", fix
        return
    device = get(body, f"{ZERO}.offload_optimizer.device")
    forced = body.get("zero_force_ds_cpu_optimizer", True)
    if device in ("cpu", "nvme") and forced and not named.startswith(_OFFLOADED_AS_THEY_ARE):
        fix = "train.optim=adamw_torch, or zero_force_ds_cpu_optimizer: false"
        text = f"train.optim is {named}: offloaded, accelerate makes it Adam without a message"
        yield f"{ZERO}.offload_optimizer.device", text, fix
