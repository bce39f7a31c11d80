"""IFEval's prompts, checked row by row and checker by checker before a model is loaded.

A row is google/IFEval's: ``{"key": int, "prompt": str, "instruction_id_list": [str], "kwargs": [dict]}``, ``kwargs`` one
mapping per instruction. lm-eval builds the checkers only after all generation, so that a bad row would cost the run.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clustertune.bounded import StandingChild, allow
from clustertune.data.rewards import SECONDS
from clustertune.evaluate.tasks import TaskRows, Wrong
from clustertune.recipe.eval_tasks import TaskFile

BENCHMARK_PROMPTS, BENCHMARK_INSTRUCTIONS, KINDS = 541, 834, 25
"""The size of google/IFEval: prompts, instructions in them, kinds of instruction (arXiv:2311.07911 and its data file)."""

LANDMARKS = {
    371: "a9dc9b6581806016", 3653: "930033f2ed872440", 3719: "3190b533e1026639", 3739: "36e36afd7274af7e",
    3757: "1ae205a3bd0947b2",
}  # fmt: skip
"""Some of its prompts: key and :func:`hash_landmark`."""

_LISTS = ("keywords", "forbidden_words")
"""Arguments of several texts: lm-eval would take the letters of one text for them."""

_PROBES = (
    "A plain sentence.",
    "First *one*.\n\n* Second, with [a place].\n\n***\n\nSECTION 1 Third! P.S. <<end>>",
    '{"json": [1, 2]}',
)
"""Answers that every checker must be able to judge."""


class OwnRows(TaskRows):
    """google/IFEval's rows. Their checkers are tried in a child: a row's pattern may go back without end."""

    def __init__(self, task: TaskFile, path: Path, called: str) -> None:
        self._child: StandingChild | None = None
        try:
            super().__init__(task, path, called)
        finally:
            self._close()

    def _close(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None

    def _try(self, name: str, prompt: str, kwargs: Mapping[str, Any]) -> str | None:
        """What is wrong with a checker, as :func:`_try_checker` says it, or that it does not come to an end."""
        if self._child is None or self._child.ended:
            self._child = StandingChild(_try_in_child)
        found = self._child.ask([name, prompt, dict(kwargs)]).found
        if found is None:
            return f"it does not come to an end within {SECONDS:g} s: a pattern must not repeat what repeats itself"
        return found["error"]  # type: ignore[no-any-return]

    def check(self, row: Mapping[str, Any]) -> Iterator[Wrong]:
        """A key of its own, a prompt, and checkers that can judge."""
        key, prompt, names, kwargs = (row[name] for name in self.task.columns)
        if not isinstance(key, int) or isinstance(key, bool):
            yield "key", f"must be a whole number, is {key!r}", None
        elif earlier := next((at for at, other in enumerate(self.rows, 1) if other.get("key") == key), None):
            yield "key", f"key {key} stands in row {earlier} too", None
        if not isinstance(prompt, str) or not prompt.strip():
            yield "prompt", f"must be a text, is {prompt!r}", None
        if not isinstance(names, list) or not names:
            yield "instruction_id_list", "names no instruction", None
        elif not isinstance(kwargs, list) or len(kwargs) != len(names) or not all(isinstance(one, dict) for one in kwargs):
            yield "kwargs", f"must be {len(names)} mappings, one for each instruction", None
        else:
            for index, (name, arguments) in enumerate(zip(names, kwargs, strict=True)):
                yield from self._check_instruction(str(name), arguments, str(prompt), index)

    def _check_instruction(self, name: str, kwargs: Mapping[str, Any], prompt: str, index: int) -> Iterator[Wrong]:
        """Whether there is such a checker, and it can be built with these arguments and judge the probes."""
        from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

        if name not in INSTRUCTION_DICT:
            near = difflib.get_close_matches(name, INSTRUCTION_DICT, n=1, cutoff=0.4)
            fix = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(INSTRUCTION_DICT))}"
            yield f"instruction_id_list[{index}]", f"unknown instruction {name!r}", fix
        elif odd := [one for one in _LISTS if kwargs.get(one) is not None and not isinstance(kwargs[one], list)]:
            yield f"kwargs[{index}].{odd[0]}", f"must be a list of texts, is {kwargs[odd[0]]!r}", None
        elif error := self._try(name, prompt, kwargs):
            yield f"kwargs[{index}]", f"{name} refuses {json.dumps(kwargs, ensure_ascii=False)}: {error}", None

    def plain(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The four columns and the arguments that count; whole numbers may be written as 2 and 2.0."""
        kwargs = [
            {
                name: int(value) if isinstance(value, float) and value.is_integer() else value
                for name, value in arguments.items()
                if value is not None
            }
            for arguments in row["kwargs"]
        ]
        return {**super().plain(row), "kwargs": kwargs}

    @property
    def is_benchmark(self) -> bool:
        """The rows are google/IFEval's: its counts and several of its prompts word for word."""
        return recognise_benchmark(self.rows)


def _try_in_child(request: Sequence[Any]) -> Mapping[str, Any]:
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    name, prompt, kwargs = request
    allow(SECONDS)
    try:
        return {"error": _try_checker(INSTRUCTION_DICT[name], name, prompt, kwargs)}
    finally:
        allow(0)


def _try_checker(checker: Any, name: str, prompt: str, kwargs: Mapping[str, Any]) -> str | None:
    """Build a checker as lm-eval's ``process_results`` does and judge the probes; the error's text, or None."""
    state = random.getstate()
    try:
        instruction = checker(name)
        instruction.build_description(**{key: value for key, value in kwargs.items() if value})
        arguments = instruction.get_instruction_args()
        if arguments and "prompt" in arguments:
            instruction.build_description(prompt=prompt)
        for probe in _PROBES:
            instruction.check_following(probe)
    # Whatever a checker raises here, it would raise after all generation.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        random.setstate(state)
    return None


def hash_landmark(row: Mapping[str, Any]) -> str:
    """A short digest of a prompt's text."""
    return hashlib.sha256(str(row["prompt"]).encode()).hexdigest()[:16]


def recognise_benchmark(rows: list[dict[str, Any]]) -> bool:
    """Whether the rows are google/IFEval's: 541 prompts, 834 instructions of 25 kinds, most landmarks word for word.

    Digests of single prompts and not of the file: copies differ in line ends, order and null arguments, and the authors
    have fixed the wording of some prompts since.
    """
    kinds = [kind for row in rows for kind in row["instruction_id_list"]]
    matches = sum(LANDMARKS.get(row["key"]) == hash_landmark(row) for row in rows)
    return (
        len(rows) == BENCHMARK_PROMPTS
        and len(kinds) == BENCHMARK_INSTRUCTIONS
        and len(set(kinds)) == KINDS
        and matches > len(LANDMARKS) // 2
    )
