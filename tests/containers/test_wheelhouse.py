"""The wheelhouse: nothing gets in that the lock does not name by its hash."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from clustertune.containers import image_build
from clustertune.containers.lock_file import LockedPackage, PackageLock, text_digest
from tests.containers.packages import digest, lock_of, sdist, wheel
from tests.refusal import problems

pytestmark = pytest.mark.containers  # pip fetches and runs for each: five seconds a time


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The locked build tools, from the index that this machine's pip has."""
    folder = tmp_path_factory.mktemp("build") / "tools"
    image_build._tools(folder, lambda _: None)
    return folder


@pytest.fixture
def served(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index."""
    folder = tmp_path / "served"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    (tmp_path / "tools").symlink_to(tools)
    return folder


def fill(lock: PackageLock, tmp_path: Path) -> list[Path]:
    """The wheels, in a folder of this lock's own."""
    house = tmp_path / f"house-{text_digest(lock.text())[:8]}"
    image_build.fill(lock, house, tmp_path / "tools", lambda _: None)
    return sorted(house.glob("*.whl"))


def test_wheels_and_what_is_built_of_source(served: Path, tmp_path: Path) -> None:
    """The image installs by the requirements that are written here: the built wheel by its own hash."""
    paths = [wheel(served, "kiln"), sdist(served, "pan")]
    lock = lock_of(*paths)
    kiln, pan = fill(lock, tmp_path)
    assert pan.name == "pan-1.0-py3-none-any.whl"
    house = kiln.parent
    written = (house / "requirements.txt").read_text()
    assert written == f"kiln==1.0 \\\n    --hash=sha256:{digest(kiln)}\npan==1.0 \\\n    --hash=sha256:{digest(pan)}\n"
    target = tmp_path / "target"
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--require-hashes",
            "--target", target, "--find-links", house, "--requirement", house / "requirements.txt",
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert (target / "kiln.py").exists() and (target / "pan.py").exists()
    for path in paths:
        path.unlink()
    assert fill(lock, tmp_path) == [kiln, pan], "a build that failed later continues, also where the index is gone"


def test_only_another_architecture_or_python_is_never_taken(served: Path, tmp_path: Path) -> None:
    """pip would take what runs here; the image's Python and platform are the lock's."""
    wheel(served, "kiln", tag="cp311-cp311-manylinux_2_28_x86_64")
    there = wheel(served, "kiln", tag="cp312-cp312-manylinux_2_17_x86_64")
    lock = lock_of(there)
    assert [item.name for item in fill(lock, tmp_path)] == [there.name]


@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_an_altered_hash_ends_the_build(kind: str, served: Path, tmp_path: Path) -> None:
    """In the lock, or of the file: one of the two is not what was reviewed. Also where the right file is there already."""
    lock = lock_of(wheel(served, "kiln") if kind == "wheel" else sdist(served, "kiln"))
    fill(lock, tmp_path)
    altered = replace(lock, entries={"kiln": LockedPackage("kiln", "1.0", ("0" * 64,))})
    (problem,) = problems(fill, altered, tmp_path)
    assert problem.file == "containers/train.lock" and "kiln" in problem.message and "another hash" in problem.message
    assert not list(tmp_path.glob(f"house-{text_digest(altered.text())[:8]}/kiln*"))
