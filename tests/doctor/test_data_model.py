"""What is read of a model's folder: every layout that the Hub has, and nothing of its weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clustertune.check.rule import FAIL
from clustertune.doctor import recipe_context
from clustertune.doctor.recipe_context import ModelFolder, has_generation_marks, snapshot
from clustertune.tensorfile import Tensor, build_header
from tests.doctor.recipe_case import make, weight_file, write_checkpoint, write_model, write_run

SMALL = (
    "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
GARBAGE = {
    "empty": b"",
    "binary": bytes(range(256)),
    "list": b"[]",
    "null": b"null",
    "number": b"3",
    "cut": b'{"model": ',
    "deep": b"[" * 100_000,
    "odd": json.dumps(
        {
            "metadata": [1], "weight_map": [1], "model": {"vocab": 3}, "added_tokens": 7, "added_tokens_decoder": [1],
            "eos_token": 3, "pad_token": [], "chat_template": 5, "vocab_size": "x", "auto_map": "x.X", "text_config": 9,
        }
    ).encode(),
    "nan": b'{"metadata": {"total_size": NaN}, "weight_map": {"a": "x.safetensors", "b": 7, "c": "../../etc/passwd"}}',
}  # fmt: skip


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("name", SMALL)
def test_no_file_of_a_model_can_end_the_doctor(name: str, kind: str, tmp_path: Path) -> None:
    """A download that was cut, an HTML page in place of a file: the other rules still speak."""
    case = make(tmp_path)
    (case.model / name).write_bytes(GARBAGE[kind])
    case.findings()


@pytest.mark.parametrize("kind", ["empty", "binary", "list", "cut", "deep", "odd"])
@pytest.mark.parametrize(
    "name",
    [
        "run.json", "owner.json", "lock", "metrics.jsonl", "data/MANIFEST.json", "adapter/MANIFEST.json",
        "adapter/adapter_model.safetensors", "checkpoints/step-000040/MANIFEST.json",
    ],
)  # fmt: skip
def test_no_file_of_a_run_can_end_the_doctor(name: str, kind: str, tmp_path: Path) -> None:
    """A run folder after a power loss is what doctor is asked about."""
    case = make(tmp_path)
    write_run(case)
    write_checkpoint(case, 40)
    (case.run / name).parent.mkdir(exist_ok=True)
    (case.run / name).write_bytes(GARBAGE[kind])
    case.findings()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"])
def test_a_folder_in_place_of_a_file_is_no_trouble(name: str, tmp_path: Path) -> None:
    """Half an unpacked archive looks so."""
    case = make(tmp_path)
    (case.model / name).unlink()
    (case.model / name).mkdir()
    case.findings()


def test_weights_are_not_read(tmp_path: Path) -> None:
    """800 GB over NFS take minutes: names and sizes are enough."""
    case = make(tmp_path)
    count = 50 << 28
    header = build_header([Tensor("a", "F32", (count,), Path(), 0, 4 * count)])
    with (case.model / "model-00001-of-00002.safetensors").open("wb") as out:
        out.write(header)
        out.truncate(len(header) + 4 * count)
    before = _bytes_read()
    assert case.findings() == []
    assert _bytes_read() - before < 64 << 20


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def test_the_caches_links_are_followed(tmp_path: Path) -> None:
    """The Hub's cache holds links to blobs: a link to nothing is a file that is missing."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    write_model(folder)
    weights = folder / "model-00001-of-00002.safetensors"
    blob = tmp_path / "blob"
    weights.rename(blob)
    weights.symlink_to(blob)
    assert ModelFolder(folder).weights == (2 * len(weight_file(16)), [], 100)
    blob.unlink()
    assert ModelFolder(folder).weights == (len(weight_file(16)), ["model-00001-of-00002.safetensors"], 100)


