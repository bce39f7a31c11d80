"""The run folder: where everything of one run lies, who may write in it, and what is finished.

``runs/<recipe>/<run-id>/`` with ``run.json`` (written first), ``accelerate.yaml`` (and ``deepspeed.json``) as they were
resolved, ``metrics.jsonl``, ``stages/``, ``attempts/``, ``logs/``, ``data/``, ``model/`` (a locally made one),
``checkpoints/``, ``adapter/``, ``merged/``, ``eval/``, ``report.html`` and ``report.json``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from clustertune import lock
from clustertune.errors import UserError
from clustertune.manifest import read_object, read_whole, write_durably

if TYPE_CHECKING:
    from clustertune.cluster.schema import Cluster
    from clustertune.resolve.resolved import Resolved

Stage = Literal["prepare", "train", "export", "merge", "eval", "report"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""The chain, in order."""
SCORES = "scores"
"""What happens within ``train``, between two attempts, where the recipe asks for scores while training."""
ROLLOUT_SERVERS = "CLUSTERTUNE_ROLLOUT_SERVERS"
"""The variable that tells ranks the file with their servers' addresses and key: ``{"urls": [...], "key": ...}``."""
UNSAVED = "CLUSTERTUNE_UNSAVED"
"""The variable with which ranks save no checkpoint: those of a benchmark."""
_BEFORE = ("lock", "owner.json", "requeued.json", "attempts", "jobs", "logs")
"""What a job makes in its run folder before ``run.json``."""
_TORN = (".run.json.", ".owner.json.", ".requeued.json.")
"""How the temporary files begin that a command leaves when it is killed before it has written ``run.json``."""


def keep_private(cluster: Cluster | None = None) -> None:
    """From here on only its user reads what this process makes; with ``storage.group_reads`` of the cluster the group too."""
    os.umask(0o027 if cluster is not None and cluster.storage.group_reads else 0o077)


@dataclass(frozen=True)
class Description:
    """What a submission decided: its jobs read it and no file that it was made from."""

    resolved: Resolved
    cluster: Cluster | None
    """None: of a run that no cluster file had a part in."""
    evaluation: dict[str, Any] | None = None
    """How the stage ``eval`` answers its prompts (``launch.serving.Evaluation``); None: it was not decided."""


