"""The tokenizer as training needs it: a chat template, a padding token, EOS among the labels, and the assistant's tokens.

Nearly no published template has ``{% generation %}`` marks, by which transformers and TRL find the assistant's tokens. Without
them the conversation is rendered turn by turn: what the model is given before an answer is the beginning of the rendered
conversation, and the answer with its end is what follows. axolotl and LLaMA-Factory find them in the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from clustertune import bounded
from clustertune.data import rendering
from clustertune.data.system_messages import BEFORE_USER, rendered_before_user
from clustertune.errors import UserError

if TYPE_CHECKING:
    import numpy.typing as npt

PADS = ("<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>", "<|vision_pad|>", "<unk>")
"""Tokens that no text uses, which serve as padding where a tokenizer names none but EOS (Llama 3.1, Llama 2, Qwen2.5, ...)."""
TEMPLATE_SECONDS = 20.0
"""Of computing, for one turn, which takes a millisecond: nested loops in a template can take years. Also to load a tokenizer,
which takes two at 262,144 tokens: it normalises the tokens that were added."""
WAITS = 30
"""Times as long may a child be there at most: a busy machine computes late, a file system that hangs never answers."""
_SAMPLE = "".join(map(chr, range(32, 127))) + " \u00df \u00e9 \u4f60\u597d \U0001f642\n"
"""What a tokenizer is tried with when it is loaded."""
MEMORY = 8 << 30
"""Bytes that a template, or a tokenizer's normalisation, may take for a shard, whose text has 8 MiB."""
SHORT_MEMORY = 2 << 30
"""The same for a short text, and to load a tokenizer: one of 262,144 tokens takes 0.4 GiB."""
Span = tuple[int, int]
"""The first character of an answer, and the one behind its end."""
MARKS_OR_ALL = (
    "train.assistant_only_loss=false: all tokens are learnt; or a template with {% generation %} around what the assistant "
    "says beside the recipe, named in model.chat_template"
)
"""The ways out for a template whose answers are not found."""


def choose_pad_token(tokenizer: Any, token: str | None) -> str:
    """The padding token: ``token``, else the tokenizer's own, else a known one that no text uses, else EOS, as TRL has it.

    That it may be EOS does not keep EOS from being learnt. TRL 1.16 pads labels with -100 by position and compares no token
    with the padding's: ``DataCollatorForLanguageModeling.torch_call`` (trl/trainer/sft_trainer.py:201) and
    ``DataCollatorForPreference.torch_call`` (trl/trainer/dpo_trainer.py), whose masks come from lengths. transformers' collator
    of the same name does (``labels[labels == pad_token_id] = -100``); it is not used here. Where a tokenizer has another token
    that no text uses, that is chosen: programs that read the model afterwards may be of the second kind.

    Raises UserError where it is not in the vocabulary, or there is neither a padding token nor EOS.
    """
    vocabulary = tokenizer.get_vocab()
    if token is not None:
        if token not in vocabulary:
            raise UserError(f"{token!r} is not in the tokenizer's vocabulary", key="train.pad_token")
        return token
    own, eos = tokenizer.pad_token, tokenizer.eos_token
    for candidate in (own if own != eos else None, *PADS, eos):
        if candidate is not None and candidate in vocabulary:
            return str(candidate)
    raise UserError(
        "the tokenizer has neither a padding token nor EOS",
        key="train.pad_token",
        fix="name a token of the vocabulary that no text uses, such as a reserved special token",
    )


