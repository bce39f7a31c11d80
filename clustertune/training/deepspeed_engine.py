"""DeepSpeed's engine under the guarantees of the other strategies: what it reads, what it writes, and when it may step.

Facts of DeepSpeed 0.19, accelerate 1.15, transformers 5.23: the optimizer step happens inside ``engine.backward``'s caller,
before the Trainer looks at the gradient norm; checkpoints are pickles that DeepSpeed loads with ``weights_only=False``; ZeRO-3
leaves empty tensors in the place of parameters, their parts lie beside them (``ds_tensor``).
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import math
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.serialization import safe_globals

from clustertune.errors import ExitCode, Problem, UserError, free_bytes, storage_error
from clustertune.launch.node_folders import own_folder
from clustertune.manifest import MANIFEST, find_problem, read_manifest, read_whole
from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import deepspeed_file as ds
from clustertune.resolve.resolved import Resolved

NVME_VARIABLES = {part: f"ACCELERATE_DEEPSPEED_{part.upper()}_NVME_PATH" for part in ds.OFFLOADS}
"""What accelerate fills ``"nvme_path": "auto"`` with (utils/dataclasses.py, DeepSpeedPlugin)."""
ADAM_BYTES, HALF = 12, 2
"""Bytes that a trained parameter's float32 master and its two moments take; bytes of a bfloat16 number."""
_NAME = "clustertune"


# --- before the stack is imported ---------------------------------------------------------------------------------------


def set_environment(resolved: Resolved, run_id: str, *, cuda: bool) -> list[str]:
    """Set what DeepSpeed and accelerate read from the environment. Returns a note for what is otherwise than on a cluster.

    Raises UserError where state is to lie on a disk that is not there, not ours to write or too small.
    """
    if not resolved.distribution.is_deepspeed:
        return []
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # accelerate leaves DeepSpeed out without a message, where this is set (state.py, AcceleratorState).
        os.environ.pop("ACCELERATE_USE_CPU", None)
    if (folder := _job_folder()) is not None:
        # Compiled with a lock beside it, which a rank that was killed leaves for all later ones to wait for.
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
    return _set_nvme(resolved, run_id)


def _job_folder() -> Path | None:
    """The job's own folder on this node's disk, where a cluster file names one (storage.scratch)."""
    folder = own_folder(os.environ)
    return folder if folder is not None and folder.name.startswith("clustertune-") else None


def _set_nvme(resolved: Resolved, run_id: str) -> list[str]:
    notes: list[str] = []
    for part, options in resolved.distribution.nvme.items():
        path: str | None = options
        if options == ds.AUTO:
            path = os.environ.get(NVME_VARIABLES[part])
            if path is None and (own := _job_folder()) is not None:
                path = str(own / "swap")
            elif path is None:
                path = str(Path(tempfile.gettempdir(), f"clustertune-{run_id}", "swap"))
                notes.append(f"{part} on {path}: no cluster file names a disk of the node (storage.scratch)")
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    atexit.register(shutil.rmtree, Path(path).parent, ignore_errors=True)
            os.environ[NVME_VARIABLES[part]] = path
        _check_disk(Path(path or options), part, resolved)
    return notes


