"""Writes the golden documents of ``show --json``: ``python -m tests.config.write_golden``, then read the diff."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clustertune.config.resolve import resolve
from clustertune.config.show import as_json
from tests.launch.machines import OURS, RECIPES

GOLDEN = Path("tests", "golden")
CASES = [(name, tiny) for name in RECIPES for tiny in ((False, True) if name in OURS else (False,))]


def file_name(name: str, tiny: bool) -> str:
    return f"show-{name}{'-tiny' if tiny else ''}.json"


def document(name: str, tiny: bool) -> dict[str, Any]:
    """The document without what differs between machines."""
    body = as_json(resolve(name, tiny=tiny))
    return {key: value for key, value in body.items() if key not in {"folder", "warnings"}}


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    for name, tiny in CASES:
        text = json.dumps(document(name, tiny), indent=1, ensure_ascii=False) + "\n"
        (root / GOLDEN / file_name(name, tiny)).write_text(text)


if __name__ == "__main__":
    main()
