"""Score a model with lm-eval: everything that can fail is tried before the weights are loaded."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from clustertune import console, manifest
from clustertune.console import duration
from clustertune.data import rendering
from clustertune.data.prompts import OwnPrompts, read_prompts
from clustertune.errors import ExitCode, Problem, UserError, collect_problems, raise_if, storage_error
from clustertune.evaluate import servers, tasks
from clustertune.evaluate.answers import AnswerLog, RecordedLM, hold
from clustertune.evaluate.model import (
    ROOM,
    Backend,
    ModelFacts,
    check_adapter,
    check_answers,
    check_device,
    check_model,
    pick_device,
    refused,
    settings_of,
    trained_on,
    weight_bytes,
)
from clustertune.evaluate.scores import METHOD, RESULT, clustered_stderr, compare, judge, read_result
from clustertune.evaluate.scoring import BoundedScoring
from clustertune.evaluate.thoughts import Thoughts, find
from clustertune.manifest import read_whole
from clustertune.recipe.eval_tasks import Seeds
from clustertune.recipe.sections import OWN_PROMPTS, Eval
from clustertune.replaced import replaced
from clustertune.resolve.resolved import EVAL_DATA
from clustertune.training.base_weights import check_tensors, reported, say_unproved

KIND = "evaluation"
SAMPLES, TASK = "samples.jsonl", "task"
ANSWERS = "answers.jsonl"
"""Of an evaluation with one's own prompts: a line for each, with the answers of base and tuned."""
_DAY = ".day.tmp"
"""Of an evaluation under way whose template reads the clock: the day that it prints."""
_OURS = {RESULT, SAMPLES, ANSWERS, TASK, manifest.MANIFEST}
_PACKAGES = ("lm_eval", "torch", "transformers", "datasets", "nltk", "langdetect")


def evaluate(
    model: Path,
    out: Path,
    *,
    settings: Eval,
    data: Path | None = None,
    prompts: Path | None = None,
    benchmark: bool = True,
    device: str | None = None,
    adapter: Path | None = None,
    base: Path | None = None,
    base_out: Path | None = None,
    tokenizer: Path | None = None,
    source_label: str | None = None,
    progress_file: Path | None = None,
) -> dict[str, Any]:
    """Score ``model`` and write ``out`` (result, samples, manifest): whole, or without a manifest.

    ``data`` is a JSON Lines file of rows for the task that reads some; without it the benchmark is taken where it can be had
    (unless ``benchmark`` is false), else the project's own rows, and the result says which. ``prompts``: the file that
    ``settings.data`` names, of one's own prompts. ``device``: ``cpu``, ``cuda``,
    ``cuda:N``, ``auto`` (spread over all GPUs), or None (the first GPU where the weights fit, else as ``auto``).
    ``adapter``: a LoRA adapter that is applied to ``model`` without merging. ``base``: a model that is asked the same, with
    ``model``'s tokenizer and template, and compared; its own result lies in ``base_out`` and is used again.
    ``source_label`` is what to call the model in the result. ``progress_file``: where to write now and then which model
    answers and how far it has come, as :func:`progress` has it.

    The weights' type is the one in the model's configuration (lm-eval's ``dtype=auto``). An interrupted evaluation continues
    with the answers that are on disk; a finished one of the same identity is returned as it is, judged
    by the pass marks of ``settings``. The verdict is in ``pass``; :func:`clustertune.evaluate.scores.require_pass` raises on
    it. Raises UserError with everything wrong at once, before the weights are loaded.
    """
    started = time.monotonic()
    day = _day(out, base_out)
    if tokenizer is None:  # an adapter that brings a tokenizer was trained with its template
        tokenizer = adapter if adapter is not None and (adapter / "tokenizer_config.json").is_file() else model
    other = None
    if base is not None:
        assert base_out is not None
        if adapter is None and base.resolve() == model.resolve():
            fix = "name the model that it was trained from, or --adapter DIR"
            raise UserError("is the model that is scored", file=str(base), key="--base", fix=fix)
        _check_out(out)
        plain = settings.model_copy(update={"pass_mark": {}, "pass_difference": {}, "base": False})
        # Problems of the tuned model are reported before the base is scored.
        with _prepared(model, adapter, settings, tokenizer, data, prompts, benchmark, device, day):
            pass
        evaluate(
            base,
            base_out,
            settings=plain,
            data=data,
            prompts=prompts,
            benchmark=benchmark,
            device=device,
            tokenizer=tokenizer,
            progress_file=progress_file,
        )
        other = base_out
    _check_out(out)
    try:
        with _prepared(model, adapter, settings, tokenizer, data, prompts, benchmark, device, day) as run:
            run.label, run.base, run.progress_file = source_label or str(model), other, progress_file
            out.mkdir(parents=True, exist_ok=True)
            with hold(out):
                if (out / manifest.MANIFEST).exists():
                    return _read_finished(out, run.identity(), settings)
                return run.execute(out, started)
    except OSError as error:
        if error.errno is None:  # transformers says so that it cannot read a model
            raise UserError(str(error), file=str(model)) from error
        raise storage_error(error, "the evaluation", Path(error.filename or out)) from error


