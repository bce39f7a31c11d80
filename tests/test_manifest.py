"""The commit protocol: nothing is whole before its manifest, and a manifest can name nothing outside its folder."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clustertune import manifest
from clustertune.errors import Problem, UserError
from clustertune.monitor.sampler import TelemetryWriter, append
from clustertune.training.event_log import EventLog
from tests.faults import CALLS, fault_at, sweep


def test_killed_at_any_open_fsync_or_rename_it_is_whole_or_not_there(tmp_path: Path) -> None:
    """The manifest must not precede what it names."""
    for nth in range(30):
        (tmp_path / str(nth) / "sub").mkdir(parents=True)
        for name in ("a.bin", "sub/b.bin"):
            (tmp_path / str(nth) / name).write_bytes(name.encode() * 1000)
    number = 0
    for number in sweep(lambda nth: manifest.seal(tmp_path / str(nth), "thing", {"step": 1}), calls=(*CALLS, "open")):
        whole = not manifest.find_problems(tmp_path / str(number), "thing")
        assert whole == (tmp_path / str(number) / manifest.MANIFEST).exists()
        if number < 4:  # the files themselves are flushed first
            assert not whole
    assert 8 < number < 29
    with fault_at(0, calls=("fsync", "replace")) as seen:
        manifest.seal(tmp_path / "29", "thing", {})
    assert seen[: seen.index("replace")] == ["fsync"] * 5, "both files, both folders, the manifest itself"


def test_a_manifest_that_is_none_is_refused(tmp_path: Path) -> None:
    """It can name nothing outside its folder; a record has one digest of a known kind; unreadable text is no traceback."""

    def body(**files: object) -> str:
        return json.dumps({"format": 1, "kind": "merged", "meta": {}, "files": files})

    good = {"size": 1, "sha256": "0"}
    outside = [body(**{name: good}) for name in ("../outside", "/etc/passwd", "a/../../b")]
    records = [body(f=record) for record in ({"size": 1, "md5": "0"}, {**good, "xxh3_128": "0"}, 3)]
    texts = ["", "{", "[]", '{"files": 3}', '{"kind": "x", "files": {}, "meta": null}', "\x00"]
    for text in (*outside, *records, *texts):
        (tmp_path / manifest.MANIFEST).write_text(text)
        (problem,) = manifest.find_problems(tmp_path)
        assert problem.message.startswith("unreadable manifest") and ("leaves the folder" in problem.message) == (
            text in outside
        )


def seal_fast(folder: Path, kind: str) -> None:
    """A folder whose one file is recorded by XXH3-128, manifest written past the guard of ``seal``."""
    folder.mkdir()
    (folder / "f").write_bytes(b"weights")
    record = manifest.hash_file(folder / "f", "xxh3_128")
    body = {"format": 1, "kind": kind, "meta": {}, "files": {"f": record.as_json()}}
    (folder / manifest.MANIFEST).write_text(json.dumps(body))


@pytest.mark.parametrize("kind", ["checkpoint", "thing"])
def test_everything_else_takes_sha256_only(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest that can be forged must not vouch for a pickle; without the guard it would."""
    seal_fast(tmp_path / "c", kind)
    with pytest.raises(UserError, match=r"unreadable manifest.*takes SHA-256 only"):
        manifest.read_manifest(tmp_path / "c", kind)
    with pytest.raises(AssertionError, match="SHA-256 only"):
        manifest.seal(tmp_path / "c", kind, {}, {"f": manifest.hash_file(tmp_path / "c" / "f", "xxh3_128")})
    monkeypatch.setattr(manifest, "_FAST_KINDS", {kind})
    assert manifest.find_problems(tmp_path / "c", kind) == []


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


# -- comparing what is read with its digests -----------------------------------------------------------------------------


class Pair:
    """Two ranks of a group; ``other`` is what the second one found."""

    world_size = 2

    def __init__(self, rank: int, other: list[Problem]) -> None:
        self.rank, self._other = rank, other

    def gather(self, value: Any) -> list[Any]:
        if value and not isinstance(value[0], Problem):  # which folder this is: the same one
            return [value, value]
        return [value, self._other] if self.rank == 0 else [self._other, value]


def model_folder(folder: Path, shards: int = 5) -> Path:
    folder.mkdir(parents=True)
    for number in range(shards):
        (folder / f"model-{number}.safetensors").write_bytes(bytes([number]) * (100 + 10 * number))
    (folder / "config.json").write_text("{}")
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def found(folder: Path, rank: int = 0, world_size: int = 1) -> list[str]:
    with manifest.DigestComparison(folder, rank, world_size) as comparison:
        return [Path(problem.file or "").name for problem in comparison.finish()]


@pytest.mark.parametrize("world_size", [2, 7])
def test_each_weight_is_hashed_by_one_rank_and_small_files_by_all(tmp_path: Path, world_size: int) -> None:
    folder = model_folder(tmp_path / "model")
    manifest.seal(folder, "model", {})
    for path in folder.glob("[!M]*"):
        flip(path)
    by_rank = [found(folder, rank, world_size) for rank in range(world_size)]
    assert all("config.json" in names for names in by_rank)
    weights = sorted(name for names in by_rank for name in names if name != "config.json")
    assert weights == [f"model-{number}.safetensors" for number in range(5)]
    shares = [manifest.DigestComparison(folder, rank, world_size).bytes for rank in range(world_size)]
    assert sum(shares) == 600 and max(shares) <= 600 / min(world_size, 5) + 140


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_sees_ends_all(tmp_path: Path, rank: int) -> None:
    folder = model_folder(tmp_path / "model")
    manifest.seal(folder, "model", {})
    with pytest.raises(UserError, match="damaged there"):
        manifest.require_whole(folder, Pair(rank, [Problem("damaged there")]))


