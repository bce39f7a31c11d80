"""The report's part on saves, and the failure rate of a run, by which ``save.every: auto`` chooses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import ExitCode
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.report import cost
from clustertune.report.metrics import Metrics, read_metrics
from clustertune.resolve.resolve import resolve
from clustertune.rundir import RunDir

PROBLEM = {"message": "rank 1 left no record"}
ENDS: dict[str, dict[str, Any] | None] = {
    "finished": {"code": 0, "problems": []},
    "warned, saved": {"code": int(ExitCode.AGAIN), "problems": []},
    "refused": {"code": int(ExitCode.CONFIG), "problems": [PROBLEM]},
    "not finite": {"code": int(ExitCode.STOP), "problems": [PROBLEM]},
    "a rank was killed": {"code": int(ExitCode.AGAIN), "problems": [PROBLEM]},
    "failed": {"code": int(ExitCode.FAILED), "problems": [PROBLEM]},
    "a full disk": {"code": int(ExitCode.STORAGE), "problems": [PROBLEM]},
    "the node went": None,
}
ENDS["a port was taken"] = {**ENDS["a rank was killed"], "port_taken": True}  # type: ignore[dict-item]


def run_of(folder: Path, ends: list[str], nodes: int = 2, hours: float = 3.0) -> RunDir:
    """A run whose attempts took so many hours each, and ended so."""
    for number, end in enumerate(ends, 1):
        attempt = folder / "attempts" / str(number)
        attempt.mkdir(parents=True)
        names = tuple(Node(f"n{at}", f"n{at}") for at in range(nodes))
        AttemptPlan(number, names, 4, begun=1e6).write(attempt)
        (attempt / "rank-0.log").touch()
        os.utime(attempt / "rank-0.log", (0, 1e6 + hours * 3600))
        if (body := ENDS[end]) is not None:
            (attempt / "outcome.json").write_text(json.dumps({**body, "time": 1e6 + hours * 3600}))
    (folder / "run.json").write_text(json.dumps({"cluster": {"compute": {}}}))
    return RunDir(folder)


def test_the_report_shows_what_saves_took(tmp_path: Path) -> None:
    run = run_of(tmp_path, ["failed", "the node went", "finished"])
    event = {"event": "checkpoint", "attempt": 3, "bytes": 2**30, "save_copy_s": 0.2, "save_write_s": 40.0}
    lines = [
        {**event, "step": at, "save_stall_s": 0.3, "save_every_s": 600, "path": f"c/{at}", "status": "saved"} for at in (5, 9)
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = resolve("tiny-oasst2", ["save.every=auto", "save.milestones=[9]", "slurm.nodes=2"])
    found = cost.saves_as_dict(recipe, read_metrics(run.metrics), cost.of_attempts(run.path))
    assert found is not None
    assert (found["count"], found["every_seconds"], found["stall_seconds"], found["failures"]) == (2, 600, 0.3, 2)
    assert found["stall_share"] == pytest.approx(0.6 / sum(one.seconds(2e6) for one in cost.of_attempts(run.path)))
    shown = dict(cost.saves_rows(found))
    assert shown["saved every"] == "auto: 10 min 00 s in the end; and at 9"
    assert shown["saves"].startswith("2, 1.00 GiB")
    assert shown["ends without a warning"].startswith("2 in ")
    assert cost.saves_as_dict(None, Metrics(), ()) is None and cost.saves_rows(None) == []
