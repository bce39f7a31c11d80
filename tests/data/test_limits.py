"""Foreign templates and tokenizers that take for ever or all memory: an error that names the place, never a hanging command."""

from __future__ import annotations

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
LARGE = "{%- set x = 'word' * (10 ** 12) %}"
SETTINGS = train_defaults() | {"packing": False, "max_length": None, "assistant_only_loss": False}
BODY = "{%- for m in messages %}{{ m.role + m.content }}{%- endfor %}"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "TEMPLATE_SECONDS", 1.0)
    monkeypatch.setattr(tokens, "BATCH_SECONDS", 1.0)


def learnt() -> Any:
    return train_tokenizer(["question answer"] * 9, 300, 512)


@pytest.mark.parametrize("part", [POWER, FOREVER])
@pytest.mark.parametrize("when", ["true", "messages|length > 1", "messages|length > 3"])
def test_a_template_without_end_is_refused_as_it_is_loaded(tmp_path: Path, part: str, when: str) -> None:
    made = learnt()
    made.chat_template = f"{{%- if {when} %}}{part}{{%- endif %}}{BODY}"
    made.save_pretrained(tmp_path)
    with pytest.raises(UserError) as caught:
        tokenizers.load_tokenizer(str(tmp_path), None, None, {})
    assert caught.value.problems[0].key == "model.chat_template"


@pytest.mark.parametrize(("part", "processes"), [(POWER, 1), (FOREVER, 1), (LARGE, 1), (LARGE, 2)])
def test_a_conversation_that_a_template_does_not_end_with_is_named(
    run: Any, part: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(processes)))
    rows = [{"messages": [{"role": "user", "content": f"question {n}"}, PAIR[1]]} for n in range(600)]
    got = run(rows, format="messages", eval_fraction=0.01)
    made = learnt()
    made.chat_template = f"{{%- if messages[0].content == 'question 300' %}}{part}{{%- endif %}}{BODY}"
    with pytest.raises(UserError) as caught:
        tokens.make(got.out, made, SETTINGS, chunk=1 << 30 if processes == 1 else 40_000)
    assert ".jsonl:" in str(caught.value.problems[0].file)


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


def test_all_shards_of_a_process_are_made_in_one_child(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child for each would fill the tokenizer's caches anew: a third more CPU time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    forks: list[list[int]] = []
    fork, made = os.fork, learnt()
    made.chat_template = BODY
    rows = [{"messages": [{"role": "user", "content": f"question {n}"}, PAIR[1]]} for n in range(300)]
    monkeypatch.setattr(os, "fork", lambda: forks[-1].append(1) or fork())
    got = run(rows, format="messages")
    for chunk in (1 << 30, 3000):
        forks.append([])
        tokens.shutil.rmtree(got.out / "tokens", ignore_errors=True)
        tokens.make(got.out, made, SETTINGS, chunk=chunk)
    assert len(forks[0]) == len(forks[1]) > 0
