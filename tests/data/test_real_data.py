"""Real inputs, where the machine has them: compared with the second implementation of the walk, and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.test_oasst_oracle import oracle

DATA = Path(__file__).parents[3] / "shared" / "data"
OASST = DATA / "oasst2_en_100_trees.rows.jsonl"
ALPACA = DATA / "alpaca_format_gsm8k_2048.json"


@pytest.mark.real_input
@pytest.mark.skipif(not OASST.exists(), reason="the real trees are not on this machine")
def test_real_trees_equal_the_second_implementation(run, nest, tmp_path):
    rows = [json.loads(line) for line in OASST.read_bytes().splitlines()]
    wanted = {tree: [text for _, text in path] for tree, path in oracle(rows, "en").items()}
    got = run(path=OASST, bad_rows="stop")
    assert got.texts == wanted
    assert (got.result["train"]["conversations"], got.result["eval"]["conversations"]) == (95, 5)
    assert run(nest(rows)).texts == wanted
    assert run(rows[::-1]).texts.keys() == wanted.keys()


@pytest.mark.real_input
@pytest.mark.skipif(not ALPACA.exists(), reason="the real records are not on this machine")
def test_real_alpaca_records_all_become_conversations(run):
    records = json.loads(ALPACA.read_bytes())
    got = run(path=ALPACA, format="alpaca", language=None, bad_rows="stop")
    assert (got.result["train"]["conversations"], got.result["eval"]["conversations"]) == (1946, 102)
    by_row = {line["source"]["row"]: line["messages"] for line in got.conversations}
    for number, record in enumerate(records, 1):
        assert by_row[number][1]["content"] == record["output"]
        assert by_row[number][0]["content"].startswith(record["instruction"])
