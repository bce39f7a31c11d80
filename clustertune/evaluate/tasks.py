"""lm-eval's tasks by their own names: found, and loaded from data sets on this machine without asking the network.

And what tasks of ``eval/`` need beside lm-eval's own: checked rows, decoding laid over lm-eval's task, a sentence splitter.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from clustertune.data import rewards
from clustertune.data.prompts import OwnPrompts
from clustertune.data.rows import BadRow, RowLocation, read_file
from clustertune.data.sources import snapshot
from clustertune.data.tokenizer import BoundedTokenizer
from clustertune.errors import Problem, UserError, raise_if
from clustertune.manifest import hash_file, open_to_read, require_whole, write_durably
from clustertune.recipe import eval_tasks
from clustertune.recipe.eval_tasks import PinnedRows, Seeds, TaskFile, with_rows
from clustertune.recipe.layers import did_you_mean
from clustertune.recipe.sections import OWN_PROMPTS, Eval
from clustertune.replaced import replaced

KINDS = ("generate_until", "loglikelihood", "loglikelihood_rolling", "multiple_choice")
"""lm-eval's output types that a language model answers."""
KEY = "eval.tasks"


@functools.cache
def _manager(*, whole: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=whole)


def manager(names: Sequence[str]) -> Any:
    """lm-eval's ``TaskManager`` that knows ``names``. Raises UserError with every unknown one, and the nearest known."""
    if not names:
        return _manager(whole=False)
    task_manager = _manager(whole=True)  # the index of its 14,683 names takes 6 s
    unknown = [name for name in names if name not in task_manager.task_index]
    problems = [
        Problem(f"lm-eval has no task {name!r}", key=KEY, fix=did_you_mean(name, task_manager.all_tasks)) for name in unknown
    ]
    raise_if(problems)
    return task_manager


def data_sets(names: Sequence[str]) -> dict[str, str]:
    """The Hub's data set of each task, by task; groups and tags give those of their members. Rows that are read
    here are staged apart."""
    from lm_eval.tasks._index import Kind
    from lm_eval.tasks._yaml_loader import load_yaml

    names = [name for name in names if name not in with_rows(names)]
    index = manager(names).task_index if names else {}
    sets: dict[str, str] = {}
    waiting: list[Any] = list(names)
    while waiting:
        item = waiting.pop()
        name = item if isinstance(item, str) else item.get("task", item.get("group"))
        if isinstance(name, list):  # a group within a group
            waiting += name
            continue
        if name not in index or name in sets:
            continue
        entry = index[name]
        if entry.kind is Kind.TAG:  # of a task, ``tags`` are those that it belongs to
            waiting += sorted(entry.tags)
            continue
        body = load_yaml(entry.yaml_path, resolve_func=False) if entry.yaml_path else dict(entry.cfg or {})
        if isinstance(body.get("task"), list):
            waiting += body["task"]
        elif isinstance(path := body.get("dataset_path"), str) and "/" in path:
            sets[name] = path
    return sets


@contextlib.contextmanager
def local_data_sets() -> Iterator[dict[str, str]]:
    """Within: ``datasets.load_dataset`` of a Hub's data set reads its folder in the Hub's cache, where it is there.

    Offline, ``load_dataset`` of a name finds only what an earlier ``load_dataset`` has converted on this machine (datasets
    5.2.0); the files themselves are enough. Yields where each data set came from. A data set that is not available raises
    UserError; no code of a data set is run.
    """
    import datasets

    original, places = datasets.load_dataset, {}

    def load(path: str, name: str | None = None, **kwargs: Any) -> Any:
        kwargs.pop("trust_remote_code", None)
        folder = snapshot(path) if path.count("/") == 1 and not Path(path).exists() else None
        places[path] = folder.name if folder else "the network, or what datasets has kept"
        try:
            return original(str(folder) if folder else path, name, **kwargs)
        # datasets raises everything from OSError to its builders' own errors.
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            fix = f"hf download {path} --repo-type dataset on a machine with a network, or clustertune stage RECIPE --to DIR"
            raise UserError(f"the data set {path} is not available: {text}", key=KEY, fix=fix) from error

    with replaced(datasets, load_dataset=load):
        yield places


