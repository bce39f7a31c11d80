"""A rank's client of vLLM's servers beside the trainer: they are given adapters by files, and answer prompts of token ids.

Each answer is a request of its own with a seed of its own, so that it does not matter which server gives it, nor how often it
was asked for. A server that does not answer leaves the ring; at the next generation it is asked again, and comes back with the
newest adapter.
"""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict
from safetensors.torch import save_file

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch.server_requests import GONE, ask, load_adapter, post, unload_adapter
from clustertune.plan.generation_cost import MOST

ANSWER_SECONDS = 1800.0
"""As ``eval.stall_seconds``: 1,280 steps of a 405B model at 0.32 s are 7 minutes."""
PATIENCE_SECONDS = 1800.0
"""Without any server for so long, the rank gives up: one that died is started again, and reads its weights."""
Answer = tuple[list[int], list[float]]
"""Token ids, and the log-probability of each as it was drawn."""


class ServerRing:
    """The servers, as one rank sees them. ``beat`` is called now and then while it waits."""

    def __init__(self, file: Path, beat: Callable[[], object]) -> None:
        found = json.loads(file.read_bytes())
        self.urls: list[str] = found["urls"]
        self._key, self._beat, self._folder = found["key"], beat, file.parent
        self._adapter = ""
        self._loaded: dict[str, str] = {}
        """Which adapter each server of the ring has; those that are down have none."""
        self._next, self._lock = itertools.count(), threading.Lock()

    # -- weights ---------------------------------------------------------------------------------------------------

    def publish(self, model: Any, tensors: Mapping[str, Any], name: str) -> None:
        """Write an adapter for the servers, and remove those before the last one. One rank does it for all.

        ``tensors``: the trained parameters by the names that the model's ``state_dict`` has.
        """
        state = get_peft_model_state_dict(model, state_dict=dict(tensors))
        folder, made = self._folder / name, self._folder / f".{name}.tmp"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        save_file({key: value.detach().contiguous().cpu() for key, value in state.items()}, made / "adapter_model.safetensors")
        model.peft_config["default"].save_pretrained(str(made))
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
        for other in self._folder.glob("adapter-*"):
            if other.name not in (name, self._adapter):
                shutil.rmtree(other, ignore_errors=True)

    def use(self, name: str) -> None:
        """From here on answers are those of this adapter."""
        self._adapter = name

    def _join(self, url: str) -> bool:
        """Whether a server is in the ring with the adapter of now; one that is healthy is given it."""
        with self._lock:  # of several requests that find it without, one loads
            if self._loaded.get(url) == self._adapter:
                return True
            if ask(f"{url}/health") is None or not load_adapter(url, self._key, self._adapter, self._folder / self._adapter):
                return False
            before, self._loaded[url] = self._loaded.get(url), self._adapter
            if before is not None:
                unload_adapter(url, self._key, before)
            return True

    def _leave(self, url: str) -> None:
        with self._lock:
            self._loaded.pop(url, None)

    # -- answers ---------------------------------------------------------------------------------------------------

    def answer(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Mapping[str, Any]) -> list[Answer]:
        """One answer to each prompt, in order. Raises UserError where no server is left for :data:`PATIENCE_SECONDS`, or one
        refuses a request.
        """
        with ThreadPoolExecutor(min(len(prompts), MOST * len(self.urls))) as pool:
            asked = [pool.submit(self._ask, list(ids), seed, sampling) for ids, seed in zip(prompts, seeds, strict=True)]
            left = set(asked)
            try:
                while left:
                    _, left = wait_for(left, timeout=1.0)
                    self._beat()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
            return [one.result() for one in asked]

    def _ask(self, ids: list[int], seed: int, sampling: Mapping[str, Any]) -> Answer:
        deadline = time.monotonic() + PATIENCE_SECONDS
        body = {**sampling, "prompt": [ids], "seed": seed, "logprobs": 0, "return_token_ids": True, "model": self._adapter}
        first = next(self._next)
        for turn in itertools.count(first):
            url = self.urls[turn % len(self.urls)]
            if self._join(url):
                try:
                    return _read(post(f"{url}/v1/completions", body, self._key, ANSWER_SECONDS), url)
                except urllib.error.HTTPError as error:
                    self._leave(url)  # 404: it was started again, and has no adapter
                    if error.code in (400, 401, 422):
                        text = f"refuses a request: {error.code} {error.read()[:300].decode(errors='replace')}"
                        raise UserError(Problem(text, file=url, fix="the server's log says why"), ExitCode.FAILED) from None
                except (*GONE, ValueError):
                    self._leave(url)
            if time.monotonic() > deadline:
                break
            if (turn - first) % len(self.urls) == len(self.urls) - 1:
                time.sleep(0.5)
        text = f"no answer for {PATIENCE_SECONDS:.0f} s from any of {', '.join(self.urls)}"
        raise UserError(Problem(text, file=str(self._folder), fix="the servers' logs there say why"), ExitCode.AGAIN)


def _read(content: bytes, url: str) -> Answer:
    """Raises ValueError for what is no whole answer."""
    choice = json.loads(content)["choices"][0]
    ids, values = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if choice.get("finish_reason") not in ("stop", "length") or not ids or not values or len(ids) != len(values):
        raise ValueError(f"{url}: an answer without token ids or log-probabilities, or broken off")
    return list(ids), [float(value) for value in values]
