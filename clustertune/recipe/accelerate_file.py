"""The recipe's accelerate configuration: accelerate's own file, checked against the pinned accelerate before the queue.

``accelerate launch`` takes unknown keys of ``fsdp_config`` without a message and reads FSDP1's keys as nothing under FSDP2, the
only version that a recipe may ask for. Wrong values of keys that it knows it refuses itself, before a rank reads the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError
from clustertune.recipe import deepspeed_file as ds
from clustertune.recipe.findings import Found, is_whole, show_value
from clustertune.recipe.layers import (
    COMMAND_LINE,
    Document,
    did_you_mean,
    leaves,
    parse_json,
    read_text,
)
from clustertune.recipe.library_facts import facts

DISTRIBUTED_TYPES = ("FSDP", "MULTI_GPU", "DEEPSPEED", "NO")
_NO_PRECISION = {
    "fp16": ("train.fp16 is not carried, and the trainer follows train", "leave it out"),
    # transformers 5.23, training_args.py:1614: what train says is written over it.
    "fp8": ("has no effect: the trainer computes in what train says", "leave it out; Megatron-Bridge has megatron.fp8"),
}

_MACHINE = (
    "num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids", "use_cpu",
    "rdzv_backend", "same_network", "mpirun_config", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm",
    "tpu_env", "command_file", "commands",
)  # fmt: skip
"""Facts of one machine or one launch: ranks and addresses are derived from the job."""

_FSDP1_ONLY = {
    "fsdp_sharding_strategy": "write fsdp_reshard_after_forward: true for FULL_SHARD, false for SHARD_GRAD_OP; HYBRID_SHARD "
    "is parallelism_config with parallelism_config_dp_replicate_size",
    "fsdp_use_orig_params": "leave it out: FSDP2 always keeps the original parameters",
    "fsdp_backward_prefetch": "leave it out: FSDP2 prefetches the next layer in backward by itself",
    "fsdp_sync_module_states": "leave it out: FSDP2 needs only fsdp_cpu_ram_efficient_loading",
    "fsdp_forward_prefetch": "leave it out: accelerate refuses it with FSDP2",
}
"""Keys that mean nothing under ``fsdp_version: 2``."""
RECOMPUTING = "fsdp_activation_checkpointing"
"""Read as the recipe's ``activation_checkpointing: {ratio: 1}``, its default. transformers recomputes then, not accelerate."""


def section(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A section of the file as a mapping, empty where it is absent or wrong."""
    value = body.get(name)
    return value if isinstance(value, dict) else {}


def parallel_sizes(body: Mapping[str, Any]) -> dict[str, int]:
    """The sizes above 1 of the parallelism configuration, in the order of :data:`AXES`."""
    sizes = section(body, MESH)
    return {axis: size for axis in AXES if isinstance(size := sizes.get(size_key(axis)), int) and size > 1}


# --- what a checked file says ---------------------------------------------------------------------------------------------

VERSION = "fsdp_version"
"""Of FSDP: a key of ``fsdp_config``, and a field of ``distributed`` in run.json and in results of ``bench``."""
FSDP2 = f"{VERSION}: 2"
"""As messages write it."""
TYPE, MESH, PRECISION = "distributed_type", "parallelism_config", "mixed_precision"
"""Keys as errors name them: what distributes, the sizes of the mesh, and what is computed in, which is also a field of
``recipe.distribution`` in run.json."""
COMPILER = "dynamo_config"
DYNAMIC, BY_LAYER, BACKEND = (f"{COMPILER}.dynamo_{key}" for key in ("use_dynamic", "use_regional_compilation", "backend"))
"""Key paths of the compiler: how it takes lengths, whether it compiles one layer for all, and by what."""
USE_FSDP2 = f"write {TYPE}: FSDP with {FSDP2}"
SECTIONS = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}
"""By distributed type the section that accelerate reads with it alone."""
AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""The axes of accelerate's mesh, in its order."""
_DEFAULT_STAGE, _UNKNOWN_STAGE = 2, 3
"""accelerate's own ``zero_stage`` (utils/dataclasses.py, DeepSpeedPlugin); what is taken where the file is not recorded."""


SHARDED = {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_efficient_loading": True,
    },
}  # fmt: skip
"""An accelerate file: FSDP2 over all ranks."""
REPLICATED = {"distributed_type": "MULTI_GPU"}
"""An accelerate file: DDP, on GPUs or CPUs."""
ALONE = {"distributed_type": "NO"}
"""An accelerate file: one process."""


def size_key(axis: str) -> str:
    """The key of an axis of the mesh in ``parallelism_config``."""
    return f"{MESH}_{axis}_size"


