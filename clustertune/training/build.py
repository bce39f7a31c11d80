"""From a resolved recipe to what accelerate and TRL are given: what this machine can do of what the recipe asks.

torchrun or Ray starts the ranks here, so accelerate's variables, which ``accelerate launch`` would give a rank, are set by the
rank.

accelerate's FSDP is made to run on CPU and gloo, so that the sharded path is the same program without a GPU. accelerate 1.15
(``state.py``, ``AcceleratorState.__init__``) turns only MULTI_GPU, MULTI_XPU and their like into ``DistributedType.FSDP``.
MULTI_CPU is not in that list, so a requested FSDP plugin is dropped without a message and the run is plain data parallelism.
All of FSDP behind it is device-neutral: :func:`install_cpu_fsdp` does for MULTI_CPU what the GPU branch does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError
from clustertune.recipe import accelerate_file as acc
from clustertune.replaced import in_place_of
from clustertune.resolve import kernels
from clustertune.resolve.resolved import Distribution, Resolved

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DYNAMIC = "ACCELERATE_DYNAMO_USE_DYNAMIC"


def set_environment(config_file: Path, world_size: int, *, alone: bool = False) -> None:
    """Set what ``accelerate launch`` would have set; before torch is imported.

    ``alone``: one rank without a process group, which accelerate knows by the absence of a rank's variables.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as accelerate and torchrun do; OpenMP reads it when torch is loaded
    os.environ.update(accelerate_environment(config_file, world_size))
    for name in OF_RANKS if alone else ():
        os.environ.pop(name, None)


def accelerate_environment(config_file: Path, world_size: int) -> dict[str, str]:
    """The variables that ``accelerate launch --config_file`` sets from the file, by accelerate 1.15's own code.

    Left out is what a launcher decides: addresses, ports and threads. Off is accelerate's recomputation: transformers' own is
    at work (:mod:`clustertune.training.recompute`), and with both every layer would be recomputed twice.
    Raises UserError where accelerate refuses the file.
    """
    from accelerate.commands import launch
    from accelerate.utils import launch as environment

    arguments = ["--config_file", str(config_file), "--num_processes", str(world_size), "--num_machines", "1"]
    # One machine and any free port: neither reaches the variables, and accelerate tries to bind the port that it is given.
    arguments += ["--machine_rank", "0", "--main_process_port", "0", "--module", "clustertune"]
    parsed = launch.launch_command_parser().parse_args(arguments)
    try:
        parsed, defaults, precision_of_file = launch._validate_launch_command(parsed)
        if parsed.use_deepspeed:
            fields = [*(defaults.deepspeed_config if defaults else ()), *([acc.PRECISION] if precision_of_file else [])]
            parsed.deepspeed_fields_from_accelerate_config = ",".join(fields)
        # By the function that ``accelerate launch`` itself would choose.
        if parsed.use_deepspeed:
            variables = environment.prepare_deepspeed_cmd_env(parsed)[1]
        elif parsed.use_fsdp or parsed.multi_gpu:
            variables = environment.prepare_multi_gpu_env(parsed)
        else:
            variables = environment.prepare_simple_launcher_cmd_env(parsed)[1]
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
        raise UserError(Problem(f"accelerate refuses it: {error}", file=str(config_file))) from None
    kept = {key: str(value) for key, value in variables.items() if key.startswith(PREFIXES)}
    return kept | {name: "false" for name in (acc.RECOMPUTING.upper(),) if name in kept}


def use_cpu() -> None:
    """Set what accelerate reads on a machine without GPUs; to be called before accelerate is imported."""
    os.environ["ACCELERATE_USE_CPU"] = "true"  # `accelerate launch` does not set it for distributed_type FSDP


def install_cpu_fsdp() -> None:
    """Wrap ``AcceleratorState.__init__`` once. Without effect where the distributed type is not MULTI_CPU."""
    from accelerate import state
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import CPUOffloadPolicy

    @in_place_of(state.AcceleratorState, "__init__")
    def init(original: Any, self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        fresh = not state.AcceleratorState._shared_state
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fresh and fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            if isinstance(fsdp_plugin.cpu_offload, CPUOffloadPolicy):
                # Pinned memory is an accelerator's; without one torch refuses to make it.
                fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def leave_shapes_to_torch(distribution: Distribution) -> list[str]:
    """Let torch find out which lengths differ, unless the recipe says so; before the Trainer is made. Returns notes.

    ``accelerate launch`` says "no dynamic shapes" where the file says nothing (utils/launch.py:192, utils/dataclasses.py:1107).
    Every packed length is then compiled again, eight times, and from the ninth on the layers run uncompiled, without a message.
    """
    dynamic = distribution.dynamic_shapes_said
    if dynamic or not distribution.compiled or os.environ.get(DYNAMIC, "").lower() not in ("false", "0"):
        return []
    del os.environ[DYNAMIC]
    return [f"{acc.DYNAMIC} is left to torch: a length that differs is compiled once more, and then for all lengths"]


def fit_to_device(train_args: Mapping[str, Any], *, cuda: bool) -> tuple[dict[str, Any], list[str]]:
    """The recipe's training arguments on this device, and a line for each that differs. A GPU takes them as they are."""
    values = dict(train_args)
    # The Trainer's own filter logs 0.0 for a loss that is NaN and continues (transformers 5.23, logging_nan_inf_filter).
    values |= {"logging_nan_inf_filter": False, "disable_tqdm": True, "save_only_model": False}
    if cuda:
        return values, []
    notes = []
    values |= {"use_cpu": True, "dataloader_pin_memory": False}
    if values["tf32"]:
        values["tf32"] = None
        notes.append("tf32 off: there is no GPU")
    if (named := kernels.attention_of(values)).startswith("flash_attention"):
        notes.append(f"attn_implementation sdpa: {named} needs a GPU")
        values["model_init_kwargs"] = {**values["model_init_kwargs"], "attn_implementation": "sdpa"}
    if values["use_liger_kernel"]:
        values |= {"use_liger_kernel": False, "liger_kernel_config": None}
        notes.append("use_liger_kernel off: its kernels need a GPU")
    if values.get("use_vllm"):  # GRPO's alone
        values["use_vllm"] = False
        notes.append("use_vllm off: TRL starts vLLM on GPUs; transformers generates")
    if values["activation_offloading"]:
        values["activation_offloading"] = False
        # TRL 1.16 asks for the accelerator's streams (trl/models/activation_offloading.py:152), which a CPU has not.
        notes.append("activation_offloading off: activations are in host memory already")
    return values, notes


def trl_arguments(resolved: Resolved, folder: Path, values: Mapping[str, Any]) -> Any:
    """TRL's configuration for the recipe's trainer with those of ``values`` (:func:`fit_to_device`) that it has."""
    import trl

    from clustertune.data import sequences

    kind = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "grpo": trl.GRPOConfig}[resolved.recipe.trainer]
    values = {**values, **(sequences.TRAINER if resolved.recipe.trainer == "sft" else sequences.PAIRS)}
    values["reward_weights"] = [reward.weight for reward in resolved.recipe.reward or ()]
    if values["padding_free"] and not values["packing"]:
        values["max_length"] = None  # TRL asks for it: the rows are cut already
    del values["pad_token"]  # TRL 1.16 deprecates its own: the tokenizer carries it
    return kind(output_dir=str(folder), **{key: value for key, value in values.items() if key in kind.__dataclass_fields__})


def machine_facts() -> dict[str, str | None]:
    """What the metrics of a run say about this rank's machine: its first GPU (None: there is none) and the build of torch."""
    import torch

    return {"gpu0": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None, "torch": torch.__version__}
