"""A training job on the temporary Slurm, as a user submits it, and what can be seen of it from outside."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clustertune.testbed.cluster import TemporaryCluster
from tests.command import REPO, events
from tests.slurm import wait_for

RECIPE = "recipes/tiny-oasst2"
SETTINGS = [
    "train.max_steps=16",
    "train.save_steps=2",
    "train.eval_steps=100",
    "train.eval_on_start=false",
    "train.max_length=64",
]
"""Steps so short that a fault hits anything between them as well."""
SHAPE = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=2", "--mem=8G", "--time=01:00:00"]
PATIENCE = 400.0
"""Seconds for a whole job with its restarts on a loaded machine."""
CANARY = ("CANARY_TOKEN", "canary-1f9c")
"""A variable of the shell that submits the job that nothing happens to."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


@dataclass
class Job:
    """One submitted job. ``run`` is its run folder, ``log`` what it printed."""

    cluster: TemporaryCluster
    run: Path
    words: list[str] = field(default_factory=lambda: [RECIPE, "--tiny", "--to", "export", *SETTINGS])
    options: list[str] = field(default_factory=lambda: list(SHAPE))
    id: int = 0

    def submit(self, cwd: Path = REPO) -> Job:
        """``sbatch launch/run.sbatch``, from the checkout."""
        self.run.parent.mkdir(parents=True, exist_ok=True)
        options = [*self.options, f"--output={self.log}"]
        words = [*self.words, "--run-dir", str(self.run)]
        self.id = self.cluster.submit("launch/run.sbatch", *words, options=options, cwd=cwd)
        return self

    @property
    def log(self) -> Path:
        return self.run.with_suffix(".log")

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def steps(self, attempt: int | None = None) -> list[int]:
        """The optimizer steps in the metrics, of one attempt or of all."""
        return [e["step"] for e in events(self.run, "step") if attempt in (None, e["attempt"])]

    def attempts(self) -> int:
        """The highest attempt number."""
        folder = self.run / "attempts"
        return max((int(p.name) for p in folder.iterdir()), default=0) if folder.is_dir() else 0

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a moment of the job; fails where it ends before."""

        def holds() -> bool:
            state = self.cluster.job(self.id)["JobState"]
            assert condition() or state not in ENDED, f"{state} before {what}:\n{self.text}"
            return bool(condition())

        wait_for(holds, what, PATIENCE)

    def rank(self, node: int) -> int:
        """The process of the rank on a node, by its id out here."""
        found = [
            pid
            for pid in self.cluster.processes(node, "clustertune train", str(self.run))
            if b"launch.elastic" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return found[0]

    def end(self, patience: float = PATIENCE) -> dict[str, str]:
        """Wait for the end; a requeued job is released from its wait for the old credential."""
        deadline = time.monotonic() + patience
        while (found := self.cluster.job(self.id))["JobState"] not in ENDED:
            assert time.monotonic() < deadline, f"no end: {found['JobState']} {found.get('Reason')}\n{self.text}"
            if found["JobState"] == "PENDING" and found.get("Reason") == "BeginTime":
                self.cluster.release(self.id)
            elif found.get("Reason") == "launch_failed_requeued_held":
                # Slurm's own: the new start met what was left of the old one on a node that was cut off.
                self.cluster.run(["scontrol", "release", str(self.id)])
            elif "DRAINED" in found.get("Reason", ""):
                # Slurm drains a node whose old step did not die in time ("Kill task failed"): its administrator's turn.
                for node in self.cluster.run(["sinfo", "--noheader", "--states", "drain", "--format", "%n"]).stdout.split():
                    self.cluster.run(["scontrol", "update", f"nodename={node}", "state=resume"])
            time.sleep(0.2)
        assert "Traceback" not in self.text, self.text
        return found

    def adapter(self) -> str:
        """SHA-256 of the exported adapter."""
        return hashlib.sha256((self.run / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()

    def plan(self, attempt: int = 1) -> dict[str, Any]:
        body: dict[str, Any] = json.loads((self.run / "attempts" / f"{attempt:04d}" / "plan.json").read_bytes())
        return body


@pytest.fixture(scope="session")
def quiet(slurm_session: TemporaryCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job that nothing happens to. Read only."""
    job = Job(slurm_session, tmp_path_factory.mktemp("slurm") / "quiet")
    with pytest.MonkeyPatch.context() as patch:  # what a login shell may hold must not reach the job
        patch.setenv(*CANARY)
        job.submit()
    found = job.end()
    assert found["JobState"] == "COMPLETED" and found["ExitCode"] == "0:0", job.text
    yield job
