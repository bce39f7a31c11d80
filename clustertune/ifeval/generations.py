"""Generation that survives a kill: each finished batch is on disk before the next begins.

lm-eval's own ``use_cache`` is not used: it unpickles whatever lies in its file, its keys do not name the model, and after
a kill the remaining prompts fall into other batches, whose padding changes the last bits of the logits. Here a batch is
the unit, always of the same prompts, so that a resumed run gives the very answers of an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from clustertune.lock import held


def hold(folder: Path) -> contextlib.AbstractContextManager[None]:
    """One evaluation at a time in a folder. Raises UserError (exit 75) where another process has it."""
    return held(folder / ".lock.tmp", "is evaluating here", shown=folder, fix="wait for it, or choose another folder")


class GenerationLog:
    """An append-only file of finished batches, one JSON line each, fsynced.

    A torn or foreign line (the process was killed while writing it) and what follows are cut off when the file is opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] = path.open("ab+")
        self._batches = self._load()

    def _load(self) -> dict[str, list[str]]:
        self._file.seek(0)
        batches: dict[str, list[str]] = {}
        whole = 0
        for line in self._file:
            try:
                if not line.endswith(b"\n"):
                    break
                entry = json.loads(line)
                answers = entry["answers"]
                if not all(isinstance(answer, str) for answer in answers):
                    break
                batches[str(entry["batch"])] = answers
            except (ValueError, KeyError, TypeError):
                break
            whole += len(line)
        self._file.truncate(whole)
        return batches

    def find(self, key: str, size: int) -> list[str] | None:
        """The answers of a finished batch of ``size`` prompts."""
        answers = self._batches.get(key)
        return answers if answers is not None and len(answers) == size else None

    def append(self, key: str, answers: Sequence[str]) -> None:
        """Record a finished batch; on return it is on the device."""
        line = json.dumps({"batch": key, "answers": list(answers)}) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._batches[key] = list(answers)

    def close(self) -> None:
        """Release the file; it stays until the evaluation is whole."""
        self._file.close()


class ResumableLM:
    """lm-eval's model, with ``generate_until`` answered batch by batch from a :class:`GenerationLog` where it can be."""

    def __init__(self, lm: Any, log: GenerationLog, batch_size: int, report: Callable[[int, int], None]) -> None:
        self._lm, self._log, self._batch_size, self._report = lm, log, batch_size, report
        self.resumed = 0
        """Prompts answered from the log."""
        self.truncated = 0
        """Prompts that lost their beginning because prompt and answer do not fit the model's context."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Answers in the order of ``requests``: the same batches in the same order as ``HFLM.generate_until`` makes."""
        lengths = [len(self._lm.tok_encode(request.args[0])) for request in requests]
        # HFLM's own order: the longest first, equal lengths by text.
        order = sorted(range(len(requests)), key=lambda i: (-lengths[i], requests[i].args[0]))
        answers: list[str] = [""] * len(requests)
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            batch = [requests[i] for i in chosen]
            # With the position: two batches of the same prompts are two batches to HFLM.
            key = hashlib.sha256(json.dumps([start, [request.args for request in batch]]).encode()).hexdigest()
            done = self._log.find(key, len(batch))
            if done is None:
                done = self._lm.generate_until(batch, disable_tqdm=disable_tqdm)
                self._log.append(key, done)
            else:
                self.resumed += len(batch)
            for i, answer in zip(chosen, done, strict=True):
                answers[i] = answer
                room = self._lm.max_length - requests[i].args[1]["max_gen_toks"]
                self.truncated += lengths[i] > room
            self._report(start + len(batch), len(requests))
        return answers