@pytest.mark.parametrize("index", [True, False], ids=["sharded", "one file"])
@pytest.mark.parametrize("spoil", [-1, 4, b"<html>Not found</html>"], ids=["a byte less", "the start alone", "a page"])
def test_a_file_that_broke_off_is_told(index: bool, spoil: int | bytes, tmp_path: Path) -> None:
    """A download that was stopped leaves a file that is there, and its header says that it should be longer."""
    case = make(tmp_path)
    path = case.model / "model-00001-of-00002.safetensors"
    if not index:
        (case.model / "model.safetensors.index.json").unlink()
        (case.model / "model-00002-of-00002.safetensors").unlink()
        path = path.rename(case.model / "model.safetensors")
        assert case.findings() == []
    path.write_bytes(weight_file(64)[:spoil] if isinstance(spoil, int) else spoil)
    assert [(item.rule, item.status, path.name in item.found) for item in case.findings()] == [("model-incomplete", FAIL, True)]


@pytest.mark.parametrize("name", ["tiktoken.model", "sentencepiece.bpe.model", "spiece.model", "vocab.txt"])
def test_other_kinds_of_tokenizers(name: str, tmp_path: Path) -> None:
    """XLM-R, T5, BERT and Kimi have none of the usual names."""
    case = make(tmp_path)
    (case.model / "tokenizer.json").rename(case.model / name)
    assert case.findings() == []


def test_one_file_of_weights_needs_no_index(tmp_path: Path) -> None:
    """Small models come so."""
    (tmp_path / "model.safetensors").write_bytes(b"x" * 10)
    assert ModelFolder(tmp_path).weights == (10, [], None)
    os.truncate(tmp_path / "model.safetensors", 0)
    assert ModelFolder(tmp_path).weights == (0, ["model.safetensors"], None)


def test_special_tokens_and_templates_in_every_layout(tmp_path: Path) -> None:
    """Text or object, in the configuration or beside it; a template as a file, as a key, or as one of several."""
    write_model(tmp_path)
    folder = ModelFolder(tmp_path)
    assert (folder.special("eos_token"), folder.special("pad_token")) == ("<|eot_id|>", "<|finetune_right_pad_id|>")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "D"}, {"name": "tool"}]}'
    )
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    folder = ModelFolder(tmp_path)
    assert (folder.special("eos_token"), folder.special("pad_token"), folder.template) == ("</s>", None, "D")
    (tmp_path / "chat_template.jinja").write_text("J")
    assert ModelFolder(tmp_path).template == "J"


def test_the_vocabulary_of_every_kind_of_tokenizer(tmp_path: Path) -> None:
    """Unigram lists its tokens, the others map them; added ones stand apart, and in the configuration."""
    body = {"model": {"vocab": [["<unk>", 0.0], ["a", -1.0]]}, "added_tokens": [{"id": 5, "content": "<x>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"9": {"content": "<y>"}, "z": {}}}')
    assert ModelFolder(tmp_path).vocabulary == {"<unk>": 0, "a": 1, "<x>": 5, "<y>": 9}


def test_a_model_with_pictures_is_judged_by_its_text_part(tmp_path: Path) -> None:
    """Its vocabulary and layers stand one level deeper."""
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "text_config": {"vocab_size": 262208}}')
    assert (ModelFolder(tmp_path).config or {})["vocab_size"] == 262208


def test_a_file_too_large_to_be_one_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's weights named config.json."""
    monkeypatch.setattr(recipe_context, "MOST_BYTES", 10)
    (tmp_path / "config.json").write_text('{"vocab_size": 3}')
    assert ModelFolder(tmp_path).config is None


@pytest.mark.parametrize(
    ("template", "marked"),
    [
        ("{% generation %}x{% endgeneration %}", True),
        ("{%- generation -%}x", True),
        ("{{ add_generation_prompt }}", False),
        ("{% endgeneration %}", False),
        ("", False),
    ],
)
def test_generation_marks_are_told_from_words_alike(template: str, marked: bool) -> None:
    """add_generation_prompt is in every template."""
    assert has_generation_marks(template) is marked


def test_where_the_cache_has_a_commit(tmp_path: Path) -> None:
    """As huggingface_hub names it."""
    assert snapshot(tmp_path, "models", "a/b", "c") == tmp_path / "models--a--b" / "snapshots" / "c"
    assert snapshot(tmp_path, "models", "a/b", None) is None
