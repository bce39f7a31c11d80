"""What is uploaded of a run: its adapter's files and its model card, and nothing else, in one commit by huggingface_hub."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clustertune import secrets
from clustertune.console import emit_json, escape, say, stderr
from clustertune.errors import ExitCode, Problem, UserError, raise_if
from clustertune.evaluate import scores as evaluation
from clustertune.export.export import ADAPTER_FILES, is_adapter_file
from clustertune.host.credentials import holds_secret
from clustertune.manifest import MANIFEST, Manifest, find_problems, list_files, read_manifest, require_whole
from clustertune.report import content, source
from clustertune.report.content import get, is_number, number
from clustertune.report.metrics import read_metrics
from clustertune.resolve.resolved import Resolved, format_distribution
from clustertune.rundir import RunDir
from clustertune.tensorfile import read_header

if TYPE_CHECKING:
    from huggingface_hub import HfApi


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
    raise_if([problem for file in files for problem in look_through(file, run, secrets)])
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


def look_through(file: File, run: RunDir, secrets: Iterable[str] = ()) -> list[Problem]:
    """Tokens and paths of this machine in what would go: all of a text, and the header of the tensors."""
    text, where = _text_of(file), str(file.path or file.name)
    problems = []
    if any(value in text for value in secrets if len(value) >= 8) or holds_secret(text):
        fix = "take it out where it came from, and make a new token: this one is known to a file now"
        problems.append(Problem("holds what looks like a token (not shown)", file=where, fix=fix))
    base = json.loads(text).get("base_model_name_or_path") if file.name == "adapter_config.json" else None
    paths = [str(run.path.resolve()), *([base] if isinstance(base, str) and base.startswith("/") else [])]
    if shown := next((path for path in paths if path in text), None):
        fix = "name the model by its Hub id, and data by its name, in the recipe"
        problems.append(Problem(f"names a path of this machine: {shown}", file=where, fix=fix))
    return problems


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
    curves = (
        ("training loss", content.train_losses(metrics)),
        ("eval loss", content.eval_losses(metrics)),
        ("reward of the held-out prompts", content.held_out_rewards(metrics)),
    )
    losses = [(f"{name}, {loss[0]}", ", ".join(f"{value:.4f}" for value in loss[1])) for name, loss in curves if loss]
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
        "recipe": (recipe_text := _recipe_text(resolved)),
        "fence": "`" * max([3, *(1 + len(run) for run in re.findall("`+", recipe_text))]),  # longer than any in it
        "get": get,
    }
    environment = Environment(autoescape=False, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701
    environment.filters |= {"cell": _cell, "line": _line, "code": _code, "code_cell": _code_cell}
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(values)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _metadata(recipe: Mapping[str, Any], scored: Mapping[str, Any] | None, licence: str | None, repo: str) -> str:
    """The YAML head that the Hub reads. A base or a data set that it does not have is not named there."""
    import yaml

    model, data = recipe["model"], recipe["data"]
    metadata: dict[str, Any] = {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["clustertune", "lora"]}
    metadata["tags"].append(recipe["trainer"])
    if model["weights"] == "hub" and "/" in model["name"]:
        metadata["base_model"] = model["name"]
        metadata["base_model_relation"] = "adapter"
    if licence:
        metadata["license"] = licence
    elif "base_model" in metadata:
        link = f"https://huggingface.co/{model['name']}"
        metadata |= {"license": "other", "license_name": "as-the-base-model", "license_link": link}
    if "/" in str(data.get("name")):
        metadata["datasets"] = [data["name"]]
    if results := _benchmark_results(scored):
        metadata["model-index"] = [{"name": repo.partition("/")[2], "results": results}]
    return yaml.safe_dump(metadata, sort_keys=False)


def _benchmark_results(scored: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The Hub's ``results`` of each whole benchmark: anything else is not a result that others may compare with."""
    results = []
    for name, row in (get(scored, "tasks") or {}).items():
        data = get(scored, "details", name, "data") or []
        if get(scored, "details", name, "comparable") is not True or len(data) != 1:
            continue
        values = {evaluation.shown(key): value for key, value, _ in evaluation.metrics(row) if is_number(value)}
        metrics = [{"type": key, "value": round(float(value), 6), "name": key} for key, value in values.items()]
        task = {"type": "text-generation", "name": "Text Generation"}
        results.append({"task": task, "dataset": {"type": data[0], "name": name}, "metrics": metrics})
    return results


