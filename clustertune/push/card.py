"""The model card: what the run says of itself. The same run gives the same bytes, so that a second push changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clustertune.config.distribution import words
from clustertune.errors import Problem, UserError
from clustertune.evaluate import scores as evaluation
from clustertune.manifest import Manifest, require_whole
from clustertune.report import content, source
from clustertune.report.format import number
from clustertune.report.forms import is_number
from clustertune.report.metrics import Metrics, read_metrics
from clustertune.rundir import RunDir

_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_LOCAL = (("data", "input"), ("model", "path"), ("staged",))
"""Keys of a recipe that hold a path: left out of the card, which is for other machines."""
_TEMPLATE_HERE = "\0chat template\0"
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{1,60}")
"""The form of the Hub's licence identifiers."""


def build_card(run: RunDir, document: Mapping[str, Any], sealed: Manifest, repo: str, licence: str | None) -> str:
    """``README.md`` of the repository. ``licence``: one of the Hub's identifiers; None: that of the base model.

    Raises UserError for a licence that cannot be one.
    """
    from jinja2 import Environment, StrictUndefined

    if licence is not None and not _LICENCE.fullmatch(licence):
        fix = "one of the Hub's: https://huggingface.co/docs/hub/repositories-licenses"
        raise UserError(Problem(f"{licence!r} is no licence identifier", file="command line", key="--license", fix=fix))
    recipe = content.get(document, "recipe", "recipe") or {}
    metrics = read_metrics(run.metrics)
    scored = _read_scores(run)
    base, on_hub = str(content.get(recipe, "model", "name")), content.get(recipe, "model", "weights") == "hub"
    revision, template = content.get(recipe, "model", "revision"), content.get(document, "recipe", "chat_template")
    values = {
        "metadata": _metadata(recipe, scored, licence, repo),
        "title": repo.partition("/")[2],
        "what": f"A LoRA adapter for `{base}`, trained with the recipe `{content.get(document, 'recipe', 'name')}`.",
        "notes": _notes(document, metrics, sealed, on_hub),
        "origin": [[key, _cell(value)] for key, value in _origin(recipe, licence)],
        "training": [[key, _cell(value)] for key, value in _training(run, document, metrics, sealed)],
        **_scores(scored),
        "base": base,
        "revision_argument": f', revision="{revision}"' if revision else "",
        "repo": repo,
        "chat_template": None if template is None else _TEMPLATE_HERE,
        "fence": _fence(str(template)),
        "recipe": _recipe_text(recipe),
        "versions": [[key, _cell(value)] for key, value in _versions(document)],
        "files": [[name, record.size, record.digest] for name, record in sorted(sealed.files.items())],
        "checkpoint": content.get(sealed.meta, "checkpoint", "name"),
        "checkpoint_sha": content.get(sealed.meta, "checkpoint", "manifest_sha256"),
    }
    environment = Environment(autoescape=False, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(values)
    text = re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
    return text.replace(_TEMPLATE_HERE, str(template).rstrip("\n"))  # behind the line above: its blank lines are tokens


def _metadata(recipe: Mapping[str, Any], scored: Mapping[str, Any] | None, licence: str | None, repo: str) -> str:
    """The YAML head that the Hub reads. A base or a data set that it does not have is not named there."""
    import yaml

    model, data = recipe.get("model") or {}, recipe.get("data") or {}
    found: dict[str, Any] = {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["clustertune", "lora", "sft"]}
    if model.get("weights") == "hub" and "/" in str(model.get("name")):
        found["base_model"] = model["name"]
        found["base_model_relation"] = "adapter"
    if licence:
        found["license"] = licence
    elif "base_model" in found:
        link = f"https://huggingface.co/{model['name']}"
        found |= {"license": "other", "license_name": "as-the-base-model", "license_link": link}
    if "/" in str(data.get("name")):
        found["datasets"] = [data["name"]]
    if results := _benchmark_results(scored):
        found["model-index"] = [{"name": repo.partition("/")[2], "results": results}]
    return yaml.safe_dump(found, sort_keys=False)


def _benchmark_results(scored: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The Hub's ``results`` of each whole benchmark: anything else is no result that others may compare with."""
    found = []
    for name, row in (content.get(scored, "tasks") or {}).items():
        data = content.get(scored, "details", name, "data") or []
        if content.get(scored, "details", name, "comparable") is not True or len(data) != 1:
            continue
        values = {evaluation.shown(key): value for key, value, _ in evaluation.metrics(row) if is_number(value)}
        metrics = [{"type": key, "value": round(float(value), 6), "name": key} for key, value in values.items()]
        task = {"type": "text-generation", "name": "Text Generation"}
        found.append({"task": task, "dataset": {"type": data[0], "name": name}, "metrics": metrics})
    return found


def _notes(document: Mapping[str, Any], metrics: Metrics, sealed: Manifest, on_hub: bool) -> list[str]:
    """What a reader must not miss."""
    notes = content.warnings_of(document, metrics, {"meta": sealed.meta})
    if not on_hub:
        notes.append("The base model has random weights and was made by the run itself: nobody else can load this adapter.")
    return notes


def _origin(recipe: Mapping[str, Any], licence: str | None) -> Iterator[tuple[str, Any]]:
    model, data = recipe.get("model") or {}, recipe.get("data") or {}
    yield "base model", f"`{model.get('name')}`"
    yield "its revision", model.get("revision")
    yield "data", f"`{data.get('name')}`"
    yield "its revision", data.get("revision")
    yield "form of the rows", data.get("format")
    yield "language", data.get("language")
    yield "licence", licence or "that of the base model; the data has one of its own"


def _training(run: RunDir, document: Mapping[str, Any], metrics: Metrics, sealed: Manifest) -> Iterator[tuple[str, Any]]:
    """Distribution, hardware, steps, losses, time."""
    distributed = document.get("distributed") or {}
    ranks = distributed.get("world_size") or content.get(document, "recipe", "world_size")
    yield "distribution", words(distributed) or ""
    yield "ranks", ranks
    yield "nodes", source.nodes_of(run.path, document)
    yield "GPUs", _gpus(document, ranks)
    yield "optimizer steps", sealed.meta.get("step")
    yield "trained parameters", sealed.meta.get("parameters")
    yield "adapter's types", ", ".join(map(str, sealed.meta.get("dtypes") or []))
    for name, found in (("training loss", content.train_losses(metrics)), ("eval loss", content.eval_losses(metrics))):
        if found is not None:
            when, values = found
            yield f"{name}, {when}", ", ".join(f"{value:.4f}" for value in values)
    yield "hours of training", _hours(run, metrics)


def _gpus(document: Mapping[str, Any], ranks: int | None) -> str | None:
    """What the ranks ran on, one GPU each: a node may have more than they took. None: the run does not say."""
    told = document.get("distributed")
    if content.get(told, "device") == "cpu":
        return "none: trained on CPUs"
    kind = content.get(told, "gpu0") or content.get(document, "cluster", "compute", "gpu")
    if kind is None and content.get(told, "device") is None:
        return None
    return f"{ranks} x {kind or 'GPU'}" if ranks else None


def _hours(run: RunDir, metrics: Metrics) -> str | None:
    """Of all tries that ended: the stage's own record has the last one only."""
    tries = next((stage.seconds for stage in metrics.stages if stage.stage == "train"), None)
    seconds = tries or content.get(run.stage("train"), "seconds")
    return f"{seconds / 3600:.2f}" if is_number(seconds) else None


def _scores(scored: Mapping[str, Any] | None) -> dict[str, Any]:
    found = content.eval_content(scored)
    if scored is None or found is None:
        return {"scores": [], "scores_of": "", "score_notes": [], "paired": [], "paired_about": ""}
    rows = [
        [name, evaluation.shown(key), number(value), number(error)]
        for name, row in scored["tasks"].items()
        for key, value, error in evaluation.metrics(row)
    ]
    beside = {"paired": found["paired"], "paired_about": content.get(scored, "paired_method")}
    return {"scores": rows, "scores_of": found["subtitle"], "score_notes": found["notes"], **beside}


def _versions(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    commit = content.get(document, "git", "commit")
    if commit:
        changed = " with uncommitted changes" if content.get(document, "git", "dirty") else ""
        yield "clustertune commit", f"`{commit}`{changed}"
    yield from (document.get("versions") or {}).items()
    yield "image's SHA-256", content.get(document, "container", "sha256")
    yield "run", content.get(document, "fingerprint")


def _fence(text: str) -> str:
    """Backquotes that end nowhere in a text."""
    return "`" * max([3, *(len(run) + 1 for run in re.findall(r"`+", text))])


def _recipe_text(recipe: Mapping[str, Any]) -> str:
    """The sections that the recipe sets, without paths and without what stands nowhere."""
    import yaml

    clean: dict[str, Any] = json.loads(json.dumps(recipe))
    for *sections, key in _LOCAL:
        inner = clean
        for section in sections:
            inner = inner.get(section) or {}
        inner.pop(key, None)
    return yaml.safe_dump(_said(clean), sort_keys=False)


def _said(value: Any) -> Any:
    """A recipe without what it leaves empty."""
    if not isinstance(value, dict):
        return value
    inner = {key: _said(part) for key, part in value.items()}
    return {key: part for key, part in inner.items() if part not in (None, {}, [])}


def _read_scores(run: RunDir) -> dict[str, Any] | None:
    """The result of the run's evaluation; None where there is none. Raises UserError where it is not what was sealed."""
    require_whole(run.eval)
    try:
        found = evaluation.read_result(run.eval)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _cell(value: Any) -> str:
    """A value in a table: one line, and nothing that ends a cell."""
    return "-" if value is None or value == "" else re.sub(r"\s+", " ", str(value)).replace("|", "\\|")
