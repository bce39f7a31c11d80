"""From a resolved recipe to TRL's arguments: what this machine can do of what the recipe asks."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clustertune.resolve import kernels
from clustertune.resolve.resolved import Resolved


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


def set_tracker_environment(run_dir: Path, run_id: str, project: str, *, has_key: bool = False) -> None:
    """The trackers' own variables: below the run folder, W&B as one run across attempts, offline unless someone is logged in.

    ``has_key``: an API key is available that is not in the environment.
    """
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    logged_in = has_key or bool(os.environ.get("WANDB_API_KEY")) or _netrc_has(host)
    settings = {
        "WANDB_DIR": str(run_dir),
        "WANDB_PROJECT": project,
        "WANDB_RUN_ID": run_id,
        "WANDB_RESUME": "allow",
        "WANDB_CONSOLE": "off",  # captured output could hold what a library prints of its environment
        "WANDB_DISABLE_CODE": "true",
        "WANDB_DISABLE_GIT": "true",  # a remote URL may hold credentials
        "WANDB_SILENT": "true",
        "WANDB_LOG_MODEL": "false",
        "MLFLOW_TRACKING_URI": (run_dir / "mlruns").absolute().as_uri(),  # else mlflow.db in the working folder
        "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow 3 asks for a word of consent
        "TENSORBOARD_LOGGING_DIR": str(run_dir / "tensorboard"),
        "TRACKIO_DIR": str(run_dir / "trackio"),
    }
    if not logged_in:
        settings["WANDB_MODE"] = "offline"
    for key, value in settings.items():
        os.environ.setdefault(key, value)


def _netrc_has(host: str) -> bool:
    import netrc

    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
