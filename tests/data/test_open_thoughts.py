"""A generation prompt that begins a thought, and conversations that hold none: the model would be asked in another form."""

from __future__ import annotations

from typing import Any

import pytest
from trl.chat_template_utils import _CHAT_TEMPLATES_DIR

from clustertune.data import tokens
from clustertune.data.local_model import train_tokenizer
from clustertune.recipe.native_rules import train_defaults

R1, QWEN3 = ((_CHAT_TEMPLATES_DIR / f"{name}.jinja").read_text() for name in ("deepseek_r1_distill", "qwen3"))
SETTINGS = train_defaults() | {"packing": False, "max_length": None, "assistant_only_loss": False}


def rows(form: str, thoughts: int, field: bool) -> list[dict[str, Any]]:
    """12 rows, so many of which hold a thought."""
    some = []
    for number in range(12):
        answer: dict[str, Any] = {"role": "assistant", "content": f"answer {number}"}
        if number < thoughts:
            answer |= {"reasoning_content": "so"} if field else {"content": f"<think>\nso\n</think>\n\nanswer {number}"}
        user = {"role": "user", "content": f"question {number}"}
        other = {"role": "assistant", "content": "word"}
        one = {"messages": [user, answer]}
        both = {"prompt": [user], "chosen": [answer], "rejected": [other]}
        some.append({"messages": one, "preference": both, "prompt": {"prompt": [user]}}[form])
    return some


@pytest.mark.parametrize("field", [True, False])
@pytest.mark.parametrize(
    ("template", "form", "thoughts", "told"),
    [
        (R1, "messages", 0, "12 conversations"),
        (R1, "messages", 5, "7 conversations"),
        (R1, "preference", 0, "12 conversations"),
        (R1, "messages", 12, None),
        (R1, "prompt", 0, None),
        (QWEN3, "messages", 0, None),
    ],
)
def test_conversations_without_the_thought_that_the_prompt_begins_are_counted(
    template: str, form: str, thoughts: int, told: str | None, field: bool, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = train_tokenizer(["question answer word so " * 9], 400, 512)
    tokenizer.chat_template = template
    got = run(rows(form, thoughts, field), format=form)
    tokens.make(got.out, tokenizer, SETTINGS)
    err = capsys.readouterr().err
    assert ("hold no thought" in err) is (told is not None) and (told or "") in err
