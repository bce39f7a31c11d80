"""Rows of prompts: our own set, what is refused and how, and what counts as the benchmark."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clustertune.data import rewards
from clustertune.errors import UserError
from clustertune.evaluate import scoring
from clustertune.evaluate.own import ifeval as room
from clustertune.evaluate.own.ifeval import OwnRows, recognise_benchmark
from tests.evaluate.conftest import IFEVAL, OWN


def read_prompts(path: Path) -> OwnRows:
    return OwnRows(IFEVAL, path, path.name)


@pytest.fixture(autouse=True)
def splitter() -> None:
    rewards.use_shipped_punkt()


def write(path: Path, *rows: Any) -> Path:
    file = path / "rows.jsonl"
    file.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return file


def test_cover_all_kinds_and_leave_nothing_to_chance() -> None:
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    found = read_prompts(OWN)
    kinds = {kind for row in found.rows for kind in row["instruction_id_list"]}
    assert kinds == set(INSTRUCTION_DICT)
    assert len(kinds) == room.KINDS
    assert len(found.rows) >= 30
    assert not found.is_benchmark


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row=st.fixed_dictionaries(
        {},
        optional={
            "key": st.one_of(st.integers(), st.text(max_size=3), st.none()),
            "prompt": st.one_of(st.text(max_size=5), st.integers()),
            "instruction_id_list": st.lists(st.sampled_from(["punctuation:no_comma", "x", 3]), max_size=3),
            "kwargs": st.lists(
                st.one_of(st.none(), st.dictionaries(st.sampled_from(["num_words", "keywords", "q"]), st.floats())),
                max_size=3,
            ),
        },
    )
)
def test_never_with_another_error(row: dict[str, Any], tmp_path: Path) -> None:
    try:
        found = read_prompts(write(tmp_path, row))
    except UserError as error:
        assert error.problems
    else:
        assert [json.loads(line)["key"] for line in found.to_jsonl().splitlines()] == [row["key"]]


def make_rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """541 rows with 834 instructions of 25 kinds, of which the wording is declared the benchmark's."""
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    kinds = sorted(INSTRUCTION_DICT)
    rows = [{"key": i, "prompt": f"prompt {i}", "instruction_id_list": [kinds[i % 25]], "kwargs": [{}]} for i in range(541)]
    for row in rows[: 834 - 541]:
        row["instruction_id_list"] = [*row["instruction_id_list"], kinds[0]]
    monkeypatch.setattr(room, "LANDMARKS", {i: room.hash_landmark(rows[i]) for i in range(5)})
    return rows


def test_two_reworded_landmarks_are_tolerated_three_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a row less, or an instruction less, is another set."""
    rows = make_rows(monkeypatch)
    assert recognise_benchmark(rows)
    assert not recognise_benchmark(rows[1:])
    assert not recognise_benchmark([rows[0] | {"instruction_id_list": rows[0]["instruction_id_list"][:1]}, *rows[1:]])
    rows[0]["prompt"] = rows[1]["prompt"] = "fixed"
    assert recognise_benchmark(rows)
    rows[2]["prompt"] = "fixed"
    assert not recognise_benchmark(rows)


def test_a_pattern_that_goes_back_without_end_is_named_with_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is loaded; the other rows are looked at."""
    monkeypatch.setattr(room, "SECONDS", 0.5)
    row = {"key": 1, "prompt": "Write.", "instruction_id_list": ["keywords:existence"]}
    bad, good = {**row, "kwargs": [{"keywords": ["(.|.)*Q9$"]}]}, {**row, "key": 2, "kwargs": [{"keywords": ["day"]}]}
    with pytest.raises(UserError) as caught:
        read_prompts(write(tmp_path, bad, good))
    (problem,) = caught.value.problems
    assert str(problem.file).endswith(":1") and problem.key == "kwargs[0]"


class Scored:
    """A task as lm-eval's, whose row's pattern is searched in the answer."""

    task_name = "mine"
    eval_docs = ({"pattern": "a"}, {"pattern": "(.|.)*Q9$"})

    def process_results(self, doc: dict[str, str], results: list[str]) -> dict[str, bool]:
        return {"found": bool(re.search(doc["pattern"], results[0]))}


def test_an_answer_on_which_a_pattern_does_not_end_counts_as_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SECONDS", 0.1)
    task = Scored()
    with scoring.BoundedScoring(task) as bounded:
        assert task.process_results(task.eval_docs[0], ["bad"]) == {"found": True}
        assert task.process_results(task.eval_docs[1], ["x" * 60]) == {"found": False}
        assert task.process_results(task.eval_docs[0], ["bad"]) == {"found": True}
        assert bounded.endless == [1]
    assert task.process_results.__func__ is Scored.process_results
