"""Arithmetic and shapes behind the rules of the run folder, each alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from clustertune.chain import default_run_dir
from clustertune.check.rule import FAIL, WARN
from clustertune.config.resolve import resolve
from clustertune.doctor import run_folder
from clustertune.doctor.run_folder import bad_shapes, existing, needed
from clustertune.tensorfile import Tensor
from tests.command import run
from tests.doctor.recipe_case import make, write_checkpoint, write_run
from tests.doctor.run_cases import checkpoint, full_disk
from tests.tree import REPO


def shapes(**given: tuple[int, ...]) -> list[Tensor]:
    return [Tensor(f"layers.0.lora_{name}.weight", "F32", shape, Path("x"), 0, 0) for name, shape in given.items()]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (shapes(A=(32, 64), B=(128, 32)), []),
        ([], ["it contains no tensor"]),
        (shapes(A=(2048,), B=(128, 32)), ["layers.0.lora_A.weight has shape [2048]"]),
        (shapes(A=(32, 64), B=(0, 32)), ["layers.0.lora_B.weight has shape [0, 32]"]),
        (shapes(A=(32, 64)), ["layers.0.lora_B.weight is missing"]),
        (shapes(B=(128, 32)), ["layers.0.lora_A.weight is missing"]),
        (shapes(A=(16, 64), B=(128, 32)), ["layers.0.lora_A.weight has 16 rows, layers.0.lora_B.weight 32 columns"]),
    ],
)
def test_an_adapters_shapes_are_its_own(tensors: list[Tensor], words: list[str]) -> None:
    """A shard's rest is flat or empty, and so are files of 400 bytes that every tool takes for an adapter."""
    assert list(bad_shapes(tensors)) == words


@pytest.mark.parametrize(
    ("limit", "steps", "there", "count"),
    [(3, 5, 0, 4), (1, 5, 0, 2), (3, 100, 0, 2), (None, 5, 0, 32), (3, 5, 3, 1), (3, 5, 4, 0)],
)
def test_the_newest_checkpoint_is_written_beside_those_that_are_kept(
    limit: int | None, steps: int, there: int, count: int, tmp_path: Path
) -> None:
    """Retention removes the oldest after the newest is whole: room for the limit alone is too little, once in every run."""
    case = make(tmp_path)
    case.recipe["train"] |= {"save_total_limit": limit, "save_steps": steps}
    write_run(case)
    for number in range(there):
        write_checkpoint(case, number + 1)
    context = case.context()
    assert context.plan is not None
    parts = needed(context.plan, case.run)
    size = context.plan.schedule.checkpoint_bytes
    found = {name: round(part / size) for name, part in parts.items() if name.endswith("checkpoints")}
    assert found == ({f"{count} checkpoints": count} if count else {})
    assert {"adapter", "merged model"} <= set(parts)


def test_what_is_there_needs_no_more_room(tmp_path: Path) -> None:
    """A finished export and merge are not written again."""
    case = make(tmp_path)
    write_run(case)
    for name in ("adapter", "merged"):
        (case.run / name).mkdir()
        (case.run / name / "MANIFEST.json").write_text("{}")
    context = case.context()
    assert context.plan is not None
    assert [name for name in needed(context.plan, case.run) if not name.endswith("checkpoints")] == []


def test_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    """A run folder is made by the run: its disk is that of the folder above."""
    assert existing(tmp_path / "a" / "b") == tmp_path
    assert existing(tmp_path) == tmp_path


def test_a_broken_checkpoint_is_named_with_its_file_and_what_follows(tmp_path: Path) -> None:
    """People look for the file; and whether their run continues is what they want to know."""
    case = make(tmp_path)
    write_run(case)
    write_checkpoint(case, 40)
    (write_checkpoint(case, 80) / "pytorch_model_fsdp_0" / ".metadata").unlink()
    found = {item.rule: item for item in case.findings()}
    assert found["checkpoint-damaged"].status == found["checkpoint-without-metadata"].status == WARN
    assert found["checkpoint-damaged"].found == "step-000080 is not whole: .metadata: missing; the run resumes from step-000040"


def test_a_checkpoint_of_other_ranks_is_no_finding_under_fsdp(tmp_path: Path) -> None:
    case = make(tmp_path)
    checkpoint(world=16)(case)
    assert "checkpoint-of-another-world" not in {item.rule for item in case.findings() if item.status != "pass"}


def test_only_the_newest_are_compared(tmp_path: Path) -> None:
    """A run may keep hundreds: three are enough to say what happens next, and an old one may still be whole."""
    case = make(tmp_path)
    write_run(case)
    for step in (20, 40, 60, 80):
        (write_checkpoint(case, step) / "MANIFEST.json").unlink()
    found = [item for item in case.findings() if item.rule == "checkpoint-damaged"]
    assert [item.status for item in found] == [WARN] * 3
    assert FAIL not in {item.status for item in case.findings()}


def test_without_a_run_dir_the_one_of_submit_is_looked_at(tmp_path: Path) -> None:
    """Nobody names it who has just submitted without; without a message about disk and checkpoints a doctor would be none."""
    recipe = REPO / "recipes" / "tiny-oasst2"
    folder = default_run_dir(resolve(recipe), tmp_path / "runs")
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    cluster = yaml.safe_load((REPO / "ops" / "clusters" / "rno-rtxpro6000.yaml").read_text())
    cluster["storage"]["runs"] = str(tmp_path / "runs")
    (tmp_path / "here.yaml").write_text(yaml.safe_dump(cluster))
    done = run("doctor", str(recipe), "--cluster", str(tmp_path / "here.yaml"), "--json", cwd=tmp_path)
    assert [item["where"] for item in done.json["findings"] if item["rule"] == "run-of-another-recipe"] == [str(folder)]


@pytest.mark.parametrize(("hostname", "fires"), [("rno-it-gpu0007-1", True), ("laptop", False)])
def test_the_disk_of_a_laptop_is_not_the_clusters(
    hostname: str, fires: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder's path means another disk there, unless it is there."""
    case = make(tmp_path)
    full_disk(0.5)(case)
    case.hostname = hostname
    near = case.context()
    assert list(run_folder.room(near)), "the parent exists, so its room can be measured on any machine"
    monkeypatch.setattr(run_folder, "is_there", lambda path: path in (tmp_path, Path("/")))
    far = dataclasses.replace(near, run_dir=tmp_path / "runs" / "name" / "id")
    assert bool([*run_folder.room(far)]) is fires