SHARD_SIZE = size_key("dp_shard")


def key_of(name: str) -> str:
    """The full key path of an FSDP setting, or of the size of an axis of the mesh, as errors name it."""
    return f"{MESH}.{size_key(name)}" if name in AXES else f"fsdp_config.fsdp_{name}"


def distributed_type(body: Mapping[str, Any]) -> str | None:
    """One of :data:`DISTRIBUTED_TYPES` in a checked file; None where the file does not say."""
    kind = body.get(TYPE)
    return kind if isinstance(kind, str) else None


def mixed_precision(body: Mapping[str, Any]) -> str | None:
    """``bf16`` or ``no``; None where the file does not say, or says something else."""
    precision = body.get(PRECISION)
    return "no" if precision is False else precision if precision in ("no", "bf16") else None  # YAML 1.1 reads `no` as false


def without_sizes(body: Mapping[str, Any]) -> dict[str, Any]:
    """The file without ranks and mesh: another number of ranks continues with a run."""
    return {key: value for key, value in body.items() if key not in ("num_processes", "num_machines", "machine_rank", MESH)}


def fsdp_settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ``fsdp_config`` without their ``fsdp_`` prefix."""
    return {key.removeprefix("fsdp_"): value for key, value in section(body, "fsdp_config").items()}


def fsdp_flag(body: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """A true-or-false key of ``fsdp_config``, without its ``fsdp_`` prefix; false without FSDP."""
    return distributed_type(body) == "FSDP" and _is_true(section(body, "fsdp_config").get(f"fsdp_{key}", default))


def _is_true(value: object) -> bool:
    return str(value).lower() in {"true", "1", "yes"}


def state_dict_type(body: Mapping[str, Any]) -> str:
    """torch's StateDictType."""
    return str(section(body, "fsdp_config").get("fsdp_state_dict_type") or "SHARDED_STATE_DICT").upper()


def dynamo_backend(body: Mapping[str, Any]) -> str | None:
    """torch.compile's backend as the file writes it; None where the file does not say."""
    dynamo = section(body, "dynamo_config")
    backend = dynamo.get("dynamo_backend", dynamo.get("backend"))
    return None if backend is None else str(backend)


