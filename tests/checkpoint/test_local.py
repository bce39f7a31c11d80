"""The node's own folder of a run: who may use it, what is kept there, and what comes back of it, in one process."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertune.chain import open_run
from clustertune.checkpoint import store
from clustertune.checkpoint.local import LocalTier, name_of, open_root
from clustertune.checkpoint.shards import write_new
from clustertune.checkpoint.store import CheckpointStore
from clustertune.errors import UserError
from clustertune.manifest import XXH3_128
from clustertune.recipe.schema import LocalSave
from clustertune.resolve.resolve import resolve
from tests.checkpoint.test_store import OneRank
from tests.command import REPO
from tests.damage import flip

FSDP2 = REPO / "recipes" / "tiny-oasst2"


def open_tier(tmp_path: Path, attempt: int = 1) -> tuple[LocalTier, list[str]]:
    messages: list[str] = []
    (tmp_path / "disk").mkdir(exist_ok=True)
    (tmp_path / "run").mkdir(exist_ok=True)
    shared = CheckpointStore(tmp_path / "run" / "checkpoints", attempt, 3, OneRank(), messages.append)
    tier = LocalTier.open(LocalSave(path=str(tmp_path / "disk")), tmp_path / "run", 1.0, shared)
    ranks: Any = OneRank()
    ranks.process_group = None
    return tier.on(ranks), messages


SHARD = "model_0/__0_0.distcp"


def save(tier: LocalTier | CheckpointStore, step: int) -> Path:
    path = tier.begin(step)
    record = write_new(path / SHARD, iter([os.urandom(99)]), XXH3_128)
    assert tier.commit(path, {"step": step}, {SHARD: record}) == 99
    tier.prune()
    return path


def link(file: Path) -> None:
    file.symlink_to(file.rename(file.parents[2] / "elsewhere"))


def forge(file: Path) -> None:
    """The manifest says another step."""
    path = file.parents[1] / "MANIFEST.json"
    path.write_text(path.read_text().replace('"step": 4', '"step": 5'))


def test_two_whole_steps_are_kept_and_the_end_clears_all(tmp_path: Path) -> None:
    tier, _ = open_tier(tmp_path)
    for step in (1, 2, 3):
        path = save(tier, step)
    tier.begin(4)
    again, _ = open_tier(tmp_path, attempt=2)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(one.name for one in path.parent.iterdir()) == ["step-000002", "step-000003", "step-000004"]
    again.begin(5)
    assert not (path.parent / "step-000004").exists(), "an interrupted save takes no room from the next"
    save(again, 3)
    assert sorted(one.name for one in path.parent.iterdir()) == ["step-000003", "step-000003.a2"]
    again.clear()
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_newer_whole_step_is_copied_to_shared_storage(tmp_path: Path) -> None:
    tier, _ = open_tier(tmp_path)
    older = save(tier, 2)
    save(tier, 4)
    again, messages = open_tier(tmp_path, attempt=2)
    found = again.newest()
    assert found is not None and found[0].name == "step-000004.a2" and found[1]["step"] == 4
    assert store.verify(found[0]) == [] and "copied to step-000004.a2" in messages[-1]
    third, _ = open_tier(tmp_path, attempt=3)
    assert third.newest() == found and older.is_dir(), "shared storage has it now"


def test_a_damaged_shared_step_does_not_hide_a_local_one(tmp_path: Path) -> None:
    """Shared storage holds 2 and, damaged, 6; the nodes hold 4."""
    tier, _ = open_tier(tmp_path)
    save(tier, 4)
    for step in (2, 6):
        path = save(tier.shared, step)
    flip(path / SHARD)
    again, messages = open_tier(tmp_path, attempt=2)
    found = again.newest()
    assert found is not None and found[0].name == "step-000004.a2" and "is incomplete or damaged" in " ".join(messages)


def test_a_disk_that_cannot_be_read_costs_the_tier_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one node: the others would wait for it."""
    tier, _ = open_tier(tmp_path)
    save(tier, 4)
    again, messages = open_tier(tmp_path, attempt=2)

    def broken(folder: Path) -> Any:
        if folder == again.root:
            raise OSError(5, "Input/output error", str(folder))
        return store.list_checkpoints(folder)

    monkeypatch.setattr("clustertune.checkpoint.local.list_checkpoints", broken)
    assert again.newest() is None and "Input/output error" in messages[-1]


