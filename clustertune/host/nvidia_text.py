"""Texts of ``nvidia-smi``, of Slurm and of the kernel's log about GPUs, read into facts."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator

from clustertune.host.facts import Gpu

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
