"""A conversation with a model in the terminal; and a model behind an OpenAI-compatible API: the server's command."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clustertune.console import escape, say
from clustertune.errors import UserError, raise_if
from clustertune.evaluate import model as models
from clustertune.evaluate import run as evaluation
from clustertune.evaluate import servers
from clustertune.launch.node_folders import make_private
from clustertune.training.base_weights import check_tensors, say_unproved

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
        self,
        facts: models.ModelFacts,
        tokenizing: Any,
        device: str | None,
        max_new_tokens: int,
        greedy: bool,
        arguments: Mapping[str, Any],
    ) -> None:
        """``arguments``: given to the chat template, over those of the training."""
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.tokenizer, self.tokenizing, self.arguments = facts.tokenizer, tokenizing, dict(arguments)
        self.model = evaluation.load_lm(facts.folder, models.pick_device(device, facts.folder), 1).model
        self.settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, **({"do_sample": False} if greedy else {})}
        self.room = facts.max_length - max_new_tokens

    def answer(self, turns: list[dict[str, str]]) -> str:
        """Print the answer to stdout as it is made; returns it. Raises UserError where the conversation leaves no room."""
        import torch
        from transformers import TextStreamer

        try:
            text = self.tokenizing.render(turns, add_generation_prompt=True, **self.arguments)
        except ValueError as error:
            raise UserError(f"the chat template refuses the conversation: {error}") from None
        # As apply_chat_template has it: the template writes BOS itself.
        ids = torch.tensor(self.tokenizing.tokenize([text], add_special_tokens=False), device=self.model.device)
        count = ids.shape[1]
        if count > self.room:
            text = f"{count} tokens of conversation, at most {self.room} leave room for an answer"
            raise UserError(text, key="--max-new-tokens", fix="/new forgets the conversation; or lower it")

        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        # A model writes what its data or a prompt taught it: nothing of it steers the terminal.
        put = streamer.on_finalized_text
        streamer.on_finalized_text = lambda text, stream_end=False: put(escape(text), stream_end)
        made = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=streamer, **self.settings)
        return str(self.tokenizer.decode(made[0][count:], skip_special_tokens=True))


# --- a server ---------------------------------------------------------------------------------------------------------


def server_command(folder: Path, port: int, arguments: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The server's command and what it needs in its environment. ``arguments``: given to the chat template where a request
    gives none. Raises UserError where there is no server, or the one here does not take them.
    """
    known = facts(folder, 1)
    given = {**known.header.arguments, **arguments}
    raise_if(check_tensors(folder))
    say_unproved(folder)
    if program := servers.find_program():
        job = servers.job_here(known)
        cache = str(make_private(Path(tempfile.gettempdir(), f"clustertune-vllm-{os.getuid()}")))
        # The template has those of the training already; vLLM's reasoning parsers read the option.
        options = ("--default-chat-template-kwargs", json.dumps(given, sort_keys=True)) if given else ()
        one = replace(job, shape=replace(job.shape, servers=1), port=port, cache=cache, options=(*job.options, *options))
        first = servers.commands(one, 0)[0]
        return [program, *first.arguments], first.environment
    if find_spec("fastapi") and find_spec("uvicorn"):
        if arguments:
            text = "transformers' server takes them with each request alone"
            raise UserError(text, file="command line", key="--chat-template-kwargs", fix=f"install vLLM, or {servers.PROGRAM}")
        program = str(Path(sys.executable).with_name("transformers"))
        dtype = servers.dtype_of(folder)
        command = [program, "serve", str(folder), "--host", servers.HOST, "--port", str(port), "--dtype", dtype]
        return command, {"HF_HUB_OFFLINE": "1"}
    fix = f"{servers.PROGRAM}=/path/to/bin/vllm, or pip install fastapi uvicorn; clustertune chat needs neither"
    raise UserError("neither vLLM nor what transformers' server needs is installed here", fix=fix)


def facts(path: Path, tokens: int) -> models.ModelFacts:
    checked, problems = models.check_model(path, tokens)
    if checked is None:
        raise UserError(problems)
    return checked
