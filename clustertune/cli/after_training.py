"""What is done with a trained model: ``chat``, ``serve`` and ``push``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from clustertune import secrets
from clustertune.cli.arguments import AsJson, Device, TemplateArguments, path_given, template_arguments
from clustertune.console import escape, reply, say
from clustertune.errors import UserError
from clustertune.rundir import RunDir

Model = Annotated[
    Path,
    path_given("A run folder, to use its merged model, or a model folder.", "RUN|MODEL"),
]


def chat(
    model: Model,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Print the answer to this and exit: for scripts.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Token limit per answer.")] = 512,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always pick the likeliest token: the same answer each time.")
    ] = False,
    chat_template_kwargs: TemplateArguments = None,
    device: Device = None,
) -> None:
    """Answers are streamed. /new forgets the conversation, /exit ends. Sampling settings come from the model's
    generation_config.json.
    """
    from clustertune.evaluate import chat as chatting
    from clustertune.launch.cluster_paths import merged_or_model

    arguments = template_arguments(chat_template_kwargs)
    facts = chatting.facts(merged_or_model(model), max_new_tokens)
    with facts.within_limits() as tokenizing:
        talk = chatting.Talk(facts, tokenizing, device, max_new_tokens, greedy, arguments)
        chatting.converse(talk, facts.folder, prompt, system)


def serve(
    model: Model,
    port: Annotated[
        int, typer.Option(min=1024, max=65535, help="Port on 127.0.0.1 only, because there is no password.")
    ] = 8000,
    chat_template_kwargs: TemplateArguments = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command.")] = False,
) -> None:
    """Uses vLLM if it is installed, else transformers' own server. Requests name the model "model" with vLLM, and its folder
    with transformers.
    """
    from clustertune.evaluate.chat import server_command
    from clustertune.evaluate.servers import offline_environment
    from clustertune.launch.cluster_paths import merged_or_model

    command, environ = server_command(merged_or_model(model), port, template_arguments(chat_template_kwargs))
    if dry_run:
        typer.echo(escape(shlex.join(command)))
        return
    say(f"http://127.0.0.1:{port}/v1: {shlex.join(command)}")
    os.execvpe(command[0], command, {**offline_environment(), **environ})  # noqa: S606 - a list, no shell


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
    from clustertune.launch.cluster_paths import existing_run
    from clustertune.report import push as hub

    run = RunDir(existing_run(run_dir))
    name = hub.check_name(repo or secrets.read_env(secrets.DEFAULT, lambda _note: None).get("HF_REPO_ID"))
    upload = hub.upload_for(run, name, licence)
    for left in upload.left_out:
        say(f"note: {left} stays here: only the adapter and its card are pushed")
    if dry_run:
        hub.show(upload, name, public, as_json)
        return
    if not publish:
        fix = "look at it with --dry-run, then give --publish"
        raise UserError("nothing is sent without --publish", file="command line", key="--publish", fix=fix)
    upload, done = hub.send(run, name, public=public, licence=licence)
    what = "already there, nothing was sent" if done.status == "unchanged" else f"pushed {upload.size:,} bytes in one commit"
    reply(as_json, {"repo": name, **vars(done), "private": not public, "files": upload.as_json()}, f"{what}: {done.url}")
