"""The source document's stack to the version: its image is built, and passes its own test."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from clustertune.containers import image_build as images
from clustertune.containers import pins
from tests.containers.in_sif import in_sif
from tests.containers.test_images import build

pytestmark = [pytest.mark.containers, pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``make build-sif DEFINITION=reference BASE=standin``."""
    images.find_apptainer()
    return build(
        "build-sif", "--definition", "reference", "--base", "standin", "--out", tmp_path_factory.mktemp("sif") / "r.sif"
    )


def test_its_own_test(reference: dict[str, Any]) -> None:
    """Versions, two ranks that add, a few steps of LoRA."""
    command = in_sif(images.find_apptainer(), Path(reference["file"]), "python", images.SELFTEST)
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, version in pins.read()[pins.REF].items():
        assert f"{name} {version}" in done.stdout, done.stdout
