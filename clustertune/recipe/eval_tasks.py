"""``eval/NAME/task.yaml``: what is known of a task without lm-eval. A task that has no such folder is lm-eval's alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from clustertune.errors import UserError
from clustertune.recipe.findings import Found, read_model
from clustertune.recipe.layers import read_yaml
from clustertune.recipe.library_facts import facts
from clustertune.recipe.sections import FIRST_TASK, NAME, MetricName, Positive, Section, TaskName
from clustertune.tree import ROOT

FOLDER = ROOT / "eval"
"""What an operator edits: one folder a task."""
FILE = "task.yaml"

Name = Annotated[str, Field(pattern=rf"^{NAME}$")]


class Decoding(Section):
    """Greedy, so that the same model gives the same answers, and an interrupted evaluation continues with the ones it has."""

    until: list[str]
    """Stop strings beside the model's end of turn."""
    do_sample: Literal[False]
    temperature: Annotated[float, Field(ge=0, le=0)]
    max_gen_toks: Positive
    """Tokens of an answer at most, where the recipe does not say."""


class Seeds(Section):
    """lm-eval's own defaults, so that ``lm_eval run`` by hand gives the same scores."""

    python: int = 0
    numpy: int = 1234
    torch: int = 1234


class PinnedRows(Section):
    """A file of a data set on the Hub."""

    name: Annotated[str, Field(pattern=rf"^{NAME}/{NAME}$")]
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    file: Name


class ShippedRows(Section):
    """A file of this folder, and what its rows are called in a result."""

    name: Name
    file: Name


class TaskFile(Section):
    """``task.yaml``."""

    task: TaskName
    """lm-eval's name of the task; the folder's too."""
    title: str
    """What people call it."""
    metrics: Annotated[tuple[MetricName, ...], Field(min_length=1)]
    """lm-eval's names, the headline first; of scorers with filters ``METRIC,FILTER``."""
    documents: Positive
    """Of the whole benchmark, by which time is estimated."""
    generation_kwargs: Decoding
    seeds: Seeds = Seeds()
    include: Annotated[str, Field(pattern=rf"^({NAME}/)*{NAME}$")] = ""
    """lm-eval's definition of the task: a file of this folder, or below ``lm_eval/tasks``. Needed for ``fallback``."""
    version: float | None = None
    """lm-eval's version of that definition; another one is refused. Scores of two versions are not comparable."""
    columns: tuple[str, ...] = ()
    """What every row has."""
    hub: PinnedRows | None = None
    """The benchmark, where the Hub or its cache has it."""
    fallback: ShippedRows | None = None
    """What is scored where neither a file is given nor the benchmark can be had; None: lm-eval reads the task's data set."""

    @property
    def folder(self) -> Path:
        """Where the file lies, with all that belongs to the task."""
        return FOLDER / self.task


def find_task(name: str) -> TaskFile | None:
    """What is known of a task; None where it has no folder. Raises UserError for a file with mistakes."""
    path = FOLDER / name / FILE
    return read_task_file(path) if re.fullmatch(NAME, name) and path.is_file() else None


def with_rows(names: Iterable[str]) -> dict[str, TaskFile]:
    """Those of ``names`` whose rows are read and checked here and not by lm-eval."""
    return {name: task for name in names if (task := find_task(name)) and task.fallback}


def reader_of(names: Iterable[str], data: Path, key: str) -> TaskFile:
    """The one task that a file of rows is for. Raises UserError where there is none, or more than one."""
    tasks = with_rows(names)
    if len(tasks) != 1:
        text = f"is for one task with rows of its own; of the tasks here these have some: {', '.join(tasks) or 'none'}"
        raise UserError(text, file=str(data), key=key)
    return next(iter(tasks.values()))


def first_task() -> TaskFile:
    """The task by which those without a folder are estimated."""
    task = find_task(FIRST_TASK)
    assert task is not None
    return task


def unknown_tasks(names: Iterable[str]) -> dict[str, list[str]]:
    """Those of ``names`` that neither ``eval/`` nor the pinned lm-eval knows as task, group or tag, with lm-eval's names.

    Its own index takes 6 s to build. Empty where another lm-eval is installed: nothing can be said.
    """
    unknown = set(names) - set(with_rows(names))
    if not unknown or (find_spec("lm_eval") and version("lm_eval") != facts("lm_eval")["lm_eval"]):
        return {}
    known = facts("lm_eval")["tasks"].split()
    return dict.fromkeys(sorted(unknown - set(known)), known)


@cache
def read_task_file(path: Path) -> TaskFile:
    """One file. Raises UserError with every problem in it."""

    def check(task: TaskFile) -> Iterator[Found]:
        if task.task != path.parent.name:
            yield ("task",), f"{task.task}, its folder is {path.parent.name}", "give both one name"
        if task.fallback is not None and not task.include:
            yield ("include",), "missing: rows need a task that scores them", "name lm-eval's file, or one beside this"
        if task.fallback is not None and not task.columns:
            yield ("columns",), "missing", "name what every row has"
        if task.fallback is None and task.hub is not None:
            yield ("fallback",), "missing", "name the rows to score where the Hub cannot be asked"

    return read_model(TaskFile, read_yaml(path, str(path)), check)
