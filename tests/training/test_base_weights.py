"""A weight that no file holds would be random: every way to a model refuses it from the files' headers, with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from clustertune import manifest
from clustertune.errors import Problem, UserError
from clustertune.training.base_weights import check_tensors

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
WIDE = {"head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": WIDE,
    "qwen3_moe": {**WIDE, **EXPERTS, "num_experts": 4},
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "gemma2": WIDE,
    "gemma3_text": WIDE,
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "gpt_oss": {**WIDE, **EXPERTS, "num_local_experts": 4},
    "phi3": {},
    "olmo2": {},
    "mistral": {},
    "deepseek_v2": {**EXPERTS, **LATENT},
    "deepseek_v3": {**EXPERTS, **LATENT},
    "glm4_moe": {**WIDE, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
}


def save(folder: Path, kind: str, **more: Any) -> Path:
    """A checkpoint as transformers saves it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.partition(" ")[0], **{**SIZES, **KINDS[kind], **more})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def found(folder: Path) -> list[Problem]:
    try:
        return check_tensors(folder)
    except UserError as error:
        return list(error.problems)


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_saves_is_whole(kind: str, tmp_path: Path) -> None:
    """Tied heads, experts that are stored one by one, transposed matrices, several files; and one tensor less is missed."""
    folder = save(tmp_path / "model", kind)
    assert found(folder) == []
    tensors = load_file(folder / "model.safetensors")
    for name in (min(tensors), max(tensors)):
        save_file({key: value for key, value in tensors.items() if key != name}, folder / "model.safetensors")
        assert found(folder), name


def rename(change: Callable[[str], str]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({change(name): value for name, value in load_file(file).items()}, file, {"format": "pt"})

    return act


def edit(**values: Any) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return act


def inside(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def alone(folder: Path) -> None:
    """One of several files, as a download that was broken off leaves it."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def half(folder: Path) -> None:
    """One tensor's header says float16 over the bytes of bfloat16: every length is as it was."""
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    at = raw.index(b'"BF16"', raw.index(b'"model.layers.1.mlp.up_proj.weight"'))
    file.write_bytes(raw[:at] + b'"F16" ' + raw[at + 6 :])


FAULTS: dict[str, tuple[Callable[[Path], Any], str, str, str]] = {
    "saved with PEFT around it": (rename("base_model.model.{}".format), "", "", "base_model.model."),
    "saved with DDP around it": (rename("module.{}".format), "", "", "module."),
    "a wrapper's weights": (rename(inside), "", "", "model.language_model."),
    "an older wrapper's weights": (rename("language_model.{}".format), "", "", "language_model."),
    "more layers than files": (edit(num_hidden_layers=9), "", "num_hidden_layers", "9 layers, and the files hold 3"),
    "fewer layers than files": (edit(num_hidden_layers=2), "config.json", "num_hidden_layers", "1 of them"),
    "another vocabulary": (edit(vocab_size=600), "config.json", "vocab_size", "512"),
    "cut": (cut, "model.safetensors", "", "truncated"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "", "", "no model here"),
    "GGUF": (lambda f: (f / "model.safetensors").rename(f / "model-q4.gguf"), "", "", "GGUF"),
    "half of a sharded copy": (alone, "", "", "model.safetensors.index.json"),
    "a type of the same size": (half, "model.safetensors", "dtype", "model.layers.1.mlp.up_proj.weight"),
    "another type in config.json": (edit(dtype="float16"), "model.safetensors", "dtype", "all tensors are bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_one_sentence_says_what_is_wrong_where_and_what_to_do(case: str, tmp_path: Path) -> None:
    damage, file, key, word = FAULTS[case]
    folder = save(tmp_path / "model", "llama")
    damage(folder)
    [problem] = found(folder)
    assert Path(str(problem.file)).name in (file or {"model", "model.safetensors"}) and (problem.key or "") == key
    assert word in problem.message and problem.fix


def test_float32_weights_may_be_loaded_in_another_type(tmp_path: Path) -> None:
    """A wider or narrower type is a choice, which no damage of a header can make: lengths would differ."""
    folder = save(tmp_path / "model", "llama")
    for dtype in ("float32", None):
        edit(dtype=dtype)(folder)
        assert found(folder) == []


def test_layers_that_predict_further_tokens_are_no_surplus(tmp_path: Path) -> None:
    """They stand behind the last layer under its numbers; a list of another part's layers says nothing of this model's."""
    folder = save(tmp_path / "model", "deepseek_v3")
    tensors = load_file(folder / "model.safetensors")
    behind = {name.replace(".2.", ".3.", 1): value.clone() for name, value in tensors.items() if ".layers.2." in name}
    other = {"draft.layers.7.fc.weight": torch.ones(2, 2), "model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    save_file({**tensors, **behind, **other}, folder / "model.safetensors", {"format": "pt"})
    for layers in (1, 0):
        edit(num_nextn_predict_layers=layers)(folder)
        assert [problem.key for problem in found(folder)] == ["num_hidden_layers"] * (1 - layers)


PACKED: dict[str, Callable[[str], list[str]]] = {
    "gptq": lambda module: [f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")],
    "compressed-tensors": lambda module: [f"{module}.weight_packed", f"{module}.weight_scale"],
    "bitsandbytes": lambda module: [f"{module}.weight", f"{module}.weight.absmax"],
}


@pytest.mark.parametrize("method", PACKED)
def test_of_quantised_weights_the_names_are_compared(method: str, tmp_path: Path) -> None:
    """Without the method's package: every module has something in the files."""
    folder = save(tmp_path / "model", "llama")
    stored: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        names = PACKED[method](name.removesuffix(".weight")) if "_proj" in name else [name]
        stored |= dict.fromkeys(names, value) if names == [name] else {one: torch.zeros(4, dtype=torch.int32) for one in names}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    edit(quantization_config={"quant_method": method, "bits": 4})(folder)
    assert found(folder) == []
    edit(num_hidden_layers=4)(folder)
    [problem] = found(folder)
    assert "4 layers" in problem.message


class Alone:
    """The group of a single rank."""

    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


def test_ranks_say_that_nothing_was_compared(tmp_path: Path) -> None:
    """Where no digest of the base is known; once it has a manifest they say nothing."""
    from types import SimpleNamespace

    from clustertune.training.session import Session

    folder, data = save(tmp_path / "base", "llama"), tmp_path / "data"
    data.mkdir()
    manifest.seal(data, "tokens", {})
    for known in (False, True):
        if known:
            manifest.seal(folder, "model", {})
        run = SimpleNamespace(group=Alone(), notes=[], _weights=None, attempt=SimpleNamespace(run=SimpleNamespace(data=data)))
        Session._compare(run, folder, data)  # type: ignore[arg-type]
        assert any("contents are not compared" in note for note in run.notes) != known
        if run._weights is not None:
            run._weights.stop()
