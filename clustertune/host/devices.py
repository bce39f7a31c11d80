"""The GPUs and network adapters of a machine.

GPUs are seen by the driver, by CUDA, by the PCI bus, and by what the kernel's log says about them; interfaces, bonds and RDMA
adapters as /sys shows them.

The driver is asked by ``nvidia-smi -q -x`` and not by NVML's library: a command that hangs is killed, what it prints can be
recorded on any cluster and judged on another machine, and it has fields that NVML's Python does not (the recovery action).
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import socket
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clustertune.host import system
from clustertune.host.facts import Gpu, Nic, RdmaPort
from clustertune.host.system import Probe

# --- their texts ------------------------------------------------------------------------------------------------------

# What ``nvidia-smi`` and the kernel's log say about GPUs, read from their texts alone.


_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_REASON = re.compile(r"clocks_(?:event|throttle)_reason_(\w+)")
_HARMLESS = ("gpu_idle", "applications_clocks_setting", "display_clocks_setting", "sync_boost")
"""Reasons for low clocks that were requested, or that end with the first kernel."""


def bus_address(text: str) -> str:
    """``00000000:C1:00.0`` as the kernel writes it: ``0000:c1:00.0``; empty where it is not a PCI address."""
    match = re.fullmatch(r"\s*(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])\s*", text or "")
    return f"{int(match[1] or '0', 16):04x}:{match[2].lower()}" if match else ""


def number(text: str | None) -> int | None:
    """The whole number that a field begins with (``80 MiB``, ``16x``); None of ``N/A``, ``[Not Supported]`` and the like."""
    match = re.match(r"\s*(-?\d+)", text or "")
    return int(match[1]) if match else None


def flag(text: str | None) -> bool | None:
    """``Enabled``, ``Yes``, ``Active``; None of anything that is neither that nor its opposite."""
    word = (text or "").strip().lower()
    if word in ("enabled", "yes", "active"):
        return True
    return False if word in ("disabled", "no", "not active") else None


def parse_xml(text: str) -> tuple[str, str, list[Gpu]]:
    """Driver version, CUDA version of the driver, and GPUs of ``nvidia-smi -q -x``, in its order.

    Raises ValueError where it is not that. What comes before it, complaints about a lost GPU, is skipped.
    """
    start = text.find("<?xml")
    start = text.find("<nvidia_smi_log") if start < 0 else start
    last = text.rfind("</nvidia_smi_log>")  # a warning of a damaged infoROM comes after it
    end = last + len("</nvidia_smi_log>") if last >= 0 else len(text)
    try:
        root = ET.fromstring(text[start:end] if start >= 0 else "")  # noqa: S314 - the driver's own text, or a recording of it
    except ET.ParseError as error:
        raise ValueError(f"no answer of nvidia-smi -q -x: {error}") from None
    gpus = [_gpu(index, node) for index, node in enumerate(root.findall("gpu"))]
    return _word(root.findtext("driver_version")), _word(root.findtext("cuda_version")), gpus


def _word(text: str | None) -> str:
    word = (text or "").strip()
    return "" if word.startswith("[") or word.upper() in ("N/A", "ERR!", "NOT FOUND") else word


def _gpu(index: int, node: ET.Element) -> Gpu:
    pcie = "pci/pci_gpu_link_info/"
    return Gpu(
        index=index,
        name=_word(node.findtext("product_name")),
        bus=bus_address(node.findtext("pci/pci_bus_id") or node.get("id") or ""),
        memory_mib=number(node.findtext("fb_memory_usage/total")),
        used_mib=number(node.findtext("fb_memory_usage/used")),
        pids=_pids(node.find("processes")),
        persistence=flag(node.findtext("persistence_mode")),
        mig=flag(node.findtext("mig_mode/current_mig")),
        ecc=flag(node.findtext("ecc_mode/current_ecc")),
        ecc_uncorrected=_uncorrected(node.find("ecc_errors/volatile")),
        remap_pending=flag(node.findtext("remapped_rows/remapped_row_pending")),
        remap_failed=flag(node.findtext("remapped_rows/remapped_row_failure")),
        pcie_gen=number(node.findtext(f"{pcie}pcie_gen/max_link_gen")),
        pcie_gen_max=number(node.findtext(f"{pcie}pcie_gen/max_device_link_gen")),
        pcie_width=number(node.findtext(f"{pcie}link_widths/current_link_width")),
        pcie_width_max=number(node.findtext(f"{pcie}link_widths/max_link_width")),
        recovery_action=_word(node.findtext("gpu_recovery_action")),
        throttle=list(_throttle(node)),
    )


def _pids(node: ET.Element | None) -> list[int] | None:
    """Processes that compute; those of a display do not count."""
    if node is None or (node.text or "").strip().startswith(("N/A", "[")):
        return None
    pids = []
    for process in node.iter("process_info"):
        pid = number(process.findtext("pid"))
        if pid is not None and "C" in (process.findtext("type") or "C"):
            pids.append(pid)
    return sorted(set(pids))


def _uncorrected(node: ET.Element | None) -> int | None:
    """Uncorrected errors since the driver was loaded, over all kinds of memory; old drivers call them double bit."""
    if node is None:
        return None
    counts = [number(item.text) for item in node.iter() if "uncorrectable" in item.tag and len(item) == 0]
    counts += [number(node.findtext("double_bit/total"))]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _throttle(node: ET.Element) -> Iterator[str]:
    for item in node.iter():
        match = _REASON.fullmatch(item.tag)
        if match and match[1] not in _HARMLESS and flag(item.text):
            yield match[1]


def parse_csv(text: str) -> list[Gpu]:
    """GPUs of ``nvidia-smi --query-gpu=index,name,pci.bus_id,memory.total --format=csv,noheader``; other lines are skipped."""
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    return [
        Gpu(int(row[0]), _word(row[1]), bus_address(row[2]), memory_mib=number(row[3]))
        for row in rows
        if len(row) == 4 and row[0].isdigit()
    ]


def plain_topology(text: str) -> str:
    """``nvidia-smi topo -m`` without the escapes that underline its first line."""
    return _ESCAPES.sub("", text)


def gpu_links(topology: str) -> dict[tuple[int, int], str]:
    """How GPUs reach each other, of ``nvidia-smi topo -m``: (0, 1) to ``NV18``, ``PIX``, ``PHB``, ``NODE``, ``SYS``."""
    rows = [line.split("\t") for line in plain_topology(topology).splitlines()]
    head = next((row for row in rows if any(cell.strip() == "GPU0" for cell in row)), None)
    if head is None:
        return {}
    columns = [cell.strip() for cell in head]
    links: dict[tuple[int, int], str] = {}
    for row in rows:
        own = re.fullmatch(r"GPU(\d+)", row[0].strip()) if row else None
        if own is None or row is head:
            continue
        for name, cell in zip(columns, row, strict=False):
            other = re.fullmatch(r"GPU(\d+)", name)
            if other and own[1] != other[1] and cell.strip():
                links[int(own[1]), int(other[1])] = cell.strip()
    return links


def has_nvlink(topology: str) -> bool:
    """Whether ``nvidia-smi topo -m`` shows NVLink between GPUs (``NV4``, ``NV18``)."""
    return any(re.fullmatch(r"NV\d+", link) for link in gpu_links(topology).values())


def gpus_of(gres: str) -> tuple[int, list[str]]:
    """The number of GPUs of a node's ``Gres``, and their types: ``gpu:h100:8(S:0-1)`` is (8, ["h100"])."""
    count, types = 0, []
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *rest = item.strip().split(":")
        if kind != "gpu":
            continue
        number = re.fullmatch(r"(\d{1,6})", rest[-1]) if rest else None
        count += int(number[1]) if number else 1
        types += [word for word in rest[:-1] if word] if number else rest
    return count, list(dict.fromkeys(types))


