"""The image that ``stage --to`` carries along: whole, or not at all; one in a registry is not a file to carry."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import Container
from clustertune.errors import UserError
from clustertune.resolve.resolve import resolve
from clustertune.staging.collect import BundlePart, Collector
from clustertune.staging.worker import Bounds


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are remembered below it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan(tmp_path: Path, **container: str) -> tuple[list[BundlePart], list[str]]:
    """The parts of the tiny recipe for a cluster with this container, and the notes."""
    cluster = load_cluster("local").model_copy(update={"container": Container.model_validate(container)})
    resolved = resolve("recipes/tiny-oasst2", [], tiny=False)
    collector = Collector(resolved, cluster, tmp_path / "out", None, Bounds())
    return [part for part in collector.plan() if part.what == "container"], collector.notes


def test_an_image_goes_with_its_sum(tmp_path: Path) -> None:
    """So that the machine without network holds it against the same one."""
    image = tmp_path / "train.sif"
    image.write_bytes(b"image")
    (part,), notes = plan(tmp_path, runtime="apptainer", image=str(image))
    assert [file.name for file in part.files] == ["train.sif"]
    assert any("train.sif.sha256 is not there" in note for note in notes)
    image.with_name("train.sif.sha256").write_text(f"{hashlib.sha256(b'image').hexdigest()}  train.sif\n")
    (part,), notes = plan(tmp_path, runtime="apptainer", image=str(image))
    assert [file.name for file in part.files] == ["train.sif", "train.sif.sha256"]
    assert not any("sha256" in note for note in notes)
    image.write_bytes(b"altered")  # where it is opened nobody can fetch it again
    with pytest.raises(UserError, match=r"train.sif.sha256 says"):
        plan(tmp_path, runtime="apptainer", image=str(image))
    with pytest.raises(UserError, match="no such image"):
        plan(tmp_path, runtime="apptainer", image=str(tmp_path / "none.sif"))
    assert plan(tmp_path)[0] == [], "a laptop's"


def test_an_image_in_a_registry_is_told_with_the_way_to_a_file(tmp_path: Path) -> None:
    """Pyxis would pull it on the nodes, which reach no registry; `no such file` would be said about its address."""
    digest = "sha256:" + "a" * 64
    with pytest.raises(UserError) as caught:
        plan(tmp_path, runtime="pyxis", image=f"docker://registry.example/me/train@{digest}")
    (problem,) = caught.value.problems
    assert problem.key == "container.image" and "registry" in problem.message
    assert problem.fix and f"enroot import --output train.sqsh 'docker://registry.example#me/train:{digest}'" in problem.fix