def load_tokenizer(
    source: str,
    revision: str | None,
    template: str | None,
    named: Mapping[str, Any],
    *,
    chats: bool = True,
    system: str = "",
    date: str | None = None,
) -> Any:
    """The tokenizer of a model folder or Hub id, with a chat template (``template``, else its own), EOS and a padding token.

    ``named``: ``eos_token`` and ``pad_token``, where the training names them; without ``chats`` it needs no template.
    ``system``: the recipe's ``data.system_messages``. ``date``: the day that a template prints which reads the clock; None:
    that of each call. Raises UserError where it is not available.
    """
    if source.startswith((".", "/", "~")) and not Path(source).exists():  # else the Hub is asked for it, seven seconds long
        raise UserError(f"no such folder: {source}", key="model.path", fix="give the folder of the model, as model.path=FOLDER")
    try:
        tokenizer = open_tokenizer(source, revision)
    except UserError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:  # no network, no licence accepted, no such file or package
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = "HF_TOKEN in .env and the model's terms accepted on the Hub, or model.path names a folder that holds it"
        if Path(source).is_dir():
            fix = "put the model's tokenizer.json there: tokenizer.model alone needs packages that are not here"
        raise UserError(f"the tokenizer of {source} is not available: {message}", key="model.name", fix=fix) from None
    tokenizer.chat_template = template or tokenizer.chat_template
    if not tokenizer.chat_template and chats:
        raise UserError(
            f"the tokenizer of {source} has no chat template",
            key="model.chat_template",
            fix="put a Jinja file beside the recipe and name it there",
        )
    if system == BEFORE_USER:
        tokenizer.chat_template = rendering.changed(tokenizer.chat_template, rendered_before_user)
    tokenizer.chat_template = rendering.pinned(tokenizer.chat_template, date)
    if (eos := named.get("eos_token")) is not None:
        if eos not in tokenizer.get_vocab():
            raise UserError(f"{eos!r} is not in the tokenizer's vocabulary", key="train.eos_token")
        tokenizer.eos_token = eos  # as TRL does before it renders: a template may write it
    tokenizer.pad_token = choose_pad_token(tokenizer, named.get("pad_token"))
    if not tokenizer.chat_template:
        return tokenizer
    try:
        render_turn(tokenizer, "")
    except UserError:
        raise
    except Exception:  # noqa: S110 - a template may refuse this turn alone; of the conversations it is counted
        pass
    return tokenizer


def open_tokenizer(source: str, revision: str | None = None) -> Any:
    """transformers' tokenizer of a model folder or Hub id, once it was loaded, and a text encoded and decoded, in a child with
    limits: its normalisation may grow a text without end, also that of its own added tokens as it is loaded.

    Raises UserError where that takes too long or too much memory, ValueError with the words of what transformers raises.
    """
    from transformers import AutoTokenizer

    def load() -> Any:
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)

    def try_it() -> None:
        tokenizer = load()
        tokenizer.decode(tokenizer(_SAMPLE)["input_ids"])

    beyond = f"the tokenizer {_TOO_MUCH}: its normalisation or its decoder does not end"
    within_limits(try_it, UserError(beyond, file=source, fix=_MAKERS))
    tokenizer = load()
    if not tokenizer(_SAMPLE)["input_ids"]:  # transformers 5 makes an empty one of a folder that has no file of a tokenizer
        raise ValueError("no file of it is there")
    return tokenizer


def render_turn(tokenizer: Any, text: str) -> str:
    """One user's turn in the tokenizer's chat template, which may loop for ever; a longer conversation is tried as well.

    Raises UserError where it takes more than :data:`TEMPLATE_SECONDS` or :data:`SHORT_MEMORY`, ValueError where the template
    does.
    """
    turns = [{"role": role, "content": text} for role in ("user", "assistant", "user", "assistant")]

    def render() -> str:
        with contextlib.suppress(Exception):  # a template may refuse it; of the conversations that is counted
            tokenizer.apply_chat_template(turns, tokenize=False)
        return str(tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True))

    return str(within_limits(render))


_MAKERS = "take the tokenizer's files and the chat template of the model's makers"
_TOO_MUCH = f"takes more than {TEMPLATE_SECONDS:g} s or {SHORT_MEMORY >> 30} GiB for a short text"


def _endless_template() -> UserError:
    fix = "use the template that the model's makers publish, or name another in model.chat_template"
    return UserError(f"the chat template {_TOO_MUCH}", key="model.chat_template", fix=fix)


def within_limits(work: Callable[[], Any], beyond: UserError | None = None) -> Any:
    """What ``work``, which uses a foreign chat template or tokenizer, returns; it runs in a child with limits.

    Raises ``beyond``, None: a UserError on the template, where it takes more than :data:`TEMPLATE_SECONDS` or
    :data:`SHORT_MEMORY`; ValueError with the words of what it raises.
    """

    def answer() -> Mapping[str, Any]:
        bounded.allow(TEMPLATE_SECONDS)
        return _answer(work)

    reply = bounded.ask(answer, WAITS * TEMPLATE_SECONDS, SHORT_MEMORY).found
    return _value(reply, beyond or _endless_template())


