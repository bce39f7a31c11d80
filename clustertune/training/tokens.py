"""The tokenizer as training needs it: a chat template, a padding token that is not EOS, and EOS among the labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clustertune.errors import Problem, UserError

PADS = ("<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>", "<|vision_pad|>", "<unk>")
"""Tokens that may serve as padding where a tokenizer names none of its own (Llama 3.1, Llama 2, Qwen2.5, ...)."""


def choose_pad_token(tokenizer: Any, wanted: str | None) -> str:
    """The padding token: ``wanted``, else the tokenizer's own, else a known one in its vocabulary; never EOS.

    TRL falls back to EOS. Labels at padding are masked, so a model trained that way never learns to stop (trl #1623).
    """
    vocabulary = tokenizer.get_vocab()
    if wanted is not None:
        if wanted not in vocabulary:
            raise UserError(Problem(f"{wanted!r} is not in the tokenizer's vocabulary", key="train.pad_token"))
        if wanted == tokenizer.eos_token:
            raise UserError(
                Problem(
                    f"{wanted!r} is also EOS: the model would never learn to stop",
                    key="train.pad_token",
                    fix=f"one of {', '.join(p for p in PADS if p in vocabulary) or 'a token that the tokenizer reserves'}",
                )
            )
        return wanted
    for candidate in (tokenizer.pad_token, *PADS):
        if candidate is not None and candidate != tokenizer.eos_token and candidate in vocabulary:
            return str(candidate)
    raise UserError(
        Problem(
            "the tokenizer has no padding token but EOS, and the model would never learn to stop",
            key="train.pad_token",
            fix="name a token of the vocabulary that no text uses, such as a reserved special token",
        )
    )


def load_tokenizer(source: str, revision: str | None, template: str | None, pad_token: str | None) -> Any:
    """The tokenizer of a model folder or Hub id, with a chat template (its own, else ``template``) and a padding token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    if not tokenizer.chat_template:
        if template is None:
            raise UserError(
                Problem(
                    f"the tokenizer of {source} has no chat template",
                    key="model.chat_template",
                    fix="put a Jinja file beside the recipe and name it there",
                )
            )
        tokenizer.chat_template = template
    tokenizer.pad_token = choose_pad_token(tokenizer, pad_token)
    return tokenizer


def check_labels(rows: Iterable[Mapping[str, Sequence[int]]], eos_ids: set[int]) -> None:
    """Refuse training rows in which no token carries a label, or no EOS does: nothing, or never to stop, is learnt.

    ``rows`` are a sample of the tokenized training set, with ``input_ids`` and ``labels`` (``-100`` where masked).
    """
    labelled, stops = False, False
    for row in rows:
        for token, label in zip(row["input_ids"], row.get("labels", row["input_ids"]), strict=True):
            labelled = labelled or label != -100
            stops = stops or (token in eos_ids and label != -100)
    if not labelled:
        raise UserError(Problem("no token of the training data carries a label: there is nothing to learn", key="train"))
    if not stops:
        raise UserError(
            Problem(
                "no end-of-turn token of the training data carries a label: the model would never learn to stop",
                key="train.max_length",
                fix="longer max_length, or a chat template that ends each assistant turn with the tokenizer's EOS",
            )
        )
