"""The GPUs of a machine, by the driver, by CUDA, by the PCI bus, and by what the kernel's log says about them."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from clustertune.host import gpu_text, system
from clustertune.host.probe import Probe

SMI_SECONDS = 45.0
"""A driver without persistence mode wakes one GPU after the other, some seconds each."""
INIT_SECONDS = 30.0

_INIT = """
import ctypes, json
told = {}
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    print("{}")
    raise SystemExit
with open("/proc/self/maps") as maps:
    told["library"] = next((line.split()[-1] for line in maps if "libcuda.so" in line), "")
told["init"] = cuda.cuInit(0)
if told["init"] == 0:
    count = ctypes.c_int()
    if cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
        told["devices"] = count.value
print(json.dumps(told))
"""
"""Run in a process of its own: cuInit hangs where a GPU is sick, and keeps files of the driver open where it is not."""


def driver(probe: Probe) -> dict[str, Any]:
    """What ``nvidia-smi`` says; with why it says nothing."""
    full = probe.call("nvidia-smi", "-q", "-x", seconds=SMI_SECONDS)
    if not full.present:
        return {}
    found: dict[str, Any] = {"nvidia_smi": full.fault}
    try:
        found["driver"], found["cuda_driver"], found["gpus"] = gpu_text.parse_xml(full.text)
        if found["gpus"] and (full.fault.startswith("<") or "inforom" in full.fault.lower()):
            found["nvidia_smi"] = ""  # exit 14: it answered in full, and warns of a damaged infoROM, with which GPUs work
    except ValueError:
        found["nvidia_smi"] = full.fault or "an answer that is not XML"
        if "no answer" not in full.fault:  # a driver that hangs once hangs twice
            short = probe.call("nvidia-smi", f"--query-gpu={gpu_text.CSV_QUERY}", "--format=csv,noheader", seconds=SMI_SECONDS)
            found["gpus"] = gpu_text.parse_csv(short.text)
    for gpu in found.get("gpus", ()):
        numa = probe.number(f"/sys/bus/pci/devices/{gpu.bus}/numa_node") if gpu.bus else None
        gpu.numa = numa if numa is not None and numa >= 0 else None
    if found.get("gpus") and not found.get("driver"):
        found["driver"] = module_version(probe.read("/proc/driver/nvidia/version"))
    return found


def topology(probe: Probe) -> dict[str, Any]:
    """How the GPUs are connected."""
    answer = probe.call("nvidia-smi", "topo", "-m", seconds=SMI_SECONDS)
    return {"topology": gpu_text.plain_topology(answer.text)} if answer.good and "GPU0" in answer.text else {}


def cuda(probe: Probe) -> dict[str, Any]:
    """What CUDA itself says to a process of this place: the driver may answer where CUDA does not."""
    answer = probe.call(sys.executable, "-I", "-S", "-c", _INIT, seconds=INIT_SECONDS)
    try:
        found_cuda = json.loads(answer.text)
    except ValueError:
        return {}
    if not isinstance(found_cuda, dict) or "init" not in found_cuda:
        return {}
    return {
        "cuda_init": found_cuda["init"],
        "cuda_devices": found_cuda.get("devices"),
        "cuda_library": str(found_cuda.get("library", "")),
    }


def kernel_log(probe: Probe) -> dict[str, Any]:
    """The driver's complaints in the kernel's log; often only root may read it."""
    for command in (("dmesg",), ("journalctl", "-k", "-b", "-q", "--no-pager", "-n", "50000", "-o", "short-monotonic")):
        answer = probe.call(*command, seconds=5.0)
        if answer.good and answer.text.strip():
            return {"kernel_log_read": True, "xids": gpu_text.xid_lines(answer.text)}
    return {}


def devices(probe: Probe) -> dict[str, Any]:
    """GPUs on the PCI bus and their device files, whether a driver serves them or not, and what the kernel has loaded."""
    folder = "/sys/bus/pci/devices"
    buses = probe.names(folder)
    own = [bus for bus in buses if probe.read(f"{folder}/{bus}/vendor").lower() == "0x10de"]
    # 0x0300: VGA, 0x0302: a GPU without a display (linux/pci_ids.h)
    count = sum(probe.read(f"{folder}/{bus}/class")[:6] in ("0x0300", "0x0302") for bus in own)
    files = [f"/dev/{name}" for name in probe.names("/dev") if re.fullmatch(r"nvidia\d+", name)]
    found: dict[str, Any] = {"nvidia_devices": count if buses else None, "gpu_files": files}
    text = probe.read("/proc/driver/nvidia/version")
    if modules := probe.read("/proc/modules"):
        # dma-buf needs the open kernel modules and Linux 5.12; without them the adapter asks nvidia_peermem
        found["peermem"] = bool(re.search(r"^(nvidia_peermem|nv_peer_mem) ", modules, re.MULTILINE)) or (
            "Open Kernel Module" in text and system.version(probe.read("/proc/sys/kernel/osrelease")) >= (5, 12)
        )
    if version := module_version(text):
        found["driver"] = version
    return found


def module_version(text: str) -> str:
    """The version in ``/proc/driver/nvidia/version``; empty where there is none."""
    found = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text + " ")
    return found[1] if found else ""


# --- pci ------------------------------------------------------------------------------------------------------------------

# What stands between two GPUs on the PCI bus: an IOMMU that translates, and bridges that send traffic up to it (ACS).

_ACS = 0x000D
"""Extended capability "Access Control Services" (PCI Express Base Specification, 7.7.8; linux/pci_regs.h)."""
_REDIRECT = 0x04 | 0x08
"""P2P request redirect and P2P completion redirect of its control register."""


def acs_control(config: bytes) -> int | None:
    """The ACS control register in a device's configuration space; None where it has none. Raises ValueError if cut off."""
    if len(config) < 0x104:
        raise ValueError("only the first 64 bytes: the rest needs root")
    offset, seen = 0x100, set()
    while offset >= 0x100 and offset not in seen and offset + 8 <= len(config):
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS:
            return int.from_bytes(config[offset + 6 : offset + 8], "little")
        offset = header >> 20
    return None


