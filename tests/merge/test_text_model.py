"""``clustertune text-model``: the text model of a checkpoint with pictures computes what it computed inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from clustertune.data.local_model import train_tokenizer
from clustertune.training.base_weights import check_tensors
from clustertune.training.loading import complete_names
from tests.command import run
from tests.test_new import ROWS, rows

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "max_position_embeddings": 512, "head_dim": 16, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
SEEN: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
QWEN_SEEN: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8,
}  # fmt: skip
AXES = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
LLAMA_SEEN = {**SEEN, "intermediate_size": 64, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}
AROUND: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "gemma3": (
        *("Gemma3ForConditionalGeneration", {"query_pre_attn_scalar": 16}, SEEN, {"mm_tokens_per_image": 4}),
        "Gemma3ForCausalLM",
    ),
    "qwen2_5_vl": (
        *("Qwen2_5_VLForConditionalGeneration", AXES, QWEN_SEEN, {"tie_word_embeddings": True}),
        "Qwen2ForCausalLM",
    ),
    "qwen3_vl": (
        *("Qwen3VLForConditionalGeneration", AXES, {**QWEN_SEEN, "deepstack_visual_indexes": [0]}, {}),
        "Qwen3ForCausalLM",
    ),
    "mistral3": (
        *("Mistral3ForConditionalGeneration", {"model_type": "mistral"}, {**SEEN, "model_type": "pixtral"}, {}),
        "MistralForCausalLM",
    ),
    "llama4": ("Llama4ForConditionalGeneration", EXPERTS, LLAMA_SEEN, {}, "Llama4ForCausalLM"),
}
"""By model type: the class, its text and vision configurations, other keys, and the class of the text model."""


def save(kind: str, folder: Path, shard: str = "5GB") -> Path:
    """A small checkpoint with pictures, as transformers saves it."""
    name, text, seen, more, _ = AROUND[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, text_config={**TEXT, **text}, vision_config=seen, **more)
    getattr(transformers, name)._from_config(config, dtype=torch.float32).save_pretrained(folder, max_shard_size=shard)
    return folder


@pytest.mark.parametrize("kind", AROUND)
def test_the_text_model_answers_as_it_did_inside(kind: str, tmp_path: Path) -> None:
    """The same scores to the last bit; new takes it, and names the command before."""
    around = save(kind, tmp_path / "around")
    train_tokenizer(["user assistant words"] * 9, 400, 512).save_pretrained(around)
    data = rows(tmp_path / "mine.jsonl", ROWS["messages"], 40)
    refused = run("new", tmp_path / "before", "--model", around, "--data", data, stack=True)
    assert refused.code == 2 and f"clustertune text-model {around}" in refused.err, refused.err
    done = run("text-model", around, tmp_path / "own", "--json", stack=True)
    assert done.code == 0, done.err
    assert done.json["architecture"] == AROUND[kind][4] and done.json["left_out"]
    assert check_tensors(tmp_path / "own") == []
    ids = torch.arange(3, 40)[None]
    more = {"token_type_ids": torch.zeros_like(ids)} if kind == "gemma3" else {}
    with torch.no_grad():
        inside = getattr(transformers, AROUND[kind][0]).from_pretrained(around).eval()(input_ids=ids, **more).logits
        alone = AutoModelForCausalLM.from_pretrained(tmp_path / "own").eval()(input_ids=ids).logits
    assert torch.equal(inside, alone)
    made = run("new", tmp_path / "after", "--model", tmp_path / "own", "--data", data, stack=True)
    assert made.code == 0, made.err
    body = json.loads((tmp_path / "after" / "model.json").read_text())
    assert body["architectures"] == [AROUND[kind][4]]


def test_the_text_model_of_llama4_has_the_names_that_the_loss_reads(tmp_path: Path) -> None:
    """TRL asks ``base_model`` for hidden states, and the configuration for the number of experts."""
    assert run("text-model", save("llama4", tmp_path / "around"), tmp_path / "own", stack=True).code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    complete_names(model)
    assert model.base_model is model.model and model.config.num_experts == EXPERTS["num_local_experts"]
    assert "num_experts" not in json.loads(model.config.to_json_string())
    add_fused_lm_head(model)
    ids = torch.arange(3, 40)[None]
    made = model(input_ids=ids, labels=ids, fused_lm_head=True, output_router_logits=True)
    assert made.loss.isfinite() and made.aux_loss.isfinite()


def test_several_files_and_what_is_refused(tmp_path: Path) -> None:
    """Shards keep their order; nothing is overwritten; a text model, a damaged checkpoint and an empty folder are named."""
    around, own = save("gemma3", tmp_path / "around", "100KB"), tmp_path / "own"
    assert run("text-model", around, own, stack=True).code == 0
    index = json.loads((own / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1 and check_tensors(own) == []
    held = {name: value for file in set(index.values()) for name, value in load_file(own / file).items()}
    assert held.keys() == index.keys()
    (tmp_path / "empty").mkdir()
    for words, text in (
        ((around, own), "overwritten"),
        ((own, tmp_path / "x"), "text model already"),
        ((tmp_path / "empty", tmp_path / "x"), "no model"),
    ):
        done = run("text-model", *words, stack=True)
        assert done.code == 2 and text in done.err and "Traceback" not in done.err, done.err
    file = sorted(around.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-8])
    assert run("text-model", around, tmp_path / "x", stack=True).code == 2 and not (tmp_path / "x").exists()
