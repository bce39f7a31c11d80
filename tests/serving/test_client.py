"""The client of vLLM's servers against servers that fail in each way that was seen: an error, or the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance

from clustertune.errors import UserError
from clustertune.evaluate.client import ServersLM
from clustertune.evaluate.servers import Servers
from tests.serving.conftest import Start

GENERATE = {"until": [], "do_sample": False, "temperature": 0.0, "max_gen_toks": 16}


def prompts(count: int) -> list[Instance]:
    return [Instance("generate_until", {}, (f"Prompt {i}", dict(GENERATE)), i) for i in range(count)]


def client(servers: Servers, model: Path, **more: Any) -> ServersLM:
    return ServersLM(servers.job.urls, model, model="model", concurrent=8, max_length=2048, key=servers.job.read_key(), **more)


def wanted(lm: ServersLM, count: int = 40) -> list[str]:
    """What the fake answers to each prompt's tokens."""
    tokens = (lm.tok_encode(prompt.args[0]) for prompt in prompts(count))
    return [f"answer {sum(at * token for at, token in enumerate(found, 1))}" for found in tokens]


@pytest.mark.parametrize("second", [["die", 3], ["once", 3], "ok"])
def test_a_server_that_fails_leaves_the_same_answers(start: Start, tiny_model: Path, second: Any) -> None:
    lm = client(start("ok", second), tiny_model)
    assert lm.generate_until(prompts(40), disable_tqdm=True) == wanted(lm) and len(set(wanted(lm))) == 40


def test_a_hanging_server_leaves_the_ring(start: Start, tiny_model: Path) -> None:
    lm = client(start("ok", ["hang", 2]), tiny_model, stall_seconds=2)
    assert lm.generate_until(prompts(40), disable_tqdm=True) == wanted(lm)
    assert len(lm.down) == 1


def test_what_waits_is_not_sent_to_a_server_that_hangs(start: Start, tiny_model: Path) -> None:
    """With 2 under way of 12, those that wait would otherwise be sent to it one after the other, each for the whole time."""
    servers = start("ok", "hang")
    lm = client(servers, tiny_model, stall_seconds=1)
    lm._concurrent = 2
    assert len(lm.generate_until(prompts(12), disable_tqdm=True)) == 12
    assert Path(servers.job.folder, "server-1.log").read_text().count("hangs") <= 2


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("500", "failed 3 times"),
        ("die", "no server is left"),
        ("hang", "no server is left .*no answer within 2"),
        ("null", "null text"),
        ("empty", "0 answers"),
        ("nochoices", "without choices"),
        ("two", "2 answers"),
        ("long", "10000 tokens"),
        ("abort", "failed 3 times.*abort"),
    ],
)
def test_what_is_no_answer_is_never_scored(start: Start, tiny_model: Path, mode: str, message: str) -> None:
    servers = start([mode, 5])
    with pytest.raises(UserError, match=message) as caught:
        client(servers, tiny_model, stall_seconds=2).generate_until(prompts(40), disable_tqdm=True)
    text = str(caught.value)
    assert servers.job.urls[0] in text
    assert "Prompt" in text or "no server" in text


def test_the_tokens_are_those_of_the_hf_backend(start: Start, tiny_model: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    lm, hf = client(start("ok"), tiny_model), HFLM(pretrained=str(tiny_model), device="cpu")
    texts = ["Plain text", lm.apply_chat_template([{"role": "user", "content": "Hello"}]), f"{hf.tokenizer.bos_token}begun"]
    for text in texts:
        assert lm.tok_encode(text) == hf.tok_encode(text)
        assert lm.tok_encode(text) == hf.tok_batch_encode([text])[0][0].tolist()