def xid_lines(log: str) -> list[str]:
    """The lines of a kernel's log in which the NVIDIA driver reports an error of a GPU, the newest last."""
    return [line.strip()[:400] for line in log.splitlines() if "NVRM: Xid" in line][-100:]


# --- by the driver, by CUDA -------------------------------------------------------------------------------------------

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


# --- interfaces, bonds and RDMA adapters -----------------------------------------------------------------------------------

_NET = "/sys/class/net"
_IB = "/sys/class/infiniband"
_KINDS = {1: "ethernet", 32: "infiniband", 772: "loopback"}
"""ARPHRD_* of linux/if_arp.h, as /sys/class/net/*/type holds them."""
_PROVIDERS = ("/usr/lib", "/usr/lib64", "/lib", "/usr/local/lib")
_IFF_UP = 1


def addresses() -> dict[str, list[str]]:
    """Interface to addresses (``10.0.0.1/24``) of this machine, IPv4 first, link-local IPv6 left out."""
    import psutil

    by_interface: dict[str, list[str]] = {}
    for interface, entries in psutil.net_if_addrs().items():
        for entry in sorted(entries, key=lambda one: one.family != socket.AF_INET):
            if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.netmask and not entry.address.startswith("fe80:"):
                bits = int(ipaddress.ip_address(entry.netmask)).bit_count()
                by_interface.setdefault(interface, []).append(f"{entry.address}/{bits}")
    return by_interface


