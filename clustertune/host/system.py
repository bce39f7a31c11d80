"""Processors, memory, limits, kernel and clock of a machine."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import time
from collections.abc import Iterable
from typing import Any

from clustertune.host.probe import Probe

MIB, GIB = 1 << 20, 1 << 30
"""Bytes."""
_STA_UNSYNC, _STA_NANO = 0x0040, 0x2000
"""linux/timex.h"""
_CGROUP_NONE = 1 << 60
"""Bytes from which a limit of cgroup v1 is none: it is the largest multiple of a page below 2^63."""


def processors(probe: Probe) -> dict[str, Any]:
    """Hardware threads, those that this process may use, and those of each NUMA node."""
    online = readable_cpus(probe.read("/sys/devices/system/cpu/online"))
    found: dict[str, Any] = {
        "cpus": len(online) or (os.cpu_count() if probe.live else None),
        "numa_cpus": {str(node): cpus for node, cpus in numa_cpus(probe).items()},
    }
    if probe.live:
        mine = os.sched_getaffinity(0)
        found.update(affinity=len(mine), affinity_list=format_cpu_list(mine))
    return found


def numa_cpus(probe: Probe) -> dict[int, str]:
    """The CPU list of each NUMA node that has CPUs, by the node's number."""
    folder = "/sys/devices/system/node"
    numbers = sorted(int(name[4:]) for name in probe.names(folder) if re.fullmatch(r"node\d+", name))
    return {node: cpus for node in numbers if (cpus := probe.read(f"{folder}/node{node}/cpulist"))}


def topology(probe: Probe) -> dict[int, tuple[int, int]]:
    """Package and core of each CPU that the machine tells them of."""
    folder, found = "/sys/devices/system/cpu", {}
    for name in probe.names(folder):
        places = [probe.number(f"{folder}/{name}/topology/{what}") for what in ("physical_package_id", "core_id")]
        if re.fullmatch(r"cpu\d+", name) and places[0] is not None and places[1] is not None:
            found[int(name[3:])] = (places[0], places[1])
    return found


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by name, of /proc/meminfo."""
    return {match[1]: int(match[2]) * 1024 for match in re.finditer(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def memory(probe: Probe) -> dict[str, Any]:
    """Memory of the machine, and the limit of this process's cgroup."""
    info = parse_meminfo(probe.read("/proc/meminfo"))
    return {
        "memory_bytes": info.get("MemTotal"),
        "memory_available_bytes": info.get("MemAvailable"),
        "memory_limit_bytes": memory_limit(probe),
    }


def memory_limit(probe: Probe) -> int | None:
    """The smallest limit of the cgroups above this process, bytes; None: none, or not seen."""
    limits = []
    for line in probe.read("/proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[1] == "":
            base, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in parts[1].split(","):
            base, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = parts[2].rstrip("/")
        while True:  # the limit of a folder above holds below
            limit = probe.number(f"{base}{folder}/{name}")
            if limit is not None and limit < _CGROUP_NONE:
                limits.append(limit)
            if not folder:
                break
            folder = folder.rpartition("/")[0]
    return min(limits) if limits else None


def limits(probe: Probe) -> dict[str, Any]:
    """Soft limits of this process; -1: unlimited."""
    if not probe.live:
        return {}
    kinds = (("memlock_bytes", "RLIMIT_MEMLOCK"), ("nofile", "RLIMIT_NOFILE"))
    found = {}
    for key, name in kinds:
        soft = resource.getrlimit(getattr(resource, name))[0]
        found[key] = -1 if soft == resource.RLIM_INFINITY else soft
    return found


def version(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with: ``6.8.0-45-generic`` is (6, 8, 0); none of a text that is not a version."""
    found = re.match(r"\s*v?(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def kernel(probe: Probe) -> dict[str, Any]:
    """Versions of kernel and C library, and since when the machine runs."""
    uptime = re.match(r"[\d.]+", probe.read("/proc/uptime"))
    found: dict[str, Any] = {
        "kernel": probe.read("/proc/sys/kernel/osrelease"),
        "uptime_s": float(uptime[0]) if uptime else None,
    }
    if probe.live:
        name, version = platform.libc_ver()
        found["glibc"] = version if name == "glibc" else ""
    return found


# --- the clock ---------------------------------------------------------------------------------------------------------


class _Timex(ctypes.Structure):
    """struct timex of the C library (sys/timex.h), as far as it is read; the kernel writes the whole."""

    _fields_ = (
        ("modes", ctypes.c_int),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def kernel_clock() -> tuple[bool, float] | None:
    """Whether something disciplines the kernel's clock, and the offset that is left, s; None where it cannot be asked."""
    clock = _Timex()
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(clock)) < 0:
            return None
    except (OSError, AttributeError):
        return None
    unit = 1e-9 if clock.status & _STA_NANO else 1e-6
    return not clock.status & _STA_UNSYNC, abs(clock.offset * unit)


def clock(probe: Probe) -> dict[str, Any]:
    """The time, and whether something keeps it right: the kernel's word, which chronyd, ntpd and timesyncd all set."""
    state = kernel_clock() if probe.live else None
    if state is None or not state[0]:  # the offset is what the kernel has yet to slew, of a disciplined clock alone
        return {"time": time.time(), "clock_synchronised": state[0] if state else None}
    return {"time": time.time(), "clock_synchronised": True, "clock_offset_s": state[1]}


# --- cpus -----------------------------------------------------------------------------------------------------------------

# CPU lists in the kernel's form, as in ``/sys/devices/system/node/node0/cpulist``: ``0-63,128-191``.

MAX_CPU = 1 << 16
"""Above any machine (the kernel's NR_CPUS is 8192 at most): a typing error must not become a set of a billion numbers."""


def parse_cpu_list(text: str) -> frozenset[int]:
    """The CPUs of a list such as ``0-63,128-191``; empty for an empty text.

    Raises ValueError, in one line, where it is none. The kernel's strides (``0-7:1/2``) are not taken: sysfs prints none.
    """
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else []:
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip(), re.ASCII)
        if not match:
            raise ValueError(f"{part.strip()[:40]!r} is not a CPU or a range of CPUs, as 0-63,128-191")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part.strip()} runs backwards")
        if last >= MAX_CPU:
            raise ValueError(f"{last} is not a CPU number")
        found.update(range(first, last + 1))
    return frozenset(found)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """The shortest list for a set of CPUs; the reverse of :func:`parse_cpu_list`."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def readable_cpus(text: str) -> frozenset[int]:
    """The CPUs of a list that a machine tells; empty where it is none."""
    try:
        return parse_cpu_list(text)
    except ValueError:
        return frozenset()
