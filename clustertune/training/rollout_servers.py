"""A rank's client of vLLM's servers beside the trainer: they are given adapters by files, and answer prompts of token ids.

Each answer is a request of its own with a seed of its own, so that it does not matter which server gives it, nor how often it
was asked for. A server that does not answer leaves the ring; at the next generation it is asked again, and comes back with the
newest adapter.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from http.client import HTTPException
from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict
from safetensors.torch import save_file

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.plan.generation_cost import MOST

HEALTH_SECONDS, LOAD_SECONDS = 5.0, 300.0
ANSWER_SECONDS = 1800.0
"""As ``eval.stall_seconds``: 1,280 steps of a 405B model at 0.32 s are 7 minutes."""
PATIENCE_SECONDS = 1800.0
"""Without any server for so long, the rank gives up: one that died is started again, and reads its weights."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy of the site would be asked for this job's own servers."""
GONE = (OSError, HTTPException)
"""What a server that ends leaves: no connection, or half of an answer."""
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

    def _post(self, url: str, body: Mapping[str, Any], seconds: float) -> bytes:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310 - http, from the job's own file
        with _DIRECT.open(request, timeout=seconds) as reply:
            content: bytes = reply.read()
        return content

    def _is_healthy(self, url: str) -> bool:
        with contextlib.suppress(*GONE), _DIRECT.open(f"{url}/health", timeout=HEALTH_SECONDS) as reply:
            return bool(reply.status == 200)
        return False

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
            if not self._is_healthy(url):
                return False
            body = {"lora_name": self._adapter, "lora_path": str((self._folder / self._adapter).resolve())}
            try:
                self._post(f"{url}/v1/load_lora_adapter", body, LOAD_SECONDS)
            except urllib.error.HTTPError as error:
                if b"already been loaded" not in error.read():  # by another rank
                    return False
            except GONE:
                return False
            before, self._loaded[url] = self._loaded.get(url), self._adapter
            if before is not None:
                with contextlib.suppress(*GONE):  # another rank did it already
                    self._post(f"{url}/v1/unload_lora_adapter", {"lora_name": before}, LOAD_SECONDS)
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
                    return _read(self._post(f"{url}/v1/completions", body, ANSWER_SECONDS), url)
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
