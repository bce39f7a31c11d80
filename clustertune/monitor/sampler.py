"""The program beside a node's ranks: measures the node again and again. A child of the agent, started by :class:`Agent`.

A process of its own and no thread: a driver whose GPU has left the bus can hold a call for ever, and the kernel would not end a
process with such a thread.

``telemetry/NODE.jsonl`` of a run folder holds every sample. The first line, which each start repeats, names the columns. A row
is ``[unix seconds, attempt, [node's values], [[values of each GPU], ...], problems]``, the last only where there are some.
Samples become rarer (:func:`seconds_between`), and nothing is ever rewritten. Figures come from psutil, and of NVIDIA's GPUs as
their driver sees them (NVML).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from ctypes import addressof
from pathlib import Path
from typing import Any

from clustertune.manifest import open_plain
from clustertune.process import die_with_parent
from clustertune.report.metrics import TELEMETRY, TelemetryRow, Values

LEAST_SECONDS = 0.5
"""What a last row is written for."""


def listen_to_parent(pid: int) -> None:
    """End with the parent, whose ``pid`` it is, and with SIGTERM, where :func:`is_over` looks.

    What a scheduler or a terminal sends to every process is for the ranks: they are measured to their end.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    die_with_parent(signal.SIGTERM, pid)
    os.nice(10)


def is_over(seconds: float) -> bool:
    """Wait for so long at most; whether the end was asked for meanwhile."""
    return signal.sigtimedwait({signal.SIGTERM}, max(0.0, seconds)) is not None


def main(parent: int, run: Path, attempt: int, node: int) -> None:
    """Sample until the parent ends or sends SIGTERM. Raises OSError where the run's storage fails, and UserError
    where a link or a pipe is in the place of a file: the ranks do not need us."""
    listen_to_parent(parent)
    every = float(os.environ.get("CLUSTERTUNE_SAMPLE_SECONDS", "0"))
    gpus = Gpus()
    host = os.uname().nodename
    about = {"host": host, "node": node, "cpus": os.cpu_count(), "gpus": gpus.names}
    began = before = time.monotonic()
    sample_node(run)
    gpus.sample(0.0)
    about["energy"] = "counter" if gpus.counts_energy else "power samples" if gpus.names else None
    writer = TelemetryWriter(run / TELEMETRY, host, about)
    ended = False
    while not ended:
        ended = is_over((every or seconds_between(before - began)) - (time.monotonic() - before))
        now = time.monotonic()
        if ended and now - before < LEAST_SECONDS:
            return
        seconds, before = now - before, now
        writer.add(TelemetryRow(time.time(), attempt, sample_node(run), tuple(gpus.sample(seconds)), dict(gpus.problems)))


# --- the files -------------------------------------------------------------------------------------------------------


def seconds_between(age: float) -> float:
    """Seconds to the next sample of a sampler that runs for ``age`` seconds: a month of 64 nodes with 8 GPUs is 250 MB."""
    return 10.0 if age < 3600 else 60.0 if age < 86400 else 300.0


def line(row: TelemetryRow) -> str:
    """A row as it stands in a file."""
    parts = [round(row.time, 1), row.attempt, _rounded(row.node, COLUMNS)]
    parts.append([_rounded(gpu, GPU_COLUMNS) for gpu in row.gpus])
    return json.dumps([*parts, dict(row.problems)] if row.problems else parts, separators=(",", ":")) + "\n"


def _rounded(values: Values, columns: Mapping[str, int]) -> list[float | None]:
    rounded = []
    for name, digits in columns.items():
        value = values.get(name)
        rounded.append(None if value is None else round(value, digits) if digits else round(value))
    return rounded