def compiled(train: Mapping[str, Any], body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether the model is compiled, and whether layer by layer: once, and then taken for all layers of one kind."""
    dynamo = section(body, "dynamo_config")
    named = train["torch_compile"] or train["torch_compile_backend"] or train["torch_compile_mode"]
    on = bool(named) or (dynamo_backend(body) or "NO").upper() not in ("NO", "NONE", "FALSE")
    return on, on and _is_true(dynamo.get("dynamo_use_regional_compilation", dynamo.get("use_regional_compilation")))


def says_dynamic(body: Mapping[str, Any]) -> bool:
    """Whether the file says how torch.compile takes lengths that differ."""
    return bool({"dynamo_use_dynamic", "use_dynamic"} & section(body, "dynamo_config").keys())


def deepspeed_file(body: Mapping[str, Any]) -> Any:
    """The name of DeepSpeed's own file, a text in a checked file; None where accelerate's keys describe it."""
    return section(body, "deepspeed_config").get("deepspeed_config_file")


NO_OFFLOAD = {f"{part}_device": "none" for part in ds.OFFLOADS}
"""accelerate's defaults of ``deepspeed_config``."""


def zero_keys(known: Mapping[str, Any], stage: int, devices: Mapping[str, str], folder: str) -> dict[str, Any]:
    """The keys of ``deepspeed_config`` for a ZeRO stage without a file of DeepSpeed's own.

    ``known``: the section as it is. ``devices``: ``none``, ``cpu`` or ``nvme`` by DeepSpeed's ``offload_param`` and
    ``offload_optimizer``. ``folder``: where ``nvme`` lies, unless the section says.
    """
    paths = {part: known.get(f"{part}_nvme_path") or folder for part, device in devices.items() if device == "nvme"}
    named = {f"{part}_device": device for part, device in devices.items()} | {f"{p}_nvme_path": at for p, at in paths.items()}
    return {"zero_stage": stage, "deepspeed_config_file": None, **named}


def zero_stage(body: Mapping[str, Any], deepspeed: Mapping[str, Any] | None) -> int:
    """The ZeRO stage of DeepSpeed's file, or of accelerate's keys where there is none."""
    keys = section(body, "deepspeed_config")
    if deepspeed is None and "deepspeed_config_file" in keys:
        return _UNKNOWN_STAGE
    stage = ds.get(deepspeed, f"{ds.ZERO}.stage") if deepspeed is not None else keys.get("zero_stage", _DEFAULT_STAGE)
    return int(stage) if str(stage).isdecimal() else 0


def offload_device(body: Mapping[str, Any], deepspeed: Mapping[str, Any] | None, part: str) -> str:
    """``none``, ``cpu`` or ``nvme``, of DeepSpeed's ``offload_param`` or ``offload_optimizer``."""
    keys = section(body, "deepspeed_config")
    if deepspeed is None and "deepspeed_config_file" in keys:
        return "none"
    named = ds.get(deepspeed, f"{ds.ZERO}.{part}.device") if deepspeed is not None else keys.get(f"{part}_device")
    return str(named) if named in ("cpu", "nvme") else "none"


# --- what is wrong with a file --------------------------------------------------------------------------------------------


def find_problems(body: Mapping[str, Any], folder: Path) -> Iterator[Found]:
    """Everything that is wrong with a recipe's accelerate file."""
    return ((("accelerate", *path), message, fix) for path, message, fix in _find_problems(body, folder))


def _find_problems(body: Mapping[str, Any], folder: Path) -> Iterator[Found]:
    known = frozenset(facts("accelerate")["keys"])  # the fields of its ClusterConfig
    for key in body:
        if key in _MACHINE:
            yield (key,), "a fact of one machine or one launch", "leave it out: ranks and addresses are derived"
        elif key not in known:
            yield (key,), "accelerate has no such key", did_you_mean(key, known - set(_MACHINE))
    kind_of = body.get(TYPE)
    if kind_of not in DISTRIBUTED_TYPES:
        message = "missing" if kind_of is None else f"{show_value(kind_of)} is not one of {', '.join(DISTRIBUTED_TYPES)}"
        yield (TYPE,), message, did_you_mean(str(kind_of), DISTRIBUTED_TYPES) if kind_of is not None else None
    precision = body.get("mixed_precision", "no")
    if isinstance(precision, str) and precision in _NO_PRECISION:
        text, fix = _NO_PRECISION[precision]
        yield ("mixed_precision",), f"{precision}: {text}", fix
    elif precision is not False and precision not in ("no", "bf16"):  # YAML 1.1 reads `no` as false, as accelerate does
        yield ("mixed_precision",), f"{show_value(precision)} is not one of no, bf16", "leave it out"
    if section(body, "fp8_config"):
        yield ("fp8_config",), "has no effect: mixed_precision fp8 is none that the trainer takes", "leave it out"
    for name in ("fsdp_config", "deepspeed_config", "parallelism_config", "dynamo_config", "fp8_config"):
        if body.get(name) is not None and not isinstance(body[name], dict):
            yield (name,), "must hold keys and values", None
    yield from _check_sections(body)
    if section(body, "fsdp_config") and kind_of != "FSDP":
        text = f"accelerate reads it only with distributed_type: FSDP, here it is {kind_of}"
        yield ("fsdp_config",), text, "leave it out, on the command line accelerate.fsdp_config=null"
    elif kind_of == "FSDP":
        yield from _check_fsdp(section(body, "fsdp_config"))
    if kind_of == "DEEPSPEED":
        yield from _check_deepspeed(body, folder)


def _check_sections(body: Mapping[str, Any]) -> Iterator[Found]:
    known = facts("accelerate")["options"]  # of accelerate launch: a section's keys become these
    # accelerate adds the prefix of these two where a key lacks it; a parallelism key without its own is read as nothing.
    added = {"dynamo_config": "dynamo_", "fp8_config": "fp8_"}
    for name in ("deepspeed_config", "parallelism_config", *added):
        prefix = added.get(name, "")
        inside = {arg for arg in known if arg.startswith(f"{name}_" if name == "parallelism_config" else prefix)}
        for key, value in section(body, name).items():
            full = key if key.startswith(prefix) else prefix + key
            if full not in inside:
                yield (name, key), "accelerate launch has no such option", did_you_mean(key, inside)
                continue
            if name == "parallelism_config" and key.endswith("_size") and not is_whole(value):
                yield (name, key), f"{show_value(value)} is not a whole number from 1", None


def _check_fsdp(config: Mapping[str, Any]) -> Iterator[Found]:
    known = {name for name in facts("accelerate")["options"] if name.startswith("fsdp_")}
    values = {}
    for key, value in config.items():
        full = key if key.startswith("fsdp") else f"fsdp_{key}"
        if full not in known:
            yield ("fsdp_config", key), "accelerate has no such FSDP key and would ignore it", did_you_mean(full, known)
            continue
        values[full] = (key, value)
        if key != full:  # accelerate launch adds the prefix; all others that read the file do not
            yield ("fsdp_config", key), "is only known with its prefix", f"write {full}"
    version = str(values.get(VERSION, ("", ""))[1])
    if version != "2":
        text = f"{show_value(version)}: recipes train under FSDP2" if version else "missing; accelerate would take 1, FSDP1"
        fix = "accelerate to-fsdp2 --config_file FILE --output_file NEW converts the file"
        yield ("fsdp_config", VERSION), text, fix
        return
    for full, (key, value) in values.items():
        path = ("fsdp_config", key)
        if full == f"{RECOMPUTING}_offload" and str(value).lower() != "false":
            yield path, "is not carried", "leave it out: train.activation_offloading moves activations to host memory"
        elif full in _FSDP1_ONLY:
            yield path, f"has no meaning under {FSDP2}", _FSDP1_ONLY[full]
    key, names = values.get("fsdp_transformer_layer_cls_to_wrap", ("", None))
    if names is not None and str(values.get("fsdp_auto_wrap_policy", ("", ""))[1]).upper() != "TRANSFORMER_BASED_WRAP":
        yield ("fsdp_config", key), "is read only with fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", None
    # What accelerate or clustertune refuses for two keys together.
    plain = {full: value for full, (_, value) in values.items()}
    states = plain.get("fsdp_state_dict_type")
    if str(states).upper() in {"FULL_STATE_DICT", "LOCAL_STATE_DICT"}:
        yield ("fsdp_config", "fsdp_state_dict_type"), f"{states}: checkpoints are written sharded", "write SHARDED_STATE_DICT"


def _check_deepspeed(body: Mapping[str, Any], folder: Path) -> Iterator[Found]:
    config = section(body, "deepspeed_config")
    if not config:
        yield ("deepspeed_config",), "missing", "write deepspeed_config: {deepspeed_config_file: deepspeed.json}"
    name = deepspeed_file(body)
    if name is None:
        stage = zero_stage(body, None)
        if stage > 3:
            yield ("deepspeed_config", "zero_stage"), f"there is no ZeRO stage {stage}", "write 0, 1, 2 or 3"
        for part, text, fix in ds.offload_problems(stage, {part: str(config.get(f"{part}_device")) for part in ds.OFFLOADS}):
            yield ("deepspeed_config", f"{part}_device"), text, fix
        return
    if not isinstance(name, str) or "/" in name or "\0" in name or not (folder / name).is_file():
        yield ("deepspeed_config", "deepspeed_config_file"), f"{show_value(name)} is not a file of the recipe folder", None


# --- with what the command line lays over it; and DeepSpeed's file --------------------------------------------------

ACCELERATE, DEEPSPEED = "accelerate.yaml", "deepspeed.json"
"""Names in a run folder of the files that a run's ranks read in place of the recipe's."""


def flat(overrides: Document | None) -> dict[str, Any]:
    """The overrides by their dotted key path."""
    return {".".join(path): value for path, value in leaves(overrides.data) if path} if overrides else {}


def read_deepspeed(
    accelerate: Mapping[str, Any], folder: Path, shown: str, overrides: Document | None
) -> tuple[Document | None, list[Problem]]:
    """DeepSpeed's configuration where the accelerate file names one, the overrides over it; and what is wrong with it."""
    keys = flat(overrides)
    name = deepspeed_file(accelerate)
    if distributed_type(accelerate) != "DEEPSPEED" or name is None:
        key = next(iter(keys), None)
        if key is None:
            return None, []
        fix = "accelerate.deepspeed_config.deepspeed_config_file=FILE names one"
        return None, [Problem("no DeepSpeed file is in use", file=COMMAND_LINE, key=f"deepspeed.{key}", fix=fix)]
    if not isinstance(name, str) or "/" in name or "\0" in name or not (folder / name).is_file():
        return None, []  # find_problems says so
    file = f"{shown}/{name}"
    try:
        body = parse_json(read_text(folder / name, file), file)
    except UserError as error:
        return None, error.problems
    if not isinstance(body, dict) or not isinstance(body.get("zero_optimization", {}), dict):
        fix = 'write {"zero_optimization": {"stage": 3}}'
        return None, [Problem("must hold DeepSpeed's sections", file=file, fix=fix)]
    return Document(file, body).overridden(overrides), []


def written(accelerate: Mapping[str, Any], folder: Path, deepspeed: Path | None) -> dict[str, Any]:
    """The accelerate configuration as ranks in any working folder read it: DeepSpeed's file by its absolute path.

    ``deepspeed`` is a file that takes the place of the recipe's own.
    """
    body = copy.deepcopy(dict(accelerate))
    config = section(body, "deepspeed_config")
    if isinstance(name := config.get("deepspeed_config_file"), str):
        config["deepspeed_config_file"] = str(deepspeed or folder / name)
    return body
