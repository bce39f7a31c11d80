"""The task that ``eval/ifeval/task.yaml`` describes: lm-eval's own ``ifeval`` with this project's decoding and prompts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from clustertune.config.schema import NAME, IFEval, Section
from clustertune.errors import Problem, UserError
from clustertune.tree import ROOT

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


class Hub(Section):
    name: Annotated[str, Field(pattern=rf"^{NAME}/{NAME}$")]
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    file: Annotated[str, Field(pattern=rf"^{NAME}$")]


class Fallback(Section):
    name: Annotated[str, Field(pattern=rf"^{NAME}$")]
    file: Annotated[str, Field(pattern=rf"^{NAME}$")]


class TaskFile(Section):
    """``task.yaml``."""

    task: Annotated[str, Field(pattern=rf"^{NAME}$")]
    version: float
    generation_kwargs: Decoding
    seeds: Seeds
    hub: Hub
    fallback: Fallback


@dataclass(frozen=True)
class Source:
    """Which file is scored, and under which name; the name of a file that is the benchmark is the benchmark's."""

    file: Path
    name: str


def read_task_file(path: Path = FOLDER / "task.yaml") -> TaskFile:
    """Read ``task.yaml``. Raises UserError with everything that is wrong in it, and for another version than lm-eval's."""
    try:
        document = yaml.safe_load(path.read_bytes())
        task = TaskFile.model_validate(document)
    except OSError as error:
        raise UserError(Problem(f"cannot be read: {error.strerror}", file=str(path))) from None
    except yaml.YAMLError as error:
        raise UserError(Problem(f"not YAML: {error}", file=str(path))) from None
    except ValidationError as error:
        raise UserError(
            Problem(item["msg"], file=str(path), key=".".join(map(str, item["loc"]))) for item in error.errors()
        ) from None
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


def write_task(task: TaskFile, settings: IFEval, prompts: Path, out: Path) -> dict[str, Any]:
    """Write the lm-eval task that is run, for ``lm_eval run --include_path``; returns its generation settings."""
    generation = {**task.generation_kwargs.model_dump(), "max_gen_toks": settings.max_gen_toks}
    body = {
        "include": str(locate_upstream()),
        "task": task.task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"train": str(prompts.resolve())}},
        "generation_kwargs": generation,
        "metadata": {"version": task.version},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(yaml.safe_dump(body, sort_keys=False))
    return generation


def choose_source(task: TaskFile, data: Path | None, *, benchmark: bool = True) -> Source:
    """The given file; else the benchmark (where wanted) from the Hub's cache or the Hub; else the project's own prompts."""
    if data is not None:
        return Source(data, data.name)
    cached = fetch_benchmark(task.hub) if benchmark else None
    if cached is not None:
        return Source(cached, task.hub.name)
    return Source(FOLDER / task.fallback.file, task.fallback.name)


def fetch_benchmark(hub: Hub) -> Path | None:
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
