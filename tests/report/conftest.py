"""A finished run with an adapter, and a Hub to push it to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from clustertune import manifest
from clustertune.rundir import RunDir
from tests.fake_hub import FakeHub

RECORDED = Path(__file__).resolve().parent / "recorded"


@pytest.fixture
def trained(tmp_path: Path) -> RunDir:
    """The recorded run with an adapter of two tensors in the place of its own, which has only a manifest."""
    run = RunDir(tmp_path / "run")
    shutil.copytree(RECORDED, run.path)
    reseal(run)
    return run


def reseal(run: RunDir, config: dict[str, Any] | None = None, metadata: dict[str, str] | None = None) -> None:
    """Write the adapter again, and its manifest."""
    meta = json.loads((RECORDED / "adapter" / manifest.MANIFEST).read_bytes())["meta"]
    shutil.rmtree(run.adapter)
    run.adapter.mkdir()
    tensors = {f"base_model.model.layer.lora_{part}.weight": np.ones((4, 8), np.float32) for part in "AB"}
    save_file(tensors, run.adapter / "adapter_model.safetensors", metadata=metadata or {"format": "pt"})
    body = {"base_model_name_or_path": "tiny-llama", "peft_type": "LORA", "r": 8, **(config or {})}
    (run.adapter / "adapter_config.json").write_text(json.dumps(body))
    manifest.seal(run.adapter, "adapter", meta)


def change(run: RunDir, act: Callable[[dict[str, Any]], None]) -> None:
    """Edit ``run.json``."""
    document = run.read()
    act(document)
    run.run_json.write_text(json.dumps(document))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub on loopback. Whatever a client keeps in mind of another one is of no use here."""
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    found = FakeHub()
    server = found.serve()
    yield found
    server.shutdown()
    server.server_close()
