"""What is wrong with a model's tensors, from the headers of its files: vLLM serves models that lack weights without a word.

Run with vLLM 0.30.0: without a layer's ``q_proj`` or an untied ``lm_head`` it answers, and differently.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clustertune.errors import Problem, UserError
from clustertune.training.loading_files import survey
from clustertune.training.loading_sources import Unfollowed, find

INDEX = "model.safetensors.index.json"
SHOWN = 5
"""Tensors that the errors name."""


def check_tensors(folder: Path) -> list[Problem]:
    """Every tensor that the architecture of ``config.json`` has and no file holds, or holds in another shape.

    The names of the files go through transformers' own renaming; the model is made on the ``meta`` device. What is quantised
    is not looked at. Raises UserError for files that are not whole.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping

    try:
        config: Any = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    # An architecture that the installed transformers does not know, or values that its class refuses.
    except Exception as error:
        return [Problem(f"transformers does not accept it: {error}", file=str(folder / "config.json"))]
    if getattr(config, "quantization_config", None):
        return []
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    index = folder / INDEX
    named = json.loads(index.read_bytes())["weight_map"] if index.exists() else None
    files = sorted({folder / name for name in named.values()}) if named else sorted(folder.glob("*.safetensors"))
    rules = SimpleNamespace(weight_mapping=get_model_conversion_mapping(model), dtype_plan=None)
    try:
        find(model, survey(files, named), rules, model.state_dict())
    except UserError as error:
        more = len(error.problems) - SHOWN
        return error.problems[:SHOWN] + ([Problem(f"{more} more tensors", file=str(folder))] if more > 0 else [])
    except Unfollowed:
        return []  # transformers' own loading, or vLLM's, says what is wrong
    return []
