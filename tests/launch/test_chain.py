"""What the chain takes for done, and what a killed command may leave where the next one begins."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from clustertune import chain, manifest, rundir
from clustertune.errors import UserError
from clustertune.resolve.resolve import resolve
from clustertune.rundir import RunDir


def checkpoint(run: RunDir, step: int, final: bool) -> Path:
    folder = run.checkpoints / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "shard").write_bytes(b"data")
    manifest.seal(folder, "checkpoint", {"step": step, "final": final})
    return folder


@pytest.fixture
def links(tmp_path: Path) -> chain.Chain:
    return chain.Chain(RunDir(tmp_path), SimpleNamespace(recipe=SimpleNamespace(), lora={}))  # type: ignore[arg-type]


def test_an_older_checkpoint_is_not_exported_in_the_final_one_s_place(links: chain.Chain) -> None:
    run = links.run
    checkpoint(run, 2, final=False)
    last = checkpoint(run, 4, final=True)
    run.finish_stage("train", 1.0)
    assert links._still_there("train")
    (last / "shard").write_bytes(b"dat")
    assert not links._still_there("train")
    with pytest.raises(UserError, match="is not the final checkpoint"):
        links.export()
    # With the adapter whole, the checkpoints are needed no more.
    run.adapter.mkdir()
    manifest.seal(run.adapter, "adapter", {})
    run.finish_stage("export", 1.0)
    assert links._still_there("train")


def test_what_was_damaged_since_is_not_finished(links: chain.Chain) -> None:
    """With the same number of bytes: a letter of a configuration that nothing reads again before it is pushed."""
    links.run.merged.mkdir()
    config = links.run.merged / "generation_config.json"
    config.write_text('{"top_k": 50}')
    manifest.seal(links.run.merged, "merged", {})
    assert links._still_there("merge")
    config.write_text('{"top_k": 51}')
    assert not links._still_there("merge")


@pytest.mark.parametrize(("name", "ours"), [("lock", True), (".run.json.77.tmp", True), ("thesis.tex", False)])
def test_a_command_killed_before_run_json_was_whole(tmp_path: Path, name: str, ours: bool) -> None:
    (tmp_path / name).touch()
    resolved = resolve("tiny-oasst2", [])
    with contextlib.nullcontext() if ours else pytest.raises(UserError, match="is not a run folder"):
        assert chain.open_run(resolved, tmp_path, ["clustertune"]).run_json.exists()


def test_a_folder_that_is_no_run_is_left_as_it_is(tmp_path: Path) -> None:
    """``run --run-dir .`` in the checkout left a lock there."""
    (tmp_path / "Makefile").touch()
    with pytest.raises(UserError, match="is not a run folder"), chain.taken(resolve("tiny-oasst2"), tmp_path):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["Makefile"]


def test_an_attempt_number_never_comes_back(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.new_attempt() == 1
    assert run.new_attempt() == 2
    for name in ("step-000002", "step-000004.a5"):
        (run.checkpoints / name).mkdir(parents=True)
    for folder in (run.path / "attempts").iterdir():
        folder.rmdir()
    assert run.new_attempt() == 6


def test_a_run_goes_on_on_other_ranks(tmp_path: Path) -> None:
    two, four = (resolve("tiny-oasst2", ranks=ranks) for ranks in (2, 4))
    folder = rundir.default_run_dir(two, tmp_path)
    run = chain.open_run(two, folder, ["clustertune"])
    assert rundir.default_run_dir(four, tmp_path) == folder
    chain.open_run(four, folder, ["clustertune"], take=False)
    assert run.resolved().world_size == 2, "jobs of it may be at work"
    chain.open_run(four, folder, ["clustertune"])
    assert run.resolved().world_size == 4
    with pytest.raises(UserError, match="another --run-dir"):
        chain.open_run(resolve("tiny-oasst2", ["lora.r=8"]), folder, ["clustertune"])


def test_a_run_begun_with_save_steps_goes_on_with_a_save_section(tmp_path: Path) -> None:
    """And back."""
    steps, section = resolve("tiny-oasst2"), resolve("tiny-oasst2", ["save.every=auto"])
    folder = rundir.default_run_dir(steps, tmp_path)
    chain.open_run(steps, folder, ["clustertune"])
    assert chain.open_run(section, folder, ["clustertune"]).resolved().recipe.save is not None
    assert chain.open_run(steps, folder, ["clustertune"]).resolved().recipe.save is None
    with pytest.raises(UserError, match="another --run-dir") as caught:
        chain.open_run(resolve("tiny-oasst2", ["lora.r=8", "save.every=3"]), folder, ["clustertune"])
    assert {problem.key for problem in caught.value.problems} == {None, "lora.r"}, "nothing that may change is named"
