"""Thoughts in front of answers are taken off before scoring and counted; the chat template gets what training gave it."""

from __future__ import annotations

import copy
import json
import os
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import trl
from lm_eval.api.instance import Instance

from clustertune.data import rendering
from clustertune.data.local_model import train_tokenizer
from clustertune.evaluate import run as evaluation
from clustertune.evaluate.answers import AnswerLog, RecordedLM
from clustertune.evaluate.run import evaluate
from clustertune.evaluate.thoughts import Thoughts, find
from clustertune.recipe.sections import Eval
from tests.command import run

QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
DATED = "{{ 'Today: ' ~ strftime_now('%d %b %Y') ~ '\n' }}" + QWEN3
ASKED = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_tokenizer(["one two three"] * 4, 400, 4096)
    made.chat_template = QWEN3
    return made


class Answers:
    """A model that gives these answers, and keeps what it was asked."""

    max_length, max_gen_toks = 100, 10

    def __init__(self, answers: list[str]) -> None:
        self.answers, self.requests = answers, list[Any]()

    def tok_encode(self, text: str) -> list[str]:
        return text.split()

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        self.requests += requests
        return [self.answers[request.doc_id] for request in requests]


def scored(
    answers: list[str], tokenizer: Any, tmp_path: Path, prompt: str = ASKED, **settings: Any
) -> tuple[list[str], Any, Any]:
    """The answers as a task sees them."""
    asked = Eval(**settings)
    thoughts, model = Thoughts(find(asked, tokenizer), tokenizer), Answers(answers)
    lm = RecordedLM(model, AnswerLog(tmp_path / "log"), 4, lambda _d, _t: None, whole=False, thoughts=thoughts)
    requests = [
        Instance("generate_until", {}, (prompt, {"until": ["\n\n"]}), 0, metadata=("task", n, 1)) for n in range(len(answers))
    ]
    return lm.generate_until(requests), thoughts, model


def test_a_closed_thought_is_taken_off_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    answers = [
        "<think>\n\n</think>\n\nempty",
        "<think>\nhm\n\nhm\n</think>\n\ntwo\n\nmore",
        "three",
        "<think>\nno end\n\nof it",
    ]
    seen, thoughts, model = scored(answers, tokenizer, tmp_path)
    assert seen[:3] == ["empty", "two", "three"] and "no end" in seen[3]
    assert thoughts.by_task() == {"task": {"answers": 4, "thoughts": 2, "empty": 1, "cut_off": 1}}
    assert len(thoughts.notes()) == 4
    assert all(request.args[1]["until"] == [] for request in model.requests)  # a blank line does not end a thought


def test_a_prompt_that_closes_the_thought_keeps_the_stop_strings(tokenizer: Any, tmp_path: Path) -> None:
    seen, thoughts, model = scored(["two"], tokenizer, tmp_path, ASKED + "<think>\n\n</think>\n\n")
    assert seen == ["two"] and thoughts.by_task()["task"]["thoughts"] == 0
    assert model.requests[0].args[1]["until"] == ["\n\n"]


def test_the_end_of_a_thought_can_be_given_and_left_out(tokenizer: Any, tmp_path: Path) -> None:
    assert scored(["hm[/T]two"], tokenizer, tmp_path, think_end_token="[/T]")[0] == ["two"]  # noqa: S106
    (tmp_path / "log").unlink()
    assert scored(["<think>hm</think>two"], tokenizer, tmp_path, think_end_token="")[0] == ["<think>hm</think>two"]


TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
SEED = """{%- for m in messages %}{{ '<seed:bos>' + m.role }}
    {%- if m.reasoning_content %}{{ '\n<seed:think>' + m.reasoning_content + '</seed:think>' }}{%- endif %}
    {{- '\n' + m.content + '<seed:eos>' }}{%- endfor %}
    {%- if add_generation_prompt %}{{ '<seed:bos>assistant\n' }}{%- endif %}"""
OTHER_FIELD = """{%- for m in messages %}{{ '<|begin|>' + m.role }}
    {%- if m.reasoning %}{{ '<|think|>' + m.reasoning + '<|end|><|begin|>assistant' }}{%- endif %}
    {{- '<|content|>' + m.content + '<|end|>' }}{%- endfor %}
    {%- if add_generation_prompt %}{{ '<|begin|>assistant' }}{%- endif %}"""
IN_TEXT = """{%- for m in messages %}
    {{- ('[INST]' + m.content + '[/INST]') if m.role == 'user' else (m.content + '</s>') }}{%- endfor %}
    {#- [THINK] and [/THINK] stand in the answers -#}"""


