"""Report, live page, runs, watch and compare name what happened: model, data, devices, money."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from clustertune.monitor.status import Watcher
from clustertune.monitor.status_page import draw
from clustertune.report import comparison, plots
from clustertune.report.page import build
from clustertune.resolve.resolve import resolve
from clustertune.rundir import RunDir
from tests.monitor import simulated

REFERENCE = "llama405b-oasst2"


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are most of a page's time, and say none of this."""
    for name in ("lines", "bars"):
        monkeypatch.setattr(plots, name, lambda title, *_args, **_options: plots.Plot(title, "<svg></svg>", [], []))


def made(path: Path, *overrides: str, recipe: str = REFERENCE, tiny: bool = False, device: str = "cuda") -> RunDir:
    """A run of two ranks on a cluster whose file has H100s; ``device``: what its first rank recorded."""
    run = simulated.make(path, time.time(), nodes=1, gpus=2, steps=20, restart=False)
    document = json.loads(run.run_json.read_text())
    document["recipe"] = resolve(recipe, overrides, tiny=tiny, ranks=2).as_dict()
    document["distributed"] |= {"device": device, "gpu0": simulated.GPU if device == "cuda" else None}
    document["host"], document["cluster"] = {"gpus": 2}, {"name": "c", "compute": {"gpu": "H100"}}
    run.run_json.write_text(json.dumps(document))
    return run


def answer(run: RunDir) -> tuple[str, dict[str, Any]]:
    build(run.path)
    document = json.loads(run.report.with_suffix(".json").read_text())
    return " ".join(document["answer"]), document


def test_a_tiny_run_on_processors_claims_no_published_model_no_gpu_and_no_money(tmp_path: Path) -> None:
    run = made(tmp_path / "run", tiny=True, device="cpu")
    text, document = answer(run)
    assert "random weights" in text and "scaled-down" in text and "2 processes without a GPU" in text
    assert "OpenAssistant" not in text and "tiny-oasst2" in text
    assert "US dollars" not in text and "GPU-hours" not in text
    assert document["cost"]["total"]["usd"] is None and document["cost"]["hours_of"] == "process"
    page = run.report.read_text()
    assert ">process-hours</th>" in page and ">US dollars</th>" not in page
    found = Watcher(run.path).look()
    live, row = draw(found), found.summary(run.path)
    assert "Process-hours" in live and "US dollars" not in live and "GPU-hours" not in live
    assert row["gpu_hours"] is None and row["usd"] is None and found.as_dict()["usd"] is None
    entry = comparison.read(run.path)
    assert entry.values["usd"] is None and entry.values["gpu_hours"] is None
    assert "random weights" in entry.values["model"] and entry.values["dataset"] == "tiny-oasst2"


def test_a_run_on_gpus_keeps_its_model_its_price_and_its_hours(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    text, document = answer(run)
    assert text.startswith("meta-llama/Llama-3.1-405B-Instruct was fine-tuned") and "OpenAssistant/oasst2" in text
    assert "2 GPUs" in text and "US dollars" in text and document["cost"]["hours_of"] == "GPU"
    assert ">US dollars</th>" in run.report.read_text()


@pytest.mark.parametrize(
    ("overrides", "there", "absent"),
    [
        (("data.input=other.jsonl", "data.revision=null"), "other.jsonl", "OpenAssistant"),
        (("data.input=other.jsonl", "data.name=mine", "data.revision=null"), "mine", "other.jsonl"),
        (("model.path=weights/of-mine",), "weights/of-mine", "random"),
        (("model.weights=random", "model.revision=null"), "random weights", "GPU-hours of"),
    ],
)
def test_rows_and_weights_of_the_command_line_are_named(
    tmp_path: Path, overrides: tuple[str, ...], there: str, absent: str
) -> None:
    text, _ = answer(made(tmp_path / "run", *overrides))
    assert there in text and absent not in text


def test_a_run_that_recorded_no_device_is_not_priced_without_any_gpu(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    document = json.loads(run.run_json.read_text())
    document["distributed"], document["host"], document["cluster"] = {}, {"gpus": 0}, {}
    run.run_json.write_text(json.dumps(document))
    assert "without a GPU" in answer(run)[0]
