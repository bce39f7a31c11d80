"""Damages of base and adapter: none of them is merged."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from clustertune import manifest
from clustertune.errors import UserError
from clustertune.merge import merge

SEALED = {
    "config.json": '{{"dropped": {}}}', "generation_config.json": '{{"eos_token_id": {}}}',
    "tokenizer_config.json": '{{"model_max_length": {}}}', "tokenizer.json": '{{"version": {}}}',
    "chat_template.jinja": "{{{{ messages }}}} {}",
}  # fmt: skip


@pytest.fixture
def sealed(own_base: Path, own_adapter: Path) -> tuple[Path, Path]:
    """A base and an adapter with all the files that a merge reads, and their manifests."""
    for number, (name, text) in enumerate(SEALED.items()):
        if not (own_base / name).exists():
            (own_base / name).write_text(text.format(number))
    manifest.seal(own_base, "model", {})
    manifest.seal(own_adapter, "adapter", {})
    return own_base, own_adapter


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.jobs) for seed in range(2, 12))])
def test_no_damage_is_merged(sealed: tuple[Path, Path], tmp_path: Path, seed: int) -> None:
    base, adapter = sealed
    out = tmp_path / "out"
    files = sorted(path for folder in sealed for path in folder.iterdir() if path.name != "README.md")
    assert len(files) > 10
    for path in files:
        before, times = path.read_bytes(), path.stat()
        draw, data = random.Random(f"{path.name} {seed}"), bytearray(before)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with pytest.raises(UserError) as refused:
            merge(base, adapter, out)
        assert path.name in str(refused.value) or path.suffix == ".json", (path, refused.value)
        assert not (out / manifest.MANIFEST).exists(), path
        path.write_bytes(before)
        # Restored with its old times, as by cp -p: nothing that was made of the damaged bytes may be continued.
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    merge(base, adapter, out)
    merge(base, adapter, tmp_path / "again")
    for path in out.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
