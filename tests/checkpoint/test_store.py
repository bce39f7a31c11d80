"""Checkpoints on disk: what is whole, what is newest, what may be removed; and what a damaged manifest can hide."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustertune import manifest
from clustertune.checkpoint import store
from clustertune.errors import ExitCode, UserError
from clustertune.evaluate.during import is_kept, may_be_exported
from clustertune.launch.attempt import check_fence
from clustertune.manifest import read_events, read_object
from clustertune.recipe.sections import During
from clustertune.report.metrics import MetricsReader
from clustertune.resolve.resolve import resolve
from clustertune.rundir import RunDir
from tests.damage import failing, flip


class OneRank:
    rank, world_size = 0, 1

    def broadcast(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        return None


def make_store(folder: Path, attempt: int = 1, limit: int | None = 3) -> tuple[store.CheckpointStore, list[str]]:
    messages: list[str] = []
    return store.CheckpointStore(folder, attempt, limit, OneRank(), messages.append), messages


FILES = ["pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata", "trainer_state.json"]


def save(folder: Path, step: int, attempt: int = 1, commit: bool = True) -> Path:
    checkpoints, _ = make_store(folder, attempt)
    path = checkpoints.begin(step)
    (path / "pytorch_model_fsdp_0").mkdir()
    for name, size in zip(FILES, (256, 64, 32), strict=True):
        (path / name).write_bytes(os.urandom(size))
    if commit:
        checkpoints.commit(path, {"step": step})
    return path


def test_newest_is_by_step_and_attempt_never_by_time_or_name(tmp_path: Path) -> None:
    for step, attempt in ((999_999, 1), (1_000_000, 1), (1_000_000, 2)):
        save(tmp_path, step, attempt)
    os.utime(tmp_path / "step-999999", (2e9, 2e9))  # the clock was set back after the later ones were written
    newest, broken = store.newest_whole(tmp_path)
    assert newest is not None and newest.path.name == "step-1000000.a2" and broken == []


def test_unfinished_is_passed_over_and_never_written_into(tmp_path: Path) -> None:
    save(tmp_path, 2)
    half = save(tmp_path, 4, commit=False)
    newest, broken = store.newest_whole(tmp_path)
    assert newest is not None and newest.step == 2
    assert [c.path for c, _ in broken] == [half]
    with pytest.raises(FileExistsError):
        make_store(tmp_path)[0].begin(4)
    assert make_store(tmp_path, attempt=2)[0].begin(4).name == "step-000004.a2"


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=30, deadline=None)
@given(offset=st.integers(0, 2000), bit=st.integers(0, 7))
def test_every_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, name: str, offset: int, bit: int) -> None:
    path = save(tmp_path_factory.mktemp("flip"), 2)
    flip(path / name, offset, bit)
    assert [p.file for p in store.verify(path)] == [str(path / name)]


@pytest.mark.parametrize("name", FILES)
def test_truncated_missing_swapped_and_added_files_are_found(tmp_path: Path, name: str) -> None:
    path, file = save(tmp_path, 2), tmp_path / "step-000002" / name
    content = file.read_bytes()
    for other in (os.urandom(len(content)), content[:-1]):
        file.write_bytes(other)
        assert store.verify(path)
    file.unlink()
    assert "missing" in str(store.verify(path)[0])
    file.write_bytes(content)
    assert store.verify(path) == []
    (path / "stray.bin").write_bytes(b"x")
    assert "not named" in str(store.verify(path)[0])
    (path / "stray.bin").unlink()
    path.rename(tmp_path / "step-000008")
    assert "its name says 8" in str(store.verify(tmp_path / "step-000008")[0])


PRUNED: dict[str, tuple[list[tuple[Any, ...]], dict[str, int], str]] = {
    "the newest whole ones stay": ([(2,), (4,), (6,), (8,), (10,)], {"limit": 2}, "8 10"),
    "milestones stay beside the limit": ([(2,), (4,), (6,), (8,)], {"limit": 1, "milestone": 4}, "4 8"),
    "a damaged one is neither counted nor removed": ([(2,), (4,), (6,)], {"limit": 1, "damaged": 6}, "4 6"),
    "at least one stays": ([(2,), (4, 1, False)], {"attempt": 2, "limit": 0}, "2 4"),
    "leftovers stay until a newer one is whole": ([(4, 1, False)], {"attempt": 2}, "4"),
    "and go then": ([(4, 1, False), (4, 2)], {"attempt": 2}, "4.a2"),
    # Another rank may still write there.
    "an unfinished folder of this attempt stays": ([(6, 2), (4, 2, False)], {"attempt": 2}, "4.a2 6.a2"),
    # It resumed from an older step; by step alone its checkpoints look old.
    "what a later attempt made stays": ([(2, 2), (3, 2, False), (1,), (8,), (9,)], {"limit": 1}, "2.a2 3.a2 9"),
}
"""What is saved (step, attempt, whole), by what it is pruned, and what is left."""


@pytest.mark.parametrize("case", PRUNED)
def test_what_is_pruned(tmp_path: Path, case: str) -> None:
    saved, given, left = PRUNED[case]
    for one in saved:
        save(tmp_path, *one)
    if "damaged" in given:
        (tmp_path / f"step-{given['damaged']:06d}" / FILES[0]).write_bytes(bytes(255))
    checkpoints, messages = make_store(tmp_path, given.get("attempt", 1), given.get("limit", 3))
    checkpoints.is_kept = lambda checkpoint: checkpoint.step == given.get("milestone")
    removed = checkpoints.prune()
    names = sorted(path.name for path in tmp_path.iterdir())
    parts = [name.partition(".") for name in left.split()]
    assert names == [f"step-{int(step):06d}{dot}{attempt}" for step, dot, attempt in parts]
    assert len(removed) == len(saved) - len(names) == sum("removed" in line for line in messages)
    assert any("damaged" in line for line in messages) == ("damaged" in given)


def test_what_may_be_exported_as_the_best_is_kept(tmp_path: Path) -> None:
    """The best so far, and a newer one whose scores are not there yet; not one that was passed over."""
    run, metric = RunDir(tmp_path), "prompt_level_strict_acc,none"
    run.checkpoints.mkdir()
    for step in (2, 4, 6, 7):
        save(run.checkpoints, step)
    result = {
        "tasks": {"ifeval": {metric: 0.5}},
        "details": {"ifeval": {}},
        "paired": {"ifeval": {metric: {"difference": 0.1, "ci95": [0.0, 0.2]}}},
    }
    (run.scores / "step-000004").mkdir(parents=True)
    (run.scores / "step-000004" / "results.json").write_text(json.dumps(result))
    listed = store.list_checkpoints(run.checkpoints)
    kept = {
        keep: [one.step for one in listed if may_be_exported(run, During(every=2, keep=keep), (), one)]
        for keep in ("best", "last")
    }
    assert kept == {"best": [6, 4], "last": []}


@pytest.mark.parametrize(
    ("servers", "left"),
    [([], [[4], [5], [6], [8], [9]]), (["servers.nodes=1"], [[4], [4, 5], [6], [6, 8], [8, 9]])],
    ids=["between", "beside"],
)
def test_what_is_scored_next_beside_the_trainer_is_kept(tmp_path: Path, servers: list[str], left: list[list[int]]) -> None:
    """It stays until it has its scores or a newer one is due; one checkpoint more at most is on disk."""
    run, listed = RunDir(tmp_path), []
    recipe = resolve("tiny-oasst2", ["eval.during={every: 4}", *servers]).recipe
    run.checkpoints.mkdir()
    checkpoints, _ = make_store(run.checkpoints, limit=1)
    checkpoints.is_kept = partial(is_kept, run, recipe)
    for step in (4, 5, 6, 8, 9):
        if step == 6:
            (run.scores / "step-000004").mkdir(parents=True)
            (run.scores / "step-000004" / "results.json").write_text('{"tasks": {}}')
        save(run.checkpoints, step)
        checkpoints.prune()
        listed.append(sorted(one.step for one in store.list_checkpoints(run.checkpoints)))
    assert listed == left


def test_the_checkpoint_that_was_read_back_stays(tmp_path: Path) -> None:
    """The newer ones have been written and hashed, and read by nobody yet."""
    for step in (2, 4):
        save(tmp_path, step)
    checkpoints, _ = make_store(tmp_path, attempt=2, limit=1)
    assert checkpoints.latest() is not None
    for step in (6, 8):
        save(tmp_path, step, attempt=2)
        checkpoints.prune()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000004", "step-000008.a2"]


class Together:
    """Two ranks in two threads that meet as ranks do."""

    world_size = 2

    def __init__(self) -> None:
        self._meeting, self._values, self._local = threading.Barrier(2), [None, None], threading.local()

    @property
    def rank(self) -> int:
        return int(self._local.rank)

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._meeting.wait(20)
        found = list(self._values)
        self._meeting.wait(20)
        return found

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def run(self, act: Callable[[], Any]) -> list[Any]:
        def on(rank: int) -> Any:
            self._local.rank = rank
            return act()

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(on, (0, 1)))


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read since, below the test's folder."""
    found: list[str] = []
    real = manifest.hash_file

    def hash_file(path: Path, *args: Any) -> Any:
        found.append(str(path.relative_to(tmp_path)))
        return real(path, *args)

    monkeypatch.setattr(manifest, "hash_file", hash_file)
    return found