@contextlib.contextmanager
def _prepared(
    model: Path,
    adapter: Path | None,
    settings: Eval,
    tokenizer: Path,
    data: Path | None,
    prompts: Path | None,
    benchmark: bool,
    device: str | None,
    day: str,
) -> Iterator[_Evaluation]:
    """One evaluation, its inputs checked and its tasks loaded; what is refused leaves nothing behind."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(quiet())
        facts, problems = check_model(model, settings.max_gen_toks, tokenizer, chat=settings.apply_chat_template, day=day)
        problems += check_device(device)
        if adapter is not None:
            problems += check_adapter(model, adapter)
        asked: OwnPrompts | None = None
        with collect_problems(problems):
            asked = read_prompts(prompts, EVAL_DATA) if prompts is not None else None
        with collect_problems(problems):
            own = tasks.read_inputs(settings.tasks, data, benchmark)
            loaded, places = tasks.load(settings.tasks, own.write_tasks(settings, scratch / TASK), settings, asked)
            problems += _check_marks(loaded, settings)
            problems += own.find_differences(loaded["tasks"])
        raise_if(problems)
        assert facts is not None
        name, why = choose(settings.backend, facts, device)
        _seed(own.seeds)
        with facts.within_limits() as tokenizing:
            digest = tasks.digest(loaded, settings, own.seeds.numpy, tokenizing)
        control = _control_tokens(facts.tokenizer, asked, own)
        for text in control:
            console.say(f"warning: {text}")
        thoughts = Thoughts(find(settings, facts.tokenizer), facts.tokenizer)
        if (mine := loaded["tasks"].get(OWN_PROMPTS)) is not None:
            stack.callback(mine.close)
            raise_if(mine.find_problems(facts.max_length, facts.tokenizer.encode))
        run = _Evaluation(settings, facts, adapter, describe(name, facts, adapter), loaded, places, digest, own, thoughts, why)
        run.control = control
        run.device = pick_device(device, model)
        yield run


def _control_tokens(tokenizer: Any, asked: OwnPrompts | None, own: tasks.Inputs) -> list[str]:
    """Where texts of one's own rows hold what the tokenizer takes for a control token, a sentence for each file."""
    from clustertune.data.tokens import Encoder  # numpy: a command without the stack names the package to install

    files: dict[str, list[tuple[int, list[dict[str, Any]]]]] = {}
    if asked is not None:
        answered = ((row, [] if row.answer is None else [{"role": "assistant", "content": row.answer}]) for row in asked.rows)
        files[asked.file.name] = [(row.line, [*row.messages, *answer]) for row, answer in answered]
    for rows in own.rows.values():
        if not rows.is_benchmark:
            texts = ([value for value in row.values() if isinstance(value, str)] for row in rows.rows)
            turns = ([{"role": "user", "content": text} for text in some] for some in texts)
            files[rows.called] = list(enumerate(turns, start=1))
    template = str(tokenizer.get_chat_template()) if tokenizer.chat_template else "{{ messages }}"
    encoder = Encoder(tokenizer, template, answers=False).looked_at()
    sentences = []
    for file, numbered in files.items():
        if found := [(line, count) for line, messages in numbered if (count := encoder.count_control(messages))]:
            total = sum(count for _, count in found)
            text = (
                f"{file}: {total:,} control tokens stand in the texts of {len(found):,} rows, and count as turns, or the end "
            )
            sentences.append(f"{text}of one; the first is {file}:{found[0][0]}")
    return sentences


