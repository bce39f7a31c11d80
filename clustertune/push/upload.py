"""What a push would send: the run's adapter, verified, its card, and nothing that is not on the list."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from clustertune.console import emit_json, say
from clustertune.errors import Problem, UserError, raise_if
from clustertune.evaluate import scores as evaluation
from clustertune.export.export import ADAPTER_FILES, is_adapter_file
from clustertune.host.credentials import holds_secret
from clustertune.manifest import MANIFEST, Manifest, find_problems, list_files, read_manifest, require_whole
from clustertune.report import content, source
from clustertune.report.content import get, is_number, number
from clustertune.report.metrics import read_metrics
from clustertune.resolve.distribution import format_distribution
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir
from clustertune.tensorfile import read_header

CARD = "README.md"


@dataclass(frozen=True)
class File:
    """One file of the repository."""

    name: str
    size: int
    sha256: str
    path: Path | None = None
    """Where it lies; None: ``data`` is its content."""
    data: bytes = b""


@dataclass(frozen=True)
class Upload:
    """Everything that goes, as it lies here."""

    files: tuple[File, ...]
    card: str
    left_out: tuple[str, ...]
    """Files of the adapter's folder that are not on the list."""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def as_json(self) -> list[dict[str, Any]]:
        """Names, bytes and digests."""
        return [{"name": file.name, "bytes": file.size, "sha256": file.sha256} for file in self.files]


def pack(run: RunDir, repo: str, licence: str | None, secrets: Iterable[str] = ()) -> Upload:
    """Verify the adapter of ``run``, write its card, and look through all that would go.

    ``secrets``: values that must be in none of the files, such as the tokens of ``.env``. Raises UserError with everything
    that keeps the adapter from being pushed.
    """
    document = run.read()
    fix = "push from the folder that the training wrote: this file was changed, or is not a run's"
    if (resolved := content.recipe_of(document)) is None:
        what = "contains no recipe that can be read: the card must name the base model"
        raise UserError(Problem(what, file=str(run.run_json), key="recipe", fix=fix))
    raise_if(_refusals(run, resolved))
    if problems := find_problems(run.adapter, "adapter", allow_extra=True):
        fix = "--from export makes it again: clustertune run RECIPE --run-dir RUN --from export --to export"
        raise UserError(
            [*problems, Problem("the adapter is incomplete or damaged: nothing is pushed", file=str(run.adapter), fix=fix)]
        )
    sealed = read_manifest(run.adapter, "adapter")
    card = build_card(run, document, resolved, sealed, repo, licence)
    names = dict.fromkeys(
        name for name in (*ADAPTER_FILES, *sorted(sealed.files)) if name in sealed.files and is_adapter_file(name)
    )
    files = [File(name, sealed.files[name].size, sealed.files[name].sha256, run.adapter / name) for name in names]
    text = card.encode()
    files.append(File(CARD, len(text), hashlib.sha256(text).hexdigest(), data=text))
    raise_if([problem for file in files for problem in look_through(file, secrets)])
    left = sorted({*list_files(run.adapter), *sealed.files} - {*names, MANIFEST})
    return Upload(tuple(files), card, tuple(left))


def _refusals(run: RunDir, resolved: Resolved) -> list[Problem]:
    """Why a run has no adapter to push."""
    if run.adapter.is_dir():
        return []
    if resolved.lora is None:
        text = "trains all parameters: there is no adapter, and a whole model is never pushed from here"
        return [Problem(text, file=str(run.path), fix="hf upload OWNER/NAME RUN/merged is the Hub's own command for a model")]
    return [Problem("has no adapter yet", file=str(run.path), fix="clustertune run RECIPE --to export")]


def look_through(file: File, secrets: Iterable[str] = ()) -> list[Problem]:
    """Tokens in what would go: all of a text, and the header of the tensors."""
    text = _text_of(file)
    known = [value for value in secrets if len(value) >= 8]
    if not any(value in text for value in known) and not holds_secret(text):
        return []
    fix = "take it out where it came from, and make a new token: this one is known to a file now"
    return [Problem("holds what looks like a token (not shown)", file=str(file.path or file.name), fix=fix)]


def _text_of(file: File) -> str:
    """What of a file can be read as text. Raises UserError where tensors have no readable header."""
    if file.path is None:
        return file.data.decode(errors="replace")
    if file.path.suffix != ".safetensors":
        return file.path.read_text(encoding="utf-8", errors="replace")
    try:
        header = read_header(file.path)
    except (OSError, ValueError) as error:
        raise UserError(f"is not a safetensors file: {error}", file=str(file.path)) from None
    # Names of tensors are checked against the architecture at the export; what else stands there is free text.
    return "\n".join([json.dumps(header.metadata), *(tensor.name for tensor in header.tensors)])


# --- card -----------------------------------------------------------------------------------------------------------------

# The model card: what the run says about itself. The same run gives the same bytes, so that a second push changes nothing.

_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_LOCAL = (("data", "input"), ("model", "path"), ("staged",))
"""Keys of a recipe that hold a path: left out of the card, which is for other machines."""
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{1,60}")
"""The form of the Hub's licence identifiers."""


