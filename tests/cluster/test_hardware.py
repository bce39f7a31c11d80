"""What GPUs, links and networks can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune.cluster.hardware import HARDWARE, load_hardware, load_prices, plain, read_hardware, recognise
from clustertune.cluster.schema import INTERCONNECTS, NETWORKS
from clustertune.recipe.layers import read_yaml
from tests.recipe.conftest import readable


def refused(tmp_path: Path, body: dict[str, Any]) -> list[str]:
    """The problems of a changed copy, each with the place in it."""
    path = tmp_path / "hardware.yaml"
    path.write_text(json.dumps(body))
    found = readable(load_hardware, path)
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


@pytest.mark.parametrize(
    ("section", "key", "change", "words"),
    [
        ("gpus", "h100-sxm", {"memory": 80}, "did you mean memory_gb?"), ("gpus", "h100-sxm", {"names": []}, "empty"),
        ("gpus", "h100-sxm", {"generation": "hoper"}, "did you mean hopper?"),
        ("gpus", "h100-sxm", {"hbm_gb_s": 0}, "greater than 0"),
        ("links", "nvlink4", {"share": 1.2}, "less than or equal to 1"),
    ],
)  # fmt: skip
def test_a_wrong_figure_is_refused(
    tmp_path: Path, body: dict[str, Any], section: str, key: str, change: dict[str, Any], words: str
) -> None:
    """By its key."""
    body[section][key] |= change
    assert any(words in problem for problem in refused(tmp_path, body))


def test_every_figure_has_its_source_and_every_link_is_there() -> None:
    """A cluster file may name every link and network: a plan must not find nothing. A word means one GPU."""
    hardware = read_hardware()
    none = {"vendor", "network", "generation", "compute_capability", "host_link", "nvlink", "names", "types", "sources", "hint"}
    tables = (hardware.gpus, hardware.links, hardware.host_links, hardware.networks, hardware.nodes, {"": hardware.storage})
    for entry in (entry for table in tables for entry in table.values()):
        given = {key for key in type(entry).model_fields if key not in none and getattr(entry, key) is not None}
        assert given == {key for key, source in entry.sources.items() if source.strip()}
    assert {*INTERCONNECTS} - {"none"} <= hardware.links.keys()
    assert {*NETWORKS} - {"none", "unknown"} <= hardware.networks.keys()
    assert {gpu.host_link for gpu in hardware.gpus.values()} <= hardware.host_links.keys()
    words = [plain(word) for gpu in hardware.gpus.values() for word in {*map(plain, (*gpu.names, *gpu.types))}]
    assert len(words) == len(set(words))


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