def bridges(probe: Probe) -> dict[str, Any]:
    """Bridges that redirect traffic between their ports. Needs root: others see 64 bytes of each device."""
    folder = "/sys/bus/pci/devices"
    found: list[str] = []
    hidden = False
    names = probe.names(folder)
    if not names:
        return {}
    for name in names:
        if not probe.read(f"{folder}/{name}/class").startswith("0x0604"):
            continue
        try:
            control = acs_control(probe.path(f"{folder}/{name}/config").read_bytes())
        except (OSError, ValueError):
            hidden = True
            continue
        if control is not None and control & _REDIRECT:
            found.append(name)
    return {"acs_redirect": None if hidden and not found else found}


def iommu(probe: Probe) -> dict[str, Any]:
    """Whether an IOMMU translates what devices address; in passthrough (``iommu=pt``) it does not."""
    groups = probe.names("/sys/kernel/iommu_groups")
    if not groups:
        return {"iommu": False} if probe.path("/sys/kernel").is_dir() else {}
    folder = "/sys/kernel/iommu_groups"
    # firmware and one old device may be translated while the GPUs pass through: theirs count, where there are any
    own = [
        group
        for group in groups
        if any(
            probe.read(f"/sys/bus/pci/devices/{device}/vendor").lower() == "0x10de"
            for device in probe.names(f"{folder}/{group}/devices")
        )
    ]
    types = {probe.read(f"{folder}/{group}/type") for group in own or groups}
    if types - {""}:
        return {"iommu": any(kind.startswith("DMA") for kind in types)}
    return {"iommu": "iommu=pt" not in probe.read("/proc/cmdline").split()}
