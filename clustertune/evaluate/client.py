"""lm-eval's client of vLLM's servers: prompts as token ids, round robin, and no answer is ever made up.

``local-completions`` of lm-eval 0.4.13 scores a null text, and a reply without choices, as an empty answer, and ends with one
dead server. Here nothing but an answer is scored. A server that is dead, does not prove that it has the job's key, or answers
with something else leaves the ring, and the others are asked; the error of the last one names server and prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.models.utils import has_bos_prefix

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch.guard import vllm_guard
from clustertune.launch.server_requests import (
    FEW_BYTES,
    PROOF_SECONDS,
    REST_SECONDS,
    TOKEN_BYTES,
    Limits,
    Malformed,
    NotOurs,
    is_log_probability,
    new_nonce,
    require_proof,
    shown,
)

TRIES = 3
"""How often a prompt is sent where the server answers with an error; lm-eval's own."""


class _GiveUp(BaseException):
    """What no second try helps. No Exception: tenacity would try again."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class _Reply:
    """A whole answer, as lm-eval reads one of aiohttp's."""

    def __init__(self, request: Any, status: int, content: bytes) -> None:
        self._request, self.status, self._content = request, status, content
        self.ok = status == 200

    async def text(self) -> str:
        return ascii(shown(self._content))

    def raise_for_status(self) -> None:
        if self.status < 400 and not self.ok:
            raise Malformed(f"an answer with status {self.status}")
        if not self.ok:
            text = ascii(shown(self._content))
            raise aiohttp.ClientResponseError(self._request, (), status=self.status, message=text)

    async def json(self) -> Any:
        try:
            return json.loads(self._content)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"an answer that is no JSON ({error})") from None


class _Proven:
    """Requests on connections of their own, as :mod:`clustertune.launch.server_requests` makes them, for hundreds at once.

    Stands for lm-eval's session. ``limit``: bytes of an answer. Raises NotOurs, Malformed, and aiohttp's errors.
    """

    def __init__(self, url: str, key: str, seconds: float, limit: int) -> None:
        self._url, self._key, self._limit = url, key, limit
        self._timeout = aiohttp.ClientTimeout(total=seconds)

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        made = itertools.count()

        async def once(*_: Any) -> None:
            if next(made):  # behind the proof, the same connection or none
                raise aiohttp.ServerDisconnectedError("the connection ended behind the proof")

        trace = aiohttp.TraceConfig()
        trace.on_connection_create_start.append(once)
        asked: dict[str, Any] = {"timeout": self._timeout, "trace_configs": [trace], "auto_decompress": False}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1), **asked) as session:
            nonce = new_nonce()
            address, limits = self._url.partition("://")[2], Limits(time.monotonic() + PROOF_SECONDS, FEW_BYTES)
            async with (
                asyncio.timeout(PROOF_SECONDS),
                session.get(f"{self._url}{vllm_guard.PATH}?{nonce}", allow_redirects=False) as reply,
            ):
                answer = await _whole(reply, limits)
            require_proof(answer if reply.status == 200 else b"", self._key, address, nonce)
            yield session

    @contextlib.asynccontextmanager
    async def post(self, url: str, *, json: Any, headers: Mapping[str, str]) -> AsyncIterator[_Reply]:
        """As ``aiohttp.ClientSession.post``; the answer is read whole."""
        async with self._session() as session, session.post(url, json=json, headers=headers, allow_redirects=False) as reply:
            content = await _whole(reply, Limits(time.monotonic() + REST_SECONDS, self._limit))
            yield _Reply(reply.request_info, reply.status, content)

    async def is_healthy(self) -> bool:
        """Whether the server proves its key and says that it is well."""
        headers = {"Authorization": f"Bearer {self._key}"}
        try:
            async with (
                asyncio.timeout(PROOF_SECONDS),
                self._session() as session,
                session.get(f"{self._url}/health", headers=headers, allow_redirects=False) as reply,
            ):
                return bool(reply.status == 200)
        except (aiohttp.ClientError, TimeoutError, OSError, NotOurs, Malformed):
            return False


