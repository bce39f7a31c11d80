"""How a chat template renders: the arguments that it is given, the day that it prints, and what it makes of a thought.

What training gave a template goes into the template itself, as a header in front of its text: the arguments as defaults, which
an argument of a request overrides, and ``strftime_now``, the clock of transformers and vLLM, as a macro that knows one day. So
every program that renders with the files of an adapter or a merged model renders what was trained.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any

from clustertune.recipe.native_rules import TEMPLATE_ARGUMENTS

CLOCK = "strftime_now"
"""The function by which templates read the clock (transformers, utils/chat_template_utils.py)."""
SWITCHES = ("enable_thinking", "thinking")
"""Arguments by which templates switch thinking on and off: Qwen3, SmolLM3, GLM; DeepSeek-V3.1, Granite."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which chat templates take what the assistant thought before it answered."""
_HEADER = re.compile(r"\{#- clustertune (\{.*?\}) -#\}\n(?:\{%-.*?-%\}\n)*?\{#- clustertune end -#\}\n", re.DOTALL)
_USER, _ANSWER, _THOUGHT = "user-7f3a", "answer-7f3a", "thought-7f3a"


# --- the header --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Header:
    """What stands in front of a template."""

    arguments: Mapping[str, Any]
    """What the template is given where the caller gives nothing."""
    date: str | None
    """The day that it prints, as 2026-11-28; None: it does not read the clock, or reads it each time."""


def header(template: Any) -> Header:
    """The header of a tokenizer's ``chat_template``; an empty one where there is none."""
    if isinstance(template, dict):  # named templates: all have the same
        template = next(iter(template.values()), None)
    if not isinstance(template, str) or (match := _HEADER.match(template)) is None:
        return Header({}, None)
    try:
        body = json.loads(match[1])
        return Header(dict(body["arguments"]), date.fromisoformat(body["date"]).isoformat() if body.get("date") else None)
    except (ValueError, TypeError, KeyError):  # written by somebody else
        return Header({}, None)


def split(template: str) -> tuple[str, str]:
    """A template's header, empty where there is none, and its text."""
    match = _HEADER.match(template)
    return (match[0], template[match.end() :]) if match else ("", template)


def pinned(template: Any, day: str | None = None, arguments: Mapping[str, Any] | None = None) -> Any:
    """A ``chat_template`` that has ``arguments`` as defaults and, where it reads the clock, prints ``day``.

    What an earlier header says stays where nothing else is given; its day always stays: a model goes on with the day that it
    was trained with. A template that neither takes an argument nor reads the clock is returned as it is.
    """
    if isinstance(template, dict):
        return {name: pinned(one, day, arguments) for name, one in template.items()}
    if not isinstance(template, str):
        return template
    before, (_, text) = header(template), split(template)
    defaults = {**before.arguments, **{name: value for name, value in (arguments or {}).items() if _is_name(name)}}
    day = before.date or (day if reads_clock(text) else None)
    if not defaults and day is None:
        return text
    body = {"arguments": defaults, **({"date": day} if day else {})}
    # Within a comment its end must not stand.
    lines = ["{#- clustertune " + json.dumps(body, sort_keys=True).replace("#", "\\u0023") + " -#}"]
    for name, value in sorted(defaults.items()):
        lines.append(f"{{%- if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif -%}}")
    lines += [_macro(text, day)] if day else []
    return "\n".join([*lines, "{#- clustertune end -#}", text])


def changed(template: Any, change: Callable[[str], str]) -> Any:
    """A ``chat_template`` whose text behind the header was changed."""
    if isinstance(template, dict):
        return {name: changed(one, change) for name, one in template.items()}
    if not isinstance(template, str):
        return template
    head, text = split(template)
    return head + change(text)


def reads_clock(template: str) -> bool:
    """Whether a template asks what time it is."""
    return re.search(rf"\b{CLOCK}\b", template) is not None


def today() -> str:
    """The day, on this machine, as 2026-11-28."""
    return date.today().isoformat()


