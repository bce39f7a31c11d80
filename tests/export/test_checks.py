"""What export expects, which is PEFT's own, and refuses: other tensors, files that are not as sealed, hostile pickles."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

from clustertune.errors import UserError
from clustertune.export.export import build_expected, export, normalise
from clustertune.manifest import MANIFEST
from tests.damage import Canary, flip
from tests.export.conftest import ARCHITECTURE, LORA, Maker, make_tensors, seal_checkpoint

Q = "base_model.model.model.layers.0.self_attn.q_proj"
V = "base_model.model.model.layers.1.self_attn.v_proj"


def refuse(checkpoint: Path, tmp_path: Path) -> list[str]:
    """The problems of a checkpoint that must not be exported, and nothing written."""
    with pytest.raises(UserError) as caught:
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*exporting"))
    return [str(problem) for problem in caught.value.problems]


def test_every_wrong_tensor_is_named_at_once(make_checkpoint: Maker, tmp_path: Path) -> None:
    tensors = make_tensors()
    del tensors[f"model.{Q}.lora_A.weight"]
    tensors[f"model.{Q}.lora_B.weight"] = torch.randn(31, 4)
    tensors[f"model.{V}.lora_A.weight"] = torch.ones(4, 32, dtype=torch.int64)
    tensors["model.base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = torch.randn(4, 32)
    problems = refuse(make_checkpoint(tensors), tmp_path)
    assert len(problems) == 4
    text = "\n".join(problems)
    assert f"{Q}.lora_A.weight [4, 32] is missing" in text
    assert f"{Q}.lora_B.weight has shape [31, 4], expected [32, 4]" in text
    assert f"{V}.lora_A.weight has dtype torch.int64" in text
    assert "layers.7.self_attn.q_proj.lora_A.weight belongs to no module" in text


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_named_and_counted(value: float, make_checkpoint: Maker, tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors[f"model.{Q}.lora_A.weight"][1, :3] = value
    tensors[f"model.{V}.lora_B.weight"][0, 0] = value
    problems = refuse(make_checkpoint(tensors), tmp_path)
    assert len(problems) == 2
    assert f"{Q}.lora_A.weight has 3 of 128 values" in problems[0] and f"{V}.lora_B.weight has 1 of" in problems[1]


@pytest.mark.parametrize(
    "name", ["recipe.json", "pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", MANIFEST]
)
@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_damage_in_any_file_that_is_read_names_the_file(name: str, damage: str, make_checkpoint: Maker, tmp_path: Path) -> None:
    path = make_checkpoint() / name
    if damage == "gone":
        path.unlink()
    else:
        flip(path, 0 if name == MANIFEST else None, 4)
    problems = refuse(tmp_path / "step-000002", tmp_path)
    assert any(str(path) in problem for problem in problems), problems


@pytest.mark.parametrize("sealed", [True, False])
def test_hostile_index_runs_nothing(sealed: bool, make_checkpoint: Maker, tmp_path: Path) -> None:
    """With or without a manifest that vouches for it."""
    checkpoint = make_checkpoint()
    (checkpoint / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps({"index": Canary(tmp_path / "canary")}))
    problems = refuse(seal_checkpoint(checkpoint) if sealed else checkpoint, tmp_path)
    assert not (tmp_path / "canary").exists()
    assert ".metadata" in problems[0] and (not sealed or "not the index" in problems[0])


def out_of_the_folder(tensor: Any) -> None:
    tensor["chunks"][0][2] = "../../elsewhere"


def without_a_chunk(tensor: Any) -> None:
    tensor["chunks"][0][1] = [2, 32]
    tensor["chunks"][0][4] = 2 * 32 * 4


@pytest.mark.parametrize(
    ("change", "words"), [(out_of_the_folder, "not a file of its folder"), (without_a_chunk, f"{Q}|shards")]
)
def test_an_index_that_lies_is_refused(change: Any, words: str, make_checkpoint: Maker, tmp_path: Path) -> None:
    checkpoint = make_checkpoint()
    shutil.copyfile(checkpoint / "pytorch_model_fsdp_0" / "__0_0.distcp", tmp_path / "elsewhere")
    index = checkpoint / "pytorch_model_fsdp_0" / ".metadata"
    body = json.loads(index.read_bytes())
    change(body["tensors"][f"model.{Q}.lora_A.weight"])
    index.write_text(json.dumps(body))
    assert re.search(words, refuse(seal_checkpoint(checkpoint), tmp_path)[0])


def test_cost_does_not_depend_on_the_base(make_checkpoint: Maker, tmp_path: Path) -> None:
    """A base tensor of 40 MB in the same file is never held in memory."""

    def proc(name: str, key: str) -> int:
        return next(int(line.split()[1]) for line in Path("/proc/self", name).read_text().splitlines() if line.startswith(key))

    export(make_checkpoint(), tmp_path / "warm")
    base = {"model.base_model.model.model.embed_tokens.weight": torch.ones(10_000_000)}
    checkpoint = make_checkpoint(make_tensors() | base, name="step-000004", step=4)
    del base
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    peak, read = proc("status", "VmHWM"), proc("io", "rchar")
    summary = export(checkpoint, tmp_path / "out")
    assert (proc("status", "VmHWM") - peak) / 1024 < 30
    assert "1 tensors of the base model" in summary["warnings"][0]
    # Of the shard one pass to verify its hash, then the adapter's own bytes.
    assert (proc("io", "rchar") - read) / 2**20 < 40e6 / 2**20 + 10


@given(
    wrapped=st.lists(st.sampled_from(["_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."]), max_size=3),
    prefix=st.sampled_from(["model.", ""]),
    index=st.integers(0, 5),
    named=st.booleans(),
)
def test_wrappers_and_adapter_names_are_taken_off(wrapped: list[str], prefix: str, index: int, named: bool) -> None:
    parts = Q.split(".")
    parts[index] = "".join(wrapped) + parts[index]
    key = f"{prefix}{'.'.join(parts)}.lora_A.{'default.' if named else ''}weight"
    assert normalise(key) == f"{Q}.lora_A.weight"
    assert normalise(normalise(key)) == normalise(key)


@pytest.mark.parametrize(
    "lora",
    [
        LORA,
        LORA | {"target_modules": "all-linear"},
        LORA | {"target_modules": r".*layers\.1\..*(q|o)_proj", "rank_pattern": {"o_proj": 2}, "use_rslora": True},
        LORA | {"modules_to_save": ["lm_head"], "layers_to_transform": [0]},
        LORA | {"init_lora_weights": "orthogonal"},
        LORA | {"use_dora": True},
    ],
)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_names_and_shapes_are_those_of_a_real_model(lora: dict[str, Any], kind: str) -> None:
    architecture = {key: value for key, value in ARCHITECTURE.items() if key != "architectures"} | {"model_type": kind}
    expected = build_expected(architecture, lora, "example/tiny", None)
    model = get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture)), LoraConfig(**lora))
    saved = get_peft_model_state_dict(model)
    assert expected.tensors == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    assert not expected.base & saved.keys()
    assert expected.config["init_lora_weights"] == lora["init_lora_weights"]


@pytest.mark.parametrize(
    ("architecture", "lora"),
    [
        ({"model_type": "no-such-model"}, LORA),
        ({}, LORA),
        (ARCHITECTURE | {"hidden_size": "many"}, LORA),
        (ARCHITECTURE, LORA | {"target_modules": ["absent_proj"]}),
        (ARCHITECTURE, LORA | {"no_such_field": 1}),
        (ARCHITECTURE, LORA | {"r": 0}),
        (ARCHITECTURE, LORA | {"init_lora_weights": "olora"}),
    ],
)
def test_what_does_not_go_together_is_refused(architecture: dict[str, Any], lora: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"recipe\.json"):
        build_expected(architecture, lora, "example/tiny", None)
