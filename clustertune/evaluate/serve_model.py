"""A model behind an OpenAI-compatible API: the server's command here, or a Slurm job of it."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from clustertune import merge as merging
from clustertune.cluster import load
from clustertune.cluster.schema import Cluster
from clustertune.console import say
from clustertune.errors import UserError, raise_if
from clustertune.evaluate import model as models
from clustertune.evaluate import servers
from clustertune.launch import batch, cluster_paths, serving, srun
from clustertune.launch import shape as shapes
from clustertune.recipe import sections


def server_command(folder: Path, port: int, cluster: Cluster | None) -> tuple[list[str], dict[str, str]]:
    """The server's command and what it needs in its environment. Raises UserError where there is no server."""
    known = facts(folder, 1)
    raise_if(merging.check_tensors(folder))
    program = servers.find_program()
    if program is None and cluster and cluster.container.runtime == "none":  # one without containers names vLLM's program
        program = cluster.container.vllm
    if program:
        job = servers.job_here(known)
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


def submit(folder: Path, port: int, cluster: Cluster, time: str, dry_run: bool) -> None:
    """One job of one node: the GPUs that hold the model. Raises UserError."""
    size = serving.ModelSize.of(json.loads((folder / "config.json").read_bytes()), models.weight_bytes(folder))
    found = serving.serving(size, shapes.usable_gpu_bytes(cluster), cluster.compute.gpus, 1, documents=1)
    if found is None:
        text = f"{size.weights / 1e9:,.0f} GB do not fit a node of cluster {cluster.name}"
        raise UserError(text, file=str(folder), fix="an evaluation may span nodes, this command does not")
    gpus = found.gpus_per_node if cluster.compute.gpus else 0
    share = gpus / cluster.compute.gpus if gpus else 1.0
    minutes = int(sections.parse_minutes(time) or 0)
    if not minutes:
        raise UserError(f"{time!r} is not a time limit", file="command line", key="--time", fix="--time 04:00:00")
    cpus, memory = max(1, int(cluster.compute.threads * share)), max(1, int(cluster.compute.memory_gb * share * 0.95))
    shape = shapes.JobShape(1, gpus, 1, cpus, memory, minutes, *shapes.site_fields(cluster))
    vllm = cluster.container.model_copy(update={"image": cluster.container.vllm or cluster.container.image})
    inside = cluster.model_copy(update={"container": vllm})
    command_line = [sys.executable, "-m", "clustertune", "serve", str(folder), "--port", str(port)]
    command_line += ["--cluster", load.reference(cluster)] if vllm.runtime == "none" else []
    command = srun.in_step(command_line, inside, binds=[folder], nodes=1, cpus=cpus, gpus=bool(gpus), environ={})
    script = "#!/usr/bin/env bash\n#SBATCH --output=%x-%j.log\nset -euo pipefail\nexec " + shlex.join(command) + "\n"
    note = "Derived by clustertune serve --submit from the model and the cluster file."
    job = batch.BatchJob(
        shape=shape,
        script=batch.render("serve", shape, note, script, alone=False),
        folder=(cluster_paths.runs(cluster) / "serve" / folder.parent.name).absolute(),
        arguments=(),
        file="serve.sbatch",
    )
    if dry_run:
        job.show(as_json=False)
        return
    number = job.submit(cluster, False, (("the model", folder),))
    say(f"its log: {job.folder}/serve-{number}.log; squeue --job {number} --format '%T %N' says when and where it runs")
    login = next((host.name for host in cluster.with_role("login")), "LOGIN")
    say(f"then, from your machine: ssh -N -L {port}:127.0.0.1:{port} -J {login} $(ssh {login} squeue -hj {number} -o %B)")


def facts(path: Path, tokens: int) -> models.ModelFacts:
    found, problems = models.check_model(path, tokens)
    if found is None:
        raise UserError(problems)
    return found