def _check_disk(folder: Path, part: str, resolved: Resolved) -> None:
    """Make the folder, for this user alone, and see that it is large enough for the ranks of this node."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise storage_error(error, f"{part} cannot lie there", folder) from None
    need = swap_bytes(resolved, part) * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // max(1, resolved.world_size)
    used = sum(path.stat().st_size for path in folder.rglob("*.swp") if path.is_file())  # of an earlier attempt: written over
    free = free_bytes(folder)
    if free is not None and free + used < need:
        text = f"{free / 1e9:.1f} GB free, {part} of this node's ranks takes about {need / 1e9:.1f} GB"
        fix = "free space, or name another disk: storage.scratch of the cluster file"
        raise UserError(Problem(text, file=str(folder), fix=fix), ExitCode.STORAGE)


def swap_bytes(resolved: Resolved, part: str) -> int:
    """What all ranks keep on disk for ``offload_param`` or ``offload_optimizer``; 0 where it cannot be counted."""
    from clustertune.recipe.parameters import parameter_count, trained_count

    if part == "offload_param":
        return HALF * (parameter_count(resolved.architecture) or 0)
    return ADAM_BYTES * (trained_count(resolved.architecture, resolved.lora) or 0)


def prepare(resolved: Resolved) -> None:
    """Before the process group is made. Raises UserError where the recipe asks for DeepSpeed and it is not installed."""
    if not resolved.distribution.is_deepspeed:
        return
    if importlib.util.find_spec("deepspeed") is None:
        fix = "install it in the image (containers/versions.env, DEV_DEEPSPEED), or use another accelerate file"
        raise UserError(
            Problem("the Python package deepspeed is not installed", file=resolved.accelerate_file, key=acc.TYPE, fix=fix)
        )
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        keep_gloo()


def keep_gloo() -> None:
    """Leave out DeepSpeed's second way between ranks of one machine, compiled for minutes: gloo is enough for CPUs."""
    # By its name: deepspeed.comm.torch, taken as an attribute, is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


def fit_to_cpu(args: Any) -> list[str]:
    """What DeepSpeed would compile for minutes, and a machine without GPUs does not need. Returns a note for each.

    ``args``: transformers' arguments with DeepSpeed's plugin. With ``DS_BUILD_AIO=1`` (DeepSpeed's own word) NVMe stays NVMe.
    """
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is None or os.environ.get("DS_ACCELERATOR") != "cpu":
        return []
    config, notes = plugin.hf_ds_config.config, []
    for part in ds.move_to_memory(config) if on_cpu("nvme") == "cpu" else []:
        notes.append(f"{part} in memory: there is no GPU, and DeepSpeed would compile its NVMe reader")
    if ds.keep_own_optimizer(config):
        notes.append("the offloaded optimizer is torch's: there is no GPU, and DeepSpeed would compile its own")
    return notes


def on_cpu(device: str) -> str:
    """Where something that the file lays on ``device`` lies in this process."""
    offloads = os.environ.get("DS_ACCELERATOR") != "cpu" or os.environ.get("DS_BUILD_AIO") == "1"
    return device if device != "nvme" or offloads else "cpu"


@contextmanager
def whole_models() -> Iterator[None]:
    """Models that are made in here are not split by ZeRO-3: transformers splits each that it makes while a run uses it."""
    from transformers.integrations import deepspeed as integration

    before, integration._hf_deepspeed_config_weak_ref = integration._hf_deepspeed_config_weak_ref, None
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = before


# --- parameters and state -----------------------------------------------------------------------------------------------


def elements(parameter: Any) -> int:
    """A parameter's elements over all ranks."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def local_part(parameter: Any) -> torch.Tensor | None:
    """This rank's part of a parameter that ZeRO-3 split, without its padding, which is never initialised; None of another.

    Empty where the part is on NVMe.
    """
    part = getattr(parameter, "ds_tensor", None)
    if part is None:
        return None
    rank, size = torch.distributed.get_rank(parameter.ds_process_group), part.ds_numel
    held = max(0, min(parameter.ds_numel - rank * size, size))
    flat = part.detach().reshape(-1)
    return flat[: min(held, flat.numel())] if flat.numel() >= held else flat[:0]


def is_zero(optimizer: Any) -> bool:
    """Whether an optimizer is one of ZeRO's, which keep the state of flat groups."""
    return _flat_groups(optimizer) is not None


def _flat_groups(optimizer: Any) -> list[torch.Tensor] | None:
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):  # stage 3; stages 1 and 2
        if (groups := getattr(optimizer, name, None)) is not None:
            return list(groups)
    return None


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """This rank's float32 masters and optimizer state, in the order of ZeRO's groups; what is on NVMe by its files."""
    state = optimizer.optimizer.state
    for group in _flat_groups(optimizer) or []:
        yield group.detach()
        for _, value in sorted(state.get(group, {}).items()):
            yield value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        for path in sorted(Path(swapper.swap_folder).glob("*.swp")):
            if "gradient" not in path.name:
                yield torch.frombuffer(bytearray(read_whole(path)), dtype=torch.uint8)