def load(
    names: Sequence[str], own: Mapping[str, Path], settings: Eval, prompts: OwnPrompts | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """lm-eval's tasks, set as ``settings`` say, as its ``evaluate`` takes them; and where their data sets came from.

    ``own``: task files that replace lm-eval's own of the same name. ``prompts``: one's own, a task more. Raises UserError.
    """
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}}
    places: dict[str, str] = {}
    if names:
        tasks = manager([name for name in names if name not in own])
        with local_data_sets() as places:
            loaded = tasks.load([str(own.get(name, name)) for name in names])
    if prompts is not None:
        from clustertune.evaluate.own_prompts import OwnTask

        loaded["tasks"][OWN_PROMPTS] = OwnTask(prompts)
    problems = []
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            problems.append(Problem(f"{name} runs code that the model writes, which is never done here", key=KEY))
        if getattr(task, "MULTIMODAL", False) or task.OUTPUT_TYPE not in KINDS:
            problems.append(Problem(f"{name} is not a task for a language model", key=KEY))
        # As lm-eval's simple_evaluate: a task that says 0 keeps it.
        shots_of_task = task.get_config("num_fewshot")
        shots = settings.num_fewshot if settings.num_fewshot is not None and shots_of_task != 0 else shots_of_task or 0
        task.set_config(key="num_fewshot", value=shots)
        if settings.max_gen_toks is not None and task.OUTPUT_TYPE == "generate_until":
            task.set_config(key="generation_kwargs", value={"max_gen_toks": settings.max_gen_toks}, update=True)
    raise_if(problems)
    return loaded, places


def digest(loaded: Mapping[str, Any], settings: Eval, seed: int, tokenizing: BoundedTokenizer) -> str:
    """SHA-256 of all requests: documents, few-shot examples, instructions and template. Sets the few-shot seed again.

    Each prompt is rendered and tokenised once, within the limits of ``tokenizing``: lm-eval does both again, beside the loaded
    weights and without limits. Raises UserError where one goes beyond them, or the chat template refuses it.
    """
    rendered = functools.partial(render, tokenizing, settings) if settings.apply_chat_template else None
    total, texts = hashlib.sha256(), dict[str, None]()
    for name, task in sorted(loaded["tasks"].items()):
        task.set_fewshot_seed(seed=seed)
        task.build_all_requests(
            limit=settings.limit,
            rank=0,
            world_size=1,
            apply_chat_template=rendered is not None,
            fewshot_as_multiturn=rendered is not None,
            chat_template=rendered,
            tokenizer_name="",
        )
        for request in task.instances:
            line = [name, request.doc_id, request.idx, request.request_type, request.args]
            total.update(json.dumps(line, default=str).encode() + b"\n")
            texts |= dict.fromkeys(arg for arg in request.args if isinstance(arg, str))
        task.set_fewshot_seed(seed=seed)
    some, size = list[str](), 0
    for text in texts:
        some.append(text)
        if (size := size + len(text)) > _TOKENIZED_AT_ONCE:
            tokenizing.tokenize(some)
            some, size = [], 0
    if some:
        tokenizing.tokenize(some)
    return total.hexdigest()


_TOKENIZED_AT_ONCE = 1 << 20
"""Characters: a second or two of the limit for a call, on a slow machine."""


def render(
    tokenizing: BoundedTokenizer, settings: Eval, messages: list[dict[str, str]], add_generation_prompt: bool = True
) -> str:
    """A conversation as the template has it, as lm-eval's ``HFLM.apply_chat_template`` makes it."""
    more = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
    try:
        return tokenizing.render(messages, **more, **settings.chat_template_kwargs)
    except ValueError as error:
        fix = "eval.apply_chat_template=false, or eval.num_fewshot=0 where it takes no second question"
        raise UserError(f"the chat template refuses a prompt: {error}", key=KEY, fix=fix) from None


# --- tasks of eval/ ---------------------------------------------------------------------------------------------------

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
        columns = frozenset(task.columns)
        for at, row in read_file(lambda: open_to_read(path), RowLocation(path.name, 0), str(path), columns):
            if isinstance(row, BadRow):
                faults: list[Wrong] = [(None, f"{row.reason}: {row.detail}", None)]
            else:
                faults = list(self._check_columns(row)) or list(self.check(row))
                self.rows.append(row)
            problems += [Problem(text, f"{path}:{at.line}", key, fix) for key, text, fix in faults]
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
        limits = {"max_gen_toks": settings.max_gen_toks} if settings.max_gen_toks else {}
        body = {
            "include": str(locate_upstream(self.task)),
            "task": self.task.task,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"train": str(rows.absolute())}},
            "generation_kwargs": {**self.task.generation_kwargs.model_dump(), **limits},
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
        described = dict(result)
        for name, rows in self.rows.items():
            described |= rows.describe(described, [sample for sample in samples if sample["task"] == name])
        return described


def read_inputs(names: Sequence[str], data: Path | None, benchmark: bool) -> Inputs:
    """What the tasks ``names`` need; ``data``: a file of rows for the one task that reads some, None: see
    :func:`choose_source`. Raises UserError.
    """
    rewards.use_shipped_punkt()
    reading = eval_tasks.with_rows(names)
    if data is not None:
        eval_tasks.reader_of(names, data, "--data")
    for task in reading.values():
        check_version(task)
    rows = {name: read_rows(task, *choose_source(task, data, benchmark=benchmark)) for name, task in reading.items()}
    return Inputs(rows, next((task_file.seeds for name in names if (task_file := eval_tasks.find_task(name))), Seeds()))
