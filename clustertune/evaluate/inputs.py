"""What tasks of ``eval/`` need beside lm-eval's own: checked rows, decoding laid over lm-eval's task, a sentence splitter."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from clustertune.data import answer_rules
from clustertune.data.rows import BadRow, RowLocation, read_file
from clustertune.errors import Problem, UserError, raise_if
from clustertune.manifest import hash_file, require_whole, write_durably
from clustertune.recipe import eval_tasks
from clustertune.recipe.eval_tasks import PinnedRows, Seeds, TaskFile
from clustertune.recipe.sections import Eval

Wrong = tuple[str | None, str, str | None]
"""Something wrong in a row: the column, or a place within it; what; and what to do. The file and the line are added."""


class TaskRows:
    """The rows of one task, read and checked before a model is loaded: lm-eval scores after all generation, so that a bad row
    would cost the run. A task that needs more checks has a class of its own in :mod:`clustertune.evaluate.own`."""

    def __init__(self, task: TaskFile, path: Path, called: str) -> None:
        """``called``: what the file is called in a result. Raises UserError with every bad line (``file:line``)."""
        self.task, self.file, self.called = task, path, called
        require_whole(path.parent, only=[path.name])
        self.rows: list[dict[str, Any]] = []
        problems: list[Problem] = []
        wanted = frozenset(task.columns)
        for at, row in read_file(lambda: path.open("rb"), RowLocation(path.name, 0), str(path), wanted):
            if isinstance(row, BadRow):
                found: list[Wrong] = [(None, f"{row.reason}: {row.detail}", None)]
            else:
                found = list(self._check_columns(row)) or list(self.check(row))
                self.rows.append(row)
            problems += [Problem(text, f"{path}:{at.line}", key, fix) for key, text, fix in found]
        if not self.rows and not problems:
            problems.append(Problem("contains no rows", file=str(path), fix=f"give a JSON Lines file of {task.title} rows"))
        raise_if(problems)
        self.sha256 = hash_file(path).sha256
        """Of the file as it was given."""

    def _check_columns(self, row: Mapping[str, Any]) -> Iterator[Wrong]:
        """Columns that are missing, and what lm-eval cannot read."""
        for name in self.task.columns:
            if name not in row:
                yield name, "missing", f"a row has {', '.join(self.task.columns)}"
        try:
            json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            yield None, "holds half of a surrogate pair (\\ud800 to \\udfff)", None
        except (ValueError, RecursionError) as error:  # NaN and infinity; thousands of levels
            yield None, f"not JSON: {error}", None

    def check(self, row: Mapping[str, Any]) -> Iterable[Wrong]:  # noqa: ARG002
        """What is wrong with a row that has every column."""
        return ()

    def plain(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What of a row counts, in one type each: lm-eval reads rows through Arrow, which refuses a column of two types."""
        return {name: row[name] for name in self.task.columns}

    def to_jsonl(self) -> str:
        """The rows as lm-eval reads them."""
        return "".join(json.dumps(self.plain(row), ensure_ascii=False) + "\n" for row in self.rows)

    @property
    def is_benchmark(self) -> bool:
        """The rows are the whole benchmark's."""
        return self.task.hub is not None and self.called == self.task.hub.name

    @property
    def name(self) -> str:
        """Of the data: the benchmark's where the rows are the benchmark's."""
        return self.task.hub.name if self.task.hub and self.is_benchmark else self.called

    def write_task(self, settings: Eval, folder: Path) -> Path:
        """The task file in ``folder``, which replaces lm-eval's own, and the rows that it reads beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        file, rows = folder / f"{self.task.task}.yaml", folder / f"{self.task.task}.jsonl"
        write_durably(rows, self.to_jsonl())
        given = {"max_gen_toks": settings.max_gen_toks} if settings.max_gen_toks else {}
        body = {
            "include": str(locate_upstream(self.task)),
            "task": self.task.task,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"train": str(rows.resolve())}},
            "generation_kwargs": {**self.task.generation_kwargs.model_dump(), **given},
        }
        file.write_text(yaml.safe_dump(body, sort_keys=False))
        return file

    def find_difference(self, documents: Sequence[Mapping[str, Any]]) -> Problem | None:
        """Whether what lm-eval read through Arrow says the same as the file; None where it does.

        Arrow guesses: a column of texts that all look like dates becomes a column of dates.
        """
        if len(documents) != len(self.rows):
            return Problem(f"lm-eval reads {len(documents)} rows of {len(self.rows)}", file=str(self.file))
        for number, (row, document) in enumerate(zip(self.rows, documents, strict=True), start=1):
            if self.plain(row) != (read := self.plain(document)):
                fix = "write its values so that they do not look like dates"
                return Problem(f"lm-eval reads row {number} as {read!r}", file=str(self.file), fix=fix)
        return None

    def dataset(self, count: int) -> dict[str, Any]:
        """What a result says of the data; ``count`` rows were asked."""
        return {
            "name": self.name,
            "file": str(self.file),
            "sha256": self.sha256,
            "prompts": count,
            "rows": len(self.rows),
            "limited": count < len(self.rows),
            "is_benchmark": self.is_benchmark and count == len(self.rows),
        }

    def describe(self, result: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:  # noqa: ARG002
        """What a result says at its top level about the task, whose samples these are: a note where it is not the benchmark."""
        data = result["details"][self.task.task]["dataset"]
        if data["is_benchmark"]:
            return {}
        why = f"the first {data['prompts']} of its {data['rows']} prompts" if data["limited"] else "other prompts"
        text = f"Not the {self.task.title} benchmark ({why}): these numbers compare with nothing published."
        return {"notes": [*result["notes"], text]}


def read_rows(task: TaskFile, path: Path, called: str) -> TaskRows:
    """The rows of a file by the task's own class, where it has one. Raises UserError."""
    module = f"clustertune.evaluate.own.{task.task}"
    own = task.task.isidentifier() and importlib.util.find_spec(module)
    return (importlib.import_module(module).OwnRows if own else TaskRows)(task, path, called)


