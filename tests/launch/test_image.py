"""Which image a run is in: its sum, read once, and what the run's record says about it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from clustertune.cluster.schema import Container
from clustertune.errors import UserError
from clustertune.launch import image

CONTENT = b"an image" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def sif(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = tmp_path / "train.sif"
    found.write_bytes(CONTENT)
    found.with_name("train.sif.sha256").write_text(f"{DIGEST}  train.sif\n")
    return found


def settings(sif: Path, program: Path | None = None) -> Container:
    return Container(runtime="apptainer", image=str(sif), program=str(program or "/not/there"))


def test_an_image_with_its_sum(sif: Path) -> None:
    """What run.json keeps of it."""
    found, notes = image.look(settings(sif))
    assert found is not None and notes == []
    assert found.as_json() == {
        "runtime": "apptainer", "image": str(sif), "sha256": DIGEST, "checked": True, "bytes": len(CONTENT), "labels": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0" * 64 + "  train.sif\n", f"its sum is {DIGEST[:16]}..., and train.sif.sha256 says 0000000000000000..."),
        ("", "contains no sum of one file"),
        (f"{DIGEST}  a\n{DIGEST}  b\n", "contains no sum of one file"),
        ("\xff" * 64, "contains no sum of one file"),
    ],
)
def test_another_image_than_its_sum_says_is_refused(sif: Path, text: str, message: str) -> None:
    """Altered, copied in part, or a sum of something else: with what to do."""
    sif.with_name("train.sif.sha256").write_text(text)
    with pytest.raises(UserError) as caught:
        image.look(settings(sif))
    (problem,) = caught.value.problems
    assert message in problem.message and problem.fix and "sha256sum train.sif" in problem.fix


@pytest.mark.parametrize("text", [DIGEST, f"{DIGEST.upper()} *train.sif\n", f"{DIGEST}  ./images/train.sif\r\n"])
def test_the_forms_of_a_sum(sif: Path, text: str) -> None:
    """As sha256sum writes it in either mode, from another folder, and the bare digest."""
    sif.with_name("train.sif.sha256").write_text(text)
    found, notes = image.look(settings(sif))
    assert found is not None and found.checked and notes == []


def test_no_sum_is_a_warning(sif: Path) -> None:
    """Images of others have none; the run's record says that nothing was compared."""
    sif.with_name("train.sif.sha256").unlink()
    found, notes = image.look(settings(sif))
    assert found is not None and (found.sha256, found.checked) == (DIGEST, False)
    assert "is not there" in notes[0] and "sha256sum train.sif > train.sif.sha256" in notes[0]


