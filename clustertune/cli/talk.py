"""``clustertune chat`` and ``clustertune serve``: talk to a trained model, here or by an OpenAI-compatible server."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from clustertune.arguments import ClusterOption, Device, merged_or_model, path_given
from clustertune.cli.deferred import deferred
from clustertune.console import say
from clustertune.errors import UserError, raise_if

with deferred():
    from clustertune import merge as merging
    from clustertune.cluster import load
    from clustertune.evaluate import model as models
    from clustertune.evaluate import run as evaluation
    from clustertune.evaluate import servers
    from clustertune.launch import batch, cluster_paths, serving, srun
    from clustertune.launch import shape as shapes
    from clustertune.recipe import sections
Model = Annotated[
    Path,
    path_given("A run folder, to use its merged model, or a model folder.", "RUN|MODEL"),
]
END = ("/exit", "/quit")


def add(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(chat)
    app.command()(serve)


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
    """Talk to a model in the terminal, in its own chat template.

    Answers are streamed. /new forgets the conversation, /exit ends. Sampling settings come from the model's
    generation_config.json.
    """
    facts = _facts(model, max_new_tokens)
    with facts.within_limits() as tokenizing:
        _converse(_Talk(facts, tokenizing, device, max_new_tokens, greedy), facts.folder, prompt, system)


def _converse(talk: _Talk, folder: Path, prompt: str | None, system: str | None) -> None:
    start = [{"role": "system", "content": system}] if system else []
    if prompt is not None:
        talk.answer([*start, {"role": "user", "content": prompt}])
        return
    say(f"{folder}: /new begins again, /exit ends")
    turns = list(start)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return
        if text in END:
            return
        if text == "/new":
            turns = list(start)
        elif text:
            turns.append({"role": "user", "content": text})
            turns.append({"role": "assistant", "content": talk.answer(turns)})


class _Talk:
    """A loaded model."""

    def __init__(
        self, facts: models.ModelFacts, tokenizing: Any, device: str | None, max_new_tokens: int, greedy: bool
    ) -> None:
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.tokenizer, self.tokenizing = facts.tokenizer, tokenizing
        self.model = evaluation.load_lm(facts.folder, models.pick_device(device, facts.folder), 1).model
        self.settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, **({"do_sample": False} if greedy else {})}
        self.room = facts.max_length - max_new_tokens

    def answer(self, turns: list[dict[str, str]]) -> str:
        """Print the answer to stdout as it is made; returns it. Raises UserError where the conversation leaves no room."""
        import torch
        from transformers import TextStreamer

        try:
            text = self.tokenizing.render(turns, add_generation_prompt=True)
        except ValueError as error:
            raise UserError(f"the chat template refuses the conversation: {error}") from None
        # As apply_chat_template has it: the template writes BOS itself.
        ids = torch.tensor(self.tokenizing.tokenize([text], add_special_tokens=False), device=self.model.device)
        count = ids.shape[1]
        if count > self.room:
            text = f"{count} tokens of conversation, at most {self.room} leave room for an answer"
            raise UserError(text, key="--max-new-tokens", fix="/new forgets the conversation; or lower it")
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        made = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=streamer, **self.settings)
        return str(self.tokenizer.decode(made[0][count:], skip_special_tokens=True))


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
    """Serve a model with an OpenAI-compatible API.

    Uses vLLM if it is installed, else transformers' own server. Requests name the model "model" with vLLM, and its folder
    with transformers.
    """
    folder = merged_or_model(model)
    if submit:
        _submit(folder, port, cluster, time, dry_run)
        return
    command, environ = _server(folder, port, cluster)
    if dry_run:
        typer.echo(shlex.join(command))
        return
    say(f"http://127.0.0.1:{port}/v1: {shlex.join(command)}")
    os.execvpe(command[0], command, {**os.environ, **environ})  # noqa: S606 - a list, no shell


def _server(folder: Path, port: int, cluster: str | None) -> tuple[list[str], dict[str, str]]:
    """The server's command and what it needs in its environment. Raises UserError where there is no server."""
    facts = _facts(folder, 1)
    raise_if(merging.check_tensors(folder))
    program = servers.find_program()
    if program is None and cluster:  # one without containers names vLLM's program
        settings = load.load_cluster(cluster).container
        program = settings.vllm if settings.runtime == "none" else None
    if program:
        from dataclasses import replace

        job = servers.job_here(facts)
        cache = f"{tempfile.gettempdir()}/clustertune-vllm-{os.getuid()}"
        one = replace(job, shape=replace(job.shape, servers=1), port=port, cache=cache)
        found = servers.commands(one, 0)[0]
        return [program, *found.arguments], found.environment
    if find_spec("fastapi") and find_spec("uvicorn"):
        program = str(Path(sys.executable).with_name("transformers"))
        dtype = servers.dtype_of(folder)
        command = [program, "serve", str(folder), "--host", servers.HOST, "--port", str(port), "--dtype", dtype]
        return command, {"HF_HUB_OFFLINE": "1"}
    fix = f"{servers.PROGRAM}=/path/to/bin/vllm, or pip install fastapi uvicorn; clustertune chat needs neither"
    raise UserError("neither vLLM nor what transformers' server needs is installed here", fix=fix)