@pytest.mark.parametrize("damaged", [False, True])
def test_each_byte_is_read_once_by_one_of_the_ranks(damaged: bool, tmp_path: Path, read: list[str]) -> None:
    """And what one of them finds, all pass over. Choosing reads none: launchers and retention would hash 900 GB each."""
    older, newest = save(tmp_path, 2), save(tmp_path, 4)
    if damaged:
        (newest / FILES[0]).write_bytes(bytes(256))
    read.clear()
    checkpoints, messages = make_store(tmp_path, attempt=2)
    assert store.newest_whole(tmp_path)[0] is not None and store.find_checkpoint(tmp_path) == newest
    checkpoints.prune()
    assert read == []
    ranks = Together()
    checkpoints.ranks = ranks
    wanted = older if damaged else newest
    found = ranks.run(checkpoints.latest)
    assert [path for path, _ in found] == [wanted, wanted] and found[0][1]["step"] == int(wanted.name[-1])
    seen = [newest, older] if damaged else [newest]
    assert sorted(read) == sorted(f"{path.name}/{name}" for path in seen for name in FILES)
    assert len(messages) == damaged and all("skipped" in line and "content differs" in line for line in messages)


def test_what_cannot_be_removed_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client keeps a file that somebody has open as ``.nfs...``, and its folder with it; rank 0 would end alone."""
    for step in (2, 4):
        save(tmp_path, step)

    monkeypatch.setattr(store.shutil, "rmtree", failing(OSError(39, "Directory not empty", "step-000002")))
    checkpoints, messages = make_store(tmp_path, limit=1)
    assert checkpoints.prune() == []
    assert messages == ["checkpoint step-000002 could not be removed (older than the newest 1): Directory not empty"]
    assert not (tmp_path / "step-000002" / "MANIFEST.json").exists(), "half a checkpoint is none"


def test_a_failed_fsync_means_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, _ = make_store(tmp_path)
    path = checkpoints.begin(2)
    (path / "shard").write_bytes(b"data")
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "fsync_path", failing(OSError(5, "Input/output error", "shard")))
        with pytest.raises(OSError, match="Input/output error"):
            checkpoints.commit(path, {"step": 2})
    assert not (path / manifest.MANIFEST).exists() and store.newest_whole(tmp_path)[0] is None


class Fenced:
    """A store of attempt 1 in a run folder; :meth:`follow` begins attempt 2."""

    def __init__(self, run: Path, limit: int = 1) -> None:
        self.run = run
        self.store, _ = make_store(run / "checkpoints", limit=limit)
        self.store.fence = lambda: check_fence(run, 1)

    def follow(self) -> None:
        (self.run / "attempts" / "0002").mkdir(parents=True)


def test_an_attempt_that_was_followed_begins_seals_and_removes_nothing(tmp_path: Path) -> None:
    """Each place asks the fence on its own: the other attempt may begin at any moment between them."""
    fenced = Fenced(tmp_path)
    old = [save(tmp_path / "checkpoints", step) for step in (2, 4)]
    left = save(tmp_path / "checkpoints", 1, commit=False)
    path = fenced.store.begin(6)
    (path / "shard").write_bytes(b"data")
    fenced.follow()
    for act in (lambda: fenced.store.begin(8), lambda: fenced.store.commit(path, {"step": 6}), fenced.store.prune):
        with pytest.raises(UserError, match="attempt 2 has taken over from attempt 1") as caught:
            act()
        assert caught.value.code is ExitCode.AGAIN
    assert not (tmp_path / "checkpoints" / "step-000008").exists() and not (path / manifest.MANIFEST).exists()
    assert all(store.verify(path) == [] for path in old) and left.exists()


def test_all_ranks_learn_of_the_fence_that_rank_0_met(tmp_path: Path) -> None:
    """A rank that raised alone would leave the others in a collective."""
    fenced, ranks = Fenced(tmp_path), Together()
    fenced.follow()
    fenced.store.ranks = ranks

    def refused(act: Callable[[], Any]) -> None:
        with pytest.raises(UserError, match="attempt 2 has taken over"):
            act()

    for act in (lambda: fenced.store.begin(2), fenced.store.prune):
        ranks.run(lambda act=act: refused(act))


# -- who could have written it -------------------------------------------------------------------------------------------


def test_a_checkpoint_is_saved_closed_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = save(tmp_path, 2)
    finally:
        os.umask(before)
    assert store.find_open(path) == []
    assert make_store(tmp_path)[0].latest() is not None


WRITABLE = "others can write to it"


@pytest.mark.parametrize(
    ("change", "names", "message"),
    [
        *((mode, [".", *FILES, "pytorch_model_fsdp_0", manifest.MANIFEST], WRITABLE) for mode in (0o020, 0o002)),
        ("owner", [".", FILES[2]], "belongs to user"),
        ("link", [FILES[2]], "neither a file nor a folder"),
    ],
)
def test_what_others_could_have_written_is_not_loaded(
    tmp_path: Path, change: int | str, names: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the older one in its place: its steps would be trained over again."""
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        save(folder, 2)
        path = save(folder, 4) / name
        if isinstance(change, int):
            path.chmod(path.stat().st_mode | change)
        elif change == "link":
            path.symlink_to(path.rename(tmp_path / "elsewhere"))
        elif os.getuid() == 0:
            os.chown(path, 12345, -1)
        else:
            monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(UserError, match=message) as refused:
            make_store(folder)[0].latest()
        assert refused.value.code == ExitCode.CONFIG and (message != WRITABLE or "chmod -R go-w" in str(refused.value))
        if change != "link":
            with pytest.raises(UserError, match=message):
                store.newest_whole(folder)


META = {"step": 4, "tokens": 8123, "epoch": 0.25, "final": False, "eval_skipped": False, "state_digests": ["ab" * 32]}


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sealed")
    (folder / "shard").write_bytes(b"data")
    manifest.seal(folder, "checkpoint", META)
    return folder


@given(offset=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_seen_or_changes_nothing(sealed: Path, offset: int, bit: int) -> None:
    path = sealed / manifest.MANIFEST
    whole = path.read_bytes()
    try:
        flip(path, offset, bit)
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
