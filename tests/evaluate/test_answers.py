"""The log of finished batches after a kill at any byte, and batches that are HFLM's own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustertune.errors import ExitCode, UserError
from clustertune.evaluate.answers import AnswerLog, RecordedLM, hold

ANSWERS = {"one": "b\n", "two": "ü", "three": ""}
REQUEST = SimpleNamespace(task_name="t", doc_id=0)


def write_log(path: Path) -> bytes:
    log = AnswerLog(path)
    for key, answer in ANSWERS.items():
        log.append([(key, REQUEST, answer)])
    log.close()
    return path.read_bytes()


class TestLog:
    def test_after_a_cut_at_any_byte_the_whole_lines_are_there(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        content = write_log(path)
        ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
        for length in range(len(content) + 1):
            path.write_bytes(content[:length])
            log = AnswerLog(path)
            whole = sum(end <= length for end in ends)
            assert [key for key, text in ANSWERS.items() if log.find(key, "generate_until") == text] == list(ANSWERS)[:whole]
            log.append([("next", REQUEST, "x")])
            log.close()
            assert len(path.read_text().splitlines()) == whole + 1

    @pytest.mark.parametrize("line", [b"[]\n", b'{"key": "k"}\n', b"\xff\n", b"null\n"])
    def test_foreign_lines_are_cut_off(self, line: bytes, tmp_path: Path) -> None:
        path = tmp_path / "log"
        content = write_log(path)
        path.write_bytes(content + line + content)
        log = AnswerLog(path)
        assert log.find("three", "generate_until") == ""
        log.close()
        assert path.read_bytes() == content


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


def answer(texts: list[str], size: int, log: AnswerLog) -> tuple[list[str], Echo, RecordedLM]:
    echo = Echo()
    lm = RecordedLM(echo, log, size, lambda _done, _total: None, whole=False)
    return lm.generate_until(make_requests(texts)), echo, lm


texts_and_size = given(
    texts=st.lists(st.text(st.sampled_from("abc"), max_size=6), min_size=1, max_size=20), size=st.integers(1, 7)
)


class TestResumable:
    @settings(deadline=None, max_examples=15)
    @texts_and_size
    def test_batches_are_those_of_hflm(self, tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int) -> None:
        from lm_eval.models.utils import Collator

        log = AnswerLog(tmp_path_factory.mktemp("log") / "log")
        _, echo, _ = answer(texts, size, log)
        log.close()
        collator = Collator(
            [request.args for request in make_requests(texts)],
            sort_fn=lambda args: (-len(args[0]), args[0]),
            group_by="gen_kwargs",
            group_fn=lambda args: args[1],
        )
        assert echo.batches == [[context for context, _ in batch] for batch in collator.get_batched(n=size)]

    @settings(deadline=None, max_examples=15)
    @given(
        texts=st.lists(st.text(st.sampled_from("abc"), max_size=6), min_size=1, max_size=20),
        size=st.integers(1, 7),
        cut=st.floats(0, 1),
    )
    def test_resumed_at_any_point_the_answers_are_the_same(
        self, tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, cut: float
    ) -> None:
        path = tmp_path_factory.mktemp("log") / "log"
        log = AnswerLog(path)
        expected, whole, _ = answer(texts, size, log)
        log.close()
        content = path.read_bytes()
        path.write_bytes(content[: int(cut * len(content))])
        kept = path.read_bytes().count(b"\n")
        log = AnswerLog(path)
        found, echo, lm = answer(texts, size, log)
        log.close()
        assert found == expected
        done = kept // size if kept < len(texts) else len(whole.batches)  # a batch that lacks one answer is asked again
        assert echo.batches == whole.batches[done:]
        assert lm.resumed == sum(map(len, whole.batches[:done]))
        keys = [json.loads(line)["key"] for line in path.read_text().splitlines()]
        assert len(keys) == len(set(keys)) == len(texts)

    def test_prompts_that_lose_their_beginning_are_counted(self, tmp_path: Path) -> None:
        _, _, lm = answer(["a" * 30, "a" * 31, "a"], 2, AnswerLog(tmp_path / "log"))
        assert lm.truncated == 1


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


def test_the_same_request_of_two_documents_or_twice_of_one_is_asked_each_time(tmp_path: Path) -> None:
    fake = Fake(["a", "b", "c"])
    requests = [*make_requests(["x"] * 2), make_requests(["x"])[0]]
    lm = RecordedLM(fake, AnswerLog(tmp_path / "log"), 3, lambda _done, _total: None, whole=False)
    assert sorted(lm.generate_until(requests)) == ["a", "b", "c"] and fake.asked == 3