def swapped_masters(optimizer: Any) -> dict[str, str]:
    """The swap files of the float32 masters that lie on NVMe, by the number of their group: the saved group is empty then."""
    known = getattr(getattr(optimizer, "optimizer_swapper", None), "swap_params_info", {})
    groups = enumerate(_flat_groups(optimizer) or [])
    infos = {str(n): known.get(getattr(group, "ds_id", None)) for n, group in groups if group.numel() == 0}
    return {number: Path(info.get_swap_paths()[0]).name for number, info in infos.items() if info is not None}


# --- the engine ---------------------------------------------------------------------------------------------------------


def guard(engine: Any, refuse: Callable[[float | None, bool], None]) -> None:
    """Ask ``refuse`` before every optimizer step, with the first loss that was not finite and whether gradients are.

    ``refuse`` is a collective and raises on all ranks alike. ZeRO's stages look at the norm of their gradients themselves and
    leave the step out (``_global_grad_norm`` is then inf); stage 0 looks at nothing and names no norm.
    """
    backward, step = engine.backward, engine.step
    losses: list[torch.Tensor] = []
    """Of the micro batches of a step, on the device: to look at each would wait for it."""

    def watched_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(loss, torch.Tensor):
            losses.append(loss.detach().reshape(()))
        return backward(loss, *args, **kwargs)

    def guarded_step(*args: Any, **kwargs: Any) -> Any:
        finite = True
        if engine.zero_optimization_stage() == 0:
            norms = [torch.linalg.vector_norm(p.grad) for p in engine.module.parameters() if p.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
            engine._global_grad_norm, finite = norm, bool(torch.isfinite(norm))
        bad = [value for value in (torch.stack(losses).cpu().tolist() if losses else []) if not math.isfinite(value)]
        losses.clear()
        refuse(bad[0] if bad else None, finite)
        return step(*args, **kwargs)

    engine.backward, engine.step = watched_backward, guarded_step


def check(engine: Any, resolved: Resolved) -> dict[str, Any]:
    """What the engine really does, for the run's record. Raises UserError where it is not what the recipe's file says."""
    used, settings = resolved.distribution, engine._config.zero_config
    pairs = {
        "stage": (int(engine.zero_optimization_stage()), used.zero_stage),
        "offload_param": (_device_of(settings.offload_param), on_cpu(used.offload_params)),
        "offload_optimizer": (_device_of(settings.offload_optimizer), on_cpu(used.offload_optimizer)),
        "train_batch_size": (int(engine.train_batch_size()), resolved.global_batch_size),
        "gradient_accumulation_steps": (
            int(engine.gradient_accumulation_steps()), int(resolved.train_args["gradient_accumulation_steps"]),
        ),
    }  # fmt: skip
    values = {key: value for key, (value, _) in pairs.items()}
    problems = [
        Problem(f"DeepSpeed runs with {key} {value}, the recipe says {expected}", key=f"deepspeed.{key}")
        for key, (value, expected) in pairs.items()
        if value != expected
    ]
    inner = engine.optimizer
    share = _state_share(engine) if is_zero(inner) else 1.0
    if values["stage"] and not problems and share > 1.25 / engine.dp_world_size + 0.01:
        problems.append(Problem(f"this rank holds {share:.0%} of the optimizer state, one of {engine.dp_world_size}"))
    if problems:
        raise UserError(problems, ExitCode.FAILED)
    return {**values, "gradient_clipping": engine.gradient_clipping(), "state_share": round(share, 4)}


def _state_share(engine: Any) -> float:
    """Trained elements whose optimizer state this rank holds, over all of them."""
    held = sum(int(getattr(group, "ds_numel", group.numel())) for group in _flat_groups(engine.optimizer) or [])
    total = sum(elements(p) for p in engine.module.parameters() if p.requires_grad)
    return held / total if total else 0.0


def _device_of(offload: Any) -> str:
    device = getattr(offload, "device", None)
    return str(getattr(device, "value", device) or "none")


def take_over(engine: Any, refuse: Callable[[float | None, bool], None]) -> None:
    """Have an engine write and load checkpoints by :func:`save_file` and :func:`load_file`, and ask before each step; once."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    if engine.checkpoint_engine.name == _NAME:
        return
    files = engine.checkpoint_engine = TorchCheckpointEngine()
    files.name = _NAME
    files.save = lambda state_dict, path: save_file(state_dict, path, engine.optimizer)
    files.load = lambda path, map_location=None: load_file(path)  # noqa: ARG005 - to host memory
    follow(engine)
    guard(engine, refuse)


def save_file(state_dict: Any, path: str, optimizer: Any) -> None:
    """Write one file of a checkpoint. Zip form: its tensors can be mapped instead of read."""
    torch.save(state_dict, path)
    if path.endswith("_optim_states.pt") and (masters := swapped_masters(optimizer)):
        Path(path).with_suffix(".nvme.json").write_text(json.dumps(masters))


def load_file(path: str | Path) -> Any:
    """Load one file of a checkpoint after its hash; tensors, plain values and three of DeepSpeed's own names, no code.

    Raises UserError where the file is another than the one that was saved, or holds more than that.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    path = Path(path)
    root = next((folder for folder in path.parents if (folder / MANIFEST).is_file()), None)
    if root is None:
        raise UserError(Problem("is not part of a whole checkpoint", file=str(path)))
    record = read_manifest(root, "checkpoint").files.get(path.relative_to(root).as_posix())
    if record is None:
        raise UserError(Problem("is not named by the checkpoint's manifest", file=str(path)))
    if problem := find_problem(path, record):
        raise UserError(problem)
    try:
        with safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError) as error:
        message = " ".join(str(error).split())[:300]
        raise UserError(Problem(f"holds more than tensors and plain values: {message}", file=str(path))) from None


