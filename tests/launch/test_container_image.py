"""The image of a run: its SHA-256, computed once, and held against the file beside it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import Container
from clustertune.containers import pins
from clustertune.errors import UserError
from clustertune.launch import container_image
from clustertune.submission import SubmissionPlan, check, plan_submission, send
from tests.command import REPO

CONTENT = b"an image" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
PINNED = pins.read()


@pytest.fixture
def sif(tmp_path: Path) -> Path:
    found = tmp_path / "train.sif"
    found.write_bytes(CONTENT)
    found.with_name("train.sif.sha256").write_text(f"{DIGEST}  train.sif\n")
    return found


def settings(sif: Path, program: Path | None = None) -> Container:
    return Container(runtime="apptainer", image=str(sif), program=str(program or "/not/there"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0" * 64 + "  train.sif\n", f"its SHA-256 is {DIGEST[:16]}..., and train.sif.sha256 says 0000000000000000..."),
        ("", "contains no sum of one file"),
        (f"{DIGEST}  a\n{DIGEST}  b\n", "contains no sum of one file"),
        ("\xff" * 64, "contains no sum of one file"),
    ],
)
def test_another_image_than_its_sum_says_is_refused(sif: Path, text: str, message: str) -> None:
    """Altered, copied in part, or a sum of something else: with what to do."""
    sif.with_name("train.sif.sha256").write_text(text)
    with pytest.raises(UserError) as caught:
        container_image.look(settings(sif))
    (problem,) = caught.value.problems
    assert message in problem.message and problem.fix and "sha256sum train.sif" in problem.fix


def test_a_changed_image_is_noticed(sif: Path) -> None:
    """Each look reads the file: a copy that keeps size and time (cp -p, rsync -t) is no other's sum."""
    container_image.look(settings(sif))
    before = sif.stat()
    sif.write_bytes(CONTENT[::-1])
    os.utime(sif, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match="its SHA-256 is"):
        container_image.look(settings(sif))


def test_no_image(sif: Path, tmp_path: Path) -> None:
    """A missing one, a folder, none asked for, and one of a registry."""
    sif.unlink()
    with pytest.raises(UserError, match="no such image"):
        container_image.look(settings(sif))
    sif.mkdir()
    with pytest.raises(UserError, match="is not a file"):
        container_image.look(settings(sif))
    assert container_image.look(Container()) == (None, [])
    digest = "ab" * 32
    found, notes = container_image.look(Container(runtime="pyxis", image=f"docker://a/b@sha256:{digest}"))
    assert found is not None and (found.sha256, found.checked, notes) == (digest, True, [])


def test_a_run_that_goes_on_in_another_image_says_so(sif: Path) -> None:
    """After an update of the image in its place a restarted job would mix two stacks unnoticed."""
    found, _ = container_image.look(settings(sif))
    assert found is not None
    assert (
        container_image.changed(None, found)
        == container_image.changed(found.as_json(), found)
        == container_image.changed({"sha256": None}, found)
        == ""
    )
    assert "another image" in container_image.changed({"sha256": "0" * 64}, found)


def test_submit_tells_of_an_image_before_anything_is_queued(sif: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole one goes into the run's record; a damaged one, and a run folder that cannot be bound, are reported together."""
    file = tmp_path / "mine.yaml"
    text = (REPO / "ops/clusters/rno-rtxpro6000.yaml").read_text().replace("rno-rtxpro6000\n", "mine\n", 1)
    file.write_text(text.replace("image: /pool/images/train.sif", f"image: {sif}"))

    def submission(path: Path) -> SubmissionPlan:
        return plan_submission("tiny-oasst2", [], True, load_cluster(str(file)), path, None, "report")

    good = submission(tmp_path / "run")
    problems, found, _ = check(good, dry_run=False)
    assert not [p for p in problems if p.key == "container.image"]
    assert found is not None and found.sha256 == DIGEST
    monkeypatch.setattr("clustertune.launch.stage_jobs.submit_all", lambda *words: [])
    send(replace(good, jobs=[]), found, as_json=False)
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["container"]
    assert recorded.items() >= {
        "runtime": "apptainer", "image": str(sif), "sha256": DIGEST, "checked": True, "bytes": len(CONTENT),
    }.items()  # fmt: skip
    os.truncate(sif, 100)
    messages = [problem.message for problem in check(submission(tmp_path / "a,b"), dry_run=False)[0]]
    assert any("its SHA-256 is" in text for text in messages) and any("cannot be shown a path" in text for text in messages)
