"""What stands between two GPUs on the PCI bus: an IOMMU that translates, and bridges that send traffic up to it (ACS)."""

from __future__ import annotations

from typing import Any

from clustertune.host.sight import Sight

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


def bridges(sight: Sight) -> dict[str, Any]:
    """Bridges that redirect traffic between their ports. Needs root: others see 64 bytes of each device."""
    folder = "/sys/bus/pci/devices"
    found: list[str] = []
    hidden = False
    names = sight.names(folder)
    if not names:
        return {}
    for name in names:
        if not sight.read(f"{folder}/{name}/class").startswith("0x0604"):
            continue
        try:
            control = acs_control(sight.path(f"{folder}/{name}/config").read_bytes())
        except (OSError, ValueError):
            hidden = True
            continue
        if control is not None and control & _REDIRECT:
            found.append(name)
    return {"acs_redirect": None if hidden and not found else found}


def iommu(sight: Sight) -> dict[str, Any]:
    """Whether an IOMMU translates what devices address; in passthrough (``iommu=pt``) it does not."""
    groups = sight.names("/sys/kernel/iommu_groups")
    if not groups:
        return {"iommu": False} if sight.path("/sys/kernel").is_dir() else {}
    folder = "/sys/kernel/iommu_groups"
    # firmware and one old device may be translated while the GPUs pass through: theirs count, where there are any
    own = [
        group
        for group in groups
        if any(
            sight.read(f"/sys/bus/pci/devices/{device}/vendor").lower() == "0x10de"
            for device in sight.names(f"{folder}/{group}/devices")
        )
    ]
    types = {sight.read(f"{folder}/{group}/type") for group in own or groups}
    if types - {""}:
        return {"iommu": any(kind.startswith("DMA") for kind in types)}
    return {"iommu": "iommu=pt" not in sight.read("/proc/cmdline").split()}
