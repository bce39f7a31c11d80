"""lm-eval's client of vLLM's servers: prompts as token ids, round robin, and no answer is ever made up.

``local-completions`` of lm-eval 0.4.13 scores a null text, and a reply without choices, as an empty answer, and ends with one
dead server. Here the first is an error that names server and prompt, and of several servers a dead one leaves the ring.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.models.utils import has_bos_prefix

from clustertune.errors import ExitCode, Problem, UserError

TRIES = 3
"""How often a prompt is sent where the server answers with an error; lm-eval's own."""


class _GiveUp(BaseException):
    """What no second try helps. No Exception: tenacity would try again."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class ServersLM(LocalCompletionsAPI):  # type: ignore[misc]
    """lm-eval's model over equal servers. ``urls``: without a path; ``model``: what the servers call it.

    ``concurrent``: requests under way at once, in all. ``max_length``: the servers' ``--max-model-len``. ``stall_seconds``: a
    server that leaves a request unanswered for so long leaves the ring. ``key``: that the servers ask for.
    Raises UserError (exit 1) where no server is left, one answers with an error :data:`TRIES` times, or with no text.
    """

    def __init__(
        self,
        urls: Sequence[str],
        folder: Path,
        *,
        model: str,
        concurrent: int,
        max_length: int,
        stall_seconds: float = 1800,
        key: str | None = None,
    ) -> None:
        self.keeps_special = False
        """Answers hold their special tokens."""
        self.down: dict[str, str] = {}
        """Servers that left the ring, and why."""
        self._ring, self._next = list(urls), itertools.count()
        self._failures: dict[tuple[int, ...], int] = {}
        super().__init__(
            base_url=self._ring[0],
            model=model,
            tokenizer=str(folder),
            tokenizer_backend="huggingface",
            num_concurrent=max(2, concurrent),  # with one, lm-eval goes another way and adds a stop string
            max_retries=TRIES + len(self._ring),
            max_length=max_length,
            timeout=stall_seconds,
            header={"Authorization": f"Bearer {key}"} if key else None,
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
        except (_GiveUp, aiohttp.ClientError, TimeoutError) as error:
            problem = getattr(error, "problem", None) or Problem(f"{type(error).__name__}: {error}", file=self.base_url)
            raise UserError(problem, ExitCode.FAILED) from None

    async def amodel_call(self, session: Any, sem: Any, messages: Any, **kwargs: Any) -> Any:
        async with sem:  # a server is chosen when the request is sent: what waits may outlive one that hangs
            return await self._ask(session, messages, **kwargs)

    async def _ask(self, session: Any, messages: Any, **kwargs: Any) -> Any:
        alive = [url for url in self._ring if url not in self.down]
        if not alive:
            reasons = "; ".join(f"{url}: {why}" for url, why in self.down.items())
            fix = "their logs say why; the same command continues with what is answered"
            raise _GiveUp(Problem(f"no server is left ({reasons})", fix=fix))
        url = alive[next(self._next) % len(alive)]
        view = copy.copy(self)  # hundreds are under way, each with its own address
        view.base_url, view._prompt_tokens = f"{url}/v1/completions", messages[0]
        options = kwargs.get("gen_kwargs") or {}
        view._token_limit = int(options.get("max_gen_toks", 1)) if kwargs.get("generate", True) else None
        try:
            return await LocalCompletionsAPI.amodel_call(view, session, asyncio.Semaphore(1), messages, **kwargs)
        except TimeoutError:
            self.down.setdefault(url, f"no answer within {self.timeout} s")
            raise
        except aiohttp.ClientConnectionError as error:
            if not await self._is_healthy(session, url):
                self.down.setdefault(url, f"{type(error).__name__}")
            raise
        except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError, _Unfinished) as error:
            key = tuple(view._prompt_tokens)
            self._failures[key] = tries = self._failures.get(key, 0) + 1
            if tries >= TRIES:
                text = f"failed {tries} times with the prompt that begins {view._begin()}: {error}"
                raise _GiveUp(Problem(text, file=url, fix="the server's log says why")) from None
            raise

    async def _is_healthy(self, session: Any, url: str) -> bool:
        try:
            async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=5)) as reply:
                return bool(reply.status == 200)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    def _begin(self) -> str:
        return repr(self.tokenizer.decode(self._prompt_tokens)[:80])

    def _refuse(self, what: str) -> _GiveUp:
        url = self.base_url.removesuffix("/v1/completions")
        fix = "nothing is scored in its place; the server's log may say why"
        return _GiveUp(Problem(f"{what} for the prompt that begins {self._begin()}", file=url, fix=fix))

    def _choice(self, outputs: Any) -> dict[str, Any]:
        choices = outputs.get("choices") if isinstance(outputs, dict) else None
        if not isinstance(choices, list):
            raise self._refuse(f"a reply without choices ({str(outputs)[:200]})")
        if len(choices) != 1:
            raise self._refuse(f"{len(choices)} answers instead of one")
        return dict(choices[0])

    def parse_generations(self, outputs: Any, **_kwargs: Any) -> list[str]:
        """The one answer. lm-eval fills what is missing with an empty text."""
        choice = self._choice(outputs)
        if not isinstance(choice.get("text"), str):
            raise self._refuse("a null text")
        if choice.get("finish_reason") not in ("stop", "length"):  # vLLM says "abort" of what a dying engine leaves
            raise _Unfinished(f"an answer that ended with {choice.get('finish_reason')!r}")
        made = (outputs.get("usage") or {}).get("completion_tokens")
        if made is not None and made > self._token_limit:
            raise self._refuse(f"{made} tokens where {self._token_limit} were asked for at most")
        return [choice["text"]]

    def parse_logprobs(self, outputs: Any, tokens: Any = None, ctxlens: Any = None, **_kwargs: Any) -> Any:
        """lm-eval's, of a reply that has a number for each token of the prompt and the one generated."""
        values = (self._choice(outputs).get("logprobs") or {}).get("token_logprobs")
        if not isinstance(values, list) or len(values) != len(self._prompt_tokens) + 1 or None in values[1:]:
            has = len(values) if isinstance(values, list) else "no"
            raise self._refuse(f"{has} log-probabilities for {len(self._prompt_tokens)} tokens")
        return LocalCompletionsAPI.parse_logprobs(outputs, tokens, ctxlens)


class _Unfinished(Exception):
    """An answer that the server broke off; asked again."""
