"""What IFEval needs beside lm-eval's own task: decoding of ``eval/ifeval/task.yaml``, checked prompts, a sentence splitter."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from clustertune import manifest
from clustertune.config.findings import read_model
from clustertune.config.schema import METRICS, Eval, Section
from clustertune.config.schema import NAME as FORM
from clustertune.config.yamlfile import read_yaml
from clustertune.errors import Problem, UserError
from clustertune.evaluate import punkt as punkts
from clustertune.evaluate.prompts import Prompts, find_difference, read_prompts
from clustertune.tree import ROOT

NAME = "ifeval"
"""lm-eval's name of the task."""
PROMPTS, NLTK = "prompts.jsonl", "nltk_data"
FILES = (PROMPTS, NLTK)
"""What it adds to the folder of an evaluation."""
SCORES = METRICS[NAME]
STDERR_METHOD = {
    "prompt_level": "lm-eval's: sample standard deviation over prompts / sqrt(prompts)",
    "inst_level": "ratio estimator, instructions clustered by prompt (lm-eval gives none)",
}

FOLDER = ROOT / "eval" / "ifeval"
"""What an operator edits."""
BENCHMARK = "google/IFEval"


class Decoding(Section):
    until: list[str]
    """Stop strings beside the model's end of turn."""
    do_sample: Literal[False]
    temperature: Annotated[float, Field(ge=0, le=0)]


class Seeds(Section):
    python: int
    numpy: int
    torch: int


class PinnedPrompts(Section):
    name: Annotated[str, Field(pattern=rf"^{FORM}/{FORM}$")]
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    file: Annotated[str, Field(pattern=rf"^{FORM}$")]


class Fallback(Section):
    name: Annotated[str, Field(pattern=rf"^{FORM}$")]
    file: Annotated[str, Field(pattern=rf"^{FORM}$")]


class TaskFile(Section):
    """``task.yaml``."""

    task: Literal["ifeval", "clustertune_ifeval"] = "ifeval"
    """The second is the name that the file had before tasks were named by lm-eval's names."""
    version: float
    generation_kwargs: Decoding
    seeds: Seeds
    hub: PinnedPrompts
    fallback: Fallback


@dataclass(frozen=True)
class PromptSource:
    """Which file is scored, and under which name; the name of a file that is the benchmark is the benchmark's."""

    file: Path
    name: str


def read_task_file(path: Path = FOLDER / "task.yaml") -> TaskFile:
    """Read ``task.yaml``. Raises UserError with everything that is wrong in it, and for another version than lm-eval's."""
    task = read_model(TaskFile, read_yaml(path, str(path)))
    installed = float(_read_upstream()["metadata"]["version"])
    if installed != task.version:
        raise UserError(
            Problem(
                f"{task.version}, the installed lm-eval has version {installed} of ifeval",
                file=str(path),
                key="version",
                fix="scores of two versions are not comparable: score the reference again, then change the line",
            )
        )
    return task


def locate_upstream() -> Path:
    """lm-eval's own task definition."""
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks" / "ifeval" / "ifeval.yaml"


def _read_upstream() -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    return dict(load_yaml(locate_upstream(), resolve_func=False))


def write_task(task: TaskFile, settings: Eval, prompts: Path, out: Path) -> dict[str, Any]:
    """Write the lm-eval task that is run, for ``lm_eval run --include_path``; returns its generation settings."""
    tokens = settings.max_gen_toks or _read_upstream()["generation_kwargs"]["max_gen_toks"]
    generation = {**task.generation_kwargs.model_dump(), "max_gen_toks": tokens}
    body = {
        "include": str(locate_upstream()),
        "task": NAME,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"train": str(prompts.resolve())}},
        "generation_kwargs": generation,
        "metadata": {"version": task.version},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(yaml.safe_dump(body, sort_keys=False))
    return generation


