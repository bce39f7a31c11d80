"""Score a merged model with lm-eval's own IFEval: everything that can fail is tried before the weights are loaded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from clustertune import manifest
from clustertune.config.schema import IFEVAL_SCORES, IFEval
from clustertune.errors import Problem, UserError, storage_error
from clustertune.ifeval import punkt as punkts
from clustertune.ifeval import task as tasks
from clustertune.ifeval.generations import GenerationLog, ResumableLM, hold
from clustertune.ifeval.loading import load_lm, out_of_memory
from clustertune.ifeval.model import ModelFacts, check_device, check_model, pick_device, raise_if
from clustertune.ifeval.prompts import Prompts, find_difference, read_prompts
from clustertune.ifeval.quiet import progress, quiet
from clustertune.ifeval.scores import STDERR_METHOD, clustered_stderr, judge

KIND = "evaluation"
RESULT, SAMPLES, PROMPTS, TASK, NLTK = "ifeval.json", "samples.jsonl", "prompts.jsonl", "task", "nltk_data"
_OURS = {RESULT, SAMPLES, PROMPTS, TASK, NLTK, manifest.MANIFEST}
_PACKAGES = ("lm_eval", "torch", "transformers", "datasets", "nltk", "langdetect")


def evaluate(
    model: Path,
    out: Path,
    *,
    settings: IFEval,
    data: Path | None = None,
    benchmark: bool = True,
    device: str | None = None,
    source_label: str | None = None,
) -> dict[str, Any]:
    """Score ``model`` and write ``out`` (result, samples, prompts, task, manifest): whole, or without a manifest.

    ``data`` is a JSON Lines file of IFEval rows; without it the benchmark is taken where it can be had (unless
    ``benchmark`` is false), else the project's own prompts, and the result says which. ``device``: ``cpu``, ``cuda``,
    ``cuda:N``, ``auto`` (spread over all GPUs), or None (the first GPU where the weights fit, else as ``auto``).
    ``source_label`` is what to call the model in the result.

    The weights' type is the one in the model's configuration (lm-eval's ``dtype=auto``). An interrupted evaluation goes on
    with the batches that are on disk; a finished one of the same model, prompts and settings is returned as it is, judged
    by the pass marks of ``settings``. The verdict is in ``pass``; :func:`clustertune.ifeval.scores.require_pass` raises on
    it. Raises UserError with everything wrong at once, before the weights are loaded.
    """
    started = time.monotonic()
    task = tasks.read_task_file()
    _check_out(out)
    source = tasks.choose_source(task, data, benchmark=benchmark)
    corpus = [(tasks.FOLDER / "punkt.txt").read_text(encoding="utf-8")]
    try:
        # Trained outside of ``out``: what is refused leaves nothing there, and what is sealed there is not touched.
        with tempfile.TemporaryDirectory() as scratch:
            splitter = punkts.prepare(corpus, Path(scratch))
            with punkts.installed(splitter.path), quiet():
                facts, prompts = _check_inputs(model, source, settings, device)
                place = pick_device(device, model)
                run = _Run(task, settings, facts, prompts, splitter, source, place, source_label or str(model))
                out.mkdir(parents=True, exist_ok=True)
                with hold(out):
                    if (out / manifest.MANIFEST).exists():
                        return _read_finished(out, run.identity(), settings)
                    return run.execute(out, started)
    except OSError as error:
        if error.errno is None:  # transformers says so that it cannot read a model
            raise UserError(Problem(str(error), file=str(model))) from error
        raise storage_error(error, "IFEval", Path(error.filename or out)) from error


def _check_inputs(model: Path, source: tasks.Source, settings: IFEval, device: str | None) -> tuple[ModelFacts, Prompts]:
    facts, problems = check_model(model, settings.max_gen_toks)
    problems += check_device(device)
    prompts = None
    try:
        prompts = read_prompts(source.file)
    except UserError as error:
        problems += error.problems
    raise_if(problems)
    assert facts is not None and prompts is not None
    return facts, prompts


class _Run:
    """One evaluation, its inputs checked."""

    def __init__(
        self,
        task: tasks.TaskFile,
        settings: IFEval,
        facts: ModelFacts,
        prompts: Prompts,
        splitter: punkts.Punkt,
        source: tasks.Source,
        device: str,
        label: str,
    ) -> None:
        self.task, self.settings, self.facts, self.prompts = task, settings, facts, prompts
        self.splitter, self.source, self.device, self.label = splitter, source, device, label

    def identity(self) -> dict[str, Any]:
        """What decides the answers and their scores: two evaluations with the same identity have the same result."""
        return {
            "model": self.facts.fingerprint,
            "prompts": self.prompts.sha256,
            "limit": self.settings.limit,
            "max_gen_toks": self.settings.max_gen_toks,
            "batch_size": self.settings.batch_size,
            "task": self.task.model_dump(include={"version", "generation_kwargs", "seeds"}),
            "punkt": self.splitter.sha256,
            "device": self.device,
            "versions": {name: version(name) for name in _PACKAGES},
        }

    def execute(self, out: Path, started: float) -> dict[str, Any]:
        """Generate, score, write, seal."""
        if self.splitter.source == punkts.TRAINED:
            shutil.copytree(self.splitter.path, out / NLTK, dirs_exist_ok=True)
            self.splitter = dataclasses.replace(self.splitter, path=(out / NLTK).resolve())
        manifest.write_durably(out / PROMPTS, self.prompts.to_jsonl())
        task_file = out / TASK / f"{self.task.task}.yaml"
        generation = tasks.write_task(self.task, self.settings, out / PROMPTS, task_file)
        name = hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:16]
        log = GenerationLog(out / f".generations-{name}.tmp")
        try:
            raw, lm = self._score(out / TASK, log)
            result = self._describe(raw, lm, generation, started)
            result["by_hand"] = by_hand(self.facts, result["decoding"], task_file, self.settings.limit)
            samples = sorted(raw["samples"][self.task.task], key=lambda sample: int(sample["doc_id"]))
            lines = (json.dumps(sample, ensure_ascii=False, default=str) for sample in samples)
            manifest.write_durably(out / SAMPLES, "\n".join(lines) + "\n")
            manifest.write_durably(out / RESULT, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
            meta = {"identity": self.identity(), "dataset": result["dataset"], "scores": result["scores"]}
            manifest.seal(out, KIND, meta)
        finally:
            log.close()
        for leftover in out.glob(".*.tmp"):
            leftover.unlink()
        return result

    def _score(self, task_folder: Path, log: GenerationLog) -> tuple[dict[str, Any], ResumableLM]:
        """What ``lm_eval run`` does, without its look at the whole machine (pip, git, Hub) around it."""
        import langdetect
        import lm_eval.evaluator
        from lm_eval.tasks import TaskManager

        loaded = TaskManager(include_path=str(task_folder), include_defaults=False).load([self.task.task])
        for loaded_task in loaded["tasks"].values():
            loaded_task.set_config(key="num_fewshot", value=0)
            difference = find_difference(self.prompts, list(loaded_task.eval_docs))
            raise_if([difference] if difference else [])
        # langdetect draws; unseeded, two scorings of one answer can differ (its README, "NOTE").
        langdetect.DetectorFactory.seed = 0
        _seed(self.task.seeds)
        with manifest.Comparison(self.facts.folder) as weights:
            lm = load_lm(self.facts.folder, self.device, self.settings.batch_size)
            raise_if(weights.finish())
        with progress() as report, out_of_memory(self.facts.folder):
            wrapped = ResumableLM(lm, log, self.settings.batch_size, report)
            raw = lm_eval.evaluator.evaluate(
                lm=wrapped,
                task_dict=loaded,
                limit=self.settings.limit,
                apply_chat_template=True,
                fewshot_as_multiturn=True,
                log_samples=True,
            )
        return raw, wrapped

    def _describe(self, raw: Mapping[str, Any], lm: ResumableLM, generation: Any, started: float) -> dict[str, Any]:
        from lm_eval.utils import hash_string

        numbers, samples = raw["results"][self.task.task], raw["samples"][self.task.task]
        scores = {name: float(numbers[f"{name},none"]) for name in IFEVAL_SCORES}
        stderr: dict[str, float | None] = {}
        for name in IFEVAL_SCORES:
            given = numbers[f"{name}_stderr,none"]
            stderr[name] = float(given) if given != "N/A" else None
            if name.startswith("inst_level"):
                stderr[name] = clustered_stderr([sample[name] for sample in samples])
        limited = len(samples) < len(self.prompts.rows)
        is_benchmark = self.prompts.is_benchmark and not limited
        return {
            "model": self.label,
            "path": str(self.facts.folder.resolve()),
            "dataset": {
                "name": tasks.BENCHMARK if self.prompts.is_benchmark else self.source.name,
                "file": str(self.source.file),
                "sha256": self.prompts.sha256,
                "prompts": len(samples),
                "rows": len(self.prompts.rows),
                "instructions": sum(len(sample["inst_level_strict_acc"]) for sample in samples),
                "limited": limited,
                "is_benchmark": is_benchmark,
                "drawn_arguments": self.prompts.drawn,
            },
            "scores": scores,
            "stderr": stderr,
            "stderr_method": STDERR_METHOD,
            "pass": judge(scores, self.settings.pass_mark),
            "punkt": {"source": self.splitter.source, "path": str(self.splitter.path), "sha256": self.splitter.sha256},
            "decoding": {
                **generation,
                "batch_size": self.settings.batch_size,
                "dtype": str(lm.model.dtype).removeprefix("torch."),
                "device": "auto" if self.device == "auto" else str(lm.device),
                "chat_template": True,
                "seeds": {**self.task.seeds.model_dump(), "langdetect": 0},
            },
            "truncated_prompts": lm.truncated,
            "chat_template_sha": hash_string(lm.chat_template(True)),
            "task_version": self.task.version,
            "versions": {name: version(name) for name in _PACKAGES},
            "seconds": round(time.monotonic() - started, 3),
            "resumed_prompts": lm.resumed,
            "samples": SAMPLES,
        }


def by_hand(facts: ModelFacts, decoding: Mapping[str, Any], task: Path, limit: int | None) -> list[str]:
    """The ``lm_eval`` command that repeats an evaluation, with ``NLTK_DATA`` set to its ``punkt.path``."""
    spread = decoding["device"] == "auto"
    model = f"pretrained={facts.folder.resolve()},dtype=auto{',parallelize=True' if spread else ''}"
    return [
        *("lm_eval", "run", "--model", "hf", "--model_args", model),
        *("--tasks", task.stem, "--include_path", str(task.parent.resolve())),
        *(() if spread else ("--device", decoding["device"])),
        *("--batch_size", str(decoding["batch_size"]), "--apply_chat_template"),
        *(("--limit", str(limit)) if limit is not None else ()),
    ]


def _seed(seeds: tasks.Seeds) -> None:
    """As ``lm_eval.simple_evaluate`` does before it loads the model."""
    import random

    import numpy
    import torch

    random.seed(seeds.python)
    # lm-eval seeds numpy's global generator; a run by hand must draw the same.
    numpy.random.seed(seeds.numpy)
    torch.manual_seed(seeds.torch)


def _check_out(out: Path) -> None:
    """Raise UserError where ``out`` holds files that are no evaluation's: they would be touched, and named in its manifest."""
    if out.exists() and not out.is_dir():
        raise UserError(Problem("is not a folder", file=str(out), fix="choose another folder for the evaluation"))
    if out.is_dir():
        foreign = sorted(p.name for p in out.iterdir() if p.name not in _OURS and not p.name.startswith("."))
        if foreign:
            raise UserError(
                Problem(
                    f"holds other files: {', '.join(foreign[:5])}",
                    file=str(out),
                    fix="choose an empty folder for the evaluation",
                )
            )


def _read_finished(out: Path, identity: Mapping[str, Any], settings: IFEval) -> dict[str, Any]:
    """The result that lies in ``out`` whole, judged anew. Raises UserError where it is another evaluation's or damaged."""
    problems = manifest.find_problems(out, KIND)
    if not problems:
        found = manifest.read_manifest(out, KIND).meta.get("identity", {})
        other = sorted(key for key in {*identity, *found} if identity.get(key) != found.get(key))
        if not other:
            result: dict[str, Any] = json.loads((out / RESULT).read_bytes())
            return {**result, "pass": judge(result["scores"], settings.pass_mark)}
        problems = [Problem(f"holds a finished evaluation with another {', '.join(other)}", file=str(out))]
    fix = "choose another folder, or remove it"
    raise UserError([*problems, Problem("nothing finished is overwritten", file=str(out), fix=fix)])
