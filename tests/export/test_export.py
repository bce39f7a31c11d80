"""Export of whole checkpoints: what PEFT then loads, and what lies in the folder whatever happens."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from clustertune.errors import ExitCode, UserError
from clustertune.export import export as module
from clustertune.export.export import ADAPTER_FILES, export
from clustertune.manifest import MANIFEST, find_problems, read_manifest, seal
from tests.damage import failing, refused
from tests.export.conftest import ARCHITECTURE, LORA, Maker, make_tensors, seal_checkpoint
from tests.faults import sweep


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("case", ["fsdp2", "fsdp2-head", "ddp"])
def test_peft_loads_what_the_ranks_had_trained(
    case: str, real_checkpoint: Callable[[str], Path], real_shards: Path, tmp_path: Path
) -> None:
    out = tmp_path / "adapter"
    summary = export(real_checkpoint(case), out)

    trained = torch.load(real_shards / f"{case}.pt", weights_only=True)
    written = load_file(out / ADAPTER_FILES[0])
    assert written.keys() == trained.keys()
    assert all(torch.equal(written[name], trained[name]) for name in trained)
    assert any(bool(tensor.any()) for name, tensor in written.items() if "lora_B" in name)
    assert summary["tensors"] == len(trained) and summary["step"] == 2 and summary["warnings"] == []
    assert summary["parameters"] == sum(tensor.numel() for tensor in trained.values())

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ARCHITECTURE))
    loaded = get_peft_model_state_dict(PeftModel.from_pretrained(base, out), save_embedding_layers=False)
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(loaded[name], trained[name]) for name in trained)


@pytest.mark.parametrize("quantised", [False, True])
def test_the_manifest_names_how_the_base_was_stored(make_checkpoint: Maker, tmp_path: Path, quantised: bool) -> None:
    checkpoint = make_checkpoint()
    recipe = json.loads((checkpoint / "recipe.json").read_bytes())
    if quantised:
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        recipe["train_args"]["model_init_kwargs"] = {"quantization_config": settings}
    (checkpoint / "recipe.json").write_text(json.dumps(recipe))
    export(seal_checkpoint(checkpoint), tmp_path / "out")
    assert read_manifest(tmp_path / "out").meta["base_quantization"] == ("bitsandbytes nf4" if quantised else "none")


def test_files_are_readable_sorted_and_the_same_each_time(make_checkpoint: Maker, tmp_path: Path) -> None:
    """And of the type that was trained."""
    tensors = {key: value.bfloat16() for key, value in make_tensors().items()}
    checkpoint = make_checkpoint(tensors)
    export(checkpoint, tmp_path / "a")
    export(checkpoint, tmp_path / "b")
    assert read_all(tmp_path / "a") == read_all(tmp_path / "b")
    assert sorted(read_all(tmp_path / "a")) == [MANIFEST, "adapter_config.json", "adapter_model.safetensors"]
    assert all(stat.S_IMODE((tmp_path / "a" / name).stat().st_mode) == 0o644 for name in ADAPTER_FILES)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(LORA["target_modules"]) and config["inference_mode"] is True
    assert (config["base_model_name_or_path"], config["revision"], config["r"]) == ("example/tiny", "0" * 40, 4)
    manifest = read_manifest(tmp_path / "a", "adapter")
    assert manifest.meta["recipe"] == "tiny" and manifest.meta["checkpoint"]["name"] == "step-000002"
    assert not find_problems(tmp_path / "a", "adapter")
    written = load_file(tmp_path / "a" / ADAPTER_FILES[0])
    assert all(torch.equal(written[key.removeprefix("model.")], value) for key, value in tensors.items())
    assert {value.dtype for value in written.values()} == {torch.bfloat16}


def test_same_checkpoint_is_reused_and_another_or_a_damaged_adapter_refused(make_checkpoint: Maker, tmp_path: Path) -> None:
    first, out = make_checkpoint(), tmp_path / "out"
    assert export(first, out)["reused"] is False
    before, inode = read_all(out), (out / ADAPTER_FILES[0]).stat().st_ino
    again = export(first, out)
    assert again["reused"] is True and again["tensors"] == 12
    with pytest.raises(UserError, match="holds the adapter of step-000002"):
        export(make_checkpoint(make_tensors(seed=1), name="step-000004", step=4), out)
    assert read_all(out) == before and (out / ADAPTER_FILES[0]).stat().st_ino == inode
    (out / ADAPTER_FILES[0]).write_bytes(b"x" * (out / ADAPTER_FILES[0]).stat().st_size)
    with pytest.raises(UserError, match="damaged"):
        export(first, out)
    assert (out / ADAPTER_FILES[0]).read_bytes().startswith(b"xxx")


@pytest.mark.parametrize("kind", ["file", "foreign", "merged"])
def test_foreign_output_is_left_alone(kind: str, make_checkpoint: Maker, tmp_path: Path) -> None:
    checkpoint, out = make_checkpoint(), tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    if kind == "merged":
        seal(out, "merged", {})
    with refused(re.escape(str(out))):
        export(checkpoint, out)
    foreign = out if kind == "file" else out / "notes.txt"
    assert foreign.read_text() == "mine"


@pytest.mark.parametrize("victim", ["_write", "seal"])
def test_storage_failure_leaves_no_adapter_and_the_next_call_makes_it(
    victim: str, make_checkpoint: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, out = make_checkpoint(), tmp_path / "out"
    export(checkpoint, tmp_path / "reference")

    with monkeypatch.context() as broken, refused("No space left", ExitCode.STORAGE):
        broken.setattr(module, victim, failing(OSError(28, "No space left on device")))
        export(checkpoint, out)
    assert not (out / MANIFEST).exists()
    assert not list(tmp_path.glob(".*exporting"))
    export(checkpoint, out)
    assert read_all(out) == read_all(tmp_path / "reference")


def test_kill_at_every_change_of_the_disk_leaves_nothing_half(make_checkpoint: Maker, tmp_path: Path) -> None:
    checkpoint = make_checkpoint()
    export(checkpoint, tmp_path / "reference")
    number = unfinished = 0
    for number in sweep(lambda n: export(checkpoint, tmp_path / f"out{n}")):
        out = tmp_path / f"out{number}"
        if (out / MANIFEST).exists():
            assert not find_problems(out, "adapter", allow_extra=True)
        else:
            unfinished += 1
        export(checkpoint, out)
        files = {name: data for name, data in read_all(out).items() if not name.startswith(".MANIFEST")}
        assert files == read_all(tmp_path / "reference")
    assert number > 10 and unfinished >= number // 2, "the sweep must reach the writes"