def interfaces(probe: Probe) -> dict[str, Any]:
    """All interfaces, with the addresses of this machine's."""
    own = addresses() if probe.live else {}
    names = [name for name in probe.names(_NET) if probe.path(f"{_NET}/{name}").is_dir()]  # bonding_masters is a file
    nics = [_nic(probe, name) for name in names]
    for nic in nics:
        nic.addresses = own.get(nic.name, [])
        if nic.bond_mode and not nic.mbit:
            each = [other.mbit for other in nics if other.name in nic.bond_links_up and other.mbit]
            nic.mbit = sum(each) or None
    return {"nics": nics}


def _nic(probe: Probe, name: str) -> Nic:
    folder = f"{_NET}/{name}"
    speed = probe.number(f"{folder}/speed")
    kind = probe.number(f"{folder}/type")
    links = probe.read(f"{folder}/bonding/slaves").split()
    bonded = probe.path(f"{folder}/bonding").is_dir()
    return Nic(
        name=name,
        up=_is_up(probe, folder),
        carrier={"1": True, "0": False}.get(probe.read(f"{folder}/carrier")),
        mbit=speed if speed and 0 < speed < 10_000_000 else None,  # -1, or 2^32-1 of old kernels, where it is unknown
        mtu=probe.number(f"{folder}/mtu"),
        kind=_KINDS.get(kind, "other") if kind is not None else "",
        virtual=not bonded and not probe.path(f"{folder}/device").exists(),
        bond_mode=(probe.read(f"{folder}/bonding/mode").split() or [""])[0],
        bond_hash=(probe.read(f"{folder}/bonding/xmit_hash_policy").split() or [""])[0],
        bond_links=links,
        bond_links_up=[link for link in links if probe.read(f"{_NET}/{link}/bonding_slave/mii_status") in ("up", "")],
    )


def _is_up(probe: Probe, folder: str) -> bool | None:
    """The state that the driver tells; where it tells none (loopback, tunnels), whether it was switched on."""
    state = probe.read(f"{folder}/operstate")
    if state in ("up", "down", "lowerlayerdown", "notpresent", "dormant"):
        return state == "up"
    try:
        return bool(int(probe.read(f"{folder}/flags"), 16) & _IFF_UP)
    except ValueError:
        return None


# --- RDMA --------------------------------------------------------------------------------------------------------------


def rdma(probe: Probe) -> dict[str, Any]:
    """Ports of RDMA adapters, the device files that this process may use, and the libraries that drive them."""
    listed = [(device, name) for device in probe.names(_IB) for name in probe.names(f"{_IB}/{device}/ports") if name.isdigit()]
    files = [f"/dev/infiniband/{name}" for name in probe.names("/dev/infiniband")]
    usable = [name for name in files if os.access(probe.path(name), os.R_OK | os.W_OK)]
    return {"rdma": [_port(probe, *port) for port in listed], "rdma_devices": usable, **_verbs(probe)}


def _port(probe: Probe, device: str, number: str) -> RdmaPort:
    folder = f"{_IB}/{device}/ports/{number}"
    state = probe.read(f"{folder}/state").partition(":")[2].strip()
    rate = re.match(r"([\d.]+)", probe.read(f"{folder}/rate"))
    return RdmaPort(
        device=device,
        port=int(number),
        active=state == "ACTIVE" if state else None,
        state=state,
        physical=probe.read(f"{folder}/phys_state").partition(":")[2].strip(),
        gbit=float(rate[1]) if rate else None,
        link_layer=probe.read(f"{folder}/link_layer"),
    )


def _verbs(probe: Probe) -> dict[str, Any]:
    patterns = ("libibverbs/lib*-rdmav*.so", "*/libibverbs/lib*-rdmav*.so")
    paths = [path for library in _PROVIDERS for pattern in patterns for path in probe.path(library).glob(pattern)]
    facts: dict[str, Any] = {"verbs_providers": sorted({path.name[3:].partition("-rdmav")[0] for path in paths})}
    if probe.live:
        try:
            ctypes.CDLL("libibverbs.so.1")
            facts["verbs"] = True
        except OSError:
            facts["verbs"] = False
    return facts


def nccl_files(probe: Probe) -> dict[str, Any]:
    """Settings of NCCL that stand in files, easily overlooked. The user's file wins over the system's, as in NCCL."""
    settings: dict[str, str] = {}
    home = os.environ.get("HOME", "") if probe.live else ""
    named = os.environ.get("NCCL_CONF_FILE", "") if probe.live else ""
    for path in filter(None, (named or (f"{home}/.nccl.conf" if home else ""), "/etc/nccl.conf")):
        for line in probe.read(path).splitlines():
            name, equals, value = line.partition("#")[0].strip().partition("=")
            if equals and re.fullmatch(r"NCCL_[A-Z0-9_]+", name.strip()):
                settings.setdefault(name.strip(), f"{value.strip()} ({path})")
    return {"nccl_conf": settings}