def _answer(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except MemoryError:
        raise
    except BaseException as error:  # whatever a template raises, and tokenizers' PanicException, which is no Exception
        return {"raised": str(error) or type(error).__name__}


def _value(reply: Mapping[str, Any] | None, beyond: UserError) -> Any:
    if reply is None:
        raise beyond
    if "raised" in reply:
        raise ValueError(reply["raised"])
    return reply["value"]


class BoundedTokenizer:
    """A foreign tokenizer and its chat template in a child with limits, for one text after the other. Use it as a context, and
    open it before the weights are loaded: the child has what this process holds.

    Both methods raise UserError where one call takes more than :data:`TEMPLATE_SECONDS` of computing or :data:`SHORT_MEMORY`.
    """

    def __init__(self, tokenizer: Any, where: str) -> None:
        """``where``: the tokenizer's folder, for messages."""
        self._tokenizer, self._where = tokenizer, where
        self._child = bounded.StandingChild(self._work, SHORT_MEMORY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()

    def render(self, messages: Any, **arguments: Any) -> str:
        """A conversation in the chat template; ``arguments`` are those of ``apply_chat_template``. Raises ValueError with the
        template's words where it refuses the conversation."""
        return str(self._ask("render", [messages, arguments]))

    def tokenize(self, texts: list[str], **arguments: Any) -> list[list[int]]:
        """The token ids of each text; ``arguments`` are the tokenizer's. Raises UserError where it fails."""
        try:
            return list(self._ask("tokenize", [texts, arguments]))
        except ValueError as error:  # such as a pattern that goes back more often than its engine allows
            raise UserError(f"the tokenizer does not take a text: {error}", file=self._where, fix=_MAKERS) from None

    def _ask(self, what: str, of: Any) -> Any:
        name = "chat template" if what == "render" else "tokenizer"
        text = f"the {name} takes more than {TEMPLATE_SECONDS:g} s or {SHORT_MEMORY >> 30} GiB for a text"
        return _value(self._child.ask([what, of]).found, UserError(text, file=self._where, fix=_MAKERS))

    def _work(self, request: Any) -> Mapping[str, Any]:
        what, (of, arguments) = request
        bounded.allow(TEMPLATE_SECONDS)
        if what == "render":
            return _answer(lambda: self._tokenizer.apply_chat_template(of, tokenize=False, **arguments))
        return _answer(lambda: self._tokenizer(of, **arguments)["input_ids"])


def thought_of(tokenizer: Any) -> rendering.Thought:
    """How answers mark a thought, by the tokenizer and its chat template. Raises UserError where the template does not end."""
    return rendering.Thought(*within_limits(lambda: astuple(rendering.find_thought(tokenizer))))


def has_generation_markers(template: str) -> bool:
    """Whether a chat template marks the assistant's words with ``{% generation %}``."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None  # as trl/chat_template_utils.py


def training_template(tokenizer: Any, *, marked: bool) -> str:
    """The chat template that training renders with: the tokenizer's own, or where ``marked`` is asked for and it has no
    ``{% generation %}`` marks, the one that TRL puts in its place (sft_trainer.py of 1.16), if TRL knows it."""
    from trl.chat_template_utils import get_training_chat_template

    own = str(tokenizer.get_chat_template())
    if not marked or has_generation_markers(own):
        return own
    head, text = rendering.split(own)

    def patched() -> str:
        tokenizer.chat_template = text  # in a child: TRL compares the text with those that it knows
        return head + (get_training_chat_template(tokenizer) or text)

    try:
        return str(within_limits(patched))
    except ValueError:  # TRL renders examples of its own, which a template may refuse; it knows only some templates
        return own


def identity(tokenizer: Any) -> str:
    """SHA-256 (hex) of what decides the tokens of a text: vocabulary, merges, normalisation and special tokens.

    The padding token is not in it unless the tokenizer has it as a special one: rows are padded by the collator. Nor is where
    the tokenizer came from.
    """
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        body = json.loads(backend.to_str())
        content = {key: value for key, value in body.items() if key not in ("padding", "truncation")}
    else:
        content = {"vocabulary": tokenizer.get_vocab(), "added": sorted(map(str, tokenizer.added_tokens_decoder.items()))}
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if key != "pad_token"}
    text = json.dumps([type(tokenizer).__name__, special, content], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


ENDLESS, ENDLESS_FIX = (
    "the model would never learn to stop",
    "a chat template that ends each assistant turn with the tokenizer's EOS: model.chat_template=mistral.jinja is one of "
    "recipes/_base",
)
"""What comes of answers none of which ends with a token that stops the model, and what to do."""


def check_labels(rows: Iterable[Mapping[str, Sequence[int]]], eos_ids: set[int], fix: str | None = None) -> None:
    """Refuse training rows in which no token carries a label, or no EOS does: nothing, or never to stop, is learnt.

    ``rows`` are a sample of the tokenized training set, with ``input_ids`` and ``labels`` (``-100`` where masked). ``fix``:
    what to do where no EOS is learnt.
    """
    labelled, stops = False, False
    for row in rows:
        for token, label in zip(row["input_ids"], row.get("labels", row["input_ids"]), strict=True):
            labelled = labelled or label != -100
            stops = stops or (token in eos_ids and label != -100)
    if not labelled:
        raise UserError("no token of the training data carries a label: there is nothing to learn", key="train")
    if not stops:
        text = f"no end-of-turn token of the training data carries a label: {ENDLESS}"
        raise UserError(text, key="train.max_length", fix=fix or f"longer max_length, or {ENDLESS_FIX}")


# -- which tokens the assistant says ------------------------------------------------------------------------------------------


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

    conversation, spans, answers = rendered(len(messages), False), list[Span](), list[int]()
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    starts = {number: _start(conversation, rendered(number, False), rendered(number, True)) for number in answers}
    for number, following in zip(answers, [*answers[1:], None], strict=True):
        start = starts[number]
        end = len(conversation) if number + 1 == len(messages) else _end(conversation, start, rendered, number)
        if end is None and start is not None:
            behind = _between(messages[:number], messages[number + 1 : following], render)
            limit = len(conversation) if following is None else starts[following] or 0
            end = conversation.find(behind, start, limit) if behind and conversation.count(behind, start, limit) == 1 else None
        if start is None or end is None or not (spans[-1][1] if spans else 0) <= start < end:
            text = "the chat template is not prefix-preserving for this conversation: it renders what stands before "
            text += f"message {number + (2 if start is not None else 1)} in another way once more follows, so that the tokens "
            raise NotPrefixPreserving(f"{text}of the assistant cannot be told apart")
        spans.append((start, end))
    return conversation, spans


def _shared(one: str, other: str) -> int:
    """Characters of the common beginning."""
    return len(os.path.commonprefix([one, other]))  # noqa: RUF071 - characters are meant


def _start(text: str, plain: str, prompted: str) -> int | None:
    """Where an answer begins, of the turns before it without and with the generation prompt.

    A generation prompt may open a thought that the template takes out of turns that are over: the answer begins behind what
    both have.
    """
    if text.startswith(prompted):
        return len(prompted)
    return _shared(text, prompted) if text.startswith(plain) else None


def _end(text: str, start: int | None, rendered: Callable[[int, bool], str], number: int) -> int | None:
    """Where an answer ends, by the conversation up to it: with a generation prompt, less that, as the conversation's own end
    may add a token (Phi-3's EOS); else without one."""
    plain, prompted = rendered(number, False), rendered(number, True)
    prompt = prompted[_shared(plain, prompted) :]
    for turns in (rendered(number + 1, True).removesuffix(prompt), rendered(number + 1, False)):
        if start is not None and len(turns) > start and text.startswith(turns):
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
    import numpy as np

    if not tokenizer.is_fast:
        raise NotPrefixPreserving(f"{type(tokenizer).__name__} does not say which characters a token is made of")
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = np.asarray(made["offset_mapping"], np.int64).reshape(-1, 2)
    mask = np.zeros(len(places), bool)
    for start, end in spans:
        mask |= (places[:, 1] > start) & (places[:, 1] <= end)
    return np.asarray(made["input_ids"], np.uint32), mask