def _is_name(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None


def _literal(value: Any) -> str:
    """A value of JSON as Jinja writes it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False)  # Jinja reads a string as Python does


def agreed(rows: Mapping[str, Mapping[str, int]], count: int) -> tuple[dict[str, Any], list[str]]:
    """The arguments that all ``count`` rows have alike, and a sentence on each of the others.

    ``rows``: of each argument, how many rows have which value, written as JSON.
    """
    same, other = dict[str, Any](), list[str]()
    for name, values in rows.items():
        if list(values.values()) == [count]:
            same[name] = json.loads(next(iter(values)))
            continue
        shown = ", ".join(f"{value} in {number:,}" for value, number in sorted(values.items(), key=lambda one: -one[1])[:3])
        other.append(f"{name} is {shown} of {count:,} rows")
    return same, other


def _macro(text: str, day: str) -> str:
    """``strftime_now`` for one day. It knows the directives that the template holds, which llama.cpp's Jinja renders, too."""
    moment = datetime.combine(date.fromisoformat(day), time())
    known = sorted(set(re.findall(r"%-?[A-Za-z]", text)))
    filters = "".join(f" | replace({_literal(one)}, {_literal(moment.strftime(one))})" for one in known)
    return f"{{%- macro {CLOCK}(format) -%}}{{{{- format{filters} -}}}}{{%- endmacro -%}}"


# --- thoughts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thought:
    """What stands around a thought in front of an answer."""

    start: str
    """Empty: it is not known how one begins."""
    end: str
    """lm-eval's ``think_end_token``; empty: none is looked for."""
    certain: bool = True
    """The template or the tokenizer says it. Else only an answer that begins with ``start`` holds a thought."""

    def split(self, prompt: str, answer: str) -> tuple[str | None, str]:
        """The thought in front of an answer, None where there is none, and what follows it, as lm-eval takes it off."""
        if not self.end or self.end not in answer or not (self.certain or self._is_open(prompt, answer)):
            return None, answer
        thought, _, rest = answer.rpartition(self.end)
        thought, rest = thought.strip(), rest.lstrip()  # as lm-eval's postprocess_generated_text has it
        if not thought and not self._is_open(prompt, answer):  # gpt-oss without a thought
            return None, rest
        return thought.removeprefix(self.start).strip(), rest

    def is_cut(self, prompt: str, answer: str) -> bool:
        """Whether an answer began with a thought and holds nothing else: its tokens were used up."""
        return bool(self.end) and self.end not in answer and self._is_open(prompt, answer)

    def _is_open(self, prompt: str, answer: str) -> bool:
        return bool(self.start) and (answer.lstrip().startswith(self.start) or prompt.rstrip().endswith(self.start))


KNOWN = (
    *(Thought("<think>", "</think>"), Thought("[THINK]", "[/THINK]"), Thought("<seed:think>", "</seed:think>")),
    *(Thought("<|START_THINKING|>", "<|END_THINKING|>"), Thought("<|channel>thought", "<channel|>")),
    Thought("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    *(Thought("<thinking>", "</thinking>"), Thought("<thought>", "</thought>"), Thought("<reasoning>", "</reasoning>")),
    Thought("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
"""Marks around thoughts: Qwen3 and DeepSeek-R1, Magistral, Seed-OSS, Command A, Gemma 4, gpt-oss, Kimi, and others' own."""


def find_thought(tokenizer: Any) -> Thought:
    """How thoughts are marked: as the chat template renders one, else by known marks in the template or the vocabulary."""
    template, vocabulary = str(tokenizer.chat_template or ""), tokenizer.get_vocab()
    user = _turn("user", _USER)
    for name in REASONING if template else ():
        with_thought = _rendered(tokenizer, [user, {**_turn("assistant", _ANSWER), name: _THOUGHT}])
        before, found, rest = with_thought.partition(_THOUGHT)
        between, answer, _ = rest.partition(_ANSWER)
        if found and answer and between.strip():
            return _marks(tokenizer, before.rpartition(_USER)[2], between)
    for known in KNOWN:
        if known.end in template or known.end in vocabulary:
            return known
    return Thought("<think>", "</think>", certain=False)


def _marks(tokenizer: Any, before: str, between: str) -> Thought:
    """The marks of a thought, of what the template renders between the user's words and it, and between it and the answer."""
    user = _turn("user", _USER)
    prompt = _rendered(tokenizer, [user], add_generation_prompt=True).partition(_USER)[2]
    plain = _rendered(tokenizer, [user, _turn("assistant", _ANSWER)]).partition(_ANSWER)[0]
    # gpt-oss opens the answer's own channel, with a thought before it and without.
    without = _pieces(plain.partition(_USER)[2].removeprefix(prompt))
    shared = os.path.commonprefix([_pieces(between)[::-1], without[::-1]])[::-1]  # noqa: RUF071 - pieces are meant
    end = "".join(shared).strip() or between.strip()
    known = next((one.start for one in KNOWN if one.end == end), None)
    if known is not None and before.rstrip().endswith(known):
        return Thought(known, end)
    same = os.path.commonprefix([_pieces(before), _pieces(prompt)])  # noqa: RUF071 - pieces are meant
    return Thought("".join(_pieces(before)[len(same) :]).strip() or before.strip().rpartition("\n")[2], end)


def _pieces(text: str) -> list[str]:
    """A text as marks, such as ``<|im_end|>`` and ``[/THINK]``, and single characters between them."""
    return re.findall(r"<[^<>]*>|\[[^\[\]]*\]|.", text, re.DOTALL)


def special_marks(tokenizer: Any, thought: Thought) -> re.Pattern[str] | None:
    """What finds the special tokens in an answer that must be read with them, as one marks a thought; None: it needs none."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= {str(token) for token in tokenizer.all_special_tokens}
    marked = any(token and token in thought.start + thought.end for token in special)
    return control_pattern(sorted(special)) if marked else None


def _turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _rendered(tokenizer: Any, turns: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
    """A conversation in the template; empty where it refuses it."""
    try:
        return str(tokenizer.apply_chat_template(list(turns), tokenize=False, **arguments))
    except Exception:  # whatever a template raises
        return ""


NO_THOUGHT = Thought("", "")


def probe(tokenizer: Any, thought: Thought, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the template renders the thought of a last answer, in a field of its own and in the text; and by role, the words
    that the tokenizer takes for control tokens."""
    forms = {"field": {"content": _ANSWER, REASONING[0]: _THOUGHT}}
    forms["text"] = {"content": f"{thought.start}\n{_THOUGHT}\n{thought.end}\n\n{_ANSWER}"}
    keeps, user = {}, _turn("user", _USER)
    for name, form in forms.items():
        text = _rendered(tokenizer, [user, {"role": "assistant", **form}], **arguments)
        keeps[name] = not text or _THOUGHT in text
    turns = [user, _turn("assistant", _ANSWER), _turn("user", _USER)]
    rendered = _rendered(tokenizer, turns, add_generation_prompt=True, **arguments)
    return {"keeps": keeps, "control": control_words(tokenizer, thought, rendered)}


def control_words(tokenizer: Any, thought: Thought, rendered: str) -> dict[str, list[str]]:
    """By role, the words that the tokenizer takes for one token of its own even within a text: special tokens, and others that
    the template puts around turns (``rendered``). An answer may hold the marks of a thought."""
    added = tokenizer.added_tokens_decoder.items()
    special = {str(token): number for number, token in added if token.special}
    special |= {str(token): tokenizer.convert_tokens_to_ids(str(token)) for token in tokenizer.all_special_tokens}
    marks = {word for word in (*(str(token) for _, token in added), *special) if word in thought.start or word in thought.end}
    of_turns = {str(token): number for number, token in added if str(token) in rendered and str(token) not in marks}
    known = {word: number for word, number in {**special, **of_turns}.items() if word.strip()}
    words = [word for word, number in known.items() if tokenizer(word, add_special_tokens=False)["input_ids"] == [number]]
    return {"user": words, "assistant": [word for word in words if word not in marks]}


def control_pattern(words: Sequence[str]) -> re.Pattern[str] | None:
    """What finds the longest of some words in a text; None where there is none."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True)))) if words else None


def unset_switch(
    tokenizer: Any, arguments: Mapping[str, Any], thoughts: int, *, every: bool, own: bool
) -> tuple[str, str] | None:
    """The name of a switch of thinking that ``arguments`` leave to the template's default, and what to say of it; else None.

    The sentence says what the training teaches, and how evaluation, ``chat`` and ``serve`` ask. ``thoughts``: conversations
    with a thought; ``every``: all have one. ``own``: the model answers by itself, and is asked in training as it is later.
    """
    known = {**header(tokenizer.chat_template).arguments, **arguments}
    user, both = [_turn("user", _USER)], [_turn("user", _USER), _turn("assistant", _ANSWER)]
    for name in SWITCHES:
        if name in known or name not in str(tokenizer.chat_template):
            continue
        on, off = (_rendered(tokenizer, user, add_generation_prompt=True, **{**known, name: value}) for value in (True, False))
        if on == off:
            continue
        plain, thought = _rendered(tokenizer, user, add_generation_prompt=True, **known), find_thought(tokenizer)
        before, asked = (_rendered(tokenizer, both, **known).partition(_ANSWER)[0], plain)
        empty = bool(thought.start) and thought.start in before.partition(_USER)[2]
        closed = bool(thought.end) and thought.end in asked.partition(_USER)[2]
        if (own or (empty and not thoughts)) if closed else (thoughts and every and not own):
            continue  # asked as it was trained
        opened = bool(thought.start) and asked.rstrip().endswith(thought.start)
        asks = "with a closed thought" if closed else "with an open thought" if opened else "so that the model may think first"
        teaches = "an empty thought and the answer" if empty else "the answer alone"
        trained = f"a row without a thought teaches {teaches}"
        trained += f", and {thoughts:,} conversations have one" if thoughts else ""
        trained = "the model's own answers are trained as they come" if own else trained
        fix = f"train.{TEMPLATE_ARGUMENTS}={{{name}: false}}, or true, holds for training and for all of them"
        text = f"the chat template takes {name}, and nothing sets it: {trained}; evaluation, chat and serve ask {asks}; {fix}"
        return name, text
    return None