@pytest.mark.parametrize("name", ["config.json", "model-3.safetensors"])
def test_the_hubs_cache_names_blobs_by_their_content(tmp_path: Path, name: str) -> None:
    """git hash-object gives small files their names, SHA-256 large ones."""
    source = model_folder(tmp_path / "source")
    cache = tmp_path / "models--x--y"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for path in source.iterdir():
        git = subprocess.run(["git", "hash-object", path], capture_output=True, text=True, check=True).stdout.strip()
        blob = cache / "blobs" / (git if path.suffix == ".json" else manifest.hash_file(path).digest)
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    assert found(snapshot) == []
    flip((snapshot / name).resolve())
    assert found(snapshot) == [name]


@pytest.mark.parametrize("name", ["config.json", "model-3.safetensors"])
@pytest.mark.parametrize("below", ["", "sub/model"])
def test_what_the_hubs_client_notes_about_a_local_dir_is_compared(tmp_path: Path, name: str, below: str) -> None:
    """The notes are written by huggingface_hub itself, as ``hf download --local-dir`` does."""
    from huggingface_hub._local_folder import write_download_metadata

    folder = model_folder(tmp_path / "local" / below)
    assert manifest.DigestComparison(folder).recorded == frozenset()
    for path in folder.glob("model*"):
        write_download_metadata(tmp_path / "local", str(Path(below) / path.name), "f" * 40, manifest.hash_file(path).digest)
    path = folder / "config.json"
    git = subprocess.run(["git", "hash-object", path], capture_output=True, text=True, check=True).stdout.strip()
    write_download_metadata(tmp_path / "local", str(Path(below) / path.name), "f" * 40, git)
    assert found(folder) == []
    flip(folder / name)
    assert found(folder) == [name]


@pytest.mark.parametrize("kind", ["parcel", "staged"])
def test_staged_inputs_are_compared_by_the_manifest_around_them(tmp_path: Path, kind: str) -> None:
    folder = model_folder(tmp_path / "all" / "hub" / "model")
    (tmp_path / "all" / "recipe.yaml").write_text("name: x")
    manifest.seal(tmp_path / "all", kind, {})
    assert found(folder) == []
    flip(tmp_path / "all" / "recipe.yaml")
    flip(folder / "model-0.safetensors")
    assert found(folder) == ["model-0.safetensors"]


class Nodes:
    """Four ranks on two nodes; gather answers with what each rank finds in its node's folder."""

    world_size = 4

    def __init__(self, rank: int, folders: list[Path]) -> None:
        self.rank, self._folders = rank, folders

    def gather(self, value: Any) -> list[Any]:
        found = [[(s := folder.stat()).st_ino, s.st_ctime_ns] for folder in self._folders]
        assert found[self.rank] == value
        return found


def test_ranks_share_out_what_they_see_and_no_more(tmp_path: Path) -> None:
    """A Hub cache or staged copy on each node's own disk is compared by that node's ranks, whole."""
    one, other = (model_folder(tmp_path / name) for name in ("one", "other"))
    own = [one, other, one, other]  # ranks may go round the nodes
    assert [manifest.sharers(own[rank], Nodes(rank, own)) for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [manifest.sharers(one, Nodes(rank, [one] * 4)) for rank in range(4)] == [(rank, 4) for rank in range(4)]
    assert manifest.sharers(one, None) == (0, 1)
    for folder in (one, other):
        manifest.seal(folder, "model", {})
    weights = sum(record.size for path, record in manifest.find_records(other)[1].items() if path.suffix == ".safetensors")
    shares = [manifest.DigestComparison(other, *manifest.sharers(other, Nodes(rank, own))).bytes for rank in (1, 3)]
    assert all(shares) and sum(shares) == weights


def test_nothing_that_others_put_there_is_opened(tmp_path: Path) -> None:
    """A temporary name that can be known ahead, or the file's own, as a link to another file of the user."""
    mine, folder = tmp_path / "mine", tmp_path / "open"
    mine.write_text("mine")
    folder.mkdir()
    (folder / "run.json").symlink_to(mine)
    (folder / f".run.json.{os.getpid()}.tmp").symlink_to(mine)
    manifest.write_durably(folder / "run.json", "new")
    assert mine.read_text() == "mine" and (folder / "run.json").read_text() == "new"
    assert not (folder / "run.json").is_symlink() and len(list(folder.iterdir())) == 2, "nothing temporary is left"


@pytest.mark.parametrize("what", ["link", "dangling link", "folder", "pipe"])
def test_a_log_is_a_plain_file(what: str, tmp_path: Path) -> None:
    path, mine = tmp_path / "metrics.jsonl", tmp_path / "mine"
    mine.write_text("mine")
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(mine if what == "link" else tmp_path / "new")
    with pytest.raises(UserError, match="plain file"):
        EventLog(path, 1)
    with pytest.raises(UserError, match="plain file"):
        append(path, "x")
    assert mine.read_text() == "mine" and not (tmp_path / "new").exists()


def test_telemetry_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "telemetry").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        TelemetryWriter(tmp_path / "telemetry", "n0", {})
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "read", [manifest.read_whole, manifest.open_to_read, manifest.open_text, manifest.plain_path, manifest.hash_file]
)
def test_a_pipe_or_a_device_is_an_error_and_no_wait(tmp_path: Path, read: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"plain file|directory"):
            read(path)


@pytest.mark.timeout(60)
def test_readers_of_what_others_write_do_not_wait_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert manifest.read_text(tmp_path / "pipe") == "" and manifest.read_object(tmp_path / "pipe") == {}
    assert list(manifest.read_events(tmp_path / "pipe")) == []
    with pytest.raises(UserError, match="plain file"):
        manifest.read_json(tmp_path / "pipe")