def _submit(folder: Path, port: int, cluster: str | None, time: str, dry_run: bool) -> None:
    """One job of one node: the GPUs that hold the model. Raises UserError."""
    import json

    machine = load.load_cluster(cluster)
    size = serving.ModelSize.of(json.loads((folder / "config.json").read_bytes()), models.weight_bytes(folder))
    found = serving.serving(size, shapes.usable_gpu_bytes(machine), machine.compute.gpus, 1, documents=1)
    if found is None:
        text = f"{size.weights / 1e9:,.0f} GB do not fit a node of cluster {machine.name}"
        raise UserError(text, file=str(folder), fix="an evaluation may span nodes, this command does not")
    gpus = found.gpus_per_node if machine.compute.gpus else 0
    share = gpus / machine.compute.gpus if gpus else 1.0
    minutes = int(sections.parse_minutes(time) or 0)
    if not minutes:
        raise UserError(f"{time!r} is not a time limit", file="command line", key="--time", fix="--time 04:00:00")
    cpus, memory = max(1, int(machine.compute.threads * share)), max(1, int(machine.compute.memory_gb * share * 0.95))
    shape = shapes.JobShape(1, gpus, 1, cpus, memory, minutes, *shapes.site_fields(machine))
    vllm = machine.container.model_copy(update={"image": machine.container.vllm or machine.container.image})
    inside = machine.model_copy(update={"container": vllm})
    command_line = [sys.executable, "-m", "clustertune", "serve", str(folder), "--port", str(port)]
    command_line += ["--cluster", load.argument(cluster)] if cluster and vllm.runtime == "none" else []
    command = srun.in_step(command_line, inside, binds=[folder], nodes=1, cpus=cpus, gpus=bool(gpus), environ={})
    script = "#!/usr/bin/env bash\n#SBATCH --output=%x-%j.log\nset -euo pipefail\nexec " + shlex.join(command) + "\n"
    note = "Derived by clustertune serve --submit from the model and the cluster file."
    job = batch.BatchJob(
        shape=shape,
        script=batch.render("serve", shape, note, script, alone=False),
        folder=(cluster_paths.runs(machine) / "serve" / folder.parent.name).absolute(),
        arguments=(),
        file="serve.sbatch",
    )
    if dry_run:
        job.show(as_json=False)
        return
    number = job.submit(machine, False, (("the model", folder),))
    say(f"its log: {job.folder}/serve-{number}.log; squeue --job {number} --format '%T %N' says when and where it runs")
    login = next((host.name for host in machine.with_role("login")), "LOGIN")
    say(f"then, from your machine: ssh -N -L {port}:127.0.0.1:{port} -J {login} $(ssh {login} squeue -hj {number} -o %B)")


def _facts(path: Path, tokens: int) -> models.ModelFacts:
    facts, problems = models.check_model(merged_or_model(path), tokens)
    if facts is None:
        raise UserError(problems)
    return facts
