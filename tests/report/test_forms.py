"""Documents that were damaged: each wrong value with its file and its key, and no traceback."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.report import comparison, forms
from clustertune.report.metrics import read_metrics
from tests.command import run
from tests.report.test_compare import ONE, made_run, written

WRONG: dict[str, list[Any]] = {
    forms.OBJECT: [5, "x", [1], True],
    forms.LIST: [5, "x", {"a": 1}],
    forms.TEXT: [5, {"a": 1}],
    forms.WHOLE: ["x", 1.5, -1, True, 10**400, [1]],
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


FORMS = {"r/run.json": forms.RUN}


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("name", FORMS)
def test_a_document_with_wrong_values_is_named(name: str, at: int, tmp_path: Path) -> None:
    """Every key that is read of it, those of one depth at once, with the wrong value of this number: all are named."""
    form, file, run_body = FORMS[name], tmp_path / name, recorded_run(tmp_path)
    body, path = run_body, file.parent
    for depth in range(4):
        wrong = body
        keys = {key: of for key, of in form.items() if key.count(".") == depth and at < len(WRONG[of])}
        for key, of in keys.items():
            wrong = put(wrong, key, WRONG[of][at])
            assert [found.key for found in forms.find_problems(put(body, key, WRONG[of][at]), form, "x", "y")] == [key]
        written(file, wrong)
        with pytest.raises(UserError) if keys else contextlib.nullcontext() as caught:
            comparison.read(path)
        problems = {problem.key: problem for problem in caught.value.problems} if caught else {}
        assert problems.keys() == keys.keys()
        for key, of in keys.items():
            assert problems[key].file == str(file) and of in problems[key].message and problems[key].fix
    assert forms.find_problems(body, form, "x", "y") == []


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
