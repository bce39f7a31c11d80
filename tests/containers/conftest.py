"""The CPU variant as a SIF and as an OCI image, built once for all workers that want one, and both at the same time."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from clustertune import lock
from clustertune.containers import image_build as images
from clustertune.errors import UserError
from clustertune.manifest import hash_file
from tests.conftest import common_folder


def pytest_addoption(parser: pytest.Parser) -> None:
    """For work on these tests: pytest tests/containers --sif FILE, or make test-containers SIF=FILE."""
    parser.addoption("--sif", type=Path, metavar="FILE", help="the CPU variant as it was built before, with its sum and bill")


TAG = "clustertune/test:cpu"
Started = Callable[[str], "Future[dict[str, Any]]"]


FOLDER = "images"
"""Below pytest's folder for this run: what all its workers use."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The SIF goes when nobody uses it any more."""
    factory = getattr(session.config, "_tmp_path_factory", None)
    if factory is not None:
        shutil.rmtree(factory.getbasetemp() / FOLDER, ignore_errors=True)


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    found = common_folder(factory) / FOLDER
    found.mkdir(exist_ok=True)
    return found


@pytest.fixture(scope="session")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Begins the builds that this session's tests want, once; a build keeps one core busy for most of its time."""
    from tests.containers.test_images import build

    folder = shared_folder(tmp_path_factory)
    options = {"build-sif": ["--out", folder / "train-cpu.sif"], "build-image": ["--tag", TAG]}
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    running: dict[str, Future[dict[str, Any]]] = {}

    def built(kind: str) -> dict[str, Any]:
        answer = folder / f"{kind}.json"
        with lock.in_turn(folder / f"{kind}.lock", lambda: None):
            if not answer.exists():
                answer.write_text(json.dumps(build(kind, "--variant", "cpu", "--base", "standin", *options[kind])))
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    with ThreadPoolExecutor(2) as pool:

        def start(kind: str) -> Future[dict[str, Any]]:
            if kind not in running:
                running[kind] = pool.submit(built, kind)
            return running[kind]

        if wanted & {"oci", "image"} and has(images.find_engine) is None:
            start("build-image")
        yield start


def has(find: Callable[[], str]) -> str | None:
    """Why a program is not here; None where it is."""
    try:
        find()
    except UserError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def cpu_sif(request: pytest.FixtureRequest, started: Started) -> dict[str, Any]:
    """What ``make build-sif VARIANT=cpu BASE=standin`` said about it."""
    if (reason := has(images.find_apptainer)) is not None:
        pytest.skip(reason)
    # Where pytest was not started on this folder it never heard of the option.
    if given := request.config.getoption("--sif", default=None):
        file = given.absolute()
        digest = hash_file(file).sha256
        return {"file": str(file), "sha256": digest, "bytes": file.stat().st_size, "sbom": f"{file}.cdx.json"}
    return started("build-sif").result()


@pytest.fixture(scope="session")
def cpu_oci(started: Started) -> Iterator[dict[str, Any]]:
    """What ``make build-image VARIANT=cpu BASE=standin`` said about it."""
    if (reason := has(images.find_engine)) is not None:
        pytest.skip(reason)
    answer = started("build-image").result()
    yield answer
    subprocess.run([images.find_engine(), "rmi", "--force", TAG], capture_output=True, timeout=300, check=False)
    Path(answer["sbom"]).unlink()
