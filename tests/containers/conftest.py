"""The CPU variant as a SIF, built once for all tests that want one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertune.containers import engines, wheelhouse
from clustertune.errors import UserError


@pytest.fixture(scope="session")
def cpu_sif(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What ``make build-sif VARIANT=cpu BASE=standin`` said of it. CLUSTERTUNE_SIF names one that was built before."""
    try:
        engines.find_apptainer()
    except UserError as error:
        pytest.skip(str(error))
    if given := os.environ.get("CLUSTERTUNE_SIF"):
        file = Path(given)
        digest = wheelhouse.file_digest(file)
        yield {"file": str(file), "sha256": digest, "bytes": file.stat().st_size, "sbom": f"{file}.cdx.json"}
        return
    from tests.containers.test_images import build

    out = tmp_path_factory.mktemp("sif") / "train-cpu.sif"
    yield build("build-sif", "--variant", "cpu", "--base", "standin", "--out", out)
    shutil.rmtree(out.parent)
