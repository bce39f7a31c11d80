"""DeepSpeed's files of three ranks, cut as its ZeRO cuts them: no size is a multiple of three, so each piece is padded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from clustertune.export.export import export
from clustertune.recipe.native_rules import lora_defaults
from tests.export.conftest import make_tensors, seal_checkpoint, write_recipe

LORA = lora_defaults() | {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj", "down_proj"]}
RANKS = 3


def write_zero(folder: Path, tensors: Mapping[str, torch.Tensor], stage: int) -> None:
    """``tensors`` as RANKS ranks of ZeRO leave them in ``folder/global_step2``: 3 cuts each tensor, 1 and 2 their row."""
    names = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    step = folder / "global_step2"
    step.mkdir(parents=True)
    (folder / "latest").write_text(step.name)
    prefix = "zero_pp_rank_0_" if stage == 3 else ""
    model = {
        "module": {},
        "buffer_names": [],
        "shared_params": {},
        "ds_version": "0.19.8",
        "dp_world_size": RANKS,
        "param_shapes": [{name: tensor.shape for name, tensor in names.items()}],
    }
    torch.save(model, step / f"{prefix}mp_rank_00_model_states.pt")
    cut = [*names.values()] if stage == 3 else [torch.cat([tensor.reshape(-1) for tensor in names.values()])]
    for rank in range(RANKS):
        pieces = []
        for flat in cut:
            each = -(-flat.numel() // RANKS)
            padded = torch.cat([flat.reshape(-1), torch.full((RANKS * each - flat.numel(),), 7.0)])
            pieces.append(padded[rank * each : (rank + 1) * each])
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        state = {"zero_stage": stage, "partition_count": RANKS, key: [torch.cat(pieces)]}
        torch.save({"optimizer_state_dict": state}, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


@pytest.mark.parametrize("stage", [2, 3])
def test_pieces_of_ranks_that_do_not_divide_a_tensor_are_put_together(tmp_path: Path, stage: int) -> None:
    """Every tensor is what was cut, and what DeepSpeed's own script finds."""
    from safetensors.torch import load_file

    tensors = {name.replace(".default.", "."): tensor for name, tensor in make_tensors(LORA).items()}
    assert all(tensor.numel() % RANKS for tensor in tensors.values()) and len(tensors) == 8
    checkpoint = tmp_path / "step-000002"
    write_zero(checkpoint, make_tensors(LORA), stage)
    write_recipe(checkpoint, LORA)
    export(seal_checkpoint(checkpoint), tmp_path / "adapter")
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert found.keys() == {name.removeprefix("model.") for name in tensors}
    assert all(found[name.removeprefix("model.")].equal(tensor) for name, tensor in tensors.items())
    scripts = pytest.importorskip("deepspeed.utils.zero_to_fp32")
    script = scripts.get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), exclude_frozen_parameters=True)
    assert {name.replace(".default.", ".") for name in script} == found.keys()
    assert all(tensor.equal(found[name.replace(".default.", ".")]) for name, tensor in script.items())
