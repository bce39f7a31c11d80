"""What a recipe's data teach: the assistant's words, each at its own place. A published run had labels and mask swapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertune.data.local_model import CHAT_TEMPLATE, train_tokenizer
from clustertune.resolve.resolve import resolve
from tests.command import REPO

CHAT = [
    {"role": "user", "content": "What is a shard?"},
    {"role": "assistant", "content": "A part of a whole."},
    {"role": "user", "content": "And a rank?"},
    {"role": "assistant", "content": "One process of many."},
]
TEMPLATES = [CHAT_TEMPLATE, REPO / "recipes/_base/mistral.jinja"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([message["content"] for message in CHAT] * 20, 400, 256)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_only_the_assistants_words_are_learnt(template: Path, tokenizer: Any, tmp_path: Path) -> None:
    """A label is the token at its own place, and the labelled tokens are the answers with their end, no more and no less."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer.chat_template = template.read_text()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1,
    )  # fmt: skip
    args = SFTConfig(str(tmp_path), assistant_only_loss=True, bf16=False, use_cpu=True, report_to="none", max_length=256)
    data = Dataset.from_list([{"messages": CHAT}])
    found = SFTTrainer(LlamaForCausalLM(config), args, train_dataset=data, processing_class=tokenizer).train_dataset[0]
    pairs = list(zip(found["input_ids"], found["labels"], strict=True))
    learnt = [token for token, label in pairs if label != -100]
    assert learnt == [label for _, label in pairs if label != -100] and len(learnt) < len(pairs) / 2 + 8
    text = tokenizer.decode(learnt).replace(tokenizer.eos_token, "|").replace("<|eot_id|>", "|")
    assert [part.strip() for part in text.strip("|").split("|")] == ["A part of a whole.", "One process of many."]
    assert pairs[-1][1] != -100, "the end of the last answer is learnt, or the model never stops"


def test_a_base_without_a_template_gets_the_recipes() -> None:
    """Both Mistral bases have none; the file in ``_base`` is found as one in the folder would be."""
    text = TEMPLATES[1].read_text()
    assert resolve("mistral7b-alpaca").chat_template == text == resolve("mixtral8x7b-tulu3").chat_template
    assert "generation" in text
