"""Which tokens of a rendered conversation the assistant says, where the chat template does not mark them.

Nearly no published template has ``{% generation %}`` marks, by which transformers and TRL find the assistant's tokens. Without
them the conversation is rendered turn by turn: what the model is given before an answer is the beginning of the rendered
conversation, and the answer with its end is what follows. axolotl and LLaMA-Factory find them in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]
"""The first character of an answer, and the one behind its end."""
MARKS_OR_ALL = (
    "train.assistant_only_loss=false: all tokens are learnt; or a template with {% generation %} around what the assistant "
    "says beside the recipe, named in model.chat_template"
)
"""The ways out for a template whose answers are not found."""


class NotPrefixPreserving(Exception):
    """A template renders the beginning of a conversation in another way once more follows: no answer can be told apart."""


def answer_spans(messages: Sequence[Mapping[str, Any]], render: Callable[..., str]) -> tuple[str, list[Span]]:
    """The rendered conversation, and the characters of it that each of the assistant's turns adds.

    ``render``: ``tokenizer.apply_chat_template`` to text, which takes messages and ``add_generation_prompt``. An answer begins
    behind the generation prompt and ends where the template continues with another turn, its end-of-turn token included.

    Raises NotPrefixPreserving, and what the template raises.
    """

    @cache
    def rendered(count: int, prompt: bool) -> str:
        return str(render(list(messages[:count]), add_generation_prompt=prompt))

    whole, spans, answers = rendered(len(messages), False), list[Span](), list[int]()
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    starts = {number: _start(whole, rendered(number, False), rendered(number, True)) for number in answers}
    for number, following in zip(answers, [*answers[1:], None], strict=True):
        start = starts[number]
        end = len(whole) if number + 1 == len(messages) else _end(whole, start, rendered, number)
        if end is None and start is not None:
            behind = _between(messages[:number], messages[number + 1 : following], render)
            limit = len(whole) if following is None else starts[following] or 0
            end = whole.find(behind, start, limit) if behind and whole.count(behind, start, limit) == 1 else None
        if start is None or end is None or not (spans[-1][1] if spans else 0) <= start < end:
            text = "the chat template is not prefix-preserving for this conversation: it renders what stands before "
            text += f"message {number + (2 if start is not None else 1)} in another way once more follows, so that the tokens "
            raise NotPrefixPreserving(f"{text}of the assistant cannot be told apart")
        spans.append((start, end))
    return whole, spans


def _shared(one: str, other: str) -> int:
    """Characters of the common beginning."""
    return len(os.path.commonprefix([one, other]))  # noqa: RUF071 - characters are meant


def _start(whole: str, plain: str, prompted: str) -> int | None:
    """Where an answer begins, of the turns before it without and with the generation prompt.

    A generation prompt may open a thought that the template takes out of turns that are over: the answer begins behind what
    both have.
    """
    if whole.startswith(prompted):
        return len(prompted)
    return _shared(whole, prompted) if whole.startswith(plain) else None


def _end(whole: str, start: int | None, rendered: Callable[[int, bool], str], number: int) -> int | None:
    """Where an answer ends, by the conversation up to it: with a generation prompt, less that, as the conversation's own end
    may add a token (Phi-3's EOS); else without one."""
    plain, prompted = rendered(number, False), rendered(number, True)
    prompt = prompted[_shared(plain, prompted) :]
    for turns in (rendered(number + 1, True).removesuffix(prompt), rendered(number + 1, False)):
        if start is not None and len(turns) > start and whole.startswith(turns):
            return len(turns)
    return None


def _between(before: Sequence[Any], between: Sequence[Any], render: Callable[..., str]) -> str:
    """What the turns behind an answer are rendered as, without the answer; "" where that does not show it.

    A template that takes the thoughts out of answers that are over, as Qwen3's, renders the conversation up to an answer in
    another way once more follows.
    """
    try:
        plain, joined = (str(render(list(turns), add_generation_prompt=False)) for turns in (before, [*before, *between]))
    except Exception:  # whatever a template raises for turns that do not alternate
        return ""
    return joined[len(plain) :] if joined.startswith(plain) else ""


def tokens_within(tokenizer: Any, text: str, spans: Sequence[Span]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The token ids of a rendered conversation, and which of them lie within the spans, as transformers finds those between
    marks: a token that reaches over the begin of a span is one of it.

    Raises NotPrefixPreserving where the tokenizer does not say which characters a token is.
    """
    if not tokenizer.is_fast:
        raise NotPrefixPreserving(f"{type(tokenizer).__name__} does not say which characters a token is made of")
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = np.asarray(made["offset_mapping"], np.int64).reshape(-1, 2)
    mask = np.zeros(len(places), bool)
    for start, end in spans:
        mask |= (places[:, 1] > start) & (places[:, 1] <= end)
    return np.asarray(made["input_ids"], np.uint32), mask
