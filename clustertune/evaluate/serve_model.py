"""A model behind an OpenAI-compatible API: the server's command."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from clustertune import merge as merging
from clustertune.errors import UserError, raise_if
from clustertune.evaluate import model as models
from clustertune.evaluate import servers


def server_command(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """The server's command and what it needs in its environment. Raises UserError where there is no server."""
    known = facts(folder, 1)
    raise_if(merging.check_tensors(folder))
    if program := servers.find_program():
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


def facts(path: Path, tokens: int) -> models.ModelFacts:
    found, problems = models.check_model(path, tokens)
    if found is None:
        raise UserError(problems)
    return found