def locate_upstream(task: TaskFile) -> Path:
    """The definition of a task: a file of its folder, else lm-eval's own."""
    import lm_eval

    beside = task.folder / task.include
    return beside if beside.is_file() else Path(lm_eval.__file__).parent / "tasks" / task.include


def check_version(task: TaskFile) -> None:
    """Raises UserError where the definition is missing, or has another version than the one that ``task.yaml`` is for."""
    from lm_eval.tasks._yaml_loader import load_yaml

    path, file = locate_upstream(task), str(task.folder / eval_tasks.FILE)
    if not path.is_file():
        raise UserError(f"{task.include} is neither in this folder nor below lm_eval/tasks", file=file, key="include")
    installed = load_yaml(path, resolve_func=False).get("metadata", {}).get("version")
    if task.version is not None and installed != task.version:
        text = f"{task.version}, the installed lm-eval has version {installed} of {task.task}"
        fix = "scores of two versions are not comparable: score the reference again, then change the line"
        raise UserError(text, file=file, key="version", fix=fix)


def choose_source(task: TaskFile, data: Path | None, *, benchmark: bool = True) -> tuple[Path, str]:
    """The rows that are scored, and their name: the given file; else the benchmark (where wanted) from the Hub's cache or the
    Hub; else the project's own."""
    if data is not None:
        return data, data.name
    if benchmark and task.hub is not None and (cached := fetch_benchmark(task.hub)) is not None:
        return cached, task.hub.name
    assert task.fallback is not None
    return task.folder / task.fallback.file, task.fallback.name


def fetch_benchmark(hub: PinnedRows) -> Path | None:
    """The benchmark's file: cached, or downloaded where the Hub answers within 5 s; None where it is not available."""
    import huggingface_hub
    from huggingface_hub import constants

    cached = huggingface_hub.try_to_load_from_cache(hub.name, hub.file, revision=hub.revision, repo_type="dataset")
    if isinstance(cached, str):
        return Path(cached)
    if constants.HF_HUB_OFFLINE or os.environ.get("HF_DATASETS_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return None
    url = huggingface_hub.hf_hub_url(hub.name, hub.file, repo_type="dataset", revision=hub.revision)
    try:
        # hf_hub_download alone retries for 24 s where no name server answers (huggingface_hub 2.4.0).
        huggingface_hub.get_hf_file_metadata(url, timeout=5)
        return Path(huggingface_hub.hf_hub_download(hub.name, hub.file, repo_type="dataset", revision=hub.revision))
    # Name resolution, proxy, TLS, HTTP status: the classes come from the HTTP library of the day, and none stops the run.
    except Exception:
        return None


@dataclass
class Inputs:
    """What the tasks of one evaluation need, found and checked."""

    rows: dict[str, TaskRows]
    """Of the tasks whose rows are read here."""
    seeds: Seeds

    def write_tasks(self, settings: Eval, folder: Path) -> dict[str, Path]:
        """Task files that replace lm-eval's own of the same name, with their rows."""
        return {name: rows.write_task(settings, folder) for name, rows in self.rows.items()}

    def find_differences(self, loaded: Mapping[str, Any]) -> list[Problem]:
        """Where lm-eval has read rows otherwise than they stand in their file."""
        read = [rows.find_difference(list(loaded[name].eval_docs)) for name, rows in self.rows.items()]
        return [difference for difference in read if difference]

    def describe(self, result: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What a result says about these tasks at its top level."""
        found = dict(result)
        for name, rows in self.rows.items():
            found |= rows.describe(found, [sample for sample in samples if sample["task"] == name])
        return found


def read_inputs(names: Sequence[str], data: Path | None, benchmark: bool) -> Inputs:
    """What the tasks ``names`` need; ``data``: a file of rows for the one task that reads some, None: see
    :func:`choose_source`. Raises UserError.
    """
    answer_rules.use_shipped_punkt()
    reading = eval_tasks.with_rows(names)
    if data is not None:
        eval_tasks.reader_of(names, data, "--data")
    for task in reading.values():
        check_version(task)
    rows = {name: read_rows(task, *choose_source(task, data, benchmark=benchmark)) for name, task in reading.items()}
    return Inputs(rows, next((found.seeds for name in names if (found := eval_tasks.find_task(name))), Seeds()))
