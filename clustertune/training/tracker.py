"""Trackers such as W&B mirror ``metrics.jsonl``; training neither waits for one nor ends for one that fails."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

MIRRORS = ("WandbCallback",)
"""Trainer callbacks that only report elsewhere."""
INIT_SECONDS = 20.0
"""How long W&B's server may take for its first answer; compute nodes often have no way out."""
FINISH_SECONDS = 30.0
"""How long a rank waits at its end for what is not uploaded yet; it stays in the run folder and can be synced later."""


class GuardedCallback:
    """A tracker's callback that is left out from its first failure on (wandb's service died, its socket was closed)."""

    def __init__(self, callback: Any, tell: Callable[[str], None]) -> None:
        self._callback, self._tell = callback, tell
        self._failed = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._callback, name)
        if not name.startswith("on_"):
            return found

        def event(*args: Any, **kwargs: Any) -> Any:
            if self._failed:
                return None
            try:
                return found(*args, **kwargs)
            except Exception as error:
                self._failed = True
                what = f"{type(error).__name__}: {error}".splitlines()[0]
                self._tell(f"note: {type(self._callback).__name__} is left out from here on: {what}; metrics.jsonl is complete")
                return None

        return event


def guard(callbacks: list[Any], tell: Callable[[str], None]) -> None:
    """Wrap the trackers among a Trainer's callbacks, in place."""
    callbacks[:] = [GuardedCallback(c, tell) if type(c).__name__ in MIRRORS else c for c in callbacks]


def start_wandb(key: str | None) -> tuple[bool, list[str]]:
    """Open this run at W&B, or in a folder below ``wandb/`` where its server does not answer; never raises.

    ``key`` is handed over in memory: as a variable it would be inherited by W&B's service process. Returns whether W&B is
    on, and a note for each thing that is not as asked. :func:`clustertune.training.build.set_tracker_environment` comes
    first.
    """
    try:
        import wandb

        notes: list[str] = []
        offline = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
        if not offline:
            try:
                wandb.init(settings=wandb.Settings(init_timeout=INIT_SECONDS, api_key=key))
                return True, notes
            except Exception as error:
                wandb.teardown()
                notes = [f"W&B is offline: {_first_line(error, key)}; {_SYNC}"]
        if os.environ.get("WANDB_MODE") != "disabled":
            os.environ["WANDB_MODE"] = "offline"
        wandb.init(settings=wandb.Settings(init_timeout=INIT_SECONDS, mode=os.environ["WANDB_MODE"]))
        return True, notes
    except Exception as error:
        return False, [f"W&B is left out: {_first_line(error, key)}; metrics.jsonl is complete"]


_SYNC = "'wandb sync' sends the run folder's wandb/offline-run-* later"


def _first_line(error: Exception, key: str | None) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text.replace(key, "***") if key else text


def finish_wandb(code: int, seconds: float = FINISH_SECONDS) -> bool:
    """Close the run at W&B, or its offline file. False where that takes longer: the caller must not wait at exit either."""
    wandb = sys.modules.get("wandb")
    if wandb is None or wandb.run is None:
        return True

    def finish() -> None:
        with contextlib.suppress(Exception):  # the training is over, and metrics.jsonl has all of it
            wandb.finish(exit_code=code)

    closing = threading.Thread(target=finish, daemon=True)
    closing.start()
    closing.join(seconds)
    return not closing.is_alive()
