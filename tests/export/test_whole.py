"""A fully trained model out of its shards: the published names, types and files, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from clustertune.chain import export_trained
from clustertune.data.local_model import train_tokenizer
from clustertune.errors import UserError
from clustertune.export import export
from clustertune.manifest import find_problems, read_manifest, seal
from clustertune.staging import bundle
from tests.damage import flip
from tests.export.conftest import ARCHITECTURE, save_shards, seal_checkpoint, write_recipe

MIXTRAL = {**ARCHITECTURE, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
MIXTRAL |= {"num_local_experts": 4, "num_experts_per_tok": 2}
TIED = {**ARCHITECTURE, "tie_word_embeddings": True}


def model(architecture: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))


def make(folder: Path, architecture: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A sealed checkpoint of a whole model, as accelerate writes one under FSDP."""
    tensors = dict(model(architecture).state_dict()) if tensors is None else tensors
    save_shards(folder / "pytorch_model_fsdp_0", {f"model.{name}": tensor for name, tensor in tensors.items()})
    write_recipe(folder, None, architecture)
    return seal_checkpoint(folder)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    train_tokenizer(["a text"], 300, 64).save_pretrained(folder)
    (folder / "config.json").write_text('{"dtype": "float32"}')
    return folder


@pytest.mark.parametrize("architecture", [ARCHITECTURE, TIED, MIXTRAL], ids=["llama", "tied", "mixtral"])
@pytest.mark.parametrize("limit", [5_000_000_000, 30_000], ids=["one file", "many files"])
def test_the_model_is_loaded_again_with_the_same_bits(
    tmp_path: Path, base: Path, architecture: dict[str, Any], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers finds every tensor and nothing beside; experts lie apart, as the Hub and other programs have them."""
    monkeypatch.setattr(export, "SHARD_BYTES", limit)
    out = tmp_path / "out"
    summary = export.export_model(make(tmp_path / "ck", architecture), out, base)
    assert summary["step"] == 2 and not summary["reused"] and summary["warnings"] == []
    assert not find_problems(out, export.MODEL_KIND) and (out / "tokenizer.json").exists()
    assert ((out / "model.safetensors.index.json").exists()) == (limit == 30_000)
    again, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    wanted = model(architecture).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.state_dict().items())
    names = {name for file in out.glob("*.safetensors") for name in load_file(file)}
    assert any(".experts.3.w" in name for name in names) == (architecture is MIXTRAL)
    assert summary["parameters"] == sum(p.numel() for p in model(architecture).parameters())
    assert export.export_model(tmp_path / "ck", out, base)["reused"]


@pytest.mark.parametrize("architecture", [TIED, MIXTRAL], ids=["tied", "mixtral"])
@pytest.mark.parametrize("named", ["dtype", "torch_dtype", None])
def test_each_tensor_has_the_type_that_it_has_in_the_base(
    tmp_path: Path, base: Path, architecture: dict[str, Any], named: str | None
) -> None:
    """Training keeps float32 masters of all; the base has bfloat16, and float32 where its makers left a norm or a router."""
    stored = {}
    for name, tensor in published(architecture).items():
        stored[name] = tensor.to(torch.float32 if "norm" in name or "gate.weight" in name else torch.bfloat16)
    save_file(stored, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps({named: "bfloat16"} if named else {}))
    export.export_model(make(tmp_path / "ck", architecture), tmp_path / "out", base)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: tensor.dtype for name, tensor in stored.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert named == "dtype" or config["torch_dtype"] == "bfloat16", "transformers before 4.56 reads it alone"
    assert read_manifest(tmp_path / "out").meta["dtypes"] == ["bfloat16", "float32"]


def published(architecture: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of its published files."""
    from transformers.core_model_loading import revert_weight_conversion

    made = model(architecture)
    tied = set(made.all_tied_weights_keys or {})
    state = {name: tensor for name, tensor in made.state_dict().items() if name not in tied}
    return {name: tensor.clone().contiguous() for name, tensor in revert_weight_conversion(made, state).items()}


def test_a_value_that_the_base_s_type_cannot_hold_is_not_published(tmp_path: Path, base: Path) -> None:
    """Nor a model whose base cannot be read, or whose shard has other bytes."""
    tensors = dict(model(ARCHITECTURE).state_dict())
    tensors["model.norm.weight"][3] = 70_000.0
    (base / "config.json").write_text('{"torch_dtype": "float16"}')
    checkpoint = make(tmp_path / "ck", ARCHITECTURE, tensors)
    assert "infinite as torch.float16" in refused(checkpoint, tmp_path / "out", base)
    (base / "model.safetensors").write_bytes(b"no weights")
    assert "model.safetensors: unreadable" in refused(checkpoint, tmp_path / "out", base)
    (base / "model.safetensors").unlink()
    shard = max((checkpoint / "pytorch_model_fsdp_0").glob("*.distcp"), key=lambda file: file.stat().st_size)
    flip(shard)
    assert "content differs" in refused(checkpoint, tmp_path / "out", base)


def refused(checkpoint: Path, out: Path, base: Path) -> str:
    with pytest.raises(UserError) as caught:
        export.export_model(checkpoint, out, base)
    assert not out.exists() or not (out / "config.json").exists()
    return "\n".join(str(problem) for problem in caught.value.problems)


def test_nothing_is_written_over(tmp_path: Path, base: Path) -> None:
    """Someone's files, and the model of another checkpoint, stay."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    assert "is not empty: mine" in refused(make(tmp_path / "ck", ARCHITECTURE), out, base)
    export.export_model(tmp_path / "ck", tmp_path / "model", base)
    other = make(tmp_path / "ck2", {**ARCHITECTURE, "vocab_size": 64})
    with pytest.raises(UserError, match=r"holds the model of ck \(step \d+\), not that of"):
        export.export_model(other, tmp_path / "model", base)


def test_the_command_finds_what_was_trained_and_its_base(tmp_path: Path, base: Path) -> None:
    """``clustertune export RUN`` need not be told either: the folder is the one that the next stage reads, the base is the one
    that the training read. A run on an offline bundle has its base there, and nowhere else."""
    run = tmp_path / "run"
    checkpoint = make(run / "checkpoints" / "step-000002", ARCHITECTURE)
    without = export_trained(checkpoint, tmp_path / "without")
    assert without["warnings"] == ["no tokenizer was found: copy the base model's beside the weights"]
    shutil.copytree(base, run / "model" / "tiny")
    assert export_trained(run)["out"] == str(run / "merged") and (run / "merged" / "tokenizer.json").is_file()

    shutil.copytree(base, tmp_path / "bundle" / "model")
    seal(tmp_path / "bundle", bundle.KIND, {"parts": {"model": {"name": "example/tiny", "path": "model"}}})
    body = json.loads((checkpoint / "recipe.json").read_text())
    body["recipe"] |= {"staged": str(tmp_path / "bundle"), "model": {"name": "example/tiny", "weights": "hub"}}
    other = tmp_path / "other" / "checkpoints" / "step-000002"
    shutil.copytree(checkpoint, other)
    (other / "recipe.json").write_text(json.dumps(body))
    seal_checkpoint(other)
    assert export_trained(tmp_path / "other")["warnings"] == []
    assert (tmp_path / "other" / "merged" / "tokenizer.json").is_file()
