"""The commit protocol: nothing is whole before its manifest, and a manifest can name nothing outside its folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clustertune import manifest
from clustertune.errors import UserError

WRITER = """
import sys
from pathlib import Path
from clustertune import manifest
folder = Path(sys.argv[1]); folder.mkdir()
(folder / "sub").mkdir()
for name in ("a.bin", "sub/b.bin"):
    (folder / name).write_bytes(name.encode() * 1000)
manifest.seal(folder, "thing", {"step": 1})
"""


def test_a_sealed_folder_is_whole(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    manifest.seal(tmp_path, "thing", {"step": 1})
    assert manifest.find_problems(tmp_path, "thing") == []
    assert "not a other" in str(manifest.find_problems(tmp_path, "other")[0])


@pytest.mark.parametrize("nth", range(1, 13))
def test_killed_at_any_write_fsync_or_rename_it_is_whole_or_not_there(tmp_path: Path, nth: int) -> None:
    """The writer is ended at its nth call of write, fsync or rename; the manifest must not precede what it names."""
    program = (
        "import os, signal\n"
        f"left = [{nth}]\n"
        "def wrap(name):\n"
        "    real = getattr(os, name)\n"
        "    def call(*a, **k):\n"
        "        left[0] -= 1\n"
        "        if left[0] == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return real(*a, **k)\n"
        "    setattr(os, name, call)\n"
        "for name in ('fsync', 'replace', 'rename', 'open'): wrap(name)\n" + WRITER
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], check=False)
    problems = manifest.find_problems(tmp_path / "out", "thing")
    assert done.returncode in (0, -signal.SIGKILL)
    whole = not problems
    assert whole == (tmp_path / "out" / manifest.MANIFEST).exists()
    assert (tmp_path / "out" / "sub" / "b.bin").read_bytes() == b"sub/b.bin" * 1000 or not whole


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b"])
def test_a_manifest_that_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    body = {"format": 1, "kind": "thing", "meta": {}, "files": {name: {"size": 1, "sha256": "0"}}}
    (tmp_path / manifest.MANIFEST).write_text(json.dumps(body))
    with pytest.raises(UserError, match="leaves the folder"):
        manifest.read_manifest(tmp_path)


def seal_fast(folder: Path, kind: str) -> None:
    """A folder whose one file is recorded by XXH3-128, manifest written past the guard of ``seal``."""
    folder.mkdir()
    (folder / "f").write_bytes(b"weights")
    record = manifest.hash_file(folder / "f", "xxh3_128")
    body = {"format": 1, "kind": kind, "meta": {}, "files": {"f": record.as_json()}}
    (folder / manifest.MANIFEST).write_text(json.dumps(body))


def test_a_merged_model_may_carry_the_fast_digest(tmp_path: Path) -> None:
    seal_fast(tmp_path / "m", "merged")
    assert manifest.find_problems(tmp_path / "m", "merged") == []
    assert json.loads((tmp_path / "m" / manifest.MANIFEST).read_text())["files"]["f"].keys() == {"size", "xxh3_128"}
    (tmp_path / "m" / "f").write_bytes(b"weighty")
    assert "differs from the manifest's XXH3-128" in str(manifest.find_problems(tmp_path / "m")[0])
    with pytest.raises(ValueError, match="not by SHA-256"):
        _ = manifest.read_manifest(tmp_path / "m").files["f"].sha256


@pytest.mark.parametrize("kind", ["checkpoint", "adapter", "dataset", "thing"])
def test_everything_else_takes_sha256_only(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest that can be forged must not vouch for a pickle; without the guard it would."""
    seal_fast(tmp_path / "c", kind)
    with pytest.raises(UserError, match=r"unreadable manifest.*takes SHA-256 only"):
        manifest.read_manifest(tmp_path / "c", kind)
    with pytest.raises(AssertionError, match="SHA-256 only"):
        manifest.seal(tmp_path / "c", kind, {}, {"f": manifest.hash_file(tmp_path / "c" / "f", "xxh3_128")})
    monkeypatch.setattr(manifest, "_FAST_KINDS", {kind})
    assert manifest.find_problems(tmp_path / "c", kind) == []


@pytest.mark.parametrize("record", [{"size": 1}, {"size": 1, "md5": "0"}, {"size": 1, "sha256": "0", "xxh3_128": "0"}, [], 3])
def test_a_record_has_one_digest_of_a_known_kind(tmp_path: Path, record: object) -> None:
    body = {"format": 1, "kind": "merged", "meta": {}, "files": {"f": record}}
    (tmp_path / manifest.MANIFEST).write_text(json.dumps(body))
    with pytest.raises(UserError, match="unreadable manifest"):
        manifest.read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 3}', '{"kind": "x", "files": {}, "meta": null}', "\x00"])
def test_an_unreadable_manifest_is_no_traceback(tmp_path: Path, text: str) -> None:
    (tmp_path / manifest.MANIFEST).write_text(text)
    assert "unreadable" in str(manifest.find_problems(tmp_path)[0])


def test_write_durably_replaces_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "run.json"
    manifest.write_durably(target, "old")

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            manifest.write_durably(target, "new")
    assert target.read_text() == "old"


def test_temporary_files_are_not_part_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / ".x.1.tmp").write_bytes(b"")
    (tmp_path / ".metadata").write_bytes(b"")
    assert manifest.list_files(tmp_path) == [".metadata"]
