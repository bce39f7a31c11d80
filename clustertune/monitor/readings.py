"""What a node measures, one row of numbers each: what the kernel counts, and NVIDIA's GPUs as their driver sees them (NVML)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from ctypes import addressof
from pathlib import Path
from typing import Any

from clustertune.host.probe import Probe
from clustertune.host.system import parse_meminfo

COLUMNS = {
    "cpu": ("mean", 3), "load": ("mean", 1), "memory_gib": ("max", 2), "disk_free_gib": ("last", 1),
    "disk_read_mb_s": ("mean", 1), "disk_write_mb_s": ("mean", 1), "net_rx_mb_s": ("mean", 1), "net_tx_mb_s": ("mean", 1),
    "rdma_rx_mb_s": ("mean", 1), "rdma_tx_mb_s": ("mean", 1), "own_cpu_s": ("last", 2),
}  # fmt: skip
"""Of a node, as :data:`GPU_COLUMNS`. ``cpu``: share of all hardware threads that is busy; ``disk_free_gib``: where
the run folder lies; ``own_cpu_s``: CPU seconds that the sampler itself has used. MB are 10^6 bytes."""
_DISK = re.compile(r"(sd[a-z]+|vd[a-z]+|xvd[a-z]+|nvme\d+n\d+|mmcblk\d+)$")
"""Whole disks: partitions and mapped devices count the same bytes again (Documentation/admin-guide/iostats.rst)."""


class Growth:
    """Counters that only grow, by name."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def of(self, name: str, value: float | None) -> float | None:
        """What a counter grew by since its last value; None at its first one, and where it began again."""
        if value is None:
            return None
        before, self._before[name] = self._before.get(name), value
        return None if before is None or value < before else value - before


class NodeSampler:
    """One node. ``probe``: where its files are read, a recorded tree in tests; ``run``: whose storage is looked at."""

    def __init__(self, run: Path, probe: Probe | None = None) -> None:
        self.run, self.probe = run, probe or Probe()
        self._growth = Growth()

    def sample(self, seconds: float) -> dict[str, float | None]:
        """A row of :data:`COLUMNS`; what this machine does not tell is None. ``seconds`` since the row before."""
        read = self.probe.read
        memory = parse_meminfo(read("/proc/meminfo"))
        rates = {name: self._growth.of(name, value) for name, value in self._counters().items()}
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


# --- GPUs ------------------------------------------------------------------------------------------------------------


GPU_COLUMNS = {
    "utilisation": ("mean", 0), "memory_gib": ("max", 2), "power_w": ("mean", 0), "temperature_c": ("max", 0),
    "sm_mhz": ("mean", 0), "throttle": ("or", 0), "ecc": ("last", 0), "xid": ("last", 0), "energy_j": ("last", 0),
    "pcie_tx_mb_s": ("mean", 0), "pcie_rx_mb_s": ("mean", 0), "nvlink_tx_mb_s": ("mean", 0), "nvlink_rx_mb_s": ("mean", 0),
}  # fmt: skip
"""Of a GPU: how rows are joined when they are thinned, and decimals. ``utilisation`` in %; ``throttle``: NVML's bits of clock
event reasons; ``ecc``: uncorrected errors since the driver was loaded; ``xid``: the newest critical error; ``energy_j``: joules
since the sampler began."""
SLOWED = {4: "power cap", 8: "hardware slowdown", 32: "too warm", 64: "hardware: too warm", 128: "hardware: power brake"}
"""Bits of ``throttle`` that slow a GPU under load (nvml.h, nvmlClocksEventReason*)."""
_ALL_LINKS = 0xFFFFFFFF


