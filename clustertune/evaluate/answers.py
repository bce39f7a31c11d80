"""Answers that survive a kill: each is a line on disk before the next request, and none is ever missing.

lm-eval's own ``use_cache`` is not used: it unpickles whatever lies in its file, its keys do not name the model, and after
a kill the remaining prompts fall into other batches, whose padding changes the last bits of the logits. Here a model in this
process gets batches of always the same requests, so that a resumed run gives the very answers of an uninterrupted one.
lm-eval also scores a reply without text as an empty answer (0.4.13, ``api_models``); here it is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.evaluate.thoughts import Thoughts
from clustertune.lock import held

CHUNK = 16
"""Batches of a log-likelihood chunk: lm-eval computes the choices of one document together, where it sees them together."""


def hold(folder: Path) -> contextlib.AbstractContextManager[None]:
    """One evaluation at a time in a folder. Raises UserError (exit 75) where another process has it."""
    return held(folder / ".lock.tmp", "is evaluating here", shown=folder, fix="wait for it, or choose another folder")


class AnswerLog:
    """An append-only file of answers, one JSON line each, fsynced.

    A torn or foreign line (the process was killed while writing it) and what follows are cut off when the file is opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] = path.open("ab+")
        self._answers = self._load()

    def _load(self) -> dict[str, Any]:
        self._file.seek(0)
        answers: dict[str, Any] = {}
        size = 0
        for line in self._file:
            try:
                if not line.endswith(b"\n"):
                    break
                entry = json.loads(line)
                answers[str(entry["key"])] = entry["answer"]
            except (ValueError, RecursionError, KeyError, TypeError):
                break
            size += len(line)
        self._file.truncate(size)
        return answers

    def find(self, key: str, kind: str) -> Any:
        """A recorded answer to a request of ``kind``, or None."""
        answer = self._answers.get(key)
        answer = tuple(answer) if isinstance(answer, list) else answer
        return None if _fault(kind, answer) else answer

    def append(self, entries: Sequence[tuple[str, Any, Any]]) -> None:
        """Record answers as (key, request, answer); on return they are on the device."""
        for key, request, answer in entries:
            line = json.dumps({"key": key, "task": request.task_name, "doc": request.doc_id, "answer": answer}) + "\n"
            self._file.write(line.encode())
            self._answers[key] = answer
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Release the file; it stays until the evaluation is whole."""
        self._file.close()


def _fault(kind: str, answer: Any) -> str | None:
    """Why something is not an answer to a request of ``kind`` (lm-eval's request types), or None."""
    if kind == "generate_until":
        return None if isinstance(answer, str) else f"{answer!r} is not text"
    if kind == "loglikelihood":
        if not isinstance(answer, tuple | list) or len(answer) != 2 or not isinstance(answer[1], bool):
            return f"{answer!r} is not a pair of log-likelihood and whether it is greedy"
        answer = answer[0]
    is_number = isinstance(answer, float | int) and not isinstance(answer, bool) and not math.isnan(answer)
    return None if is_number else f"{answer!r} is not a log-likelihood"


class RecordedLM:
    """lm-eval's model, answered from an :class:`AnswerLog` where it can be; a null or missing answer raises UserError."""

    def __init__(
        self,
        lm: Any,
        log: AnswerLog,
        batch_size: int,
        report: Callable[[int, int], None],
        *,
        whole: bool,
        thoughts: Thoughts | None = None,
        render: Callable[..., str] | None = None,
    ) -> None:
        """``whole``: the model takes any number of requests at once, each on its own (servers). ``thoughts``: what takes them
        off the answers. ``render``: a conversation in the chat template; None: as the model itself does it.
        """
        self._thoughts, self._render = thoughts, render
        self._lm, self._log, self._batch_size, self._report, self._whole = lm, log, batch_size, report, whole
        self.resumed = 0
        """Requests answered from the log."""
        self.truncated = 0
        """Prompts that lost their beginning because prompt and answer do not fit the model's context."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation in the chat template, with the evaluation's arguments."""
        return str((self._render or self._lm.apply_chat_template)(messages, add_generation_prompt))

    def generate_until(self, requests: list[Any]) -> list[Any]:
        """Answers in the order of ``requests``, without the thoughts in front of them."""
        if self._thoughts is None:
            return self._generate(requests)
        return self._thoughts.taken_off(requests, self._generate(self._thoughts.asked(requests)))

    def _generate(self, requests: list[Any]) -> list[Any]:
        """Answers as the model gives them: the same batches in the same order as ``HFLM.generate_until`` makes."""
        lengths = [len(self._lm.tok_encode(request.args[0])) for request in requests]
        settings = [request.args[1] for request in requests]
        for length, kwargs in zip(lengths, settings, strict=True):
            self.truncated += length > self._lm.max_length - int(kwargs.get("max_gen_toks", self._lm.max_gen_toks))
        # HFLM's own order: by settings, then the longest first, equal lengths by text.
        groups = [json.dumps(kwargs, sort_keys=True) for kwargs in settings]
        order = sorted(range(len(requests)), key=lambda i: (-lengths[i], requests[i].args[0]))
        batches = [
            batch
            for group in dict.fromkeys(groups)
            for batch in _cut([i for i in order if groups[i] == group], self._batch_size)
        ]
        return self._answer("generate_until", requests, batches)

    def loglikelihood(self, requests: list[Any]) -> list[Any]:
        """(log-likelihood, whether the continuation is the greedy one) in the order of ``requests``."""
        order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].args[0]), requests[i].args))
        return self._answer("loglikelihood", requests, _cut(order, CHUNK * self._batch_size))

    def loglikelihood_rolling(self, requests: list[Any]) -> list[Any]:
        """The log-likelihood of each text, in the order of ``requests``."""
        return self._answer("loglikelihood_rolling", requests, _cut(list(range(len(requests))), self._batch_size))

    def _answer(self, kind: str, requests: Sequence[Any], batches: Iterable[Sequence[int]]) -> list[Any]:
        seen: Counter[str] = Counter()
        keys = []
        for request in requests:
            plain = hashlib.sha256(json.dumps([kind, request.task_name, request.doc_id, request.args]).encode()).hexdigest()
            keys.append(f"{plain}-{seen[plain]}")  # lm-eval may ask the same several times (repeats)
            seen[plain] += 1
        answers = [self._log.find(key, kind) for key in keys]
        self._report(0, len(requests))
        if self._whole:
            batches = [[i for i, answer in enumerate(answers) if answer is None]]
            self.resumed += len(requests) - len(batches[0])
            self._lm.set_cache_hook(_Hook(kind, {i: (keys[i], requests[i]) for i in batches[0]}, self._log, self._report))
        done = len(requests) if self._whole else 0
        for batch in batches:
            if all(answers[i] is not None for i in batch):
                self.resumed += 0 if self._whole else len(batch)
            else:
                replies = getattr(self._lm, kind)([requests[i] for i in batch], disable_tqdm=True)
                if len(replies) != len(batch):
                    raise _refuse(requests[batch[0]], f"{len(replies)} answers to {len(batch)} requests")
                for i, answer in zip(batch, replies, strict=True):
                    if fault := _fault(kind, answer):
                        raise _refuse(requests[i], fault)
                    answers[i] = answer
                self._log.append([(keys[i], requests[i], answers[i]) for i in batch if self._log.find(keys[i], kind) is None])
            done = min(done + len(batch), len(requests))
            self._report(done, len(requests))
        return answers


