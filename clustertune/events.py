"""Files of events: one JSON object a line, appended by a process that may be killed within a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file in its order. A line that is none (the last of a killed writer) is passed over, as is no file."""
    try:
        lines = path.open("rb")
    except OSError:
        return
    with lines:
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                yield event