class Gpus:
    """The GPUs that this job may use. Nothing here raises: what cannot be read is None, and :attr:`problems` says why."""

    def __init__(self) -> None:
        self.problems: dict[str, str] = {}
        """By GPU (``"3"``), or ``"nvml"`` for the library."""
        self.names: list[str] = []
        self.counts_energy = False
        """Whether energy comes from the GPUs' counters; else it is the power samples times their time."""
        self._handles: list[Any] = []
        self._growth: list[Growth] = []
        self._joules: list[float] = []
        self._xid: dict[int, int] = {}
        try:
            import pynvml as nvml
        except ImportError:
            return
        self._nvml = nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_LIBRARY_NOT_FOUND:  # without the library there is no GPU of NVIDIA's
                self.problems["nvml"] = str(error)
            return
        self._handles = self._open()
        self.names = [str(self._ask(index, nvml.nvmlDeviceGetName) or "unknown") for index in range(len(self._handles))]
        self._growth = [Growth() for _ in self._handles]
        self._joules = [0.0] * len(self._handles)
        self._events = self._listen()

    def _open(self) -> list[Any]:
        """Handles in CUDA's order: of ``CUDA_VISIBLE_DEVICES`` where it is set, else all that the driver shows."""
        nvml, visible = self._nvml, os.environ.get("CUDA_VISIBLE_DEVICES")
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            self.problems["nvml"] = str(error)
            return []
        wanted: list[str] = [str(index) for index in range(count)] if visible is None else visible.split(",")
        found = []
        for text in map(str.strip, wanted):
            if not text or text == "-1":
                break
            try:
                by_index = text.isdigit()
                found.append(nvml.nvmlDeviceGetHandleByIndex(int(text)) if by_index else nvml.nvmlDeviceGetHandleByUUID(text))
            except nvml.NVMLError as error:
                self.problems[text] = str(error)
        return found

    def _listen(self) -> Any:
        """Subscribe to critical errors (Xid); None where the driver offers none."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            for handle in self._handles:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            return None
        return events

    def _ask(self, index: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """One value, or None. A GPU that is gone becomes a problem; one that lacks the value does not."""
        nvml = self._nvml
        try:
            return function(self._handles[index], *arguments)
        except nvml.NVMLError as error:
            lacks = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION)
            if error.value not in lacks:
                self.problems[str(index)] = str(error)
            return None

    def sample(self, seconds: float) -> list[dict[str, float | None]]:
        """A row of :data:`GPU_COLUMNS` for each GPU; ``seconds`` since the row before."""
        self._take_errors()
        return [self._row(index, seconds) for index in range(len(self._handles))]

    def _row(self, index: int, seconds: float) -> dict[str, float | None]:
        nvml, ask = self._nvml, self._ask
        self.problems.pop(str(index), None)
        load = ask(index, nvml.nvmlDeviceGetUtilizationRates)
        memory = ask(index, nvml.nvmlDeviceGetMemoryInfo)
        power = ask(index, nvml.nvmlDeviceGetPowerUsage)
        counters, growth = self._counters(index), self._growth[index]
        grown = {name: growth.of(name, counters.get(name)) for name in _COUNTERS}
        joules = counters.get("energy_mj")
        if joules is not None:
            self.counts_energy = True
            self._joules[index] += (growth.of("energy_mj", joules) or 0.0) / 1e3
        elif power is not None:
            self._joules[index] += power / 1e3 * seconds
        return {
            "utilisation": None if load is None else load.gpu,
            "memory_gib": None if memory is None else memory.used / 2**30,
            "power_w": None if power is None else power / 1e3,
            "temperature_c": ask(index, nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            "sm_mhz": ask(index, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            "throttle": ask(index, nvml.nvmlDeviceGetCurrentClocksThrottleReasons),
            "ecc": ask(
                index, nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "xid": self._xid.get(index),
            "energy_j": self._joules[index] if power is not None or joules is not None else None,
            **{
                name: None if value is None or seconds <= 0 else value / seconds * _COUNTERS[name][1] / 1e6
                for name, value in grown.items()
            },
        }

    def _counters(self, index: int) -> dict[str, float]:
        """Counters that only grow, in one call; those that this GPU or driver lacks are left out."""
        nvml = self._nvml
        fields = {"energy_mj": (nvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, 0)}
        for name, (field, _) in _COUNTERS.items():
            fields[name] = (getattr(nvml, field), _ALL_LINKS if name.startswith("nvlink") else 0)
        answers = self._ask(index, nvml.nvmlDeviceGetFieldValues, list(fields.values()))
        wide = nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        found = {
            name: float(answer.value.ullVal if answer.valueType == wide else answer.value.uiVal)
            for name, answer in zip(fields, answers or (), strict=False)
            if answer.nvmlReturn == nvml.NVML_SUCCESS
        }
        if "energy_mj" not in found and (total := self._ask(index, nvml.nvmlDeviceGetTotalEnergyConsumption)) is not None:
            found["energy_mj"] = float(total)
        return found

    def _take_errors(self) -> None:
        """Xids since the last look."""
        nvml, places = getattr(self, "_nvml", None), {addressof(h.contents): i for i, h in enumerate(self._handles)}
        while nvml is not None and self._handles and self._events is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:  # a timeout: nothing happened
                return
            index = places.get(addressof(event.device.contents)) if event.device else None
            if index is not None:
                self._xid[index] = int(event.eventData)


_COUNTERS = {
    "pcie_tx_mb_s": ("NVML_FI_DEV_PCIE_COUNT_TX_BYTES", 1),
    "pcie_rx_mb_s": ("NVML_FI_DEV_PCIE_COUNT_RX_BYTES", 1),
    "nvlink_tx_mb_s": ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", 1024),
    "nvlink_rx_mb_s": ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", 1024),
}
"""By column: NVML's field and the bytes of its unit (nvml.h)."""


def gpu_names() -> list[str]:
    """What the driver calls the GPUs of this job; none where there are none."""
    return Gpus().names
