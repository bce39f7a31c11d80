"""Numbers and times as a person reads them; ``-`` for what is not known."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

UNKNOWN = "-"


def number(value: Any, digits: int = 4) -> str:
    """A plain number with so many decimals, less for whole ones: ``1.139``, ``5e-05``, ``12,345``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) < 10**-digits * 10:
        return f"{value:.3g}"
    return f"{value:,.{digits}f}"


def percent(value: Any) -> str:
    """A share as a percentage with two decimals."""
    return f"{value * 100:.2f} %" if isinstance(value, int | float) and math.isfinite(value) else UNKNOWN


def size(value: Any) -> str:
    """Bytes in the binary unit that fits: ``1.61 GiB``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return UNKNOWN
    left = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(left) < 1024 or unit == "TiB":
            return f"{left:.0f} {unit}" if unit == "B" else f"{left:.2f} {unit}"
        left /= 1024
    raise AssertionError("the last unit takes everything")


def duration(seconds: Any) -> str:
    """``0.42 s``, ``41.2 s``, ``12 min 05 s``, ``8 h 24 min``."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def moment(seconds: Any) -> str:
    """Unix seconds as a UTC date and time."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e11:
        return UNKNOWN
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def plain(value: Any) -> str:
    """Any JSON value on one line, as YAML would write the simple ones."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(str(item) for item in value)
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
