"""``clustertune push``: a run's adapter to the Hub, uploaded only with --publish, private by default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from clustertune import secrets
from clustertune.cli.arguments import AsJson, existing_run, path_given
from clustertune.console import emit_json, reply, say
from clustertune.errors import UserError
from clustertune.push.upload import Upload
from clustertune.rundir import RunDir


def push(
    run_dir: Annotated[Path, path_given("A run folder with an adapter.", "RUN")],
    repo: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Repository. Default: HF_REPO_ID in .env.", show_default=False)
    ] = None,
    publish: Annotated[bool, typer.Option("--publish", help="Upload. Without this option nothing leaves the machine.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Make the repository public. Default: private.")] = False,
    licence: Annotated[
        str | None,
        typer.Option(
            "--license", metavar="ID", help="License on the model card. Default: the base model's.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show files, sizes and card; needs no token.")] = False,
    as_json: AsJson = False,
) -> None:
    """Never uploads the base model or a merged model. HF_TOKEN must be in .env. Pushing the same adapter again changes
    nothing."""
    from clustertune.push import hub

    run = RunDir(existing_run(run_dir))
    name = hub.check_name(repo or secrets.read_env(secrets.DEFAULT, lambda _note: None).get("HF_REPO_ID"))
    _refuse_merged(run)
    upload = hub.upload_for(run, name, licence)
    for left in upload.left_out:
        say(f"note: {left} stays here: only the adapter and its card are pushed")
    if dry_run:
        _show(upload, name, public, as_json)
        return
    if not publish:
        fix = "look at it with --dry-run, then give --publish"
        raise UserError("nothing is sent without --publish", file="command line", key="--publish", fix=fix)
    upload, done = hub.send(run, name, public=public, licence=licence)
    what = "already there, nothing was sent" if done.status == "unchanged" else f"pushed {upload.size:,} bytes in one commit"
    reply(as_json, {"repo": name, **vars(done), "private": not public, "files": upload.as_json()}, f"{what}: {done.url}")


def _refuse_merged(run: RunDir) -> None:
    """A folder that is a model or an adapter by itself, given in the place of the run that made it."""
    if run.run_json.exists():
        return
    merged = any(run.path.glob("model*.safetensors"))
    if merged or (run.path / "adapter_config.json").exists():
        what = "is a whole model: only adapters are pushed" if merged else "is the adapter's own folder"
        raise UserError(what, file=str(run.path), fix="give the run folder: the card is made from what it holds")


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