def default_run_dir(resolved: Resolved, runs: Path) -> Path:
    """``runs/<recipe>/<fingerprint>``: the same command finds the same run, another setting another."""
    return runs / resolved.name / resolved.fingerprint()[:12]


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
    def scores(self) -> Path:
        """Evaluations of the base and of checkpoints while the training is under way (``eval.during``)."""
        return self.path / "scores"

    @property
    def evaluating(self) -> Path:
        """How far the evaluation has come; only while it is under way."""
        return self.path / "evaluating.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def attempt(self, number: int) -> Path:
        """Logs and exit records of one attempt at training."""
        return self.path / "attempts" / f"{number:04d}"

    def foreign(self) -> list[str]:
        """What lies in the folder, if it is one, that no run has there before its ``run.json``."""
        names = sorted(entry.name for entry in self.path.iterdir()) if self.path.is_dir() else []
        return [name for name in names if name not in _BEFORE and not (name.startswith(_TORN) and name.endswith(".tmp"))]

    def read(self) -> dict[str, Any]:
        """``run.json``. Raises UserError where the folder is not a run."""
        try:
            if self.run_json.exists() and not self.run_json.is_file():
                raise UserError("unreadable: is not a plain file", file=str(self.run_json))
            body: dict[str, Any] = json.loads(read_whole(self.run_json))
        except FileNotFoundError:
            raise UserError(
                "is not a run folder: it has no run.json", file=str(self.path), fix="clustertune run RECIPE --run-dir DIR"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"unreadable: {error}", file=str(self.run_json)) from None
        return body

    def create(self, resolved: Resolved, **facts: Any) -> None:
        """Write ``run.json``, and the files of the distribution. ``facts``: of the command and the machine."""
        resolved = replace(resolved, template_date=date.today().isoformat())
        document = {"recipe": resolved.as_dict(), "fingerprint": resolved.fingerprint()}
        self.path.mkdir(parents=True, exist_ok=True)
        write_durably(self.run_json, json.dumps({**document, "created": round(time.time(), 3), **facts}, indent=1) + "\n")
        self.write_own_files(resolved)

    def resolved(self) -> Resolved:
        """The recipe as this run resolved it. Raises UserError where it does not have the fingerprint that was recorded."""
        from clustertune.resolve.resolved import Resolved

        body = self.read()
        try:
            resolved = Resolved.from_dict(body["recipe"])
            expected = str(body["fingerprint"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"contains no resolved recipe: {error!r}", file=str(self.run_json)) from None
        if (digest := resolved.fingerprint()) == expected:
            return resolved
        text = f"its recipe was changed: fingerprint {digest[:12]} found, {expected[:12]} expected"
        fix = "give another --run-dir"
        raise UserError(text, file=str(self.run_json), key="recipe", fix=fix)

    def pinned(self, resolved: Resolved) -> Resolved:
        """A recipe with the day that this run has for its chat template, and what its rows give it."""
        return resolved.pinned_as(self.description().resolved)

    def pin(self, row_arguments: Mapping[str, Any]) -> None:
        """Record what all rows give the chat template."""
        recipe = self.read()["recipe"]
        if recipe["row_arguments"] != row_arguments:
            self.update(recipe={**recipe, "row_arguments": dict(row_arguments)})

    def is_of(self, resolved: Resolved) -> bool:
        """Whether this run is of this recipe, on whatever ranks. Raises UserError where ``run.json`` cannot be read."""
        return bool(self.read().get("fingerprint") == resolved.fingerprint())

    def description(self) -> Description:
        """What the newest submission decided. Raises UserError where ``run.json`` does not say it."""
        from clustertune.cluster.schema import Cluster
        from clustertune.resolve.resolved import Resolved

        body = self.read()
        try:
            cluster = None if body.get("cluster") is None else Cluster.model_validate(body["cluster"])
            return Description(Resolved.from_dict(body["recipe"]), cluster, body.get("evaluation"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            fix = "clustertune submit again: its jobs read what it writes"
            raise UserError(f"cannot be read: {error!r}", file=str(self.run_json), fix=fix) from None

    def describe(
        self, resolved: Resolved, cluster: Cluster | None = None, jobs: Mapping[str, Any] | None = None, evaluation: Any = None
    ) -> None:
        """Record what was decided. None leaves a part as it is recorded.

        ``jobs``: the shape of each stage's; ``evaluation``: the dataclass of ``launch/serving.py``.
        """
        now: dict[str, Any] = {"recipe": self.pinned(resolved).as_dict()}
        if cluster is not None:
            now["cluster"] = cluster.model_dump(mode="json")
        if jobs is not None:
            now["jobs"] = {stage: vars(shape) for stage, shape in jobs.items()}
        if evaluation is not None:
            now["evaluation"] = asdict(evaluation)
        now, body = json.loads(json.dumps(now)), self.read()
        if any(body.get(key) != value for key, value in now.items()):
            self.update(**now)

    @property
    def accelerate_file(self) -> Path:
        """The accelerate configuration that this run's ranks read (:meth:`write_own_files`)."""
        from clustertune.recipe import accelerate_file as acc

        return self.path / acc.ACCELERATE

    def write_own_files(self, resolved: Resolved) -> None:
        """Write the distribution as it was resolved, in the ecosystem's own files: what the run's ranks read.

        The recipe's may be edited while a job waits. Absolute paths in them are this run's: a run folder that was moved is
        written again by the next command.
        """
        if resolved.recipe.megatron is not None:
            return  # Megatron-Bridge reads neither
        import yaml

        from clustertune.recipe import accelerate_file as acc

        deepspeed = self.path / acc.DEEPSPEED if resolved.deepspeed is not None else None
        if deepspeed is not None:
            _write_if_other(deepspeed, json.dumps(resolved.deepspeed, indent=1) + "\n")
        body = acc.written(resolved.accelerate, Path(resolved.folder), deepspeed and deepspeed.absolute())
        _write_if_other(self.accelerate_file, yaml.safe_dump(body, sort_keys=False))

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
        return read_object(self.path / "stages" / f"{name}.json") or None

    def finish_stage(self, name: str, seconds: float, **values: Any) -> dict[str, Any]:
        """Record a stage as done, durably."""
        (self.path / "stages").mkdir(exist_ok=True)
        times = {"seconds": round(seconds, 3), "finished": round(time.time(), 3)}
        record = {"stage": name, "status": "done", **times, **values}
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
    if not path.is_file() or read_whole(path).decode() != text:
        write_durably(path, text)