class TelemetryWriter:
    """Appends the rows of one node. ``about``: what the first line of its files says beside the columns. Raises OSError."""

    def __init__(self, folder: Path, name: str, about: Mapping[str, Any]) -> None:
        folder.mkdir(exist_ok=True)
        if folder.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "is a link", str(folder))
        self.path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}.jsonl"
        with os.fdopen(open_plain(self.path, os.O_RDONLY | os.O_CREAT), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            torn = file.read() not in (b"", b"\n")
        head = {**about, "node_columns": list(COLUMNS), "gpu_columns": list(GPU_COLUMNS)}
        append(self.path, ("\n" if torn else "") + json.dumps(head, separators=(",", ":")) + "\n")

    def add(self, row: TelemetryRow) -> None:
        """Append a row."""
        append(self.path, line(row))


def append(path: Path, text: str) -> None:
    """Add to a file, which is made where there is none; a link is not followed. Raises OSError."""
    handle = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


# --- what a node measures ---------------------------------------------------------------------------------------------

COLUMNS = {"cpu": 3, "load": 1, "memory_gib": 2, "disk_free_gib": 1, "own_cpu_seconds": 2}
"""Of a node, with the decimals that are kept. ``cpu``: share of all hardware threads that is busy; ``disk_free_gib``: where
the run folder lies; ``own_cpu_seconds``: that the sampler itself has used. Disks and networks are node_exporter's."""


def sample_node(run: Path) -> dict[str, float | None]:
    """A row of :data:`COLUMNS`. ``run``: whose storage is looked at; None: it does not answer."""
    import psutil

    memory, free = psutil.virtual_memory(), None
    with contextlib.suppress(OSError):
        disk = os.statvfs(run)
        free = disk.f_bavail * disk.f_frsize / 2**30
    return {
        "cpu": psutil.cpu_percent() / 100,
        "load": os.getloadavg()[0],
        "memory_gib": (memory.total - memory.available) / 2**30,
        "disk_free_gib": free,
        "own_cpu_seconds": time.process_time(),
    }


# --- GPUs ------------------------------------------------------------------------------------------------------------


GPU_COLUMNS = {
    "utilisation": 0, "memory_gib": 2, "power_w": 0, "temperature_c": 0, "sm_mhz": 0, "throttle": 0, "ecc": 0, "xid": 0,
    "energy_j": 0,
}  # fmt: skip
"""Of a GPU, with the decimals that are kept. ``utilisation`` in %; ``throttle``: NVML's bits of clock event reasons; ``ecc``:
uncorrected errors since the driver was loaded; ``xid``: the newest critical error; ``energy_j``: joules since the sampler
began. What a link carries is measured by NVIDIA's dcgm-exporter."""
SLOWED = {4: "power cap", 8: "hardware slowdown", 32: "too warm", 64: "hardware: too warm", 128: "hardware: power brake"}
"""Bits of ``throttle`` that slow a GPU under load (nvml.h, nvmlClocksEventReason*)."""


class Gpus:
    """The GPUs that this job may use. Nothing here raises: what cannot be read is None, and :attr:`problems` says why."""

    def __init__(self) -> None:
        self.problems: dict[str, str] = {}
        """By GPU (``"3"``), or ``"nvml"`` for the library."""
        self.names: list[str] = []
        self.counts_energy = False
        """Whether energy comes from the GPUs' counters; else it is the power samples times their time."""
        self._handles: list[Any] = []
        self._counted: list[int | None] = []
        """Millijoules by each counter at its last look."""
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
        self._counted = [None] * len(self._handles)
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
        devices: list[str] = [str(index) for index in range(count)] if visible is None else visible.split(",")
        handles = []
        for text in map(str.strip, devices):
            if not text or text == "-1":
                break
            try:
                by_index = text.isdigit()
                handles.append(nvml.nvmlDeviceGetHandleByIndex(int(text)) if by_index else nvml.nvmlDeviceGetHandleByUUID(text))
            except nvml.NVMLError as error:
                self.problems[text] = str(error)
        return handles

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
        joules = ask(index, nvml.nvmlDeviceGetTotalEnergyConsumption)
        if joules is not None:
            self.counts_energy = True
            self._joules[index] += max(0, joules - (self._counted[index] or joules)) / 1e3
            self._counted[index] = joules
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
        }

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


def gpu_names() -> list[str]:
    """What the driver calls the GPUs of this job; none where there are none."""
    return Gpus().names


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
