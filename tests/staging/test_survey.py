"""Which files of a folder are copied, and what is known of their content before a byte is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clustertune import manifest
from clustertune.errors import UserError
from clustertune.manifest import GIT_SHA1, SHA256
from clustertune.staging.copier import choose, survey
from tests.staging.conftest import MODEL, REVISION, fill, into_hub_cache

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin", "model.gguf"], ["config.json", "model.safetensors"]),
        (["config.json", "pytorch_model.bin", "tf_model.h5"], ["config.json", "pytorch_model.bin"]),
        (
            ["a.json", INDEX, "m-1.safetensors", "m-2.safetensors", "consolidated.safetensors", "original/consolidated.00.pth"],
            ["a.json", "m-1.safetensors", "m-2.safetensors", INDEX],
        ),
        (["tokenizer.model", "special.safetensors"], ["special.safetensors", "tokenizer.model"]),
        (["tokenizer.json", "chat_template.jinja", "README.md"], ["README.md", "chat_template.jinja", "tokenizer.json"]),
    ],
)
def test_only_what_is_loaded_is_copied(names: list[str], expected: list[str]) -> None:
    """Beside Llama's safetensors lie the publisher's own weights, 800 GB more at 405B."""
    assert choose(names, {INDEX: ["m-1.safetensors", "m-2.safetensors"]}) == expected


def test_a_missing_shard_is_told(tmp_path: Path) -> None:
    """A download that broke off must not be taken for a model."""
    fill(tmp_path / "m", {"config.json": 10, "m-1.safetensors": 10})
    (tmp_path / "m" / INDEX).write_text(json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}))
    with pytest.raises(UserError, match=r"lacks m-2.safetensors"):
        survey(tmp_path / "m", "model")


def test_the_hubs_cache_says_what_each_file_must_hash_to(tmp_path: Path) -> None:
    """Blobs are named by their content: SHA-256 of large files, git's SHA-1 of small ones."""
    fill(tmp_path / "m", {"config.json": 10, "model.safetensors": 100})
    found = survey(into_hub_cache(tmp_path, "models", MODEL, REVISION, tmp_path / "m"), "model")
    assert [(f.name, f.algorithm) for f in found] == [("config.json", GIT_SHA1), ("model.safetensors", SHA256)]


def test_a_folder_that_contradicts_its_manifest_is_not_whole(tmp_path: Path) -> None:
    """Sizes and missing files are seen before anything is copied; all of them at once."""
    fill(tmp_path / "m", {"a": 10, "b": 20})
    manifest.seal(tmp_path / "m", "dataset", {})
    (tmp_path / "m/a").write_bytes(b"short")
    (tmp_path / "m/b").unlink()
    with pytest.raises(UserError) as caught:
        survey(tmp_path / "m", "data")
    assert [p.message for p in caught.value.problems] == ["5 bytes, the folder's manifest says 10", "missing", "is not whole"]


@pytest.mark.parametrize(("make", "words"), [("none", "no such folder"), ("file", "is a file"), ("empty", "contains no file")])
def test_what_is_no_folder_of_files(tmp_path: Path, make: str, words: str) -> None:
    """An empty mount point is the usual reason."""
    path = tmp_path / "m"
    {"none": lambda: None, "file": lambda: path.write_text("x"), "empty": path.mkdir}[make]()
    with pytest.raises(UserError, match=words):
        survey(path, "data")


def test_a_link_to_nothing_is_told(tmp_path: Path) -> None:
    """A cache whose blob was removed by hand loads half a model."""
    fill(tmp_path / "m", {"a": 10})
    (tmp_path / "m/b").symlink_to("gone")
    with pytest.raises(UserError, match="a link to a file that is not there"):
        survey(tmp_path / "m", "data")
