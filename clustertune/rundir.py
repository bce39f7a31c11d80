"""The run folder: where everything of one run lies, who may write in it, and what is finished.

``runs/<recipe>/<run-id>/`` with ``run.json`` (written first), ``accelerate.yaml`` (and ``deepspeed.json``) where the command
line changed the recipe's, ``metrics.jsonl``, ``stages/``, ``attempts/``, ``logs/``,
``data/``, ``model/`` (a locally made one), ``checkpoints/``, ``adapter/``, ``merged/``, ``eval/``, ``report.html``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertune import lock
from clustertune.errors import Problem, UserError
from clustertune.manifest import write_durably

if TYPE_CHECKING:
    from clustertune.config.resolved import Resolved

STAGES = ("prepare", "train", "export", "merge", "eval", "report")
"""The chain, in order."""


@dataclass(frozen=True)
class RunDir:
    """Paths of one run; nothing is created by asking for one."""

    path: Path

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def tokens(self) -> Path:
        """What the ranks read of the data, below the conversations that it was made of."""
        return self.data / "tokens"

    @property
    def shared_tokens(self) -> Path | None:
        """Where the points of a sweep keep the tokens that several of them read; None where this run is no point."""
        points = self.path.absolute().parent
        is_point = points.name == "points" and (points.parent / "sweep.json").is_file()
        return points.parent / "tokens" if is_point else None

    def local_model(self, name: str) -> Path:
        """Where a model that the run makes itself lies; the folder has the model's name, which the adapter records."""
        return self.path / "model" / name.rsplit("/", 1)[-1]

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def merged(self) -> Path:
        return self.path / "merged"

    @property
    def eval(self) -> Path:
        return self.path / "eval"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def attempt(self, number: int) -> Path:
        """Logs and exit records of one attempt at training."""
        return self.path / "attempts" / f"{number:04d}"

    def read(self) -> dict[str, Any]:
        """``run.json``. Raises UserError where the folder is no run."""
        try:
            found: dict[str, Any] = json.loads(self.run_json.read_bytes())
        except FileNotFoundError:
            raise UserError(
                Problem("is no run folder: it has no run.json", file=str(self.path), fix="clustertune run RECIPE --run-dir DIR")
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(Problem(f"unreadable: {error}", file=str(self.run_json))) from None
        return found

    def resolved(self) -> Resolved:
        """The recipe as this run resolved it. Raises UserError where it does not have the fingerprint that was recorded."""
        from clustertune.config.resolved import Resolved

        body = self.read()
        try:
            found = Resolved.from_dict(body["recipe"])
            if (digest := found.fingerprint()) == body.get("fingerprint", digest):
                return found
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(Problem(f"holds no resolved recipe: {error!r}", file=str(self.run_json))) from None
        text = f"its recipe was changed: fingerprint {digest[:12]} found, {body['fingerprint'][:12]} expected"
        fix = "give another --run-dir; go on with this one only by the version of clustertune that wrote it"
        raise UserError(Problem(text, file=str(self.run_json), key="recipe", fix=fix))

    def accelerate_file(self, resolved: Resolved) -> Path:
        """The accelerate configuration that this run's ranks read: the recipe's, or the run's own (:meth:`write_own_files`)."""
        from clustertune.config import beside

        return self.path / beside.ACCELERATE if resolved.own_accelerate else resolved.accelerate_path

    def write_own_files(self, resolved: Resolved) -> None:
        """Write what the command line laid over the recipe's distribution, where it did: files that the run's ranks read.

        Absolute paths in them are this run's: a run folder that was moved is written anew by the next command.
        """
        if not resolved.own_accelerate:
            return
        import yaml

        from clustertune.config import beside

        deepspeed = self.path / beside.DEEPSPEED if resolved.deepspeed_overrides else None
        if deepspeed is not None:
            _write_if_other(deepspeed, json.dumps(resolved.deepspeed, indent=1) + "\n")
        body = beside.written(resolved.accelerate, Path(resolved.folder), deepspeed and deepspeed.absolute())
        _write_if_other(self.path / beside.ACCELERATE, yaml.safe_dump(body, sort_keys=False))

    def update(self, **values: Any) -> None:
        """Set keys of ``run.json``, durably."""
        write_durably(self.run_json, json.dumps({**self.read(), **values}, indent=1) + "\n")

    def new_attempt(self) -> int:
        """Take the next attempt number; two processes can never take the same one.

        Checkpoints count too (``step-000020.a3``): someone who clears ``attempts/`` must not bring a number back.
        """
        (self.path / "attempts").mkdir(exist_ok=True)
        taken = [int(p.name) for p in (self.path / "attempts").iterdir() if p.name.isdigit()]
        if self.checkpoints.is_dir():
            suffixes = (p.name.partition(".a")[2] for p in self.checkpoints.iterdir())
            taken += [int(suffix) if suffix.isdigit() else 1 for suffix in suffixes]
        number = 1 + max(taken, default=0)
        while True:
            try:
                self.attempt(number).mkdir()
                return number
            except FileExistsError:
                number += 1

    def stage(self, name: str) -> dict[str, Any] | None:
        """The record of a finished stage, or None."""
        try:
            found: dict[str, Any] = json.loads((self.path / "stages" / f"{name}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return found

    def finish_stage(self, name: str, seconds: float, **values: Any) -> dict[str, Any]:
        """Record a stage as done, durably."""
        (self.path / "stages").mkdir(exist_ok=True)
        record = {"stage": name, "status": "done", "seconds": round(seconds, 3), "finished": round(time.time(), 3), **values}
        write_durably(self.path / "stages" / f"{name}.json", json.dumps(record, indent=1) + "\n")
        return record

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One writer at a time. Raises UserError (exit 75) naming the process that works here."""
        with lock.held(
            self.path / "lock", "works in this run folder", shown=self.path, fix="wait for it, or give another --run-dir"
        ):
            yield


def _write_if_other(path: Path, text: str) -> None:
    """Durably, and only where something else stands there: ranks may be reading it."""
    if not path.is_file() or path.read_text() != text:
        write_durably(path, text)