def choose_source(task: TaskFile, data: Path | None, *, benchmark: bool = True) -> PromptSource:
    """The given file; else the benchmark (where wanted) from the Hub's cache or the Hub; else the project's own prompts."""
    if data is not None:
        return PromptSource(data, data.name)
    cached = fetch_benchmark(task.hub) if benchmark else None
    if cached is not None:
        return PromptSource(cached, task.hub.name)
    return PromptSource(FOLDER / task.fallback.file, task.fallback.name)


def fetch_benchmark(hub: PinnedPrompts) -> Path | None:
    """The benchmark's file: cached, or downloaded where the Hub answers within 5 s; None where it cannot be had."""
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
    """The prompts and the sentence splitter of one evaluation, both checked."""

    task: TaskFile
    source: PromptSource
    prompts: Prompts
    splitter: punkts.Punkt

    @property
    def name(self) -> str:
        """Of the data: the benchmark's where the rows are the benchmark's."""
        return BENCHMARK if self.prompts.is_benchmark else self.source.name

    def write_task(self, settings: Eval, folder: Path, beside: Path) -> dict[str, Path]:
        """The task file in ``folder``, which replaces lm-eval's own, and the prompts that it reads in ``beside``."""
        file = folder / f"{NAME}.yaml"
        manifest.write_durably(beside / PROMPTS, self.prompts.to_jsonl())
        write_task(self.task, settings, beside / PROMPTS, file)
        return {NAME: file}

    def keep(self, settings: Eval, out: Path, folder: Path) -> None:
        """Write what repeats the scoring by hand into the evaluation's folder."""
        if self.splitter.source == punkts.TRAINED:
            shutil.copytree(self.splitter.path, out / NLTK, dirs_exist_ok=True)
            self.splitter = dataclasses.replace(self.splitter, path=(out / NLTK).resolve())
        self.write_task(settings, folder, out)

    def find_difference(self, loaded: Any) -> list[Problem]:
        """Where lm-eval has read the prompts otherwise than they stand in the file."""
        difference = find_difference(self.prompts, list(loaded.eval_docs))
        return [difference] if difference else []

    def describe(
        self, row: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], result: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What a result says about IFEval beside its scores; all but ``notes`` stood there before there were tasks."""
        limited = len(samples) < len(self.prompts.rows)
        is_benchmark = self.prompts.is_benchmark and not limited
        notes = list(result["notes"])
        if not is_benchmark:
            why = f"the first {len(samples)} of its {len(self.prompts.rows)} prompts" if limited else "other prompts"
            notes.append(f"Not the IFEval benchmark ({why}): these numbers compare with nothing published.")
        if self.splitter.source == punkts.TRAINED:
            notes.append(punkts.NOTE)
        return {
            "dataset": {
                "name": self.name,
                "file": str(self.source.file),
                "sha256": self.prompts.sha256,
                "prompts": len(samples),
                "rows": len(self.prompts.rows),
                "instructions": sum(len(sample["inst_level_strict_acc"]) for sample in samples),
                "limited": limited,
                "is_benchmark": is_benchmark,
                "drawn_arguments": self.prompts.drawn,
            },
            "scores": {name: row[f"{name},none"] for name in SCORES},
            "stderr": {name: row[f"{name}_stderr,none"] for name in SCORES},
            "stderr_method": STDERR_METHOD,
            "punkt": {"source": self.splitter.source, "path": str(self.splitter.path), "sha256": self.splitter.sha256},
            "task_version": self.task.version,
            "decoding": {**result["decoding"], **samples[0]["arguments"][0][1]},
            "notes": notes,
        }


@contextlib.contextmanager
def inputs(data: Path | None, benchmark: bool, scratch: Path) -> Iterator[Inputs]:
    """Prompts and splitter, checked; while the context lasts, NLTK uses that splitter and cannot download.

    ``data``: a file of prompts; None: see :func:`choose_source`. ``scratch``: where a splitter is trained, if the site has
    none. Raises UserError.
    """
    task = read_task_file()
    source = choose_source(task, data, benchmark=benchmark)
    splitter = punkts.prepare([(FOLDER / "punkt.txt").read_text(encoding="utf-8")], scratch / NLTK)
    with punkts.installed(splitter.path):
        yield Inputs(task, source, read_prompts(source.file), splitter)