def _check_marks(loaded: Mapping[str, Any], settings: Eval) -> list[Problem]:
    """Pass marks of tasks and metrics that will not be there."""
    problems = []
    for key in ("pass_mark", "pass_difference"):
        for name, marks in getattr(settings, key).items():
            at = f"eval.{key}.{name}"
            known = {*loaded["tasks"], *loaded.get("groups", {})}
            if name not in known:
                problems.append(
                    Problem("is not a task of this evaluation", key=at, fix=f"one of {', '.join(sorted(known)[:20])}")
                )
            elif name in loaded["tasks"]:
                metrics = {metric for metric, up in loaded["tasks"][name].higher_is_better().items() if up is not False}
                problems += [
                    Problem(f"{name} has no metric {mark!r}", key=at, fix=f"one of {', '.join(sorted(metrics))}")
                    for mark in marks
                    if mark.partition(",")[0] not in metrics
                ]
    return problems


@dataclass
class _Evaluation:
    """One evaluation, its inputs checked."""

    settings: Eval
    facts: ModelFacts
    adapter: Path | None
    backend: Backend
    loaded: dict[str, Any]
    """lm-eval's tasks and groups."""
    places: dict[str, str]
    """Where each data set came from: a commit of the Hub, or a description."""
    prompts: str
    """Digest of all requests."""
    own: tasks.Inputs
    thoughts: Thoughts
    why: str
    """Why this backend."""
    control: list[str] = field(default_factory=list)
    """Sentences on control tokens in the texts of own rows."""
    device: str = "cpu"
    label: str = ""
    base: Path | None = None
    """The finished evaluation of the model to compare with."""
    progress_file: Path | None = None
    members: dict[str, list[str]] = field(default_factory=dict)
    """The tasks of each group."""
    endless: dict[str, list[int]] = field(default_factory=dict)
    """By task, the documents whose answer had no verdict in time."""

    def __post_init__(self) -> None:
        groups = self.loaded.get("groups", {})
        self.asked = self.loaded["tasks"].get(OWN_PROMPTS)
        """The task of one's own prompts; None: there are none."""
        self.members = {name: [task.task_name for task in group.get_all_tasks()] for name, group in groups.items()}

    def identity(self) -> dict[str, Any]:
        """What decides the answers and their scores: two evaluations with the same identity have the same result."""
        base = manifest.read_manifest(self.base, KIND).meta["identity"] if self.base else None
        return {
            "model": self.facts.fingerprint,
            "adapter": self.adapter and manifest.hash_file(self.adapter / "adapter_model.safetensors").sha256,
            "quantization": self.facts.quantization,
            "trained_on": trained_on(self.facts.folder, self.adapter),
            "backend": asdict(self.backend),
            "tasks": {name: task.VERSION for name, task in sorted(self.loaded["tasks"].items())},
            "prompts": self.prompts,
            "data": self.asked and self.asked.prompts.sha256,
            "template": self.facts.template_sha if self.settings.apply_chat_template else None,
            "chat_template_kwargs": self.settings.chat_template_kwargs,
            "think_end_token": self.thoughts.thought.end,
            "limit": self.settings.limit,
            "max_gen_toks": self.settings.max_gen_toks,
            "batch_size": self.settings.batch_size,
            "seeds": self.own.seeds.model_dump(),
            "device": self.device,
            "base": base and hashlib.sha256(json.dumps(base, sort_keys=True).encode()).hexdigest(),
            "versions": {name: version(name) for name in _PACKAGES},
        }

    def execute(self, out: Path, started: float) -> dict[str, Any]:
        """Answer, score, compare, write, seal."""
        if (day := self.facts.header.date) is not None:
            manifest.write_durably(out / _DAY, day)
        self.own.write_tasks(self.settings, out / TASK)
        name = hashlib.sha256(json.dumps({**self.identity(), "base": None}, sort_keys=True).encode()).hexdigest()[:16]
        log = AnswerLog(out / f".answers-{name}.tmp")
        try:
            raw, lm = self._score(log)
            samples = [
                {"task": task, **self._thought(task, sample), **sample}
                for task, rows in raw["samples"].items()
                for sample in sorted(rows, key=lambda row: int(row["doc_id"]))
            ]
            lines = [json.dumps(sample, ensure_ascii=False, default=str) for sample in samples]
            result = self._describe(raw, samples, lm, started)
            if self.base is not None:
                result |= self._compare(result, [json.loads(line) for line in lines], raw["higher_is_better"])
            result["pass"] = judge(result, self.settings)
            if self.asked is not None:
                result |= self._side_by_side(out, [json.loads(line) for line in lines])
            manifest.write_durably(out / SAMPLES, "\n".join(lines) + "\n")
            manifest.write_durably(out / RESULT, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
            manifest.seal(out, KIND, {"identity": self.identity(), "tasks": result["tasks"], "day": day})
        finally:
            log.close()
        for leftover in out.glob(".*.tmp"):
            leftover.unlink()
        return result

    def _thought(self, task: str, sample: Mapping[str, Any]) -> dict[str, Any]:
        """What was taken off the answers of a sample."""
        texts = self.thoughts.texts.get((task, int(sample["doc_id"])), [])
        return {"thoughts": texts} if any(text is not None for text in texts) else {}

    def _score(self, log: AnswerLog) -> tuple[dict[str, Any], RecordedLM]:
        """What ``lm_eval run`` does, without its look at the whole machine (pip, git, Hub) around it."""
        import lm_eval.evaluator

        _seed(self.own.seeds)
        folder, size = self.facts.folder, self.settings.batch_size
        with contextlib.ExitStack() as stack:
            tokenizing = stack.enter_context(self.facts.within_limits())
            with manifest.DigestComparison(folder) as weights:
                opened = model_for(self.backend, self.facts, self.settings, adapter=self.adapter, device=self.device)
                lm = stack.enter_context(opened)
                raise_if(weights.finish())
            total = sum(one.repeats or 1 for task in self.loaded["tasks"].values() for one in task.instances)
            report = stack.enter_context(progress(str(self.adapter or folder), total, self.progress_file))
            stack.enter_context(out_of_memory(folder))
            render = functools.partial(tasks.render, tokenizing, self.settings)
            if self.thoughts.keeps_special:
                _keep_special(lm)
            whole = self.backend.name != "hf"
            wrapped = RecordedLM(lm, log, size, report, whole=whole, thoughts=self.thoughts, render=render)
            if self.asked is not None:
                self.asked.encode = wrapped._encode_pair
            scorers = [stack.enter_context(BoundedScoring(self.loaded["tasks"][name])) for name in self.own.rows]
            raw = lm_eval.evaluator.evaluate(
                lm=wrapped,
                task_dict=self.loaded,
                limit=self.settings.limit,
                apply_chat_template=self.settings.apply_chat_template,
                fewshot_as_multiturn=self.settings.apply_chat_template,
                log_samples=True,
            )
        self.endless = {name: one.endless for name, one in zip(self.own.rows, scorers, strict=True) if one.endless}
        if self.asked is not None:  # lm-eval counts by metric: a row without an answer or a rule has none
            count = len(raw["samples"][OWN_PROMPTS])
            raw["results"][OWN_PROMPTS]["sample_len"] = raw["n-samples"][OWN_PROMPTS]["effective"] = count
        return raw, wrapped

    def _describe(
        self, raw: Mapping[str, Any], samples: list[dict[str, Any]], lm: RecordedLM, started: float
    ) -> dict[str, Any]:
        scores = {name: _plain(row) for name, row in raw["results"].items()}
        for name, row in scores.items():
            for key in [key for key, value in row.items() if "_stderr," in key and value is None]:
                metric, _, kept = key.replace("_stderr,", ",").partition(",")
                of_task = [sample for sample in samples if (sample["task"], sample["filter"]) == (name, kept)]
                mine = [sample[metric] for sample in of_task if metric in sample]
                if mine and all(isinstance(value, list | dict) or name == OWN_PROMPTS for value in mine):
                    row[key] = clustered_stderr(mine)
        details = {name: self._detail(name, raw) for name in scores}
        document: dict[str, Any] = {
            "model": self.label,
            "path": str(self.facts.folder.resolve()),
            "adapter": self.adapter and str(self.adapter.resolve()),
            "quantization": self.facts.quantization,
            "trained_on": trained_on(self.facts.folder, self.adapter),
            "tasks": scores,
            "details": details,
            "backend": asdict(self.backend),
            "backend_chosen": self.why,
            "decoding": {
                "max_gen_toks": self.settings.max_gen_toks,
                "batch_size": self.settings.batch_size,
                "dtype": str(lm.model.dtype).removeprefix("torch.") if self.backend.name == "hf" else self.backend.dtype,
                "device": "auto" if self.device == "auto" or self.backend.name != "hf" else str(lm.device),
                "chat_template": self.settings.apply_chat_template,
                "chat_template_kwargs": {**self.facts.header.arguments, **self.settings.chat_template_kwargs},
                "date": self.facts.header.date,
                "think_end_token": self.thoughts.thought.end or None,
                "seeds": {**self.own.seeds.model_dump(), "langdetect": 0},
            },
            "truncated_prompts": lm.truncated,
            "thoughts": self.thoughts.by_task(),
            "chat_template_sha": self.facts.template_sha if self.settings.apply_chat_template else None,
            "versions": {name: version(name) for name in _PACKAGES},
            "seconds": round(time.monotonic() - started, 3),
            "resumed_prompts": lm.resumed,
            "samples": SAMPLES,
            "notes": [*self._notes(), *(f"{text}." for text in self.control), *self.thoughts.notes()],
        }
        if lm.truncated:
            document["notes"].append(
                f"{lm.truncated} prompts lost their beginning: prompt and answer exceed the model's context."
            )
        for name in self.settings.tasks:
            if name not in self.own.rows and name in details and details[name]["limited"]:
                first = f"the first {scores[name]['n']} documents"
                document["notes"].append(f"Not all of {name} ({first}): these numbers compare with nothing published.")
        for name, rows in self.endless.items():
            numbers = ", ".join(map(str, sorted(set(rows))[:20])) + (", ..." if len(set(rows)) > 20 else "")
            document["notes"].append(f"No verdict in time, scored as an empty answer: {name}, document {numbers} (from 0).")
        if self.asked is not None:
            document["notes"] += self.asked.notes()
        return self.own.describe(document, samples)

    def _side_by_side(self, out: Path, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """The answers to one's own prompts: all of them in a file, the first ones for the report."""
        from clustertune.evaluate import own_prompts

        lines = read_whole(self.base / SAMPLES).decode().splitlines() if self.base else []
        before, after = ([row for row in rows if row["task"] == OWN_PROMPTS] for rows in (map(json.loads, lines), samples))
        answers = own_prompts.side_by_side(self.asked.prompts, after, before)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in answers)
        manifest.write_durably(out / ANSWERS, text)
        return {"answers": {"file": ANSWERS, "count": len(answers), "first": own_prompts.for_report(answers)}}

    def _notes(self) -> list[str]:
        """Which base an adapter was trained on and which it is scored on, where they differ or one is quantised."""
        trained, stored = trained_on(self.facts.folder, self.adapter), self.facts.quantization
        scored = f"scored on {stored or self.facts.dtype} weights"
        if trained == "unknown":
            return [f"It is not known whether the adapter was trained on a quantised base; it is {scored}."]
        if trained is None or (trained == "none" and stored is None):
            return []
        before = "that was not quantised" if trained == "none" else f"in {trained}"
        return [f"The adapter was trained on a base {before}; it is {scored}."]

    def _detail(self, name: str, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Version, few-shot examples and data of a task or of a group's members."""
        leaves = self.members.get(name, [name])
        counts = [raw["n-samples"][leaf] for leaf in leaves]
        limited = any(count["effective"] < count["original"] for count in counts)
        data = sorted({str(self.loaded["tasks"][leaf].DATASET_PATH) for leaf in leaves})
        row = {
            "version": raw["versions"].get(name),
            "num_fewshot": raw["n-shot"].get(name),
            "data": data,
            "revisions": {path: self.places[path] for path in data if path in self.places},
            "limited": limited,
            "comparable": not limited,
            "members": self.members.get(name, []),
        }
        if self.asked is not None and name == OWN_PROMPTS:
            file = self.asked.prompts.file
            dataset = {
                "name": file.name,
                "file": str(file),
                "sha256": self.asked.prompts.sha256,
                "rows": len(self.asked.prompts.rows),
            }
            lower = [metric for metric, up in self.asked.higher_is_better().items() if not up]
            row |= {"data": [file.name], "comparable": False, "dataset": dataset, "lower_is_better": lower}
        if (rows := self.own.rows.get(name)) is not None:
            described = rows.dataset(counts[0]["effective"])
            row |= {"data": [rows.name], "revisions": {}, "comparable": described["is_benchmark"], "dataset": described}
        return row

    def _compare(self, result: Mapping[str, Any], samples: list[dict[str, Any]], higher: Mapping[str, Any]) -> dict[str, Any]:
        assert self.base is not None
        before = read_result(self.base)
        assert before is not None
        own = {"tasks": result["tasks"], "samples": samples, "higher_is_better": higher}
        lines = read_whole(self.base / SAMPLES).decode().splitlines()
        compared = compare({"samples": [json.loads(line) for line in lines]}, own, self.members)
        base = {"model": before["model"], "tasks": before["tasks"], "dir": str(self.base)}
        return {**compared, "paired_method": METHOD, "base": base}


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """lm-eval's row of a task: documents, and its values by ``METRIC,FILTER``; None for what it calls N/A."""
    values = {key: None if value == "N/A" else float(value) for key, value in row.items() if "," in key}
    return {"n": int(row["sample_len"]), **values}


def _seed(seeds: Seeds) -> None:
    """As ``lm_eval.simple_evaluate`` does before it loads the model."""
    import random

    import langdetect
    import numpy
    import torch

    # langdetect draws; unseeded, two scorings of one answer can differ (its README, "NOTE").
    langdetect.DetectorFactory.seed = 0
    random.seed(seeds.python)
    # lm-eval seeds numpy's global generator; a run by hand must draw the same.
    numpy.random.seed(seeds.numpy)
    torch.manual_seed(seeds.torch)


def _keep_special(lm: Any) -> None:
    """Have a model's answers hold their special tokens, by which a thought is known."""
    if hasattr(lm, "keeps_special"):  # servers
        lm.keeps_special = True
    else:
        decode = lm.tok_decode
        lm.tok_decode = lambda tokens, skip_special_tokens=False: decode(tokens, skip_special_tokens=False)  # noqa: ARG005


def _day(out: Path, base_out: Path | None) -> str:
    """The day that a template prints which reads the clock: that of ``out``, or of the base's answers, else today."""
    for folder in filter(None, (out, base_out)):
        if (folder / _DAY).is_file():
            return (folder / _DAY).read_text()
        with contextlib.suppress(UserError):
            if day := manifest.read_manifest(folder, KIND).meta.get("day"):
                return str(day)
    return rendering.today()


def _check_out(out: Path) -> None:
    """Raise UserError where ``out`` holds files of something else: they would be touched, and named in its manifest."""
    if out.exists() and not out.is_dir():
        raise UserError("is not a folder", file=str(out), fix="choose another folder for the evaluation")
    if out.is_dir():
        foreign = sorted(p.name for p in out.iterdir() if p.name not in _OURS and not p.name.startswith("."))
        if foreign:
            raise UserError(
                f"holds other files: {', '.join(foreign[:5])}", file=str(out), fix="choose an empty folder for the evaluation"
            )


def _read_finished(out: Path, identity: Mapping[str, Any], settings: Eval) -> dict[str, Any]:
    """The result that lies in ``out`` whole, judged again. Raises UserError where it is another evaluation's or damaged."""
    problems = manifest.find_problems(out, KIND)
    if not problems:
        stored = manifest.read_manifest(out, KIND).meta.get("identity", {})
        expected = json.loads(json.dumps(identity))
        other = sorted(key for key in {*expected, *stored} if expected.get(key) != stored.get(key))
        result = None if other else read_result(out)
        if result is not None:
            return {**result, "pass": judge(result, settings)}
        problems = [Problem(f"holds a finished evaluation with another {', '.join(other)}", file=str(out))]
    fix = "choose another folder, or remove it"
    raise UserError([*problems, Problem("nothing finished is overwritten", file=str(out), fix=fix)])


# --- backend ---------------------------------------------------------------------------------------------------------------

# What answers lm-eval's requests: its own ``HFLM`` here, refusing what transformers lets pass with a warning; or servers.


def describe(name: str, model: ModelFacts, adapter: Path | None = None) -> Backend:
    """The backend called ``name`` (``hf`` or ``vllm``) for a model, before it is loaded. Raises UserError."""
    if name == "hf":
        return Backend("hf", version("transformers"), model.dtype)
    return servers.describe(model, adapter)


def choose(requested: str, model: ModelFacts, device: str | None) -> tuple[str, str]:
    """The backend that is asked for; of ``auto`` the one that suits the model and this machine. With one sentence why."""
    import torch

    if requested != "auto":
        return requested, "asked for"
    if os.environ.get(servers.GIVEN):
        return "vllm", "vllm: the job has started its servers"
    if device == "cpu" or not torch.cuda.is_available():
        return "hf", "hf: no GPU is used"
    weights = weight_bytes(model.folder)
    memory = torch.cuda.get_device_properties(0).total_memory
    sizes = f"{weights / 2**30:.1f} GiB of weights, {memory / 2**30:.0f} GiB of memory a GPU"
    if ROOM * weights < memory:
        return "hf", f"hf: one GPU holds the model ({sizes})"
    if not servers.find_program():
        return "hf", f"hf: vLLM is not here, the model is spread over all GPUs ({sizes})"
    return "vllm", f"vllm: one GPU does not hold the model ({sizes})"


@contextlib.contextmanager
def model_for(
    backend: Backend, model: ModelFacts, settings: Eval, *, adapter: Path | None = None, device: str
) -> Iterator[Any]:
    """lm-eval's ``LM`` for a model, ready for requests while the context lasts.

    ``adapter``: a LoRA adapter's folder that is applied to the model without merging. Raises UserError where a tensor is
    missing, the model does not fit, or a server does not start.
    """
    if backend.name == "hf":
        yield load_lm(model.folder, device, settings.batch_size, adapter, model.tokenizer_folder)
        return
    with servers.model_for(model, settings, adapter=adapter) as lm:
        yield lm


def load_lm(folder: Path, device: str, batch_size: int, adapter: Path | None = None, tokenizer: Path | None = None) -> Any:
    """lm-eval's model on ``device`` (``auto``: spread over all GPUs), in the type that the model's configuration names.

    Raises UserError where tensors are missing, NaN or of another shape (transformers draws missing ones at random and says so
    in a warning only, so that a half copied model would be scored), and where transformers refuses the model: its
    configuration names a library, kernel or activation that is not here.
    """
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    placing = {"parallelize": True} if device == "auto" else {"device": device}
    own = tokenizer is None or tokenizer == folder
    raise_if(check_tensors(folder))
    say_unproved(folder)
    parts = {"peft": adapter and str(adapter), "tokenizer": None if own else str(tokenizer)}
    with out_of_memory(folder), _watched() as reports:
        try:
            words = AutoTokenizer.from_pretrained(str(tokenizer or folder), trust_remote_code=False)
            parts["generation_config"] = settings_of(folder, words)
            lm = HFLM(pretrained=str(folder), dtype="auto", batch_size=batch_size, **parts, **placing)
        except (UserError, torch.OutOfMemoryError):
            raise
        # Whatever a foreign configuration makes a library raise: KeyError, ImportError, ZeroDivisionError, AssertionError, ...
        except Exception as error:
            raise_if(problem for report in reports for problem in reported(str(folder), report))
            raise refused(error, folder, "transformers does not load it") from error
        raise_if(problem for report in reports for problem in reported(str(folder), report))
        check_answers(lm.model, folder)
    return lm


@contextlib.contextmanager
def _watched() -> Iterator[list[Any]]:
    """Gather transformers' loading reports while the context lasts: 5.23 gives them only to callers that ask for a tuple."""
    from transformers import modeling_utils

    reports: list[Any] = []
    original = modeling_utils.log_state_dict_report

    def keep(*args: Any, **kwargs: Any) -> None:
        reports.append(kwargs["loading_info"])
        original(*args, **kwargs)

    with replaced(modeling_utils, log_state_dict_report=keep):
        yield reports


@contextlib.contextmanager
def out_of_memory(folder: Path) -> Iterator[None]:
    """Raises a UserError that names the key to lower, where the model or a batch does not fit into memory."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        fix = "lower the batch size, or spread the model over all GPUs with --device auto"
        text = f"does not fit: {error}"
        raise UserError(text, ExitCode.FAILED, file=str(folder), key="eval.batch_size", fix=fix) from error


# --- progress --------------------------------------------------------------------------------------------------------------

# What a person sees while the prompts are answered: one bar or a line now and then, and nothing of the libraries' own.


SECONDS_BETWEEN_LINES = 30.0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' bars, notes and download counts; their prints go to stderr: stdout is for one JSON document."""
    import lm_eval.api.task as contexts  # first: its extra is the one to name where it is missing
    import datasets  # isort: skip
    import transformers  # isort: skip

    logger, noise = logging.getLogger("lm_eval"), transformers.utils.logging
    with contextlib.ExitStack() as stack:
        # CRITICAL, not ERROR: the scorer logs every answer without letters as one, at full length.
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        stack.enter_context(replaced(contexts, tqdm=functools.partial(contexts.tqdm, disable=True)))
        # load_dataset("json") reports itself to s3.amazonaws.com (datasets 5.2.0): 3 s lost behind a firewall that drops.
        stack.enter_context(replaced(datasets.config, HF_UPDATE_DOWNLOAD_COUNTS=False))
        stack.callback(noise.set_verbosity, noise.get_verbosity())
        noise.set_verbosity_error()
        if noise.is_progress_bar_enabled():
            stack.callback(noise.enable_progress_bar)
        noise.disable_progress_bar()
        if not datasets.are_progress_bars_disabled():
            stack.callback(datasets.enable_progress_bars)
        datasets.disable_progress_bars()
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


WRITTEN_EVERY = 2.0
"""Seconds between two states of the progress file."""


@contextlib.contextmanager
def progress(model: str, total: int, file: Path | None = None) -> Iterator[Callable[[int, int], None]]:
    """A function ``report(done, of)``: a bar on a terminal; elsewhere a line every half minute, with what is left.

    lm-eval asks one kind of request after the other: ``done`` counts one kind, ``total`` all of them. ``file`` gets
    ``{"model", "done", "total", "eta_s", "time"}``.
    """
    with console.count_progress() as bar:
        task = bar.add_task("evaluation", total=total)
        began = last = time.monotonic()
        written = before = now = 0
        written_at = -WRITTEN_EVERY
        first: int | None = None  # answers of an earlier call are counted, and took no time

        def write() -> None:
            nonlocal written_at
            if file is None or time.monotonic() - written_at < WRITTEN_EVERY:
                return
            written_at = time.monotonic()
            rate = (now - (first or 0)) / (written_at - began)
            state = {"model": model, "done": now, "total": total, "eta_s": (total - now) / rate if rate else None}
            with contextlib.suppress(OSError):  # an evaluation does not end because its progress cannot be shown
                manifest.write_durably(file, json.dumps({**state, "time": round(time.time(), 3)}) + "\n")

        def report(done: int, _of: int) -> None:
            nonlocal last, first, before, written, now
            before += written if done < written else 0  # another kind of request begins
            written, now = done, min(before + done, total)
            first = now if first is None else first
            bar.update(task, completed=now, total=total)
            write()
            if not console.stderr.is_terminal and time.monotonic() - last > SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                rate = (now - first) / (last - began)
                left = f", about {duration((total - now) / rate)} left" if rate else ""
                console.say(f"evaluation of {model}: {now} of {total} prompts answered{left}")

        write()
        yield report