@pytest.mark.parametrize(
    "template", [*(path.read_text() for path in TEMPLATES), SEED, OTHER_FIELD, IN_TEXT], ids=lambda text: None
)
def test_an_answer_as_its_template_writes_it_is_scored_without_its_thought(template: str, tokenizer: Any) -> None:
    """Whatever marks a thought, in whichever field the template takes it."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    thought, user = rendering.find_thought(tokenizer), {"role": "user", "content": "QQ"}
    prompt = rendering._rendered(tokenizer, [user], add_generation_prompt=True)
    forms = [{"content": "ANSWER", name: "INNER"} for name in rendering.REASONING]
    forms += [{"content": f"{thought.start}\nINNER\n{thought.end}\n\nANSWER"}] if "channel" not in thought.start else []
    for form in forms:
        whole = rendering._rendered(tokenizer, [user, {"role": "assistant", **form}])
        if "INNER" not in whole or "to=self" in thought.start + form["content"]:
            continue
        shared = len(os.path.commonprefix([prompt, whole]))  # noqa: RUF071 - characters are meant
        found, rest = thought.split(prompt, whole[shared:])
        assert found is not None and "INNER" in found and rest.startswith("ANSWER"), (form, whole)


def with_template(model: Path, out: Path, template: str) -> Path:
    """A copy of a model with another chat template."""
    shutil.copytree(model, out)
    (out / "chat_template.jinja").write_text(template)
    (out / "MANIFEST.json").unlink(missing_ok=True)
    return out


def prompts(folder: Path) -> list[str]:
    return [json.loads(line)["arguments"][0][0] for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_base_and_tuned_are_asked_with_what_the_training_gave(tiny_model: Path, tmp_path: Path) -> None:
    template = rendering.pinned(QWEN3, arguments={"enable_thinking": False})
    tuned, base = with_template(tiny_model, tmp_path / "tuned", template), with_template(tiny_model, tmp_path / "base", QWEN3)
    rows = tmp_path / "mine.jsonl"
    rows.write_text('{"prompt": "one <|eot_id|> two"}\n')
    settings = Eval(tasks=[], data=str(rows), max_gen_toks=4)
    result = evaluate(
        tuned, tmp_path / "out", settings=settings, prompts=rows, device="cpu", base=base, base_out=tmp_path / "b"
    )
    for out in ("out", "b"):
        assert all(prompt.endswith("<think>\n\n</think>\n\n") for prompt in prompts(tmp_path / out))
    assert result["decoding"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert result["thoughts"]["own_prompts"]["answers"] == 1
    assert any("mine.jsonl:1" in note and "control token" in note for note in result["notes"])
    other = settings.model_copy(update={"chat_template_kwargs": {"enable_thinking": True}})
    evaluate(tuned, tmp_path / "other", settings=other, prompts=rows, device="cpu")
    assert all(prompt.endswith(ASKED) for prompt in prompts(tmp_path / "other"))


def test_an_evaluation_goes_on_the_next_day(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The day is the first call's, also of the base that is asked later."""
    model, rows = with_template(tiny_model, tmp_path / "model", DATED), tmp_path / "mine.txt"
    rows.write_text("one\n")
    settings = Eval(tasks=[], data=str(rows), max_gen_toks=4)
    first = evaluate(model, tmp_path / "out", settings=settings, prompts=rows, device="cpu")
    day = date.today().strftime("%d %b %Y")
    assert prompts(tmp_path / "out")[0].startswith(f"Today: {day}")
    monkeypatch.setattr(evaluation.rendering, "today", lambda: "2031-05-06")
    again = evaluate(model, tmp_path / "out", settings=settings, prompts=rows, device="cpu")
    assert again["seconds"] == first["seconds"]
    later = evaluate(model, tmp_path / "later", settings=settings, prompts=rows, device="cpu")
    assert later["decoding"]["date"] == "2031-05-06" and prompts(tmp_path / "later")[0].startswith("Today: 06 May 2031")


def test_chat_and_serve_take_the_arguments(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.serving.conftest import program

    monkeypatch.setenv("CLUSTERTUNE_VLLM", str(program(tmp_path)))
    model = with_template(tiny_model, tmp_path / "model", rendering.pinned(QWEN3, arguments={"enable_thinking": False}))
    done = run("serve", model, "--dry-run", stack=True)
    assert done.code == 0 and """--default-chat-template-kwargs '{"enable_thinking": false}'""" in done.out, done.err
    done = run("serve", model, "--dry-run", "--chat-template-kwargs", '{"enable_thinking": true}', stack=True)
    assert """'{"enable_thinking": true}'""" in done.out
    done = run("serve", model, "--dry-run", "--chat-template-kwargs", "true", stack=True)
    assert done.code == 2 and "--chat-template-kwargs" in done.err
