"""``chat`` answers as transformers does; ``serve`` starts what is there, on loopback, and refuses a damaged model."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.console import escape
from tests.command import run
from tests.serving.conftest import program, without


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = program(tmp_path)
    monkeypatch.setenv("CLUSTERTUNE_VLLM", str(path))
    return path


def test_chat_answers_in_the_model_s_template(tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = run("chat", tiny_model, "--prompt", "Hello", "--greedy", "--max-new-tokens", "12", "--device", "cpu", stack=True)
    assert done.code == 0, done.err
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_model), AutoModelForCausalLM.from_pretrained(tiny_model)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    made = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0][inputs["input_ids"].shape[1] :]
    expected = tokenizer.decode(made, skip_special_tokens=True)
    assert (
        done.out.split() == escape(expected).split()
    )  # what steers a terminal is written out; a pipe that is read as text may give other line ends


def test_serve_listens_on_loopback_with_the_model_s_type(tiny_model: Path, tmp_path: Path, vllm: Path) -> None:
    """And refuses a model that lacks weights, and says of one without digests that nothing was compared."""
    done = run("serve", tiny_model, "--port", "8123", "--dry-run", stack=True)
    assert done.code == 0, done.err
    assert done.out.split()[:3] == [str(vllm), "serve", str(tiny_model)]
    assert "--host 127.0.0.1" in done.out and "--dtype bfloat16" in done.out and "not compared" not in done.err
    done = run("serve", without(tiny_model, tmp_path / "same", "nothing"), "--dry-run", stack=True)
    assert done.code == 0 and "contents are not compared" in done.err
    done = run("serve", without(tiny_model, tmp_path / "model", "lm_head.weight"), "--dry-run", stack=True)
    assert done.code == 2 and "lm_head.weight" in done.err
