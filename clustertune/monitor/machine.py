"""What the kernel counts of a node: processors, memory, disks, network and RDMA, as one row of numbers."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from clustertune.host.probe import Probe
from clustertune.host.system import parse_meminfo

COLUMNS = {
    "cpu": ("mean", 3), "load": ("mean", 1), "memory_gib": ("max", 2), "disk_free_gib": ("last", 1),
    "disk_read_mb_s": ("mean", 1), "disk_write_mb_s": ("mean", 1), "net_rx_mb_s": ("mean", 1), "net_tx_mb_s": ("mean", 1),
    "rdma_rx_mb_s": ("mean", 1), "rdma_tx_mb_s": ("mean", 1), "own_cpu_s": ("last", 2),
}  # fmt: skip
"""As :data:`clustertune.monitor.nvml.COLUMNS`. ``cpu``: share of all hardware threads that is busy; ``disk_free_gib``: where
the run folder lies; ``own_cpu_s``: CPU seconds that the sampler itself has used. MB are 10^6 bytes."""
_DISK = re.compile(r"(sd[a-z]+|vd[a-z]+|xvd[a-z]+|nvme\d+n\d+|mmcblk\d+)$")
"""Whole disks: partitions and mapped devices count the same bytes again (Documentation/admin-guide/iostats.rst)."""


class NodeSampler:
    """One node. ``probe``: where its files are read, a recorded tree in tests; ``run``: whose storage is looked at."""

    def __init__(self, run: Path, probe: Probe | None = None) -> None:
        self.run, self.probe = run, probe or Probe()
        self._before: dict[str, float] = {}

    def sample(self, seconds: float) -> dict[str, float | None]:
        """A row of :data:`COLUMNS`; what this machine does not tell is None. ``seconds`` since the row before."""
        read = self.probe.read
        memory = parse_meminfo(read("/proc/meminfo"))
        rates = {name: self._growth(name, value) for name, value in self._counters().items()}
        busy, ticks = rates.pop("busy"), rates.pop("ticks")
        return {
            "cpu": busy / ticks if busy is not None and ticks else None,
            "load": _number(read("/proc/loadavg").partition(" ")[0]),
            "memory_gib": (memory["MemTotal"] - memory["MemAvailable"]) / 2**30 if "MemAvailable" in memory else None,
            "disk_free_gib": self._free(),
            **{name: None if value is None or seconds <= 0 else value / seconds / 1e6 for name, value in rates.items()},
            "own_cpu_s": time.process_time(),
        }

    def _free(self) -> float | None:
        try:
            found = os.statvfs(self.run)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize / 2**30

    def _growth(self, name: str, value: float | None) -> float | None:
        """What a counter grew by; None at its first value, and where it began again."""
        if value is None:
            return None
        before, self._before[name] = self._before.get(name), value
        return None if before is None or value < before else value - before

    def _counters(self) -> dict[str, float | None]:
        """Jiffies of all processors, and bytes since the machine was started (proc(5), sysfs-class-infiniband)."""
        read = self.probe.read
        ticks = [float(word) for word in read("/proc/stat").partition("\n")[0].split()[1:9]]
        disks = [line.split() for line in read("/proc/diskstats").splitlines()]
        disks = [fields for fields in disks if len(fields) > 9 and _DISK.match(fields[2])]
        lines = [line.replace(":", " ").split() for line in read("/proc/net/dev").splitlines()[2:]]
        links = [
            fields for fields in lines if len(fields) > 9 and self.probe.path(f"/sys/class/net/{fields[0]}/device").exists()
        ]
        links = links or [fields for fields in lines if len(fields) > 9 and fields[0] != "lo"]
        return {
            "ticks": sum(ticks) if ticks else None,
            "busy": sum(ticks) - ticks[3] - ticks[4] if len(ticks) > 4 else None,
            "disk_read_mb_s": _sum(float(fields[5]) * 512 for fields in disks),
            "disk_write_mb_s": _sum(float(fields[9]) * 512 for fields in disks),
            "net_rx_mb_s": _sum(float(fields[1]) for fields in links),
            "net_tx_mb_s": _sum(float(fields[9]) for fields in links),
            # Words of four bytes.
            "rdma_rx_mb_s": _sum(4.0 * value for value in self._ports("port_rcv_data")),
            "rdma_tx_mb_s": _sum(4.0 * value for value in self._ports("port_xmit_data")),
        }

    def _ports(self, counter: str) -> list[int]:
        """A counter of every port of every RDMA adapter."""
        top = "/sys/class/infiniband"
        ports = (
            f"{top}/{card}/ports/{port}" for card in self.probe.names(top) for port in self.probe.names(f"{top}/{card}/ports")
        )
        found = (self.probe.number(f"{port}/counters/{counter}") for port in ports)
        return [value for value in found if value is not None]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _sum(values: object) -> float | None:
    found = list(values)  # type: ignore[call-overload]
    return sum(found) if found else None
