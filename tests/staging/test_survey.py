"""Which files of a folder are copied, and what is known of their content before a byte is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clustertune import manifest
from clustertune.errors import UserError
from clustertune.staging.copier import choose, survey
from tests.staging.conftest import fill

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


def test_a_folder_that_contradicts_its_manifest_is_not_whole(tmp_path: Path) -> None:
    """Sizes and missing files are seen before anything is copied; all of them at once."""
    fill(tmp_path / "m", {"a": 10, "b": 20})
    manifest.seal(tmp_path / "m", "dataset", {})
    (tmp_path / "m/a").write_bytes(b"short")
    (tmp_path / "m/b").unlink()
    with pytest.raises(UserError) as caught:
        survey(tmp_path / "m", "data")
    assert [p.message for p in caught.value.problems] == ["5 bytes, the folder's manifest says 10", "missing", "is not whole"]


WRONG = {
    "no such folder": lambda path: None,
    "is a file": lambda path: path.write_text("x"),
    "contains no file": lambda path: path.mkdir(),  # an empty mount point is the usual reason
    "a link to a file that is not there": lambda path: (fill(path, {"a": 10}) / "b").symlink_to("gone"),
    "lacks m-2.safetensors": lambda path: (fill(path, {"config.json": 10, "m-1.safetensors": 10}) / INDEX).write_text(
        json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}})
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_no_whole_folder_of_files(tmp_path: Path, words: str) -> None:
    """A download that broke off, and a cache whose blob was removed by hand, must not be taken for a model."""
    WRONG[words](tmp_path / "m")
    with pytest.raises(UserError, match=words):
        survey(tmp_path / "m", "model")
