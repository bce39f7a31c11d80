"""CPU lists in the kernel's form, as in ``/sys/devices/system/node/node0/cpulist``: ``0-63,128-191``."""

from __future__ import annotations

import re
from collections.abc import Iterable

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
