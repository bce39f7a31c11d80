"""The commands of docs/plan.md and README.md as a person types them, and a run described as the page says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from clustertune.cluster.load import CLUSTERS
from clustertune.resolve.resolve import resolve
from tests.command import run

REFERENCE = ["plan", "llama405b-oasst2", "--cluster", "rno-rtxpro6000"]


def test_the_commands_of_the_documents() -> None:
    """Each ends with 0 and says what the page promises."""
    table = run(*REFERENCE)
    assert table.code == 0
    assert "fits" in table.out
    assert "The network between nodes" in table.out
    assert "parameters x 2 B / 16 ranks" in run(*REFERENCE, "--why", "memory").out
    advice = run(*REFERENCE, "--advise").out
    assert "HSDP 8 x 2" in advice
    assert "clustertune plan llama405b-oasst2 " in advice
    document = json.loads(run(*REFERENCE, "--json").out)
    promised = (
        "fits", "step_s", "step_parts_s", "peak_gib_per_gpu", "memory_parts_gib", "tokens_per_s", "mfu", "hours", "gpu_hours",
        "cost", "bottleneck", "assumptions", "bandwidth_source",
    )  # fmt: skip
    assert set(promised) <= set(document)
    compared = run("plan", "--compare", "llama405b-oasst2", "tiny-oasst2", "--cluster", "rno-rtxpro6000")
    assert compared.code == 0
    assert "tiny-oasst2" in compared.out


def test_learning_from_a_run(tmp_path: Path) -> None:
    """A calibration lies beside the cluster file, is used by the next plan, and says what it changed."""
    cluster = tmp_path / "mine.yaml"
    shutil.copy(CLUSTERS / "rno-rtxpro6000.yaml", cluster)
    text = cluster.read_text().replace("name: rno-rtxpro6000", "name: mine", 1)
    cluster.write_text(text)
    before = json.loads(run("plan", "llama405b-oasst2", "--cluster", str(cluster), "--json").out)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"recipe": resolve("llama405b-oasst2").as_dict()}))
    measured = 1.3 * before["step_s"]
    lines = [{"event": "start", "step": 0, "attempt": 1}]
    lines += [{"event": "step", "step": n, "attempt": 1, "seconds": measured if n > 2 else 5 * measured} for n in range(1, 21)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run("plan", "--calibrate", str(folder), "--cluster", str(cluster))
    assert done.code == 0, done.err
    assert "inter scale" in done.out
    assert "left as they were: compute scale" in done.out
    assert (tmp_path / "mine.calibration.json").is_file()
    after = json.loads(run("plan", "llama405b-oasst2", "--cluster", str(cluster), "--json").out)
    assert after["calibrated"] == ["inter_scale"]
    assert after["step_s"] == pytest.approx(measured, rel=0.05)
