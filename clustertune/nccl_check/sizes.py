"""Sizes as people write them: ``1K``, ``64M``, ``1GiB``; a K is 1024, as in nccl-tests."""

from __future__ import annotations

import re

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,15})([kmgt]?)(i?b)?", text.strip().lower())
    if match is None or not int(match[1]):
        raise ValueError(f"{text[:40]!r} is no size")
    return int(match[1]) << (10 * _UNITS[match[2]])


def show_size(size: int) -> str:
    """The shortest form, with one decimal where it is no whole number of a unit."""
    value, unit = float(size), 0
    while value >= 1024 and unit < 3:
        value, unit = value / 1024, unit + 1
    names = ("B", "KiB", "MiB", "GiB")
    return f"{value:.0f} {names[unit]}" if value == int(value) or value >= 100 else f"{value:.1f} {names[unit]}"
