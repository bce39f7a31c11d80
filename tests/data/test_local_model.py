"""The locally made model: deterministic, whole or absent, its template one that TRL can mask; large ones drawn in blocks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from clustertune import manifest
from clustertune.data import local_model
from clustertune.data.tokenizer import load_tokenizer
from clustertune.errors import UserError
from clustertune.recipe.native_rules import train_defaults
from tests.conftest import TEXTS, TINY_LLAMA

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip


def make(out: Path, seed: int = 0) -> manifest.Manifest:
    local_model.make_local_model(TINY_LLAMA, TEXTS, out, seed)
    return manifest.read_manifest(out, local_model.KIND)


def test_same_seed_same_bytes_other_seed_other_weights(tmp_path: Path, tiny_model: Path) -> None:
    """An unfinished folder is made again."""
    first = manifest.read_manifest(tiny_model)
    broken = Path(shutil.copytree(tiny_model, tmp_path / "broken"))
    (broken / manifest.MANIFEST).unlink()
    (broken / "model.safetensors").write_bytes(b"half")
    assert make(broken).files == first.files
    assert manifest.find_problems(broken, local_model.KIND) == []
    other = make(tmp_path / "other", seed=1).files
    assert other["tokenizer.json"] == first.files["tokenizer.json"]
    assert other["model.safetensors"] != first.files["model.safetensors"]


def test_the_template_masks_the_user_and_trains_the_stop_token(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    messages = [{"role": "user", "content": " Which node? "}, {"role": "assistant", "content": "The second."}]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    trained = [i for i, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(trained) == "The second.<|eot_id|>"
    text = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    user, assistant = (f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant"))
    assert text == f"<|begin_of_text|>{user}Which node?<|eot_id|>{assistant}"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_without_a_template_the_recipe_s_is_the_one_that_trains(tmp_path: Path) -> None:
    """As of a base model: what serves the tiny run is the template that the recipe names."""
    folder = local_model.make_local_model(TINY_LLAMA, TEXTS, tmp_path / "model", 0, template=False)
    assert load_tokenizer(str(folder), None, "{{ messages[0].content }}", {}).chat_template == "{{ messages[0].content }}"
    assert load_tokenizer(str(folder), None, None, {}, chats=False).chat_template is None
    assert not (folder / "chat_template.jinja").exists()


@pytest.mark.parametrize(
    ("kind", "more"),
    [("llama", {}), ("qwen2", {"tie_word_embeddings": True}), ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2})],
)
def test_transformers_loads_random_weights_whole(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    """A missing key would be drawn again by each rank, and ranks would train different models."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **SIZES, **more)
    written = local_model.write_random_weights(config, tmp_path, 1, shard_bytes=100_000)
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(found.values()), found
    assert written == sum(p.numel() for p in model.parameters()) and len(list(tmp_path.glob("*.safetensors"))) > 1
    assert model.config.architectures == [type(model).__name__]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    assert all(0.01 < float(p.detach().float().std()) < 0.03 for p in matrices), "normal, of the configuration's deviation"
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()
    assert not torch.equal(matrices[1].flatten()[:64], matrices[2].flatten()[:64]), "tensors begin at other places of the block"


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "llama"])
def test_a_folder_without_a_tokenizer_is_refused(kind: str, tmp_path: Path) -> None:
    """transformers makes one of no words for some kinds, which turns every text into nothing."""
    from transformers import AutoConfig

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(str(tmp_path), None, None, train_defaults(), chats=False)
