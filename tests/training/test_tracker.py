"""A tracker that fails under way is left out, once and with a word; whatever else fails is not hidden."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from clustertune.training import event_log


class WandbCallback(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.label = "mirror"

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        self.steps.append(state.global_step)
        if state.global_step == 2:
            raise ConnectionResetError("Connection lost\nmore")


class OtherCallback(WandbCallback):
    pass


def test_a_dead_tracker_does_not_end_the_training() -> None:
    """Trackers alone are guarded: what else fails is not hidden."""
    messages: list[str] = []
    for mirror in (WandbCallback(), OtherCallback()):
        callbacks = CallbackHandler([mirror], None, None, None, None)
        event_log.guard(callbacks.callbacks, messages.append)
        with pytest.raises(ConnectionResetError) if type(mirror) is OtherCallback else nullcontext():
            for step in (1, 2, 3):
                callbacks.call_event("on_log", SimpleNamespace(), TrainerState(global_step=step), TrainerControl(), logs={})
        assert mirror.steps == [1, 2] and callbacks.callbacks[0].label == "mirror"
    assert len(messages) == 1 and "Connection lost;" in messages[0] and "left out" in messages[0]


class Answer(http.server.BaseHTTPRequestHandler):
    """A server of W&B's address that knows nobody."""

    def do_POST(self) -> None:
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b'{"errors":[{"message":"user is not logged in"}]}')


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


@pytest.mark.parametrize("kind", ["refused", "unreachable"])
def test_a_key_that_is_not_taken_means_offline_and_nothing_is_lost(
    kind: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "c4nary0123456789abcdef0123456789abcdef01"
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", server if kind == "refused" else "http://127.0.0.1:1")
    before = dict(os.environ)
    wandb.teardown()
    try:
        monkeypatch.setattr(event_log, "INIT_SECONDS", 10.0)
        event_log.set_tracker_environment(tmp_path, "one-run", "project", has_key=True)
        assert "WANDB_MODE" not in os.environ
        on, notes = event_log.start_wandb(key)
        assert on and len(notes) == 1 and "W&B is offline" in notes[0] and "wandb sync" in notes[0]
        assert wandb.run is not None and wandb.run.settings.mode == "offline" and wandb.run.id == "one-run"
        wandb.log({"loss": 1.0})
        assert event_log.finish_wandb(0)
    finally:
        wandb.teardown()
        for name in set(os.environ) - set(before):
            del os.environ[name]
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert not (tmp_path / ".netrc").exists()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
