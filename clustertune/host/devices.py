"""The GPUs of a machine: seen by the driver, by CUDA, by the PCI bus, and by what the kernel's log says about them.

The driver is asked by ``nvidia-smi -q -x`` and not by NVML's library: a command that hangs is killed, what it prints can be
recorded on any cluster and judged on another machine, and it has fields that NVML's Python does not (the recovery action).
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

from clustertune.host import system
from clustertune.host.nvidia_text import parse_xml, plain_topology, xid_lines
from clustertune.host.system import Probe

SMI_SECONDS = 45.0
"""A driver without persistence mode wakes one GPU after the other, some seconds each."""
INIT_SECONDS = 30.0


def driver(probe: Probe) -> dict[str, Any]:
    """What ``nvidia-smi`` says; with why it says nothing."""
    full = probe.call("nvidia-smi", "-q", "-x", seconds=SMI_SECONDS)
    if not full.present:
        return {}
    facts: dict[str, Any] = {"nvidia_smi": full.fault}
    try:
        facts["driver"], facts["cuda_driver"], facts["gpus"] = parse_xml(full.text)
        if facts["gpus"] and (full.fault.startswith("<") or "inforom" in full.fault.lower()):
            facts["nvidia_smi"] = ""  # exit 14: it answered in full, and warns of a damaged infoROM, with which GPUs work
    except ValueError:
        facts["nvidia_smi"] = full.fault or "an answer that is not XML"
    for gpu in facts.get("gpus", ()):
        gpu.numa = probe.numa(f"/sys/bus/pci/devices/{gpu.bus}") if gpu.bus else None
    if facts.get("gpus") and not facts.get("driver"):
        facts["driver"] = module_version(probe.read("/proc/driver/nvidia/version"))
    return facts


def topology(probe: Probe) -> dict[str, Any]:
    """How the GPUs are connected."""
    answer = probe.call("nvidia-smi", "topo", "-m", seconds=SMI_SECONDS)
    return {"topology": plain_topology(answer.text)} if answer.good and "GPU0" in answer.text else {}


def cuda() -> dict[str, Any]:
    """What CUDA itself says: the driver may answer where CUDA does not.

    For a child: cuInit hangs where a GPU is sick, and keeps files of the driver open where it is not.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {}
    path = next((line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcuda.so" in line), "")
    facts, count = {"cuda_library": path, "cuda_init": library.cuInit(0)}, ctypes.c_int()
    if facts["cuda_init"] == 0 and library.cuDeviceGetCount(ctypes.byref(count)) == 0:
        facts["cuda_devices"] = count.value
    return facts


def kernel_log(probe: Probe) -> dict[str, Any]:
    """The driver's complaints in the kernel's log; often only root may read it."""
    for command in (("dmesg",), ("journalctl", "-k", "-b", "-q", "--no-pager", "-n", "50000", "-o", "short-monotonic")):
        answer = probe.call(*command, seconds=5.0)
        if answer.good and answer.text.strip():
            return {"kernel_log_read": True, "xids": xid_lines(answer.text)}
    return {}


def devices(probe: Probe) -> dict[str, Any]:
    """GPUs on the PCI bus, whether a driver serves them or not, and what the kernel has loaded."""
    folder = "/sys/bus/pci/devices"
    buses = probe.names(folder)
    own = [bus for bus in buses if _nvidia(probe, bus)]
    # 0x0300: VGA, 0x0302: a GPU without a display (linux/pci_ids.h)
    count = sum(probe.read(f"{folder}/{bus}/class")[:6] in ("0x0300", "0x0302") for bus in own)
    facts: dict[str, Any] = {"nvidia_devices": count if buses else None}
    text = probe.read("/proc/driver/nvidia/version")
    if modules := probe.read("/proc/modules"):
        # dma-buf needs the open kernel modules and Linux 5.12; without them the adapter asks nvidia_peermem
        facts["peermem"] = bool(re.search(r"^(nvidia_peermem|nv_peer_mem) ", modules, re.MULTILINE)) or (
            "Open Kernel Module" in text and system.version(probe.read("/proc/sys/kernel/osrelease")) >= (5, 12)
        )
    if version := module_version(text):
        facts["driver"] = version
    return facts


def _nvidia(probe: Probe, bus: str) -> bool:
    return probe.read(f"/sys/bus/pci/devices/{bus}/vendor").lower() == "0x10de"


def module_version(text: str) -> str:
    """The version in ``/proc/driver/nvidia/version``; empty where there is none."""
    match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text + " ")
    return match[1] if match else ""


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
    redirecting, hidden = [], False
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
            redirecting.append(name)
    return {"acs_redirect": None if hidden and not redirecting else redirecting}


def iommu(probe: Probe) -> dict[str, Any]:
    """Whether an IOMMU translates what devices address; in passthrough (``iommu=pt``) it does not."""
    folder = "/sys/kernel/iommu_groups"
    groups = probe.names(folder)
    if not groups:
        return {"iommu": False} if probe.path("/sys/kernel").is_dir() else {}
    # firmware and one old device may be translated while the GPUs pass through: theirs count, where there are any
    own = [group for group in groups if any(_nvidia(probe, device) for device in probe.names(f"{folder}/{group}/devices"))]
    types = {probe.read(f"{folder}/{group}/type") for group in own or groups}
    if types - {""}:
        return {"iommu": any(kind.startswith("DMA") for kind in types)}
    return {"iommu": "iommu=pt" not in probe.read("/proc/cmdline").split()}