def _scores(scored: Mapping[str, Any] | None) -> dict[str, Any]:
    scores = content.eval_content(scored)
    if scored is None or scores is None:
        return {"scores": [], "scores_of": "", "score_notes": [], "paired": [], "paired_about": ""}
    rows = [
        [name, evaluation.shown(key), number(value), number(error)]
        for name, row in scored["tasks"].items()
        for key, value, error in evaluation.metrics(row)
    ]
    beside = {"paired": scores["paired"], "paired_about": get(scored, "paired_method")}
    return {"scores": rows, "scores_of": scores["subtitle"], "score_notes": scores["notes"], **beside}


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
        result = evaluation.read_result(run.eval)
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None


def _cell(value: Any) -> str:
    """A value in a table: one line, and nothing that ends a cell."""
    return "-" if value is None or value == "" else _line(value).replace("|", "\\|")


_MARKDOWN = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|[\\`*\[\]<>!#~{}&$]")
"""What begins an image, a link, HTML, a formula or emphasis; an underscore inside a word begins nothing."""


def _line(value: Any) -> str:
    """A value as plain words of one line of Markdown."""
    return _MARKDOWN.sub(r"\\\g<0>", " ".join(escape(str(value), keep="").split()))


def _code(value: Any) -> str:
    """A value as code within a line."""
    return f"`{' '.join(escape(str(value), keep='').split()).replace('`', chr(39))}`"


def _code_cell(value: Any) -> str:
    """A value as code in a table."""
    return _code(value).replace("|", "\\|")


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
    typer.echo(escape(upload.card), nl=False)  # what a person saves or reads


_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_REPO = re.compile(rf"{_NAME}/{_NAME}")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
MESSAGE = "Adapter trained with clustertune"


@dataclass(frozen=True)
class Pushed:
    """How it ended."""

    status: str
    """``pushed``, or ``unchanged`` where everything was there already."""
    url: str
    commit: str | None


def check_name(repo: str | None) -> str:
    """The repository's name. Raises UserError where it is none."""
    fix = "--repo OWNER/NAME, letters, digits, '.', '_' and '-'"
    if repo is None:
        raise UserError("no repository is named", file="command line", key="--repo", fix=fix)
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo or repo.endswith((".git", ".", "-")):
        raise UserError(f"{repo!r} is not a repository's name", file="command line", key="--repo", fix=fix)
    return repo


def upload_for(run: RunDir, repo: str, licence: str | None = None) -> Upload:
    """What would be sent of a run, looked through for the secrets of ``.env``. Raises UserError."""
    values = secrets.read_env(secrets.DEFAULT, lambda _note: None)
    return pack(run, repo, licence, [values[key] for key in secrets.SECRET if key in values])


def send(run: RunDir, repo: str, *, public: bool = False, licence: str | None = None) -> tuple[Upload, Pushed]:
    """Send a run's adapter and its card in one commit, with the token of ``.env``.

    Raises UserError: the repository's visibility, the token, the network. Nothing appears in the repository before the commit:
    after a failure the same command begins again. Files of the same names are replaced (the repository's history keeps them),
    others stay.
    """
    values = secrets.read_env(secrets.DEFAULT, lambda _note: None)
    upload = upload_for(run, check_name(repo), licence)
    if not (token := values.get("HF_TOKEN")):
        fix = "add a line HF_TOKEN=... to it; a token that may write: https://huggingface.co/settings/tokens"
        raise UserError("has no HF_TOKEN", file=str(secrets.DEFAULT), key="HF_TOKEN", fix=fix)
    secrets.drop()  # the client would take a token of the environment for requests of its own
    endpoint = (values.get("HF_ENDPOINT") or os.environ.get("HF_ENDPOINT") or "").rstrip("/") or None
    with secrets.lent({key: value for key, value in values.items() if key in _PROXIES}), _message(repo, endpoint, token):
        api = _connect(endpoint, token)
        before = _find(api, repo, public)
        if before is None:
            say(f"new {'public' if public else 'private'} repository {repo}")
            api.create_repo(repo, private=not public)
        with tempfile.TemporaryDirectory(prefix="clustertune-push-") as name:
            for file in upload.files:
                if file.path is None:
                    Path(name, file.name).write_bytes(file.data)
                else:
                    Path(name, file.name).symlink_to(file.path.resolve())
            commit = api.upload_folder(repo_id=repo, folder_path=name, commit_message=MESSAGE, parent_commit=before)
        status = "unchanged" if commit.oid == before else "pushed"
        return upload, Pushed(status, f"{api.endpoint}/{repo}", commit.oid)


def _connect(endpoint: str | None, token: str) -> HfApi:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    # It logs every request that it tries again; our own message says how the upload ended.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    # Xet sends the bytes to another host by another protocol; an adapter is small, and LFS answers for what it stored.
    constants.HF_HUB_DISABLE_XET = True
    if not stderr.is_terminal:
        disable_progress_bars()
    return HfApi(endpoint=endpoint, token=token)


def _find(api: HfApi, repo: str, public: bool) -> str | None:
    """The repository's newest commit; None: this token sees none. Raises UserError for the other visibility."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.model_info(repo)
    except RepositoryNotFoundError as error:
        if getattr(error.response, "status_code", None) == 401:
            api.whoami()  # the Hub answers 401 for what is not there, too: this tells a wrong token
        return None
    if not info.private and not public:
        fix = "--public says that you know, or --repo names another one"
        raise UserError("is public: the adapter would be seen by everybody", file=repo, key="--repo", fix=fix)
    if info.private and public:
        fix = "leave --public out, and change the visibility in the repository's settings"
        raise UserError("is private, and --public was asked for", file=repo, key="--public", fix=fix)
    return info.sha


@contextlib.contextmanager
def _message(repo: str, endpoint: str | None, token: str) -> Iterator[None]:
    """Everything that a client of the Hub raises, as a message without the token.

    What it prints meanwhile is dropped: warnings of the client name requests, and a person sees the message below.
    """
    import warnings

    from huggingface_hub.errors import HfHubHTTPError

    # The HTTPError of httpx or of httpx2: it differs with the release of the client.
    of_the_client: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except UserError:
        raise
    except (of_the_client, OSError, ValueError, RuntimeError) as error:
        raise _explain(error, repo, endpoint, token) from None


def _explain(error: Exception, repo: str, endpoint: str | None, token: str) -> UserError:
    """The Hub's own words, with what to do about them."""
    response = getattr(error, "response", None)
    status = int(getattr(response, "status_code", 0))
    lines = str(error).replace(token, "***").strip().splitlines()
    answer = (lines[0] if lines else type(error).__name__)[:300]
    where = endpoint or "https://huggingface.co"
    if isinstance(error, ValueError) or (400 <= status < 500 and status not in (409, 412, 429)):
        owner = repo.partition("/")[0]
        fix = f"HF_TOKEN of .env must be one that may write for {owner}: https://huggingface.co/settings/tokens"
        return UserError(f"the Hub refuses it ({status or type(error).__name__}): {answer}", file=repo, fix=fix)
    fix = "nothing was committed: run the same command again"
    return UserError(f"{where} answers {status or 'nothing'}: {type(error).__name__}: {answer}", fix=fix, code=ExitCode.AGAIN)
