"""What GPUs, links and networks can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune.cluster.hardware import HARDWARE, load_prices, read_hardware, recognise
from clustertune.recipe.layers import read_yaml
from tests.recipe.conftest import readable


def refused(tmp_path: Path, body: dict[str, Any]) -> list[str]:
    """The problems of a changed copy, each with the place in it."""
    path = tmp_path / "hardware.yaml"
    path.write_text(json.dumps(body))
    found = readable(read_hardware, path)
    assert all(str(path) in problem.file for problem in found)
    return list(map(str, found))


@pytest.fixture
def body() -> dict[str, Any]:
    """The shipped file as plain values, to be spoiled."""
    return read_yaml(HARDWARE, "hardware").data


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("rtx_pro_6000", "rtx-pro-6000-blackwell-server"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-blackwell-server"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-blackwell-workstation"),
        ("nvidia_h100_80gb_hbm3", "h100-sxm"), ("NVIDIA H200", "h200-sxm"), ("NVIDIA H100 PCIe", "h100-pcie"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32"), ("a100", None), ("v100", None), ("NVIDIA H100 80GB HBM2e", None), ("", None),
    ],
)  # fmt: skip
def test_names_of_the_driver_and_of_gres_are_recognised(word: str, name: str | None) -> None:
    """A name that two models share is none: 40 GB taken for 80 ends in an out-of-memory error after the queue."""
    assert recognise(word) == name


SOURCES = {"memory_gb": "x", "usable_gib": "x", "bf16_tflops": "x", "fp8_tflops": "x", "hbm_gb_s": "x"}


WRONG: list[tuple[str, str, dict[str, Any] | None, str]] = [
    *(("gpus", "h100-sxm", change, words) for change, words in [
        ({"sources": {"memory_gb": "x"}}, "every figure has its source"),
        ({"sources": SOURCES | {"hbm_gb_s": " "}}, "every figure has its source"),
        ({"sources": SOURCES | {"tflops": "x"}}, "no such figure"),
        ({"sources": SOURCES | {"fp16_tflops": "x"}}, "the figure is not given"), ({"usable_gib": 81}, "cannot be"),
        ({"usable_gib": 60}, "cannot be"), ({"memory": 80}, "did you mean memory_gb?"),
        ({"generation": "hoper"}, "did you mean hopper?"), ({"generation": "volta"}, "have no bfloat16"),
        ({"bf16_tflops": None}, "compute in bfloat16"), ({"fp16_tflops": 989}, "no fp16_tflops"),
        ({"fp8_tflops": None}, "have fp8"), ({"compute_capability": "8.0"}, "have no fp8"),
        ({"bf16_tflops": 1979}, "without sparsity"), ({"hbm_gb_s": 0}, "greater than 0"), ({"names": []}, "empty"),
        ({"types": ["NVIDIA-L40S"]}, "is also"),
    ]),
    ("links", "nvlink4", None, "cluster files name it"), ("networks", "roce", None, "cluster files name it"),
    ("host_links", "c2c", None, "cluster files name it"), ("links", "nvlink4", {"share": 1.2}, "less than or equal to 1"),
    ("links", "nvlink4", {"latency_us": None}, "latency_us: missing"),
    ("links", "nvlink4", {"sources": {"gb_s": "x", "latency_us": "x"}}, "every figure has its source"),
    ("networks", "ethernet", {"sources": {"share": "x", "latency_us": "x"}}, "every figure has its source"),
    ("storage", "sources", {"read_gb_s": ""}, "storage.sources.read_gb_s"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "key", "change", "words"), WRONG)
def test_a_wrong_figure_is_refused(
    tmp_path: Path, body: dict[str, Any], section: str, key: str, change: dict[str, Any] | None, words: str
) -> None:
    """One without a source, against another, or of no GPU; what a cluster file may name must be there."""
    if change is None:
        del body[section][key]
    else:
        body[section][key] |= change
    assert any(words in problem for problem in refused(tmp_path, body))


# --- prices ----------------------------------------------------------------------------------------------------------------


def priced(tmp_path: Path, change: dict[str, Any], **top: Any) -> Path:
    """A price file of one GPU."""
    entry = {"on_demand": 2.9, "spot": 0.8, "source": "x"} | change
    gpus = {"h100-sxm": {key: value for key, value in entry.items() if value is not None}}
    path = tmp_path / "prices.yaml"
    path.write_text(yaml.safe_dump({"date": "2026-04-29", "currency": "USD", "gpus": gpus} | top, sort_keys=False))
    return path


@pytest.mark.parametrize(
    ("change", "top", "words"),
    [
        ({"spot": -0.1}, {}, "greater than or equal to 0"), ({"on_demand": "2.90 USD"}, {}, "number"),
        ({"on_demand": float("nan")}, {}, "finite"), ({"on_demand": None, "spot": None}, {}, "neither on_demand nor spot"),
        ({"source": None}, {}, "missing"), ({"ondemand": 2}, {}, "did you mean on_demand?"),
        ({"date": "yesterday"}, {}, "is not a date"), ({}, {"date": "2026-13-01"}, "is not a date"),
        ({}, {"currency": "dollars"}, "currency"),
        ({}, {"gpus": {"h100-smx": {"spot": 1, "source": "x"}}}, "did you mean h100-sxm?"),
    ],
)  # fmt: skip
def test_a_wrong_price_is_refused(tmp_path: Path, change: dict[str, Any], top: dict[str, Any], words: str) -> None:
    """A misspelt GPU would be a run without a price, a negative one a run that earns money."""
    found = readable(load_prices, priced(tmp_path, change, **top))
    assert any(words in str(problem) for problem in found), found