def build_card(
    run: RunDir, document: Mapping[str, Any], resolved: Resolved, sealed: Manifest, repo: str, licence: str | None
) -> str:
    """``README.md`` of the repository. ``document``: the run's ``run.json``, ``resolved`` its recipe. ``licence``: one of the
    Hub's identifiers; None: that of the base model.

    Raises UserError for a licence that cannot be one.
    """
    from jinja2 import Environment, StrictUndefined

    if licence is not None and not _LICENCE.fullmatch(licence):
        fix = "one of the Hub's: https://huggingface.co/docs/hub/repositories-licenses"
        raise UserError(f"{licence!r} is not a licence identifier", file="command line", key="--license", fix=fix)
    recipe = resolved.recipe.model_dump(mode="json")
    metrics = read_metrics(run.metrics)
    scored = _read_scores(run)
    model = recipe["model"]
    notes = content.warnings_of(resolved, metrics, {"meta": sealed.meta})
    if model["weights"] != "hub":
        notes.append("The base model has random weights and was made by the run itself: nobody else can load this adapter.")
    distributed = document.get("distributed") or {}
    ranks = distributed.get("world_size") or resolved.world_size
    found = (
        ("training loss", content.train_losses(metrics)),
        ("eval loss", content.eval_losses(metrics)),
        ("reward of the held-out prompts", content.held_out_rewards(metrics)),
    )
    losses = [(f"{name}, {loss[0]}", ", ".join(f"{value:.4f}" for value in loss[1])) for name, loss in found if loss]
    seconds = next((stage.seconds for stage in metrics.stages if stage.stage == "train"), None)  # of all tries that ended
    values = {
        "metadata": _metadata(recipe, scored, licence, repo),
        "title": repo.partition("/")[2],
        "notes": notes,
        "made": document,
        "model": model,
        "recipe_name": resolved.name,
        "data": recipe["data"],
        "licence": licence,
        "distribution": format_distribution(distributed),
        "ranks": ranks,
        "nodes": source.nodes_of(run.path, document),
        "gpus": distributed.get("gpu0"),
        "sealed": sealed,
        "losses": losses,
        "hours": f"{seconds / 3600:.2f}" if seconds is not None else None,
        **_scores(scored),
        "repo": repo,
        "own_template": resolved.chat_template is not None,
        "recipe": _recipe_text(resolved),
        "get": get,
    }
    environment = Environment(autoescape=False, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701
    environment.filters["cell"] = _cell
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(values)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _metadata(recipe: Mapping[str, Any], scored: Mapping[str, Any] | None, licence: str | None, repo: str) -> str:
    """The YAML head that the Hub reads. A base or a data set that it does not have is not named there."""
    import yaml

    model, data = recipe["model"], recipe["data"]
    found: dict[str, Any] = {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["clustertune", "lora"]}
    found["tags"].append(recipe["trainer"])
    if model["weights"] == "hub" and "/" in model["name"]:
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
    """The Hub's ``results`` of each whole benchmark: anything else is not a result that others may compare with."""
    found = []
    for name, row in (get(scored, "tasks") or {}).items():
        data = get(scored, "details", name, "data") or []
        if get(scored, "details", name, "comparable") is not True or len(data) != 1:
            continue
        values = {evaluation.shown(key): value for key, value, _ in evaluation.metrics(row) if is_number(value)}
        metrics = [{"type": key, "value": round(float(value), 6), "name": key} for key, value in values.items()]
        task = {"type": "text-generation", "name": "Text Generation"}
        found.append({"task": task, "dataset": {"type": data[0], "name": name}, "metrics": metrics})
    return found


def _scores(scored: Mapping[str, Any] | None) -> dict[str, Any]:
    found = content.eval_content(scored)
    if scored is None or found is None:
        return {"scores": [], "scores_of": "", "score_notes": [], "paired": [], "paired_about": ""}
    rows = [
        [name, evaluation.shown(key), number(value), number(error)]
        for name, row in scored["tasks"].items()
        for key, value, error in evaluation.metrics(row)
    ]
    beside = {"paired": found["paired"], "paired_about": get(scored, "paired_method")}
    return {"scores": rows, "scores_of": found["subtitle"], "score_notes": found["notes"], **beside}


def _recipe_text(resolved: Resolved) -> str:
    """The sections that the recipe sets, without paths, and without the defaults of TRL and PEFT."""
    import yaml

    stated = {".".join(key.split(".")[:2]) for key in resolved.origins}
    clean = resolved.recipe.model_dump(mode="json")
    for section, complete in (("train", resolved.train_args), ("lora", resolved.lora)):
        clean[section] = {key: value for key, value in (complete or {}).items() if f"{section}.{key}" in stated}
    if "train.global_batch_size" in stated:
        clean["train"]["global_batch_size"] = resolved.global_batch_size
    for *sections, key in _LOCAL:
        inner = clean
        for section in sections:
            inner = inner.get(section) or {}
        inner.pop(key, None)
    return yaml.safe_dump(_as_text(clean), sort_keys=False)


def _as_text(value: Any) -> Any:
    """A recipe without what it leaves empty."""
    if not isinstance(value, dict):
        return value
    inner = {key: _as_text(part) for key, part in value.items()}
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


def show(upload: Upload, name: str, public: bool, as_json: bool) -> None:
    """What would be sent, and where."""
    visibility = "public" if public else "private"
    if as_json:
        document: dict[str, Any] = {"repo": name, "status": "planned", "private": not public, "files": upload.as_json()}
        emit_json({**document, "left_out": list(upload.left_out), "card": upload.card})
        return
    say(f"{visibility} repository {name}, {upload.size:,} bytes:")
    for file in upload.files:
        say(f"  {file.name}  {file.size:,} bytes  sha256 {file.sha256}")
    typer.echo(upload.card, nl=False)  # what a person saves or reads
