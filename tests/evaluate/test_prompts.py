"""Rows of prompts: our own set, what is refused and how, and what counts as the benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clustertune.errors import UserError
from clustertune.evaluate import punkt
from clustertune.evaluate.own import ifeval as room
from clustertune.evaluate.own.ifeval import OwnRows, recognise_benchmark
from tests.evaluate.conftest import IFEVAL, OWN

GOOD: dict[str, Any] = {
    "key": 1,
    "prompt": "Say hello.",
    "instruction_id_list": ["length_constraints:number_words"],
    "kwargs": [{"num_words": 5, "relation": "less than"}],
}


def read_prompts(path: Path) -> OwnRows:
    return OwnRows(IFEVAL, path, path.name)


@pytest.fixture(autouse=True)
def splitter(nltk_data: Path) -> Iterator[None]:
    with punkt.installed(nltk_data):
        yield


def write(path: Path, *rows: Any) -> Path:
    file = path / "rows.jsonl"
    file.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return file


def one(kind: str, **kwargs: Any) -> dict[str, Any]:
    return {**GOOD, "instruction_id_list": [kind], "kwargs": [kwargs]}


def test_cover_all_kinds_and_leave_nothing_to_chance() -> None:
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    found = read_prompts(OWN)
    kinds = {kind for row in found.rows for kind in row["instruction_id_list"]}
    assert kinds == set(INSTRUCTION_DICT)
    assert len(kinds) == room.KINDS
    assert len(found.rows) >= 30
    assert found.drawn == 0
    assert not found.is_benchmark


BAD = [
    (b"{", "rows.jsonl:1: truncated-json"),
    (b"[1]", "rows.jsonl:1: wrong-column: the row is a list, not an object"),
    (b'{"key": 1, "prompt": "a", "instruction_id_list": ["x"], "kwargs": [{"a": NaN}]}', "rows.jsonl:1: not JSON"),
    ({"key": 1}, "rows.jsonl:1: prompt: missing"),
    ({**GOOD, "key": True}, "key: must be int, is bool"),
    ({**GOOD, "key": 2**70}, "key: exceeds 64 bits"),
    ({**GOOD, "prompt": " \n"}, "prompt: is empty"),
    ({**GOOD, "prompt": "half \ud800"}, "holds half of a surrogate pair"),
    ({**GOOD, "instruction_id_list": []}, "names no instruction"),
    ({**GOOD, "kwargs": []}, "kwargs: 0 mappings for 1 instructions"),
    (one("punctuation:no_commas"), "did you mean 'punctuation:no_comma'?"),
    (one("length_constraints:number_words", num_words="5", relation="at least"), "kwargs[0].num_words: must be a whole number"),
    (one("length_constraints:number_words", num_words=5, relation="at most"), "but at most is given"),
    (one("language:response_language", language="xx"), "refuses"),
    (one("keywords:existence", keywords="word"), "kwargs[0].keywords: must be a list of texts"),
    (one("keywords:existence", keywords=["(open"]), "'(open' is not a regular expression"),
    (one("keywords:frequency", keyword="[", frequency=1, relation="at least"), "'[' is not a regular expression"),
    (one("punctuation:no_comma", color="red"), "unexpected keyword argument 'color'"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_with_its_place(row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_prompts(write(tmp_path, row))
    assert message in str(caught.value)
    assert all(str(problem.file).endswith("rows.jsonl:1") for problem in caught.value.problems)


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
