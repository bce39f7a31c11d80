"""What the ranks of a Megatron recipe read: conversations in Bridge's form, and a tokenizer whose template has marks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertune import manifest
from clustertune.data.local_model import make_local_model
from clustertune.data.tokenizer import training_template
from clustertune.errors import UserError
from clustertune.megatron import inputs
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir
from tests.megatron.conftest import SMALL

UNKNOWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
MARKED = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder with a tokenizer."""
    texts = [f"word{n} and more words of it" for n in range(200)]
    make_local_model({**SMALL, "vocab_size": 512}, texts, tmp_path / "model", 1)
    return tmp_path / "model"


def test_conversations_and_tokenizer(run: RunDir, resolved: Resolved, model: Path) -> None:
    """Of a row the messages alone; the tokenizer masks what the user said, by its own template; whole folders are kept."""
    from transformers import AutoTokenizer

    counts = inputs.make(resolved, run.path, run.data, (str(model), None))
    assert counts == {"train": 1, "eval": 1}
    where = inputs.places(run.path)
    assert [set(json.loads(line)) for line in (where["data"] / "training.jsonl").open()] == [{"messages"}]
    assert (where["data"] / "validation.jsonl").is_file()
    tokenizer: Any = AutoTokenizer.from_pretrained(where["tokenizer"])
    talk = [{"role": "user", "content": "word1"}, {"role": "assistant", "content": "more words"}]
    found = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    learnt = [token for token, mask in zip(found["input_ids"], found["assistant_masks"], strict=True) if mask]
    assert "more words" in tokenizer.decode(learnt) and "word1" not in tokenizer.decode(learnt)
    before = {path: path.stat().st_mtime_ns for path in where["data"].parent.rglob("*") if path.is_file()}
    (where["data"] / "training.jsonl.idx.npy").write_bytes(b"an index that Bridge puts beside it")
    inputs.make(resolved, run.path, run.data, (str(model), None))
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())


def test_other_conversations_are_written_anew(run: RunDir, resolved: Resolved, model: Path) -> None:
    """And a split that has none is refused."""
    inputs.make(resolved, run.path, run.data, (str(model), None))
    (run.data / "train.jsonl").write_text((run.data / "train.jsonl").read_text() * 3)
    (run.data / manifest.MANIFEST).unlink()
    manifest.seal(run.data, "dataset", {})
    assert inputs.make(resolved, run.path, run.data, (str(model), None)) == {"train": 3, "eval": 1}
    (run.data / "train.jsonl").write_text("")
    (run.data / manifest.MANIFEST).unlink()
    manifest.seal(run.data, "dataset", {"other": True})
    with pytest.raises(UserError, match="no conversation"):
        inputs.make(resolved, run.path, run.data, (str(model), None))


def test_a_template_without_marks_is_told_before_the_queue(model: Path) -> None:
    """Bridge would refuse it in the middle of the packing, on the nodes."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = MARKED
    assert training_template(tokenizer, marked=True) == MARKED
    tokenizer.chat_template = UNKNOWN
    with pytest.raises(UserError, match="does not mark") as error:
        training_template(tokenizer, marked=True)
    assert error.value.problems[0].key == "model.chat_template"
