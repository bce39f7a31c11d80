"""What a GPU can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune.config.hardware import HARDWARE, load_hardware, recognise
from clustertune.errors import UserError


def test_the_reference_gpu_is_known() -> None:
    """Bytes that a plan may use, below what is sold."""
    gpu = load_hardware()["rtx-pro-6000-blackwell-server"]
    assert gpu.memory_gb == 96
    assert gpu.usable_bytes == int(94.97 * 2**30) < 97887 * 2**20


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("rtx_pro_6000", "rtx-pro-6000-blackwell-server"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-blackwell-server"),
        ("nvidia_h100_80gb_hbm3", "h100-sxm"),
        ("NVIDIA H200", "h200-sxm"),
        ("a100", None),
        ("NVIDIA H100 PCIe", None),
        ("", None),
    ],
)
def test_names_of_the_driver_and_of_gres_are_recognised(word: str, name: str | None) -> None:
    """A name that two models share is none: 40 GB taken for 80 ends in an out-of-memory error after the queue."""
    assert recognise(word) == name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sources": {"memory_gb": "x"}}, "every figure has its source"),
        ({"sources": {"memory_gb": " ", "usable_gib": "x"}}, "every figure has its source"),
        ({"sources": {"memory_gb": "x", "usable_gib": "x", "tflops": "x"}}, "no such figure"),
        ({"usable_gib": 81}, "cannot be"),
        ({"usable_gib": 60}, "cannot be"),
        ({"usable_gib": "79 GiB"}, "number"),
        ({"memory": 80}, "did you mean memory_gb?"),
        ({"generation": "hoper"}, "did you mean hopper?"),
        ({"names": []}, "empty"),
        ({"types": ["NVIDIA-L40S"]}, "is also"),
    ],
)
def test_a_wrong_entry_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    body = yaml.safe_load(HARDWARE.read_text())
    body["gpus"]["h100-sxm"] |= change
    path = tmp_path / "hardware.yaml"
    path.write_text(yaml.safe_dump(body, sort_keys=False))
    with pytest.raises(UserError) as caught:
        load_hardware(path)
    assert any(words in str(problem) and str(path) in str(problem.file) for problem in caught.value.problems), caught.value
