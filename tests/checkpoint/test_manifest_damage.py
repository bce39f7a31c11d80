"""The manifest itself can be damaged: what it says about the training (step, tokens, digests) stands in no hashed file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustertune import manifest
from clustertune.errors import UserError
from clustertune.events import read_events, read_object
from clustertune.report.metrics import MetricsReader
from clustertune.rundir import RunDir

META = {"step": 4, "tokens": 8123, "epoch": 0.25, "final": False, "eval_skipped": False, "state_digests": ["ab" * 32]}


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sealed")
    (folder / "shard").write_bytes(b"data")
    manifest.seal(folder, "checkpoint", META)
    return folder


@settings(max_examples=300, deadline=None)
@given(offset=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_seen_or_changes_nothing(sealed: Path, offset: int, bit: int) -> None:
    path = sealed / manifest.MANIFEST
    whole = path.read_bytes()
    data = bytearray(whole)
    data[offset % len(data)] ^= 1 << bit
    try:
        path.write_bytes(data)
        if not manifest.find_problems(sealed, "checkpoint"):
            assert manifest.read_manifest(sealed).meta == META
    finally:
        path.write_bytes(whole)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """A reader that opens a pipe waits until a writer opens it too."""
    (tmp_path / "empty").touch()
    (tmp_path / "more").touch()
    manifest.seal(tmp_path, "checkpoint", {})
    (tmp_path / "empty").unlink()
    os.mkfifo(tmp_path / "empty")
    assert "empty: is not a plain file" in str(manifest.find_problems(tmp_path)[0])
    (tmp_path / manifest.MANIFEST).unlink()
    os.mkfifo(tmp_path / manifest.MANIFEST)
    with pytest.raises(UserError, match="is not a plain file"):
        manifest.read_manifest(tmp_path)
    run = RunDir(tmp_path)
    os.mkfifo(run.run_json)
    os.mkfifo(run.metrics)
    with pytest.raises(UserError, match="is not a plain file"):
        run.read()
    assert read_object(run.run_json) == {} and list(read_events(run.metrics)) == []
    with pytest.raises(OSError, match="is not a plain file"):
        MetricsReader().follow(run.metrics)
