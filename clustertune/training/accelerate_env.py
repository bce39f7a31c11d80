"""The variables that ``accelerate launch`` would give a rank: here torchrun or Ray starts it."""

from __future__ import annotations

import os
from pathlib import Path

from clustertune.errors import Problem, UserError
from clustertune.recipe import accelerate_file as acc

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def apply(config_file: Path, world_size: int, *, alone: bool = False) -> None:
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
            found = environment.prepare_deepspeed_cmd_env(parsed)[1]
        elif parsed.use_fsdp or parsed.multi_gpu:
            found = environment.prepare_multi_gpu_env(parsed)
        else:
            found = environment.prepare_simple_launcher_cmd_env(parsed)[1]
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
        raise UserError(Problem(f"accelerate refuses it: {error}", file=str(config_file))) from None
    kept = {key: str(value) for key, value in found.items() if key.startswith(PREFIXES)}
    return kept | {name: "false" for name in (acc.RECOMPUTING.upper(),) if name in kept}
