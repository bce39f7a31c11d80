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
    """A copy with another value there; what is on the way and is not an object becomes one."""
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


def cases(form: dict[str, str]) -> list[tuple[int, int]]:
    """The depths of keys, each with the numbers of the wrong values that one of them has."""
    return sorted({(key.count("."), at) for key, kind in form.items() for at in range(len(WRONG[kind]))})


def check_wrong_values(form: dict[str, str], body: dict[str, Any], file: Path, compared: Path, depth: int, at: int) -> None:
    """Every key of one depth has the wrong value of this number; ``compare``, as a person calls it, names them all."""
    other = written(file.parent.parent / "one.json", ONE)
    keys = {key: kind for key, kind in form.items() if key.count(".") == depth and at < len(WRONG[kind])}
    wrong = body
    for key, kind in keys.items():
        wrong = put(wrong, key, WRONG[kind][at])
    written(file, wrong)
    done = run("compare", compared, other, "--json")
    assert done.code == 2, done.err
    problems = {problem["key"]: problem for problem in done.json["problems"]}
    assert problems.keys() == keys.keys() and len(problems) == len(done.json["problems"])
    for key, kind in keys.items():
        assert problems[key]["file"] == str(file) and kind in problems[key]["message"] and problems[key]["fix"]
        assert [found.key for found in forms.find_problems(put(body, key, WRONG[kind][at]), form, "x", "y")] == [key]
    assert forms.find_problems(body, form, "x", "y") == []


@pytest.mark.parametrize(("depth", "at"), cases(forms.RUN))
def test_a_run_with_wrong_values_is_told(depth: int, at: int, tmp_path: Path) -> None:
    """run.json, every key that is read of it."""
    check_wrong_values(forms.RUN, recorded_run(tmp_path), tmp_path / "r" / "run.json", tmp_path / "r", depth, at)


@pytest.mark.parametrize(("depth", "at"), cases(forms.BENCH))
def test_a_result_with_wrong_values_is_told(depth: int, at: int, tmp_path: Path) -> None:
    """A benchmark's JSON, in the same way."""
    (tmp_path / "b").mkdir()
    check_wrong_values(forms.BENCH, document(), tmp_path / "b" / "b.json", tmp_path / "b" / "b.json", depth, at)


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
