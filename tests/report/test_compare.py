"""Runs side by side: the source's own figures, runs that ended or were killed, and what is none of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.report import comparison, source
from clustertune.report.metrics import read_metrics
from clustertune.resolve.resolve import resolve
from tests.command import run

RECORDED = Path(__file__).with_name("recorded")
ONE = {
    "wall_time_s": 4.739885568618774, "approx_tokens_per_rank": 5120, "approx_tokens_per_s_per_rank": 1080.19, "world_size": 8,
    "gpu0": "NVIDIA H100 80GB HBM3", "torch": "2.5.1+cu121", "model": "mistralai/Mistral-7B-v0.1",
    "dataset": "yahma/alpaca-cleaned", "fsdp": True, "bf16": True,
}  # fmt: skip
TWO = ONE | {"wall_time_s": 54.17208671569824, "approx_tokens_per_s_per_rank": 94.51, "world_size": 16}
"""The published validation, on one node and on two."""


def written(path: Path, body: Any) -> Path:
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    return path


def made_run(path: Path, seconds: list[float], *, code: int | None = 0, **recipe: Any) -> Path:
    """A run folder with steps of these seconds; ``code`` None: killed."""
    path.mkdir()
    args = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_length": 512}
    resolved = resolve("mistral7b-alpaca").as_dict()
    resolved |= {"name": "mistral", "world_size": 4, "data_parallel_size": 4, "train_args": resolved["train_args"] | args}
    resolved |= recipe
    told = {
        "type": "FSDP",
        "fsdp_version": 2,
        "mesh": {"dp_shard": 4},
        "gpu0": ONE["gpu0"],
        "torch": "main",
        "device": "cuda:0",
    }
    written(path / "run.json", {"recipe": resolved, "distributed": told, "versions": {"torch": "main"}})
    events: list[dict[str, Any]] = [{"event": "start", "attempt": 1, "step": 0, "world_size": 4}]
    events += [
        {"event": "step", "attempt": 1, "step": n, "seconds": s, "loss": 2.0, "tokens": 10 * n, "memory_bytes": 2**31}
        for n, s in enumerate(seconds, start=1)
    ]
    events += [] if code is None else [{"event": "stop", "attempt": 1, "step": len(seconds), "exit_code": code, "reason": "x"}]
    written(path / "metrics.jsonl", "".join(json.dumps(event) + "\n" for event in events))
    return path


def test_the_sources_own_figures(tmp_path: Path) -> None:
    """A second node made each GPU 11 times slower: the table must say so, and that warm-up hides in both."""
    found = comparison.compare([written(tmp_path / "one.json", ONE), written(tmp_path / "two.json", TWO)])
    rows = {row[0]: row[1:] for row in comparison.cells(found)}
    assert rows["World size"] == ["8", "16"] and rows["Tokens / sec / rank, warm-up too"] == ["1,080", "94.5"]
    assert rows["Rate of a rank against the first"] == ["100%", "9%"] and rows["Wall time of all steps"] == ["4.74 s", "54.2 s"]
    assert sum(comparison.OF_THE_SOURCE in note for note in found.notes) == 2
    assert not any("differs" in note for note in found.notes)
    text = comparison.markdown(found)
    assert text.startswith("| Metric | one | two |\n| --- | --- | --- |\n| World size | 8 | 16 |\n")


def test_the_metrics_of_a_run_are_the_sources_fields_and_the_steady_rate(tmp_path: Path) -> None:
    """Field for field, so that whoever read the source's file can read ours."""
    path = made_run(tmp_path / "r", [5.0, 3.0, 1.0, 1.0, 2.0])
    assert source.write(json.loads((path / "run.json").read_text()), path) == path / "metrics.json"
    found = json.loads((path / "metrics.json").read_text())
    assert tuple(found) == (*ONE, "steady_tokens_per_s_per_rank") and tuple(ONE) == source.FIELDS
    assert found["wall_time_s"] == 12.0 and found["approx_tokens_per_rank"] == 5 * 6 * 512
    assert found["approx_tokens_per_s_per_rank"] == 1280.0 and found["steady_tokens_per_s_per_rank"] == 3072.0
    assert found.items() >= {"world_size": 4, "gpu0": ONE["gpu0"], "torch": "main", "fsdp": True, "bf16": True}.items()


