"""The manifest itself can be damaged: what it says of the training (step, tokens, digests) stands in no hashed file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustertune import manifest

META = {
    "step": 4,
    "tokens": 8123,
    "epoch": 0.25,
    "final": False,
    "eval_skipped": False,
    "state_digests": ["ab" * 32, "cd" * 32],
}


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sealed")
    (folder / "shard").write_bytes(b"data")
    manifest.seal(folder, "checkpoint", META)
    return folder


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_seen_or_changes_nothing(sealed: Path, place: int, bit: int) -> None:
    path = sealed / manifest.MANIFEST
    whole = path.read_bytes()
    data = bytearray(whole)
    data[place % len(data)] ^= 1 << bit
    try:
        path.write_bytes(data)
        if not manifest.find_problems(sealed, "checkpoint"):
            assert manifest.read_manifest(sealed).meta == META
    finally:
        path.write_bytes(whole)
