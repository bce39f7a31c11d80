"""The ``--tiny`` layer: what makes any recipe runnable on a laptop in a minute, over the same code and distribution files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustertune.config.load import RECIPES

CONVERSATIONS = Path("tiny-oasst2", "conversations.jsonl")
"""The conversations that come with the project, below ``recipes/``."""
MAX_LENGTH = 256
MAX_STEPS = 6
EVERY = 2
MAX_ACCUMULATION = 2
MAX_NEW_TOKENS = 32


def tiny_layer(values: dict[str, Any], folder: Path, data_parallel_size: int) -> dict[str, Any]:
    """The values that ``--tiny`` lays between the recipe and the overrides.

    ``values`` are the recipe's with the overrides on top: the global batch follows the micro batch that will be used.
    """
    train = values.get("train")
    train = train if isinstance(train, dict) else {}
    return {
        "model": {"weights": "random", "revision": None, "path": None},
        "data": {
            "input": _shipped_conversations(folder),
            "format": "oasst-tree",
            "language": "en",
            "revision": None,
            "expect": None,
        },
        "train": _train(train, data_parallel_size),
        "eval": {"ifeval": {"max_gen_toks": MAX_NEW_TOKENS, "pass_mark": {}}},
        "expect": {},
    }


def _train(train: dict[str, Any], data_parallel_size: int) -> dict[str, Any]:
    micro_batch = _whole(train.get("per_device_train_batch_size"), 8)
    stated = _whole(train.get("global_batch_size"), 0)
    per_pass = micro_batch * data_parallel_size
    result: dict[str, Any] = {
        "max_length": min(_whole(train.get("max_length"), MAX_LENGTH), MAX_LENGTH),
        "max_steps": min(_whole(train.get("max_steps"), MAX_STEPS), MAX_STEPS),
        "logging_steps": 1,
        "global_batch_size": per_pass * max(1, min(stated // per_pass, MAX_ACCUMULATION)),
    }
    for key in ("save_steps", "eval_steps"):
        result[key] = min(_whole(train.get(key), EVERY), EVERY)
    if train.get("tf32") is not None:
        # TrainingArguments refuses it on anything but an NVIDIA GPU of Ampere or newer.
        result["tf32"] = None
    # The tokenizer of a tiny run is trained locally and brings its own special tokens.
    result |= {key: None for key in ("pad_token", "eos_token") if train.get(key) is not None}
    init = train.get("model_init_kwargs")
    if isinstance(init, dict) and str(init.get("attn_implementation", "")).startswith("flash_attention"):
        result["model_init_kwargs"] = {"attn_implementation": "sdpa"}
    return result


def _whole(value: object, otherwise: int) -> int:
    """A usable positive whole number; what is none of the kind is for the checks, not for here."""
    try:
        number = int(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else otherwise
    except (ValueError, OverflowError):
        return otherwise
    return number if number >= 1 else otherwise


def _shipped_conversations(folder: Path) -> str:
    """Relative to the recipe where that lies beside it, so that a run says the same on every machine."""
    if folder.parent != RECIPES:
        return str(RECIPES / CONVERSATIONS)
    return CONVERSATIONS.name if folder.name == CONVERSATIONS.parent.name else f"../{CONVERSATIONS.as_posix()}"
