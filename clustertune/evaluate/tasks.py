"""lm-eval's tasks by their own names: found, and loaded from data sets on this machine without asking the network."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clustertune.data.prompts import OwnPrompts
from clustertune.data.sources import snapshot
from clustertune.data.tokenizer import BoundedTokenizer
from clustertune.errors import Problem, UserError, raise_if
from clustertune.recipe.eval_tasks import with_rows
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
    found = _manager(whole=True)  # the index of its 14,683 names takes 6 s
    unknown = [name for name in names if name not in found.task_index]
    problems = [Problem(f"lm-eval has no task {name!r}", key=KEY, fix=did_you_mean(name, found.all_tasks)) for name in unknown]
    raise_if(problems)
    return found


def data_sets(names: Sequence[str]) -> dict[str, str]:
    """The Hub's data set of each task, by task; groups and tags give those of their members. Rows that are read
    here are staged apart."""
    from lm_eval.tasks._index import Kind
    from lm_eval.tasks._yaml_loader import load_yaml

    names = [name for name in names if name not in with_rows(names)]
    index = manager(names).task_index if names else {}
    found: dict[str, str] = {}
    waiting: list[Any] = list(names)
    while waiting:
        item = waiting.pop()
        name = item if isinstance(item, str) else item.get("task", item.get("group"))
        if isinstance(name, list):  # a group within a group
            waiting += name
            continue
        if name not in index or name in found:
            continue
        entry = index[name]
        if entry.kind is Kind.TAG:  # of a task, ``tags`` are those that it belongs to
            waiting += sorted(entry.tags)
            continue
        body = load_yaml(entry.yaml_path, resolve_func=False) if entry.yaml_path else dict(entry.cfg or {})
        if isinstance(body.get("task"), list):
            waiting += body["task"]
        elif isinstance(path := body.get("dataset_path"), str) and "/" in path:
            found[name] = path
    return found


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
    render = functools.partial(_render, tokenizing) if settings.apply_chat_template else None
    total, texts = hashlib.sha256(), dict[str, None]()
    for name, task in sorted(loaded["tasks"].items()):
        task.set_fewshot_seed(seed=seed)
        task.build_all_requests(
            limit=settings.limit,
            rank=0,
            world_size=1,
            apply_chat_template=render is not None,
            fewshot_as_multiturn=render is not None,
            chat_template=render,
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


def _render(tokenizing: BoundedTokenizer, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """A conversation as the template has it, as lm-eval's ``HFLM.apply_chat_template`` makes it."""
    more = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
    try:
        return tokenizing.render(messages, **more)
    except ValueError as error:
        fix = "eval.apply_chat_template=false, or eval.num_fewshot=0 where it takes no second question"
        raise UserError(f"the chat template refuses a prompt: {error}", key=KEY, fix=fix) from None