def test_runs_and_sources_stand_together(tmp_path: Path) -> None:
    """Each kind is read; what makes them differ is said, not refused."""
    paths = [written(tmp_path / "one.json", ONE), made_run(tmp_path / "killed", [2.0, 1.0, 1.0, 1.0], code=None), RECORDED]
    found = comparison.compare(paths)
    body = found.as_dict()
    kinds = [entry["kind"] for entry in body["runs"]]
    assert kinds == ["metrics", "run", "run"]
    killed = body["runs"][1]
    assert killed["status"] == "lost" and killed["steady_tokens_per_s_per_rank"] == 3072.0
    notes = "\n".join(found.notes)
    differ = ("Model differs", "Recipe differs", "torch differs", "padding as tokens")
    for part in ("is not finished (lost)", *differ):
        assert part in notes, part


def test_other_hardware_is_said_and_one_name_twice_told_apart(tmp_path: Path) -> None:
    """A run on CPUs beside one on GPUs is not a speed-up; two files of one name would be one column."""
    (tmp_path / "x").mkdir()
    cpu, gpu = (made_run(tmp_path / name, [2.0, 1.0, 1.0]) for name in ("cpu", "gpu"))
    body = json.loads((cpu / "run.json").read_text())
    body["distributed"] |= {"gpu0": None, "device": "cpu"}
    written(cpu / "run.json", body)
    found = comparison.compare([gpu, cpu])
    assert any(note.startswith("GPU differs") and "no GPU" in note for note in found.notes)
    twice = [written(tmp_path / "a.json", ONE), written(tmp_path / "x" / "a.json", TWO)]
    assert [entry.name for entry in comparison.compare(twice).entries] == ["a", "a (2)"]


def test_the_command(tmp_path: Path) -> None:
    """As a user types it: a table on the terminal, Markdown in a file, one document for programs."""
    one, two = written(tmp_path / "one.json", ONE), written(tmp_path / "two.json", TWO)
    done = run("compare", one, two, "--out", tmp_path / "page.md")
    assert done.code == 0 and "1,080" in done.err and "| World size | 8 | 16 |" in (tmp_path / "page.md").read_text()
    done = run("compare", one, two, "--out", tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert done.code == 0 and html.count("<svg ") == html.count("<summary>Numbers</summary>") == 2, "each with its table"
    assert "GPU-hours of training" in html and "FSDP on 16 ranks" in html and "0.241" in html, "54.2 s on 16 GPUs"
    found = run("compare", one, two, "--json")
    assert found.code == 0 and [entry["approx_tokens_per_s_per_rank"] for entry in found.json["runs"]] == [1080.19, 94.51]
    assert [entry["gpu_hours"] for entry in found.json["runs"]] == pytest.approx([0.010533, 0.240765], rel=1e-4)
    refused = run("compare", one, tmp_path / "gone", "--json")
    assert refused.code == 2 and "no such file" in json.dumps(refused.json)


def test_a_run_whose_recipe_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Its columns would be empty, and a reader would take that for a run that says nothing."""
    for body in ([], {"recipe": 5}, {"recipe": {"name": "x"}}):
        path = made_run(tmp_path / f"r{len(str(body))}", [2.0, 1.0, 1.0])
        written(path / "run.json", body)
        with pytest.raises(UserError) as caught:
            comparison.read(path)
        (problem,) = caught.value.problems
        assert (problem.file, problem.key) == (str(path / "run.json"), "recipe") and problem.fix


def test_metrics_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    """A folder in its place; a line with a number that no float holds, as Python's integers are longer, is passed over."""
    made_run(tmp_path / "r", [1.0])
    file = tmp_path / "r" / "metrics.jsonl"
    file.write_text('{"event": "step", "attempt": 1, "step": 1, "loss": 1' + "0" * 400 + "}\n")
    found = read_metrics(file)
    assert found.unreadable_lines == 1 and found.steps == []
    file.unlink()
    file.mkdir()
    done = run("compare", tmp_path / "r", written(tmp_path / "one.json", ONE))
    assert done.code == 2 and "metrics.jsonl: cannot be read" in done.err
