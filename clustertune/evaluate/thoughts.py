"""Thoughts in front of answers: counted, and taken off before a task's rules see the answer (lm-eval's ``think_end_token``).

lm-eval's own handling is not used: its client of a completions server has none, and it stops an answer at a task's stop strings
while the model still thinks, so that a blank line in a thought ends the answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from lm_eval.models.utils import postprocess_generated_text

from clustertune.data.rendering import Thought, special_marks
from clustertune.data.tokenizer import thought_of
from clustertune.errors import UserError
from clustertune.recipe.sections import Eval

STATES = ("answers", "thoughts", "empty", "cut_off")
"""What is counted of a task: answers; those with a closed thought in front; of these, the ones whose thought is empty; and
answers that are a thought which did not come to its end."""


def find(settings: Eval, tokenizer: Any) -> Thought:
    """How the answers of an evaluation mark a thought. Raises UserError where ``think_end_token`` is no token's number."""
    found = thought_of(tokenizer)
    asked: Any = settings.think_end_token
    if asked is None:
        return found
    if isinstance(asked, int) or asked.isdigit():
        if int(asked) >= len(tokenizer):
            text = f"{asked} is no token: the vocabulary has {len(tokenizer):,}"
            raise UserError(text, key="eval.think_end_token", fix="write the text that ends a thought, such as </think>")
        asked = str(tokenizer.convert_ids_to_tokens(int(asked)))
    return found if asked == found.end else Thought(found.start if asked else "", asked)


class Thoughts:
    """Takes thoughts off the answers of one evaluation, and counts them by task."""

    def __init__(self, thought: Thought, tokenizer: Any) -> None:
        self.thought = thought
        self._special = special_marks(tokenizer, thought)
        self.keeps_special = self._special is not None
        """The marks are special tokens: answers are asked for with them, and lose them here."""
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.texts: dict[tuple[str, int], list[str | None]] = defaultdict(list)
        """By task and document, the thought in front of each of its answers."""

    def may_think(self, prompt: str) -> bool:
        """Whether the model may think before it answers this prompt."""
        return bool(self.thought.end) and self.thought.certain and not prompt.rstrip().endswith(self.thought.end)

    def asked(self, requests: Sequence[Any]) -> list[Any]:
        """The requests as the model gets them: a task's stop strings do not end a thought."""
        pairs = ((one, (one.args[0], {**one.args[1], "until": []})) for one in requests)
        return [replace(one, arguments=other) if self._opens(one) else one for one, other in pairs]

    def _opens(self, request: Any) -> bool:
        return bool(request.args[1].get("until")) and self.may_think(request.args[0])

    def taken_off(self, requests: Iterable[Any], answers: Iterable[str]) -> list[str]:
        """The answers as the tasks' rules see them. ``requests``: as the tasks made them."""
        return [self._take_off(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def _take_off(self, request: Any, answer: str) -> str:
        prompt, decoding = request.args
        text, rest = self.thought.split(prompt, answer)
        counts = self.counts[request.task_name]
        counts["answers"] += 1
        if text is not None:
            counts["thoughts"] += 1
            counts["empty"] += not text
        elif self.thought.is_cut(prompt, answer):
            counts["cut_off"] += 1
        self.texts[request.task_name, int(request.doc_id)].append(text)
        if self._opens(request):
            rest = postprocess_generated_text(rest, decoding["until"], None)
        return self._special.sub("", rest) if self._special else rest

    def by_task(self) -> dict[str, dict[str, int]]:
        """The counts of :data:`STATES`."""
        return {task: {state: counts[state] for state in STATES} for task, counts in sorted(self.counts.items())}

    def notes(self) -> list[str]:
        """What a reader must know of them."""
        texts = []
        for task, counts in self.by_task().items():
            answers, full = counts["answers"], counts["thoughts"] - counts["empty"]
            for count, what in (
                (full, "have a thought in front, which is not scored"),
                (counts["empty"], "have an empty thought in front, which is not scored"),
                (counts["cut_off"], "are a thought that max_gen_toks cut off, and are scored as they are"),
            ):
                if count:
                    texts.append(f"{task}: {count:,} of {answers:,} answers ({count / answers:.0%}) {what}.")
        if any(counts["cut_off"] for counts in self.counts.values()):
            texts.append("A larger eval.max_gen_toks leaves room for a thought; eval.chat_template_kwargs switches it off.")
        return texts
