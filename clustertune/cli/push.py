"""``clustertune push``: a run's adapter to the Hub, uploaded only with --publish, private by default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clustertune import secrets
from clustertune.cli.arguments import AsJson, path_given
from clustertune.console import reply, say
from clustertune.errors import UserError
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
    from clustertune.launch.named_runs import existing_run
    from clustertune.push import hub
    from clustertune.push import upload as packing

    run = RunDir(existing_run(run_dir))
    name = hub.check_name(repo or secrets.read_env(secrets.DEFAULT, lambda _note: None).get("HF_REPO_ID"))
    packing.refuse_models(run)
    upload = hub.upload_for(run, name, licence)
    for left in upload.left_out:
        say(f"note: {left} stays here: only the adapter and its card are pushed")
    if dry_run:
        packing.show(upload, name, public, as_json)
        return
    if not publish:
        fix = "look at it with --dry-run, then give --publish"
        raise UserError("nothing is sent without --publish", file="command line", key="--publish", fix=fix)
    upload, done = hub.send(run, name, public=public, licence=licence)
    what = "already there, nothing was sent" if done.status == "unchanged" else f"pushed {upload.size:,} bytes in one commit"
    reply(as_json, {"repo": name, **vars(done), "private": not public, "files": upload.as_json()}, f"{what}: {done.url}")