class _Hook:
    """lm-eval's ``cache_hook``: gets each answer of a server as it arrives."""

    def __init__(
        self, kind: str, waiting: dict[int, tuple[str, Any]], log: AnswerLog, report: Callable[[int, int], None]
    ) -> None:
        self._kind, self._log, self._report, self._total, self._done = kind, log, report, len(waiting), 0
        self._waiting: dict[str, list[tuple[str, Any]]] = {}
        for key, request in waiting.values():
            self._waiting.setdefault(json.dumps(request.args), []).append((key, request))

    def add_partial(self, attr: str, args: Any, answer: Any) -> None:
        """Record an answer, where it is one and is waited for; the rest is looked at when the call returns."""
        waiting = self._waiting.get(json.dumps(tuple(args)), [])
        if attr == self._kind and waiting and not _fault(attr, answer):
            self._log.append([(*waiting.pop(0), answer)])
            self._done += 1
            self._report(self._done, self._total)


def _cut(order: Sequence[int], size: int) -> list[Sequence[int]]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def _refuse(request: Any, what: str) -> UserError:
    problem = Problem(
        f"task {request.task_name}, document {request.doc_id}: {what}",
        fix="a missing answer is never scored; the same command continues with the answers on disk",
    )
    return UserError(problem, ExitCode.FAILED)