@pytest.mark.parametrize(
    ("damage", "named"),
    [(flip, SHARD), (lambda file: os.truncate(file, 98), SHARD), (link, SHARD), (forge, "checksum")],
    ids=["bit", "short", "link", "manifest"],
)
def test_a_damaged_step_is_named_and_the_one_before_is_taken(damage: Any, named: str, tmp_path: Path) -> None:
    tier, _ = open_tier(tmp_path)
    save(tier, 2)
    damage(save(tier, 4) / SHARD)
    again, messages = open_tier(tmp_path, attempt=2)
    found = again.newest()
    assert found is not None and found[1]["step"] == 2
    assert not (tmp_path / "run/checkpoints/step-000004.a2").exists()
    assert named in " ".join(messages)


def test_a_folder_that_others_could_fill_is_refused(tmp_path: Path) -> None:
    base, name = tmp_path / "disk", "run-1"
    base.mkdir()
    with pytest.raises(OSError, match="No such file"):
        open_root(tmp_path / "none", name)
    root, key = open_root(base, name)
    assert open_root(base, name) == (root, key) and root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o750)
    with pytest.raises(UserError, match="0750"):
        open_root(base, name)
    root.rmdir()
    (tmp_path / "theirs").mkdir()
    root.symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match="is a link"):
        open_root(base, name)
    (tmp_path / "way").symlink_to(base)
    with pytest.raises(UserError, match="is a link"):
        open_root(tmp_path / "way", "other")
    base.chmod(0o777)
    with pytest.raises(UserError, match="others can rename"):
        open_root(base, "other")
    base.chmod(0o1777)
    open_root(base, "other")


def test_a_folder_is_of_one_run_and_outside_of_it(tmp_path: Path) -> None:
    assert len({name_of(Path(path), created) for path in ("/a/run", "/b/run") for created in (1, 2)}) == 4
    inside = LocalSave(path=str(tmp_path / "run" / "local"))
    with pytest.raises(UserError, match="is in the run folder"):
        LocalTier.open(inside, tmp_path / "run", 1, CheckpointStore(tmp_path / "run", 1, 3, OneRank(), str))


def test_a_node_without_the_folder_saves_nothing_and_says_so(tmp_path: Path) -> None:
    messages: list[str] = []
    shared = CheckpointStore(tmp_path / "run" / "checkpoints", 1, 3, OneRank(), messages.append)
    tier = LocalTier.open(LocalSave(path=str(tmp_path / "none")), tmp_path / "run", 1, shared)
    assert "No such file" in tier.off and "nothing is saved locally" in messages[0] and tier.newest() is None


def test_a_neighbour_is_a_rank_of_the_next_node() -> None:
    def around(rank: int, *nodes: list[int]) -> Any:
        shared: Any = SimpleNamespace(ranks=SimpleNamespace(rank=rank))
        return LocalTier(None, nodes, shared, LocalSave(path="/x"))._neighbours

    assert [around(rank, [0, 1], [2, 3], [4, 5]) for rank in (1, 2, 4)] == [(3, 5), (4, 0), (0, 2)]
    assert around(0, [0, 1]) is None is around(0, [0, 1], [2])


def test_a_changed_section_reaches_a_run_that_is_there(tmp_path: Path) -> None:
    open_run(resolve(FSDP2, ["save.every=4"]), tmp_path / "run", ["test"])
    run = open_run(resolve(FSDP2, ["save.every=4", "save.local.path=/disk", "save.local.every=1"]), tmp_path / "run", ["test"])
    save = run.resolved().recipe.save
    assert save is not None and save.local == LocalSave(path="/disk", every=1)
