"""Foreign templates and tokenizers that take for ever or all memory: an error that names the place, never a hanging command."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from clustertune import bounded
from clustertune.data import tokenizer as tokenizers
from clustertune.data import tokens
from clustertune.data.local_model import train_tokenizer
from clustertune.errors import UserError
from clustertune.recipe.native_rules import train_defaults

PAIR = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
FOREVER = "".join(f"{{%- for {name} in range(99999) %}}" for name in "abc") + "{%- endfor %}" * 3
POWER = "{%- set x = 9 ** (9 ** 9) %}"
SETTINGS = train_defaults() | {"packing": False, "max_length": None, "assistant_only_loss": False}
BODY = "{%- for m in messages %}{{ m.role + m.content }}{%- endfor %}"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "TEMPLATE_SECONDS", 1.0)
    monkeypatch.setattr(tokenizers, "SHORT_MEMORY", 256 << 20)
    monkeypatch.setattr(tokens, "BATCH_SECONDS", 1.0)


def learnt() -> Any:
    return train_tokenizer(["question answer"] * 9, 300, 512)


@pytest.mark.parametrize(
    ("part", "when"), [(POWER, "messages|length > 1"), (FOREVER, "true"), (FOREVER, "messages|length > 3")]
)
def test_a_template_without_end_is_refused_as_it_is_loaded(tmp_path: Path, part: str, when: str) -> None:
    made = learnt()
    made.chat_template = f"{{%- if {when} %}}{part}{{%- endif %}}{BODY}"
    made.save_pretrained(tmp_path)
    with pytest.raises(UserError) as caught:
        tokenizers.load_tokenizer(str(tmp_path), None, None, {})
    assert caught.value.problems[0].key == "model.chat_template"


def test_a_normalizer_that_grows_its_text_is_refused(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import normalizers

    monkeypatch.setattr(tokens, "MEMORY", 256 << 20)
    made = learnt()
    made.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("e", "e" * 2000)] * 3)
    made.chat_template = BODY
    got = run([{"messages": PAIR}] * 3, format="messages")
    with pytest.raises(UserError) as caught:
        tokens.make(got.out, made, SETTINGS)
    assert ".jsonl:" in str(caught.value.problems[0].file)


ENDLESS = "e" * 2000
GROWS = {"type": "Replace", "pattern": {"String": "e"}, "content": ENDLESS}


@pytest.mark.parametrize("part", ["normalizer", "decoder", "normalised as it is loaded"])
def test_a_tokenizer_that_grows_its_text_is_refused_as_it_is_loaded(tmp_path: Path, part: str) -> None:
    """The last: a token of its own is normalised as it is loaded. What looks at a model before its evaluation says it too."""
    from clustertune.evaluate.model import check_model

    made = learnt()
    made.chat_template = BODY
    made.save_pretrained(tmp_path)
    body = json.loads((tmp_path / "tokenizer.json").read_bytes())
    if part == "decoder":
        body["decoder"] = {"type": "Sequence", "decoders": [body["decoder"], *[GROWS] * 3]}
    else:
        body["normalizer"] = {"type": "Sequence", "normalizers": [GROWS] * 3}
    if part.startswith("normalised"):
        own = {**body["added_tokens"][0], "id": 300, "content": "<e>", "special": False, "normalized": True}
        body["added_tokens"].append(own)
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    with pytest.raises(UserError) as caught:
        tokenizers.load_tokenizer(str(tmp_path), None, None, {})
    assert caught.value.problems[0].file == str(tmp_path)
    found, problems = check_model(tmp_path, 8)
    assert found is None and any(problem.message == caught.value.problems[0].message for problem in problems)


def test_texts_of_a_model_in_use_have_limits() -> None:
    """What the trial at the loading does not hold: another letter, a longer conversation, a pattern that goes back for ever."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    made = learnt()
    made.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("ж", "ж" * 2000)] * 3)
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?:(a|a)(a|a))+b"), "isolated")
    made.chat_template = f"{{%- if messages|length > 6 %}}{FOREVER}{{%- endif %}}{BODY}"
    for text in ("ж", "a" * 80):
        with tokenizers.BoundedTokenizer(made, "somewhere") as tokenizing, pytest.raises(UserError) as caught:
            tokenizing.tokenize([text])
        assert caught.value.problems[0].file == "somewhere"
    with tokenizers.BoundedTokenizer(made, "somewhere") as tokenizing:
        assert tokenizing.tokenize(["question"]) == [made("question")["input_ids"]]
        assert tokenizing.render(PAIR * 3) == made.apply_chat_template(PAIR * 3, tokenize=False)
        with pytest.raises(UserError):
            tokenizing.render(PAIR * 4)


def test_a_child_has_its_own_limits_and_its_caller_none() -> None:
    assert bounded.ask(lambda: {"size": len(b"x" * (64 << 20))}, 20, 1 << 20).found is None
    assert bounded.ask(lambda: {"size": len(b"x" * (64 << 20))}, 20, 1 << 30).found == {"size": 64 << 20}
    assert len(b"x" * (64 << 20)) == 64 << 20
    assert bounded.ask(lambda: os.kill(os.getpid(), signal.SIGKILL) or {}, 20).signal == signal.SIGKILL
    assert bounded.ask(lambda: {"text": "x" * 300_000}, 20).found == {"text": "x" * 300_000}


def test_a_worker_answers_one_request_after_the_other_and_ends_by_its_own_limits() -> None:
    seen: list[int] = []

    def work(number: int) -> dict[str, Any]:
        seen.append(number)
        if number == 9:
            raise OSError(28, "full")
        if number < 0:
            bounded.allow(0.2)
            while True:
                seen[0] += 1
        return {"seen": seen, "pid": os.getpid()}

    worker = bounded.StandingChild(work, 1 << 30)
    first, second = worker.ask(1).found, worker.ask(2).found
    assert first and second and first["pid"] == second["pid"] != os.getpid() and second["seen"] == [1, 2]
    assert worker.ask(9).errno == 28 and not worker.ended and seen == []
    answer = worker.ask(-1)
    assert answer.found is None and answer.signal == signal.SIGVTALRM and worker.ended
    with pytest.raises(ProcessLookupError):
        os.kill(first["pid"], 0)
