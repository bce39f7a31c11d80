"""An ended run goes elsewhere and comes back: byte for byte, whatever was killed on the way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clustertune import manifest
from clustertune.checkpoint import store
from clustertune.cli import archive
from clustertune.cli.app import app
from clustertune.errors import UserError
from tests.command import REPO, Done, run


@pytest.fixture
def ended(finished: tuple[Path, Done], tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path / "ended", symlinks=True))


def contents(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if name not in ("lock", manifest.MANIFEST)}


def test_there_and_back(ended: Path, tmp_path: Path) -> None:
    """What comes back is what was there; the run's commands work on it, and it trains on from its checkpoint."""
    before, away, back = contents(ended), tmp_path / "away", tmp_path / "back"
    done = run("archive", ended, away, "--checkpoint", "--remove", "--json")
    assert done.code == 0 and done.json["removed"] and not ended.exists(), done.err
    assert manifest.find_problems(away, archive.KIND) == []
    assert run("archive", "--restore", f"file://{away}", back).code == 0
    assert contents(back) == contents(away)
    assert contents(back).items() <= before.items()
    assert {"run.json", "metrics.jsonl", "report.html", "eval/results.json"} <= contents(back).keys()
    assert manifest.find_problems(back / "adapter", "adapter") == []
    newest, broken = store.newest_whole(back / "checkpoints")
    assert newest is not None and not broken
    assert run("report", back).code == 0
    assert (back.stat().st_mode | (back / "run.json").stat().st_mode) & 0o077 == 0


def test_an_object_store_and_what_is_added_later(ended: Path, tmp_path: Path) -> None:
    def call(*words: str | Path) -> tuple[int, str]:
        found = CliRunner().invoke(app, ["archive", *map(str, words)])
        assert found.exception is None or isinstance(found.exception, SystemExit | UserError), found.exception
        return found.exit_code, str(found.exception)

    address = f"memory://bucket/{tmp_path.name}"
    assert call(ended, address)[0] == 0
    assert call(ended, address, "--merged")[0] == 0
    assert call("--restore", address, tmp_path / "back")[0] == 0
    assert contents(tmp_path / "back" / "merged") == contents(ended / "merged")
    (ended / "report.html").write_text("another")
    code, text = call(ended, address)
    assert code and "report.html has changed" in text
    other = archive.Destination(address)
    with other.open("adapter/adapter_config.json", "wb") as out:
        out.write(b"{}")
    code, text = call("--restore", address, tmp_path / "more")
    assert code and "adapter_config.json" in text and not (tmp_path / "more" / "run.json").exists()


@pytest.mark.parametrize("restoring", [False, True])
def test_killed_again_and_again(ended: Path, tmp_path: Path, restoring: bool) -> None:
    """The manifest, and a restored run's run.json, are not there before everything else is."""
    whole = tmp_path / "whole"
    assert run("archive", ended, whole, "--merged").code == 0
    words, target, last = [str(ended), str(tmp_path / "t"), "--merged"], tmp_path / "t", manifest.MANIFEST
    if restoring:
        words, last = ["--restore", str(whole), str(tmp_path / "t")], "run.json"
    for number in (1, 2, 4, 7, 11):
        child = subprocess.Popen([sys.executable, "-c", SLOW, "archive", *words], cwd=REPO, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while child.poll() is None and time.monotonic() < deadline:
            if len(contents(target) if target.exists() else {}) >= 3 * number:
                os.kill(child.pid, signal.SIGKILL)
            time.sleep(0.005)
        if child.wait() == 0:
            break
        assert not (target / last).exists() or contents(target).keys() == contents(whole).keys()
    assert run("archive", *words).code == 0
    assert contents(target) == contents(whole)


SLOW = """
import sys, time
from clustertune.cli import archive
record = archive.Destination.record
archive.Destination.record = lambda *words: (time.sleep(0.02), record(*words))[1]
from clustertune.cli.app import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda run, to: (run / "stages" / "train.json").unlink(), []),
        (lambda run, to: (run / "adapter" / "adapter_model.safetensors").write_bytes(b"x"), []),
        (lambda run, to: shutil.rmtree(run / "checkpoints"), ["--checkpoint"]),
        (lambda run, to: (to.mkdir(), (to / "mine").write_text("x")), []),
        (lambda run, to: (to.mkdir(), manifest.seal(to, "dataset", {})), []),
        (lambda run, to: (to.mkdir(), (to / "run.json").symlink_to(run.parent / "precious")), []),
        (lambda run, to: None, ["--restore"]),
    ],
    ids=["not ended", "damaged", "no checkpoint", "another's files", "another's manifest", "a link", "no archive"],
)
def test_what_is_refused_leaves_the_run_as_it_was(ended: Path, tmp_path: Path, spoil, words) -> None:  # type: ignore[no-untyped-def]
    spoil(ended, tmp_path / "to")
    (tmp_path / "precious").write_text("precious")
    before = contents(ended)
    done = run("archive", ended, tmp_path / "to", *words, *([] if words == ["--restore"] else ["--remove"]))
    assert done.code in (2, 73) and "error: " in done.err, done.err
    assert contents(ended) == before
    assert (tmp_path / "precious").read_text() == "precious"
    sealed = tmp_path / "to" / manifest.MANIFEST
    assert not sealed.exists() or json.loads(sealed.read_text())["kind"] == "dataset"


def test_nothing_is_removed_that_is_nowhere_else(ended: Path, tmp_path: Path) -> None:
    """An archive inside of the run went with it, one in memory ended with the command, and one may hold no weights at all."""
    before = contents(ended)
    for target in (ended, ended / "archive", f"file://{ended}/archive", "memory://bucket/x"):
        done = run("archive", ended, target, "--remove")
        assert done.code == 2 and contents(ended) == before, done.err
    shutil.rmtree(ended / "adapter")
    shutil.rmtree(ended / "merged")
    before = contents(ended)
    done = run("archive", ended, tmp_path / "away", "--remove")
    assert done.code == 2 and "neither an adapter nor a merged model" in done.err and contents(ended) == before
    done = run("archive", ended, tmp_path / "away")
    assert done.code == 0 and "warning: " in done.out + done.err
    assert run("archive", ended, tmp_path / "away", "--checkpoint", "--remove").code == 0


def test_storage_that_refuses_is_named_and_a_pipe_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = archive.Destination(str(tmp_path / "away"))
    destination._root.mkdir()
    os.mkfifo(destination._root / manifest.MANIFEST)
    (destination._root / "run.json").mkdir()
    with pytest.raises(UserError, match=f"{manifest.MANIFEST}: is not a plain file"):
        destination.manifest()
    with pytest.raises(UserError, match=r"away/run\.json"):
        destination.record("run.json")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"away/a/b: cannot be written") as caught, destination.open("a/b", "wb") as out:
        out.write(b"x")
    assert caught.value.code == 73


def test_no_credentials_and_no_path_out(ended: Path, tmp_path: Path) -> None:
    done = run("archive", ended, "s3://me:hunter2@bucket/x")
    assert done.code == 2 and "hunter2" not in done.err + done.out
    evil = tmp_path / "evil"
    evil.mkdir()
    outside = manifest.Manifest(archive.KIND, {"../out": manifest.FileRecord(1, "0")})
    (evil / manifest.MANIFEST).write_text(manifest.render(outside))
    assert run("archive", "--restore", evil, tmp_path / "back").code == 2
    assert not (tmp_path / "out").exists()