def test_an_image_is_read_once(sif: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 GB at every start would be felt; a changed file is read again, whoever keeps its size."""
    reads: list[Path] = []
    real = image._read
    monkeypatch.setattr(image, "_read", lambda path, size: (reads.append(path), real(path, size))[1])
    for _ in range(2):
        image.look(settings(sif))
    assert len(reads) == 1
    sif.write_bytes(CONTENT[::-1])
    with pytest.raises(UserError, match="its sum is"):
        image.look(settings(sif))
    assert len(reads) == 2
    # A copy that keeps the time (cp -p, rsync -t) has another inode.
    sif.write_bytes(CONTENT)
    os.utime(sif, (1.0, 1.0))
    image.look(settings(sif))
    other = sif.with_name("other.sif")
    other.write_bytes(CONTENT[::-1])
    os.utime(other, (1.0, 1.0))
    other.replace(sif)
    with pytest.raises(UserError, match="its sum is"):
        image.look(settings(sif))


def test_what_others_can_write_is_not_believed(sif: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A remembered sum decides which code runs; a damaged one is no reason to fail."""
    image.look(settings(sif))
    memory = image._memory(sif)
    remembered = json.loads(memory.read_text())
    memory.write_text(json.dumps({**remembered, "sha256": "0" * 64}))
    with pytest.raises(UserError, match="its sum is 0000"):
        image.look(settings(sif))
    for spoil in (lambda: memory.chmod(0o666), lambda: memory.write_text("["), memory.unlink):
        spoil()
        found, _ = image.look(settings(sif))
        assert found is not None and found.sha256 == DIGEST
    other = sif.with_name("other")
    memory.rename(other)
    memory.symlink_to(other)
    assert image._recall(sif, image._identity(sif)) is None


def test_a_cache_folder_that_cannot_be_is_lived_without(sif: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Home folders are full, or missing on a node."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(sif))
    assert image.look(settings(sif))[0] is not None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert image.look(settings(sif))[0] is not None


def test_an_image_that_is_written_to_meanwhile_is_refused(sif: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy on its way has a sum that nothing else will ever have."""

    def read(path: Path, size: int) -> str:
        path.write_bytes(CONTENT + b"more")
        return "0" * 64

    monkeypatch.setattr(image, "_read", read)
    with pytest.raises(UserError, match="was written to while"):
        image.look(settings(sif))
    assert not image._memory(sif).exists()


def test_no_image(sif: Path, tmp_path: Path) -> None:
    """A missing one, a folder, none asked for, and one of a registry."""
    sif.unlink()
    with pytest.raises(UserError, match="no such image"):
        image.look(settings(sif))
    sif.mkdir()
    with pytest.raises(UserError, match="is not a file"):
        image.look(settings(sif))
    assert image.look(Container()) == (None, [])
    digest = "ab" * 32
    found, notes = image.look(Container(runtime="pyxis", image=f"docker://a/b@sha256:{digest}"))
    assert found is not None and (found.sha256, found.checked, notes) == (digest, True, [])


def test_the_labels_of_an_image(sif: Path, tmp_path: Path) -> None:
    """From the runtime's own inspection; what it says otherwise is not a label."""
    program = tmp_path / "apptainer"
    body = {"data": {"attributes": {"labels": {"clustertune.lock": "train", "long": "x" * 999}}}}
    for text, labels in ((json.dumps(body), {"clustertune.lock": "train", "long": "x" * 200}), ("{}", {}), ("no", {})):
        program.write_text(f"#!/bin/sh\ncat <<'E'\n{text}\nE\n")
        program.chmod(0o755)
        assert image.labels_of(settings(sif, program), sif) == labels


def test_a_run_that_goes_on_in_another_image_says_so(sif: Path) -> None:
    """After an update of the image in its place a restarted job would mix two stacks unnoticed."""
    found, _ = image.look(settings(sif))
    assert found is not None
    assert image.changed(None, found) == image.changed(found.as_json(), found) == image.changed({"sha256": None}, found) == ""
    assert "another image" in image.changed({"sha256": "0" * 64}, found)


def test_submit_tells_of_an_image_before_anything_is_queued(sif: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole one goes into the run's record; a damaged one, and a run folder that cannot be bound, are reported together."""
    from clustertune.submission import Submission
    from tests.launch.machines import REPO

    file = tmp_path / "mine.yaml"
    text = (REPO / "ops/clusters/rno-rtxpro6000.yaml").read_text().replace("rno-rtxpro6000\n", "mine\n", 1)
    file.write_text(text.replace("image: /pool/images/train.sif", f"image: {sif}"))
    run = tmp_path / "a,b"

    def submission(path: Path) -> Submission:
        return Submission.make("tiny-oasst2", [], True, str(file), path, None, "report", one_job=False)

    good = submission(tmp_path / "run")
    assert not [p for p in good.find_problems(dry_run=False) if p.key == "container.image"]
    assert good.image is not None and good.image.sha256 == DIGEST
    monkeypatch.setattr("clustertune.launch.submit.submit_all", lambda *words: [])
    good.jobs = []
    good.send(as_json=False)
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["container"]
    assert (recorded["sha256"], recorded["image"], recorded["checked"]) == (DIGEST, str(sif), True)
    os.truncate(sif, 100)
    messages = [problem.message for problem in submission(run).find_problems(dry_run=False)]
    assert any("its sum is" in text for text in messages) and any("cannot be shown a path" in text for text in messages)
