"""What is wrong with a model's files is reported from their headers, in the first seconds, with file and tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping

from clustertune.errors import UserError
from clustertune.training import loading
from clustertune.training.loading import plain
from clustertune.training.loading_sources import ParameterSource, RowReader, Sources, find, survey

LLAMA = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 11, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def make(config: dict[str, Any]) -> Any:
    words = {key: value for key, value in config.items() if key != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **words), dtype=torch.bfloat16)


def empty(config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return make(config)


def save(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A model of these sizes with random weights, as transformers saves it but in two files; what they hold."""
    torch.manual_seed(0)
    model = make(config)
    model.save_pretrained(folder / "whole")
    tensors = load_file(folder / "whole" / "model.safetensors")
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[: len(names) // 2]}, folder / FIRST)
    save_file({n: tensors[n] for n in names[len(names) // 2 :]}, folder / SECOND)
    return dict(model.state_dict())


def look(folder: Path, config: dict[str, Any], index: dict[str, str] | None = None) -> tuple[Any, Sources]:
    model = empty(config)
    settings = SimpleNamespace(weight_mapping=get_model_conversion_mapping(model), dtype_plan=None)
    return model, find(model, survey([folder / FIRST, folder / SECOND], index), settings, model.state_dict())


def problems(folder: Path, config: dict[str, Any], index: dict[str, str] | None = None) -> list[tuple[str, str, str]]:
    """File, key and message of each problem that is reported."""
    with pytest.raises(UserError) as caught:
        look(folder, config, index)
    return [(Path(p.file or "").name, p.key or "", p.message) for p in caught.value.problems]


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL, {**LLAMA, "tie_word_embeddings": True}], ids=["llama", "mixtral", "tied"])
def test_every_row_of_every_parameter_is_the_model_s(tmp_path: Path, config: dict[str, Any]) -> None:
    """Experts that the files hold one by one, odd sizes, and empty shares: each cut of the rows gives the same values."""
    whole = save(tmp_path, config)
    model, sources = look(tmp_path, config)
    reader = RowReader()
    for name, source in sources.by_name.items():
        rows = whole[name].shape[0]
        for begin, end in [(0, rows), (0, rows // 2), (rows // 2, rows), (rows, rows), (1, min(2, rows))]:
            assert torch.equal(source.read(name, reader, model, begin, end), whole[name][begin:end]), (name, begin, end)
        flat = whole[name].reshape(-1)
        third = len(flat) // 3
        for begin, end in [(0, len(flat)), (0, 5), (third, 2 * third + 1), (len(flat) - 1, len(flat)), (3, 3)]:
            assert torch.equal(source.elements(name, reader, model, begin, end), flat[begin:end]), (name, begin, end)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    assert set(whole) - set(sources.by_name) == tied == sources.missing
    reader.close()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


NORM = "model.norm.weight"


def drop(path: Path) -> None:
    save_file({n: t for n, t in load_file(path).items() if n != NORM}, path)


def reshape(path: Path) -> None:
    save_file({**load_file(path), NORM: torch.zeros(9, dtype=torch.bfloat16)}, path)


def twice(path: Path) -> None:
    other = load_file(path.with_name(FIRST))
    save_file({**load_file(path), min(other): other[min(other)]}, path)


@pytest.mark.parametrize(
    ("damage", "file", "key", "message"),
    [
        (cut, SECOND, "", "truncated or damaged"),
        (drop, "files", "model.norm.weight", "no weight file holds it"),
        (reshape, SECOND, "model.norm.weight", "has shape [9], the model's config asks for [8]"),
        (twice, SECOND, "lm_head.weight", "is also in " + FIRST),
    ],
)
def test_damage_is_told_with_file_and_tensor(
    tmp_path: Path, damage: Callable[[Path], None], file: str, key: str, message: str
) -> None:
    """transformers fills what is missing with random values and a warning, and reads for minutes before it ends."""
    folder = tmp_path / "files"
    save(folder, LLAMA)
    damage(folder / SECOND)
    found = problems(folder, LLAMA)
    assert len(found) == 1 and found[0][:2] == (file, key) and message in found[0][2]


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("shape", "ranks"), [((24, 20), 3), ((7, 36), 4), ((16, 64), 2), ((1, 4), 3)])
def test_4_bits_by_rows_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], ranks: int, *, double: bool
) -> None:
    """Shares that end inside a block of 64, and shares without anything: values and scales, bit for bit."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="the package bitsandbytes")
    torch.manual_seed(1)
    weight = torch.randn(shape).to(torch.bfloat16)
    save_file({"w": weight}, tmp_path / FIRST)
    source = ParameterSource(torch.bfloat16, shape, [("w", "w", survey([tmp_path / FIRST])["w"])])
    settings = SimpleNamespace(blocksize=64, quant_type="nf4", quant_storage=torch.bfloat16, compress_statistics=double)
    whole, state = functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=double, quant_type="nf4", quant_storage=torch.bfloat16
    )
    rows, parts = len(whole), []
    reader = RowReader()
    for rank in range(ranks):
        chunk = -(-rows // ranks)
        share = (min(rank * chunk, rows), min((rank + 1) * chunk, rows))
        monkeypatch.setattr(loading, "span", lambda like, share=share: share)
        elements = source.elements("w", reader, None, *loading.blocks(source, None, settings))  # type: ignore[arg-type]
        parts.append(loading.quantise(elements, source, None, settings))  # type: ignore[arg-type]
    bits = torch.cat([values for values, _ in parts]).view(torch.uint8)
    assert torch.equal(bits, whole.view(torch.uint8))
    scales = torch.cat([scales for _, scales in parts])
    monkeypatch.setattr(loading, "_gathered", lambda *given: scales)
    found = loading.state_of(scales, source, None, settings)  # type: ignore[arg-type]
    for key, value in state.as_dict().items():
        same = found.as_dict()[key]
        assert torch.equal(same, value) if isinstance(value, torch.Tensor) else same == value, key
    reader.close()


def test_frozen_parameters_of_a_wrapped_model_have_the_base_models_names() -> None:
    """LoRA on a layer wraps it once, on both bare parameters of the experts twice; a copy that is trained is not the base's."""
    model = empty(MIXTRAL)
    names = {name for name, _ in model.named_parameters()}
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(target_modules=["q_proj"], target_parameters=experts, modules_to_save=["lm_head"])
    wrapped = dict(get_peft_model(model, config).named_parameters())
    assert any(".base_layer.base_layer." in name for name in wrapped)
    assert {plain(name) for name, parameter in wrapped.items() if not parameter.requires_grad} == names
