"""The CPU variant as a SIF, built once for all tests that want one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertune.containers import engines, wheelhouse
from clustertune.errors import UserError


def pytest_addoption(parser: pytest.Parser) -> None:
    """For work on these tests: pytest tests/containers --sif FILE, or make test-containers SIF=FILE."""
    parser.addoption("--sif", type=Path, metavar="FILE", help="the CPU variant as it was built before, with its sum and bill")


@pytest.fixture(scope="session")
def cpu_sif(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What ``make build-sif VARIANT=cpu BASE=standin`` said of it."""
    try:
        engines.find_apptainer()
    except UserError as error:
        pytest.skip(str(error))
    # Where pytest was not started on this folder it never heard of the option.
    if given := request.config.getoption("--sif", default=None):
        file = given.absolute()
        digest = wheelhouse.file_digest(file)
        yield {"file": str(file), "sha256": digest, "bytes": file.stat().st_size, "sbom": f"{file}.cdx.json"}
        return
    from tests.containers.test_images import build

    out = tmp_path_factory.mktemp("sif") / "train-cpu.sif"
    yield build("build-sif", "--variant", "cpu", "--base", "standin", "--out", out)
    shutil.rmtree(out.parent)
