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
from clustertune.ifeval.generations import GenerationLog, ResumableLM, hold

BATCHES = {"one": ["a", "b\n"], "two": ["ü", ""], "three": ["c"]}


def write_log(path: Path) -> bytes:
    log = GenerationLog(path)
    for key, answers in BATCHES.items():
        log.append(key, answers)
    log.close()
    return path.read_bytes()


class TestLog:
    def test_after_a_cut_at_any_byte_the_whole_batches_are_there(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        content = write_log(path)
        ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
        for length in range(len(content) + 1):
            path.write_bytes(content[:length])
            log = GenerationLog(path)
            whole = sum(end <= length for end in ends)
            found = [key for key, answers in BATCHES.items() if log.find(key, len(answers)) == answers]
            assert found == list(BATCHES)[:whole]
            log.append("next", ["x"])
            log.close()
            assert len(path.read_text().splitlines()) == whole + 1

    @pytest.mark.parametrize("line", [b"[]\n", b'{"batch": "k"}\n', b'{"batch": "k", "answers": [1]}\n', b"\xff\n", b"null\n"])
    def test_foreign_lines_are_cut_off(self, line: bytes, tmp_path: Path) -> None:
        path = tmp_path / "log"
        content = write_log(path)
        path.write_bytes(content + line + content)
        log = GenerationLog(path)
        assert log.find("three", 1) == ["c"]
        log.close()
        assert path.read_bytes() == content

    def test_a_batch_of_another_size_is_not_taken(self, tmp_path: Path) -> None:
        write_log(tmp_path / "log")
        assert GenerationLog(tmp_path / "log").find("one", 1) is None


def test_a_folder_is_held_by_one(tmp_path: Path) -> None:
    with hold(tmp_path):
        with pytest.raises(UserError) as caught, hold(tmp_path):
            pass
        assert caught.value.code == ExitCode.AGAIN
    with hold(tmp_path):
        pass


class Echo:
    """Answers each request with its batch, as a model does whose answers depend on the padding."""

    max_length = 40

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def tok_encode(self, text: str) -> list[str]:
        return list(text)

    def generate_until(self, requests: list[Any], disable_tqdm: bool) -> list[str]:
        texts = [request.args[0] for request in requests]
        self.batches.append(texts)
        return [f"{text} in {texts}" for text in texts]


def make_requests(texts: list[str]) -> list[Any]:
    return [SimpleNamespace(args=(text, {"max_gen_toks": 10})) for text in texts]


def answer(texts: list[str], size: int, log: GenerationLog) -> tuple[list[str], Echo, ResumableLM]:
    echo = Echo()
    lm = ResumableLM(echo, log, size, lambda _done, _total: None)
    return lm.generate_until(make_requests(texts)), echo, lm


texts_and_size = given(
    texts=st.lists(st.text(st.sampled_from("abc"), max_size=6), min_size=1, max_size=20), size=st.integers(1, 7)
)


class TestResumable:
    @settings(deadline=None, max_examples=40)
    @texts_and_size
    def test_batches_are_those_of_hflm(self, tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int) -> None:
        from lm_eval.models.utils import Collator

        log = GenerationLog(tmp_path_factory.mktemp("log") / "log")
        _, echo, _ = answer(texts, size, log)
        log.close()
        collator = Collator(
            [request.args for request in make_requests(texts)],
            sort_fn=lambda args: (-len(args[0]), args[0]),
            group_by="gen_kwargs",
            group_fn=lambda args: args[1],
        )
        assert echo.batches == [[context for context, _ in batch] for batch in collator.get_batched(n=size)]

    @settings(deadline=None, max_examples=40)
    @given(
        texts=st.lists(st.text(st.sampled_from("abc"), max_size=6), min_size=1, max_size=20),
        size=st.integers(1, 7),
        cut=st.floats(0, 1),
    )
    def test_resumed_at_any_point_the_answers_are_the_same(
        self, tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, cut: float
    ) -> None:
        path = tmp_path_factory.mktemp("log") / "log"
        log = GenerationLog(path)
        expected, whole, _ = answer(texts, size, log)
        log.close()
        content = path.read_bytes()
        path.write_bytes(content[: int(cut * len(content))])
        kept = path.read_bytes().count(b"\n")
        log = GenerationLog(path)
        found, echo, lm = answer(texts, size, log)
        log.close()
        assert found == expected
        assert echo.batches == whole.batches[kept:]
        assert lm.resumed == sum(map(len, whole.batches[:kept]))
        assert len({json.loads(line)["batch"] for line in path.read_text().splitlines()}) == len(whole.batches)

    def test_single_prompts_in_a_cache_would_change_the_batches(self, tmp_path: Path) -> None:
        """Why the batch is the unit: with the longest prompt known, lm-eval's own cache asks for other batches."""
        texts = ["aaaa", "aaa", "aa", "a"]
        log = GenerationLog(tmp_path / "log")
        expected, _, _ = answer(texts, 2, log)
        rest, _, _ = answer(texts[1:], 2, GenerationLog(tmp_path / "other"))
        assert rest != expected[1:]

    def test_prompts_that_lose_their_beginning_are_counted(self, tmp_path: Path) -> None:
        _, _, lm = answer(["a" * 30, "a" * 31, "a"], 2, GenerationLog(tmp_path / "log"))
        assert lm.truncated == 1
