"""``clustertune push``: a run's adapter to the Hub, private, after an explicit word."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clustertune import secrets
from clustertune.arguments import AsJson, existing_folder, path_given
from clustertune.console import emit_json, say
from clustertune.errors import Problem, UserError
from clustertune.rundir import RunDir

if TYPE_CHECKING:
    from clustertune.push.upload import Upload

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_REPO = re.compile(rf"{_NAME}/{_NAME}")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(push)


def push(
    run_dir: Annotated[Path, path_given("A run folder with an adapter.", "RUN")],
    repo: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="The repository; else HF_REPO_ID of .env.", show_default=False),
    ] = None,
    publish: Annotated[bool, typer.Option("--publish", help="Send it. Without this word nothing leaves the machine.")] = False,
    public: Annotated[bool, typer.Option("--public", help="For everybody to see; else the repository is private.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Write over files of the repository that differ.")] = False,
    licence: Annotated[
        str | None,
        typer.Option("--license", metavar="ID", help="For the card; else the base model's.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show files, sizes and card; needs no token.")] = False,
    as_json: AsJson = False,
) -> None:
    """Send a run's adapter to the Hub, with a card made from the run.

    Never the base model, never a merged one. HF_TOKEN must be in .env. Pushing the same adapter again changes nothing.
    """
    run = RunDir(existing_folder(run_dir, "a run"))
    found = secrets.read_env(secrets.DEFAULT, lambda _note: None)
    name = _target(repo or found.get("HF_REPO_ID"))
    _refuse_merged(run)
    from clustertune.push.upload import pack

    upload = pack(run, name, licence, [found[key] for key in secrets.SECRET if key in found])
    for left in upload.left_out:
        say(f"note: {left} stays here: only the adapter and its card are pushed")
    if dry_run:
        _show(upload, name, public, as_json)
        return
    if not publish:
        fix = "look at it with --dry-run, then give --publish"
        raise UserError(Problem("nothing is sent without --publish", file="command line", key="--publish", fix=fix))
    if not (token := found.get("HF_TOKEN")):
        fix = "add a line HF_TOKEN=... to it; a token that may write: https://huggingface.co/settings/tokens"
        raise UserError(Problem("has no HF_TOKEN", file=str(secrets.DEFAULT), key="HF_TOKEN", fix=fix))
    _send(upload, name, token, found, public, replace, as_json)


def _send(upload: Upload, name: str, token: str, found: dict[str, str], public: bool, replace: bool, as_json: bool) -> None:
    from clustertune.push import hub

    secrets.drop()  # the client would take a token of the environment for requests of its own
    endpoint = found.get("HF_ENDPOINT") or os.environ.get("HF_ENDPOINT")
    target = hub.Target(name, public, replace, endpoint.rstrip("/") if endpoint else None)
    with secrets.lent({key: value for key, value in found.items() if key in _PROXIES}):
        done = hub.push(upload, target, token, say)
    if as_json:
        emit_json({"repo": name, **vars(done), "private": not public, "files": upload.as_json()})
        return
    what = "already there, nothing was sent" if done.status == "unchanged" else f"pushed {upload.size:,} bytes in one commit"
    say(f"{what}: {done.url}")


def _target(repo: str | None) -> str:
    """The repository's name. Raises UserError."""
    fix = "--repo OWNER/NAME, letters, digits, '.', '_' and '-'"
    if repo is None:
        raise UserError(Problem("no repository is named", file="command line", key="--repo", fix=fix))
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo or repo.endswith((".git", ".", "-")):
        raise UserError(Problem(f"{repo!r} is no repository's name", file="command line", key="--repo", fix=fix))
    return repo


def _refuse_merged(run: RunDir) -> None:
    """A folder that is a model or an adapter by itself, given in the place of the run that made it."""
    if run.run_json.exists():
        return
    merged = any(run.path.glob("model*.safetensors"))
    if merged or (run.path / "adapter_config.json").exists():
        what = "is a whole model: only adapters are pushed" if merged else "is the adapter's own folder"
        raise UserError(Problem(what, file=str(run.path), fix="give the run folder: the card is made from what it holds"))


def _show(upload: Upload, name: str, public: bool, as_json: bool) -> None:
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
