"""System messages and templates that refuse them or leave them out: how many rows, and the key that decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trl.chat_template_utils import _CHAT_TEMPLATES_DIR

from clustertune.data import tokens
from clustertune.data.local_model import train_tokenizer
from clustertune.data.system_messages import rendered_before_user
from clustertune.errors import UserError
from clustertune.export.export import write_tokenizer
from clustertune.recipe.native_rules import train_defaults
from clustertune.resolve.resolve import resolve

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
LEAVES_OUT = "{% for m in messages if m.role != 'system' %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
TEMPLATES = {
    "gemma": (_CHAT_TEMPLATES_DIR / "gemma.jinja").read_text(),
    "mistral": MISTRAL,
    "leaves out": LEAVES_OUT,
}
SETTINGS = train_defaults() | {"packing": False, "max_length": None, "assistant_only_loss": True}


def made(template: str) -> Any:
    tokenizer = train_tokenizer(["question answer word be brief " * 9], 400, 512)
    tokenizer.chat_template = template
    return tokenizer


def rows(form: str) -> list[dict[str, Any]]:
    """12 rows, of which 4 have a system message."""
    some = []
    for number in range(12):
        prompt = [{"role": "system", "content": "be brief"}] * (number % 3 == 0)
        prompt.append({"role": "user", "content": f"question {number}"})
        answer = [{"role": "assistant", "content": f"answer {number}"}]
        some.append(
            {
                "messages": {"messages": prompt + answer},
                "prompt-completion": {"prompt": prompt, "completion": answer},
                "preference": {"prompt": prompt, "chosen": answer, "rejected": [{**answer[0], "content": "word"}]},
                "prompt": {"prompt": prompt},
            }[form]
        )
    return some


@pytest.mark.parametrize("form", ["messages", "prompt-completion", "preference", "prompt"])
@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_a_template_that_refuses_system_messages_is_named_with_the_rows_and_the_key(name: str, form: str, run: Any) -> None:
    got = run(rows(form), format=form)
    with pytest.raises(UserError) as caught:
        tokens.make(got.out, made(TEMPLATES[name]), SETTINGS)
    (problem,) = caught.value.problems
    assert problem.key == "data.system_messages" and problem.message.startswith("4 examples")
    assert "before-user" in str(problem.fix) and "leave-out" in str(problem.fix)


@pytest.mark.parametrize("form", ["messages", "prompt-completion", "preference", "prompt"])
def test_rows_with_a_system_message_are_left_out_and_counted(form: str, run: Any) -> None:
    got = run(rows(form), format=form, system_messages="leave-out")
    assert len(got.conversations) == 8 and any(text.startswith("4 ") for text in got.result["warnings"])
    tokens.make(got.out, made(MISTRAL), SETTINGS)
    with pytest.raises(UserError) as caught:
        run(rows(form)[::3], format=form, system_messages="leave-out")
    assert caught.value.problems[0].key == "data.system_messages"


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_goes_before_the_users_first_message(name: str, run: Any) -> None:
    """As with the text written there, in prompts and whole conversations; other conversations are rendered as before."""
    plain, joined = made(TEMPLATES[name]), made(rendered_before_user(TEMPLATES[name]))
    assert rendered_before_user(joined.chat_template) == joined.chat_template
    system, user, answer = ({"role": role, "content": f"  {role} text "} for role in ("system", "user", "assistant"))
    written = {**user, "content": f"{system['content']}\n\n{user['content']}"}
    for rest in ([], [answer], [answer, user], [answer, user, answer]):
        for prompt in (False, True):
            expected = plain.apply_chat_template([written, *rest], tokenize=False, add_generation_prompt=prompt)
            chat = [system, user, *rest]
            assert joined.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt) == expected
            same = plain.apply_chat_template(chat[1:], tokenize=False, add_generation_prompt=prompt)
            assert joined.apply_chat_template(chat[1:], tokenize=False, add_generation_prompt=prompt) == same
    got = run(rows("messages"), format="messages", system_messages="before-user")
    assert tokens.make(got.out, joined, SETTINGS)["splits"]["train"]["sequences"] == got.result["train"]["conversations"]


def test_a_template_that_leaves_system_messages_out_names_the_key(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    got = run(rows("messages"), format="messages")
    tokens.make(got.out, made(LEAVES_OUT), SETTINGS)
    assert "4 examples" in (said := capsys.readouterr().err) and "data.system_messages=before-user" in said


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_what_is_exported_renders_system_messages_as_the_training_did(place: str, tmp_path: Path) -> None:
    """In evaluation, chat and any server: without a key of the recipe."""
    from transformers import AutoTokenizer

    base, stage = tmp_path / "base", tmp_path / "stage"
    made(MISTRAL).save_pretrained(base)
    if place != "chat_template.jinja":
        (base / "chat_template.jinja").unlink()
        body = json.loads((base / place).read_text())
        (base / place).write_text(json.dumps({**body, "chat_template": MISTRAL}))
    stage.mkdir()
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    for key, taken in (("before-user", True), ("template", False)):
        trained = resolve("tiny-oasst2", [f"data.system_messages={key}"])
        write_tokenizer(tmp_path / "checkpoint", base, stage, trained)
        tokenizer = AutoTokenizer.from_pretrained(stage)
        if taken:
            assert "[INST] system\n\nuser [/INST]assistant" in tokenizer.apply_chat_template(turns, tokenize=False)
        else:
            with pytest.raises(Exception, match="roles"):
                tokenizer.apply_chat_template(turns, tokenize=False)
        for file in stage.iterdir():
            file.unlink()
