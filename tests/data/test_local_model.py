"""The locally made model: deterministic, whole or absent, and with a chat template that TRL can mask."""

from __future__ import annotations

import shutil
from pathlib import Path

from clustertune import manifest
from clustertune.data import local_model
from tests.conftest import TEXTS, TINY_LLAMA


def make(out: Path, seed: int = 0) -> manifest.Manifest:
    local_model.make_local_model(TINY_LLAMA, TEXTS, out, seed)
    return manifest.read_manifest(out, local_model.KIND)


def test_same_seed_same_bytes_other_seed_other_weights(tmp_path: Path, tiny_model: Path) -> None:
    first = manifest.read_manifest(tiny_model)
    assert make(tmp_path / "again").files == first.files
    other = make(tmp_path / "other", seed=1).files
    assert other["tokenizer.json"] == first.files["tokenizer.json"]
    assert other["model.safetensors"] != first.files["model.safetensors"]


def test_an_unfinished_folder_is_made_again(tmp_path: Path, tiny_model: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    (broken / manifest.MANIFEST).unlink()
    (broken / "model.safetensors").write_bytes(b"half")
    make(broken)
    assert manifest.find_problems(broken, local_model.KIND) == []


def test_the_template_masks_the_user_and_trains_the_stop_token(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    messages = [{"role": "user", "content": " Which node? "}, {"role": "assistant", "content": "The second."}]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    trained = [i for i, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(trained) == "The second.<|eot_id|>"
    text = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhich node?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
