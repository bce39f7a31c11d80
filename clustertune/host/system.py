"""How a machine is looked at, and its processors, memory, limits, kernel and clock.

It is looked at by files below a root, which may be a recorded tree, and by commands with a time limit each.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

# --- how it is looked at ----------------------------------------------------------------------------------------------------

MAX_OUTPUT = 16 * 1024 * 1024
"""Bytes of a command's answer that are kept: eight GPUs in full take 0.5 MB, a kernel log some MB."""


@dataclass(frozen=True)
class CommandOutput:
    """What a command printed."""

    text: str = ""
    """Its standard output; also of a command that failed half-way."""
    fault: str = ""
    """Why it printed nothing, or not everything, in one line; empty where it ended well."""
    present: bool = True
    """Whether it is installed."""

    @property
    def good(self) -> bool:
        """Whether it ran and ended well."""
        return self.present and not self.fault


Ask = Callable[[Sequence[str], float], CommandOutput]
"""A command and its time limit in seconds in, its output out."""
ABSENT = CommandOutput(present=False)


def ask(command: Sequence[str], seconds: float) -> CommandOutput:
    """Run a command. Raises nothing.

    One that hangs is killed, and left where it cannot die: a process that waits for a GPU or for a server of files that is
    gone takes no signal, and waiting for it would hang as well. Its output goes into memory: no pipe, no disk.
    """
    if shutil.which(command[0]) is None:
        return ABSENT
    with open(os.memfd_create("out"), "w+b") as out, open(os.memfd_create("err"), "w+b") as err:  # noqa: PTH123
        try:
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
        except OSError as error:
            return CommandOutput(fault=f"{command[0]}: {error.strerror or error}")
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            try:
                child.wait(1.0)
            except subprocess.TimeoutExpired:
                child.returncode = -int(signal.SIGKILL)  # else the interpreter would ask for it again and again, and warn
            return CommandOutput(_text(out), f"no answer within {seconds:.0f} s")
        text = _text(out)
        lines = [line for line in f"{_text(err)}\n{text}".splitlines() if line.strip()] if code else []
        return CommandOutput(text, (lines or [f"exit code {code}"])[0].strip()[:300] if code else "")


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT).decode(errors="replace")


@dataclass
class Probe:
    """One look at a machine."""

    root: Path = field(default_factory=lambda: Path("/"))
    ask: Ask = ask
    deadline: float = field(default_factory=lambda: time.monotonic() + 20.0)
    """By time.monotonic: no command is given longer."""

    @property
    def live(self) -> bool:
        """Whether this is the machine itself, and not a recorded tree."""
        return self.root == Path("/")

    def left(self, most: float) -> float:
        """Seconds that a command may take."""
        return max(0.5, min(most, self.deadline - time.monotonic()))

    def call(self, *command: str, seconds: float = 10.0) -> CommandOutput:
        """Run a command within the time that is left."""
        return self.ask(command, self.left(seconds))

    def path(self, path: str) -> Path:
        """Where a path of the machine lies."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str:
        """The text of a file of the kernel or of the system, without the last line end; empty where there is none."""
        try:
            return self.path(path).read_text(errors="replace").rstrip("\n")
        except (OSError, ValueError):
            return ""

    def number(self, path: str) -> int | None:
        """The number that a file holds; None where it holds none."""
        try:
            return int(self.read(path).split()[0])
        except (ValueError, IndexError):
            return None

    def numa(self, folder: str) -> int | None:
        """The NUMA node of a device; None where the kernel knows none (-1)."""
        node = self.number(f"{folder}/numa_node")
        return node if node is not None and node >= 0 else None

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted; none where there is no such folder."""
        try:
            return sorted(entry.name for entry in self.path(path).iterdir())
        except OSError:
            return []


# --- processors, memory, limits, kernel -------------------------------------------------------------------------------------

MIB, GIB = 1 << 20, 1 << 30
"""Bytes."""
_STA_UNSYNC, _STA_NANO = 0x0040, 0x2000
"""linux/timex.h"""
_CGROUP_NONE = 1 << 60
"""Bytes from which a limit of cgroup v1 is none: it is the largest multiple of a page below 2^63."""


def processors(probe: Probe) -> dict[str, Any]:
    """Hardware threads, those that this process may use, and those of each NUMA node."""
    online = readable_cpus(probe.read("/sys/devices/system/cpu/online"))
    facts: dict[str, Any] = {
        "cpus": len(online) or (os.cpu_count() if probe.live else None),
        "numa_cpus": {str(node): cpus for node, cpus in numa_cpus(probe).items()},
    }
    if probe.live:
        mine = os.sched_getaffinity(0)
        facts.update(affinity=len(mine), affinity_list=format_cpu_list(mine))
    return facts


def numa_cpus(probe: Probe) -> dict[int, str]:
    """The CPU list of each NUMA node that has CPUs, by the node's number."""
    folder = "/sys/devices/system/node"
    numbers = sorted(int(name[4:]) for name in probe.names(folder) if re.fullmatch(r"node\d+", name))
    return {node: cpus for node in numbers if (cpus := probe.read(f"{folder}/node{node}/cpulist"))}


def topology(probe: Probe) -> dict[int, tuple[int, int]]:
    """Package and core of each CPU that the machine tells them of."""
    folder, cores = "/sys/devices/system/cpu", {}
    for name in probe.names(folder):
        places = [probe.number(f"{folder}/{name}/topology/{what}") for what in ("physical_package_id", "core_id")]
        if re.fullmatch(r"cpu\d+", name) and places[0] is not None and places[1] is not None:
            cores[int(name[3:])] = (places[0], places[1])
    return cores


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
    soft_limits = {}
    for key, name in kinds:
        soft = resource.getrlimit(getattr(resource, name))[0]
        soft_limits[key] = -1 if soft == resource.RLIM_INFINITY else soft
    return soft_limits


def version(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with: ``6.8.0-45-generic`` is (6, 8, 0); none of a text that is not a version."""
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def kernel(probe: Probe) -> dict[str, Any]:
    """Versions of kernel and C library, and since when the machine runs."""
    uptime = re.match(r"[\d.]+", probe.read("/proc/uptime"))
    facts: dict[str, Any] = {
        "kernel": probe.read("/proc/sys/kernel/osrelease"),
        "uptime_s": float(uptime[0]) if uptime else None,
    }
    if probe.live:
        name, version = platform.libc_ver()
        facts["glibc"] = version if name == "glibc" else ""
    return facts


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
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else []:
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip(), re.ASCII)
        if not match:
            raise ValueError(f"{part.strip()[:40]!r} is not a CPU or a range of CPUs, as 0-63,128-191")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part.strip()} runs backwards")
        if last >= MAX_CPU:
            raise ValueError(f"{last} is not a CPU number")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


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
