"""Damages of a model with a manifest: none of them is scored."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from clustertune import manifest
from clustertune.errors import UserError
from clustertune.evaluate.run import evaluate
from tests.evaluate.conftest import SETTINGS

SMALL = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"]
WEIGHTS = "model.safetensors"


@pytest.fixture
def sealed(tiny_model: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / manifest.MANIFEST).unlink(missing_ok=True)
    manifest.seal(folder, "merged", {})
    return folder


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.jobs) for seed in range(1, 6))])
def test_a_damaged_model_is_not_scored(seed: int, sealed: Path, parity_data: Path, tmp_path: Path) -> None:
    for path in [sealed / name for name in [*SMALL, WEIGHTS, manifest.MANIFEST]]:
        before, data, draw = path.read_bytes(), bytearray(path.read_bytes()), random.Random(f"{path.name} {seed}")
        data[draw.randrange(len(data) // 2, len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with pytest.raises(UserError, match=path.name.partition(".")[0]):
            evaluate(sealed, tmp_path / "out", settings=SETTINGS, data=parity_data)
        assert not (tmp_path / "out" / manifest.MANIFEST).exists()
        path.write_bytes(before)


def test_damaged_prompts_are_not_asked(sealed: Path, parity_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parcel" / "eval"
    folder.mkdir(parents=True)
    prompts = Path(shutil.copy(parity_data, folder))
    manifest.seal(folder.parent, "parcel", {})
    prompts.write_bytes(prompts.read_bytes().replace(b"e", b"a", 1))
    with pytest.raises(UserError, match="content differs"):
        evaluate(sealed, tmp_path / "out", settings=SETTINGS, data=prompts)
