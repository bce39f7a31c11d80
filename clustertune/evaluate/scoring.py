"""lm-eval's scorer of a task whose rows somebody else wrote, with a limit of time for each answer.

IFEval's checkers search the answer for a row's keywords as regular expressions: a pattern that goes back again and again would
hold up the evaluation without end, behind the last answer of a model that took hours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from clustertune.bounded import StandingChild, allow
from clustertune.data.rewards import SECONDS
from clustertune.errors import ExitCode, Problem, UserError

ANSWERS = 8
"""IFEval's loose verdict looks at eight forms of an answer."""


class BoundedScoring:
    """Has a task's ``process_results`` run in a child while the context lasts; what does not end counts as an empty answer.

    ``task``: lm-eval's. An answer has :data:`ANSWERS` times :data:`~clustertune.data.rewards.SECONDS` of CPU. Raises UserError
    where an empty answer has no verdict in time either.
    """

    def __init__(self, task: Any) -> None:
        self._task, self._score = task, task.process_results
        self._child: StandingChild | None = None
        self.endless: list[int] = []
        """The documents, by their number from 0, whose answer had no verdict in time."""
        self._documents: dict[str, int] = {}

    def __enter__(self) -> BoundedScoring:
        self._task.process_results = self._bounded
        return self

    def __exit__(self, *_: object) -> None:
        self._task.process_results = self._score
        if self._child is not None:
            self._child.close()

    def _in_child(self, request: Sequence[Any]) -> Mapping[str, Any]:
        document, results = request
        allow(ANSWERS * SECONDS)
        try:
            scored = self._score(document, results)
            return {"scored": scored} if json.loads(json.dumps(scored)) == scored else {}
        except Exception:  # the same in this process, with its own message
            return {}
        finally:
            allow(0)

    def _ask(self, document: Any, results: Sequence[Any]) -> Mapping[str, Any] | None:
        if self._child is None or self._child.ended:
            self._child = StandingChild(self._in_child)
        return self._child.ask([document, results]).found

    def _bounded(self, document: Any, results: Any) -> Any:
        try:
            alike = json.loads(json.dumps([document, results])) == [document, list(results)]
        except (TypeError, ValueError):
            alike = False
        if not alike:  # images and the like: no rows of text
            return self._score(document, results)
        found = self._ask(document, results)
        if found is None:
            number = self._number(document)
            self.endless.append(number)
            if (found := self._ask(document, [""] * len(results))) is None:
                text = f"document {number} (from 0) has no verdict in time, even of an empty answer"
                raise UserError(Problem(text, file=str(self._task.task_name), fix="change the row's patterns"), ExitCode.FAILED)
            results = [""] * len(results)
        return found["scored"] if "scored" in found else self._score(document, results)

    def _number(self, document: Any) -> int:
        for number, one in enumerate(self._task.eval_docs):
            self._documents.setdefault(json.dumps(one, sort_keys=True, default=str), number)
        return self._documents.get(json.dumps(document, sort_keys=True, default=str), -1)
