"""The page: whole, self-contained, safe, the same each time, and there for a run that failed."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.monitor.sampler import TelemetryWriter
from clustertune.report import metrics, plots
from clustertune.report.page import build, render
from tests.monitor import simulated

RECORDED = Path(__file__).parent / "recorded"
HOSTILE = "<script>alert('x')</script>"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A copy of the recorded run, with the checkpoints that were kept."""
    shutil.copytree(RECORDED, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-000008.a3").mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the plots, where only the words matter: they are most of a page's time."""
    for name in ("lines", "bars"):
        monkeypatch.setattr(plots, name, lambda title, *_args, **_options: plots.Plot(title, "<svg></svg>", [], []))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the recorded run."""
    run = tmp_path_factory.mktemp("whole") / "run"
    shutil.copytree(RECORDED, run)
    (run / "checkpoints" / "step-000008.a3").mkdir(parents=True)
    return build(run).read_text(encoding="utf-8")


class Text(HTMLParser):
    """The words that a reader sees, and whether every element is closed."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []
        self.headings: list[str] = []
        self.svgs = 0
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.svgs += tag == "svg"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open and data.strip():
            self.words.append(" ".join(data.split()))
            if self.open and self.open[-1] in ("h2", "h3"):
                self.headings.append(self.words[-1])


def read(run_dir: Path) -> tuple[str, Text]:
    html = build(run_dir).read_text(encoding="utf-8")
    return html, Text(html)


def test_a_whole_run_shows_everything(whole: str) -> None:
    page = Text(whole)
    for heading in ("Training", "Evaluation", "Stages", "Attempts", "Checkpoints", "Recipe", "Derived", "Environment"):
        assert heading in page.headings
    for plot in ("Loss", "Token accuracy", "Learning rate", "Gradient norm", "Throughput", "Step time", "Peak memory"):
        assert plot in page.headings
    # Each has its numbers; the axis of time is not a drawing.
    assert page.svgs == whole.count("<summary>Numbers</summary>") - 1 == 8
    text = "\n".join(page.words)
    for fact in (
        "8.325 → 8.109", "217,088", "step-000008.a3", "0123456789abcdef0123456789abcdef01234567", "gloo",
        "prompt_level_strict_acc", "16.67 %", "6.30 %", "Not the IFEval benchmark", "lora.target_modules", "base sft-lora",
        "train.gradient_accumulation_steps", "interrupted, saved, continues with the same command, exit 75",
        "1 min 18 s",  # all three tries of the training
    ):  # fmt: skip
        assert fact in text, fact
    assert page.words.count("kept") == 1 and page.words.count("removed") == 4
    assert len(whole) < 300_000


def test_nothing_is_fetched_and_nothing_runs(whole: str) -> None:
    outside = re.findall(r"""(?:src|href|url|@import)\s*[=(]?\s*["']?\s*((?:https?:)?//[^"') ]+)""", whole)
    assert outside == []
    assert "<script" not in whole and "<link" not in whole and "<img" not in whole
    assert "@font-face" not in whole


def edit(path: Path, change: Any) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.usefixtures("undrawn")
def test_text_never_becomes_markup(run_dir: Path) -> None:
    """Wherever a person or a model can put text."""
    run = json.loads((run_dir / "run.json").read_text())
    run["recipe"]["name"] = run["host"]["name"] = HOSTILE
    run["command"].append(HOSTILE)
    run["recipe"].update(warnings=[HOSTILE], architecture={**run["recipe"]["architecture"], HOSTILE: HOSTILE})
    (run_dir / "run.json").write_text(json.dumps(run))
    edit(run_dir / "eval" / "results.json", lambda d: d["tasks"]["ifeval"].update({HOSTILE: 0.5}))
    with (run_dir / "metrics.jsonl").open("a") as out:
        out.write(json.dumps({"event": "checkpoint", "step": 1, "attempt": 1, "path": HOSTILE}) + "\n")
        out.write(json.dumps({"event": "stage", "stage": HOSTILE, "status": "done", "seconds": 3}) + "\n")
    html, page = read(run_dir)
    assert "<script" not in html and page.words.count(HOSTILE) >= 5


@pytest.mark.usefixtures("undrawn")
def test_the_answer_comes_first_and_stands_in_the_document(tmp_path: Path) -> None:
    """Sixteen H100, an attempt that was killed, a base that was scored: figures by hand; then the same run without a price."""
    now = 1_795_420_000.0
    run = simulated.make(tmp_path / "run", now, steps=200)
    (run.attempt(2) / "outcome.json").write_text(json.dumps({"code": 0, "time": now}))
    shutil.copytree(RECORDED / "eval", run.eval)
    row = {"base": 0.38, "tuned": 0.44, "difference": 0.06, "ci95": [0.01, 0.11], "verdict": "better"}
    scored = {"tasks": {"t": {"acc,none": 0.44, "n": 9}}, "paired": {"t": {"acc,none": row}}}
    edit(run.eval / "results.json", lambda d: d.update(scored, base={"model": "b"}, paired_method="x"))
    edit(run.run_json, lambda d: d.update(cluster={"monitor": {"co2_kg_per_kwh": 0.5}}, host={"gpus": 8}))
    with run.metrics.open("a") as out:
        out.write(json.dumps({"event": "stage", "stage": "eval", "status": "done", "seconds": 3600}) + "\n")
    for began, joules in ((now, 1.8e6), (now + 60, 3.6e6)):  # two tries of the evaluation, each with a sampler of its own
        head = {"host": "node0", "node": 0, "gpus": ["x"], "energy": "counter"}
        writer = TelemetryWriter(run.path / metrics.TELEMETRY, "node0", head)
        for share in (0.5, 1.0):
            writer.add(metrics.TelemetryRow(began + 50 * share, -int(began), {}, ({"energy_j": joules * share},)))
    first, second = read(run.path)[1].words[4:6]
    found = json.loads((run.path / "report.json").read_text())
    assert found["answer"] == [first, second]
    assert "better than its base" in first and "+6.0 points with a 95 % interval from +1.0 to +11.0" in first
    cost = found["cost"]
    hours = (110 + 110) / 3600 * 16 + 8
    assert cost["total"]["gpu_hours"] == pytest.approx(hours) and cost["total"]["usd"] == pytest.approx(hours * 2.90)
    assert cost["stages"]["eval"]["gpu_hours"] == 8 and cost["stages"]["eval"]["kwh"] == pytest.approx(1.5)
    assert cost["total"]["kwh"] == pytest.approx(1.5 + 16 * 700 * 300 / 3.6e6, rel=0.01) and not cost["energy_is_whole"]
    assert cost["total"]["co2_kg"] == pytest.approx(cost["total"]["kwh"] / 2) and "at least" in second
    # The first attempt took 105 steps of a second, the second resumed from step 100.
    assert cost["lost"]["seconds"] == pytest.approx(5) and cost["lost"]["usd"] == pytest.approx(5 / 3600 * 16 * 2.90)
    assert [attempt["exit_code"] for attempt in cost["attempts"]] == [75, 0]
    (score,) = found["scores"]
    assert score == {"task": "t", "score": "acc,none", **row}
    edit(run.run_json, lambda d: d.update(jobs={"eval": {"nodes": 2, "gpus_per_node": 8}}))
    read(run.path)
    several = json.loads((run.path / "report.json").read_text())["cost"]["stages"]["eval"]
    assert several["gpu_hours"] == 16 and several["kwh"] is None, "of several nodes only the first is measured"
    hours += 8
    edit(run.run_json, lambda d: d["distributed"].update(gpu0="NVIDIA Toaster"))
    shutil.rmtree(run.path / "telemetry")
    read(run.path)
    cost = json.loads((run.path / "report.json").read_text())["cost"]
    assert cost["total"]["usd"] is None and cost["total"]["kwh"] is None and cost["total"]["gpu_hours"] == pytest.approx(hours)
    with pytest.raises(UserError, match="--out"):
        build(run.path, tmp_path / "x.json")


def test_nothing_on_a_page_turns_the_reading_direction(tmp_path: Path) -> None:
    """Names, metrics and prompts of others reach report, live page and compare by one function."""
    template = tmp_path / "page.html.jinja"
    template.write_text("<p>{{ name }}</p><pre>{{ lines }}</pre>{{ svg|safe }}")
    text = render(template, {"name": "a\u202eb\x1b[31m\u2066c", "lines": "one\ntwo", "svg": "<svg/>"})
    assert text == "<p>a\\u202eb\\x1b[31m\\u2066c</p><pre>one\ntwo</pre><svg/>"
