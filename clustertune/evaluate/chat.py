"""A conversation with a model in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustertune.console import say
from clustertune.errors import UserError
from clustertune.evaluate import model as models
from clustertune.evaluate import run as evaluation

END = ("/exit", "/quit")


def converse(talk: Talk, folder: Path, prompt: str | None, system: str | None) -> None:
    start = [{"role": "system", "content": system}] if system else []
    if prompt is not None:
        talk.answer([*start, {"role": "user", "content": prompt}])
        return
    say(f"{folder}: /new begins again, /exit ends")
    turns = list(start)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return
        if text in END:
            return
        if text == "/new":
            turns = list(start)
        elif text:
            turns.append({"role": "user", "content": text})
            turns.append({"role": "assistant", "content": talk.answer(turns)})


class Talk:
    """A loaded model."""

    def __init__(
        self, facts: models.ModelFacts, tokenizing: Any, device: str | None, max_new_tokens: int, greedy: bool
    ) -> None:
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.tokenizer, self.tokenizing = facts.tokenizer, tokenizing
        self.model = evaluation.load_lm(facts.folder, models.pick_device(device, facts.folder), 1).model
        self.settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, **({"do_sample": False} if greedy else {})}
        self.room = facts.max_length - max_new_tokens

    def answer(self, turns: list[dict[str, str]]) -> str:
        """Print the answer to stdout as it is made; returns it. Raises UserError where the conversation leaves no room."""
        import torch
        from transformers import TextStreamer

        try:
            text = self.tokenizing.render(turns, add_generation_prompt=True)
        except ValueError as error:
            raise UserError(f"the chat template refuses the conversation: {error}") from None
        # As apply_chat_template has it: the template writes BOS itself.
        ids = torch.tensor(self.tokenizing.tokenize([text], add_special_tokens=False), device=self.model.device)
        count = ids.shape[1]
        if count > self.room:
            text = f"{count} tokens of conversation, at most {self.room} leave room for an answer"
            raise UserError(text, key="--max-new-tokens", fix="/new forgets the conversation; or lower it")
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        made = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=streamer, **self.settings)
        return str(self.tokenizer.decode(made[0][count:], skip_special_tokens=True))
