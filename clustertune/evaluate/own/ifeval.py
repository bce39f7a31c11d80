"""IFEval's prompts, checked row by row and checker by checker before a model is loaded.

A row is google/IFEval's: ``{"key": int, "prompt": str, "instruction_id_list": [str], "kwargs": [dict]}``, ``kwargs`` one
mapping per instruction. lm-eval builds the checkers only after all generation, so that a bad row would cost the run.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clustertune.evaluate.inputs import TaskRows, Wrong
from clustertune.recipe.eval_tasks import TaskFile

BENCHMARK_PROMPTS, BENCHMARK_INSTRUCTIONS, KINDS = 541, 834, 25
"""The size of google/IFEval: prompts, instructions in them, kinds of instruction (arXiv:2311.07911 and its data file)."""

LANDMARKS = {
    371: "a9dc9b6581806016", 3653: "930033f2ed872440", 3719: "3190b533e1026639", 3739: "36e36afd7274af7e",
    3757: "1ae205a3bd0947b2",
}  # fmt: skip
"""Some of its prompts: key and :func:`hash_landmark`."""

_FORMS: dict[str, type] = {"key": int, "prompt": str, "instruction_id_list": list, "kwargs": list}
_INTEGERS = frozenset(
    {
        *("num_sentences", "num_placeholders", "num_bullets", "num_highlights", "num_sections", "num_paragraphs"),
        *("nth_paragraph", "frequency", "num_words", "let_frequency", "capital_frequency"),
    }
)
_MAX_INTEGER = 2**63 - 1
_LISTS = frozenset({"keywords", "forbidden_words"})
_PATTERNS = frozenset({"keyword", "section_spliter", "postscript_marker"})
"""Arguments that lm-eval's checkers put into a regular expression as they are (with every member of the lists)."""

_PROBES = (
    "A plain sentence.",
    "First *one*.\n\n* Second, with [a place].\n\n***\n\nSECTION 1 Third! P.S. <<end>>",
    '{"json": [1, 2]}',
)
"""Answers that every checker must be able to judge."""


STDERR_METHOD = {
    "prompt_level": "lm-eval's: sample standard deviation over prompts / sqrt(prompts)",
    "inst_level": "ratio estimator, instructions clustered by prompt (lm-eval gives none)",
}


