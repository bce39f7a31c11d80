"""A chat template is a program: one that never ends is named, where training and evaluation first render it."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.data import tokenizer as tokenizers
from clustertune.data.local_model import local_tokenizer
from clustertune.errors import UserError
from clustertune.evaluate.model import _load_tokenizer

LOOPS = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"


def saved(folder: Path, template: str) -> Path:
    made = local_tokenizer({"vocab_size": 300, "max_position_embeddings": 64}, ["some words"] * 9)
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


def test_a_template_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "TEMPLATE_SECONDS", 0.5)
    folder = saved(tmp_path, LOOPS)
    with pytest.raises(UserError, match=r"took longer than 0\.5 s for one turn"):
        tokenizers.load_tokenizer(str(folder), None, None, {})
    assert "took longer" in str(_load_tokenizer(folder, True)[1][0])


def test_a_template_that_refuses_a_lone_turn_is_taken(tmp_path: Path) -> None:
    folder = saved(tmp_path, "{{ raise_exception('a system turn first') }}")
    assert tokenizers.load_tokenizer(str(folder), None, None, {}).chat_template
