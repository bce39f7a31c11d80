"""The folders that a node makes before its ranks start: of its user only, and refused in a sentence where they cannot be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from clustertune.errors import UserError
from clustertune.launch import node_folders
from clustertune.launch.node_folders import make_caches, make_own_folder


def test_the_jobs_folder_is_for_its_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled kernels are code, and everybody may write in /tmp: a folder that another user made is not used."""
    folder = tmp_path / "clustertune-1"
    env = {"TRITON_CACHE_DIR": str(folder / "triton")}
    for _ in range(2):
        assert make_own_folder(env) == folder and stat.S_IMODE(folder.stat().st_mode) == 0o700

    def refused(words: str) -> None:
        with pytest.raises(UserError, match=words):
            make_own_folder(env)

    for mode in (0o770, 0o707):  # the group's members, and everybody
        folder.chmod(mode)
        refused("others can write to it")
    folder.chmod(0o700)
    with monkeypatch.context() as other:
        other.setattr(node_folders.os, "getuid", lambda: folder.stat().st_uid + 1)
        refused("belongs to another user")
    folder.rmdir()
    (tmp_path / "theirs").mkdir()
    folder.symlink_to(tmp_path / "theirs")
    refused("belongs to another user")
    folder.unlink()
    folder.touch()
    refused("cannot hold compiler caches")
    assert make_own_folder({}) is None


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    """A file in the way, and one where nothing can be made: with the machine, the path and the variable."""
    file = tmp_path / "file"
    file.touch()
    make_caches({"HF_HOME": str(tmp_path / "new" / "hf")})
    assert (tmp_path / "new" / "hf").is_dir()
    for path in (file, file / "below", Path("/proc/none/hf")):
        with pytest.raises(UserError) as error:
            make_caches({"HF_HOME": str(path)})
        assert str(path) in str(error.value) and "HF_HOME" in str(error.value) and os.uname().nodename in str(error.value)
    with pytest.raises(UserError):
        make_caches({"HF_HOME": "/proc/self"})  # there, and nothing can be written to it
    make_caches({"HF_HOME": "/proc/self", "HF_HUB_OFFLINE": "1"})
