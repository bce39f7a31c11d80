"""One's own prompts: read from every form at once, judged by their rules, scored beside the base, and shown."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.data import rewards
from clustertune.data.prompts import Judge, are_own, read_prompts
from clustertune.errors import UserError
from clustertune.evaluate.run import evaluate
from clustertune.launch.serving import count_prompts, evaluation
from clustertune.recipe.sections import OWN_PROMPTS, Eval
from clustertune.report.content import eval_content
from clustertune.resolve.resolve import resolve
from clustertune.staging import bundle
from tests.evaluate.conftest import OWN, forbid_network

ROWS: list[dict[str, Any]] = [
    {"prompt": "What is the capital of France?", "answer": "Paris."},
    {"prompt": "Name two colours.", "contains": ["red", "blue"], "completion": "red and blue"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]},
    {"messages": [{"role": "user", "content": "Twelve in digits?"}, {"role": "assistant", "content": "12"}], "regex": r"^\d+$"},
    {"instruction": "Give JSON.", "input": "name: Ada", "json_schema": {"type": "object", "required": ["name"]}},
    {"conversations": [{"from": "human", "value": "Opposite of hot?"}, {"from": "gpt", "value": "Cold"}]},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_of_every_form(tmp_path: Path) -> None:
    found = read_prompts(write(tmp_path / "own.jsonl", ROWS), "eval.data").rows
    assert [row.answer for row in found] == ["Paris.", "red and blue", None, "12", None, "Cold"]
    assert [row.messages[-1]["content"] for row in found][4] == "Give JSON.\n\nname: Ada"
    assert [sorted(row.judged_by) for row in found] == [
        *(["exact_match"], ["contains"], [], ["regex"], ["json_schema"], ["exact_match"])
    ]
    (tmp_path / "own.csv").write_text("prompt,answer,regex,id\nOne?,1,,7\nTwo?,,^2$,8\n")
    table = read_prompts(tmp_path / "own.csv", "eval.data")
    assert [(row.line, row.answer, row.rules) for row in table.rows] == [(2, "1", {}), (3, None, {"regex": "^2$"})]
    assert table.unused == ["id"]
    (tmp_path / "own.txt").write_text("One?\n\nTwo?\n")
    assert [row.line for row in read_prompts(tmp_path / "own.txt", "eval.data").rows] == [1, 3]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": ""}, "neither prompt nor messages"),
        ({"prompt": "a", "regex": "("}, "not a regular expression"),
        ({"prompt": "a", "answer": "b", "regex": "^c$"}, "own answer does not keep"),
        ({"prompt": "a", "answer": "b", "completion": "c"}, "two names of one thing"),
        ({"prompt": "a", "json_schema": {"type": 5}}, "no JSON schema"),
        ({"prompt": "a", "contains": 5}, "neither a text nor a list"),
        ({"prompt": "a", "regexp": "b"}, "did you mean regex"),
        ({"prompt": "a", "tools": [{}]}, "shows the model no tools"),
    ],
)
def test_every_bad_row_is_named_at_once(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [{"prompt": "good"}, row, {"messages": 5}])
    with pytest.raises(UserError) as caught:
        read_prompts(path, "eval.data")
    text = "\n".join(map(str, caught.value.problems))
    assert words in text and f"{path}:3" in text


def test_a_pattern_that_goes_back_for_years_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "SECONDS", 0.2)
    began = time.process_time()
    with Judge() as judge:
        assert judge("regex", r"^(a+)+$", "a" * 60 + "!") is None
        assert judge("regex", r"a+", "aaa") is True  # the next one is judged
        assert judge("json_schema", {"$ref": "http://example.org/x.json"}, "{}") is False  # and nothing is fetched
        assert judge("json_schema", {"type": "array", "minItems": 2}, "[1, 2]") is True
    assert time.process_time() - began < 60


def test_answers_of_base_and_tuned_side_by_side(tiny_model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", ROWS)
    base = tmp_path / "base"
    base.mkdir()
    for file in tiny_model.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    settings = Eval(tasks=[], data=str(path), max_gen_toks=4, base=True)
    with forbid_network() as attempts:
        result = evaluate(
            tiny_model, tmp_path / "out", settings=settings, prompts=path, base=base, base_out=tmp_path / "b", device="cpu"
        )
    assert attempts == []
    row = result["tasks"][OWN_PROMPTS]
    assert row["n"] == 6 and row["exact_match,none"] == 0.0
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert [line["line"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["base"] == line["tuned"] for line in lines)  # one model twice
    # The loss is that of all tokens of the answers, each once.
    losses = [line["tuned_scores"]["loss"] for line in lines if "answer" in line]
    assert len(losses) == 4 and min(losses) < row["loss,none"] < max(losses)
    paired = result["paired"][OWN_PROMPTS]
    assert paired["loss,none"]["difference"] == 0.0 and paired["loss,none"]["verdict"] == "too few"
    shown = eval_content(result)
    assert shown is not None and [len(one["sides"]) for one in shown["answers"]] == [2] * 6


def test_loss_is_the_models_own(tiny_model: Path, tmp_path: Path) -> None:
    """Beside transformers' cross-entropy of the answer's tokens behind the rendered prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write(tmp_path / "own.jsonl", [ROWS[0]])
    settings = Eval(tasks=[], data=str(path), max_gen_toks=2)
    result = evaluate(tiny_model, tmp_path / "out", settings=settings, prompts=path, device="cpu")
    tokenizer, model = (kind.from_pretrained(tiny_model) for kind in (AutoTokenizer, AutoModelForCausalLM))
    turns = [{"role": "user", "content": ROWS[0]["prompt"]}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    begin, ids = (tokenizer(text)["input_ids"] for text in (prompt.rstrip(), prompt + ROWS[0]["answer"]))
    labels = torch.tensor([[-100] * len(begin) + ids[len(begin) :]])
    loss = model(input_ids=torch.tensor([ids]), labels=labels).loss.item()
    assert result["tasks"][OWN_PROMPTS]["loss,none"] == pytest.approx(loss, rel=1e-2)  # bfloat16 beside a batch of one


def test_an_answer_longer_than_the_model_reads(tiny_model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [{"prompt": "a", "answer": "word " * 20_000}])
    settings = Eval(tasks=[], data=str(path), max_gen_toks=2)
    with pytest.raises(UserError, match=r"own.jsonl:1"):
        evaluate(tiny_model, tmp_path / "out", settings=settings, prompts=path, device="cpu")
    assert not (tmp_path / "out").exists()


def test_a_recipe_names_them_and_the_plan_counts_them(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", ROWS)
    resolved = resolve("tiny-oasst2", [f"eval.data={path}", "eval.tasks=[]"])
    assert resolved.inputs["eval.data"] == path and count_prompts(resolved) == len(ROWS)
    assert bundle.missing_inputs(resolved) == [] and bundle.eval_data(resolved) == path
    path.write_text('{"prompt": "a", "regex": "("}\n')
    assert [problem.key for problem in bundle.missing_inputs(resolved)] == ["regex"]
    with pytest.raises(UserError, match="nothing is asked"):
        resolve("tiny-oasst2", ["eval.tasks=[]"])
    cluster = load_cluster("dgx-h100")
    few, many = (
        evaluation(resolve("llama8b-lima", [f"eval.data={write(tmp_path / f'{n}.jsonl', ROWS * n)}", "eval.tasks=[]"]), cluster)
        for n in (1, 1000)
    )
    assert few.seconds and many.seconds and few.seconds < many.seconds


def test_rows_of_a_task_are_told_from_ones_own(tmp_path: Path) -> None:
    assert not are_own(OWN, ["ifeval"])
    assert are_own(OWN, ["gsm8k"])
    assert are_own(write(tmp_path / "own.jsonl", ROWS), ["ifeval"])


@pytest.mark.timeout(60)
def test_a_pipe_is_no_file_of_prompts(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match="plain file"):
        read_prompts(tmp_path / "rows.jsonl", "eval.data")