class OwnRows(TaskRows):
    """google/IFEval's rows."""

    def __init__(self, task: TaskFile, path: Path, called: str) -> None:
        self.drawn = 0
        """Instructions whose arguments do not say everything, so that lm-eval draws the rest at random (from its seed)."""
        self._seen: dict[int, int] = {}
        super().__init__(task, path, called)

    def check(self, row: Mapping[str, Any], line: int) -> Iterator[Wrong]:
        """The form of the columns, a key of its own, and checkers that can judge."""
        if problems := list(_check_form(row)):
            yield from problems
        elif (earlier := self._seen.setdefault(row["key"], line)) != line:
            yield "key", f"key {row['key']} stands in line {earlier} too", None
        else:
            for index, (name, kwargs) in enumerate(zip(row["instruction_id_list"], row["kwargs"], strict=True)):
                if problems := list(_check_instruction(name, kwargs, row["prompt"], index)):
                    yield from problems
                else:
                    self.drawn += _is_drawn(name, kwargs)

    def plain(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The four columns and the arguments that count; whole numbers may be written as 2 and 2.0."""
        kwargs = [
            {name: int(value) if name in _INTEGERS else value for name, value in given.items() if value is not None}
            for given in row["kwargs"]
        ]
        return {**super().plain(row), "kwargs": kwargs}

    @property
    def is_benchmark(self) -> bool:
        """The rows are google/IFEval's: its counts and several of its prompts word for word."""
        return recognise_benchmark(self.rows)

    def describe(self, result: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All but ``notes`` stood there before there were tasks."""
        row, data = result["tasks"][self.task.task], result["details"][self.task.task]["dataset"]
        instructions = sum(len(sample["inst_level_strict_acc"]) for sample in samples)
        return {
            **super().describe(result, samples),
            "dataset": {**data, "instructions": instructions, "drawn_arguments": self.drawn},
            "scores": {name: row[f"{name},none"] for name in self.task.metrics},
            "stderr": {name: row[f"{name}_stderr,none"] for name in self.task.metrics},
            "stderr_method": STDERR_METHOD,
            "task_version": self.task.version,
            "decoding": {**result["decoding"], **samples[0]["arguments"][0][1]},
        }


def _check_form(row: Mapping[str, Any]) -> Iterator[Wrong]:
    """The four columns: of their types, and of equal lengths where they belong together."""
    types = {name: type(row.get(name)) for name in _FORMS}
    if odd := {name: found for name, found in types.items() if found is bool or not issubclass(found, _FORMS[name])}:
        for name, found in odd.items():
            yield name, f"must be {_FORMS[name].__name__}, is {found.__name__}", None
        return
    if abs(row["key"]) > _MAX_INTEGER:
        yield "key", "exceeds 64 bits", None
    if not row["prompt"].strip():
        yield "prompt", "is empty", None
    if not row["instruction_id_list"]:
        yield "instruction_id_list", "names no instruction", None
    given, wanted = len(row["kwargs"]), len(row["instruction_id_list"])
    if given != wanted:
        yield "kwargs", f"{given} mappings for {wanted} instructions", None
    for name, form in (("instruction_id_list", str), ("kwargs", dict)):
        for index, value in enumerate(row[name]):
            if not isinstance(value, form):
                yield f"{name}[{index}]", f"must be {form.__name__}, is {value!r}", None


def _check_instruction(name: str, kwargs: Mapping[str, Any], prompt: str, index: int) -> Iterator[Wrong]:
    """Whether there is such a checker, and it can be built with these arguments and judge the probes."""
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    if name not in INSTRUCTION_DICT:
        near = difflib.get_close_matches(name, INSTRUCTION_DICT, n=1, cutoff=0.4)
        fix = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(INSTRUCTION_DICT))}"
        yield f"instruction_id_list[{index}]", f"unknown instruction {name!r}", fix
    elif wrong := _check_arguments(kwargs):
        for argument, text in wrong:
            yield f"kwargs[{index}].{argument}", text, None
    elif error := _try_checker(INSTRUCTION_DICT[name], name, prompt, kwargs):
        yield f"kwargs[{index}]", f"{name} refuses {json.dumps(kwargs, ensure_ascii=False)}: {error}", None


def _check_arguments(kwargs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Arguments of the wrong type or no regular expression, as (name, what is wrong); null counts as absent."""
    wrong = []
    for name, value in kwargs.items():
        if value is None:
            continue
        if name in _INTEGERS:
            if isinstance(value, bool) or not isinstance(value, int | float) or not _is_whole(value):
                wrong.append((name, f"must be a whole number, is {value!r}"))
            continue
        members = value if name in _LISTS else [value]
        if not isinstance(members, list) or not all(isinstance(member, str) for member in members):
            wrong.append((name, f"must be {'a list of texts' if name in _LISTS else 'a text'}, is {value!r}"))
        elif name in _LISTS or name in _PATTERNS:
            for member in members:
                try:
                    re.compile(member)
                except re.error as error:
                    wrong.append((name, f"{member!r} is not a regular expression (lm-eval uses it as one): {error}"))
    return wrong


def _is_whole(value: float) -> bool:
    return abs(value) <= _MAX_INTEGER and value == int(value)


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


def _is_drawn(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether two builds with different random states differ: then an argument is missing or outside what is accepted."""
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    instruction, state = INSTRUCTION_DICT[name](name), random.getstate()
    seen = set()
    try:
        for seed in range(8):
            random.seed(seed)
            instruction.build_description(**{key: value for key, value in kwargs.items() if value})
            seen.add(json.dumps(instruction.get_instruction_args(), sort_keys=True))
    finally:
        random.setstate(state)
    return len(seen) > 1


def hash_landmark(row: Mapping[str, Any]) -> str:
    """A short digest of a prompt's text."""
    return hashlib.sha256(str(row["prompt"]).encode()).hexdigest()[:16]


def recognise_benchmark(rows: list[dict[str, Any]]) -> bool:
    """Whether the rows are google/IFEval's: 541 prompts, 834 instructions of 25 kinds, most landmarks word for word.

    Digests of single prompts and not of the file: copies differ in line ends, order and null arguments, and the authors
    have fixed the wording of some prompts since.
    """
    kinds = [kind for row in rows for kind in row["instruction_id_list"]]
    found = sum(LANDMARKS.get(row["key"]) == hash_landmark(row) for row in rows)
    return (
        len(rows) == BENCHMARK_PROMPTS
        and len(kinds) == BENCHMARK_INSTRUCTIONS
        and len(set(kinds)) == KINDS
        and found > len(LANDMARKS) // 2
    )
