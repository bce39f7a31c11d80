"""A folder more in ``eval/`` is a task more: known by its name from the recipe to the report, with no other file touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from clustertune.cluster.load import load_cluster
from clustertune.errors import UserError
from clustertune.evaluate.run import evaluate
from clustertune.recipe import eval_tasks
from clustertune.recipe.sections import Eval
from clustertune.report.page import build
from clustertune.resolve.resolve import resolve
from clustertune.staging.bundle_fill import Collector
from tests.evaluate.conftest import forbid_network

FACTS = {
    "task": "capitals",
    "title": "Capitals",
    "metrics": ["exact_match"],
    "documents": 20,
    "generation_kwargs": {"until": [], "do_sample": False, "temperature": 0.0, "max_gen_toks": 4},
    "include": "capitals.yaml",
    "version": 1.0,
    "columns": ["question", "answer"],
    "hub": {"name": "example/capitals", "revision": "a" * 40, "file": "all.jsonl"},
    "fallback": {"name": "a-few-capitals", "file": "few.jsonl"},
}
SCORER = """\
output_type: generate_until
test_split: train
doc_to_text: "The capital of {{question}}?"
doc_to_target: "{{answer}}"
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
metadata: {version: 1.0}
"""
ROWS = [
    {"question": "France", "answer": "Paris"},
    {"question": "Italy", "answer": "Rome"},
    {"question": "Peru", "answer": "Lima"},
]
NOTE = "Not the Capitals benchmark (other prompts): these numbers compare with nothing published."


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``eval/`` with one folder more."""
    shutil.copytree(eval_tasks.FOLDER, tmp_path / "eval")
    folder = tmp_path / "eval" / "capitals"
    folder.mkdir()
    (folder / "task.yaml").write_text(yaml.safe_dump(FACTS))
    (folder / "capitals.yaml").write_text(SCORER)
    (folder / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(eval_tasks, "FOLDER", folder.parent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


def test_a_recipe_names_it() -> None:
    wanted = ["eval.tasks=[capitals]", "eval.pass_mark={capitals: {exact_match: 0.1}}"]
    assert resolve("tiny-oasst2", wanted).recipe.eval.tasks == ["capitals"]
    with pytest.raises(UserError, match="capitals has no such metric"):
        resolve("tiny-oasst2", [wanted[0], "eval.pass_mark={capitals: {exact_matches: 0.1}}"])


def test_it_is_scored_and_reported(tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(Path(__file__).parents[1] / "report" / "recorded", run)
    shutil.rmtree(run / "eval")
    with forbid_network() as attempts:
        result = evaluate(tiny_model, run / "eval", settings=Eval(tasks=["capitals"]), benchmark=False, device="cpu")
    assert attempts == []
    assert result["tasks"]["capitals"]["n"] == 3 and "exact_match,none" in result["tasks"]["capitals"]
    detail = result["details"]["capitals"]
    assert detail["data"] == ["a-few-capitals"] and not detail["comparable"] and result["notes"] == [NOTE]
    page = build(run).read_text()
    assert "capitals (a-few-capitals: 3)" in page and NOTE in page


def test_stage_takes_a_file_of_its_rows(folder: Path, tmp_path: Path) -> None:
    def check(tasks: str) -> None:
        resolved = resolve("tiny-oasst2", [f"eval.tasks=[{tasks}]"])
        Collector(resolved, load_cluster("rno-rtxpro6000"), tmp_path / "out", folder / "few.jsonl", 60).check()

    check("capitals")
    with pytest.raises(UserError, match=r"few\.jsonl:1: prompt: missing"):
        check("ifeval")
    with pytest.raises(UserError, match="these have some: none"):
        check("gsm8k")
