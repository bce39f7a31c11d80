"""Servers that stand for vLLM's: no GPU and no vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from clustertune.evaluate.servers import Servers, ServingJob
from clustertune.launch.rendezvous import free_port
from clustertune.launch.serving import Serving

FAKE = [sys.executable, str(Path(__file__).with_name("fake_vllm.py"))]
Start = Callable[..., Servers]


def job(folder: Path, model: Path | str = "model", servers: int = 1, **more: object) -> ServingJob:
    """A job of this machine; each test has ports of its own."""
    shape = Serving(servers, 1, 1, 2048, 16)
    port = free_port(21_000 + hash(str(folder)) % 9_000)
    return ServingJob(str(model), shape, "float32", str(folder), port, str(folder / "cache"), **more)  # type: ignore[arg-type]


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