async def _whole(reply: aiohttp.ClientResponse, limits: Limits) -> bytes:
    content = bytearray()
    try:
        async with asyncio.timeout(limits.seconds()):
            async for part in reply.content.iter_chunked(1 << 16):
                limits.take(len(part))
                content += part
    except TimeoutError:
        limits.seconds()  # raises Malformed
        raise
    return bytes(content)


class ServersLM(LocalCompletionsAPI):  # type: ignore[misc]
    """lm-eval's model over equal servers. ``urls``: without a path; ``model``: what the servers call it.

    ``concurrent``: requests under way at once, in all. ``max_length``: the servers' ``--max-model-len``. ``stall_seconds``: a
    server that leaves a request unanswered for so long leaves the ring. ``key``: that the servers prove and ask for.
    Raises UserError (exit 1) where no server is left, or one answers with an error :data:`TRIES` times.
    """

    def __init__(
        self,
        urls: Sequence[str],
        folder: Path,
        *,
        model: str,
        concurrent: int,
        max_length: int,
        key: str,
        stall_seconds: float = 1800,
    ) -> None:
        self.keeps_special = False
        """Answers hold their special tokens."""
        self.down: dict[str, str] = {}
        """Servers that left the ring, and why."""
        self._ring, self._next, self._key = list(urls), itertools.count(), key
        self._failures: dict[tuple[str, tuple[int, ...]], int] = {}
        super().__init__(
            base_url=self._ring[0],
            model=model,
            tokenizer=str(folder),
            tokenizer_backend="huggingface",
            num_concurrent=max(2, concurrent),  # with one, lm-eval goes another way and adds a stop string
            max_retries=(TRIES + 1) * len(self._ring) + 1,
            max_length=max_length,
            timeout=stall_seconds,
            header={"Authorization": f"Bearer {key}"},
        )

    @property
    def max_gen_toks(self) -> int:
        """Tokens of an answer where the task does not say; as ``HFLM`` calls it."""
        return int(self._max_gen_toks)

    def tok_encode(self, string: Any, *_args: Any, **_kwargs: Any) -> Any:
        """The tokens that ``HFLM`` makes: the tokenizer's special tokens, but no second BOS."""
        if not isinstance(string, str):
            return [self.tok_encode(one) for one in string]
        bos = getattr(self.tokenizer, "bos_token", None)
        return self.tokenizer.encode(string, **({"add_special_tokens": False} if has_bos_prefix(string, bos) else {}))

    def _create_payload(self, *args: Any, generate: bool = False, **kwargs: Any) -> Any:
        payload = super()._create_payload(*args, generate=generate, **kwargs)
        return {**payload, "skip_special_tokens": False} if generate and self.keeps_special else payload

    async def get_batched_requests(self, *args: Any, **kwargs: Any) -> Any:
        """lm-eval's, with its last error as text."""
        # Hundreds of requests may end with the same error: asyncio would print each that nobody looked at.
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        try:
            return await super().get_batched_requests(*args, **kwargs)
        except (_GiveUp, aiohttp.ClientError, TimeoutError, OSError, ValueError, _Unfinished) as error:
            problem = getattr(error, "problem", None) or Problem(f"{type(error).__name__}: {error}", file=self.base_url)
            raise UserError(problem, ExitCode.FAILED) from None

    async def amodel_call(self, session: Any, sem: Any, messages: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - lm-eval's own
        async with sem:  # a server is chosen when the request is sent: what waits may outlive one that hangs
            return await self._ask(messages, **kwargs)

    async def _ask(self, messages: Any, **kwargs: Any) -> Any:
        alive = [url for url in self._ring if url not in self.down]
        if not alive:
            reasons = "; ".join(f"{url}: {why}" for url, why in self.down.items())
            fix = "nothing is scored in its place; their logs say why, and the same command continues with what is answered"
            raise _GiveUp(Problem(f"no server is left ({reasons})", fix=fix))
        url = alive[next(self._next) % len(alive)]
        view = copy.copy(self)  # hundreds are under way, each with its own address
        view.base_url, view._prompt_tokens = f"{url}/v1/completions", messages[0]
        options = kwargs.get("gen_kwargs") or {}
        view._token_limit = int(options.get("max_gen_toks", 1)) if kwargs.get("generate", True) else None
        limit = FEW_BYTES + TOKEN_BYTES * (len(messages[0]) + (view._token_limit or 1))
        session = _Proven(url, self._key, float(self.timeout), limit)
        try:
            return await LocalCompletionsAPI.amodel_call(view, session, asyncio.Semaphore(1), messages, **kwargs)
        except TimeoutError:
            self.down.setdefault(url, f"no answer within {self.timeout} s")
            raise
        except (NotOurs, Malformed) as error:
            self.down.setdefault(url, str(error))
            raise
        except aiohttp.ClientConnectionError as error:
            if not await session.is_healthy():
                self.down.setdefault(url, f"{type(error).__name__}")
            raise
        except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError, _Unfinished) as error:
            key = url, tuple(view._prompt_tokens)
            self._failures[key] = tries = self._failures.get(key, 0) + 1
            if tries >= TRIES:
                self.down.setdefault(url, f"failed {tries} times with the prompt that begins {view._begin()}: {error}")
            raise

    def _begin(self) -> str:
        return repr(self.tokenizer.decode(self._prompt_tokens)[:80])

    def _wrong(self, what: str) -> Malformed:
        return Malformed(f"{what} for the prompt that begins {self._begin()}")

    def _choice(self, outputs: Any) -> dict[str, Any]:
        choices = outputs.get("choices") if isinstance(outputs, dict) else None
        if not isinstance(choices, list):
            raise self._wrong(f"a reply without choices ({ascii(outputs)[:200]})")
        if len(choices) != 1:
            raise self._wrong(f"{len(choices)} answers instead of one")
        if not isinstance(choices[0], dict):
            raise self._wrong(f"an answer that is no object ({ascii(choices[0])[:200]})")
        return choices[0]

    def parse_generations(self, outputs: Any, **_kwargs: Any) -> list[str]:
        """The one answer. lm-eval fills what is missing with an empty text."""
        choice = self._choice(outputs)
        if not isinstance(text := choice.get("text"), str):
            raise self._wrong("a null text" if text is None else f"a text that is {type(text).__name__}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise self._wrong("a text with half of a character (a lone surrogate)")
        if choice.get("finish_reason") not in ("stop", "length"):  # vLLM says "abort" of what a dying engine leaves
            raise _Unfinished(f"an answer that ended with {ascii(choice.get('finish_reason'))[:80]}")
        usage = outputs.get("usage")
        made = usage.get("completion_tokens") if isinstance(usage, dict) else usage
        if made is not None and (type(made) is not int or not 0 <= made <= self._token_limit):
            raise self._wrong(f"{ascii(made)[:80]} tokens where {self._token_limit} were asked for at most")
        return [text]

    def parse_logprobs(self, outputs: Any, tokens: Any = None, ctxlens: Any = None, **_kwargs: Any) -> Any:
        """lm-eval's, of a reply that has a number for each token of the prompt and the one generated."""
        choice, count = self._choice(outputs), len(self._prompt_tokens) + 1
        lists = choice.get("logprobs")
        values, tops = (lists.get(name) if isinstance(lists, dict) else None for name in ("token_logprobs", "top_logprobs"))
        if not isinstance(values, list) or len(values) != count or not all(map(is_log_probability, values[1:])):
            has = len(values) if isinstance(values, list) else "no"
            raise self._wrong(f"{has} log-probabilities, or some that are none, for {count - 1} tokens")
        if not isinstance(tops, list) or len(tops) != count or not all(map(_are_log_probabilities, tops[1:])):
            raise self._wrong(f"no log-probabilities of the likeliest tokens for {count - 1} tokens")
        return LocalCompletionsAPI.parse_logprobs({"choices": [{**choice, "index": 0}]}, tokens, ctxlens)


def _are_log_probabilities(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(map(is_log_probability, value.values()))


class _Unfinished(Exception):
    """An answer that the server broke off; asked again."""