def follow(engine: Any) -> None:
    """Make every load of this engine a whole one, also where optimizer state is on NVMe.

    DeepSpeed 0.19's ``engine.load_checkpoint`` copies the swap files of the checkpoint back and takes the masters out of them,
    and no more. What lies in memory (groups below the size that is swapped, the counts of steps) stays as it was made. The
    optimizer knows of no moments before its first step, so those in the files are overwritten with zeros (``engine.py``:
    ``_load_zero_checkpoint`` is left out with ``zero_nvme_offload_optimizer``; ``swap_tensor/optimizer_utils.py``:
    ``_get_state_tensors``). Small parameters, which every rank holds whole, stay those of the base model until the first step.
    """
    optimizer = engine.optimizer
    if getattr(optimizer, "optimizer_swapper", None) is None:
        return
    load = engine.load_checkpoint

    def load_whole(folder: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        loaded = load(folder, tag, *args, **kwargs)
        if loaded[0] is not None:
            tag = tag or read_whole(Path(folder, "latest")).decode().strip()
            states = engine._get_all_zero_checkpoints(folder, tag)
            restore(optimizer, states[torch.distributed.get_rank(engine.optimizer.dp_process_group)])
        return loaded

    engine.load_checkpoint = load_whole


def restore(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Lay this rank's saved state over what :func:`follow` describes. ``saved``: its file's ``optimizer_state_dict``."""
    inner, swapper = optimizer.optimizer, optimizer.optimizer_swapper
    optimizer._set_fp32_optimizer_param_groups()
    inner.load_state_dict(saved["optimizer_state_dict"])
    optimizer._clear_fp32_optimizer_param_groups()
    for number, (group, value) in enumerate(
        zip(optimizer.fp32_partitioned_groups_flat, saved["fp32_flat_groups"], strict=True)
    ):
        info = swapper.swap_params_info.get(getattr(group, "ds_id", None))
        if info is None:
            group.data.copy_(value)
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
            continue
        del info.tensors[1:]
        for name, moment in inner.state[group].items():
            if isinstance(moment, torch.Tensor) and moment.numel() == 0:  # its values are in a file of this name
                moment.ds_id = f"{name}-{group.ds_id}"
                info.add_state_tensors([moment])
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
