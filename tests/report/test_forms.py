"""Documents that were damaged: each wrong value with its file and its key, and no traceback."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.report import forms
from clustertune.report.metrics import read_metrics
from tests.bench.documents import document
from tests.command import run
from tests.report.test_compare import ONE, made_run, written

WRONG: dict[str, list[Any]] = {
    forms.OBJECT: [5, "x", [1], True],
    forms.LIST: [5, "x", {"a": 1}],
    forms.TEXT: [5, {"a": 1}],
    forms.WHOLE: ["x", 1.5, -1, True, 10**400, [1]],
    forms.NUMBER: ["x", True, float("nan"), 10**400, {}],
}


def put(body: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with another value there; what lies on the way and is not an object becomes one."""
    found = copy.deepcopy(body)
    inner = found
    *way, last = key.split(".")
    for part in way:
        if not isinstance(inner.get(part), dict):
            inner[part] = {}
        inner = inner[part]
    inner[last] = value
    return found


def recorded_run(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((made_run(tmp_path / "r", [2.0, 1.0, 1.0, 1.0]) / "run.json").read_text())
    return found


@pytest.mark.parametrize("key", forms.RUN)
def test_a_run_with_a_wrong_value_is_told(key: str, tmp_path: Path) -> None:
    """run.json, every key that is read of it, by ``compare`` as a person calls it."""
    body = recorded_run(tmp_path)
    other = written(tmp_path / "one.json", ONE)
    for value in WRONG[forms.RUN[key]]:
        file = written(tmp_path / "r" / "run.json", put(body, key, value))
        done = run("compare", tmp_path / "r", other, "--json")
        assert done.code == 2, (value, done.err)
        (told,) = done.json["problems"]
        assert told["file"] == str(file) and told["key"] == key and forms.RUN[key] in told["message"] and told["fix"]
    assert forms.find_problems(body, forms.RUN, "x", "y") == []


@pytest.mark.parametrize("key", forms.BENCH)
def test_a_result_with_a_wrong_value_is_told(key: str, tmp_path: Path) -> None:
    """A benchmark's JSON, in the same way."""
    other = written(tmp_path / "one.json", ONE)
    for value in WRONG[forms.BENCH[key]]:
        file = written(tmp_path / "b.json", put(document(), key, value))
        done = run("compare", file, other, "--json")
        assert done.code == 2, (value, done.err)
        (told,) = done.json["problems"]
        assert told["file"] == str(file) and told["key"] == key and forms.BENCH[key] in told["message"]
    assert forms.find_problems(document(), forms.BENCH, "x", "y") == []


@pytest.mark.parametrize("body", [[], 5, None, "x"])
def test_a_run_that_is_no_object_is_told(body: Any, tmp_path: Path) -> None:
    """``{}`` was made of it before, and compared."""
    made_run(tmp_path / "r", [1.0])
    written(tmp_path / "r" / "run.json", json.dumps(body))
    done = run("compare", tmp_path / "r", written(tmp_path / "one.json", ONE), "--json")
    assert done.code == 2 and "where an object belongs" in done.json["problems"][0]["message"]


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    """The two of the review, and a third; a long value is cut."""
    body = put(put(recorded_run(tmp_path), "allocation.nodes", 5), "recipe.world_size", "x" * 500)
    told = [str(p) for p in forms.find_problems(body, forms.RUN, "run.json", "leave it out")]
    assert told[0].startswith("run.json: recipe.world_size: is 'xxx") and len(told[0]) < 200
    assert told[1] == "run.json: allocation.nodes: is 5, where a list belongs -> leave it out"


def test_metrics_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    """A folder in its place."""
    made_run(tmp_path / "r", [1.0])
    (tmp_path / "r" / "metrics.jsonl").unlink()
    (tmp_path / "r" / "metrics.jsonl").mkdir()
    done = run("compare", tmp_path / "r", written(tmp_path / "one.json", ONE))
    assert done.code == 2 and "metrics.jsonl: cannot be read" in done.err


def test_a_line_with_a_number_that_no_float_holds_is_passed_over(tmp_path: Path) -> None:
    """Python's integers are longer than its floats."""
    line = '{"event": "step", "attempt": 1, "step": 1, "loss": 1' + "0" * 400 + "}\n"
    found = read_metrics(written(tmp_path / "metrics.jsonl", line))
    assert found.unreadable_lines == 1 and found.steps == []
