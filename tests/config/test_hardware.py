"""What GPUs, links and networks can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune.config import yamlfile
from clustertune.config.cluster_schema import INTERCONNECTS, NETWORKS
from clustertune.config.hardware import HARDWARE, load_hardware, read_hardware, recognise
from clustertune.config.yamlfile import Document, read_yaml
from clustertune.errors import UserError
from tests.config.conftest import check_form


def refused(tmp_path: Path, body: dict[str, Any]) -> list[str]:
    """The problems of a changed copy, each with the place in it."""
    path = tmp_path / "hardware.yaml"
    path.write_text(yaml.safe_dump(body, sort_keys=False))
    with pytest.raises(UserError) as caught:
        load_hardware(path)
    check_form(caught.value)
    assert all(str(path) in str(problem.file) for problem in caught.value.problems)
    return [str(problem) for problem in caught.value.problems]


@pytest.fixture
def body() -> dict[str, Any]:
    """The shipped file as plain values, to be spoiled."""
    return read_yaml(HARDWARE, "hardware").data


def test_the_reference_gpu_is_known() -> None:
    """Bytes that a plan may use, below what is sold; its peak is four times fp32, above the 417 that were measured."""
    gpu = load_hardware()["rtx-pro-6000-blackwell-server"]
    assert gpu.memory_gb == 96
    assert gpu.usable_bytes == int(94.97 * 2**30) < 97887 * 2**20
    assert gpu.bf16_tflops == 480


def test_every_link_and_network_that_a_cluster_file_may_name_has_figures() -> None:
    """An all-gather stays below the nominal speed, and NVLink above PCIe of its time."""
    hardware = read_hardware()
    assert set(hardware.links) == set(INTERCONNECTS) - {"none"}
    assert set(hardware.networks) == set(NETWORKS) - {"none", "unknown"}
    assert all(0 < item.share < 1 for item in (*hardware.links.values(), *hardware.networks.values()))
    reached = {name: item.gb_s * item.share for name, item in hardware.links.items()}
    assert 350 <= reached["nvlink4"] <= 370, "8 x H100: what NCCL's developers expect"
    assert reached["pcie5"] == pytest.approx(22.2, rel=0.02), "8 x RTX PRO 6000, as measured"


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("rtx_pro_6000", "rtx-pro-6000-blackwell-server"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-blackwell-server"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-blackwell-workstation"),
        ("nvidia_h100_80gb_hbm3", "h100-sxm"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32"),
        ("a100", None),
        ("v100", None),
        ("NVIDIA H100 80GB HBM2e", None),
        ("", None),
    ],
)
def test_names_of_the_driver_and_of_gres_are_recognised(word: str, name: str | None) -> None:
    """A name that two models share is none: 40 GB taken for 80 ends in an out-of-memory error after the queue."""
    assert recognise(word) == name


SOURCES = {"memory_gb": "x", "usable_gib": "x", "bf16_tflops": "x", "fp8_tflops": "x", "hbm_gb_s": "x"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sources": {"memory_gb": "x"}}, "every figure has its source"),
        ({"sources": SOURCES | {"hbm_gb_s": " "}}, "every figure has its source"),
        ({"sources": SOURCES | {"tflops": "x"}}, "no such figure"),
        ({"sources": SOURCES | {"fp16_tflops": "x"}}, "the figure is not given"),
        ({"usable_gib": 81}, "cannot be"),
        ({"usable_gib": 60}, "cannot be"),
        ({"usable_gib": "79 GiB"}, "number"),
        ({"memory": 80}, "did you mean memory_gb?"),
        ({"generation": "hoper"}, "did you mean hopper?"),
        ({"generation": "volta"}, "have no bfloat16"),
        ({"bf16_tflops": None}, "compute in bfloat16"),
        ({"fp16_tflops": 989}, "no fp16_tflops"),
        ({"fp8_tflops": None}, "have fp8"),
        ({"compute_capability": "8.0"}, "have no fp8"),
        ({"bf16_tflops": 1979}, "without sparsity"),
        ({"hbm_gb_s": 0}, "greater than 0"),
        ({"host_link": "pcie7"}, "not one of"),
        ({"names": []}, "empty"),
        ({"types": ["NVIDIA-L40S"]}, "is also"),
    ],
)
def test_a_wrong_gpu_is_refused(tmp_path: Path, body: dict[str, Any], change: dict[str, Any], words: str) -> None:
    """Each figure without a source, against another, or of no GPU."""
    body["gpus"]["h100-sxm"] |= change
    assert any(words in problem for problem in refused(tmp_path, body))


@pytest.mark.parametrize(
    ("section", "key", "change", "words"),
    [
        ("links", "nvlink4", None, "cluster files name it"),
        ("networks", "roce", None, "cluster files name it"),
        ("host_links", "c2c", None, "cluster files name it"),
        ("links", "nvlink4", {"share": 1.2}, "less than or equal to 1"),
        ("links", "nvlink4", {"share": 0}, "greater than 0"),
        ("links", "nvlink4", {"latency_us": None}, "latency_us: missing"),
        ("links", "nvlink4", {"sources": {"gb_s": "x", "latency_us": "x"}}, "every figure has its source"),
        ("networks", "ethernet", {"sources": {"share": "x", "latency_us": "x"}}, "every figure has its source"),
        ("networks", "ethernet", {"most": 4}, "did you mean most_gb_s?"),
    ],
)
def test_a_wrong_link_is_refused(
    tmp_path: Path, body: dict[str, Any], section: str, key: str, change: dict[str, Any] | None, words: str
) -> None:
    """What a cluster file may name must be there, with a share that can be."""
    if change is None:
        del body[section][key]
    else:
        body[section][key] |= change
    assert any(words in problem for problem in refused(tmp_path, body))


def test_storage_has_its_sources_too(tmp_path: Path, body: dict[str, Any]) -> None:
    """An assumption that nobody can look up is not a figure."""
    del body["storage"]["sources"]["read_gb_s"]
    assert any("storage.sources.read_gb_s" in problem for problem in refused(tmp_path, body))


def test_both_scanners_read_the_same(monkeypatch: pytest.MonkeyPatch, repo: Path) -> None:
    """libyaml is there for its speed: values and line numbers are those of PyYAML's own scanner."""
    files = [HARDWARE, *sorted((repo / "ops").rglob("*.yaml")), *sorted((repo / "recipes").rglob("*.yaml"))]

    def read() -> list[Document]:
        return [read_yaml(path, path.name, core=core) for path in files for core in (True, False)]

    fast = read()
    assert len(yamlfile._LOADERS[True]) == 2
    monkeypatch.setattr(yamlfile, "_LOADERS", {core: loaders[-1:] for core, loaders in yamlfile._LOADERS.items()})
    assert read() == fast
