"""What a model's own JSON may say of its answers: the task decides, and what cannot be served is one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clustertune.errors import UserError
from clustertune.evaluate import model
from clustertune.evaluate.model import check_model
from clustertune.evaluate.run import load_lm


def changed(tiny_model: Path, folder: Path, name: str, **values: Any) -> Path:
    """A copy of the model without its manifest, a JSON file of it with other values."""
    shutil.copytree(tiny_model, folder)
    (folder / "MANIFEST.json").unlink()
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def answer(folder: Path) -> list[int]:
    """Six greedy tokens of the loaded model."""
    lm = load_lm(folder, "cpu", 1)
    ids = torch.tensor([[7, 8, 9]])
    made = lm.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    return list(made[0].tolist())


@pytest.mark.parametrize(
    "odd",
    [
        {"num_beams": 4},
        {"num_beams": 1_000_000, "num_return_sequences": 3},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "high"},
        {"cache_implementation": "nowhere"},
        {"watermarking_config": {"a": 1}, "stop_strings": ["a"]},
        {"repetition_penalty": -1.0, "do_sample": True, "temperature": "hot"},
        {"custom_generate": "somebody/code", "guidance_scale": 3.0},
    ],
    ids=lambda odd: next(iter(odd)),
)
def test_the_greedy_answer_does_not_depend_on_odd_settings(
    odd: dict[str, Any], tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = changed(tiny_model, tmp_path / "odd", model.FILE, **odd)
    assert answer(folder) == answer(tiny_model)
    assert next(iter(odd)) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "nope"),
        ("hidden_act", 5),
        ("attn_implementation", "nope"),
        ("_attn_implementation", "somebody/flash-attention"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("quantization_config", {"quant_method": "nope"}),
        ("quantization_config", "x"),
        ("rope_parameters", {"rope_type": "nope", "rope_theta": 1e4}),
        ("head_dim", 0),
        ("num_attention_heads", 0),
        ("dtype", "float7"),
    ],
)
def test_what_is_not_here_is_one_sentence(key: str, value: Any, tiny_model: Path, tmp_path: Path) -> None:
    folder = changed(tiny_model, tmp_path / "odd", "config.json", **{key: value})
    with pytest.raises(UserError) as caught:
        _, problems = check_model(folder, 8)
        if problems:
            raise UserError(problems[0])
        load_lm(folder, "cpu", 1)
    problem = caught.value.problems[0]
    assert str(problem.file).endswith("config.json") and "\n" not in problem.message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_never_scored(value: float, tiny_model: Path, tmp_path: Path) -> None:
    folder = changed(tiny_model, tmp_path / "broken", "config.json")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="up_proj"):
        load_lm(folder, "cpu", 1)


def test_finite_weights_that_make_nan_are_never_scored(tiny_model: Path, tmp_path: Path) -> None:
    folder = changed(tiny_model, tmp_path / "broken", "config.json")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)
    weights["lm_head.weight"].mul_(1e4)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="NaN"):
        load_lm(folder, "cpu", 1)
