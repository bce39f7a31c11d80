"""The log of finished batches after a kill at any byte, and batches that are HFLM's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertune.errors import ExitCode, UserError
from clustertune.evaluate.answers import AnswerLog, RecordedLM, hold

TEXTS = ["aaa", "b", "", "\u00fc\n", "cc", "b", "abc"]


def test_a_folder_is_held_by_one(tmp_path: Path) -> None:
    with hold(tmp_path):
        with pytest.raises(UserError) as caught, hold(tmp_path):
            pass
        assert caught.value.code == ExitCode.AGAIN
    with hold(tmp_path):
        pass


class Echo:
    """Answers each request with its batch, as a model does whose answers depend on the padding."""

    max_length, max_gen_toks = 40, 10

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def tok_encode(self, text: str) -> list[str]:
        return list(text)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        texts = [request.args[0] for request in requests]
        self.batches.append(texts)
        return [f"{text} in {texts}" for text in texts]


def make_requests(texts: list[str]) -> list[Any]:
    return [SimpleNamespace(args=(text, {"max_gen_toks": 10}), task_name="t", doc_id=i) for i, text in enumerate(texts)]


def answer(texts: list[str], size: int, path: Path) -> tuple[list[str], Echo, RecordedLM]:
    log, echo = AnswerLog(path), Echo()
    lm = RecordedLM(echo, log, size, lambda _done, _total: None, whole=False)
    found = lm.generate_until(make_requests(texts))
    log.close()
    return found, echo, lm


def test_after_a_kill_at_any_byte_the_answers_are_the_same(tmp_path: Path) -> None:
    """Torn and foreign lines, and what follows them, are cut off; a batch that lacks one answer is asked again, whole."""
    path, size = tmp_path / "log", 3
    expected, whole, _ = answer(TEXTS, size, path)
    content = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(content) if byte == ord("\n")]
    places = {*range(0, len(content), 13), *(end + step for end in ends for step in (-1, 0))}
    lines = [content[: ends[1]] + line + content for line in (b"[]\n", b'{"key": "k"}\n', b"\xff\n", b"null\n")]
    for left in [*(content[:at] for at in sorted(places)), *lines]:
        path.write_bytes(left)
        kept = sum(left[:end] == content[:end] for end in ends)
        done = kept // size if kept < len(TEXTS) else len(whole.batches)
        found, echo, lm = answer(TEXTS, size, path)
        assert found == expected and path.read_bytes() == content
        assert echo.batches == whole.batches[done:] and lm.resumed == sum(map(len, whole.batches[:done]))


class Fake:
    """A model whose every request returns the given answers."""

    max_length, max_gen_toks = 100, 10

    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.asked = answers, 0

    def tok_encode(self, text: str) -> list[str]:
        return list(text)

    def set_cache_hook(self, hook: Any) -> None:
        self.hook = hook

    def generate_until(self, requests: list[Any], **_: Any) -> list[Any]:
        self.asked += len(requests)
        return self.answers[: len(requests)]

    loglikelihood = loglikelihood_rolling = generate_until


def pairs(count: int) -> list[Any]:
    return [SimpleNamespace(args=("Question", f" {i}"), task_name="arc", doc_id=i) for i in range(count)]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        ("generate_until", ["a", None]),
        ("generate_until", ["a"]),
        ("loglikelihood", [(-1.0, True), None]),
        ("loglikelihood", [(-1.0, True), (float("nan"), False)]),
        ("loglikelihood_rolling", [-1.0, None]),
    ],
)
def test_a_missing_answer_is_an_error_and_never_on_disk(kind: str, answers: list[Any], whole: bool, tmp_path: Path) -> None:
    """lm-eval scores an empty text in its place."""
    log = AnswerLog(tmp_path / "log")
    lm = RecordedLM(Fake(answers), log, 2, lambda _done, _total: None, whole=whole)
    requests = make_requests(["x", "y"]) if kind == "generate_until" else pairs(2)
    with pytest.raises(UserError, match=r"task \w+, document \d: ") as caught:
        getattr(lm, kind)(requests)
    assert caught.value.code == ExitCode.FAILED
    assert (tmp_path / "log").read_bytes() == b""


def test_answers_of_servers_are_kept_one_by_one(tmp_path: Path) -> None:
    """What came before a server died is not asked again."""

    class Dying(Fake):
        def loglikelihood(self, requests: list[Any], **_: Any) -> list[Any]:
            for request in requests[:3]:
                self.hook.add_partial("loglikelihood", request.args, (-1.0, True))
            self.hook.add_partial("loglikelihood", requests[3].args, (None, True))
            raise ConnectionError

    log = AnswerLog(tmp_path / "log")
    with pytest.raises(ConnectionError):
        RecordedLM(Dying([]), log, 1, lambda _done, _total: None, whole=True).loglikelihood(pairs(5))
    log.close()
    fake = Fake([(-2.0, False)] * 5)
    lm = RecordedLM(fake, AnswerLog(tmp_path / "log"), 1, lambda _done, _total: None, whole=True)
    assert lm.loglikelihood(pairs(5)) == [(-1.0, True)] * 3 + [(-2.0, False)] * 2
    assert (fake.asked, lm.resumed) == (2, 3)
