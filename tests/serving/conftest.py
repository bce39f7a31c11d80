"""Servers that stand for vLLM's: no GPU and no vLLM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from clustertune.evaluate.servers import Servers, ServingJob, new_key
from clustertune.launch.agent import process_state
from clustertune.launch.node import free_port
from clustertune.launch.serving import Serving
from tests.slurm import wait_for

FAKE = [sys.executable, str(Path(__file__).with_name("fake_vllm.py"))]
Start = Callable[..., Servers]


def job(folder: Path, model: Path | str = "model", servers: int = 1, **more: object) -> ServingJob:
    """A job of this machine; each test has ports of its own."""
    shape = Serving(servers, 1, 1, 2048, 16)
    port = free_port(21_000 + hash(str(folder)) % 9_000)
    folder.mkdir(parents=True, exist_ok=True)
    described = ServingJob(str(model), shape, "float32", str(folder), port, str(folder / "cache"), new_key(folder))
    return replace(described, **more)  # type: ignore[arg-type]


def program(folder: Path, exports: str = "") -> Path:
    """The fake as one file."""
    path = folder / "vllm"
    path.write_text(f'#!/bin/sh\n{exports}exec {FAKE[0]} {FAKE[1]} "$@"\n')
    path.chmod(0o700)
    return path


def step(folder: Path, node: int) -> subprocess.Popen[bytes]:
    """One node's program as srun starts it, with the fake in vLLM's place."""
    (folder / "pids").mkdir(exist_ok=True)
    environ = {**os.environ, "CLUSTERTUNE_VLLM": str(program(folder)), "FAKE_PIDS": str(folder / "pids")}
    words = [sys.executable, "-m", "clustertune.evaluate.servers", str(folder), str(node)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, env=environ)


def processes(folder: Path) -> list[int]:
    """The servers and their engines."""
    return [int(pid) for path in (folder / "pids").iterdir() for pid in path.read_text().split()]


def alive(pids: list[int]) -> list[int]:
    """Those that run still."""
    return [pid for pid in pids if process_state(pid) not in ("", "Z")]


def gone(pids: list[int]) -> bool:
    """Whether all end within 20 s."""
    return bool(wait_for(lambda: not alive(pids), f"the end of {pids}", 20))


def without(model: Path, folder: Path, name: str) -> Path:
    """A copy of a model, without a manifest, that lacks a tensor; its name with ``[1:]``: that lacks a row of it."""
    shutil.copytree(model, folder)
    (folder / "MANIFEST.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    if name.endswith("[1:]"):
        tensors[name[:-4]] = tensors[name[:-4]][1:].clone()
    else:
        tensors.pop(name, None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A function that starts servers with the given modes and waits until they answer."""
    with ExitStack() as stack:

        def begin(*modes: object, wait: bool = True) -> Servers:
            described = job(tmp_path / f"servers-{len(modes)}", servers=len(modes))
            monkeypatch.setenv("FAKE_MODES", json.dumps({str(described.port + i): mode for i, mode in enumerate(modes)}))
            pids = tmp_path / "pids"
            pids.mkdir(exist_ok=True)
            monkeypatch.setenv("FAKE_PIDS", str(pids))
            found = stack.enter_context(Servers(described, program=FAKE))
            if wait:
                found.wait()
            return found

        yield begin
