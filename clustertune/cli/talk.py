"""``clustertune chat`` and ``clustertune serve``: talk to a trained model, here or by an OpenAI-compatible server."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from clustertune.cli.arguments import ClusterOption, Device, path_given
from clustertune.console import say

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
    device: Device = None,
) -> None:
    """Answers are streamed. /new forgets the conversation, /exit ends. Sampling settings come from the model's
    generation_config.json.
    """
    from clustertune.evaluate import chat as chatting
    from clustertune.evaluate import serve_model
    from clustertune.launch.named_runs import merged_or_model

    facts = serve_model.facts(merged_or_model(model), max_new_tokens)
    with facts.within_limits() as tokenizing:
        chatting.converse(chatting.Talk(facts, tokenizing, device, max_new_tokens, greedy), facts.folder, prompt, system)


def serve(
    model: Model,
    port: Annotated[
        int, typer.Option(min=1024, max=65535, help="Port on 127.0.0.1 only, because there is no password.")
    ] = 8000,
    submit: Annotated[bool, typer.Option("--submit", help="Run as a Slurm job; prints the ssh line to reach it.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, or the job.")] = False,
    cluster: ClusterOption = None,
    time: Annotated[
        str, typer.Option(metavar="TIME", help="With --submit: the job's time limit, in Slurm's form.")
    ] = "04:00:00",
) -> None:
    """Uses vLLM if it is installed, else transformers' own server. Requests name the model "model" with vLLM, and its folder
    with transformers.
    """
    from clustertune.cluster import load
    from clustertune.evaluate import serve_model
    from clustertune.launch.named_runs import merged_or_model

    folder = merged_or_model(model)
    if submit:
        serve_model.submit(folder, port, load.load_cluster(cluster), time, dry_run)
        return
    command, environ = serve_model.server_command(folder, port, load.load_cluster(cluster) if cluster else None)
    if dry_run:
        typer.echo(shlex.join(command))
        return
    say(f"http://127.0.0.1:{port}/v1: {shlex.join(command)}")
    os.execvpe(command[0], command, {**os.environ, **environ})  # noqa: S606 - a list, no shell
