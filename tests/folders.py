"""Files that a test needs, with the folders above them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def fill(root: Path, files: Mapping[str, str], mode: int = 0o644) -> Path:
    """Write each text below ``root``, which is returned."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
    return root


def program(path: Path, lines: str, shell: str = "/bin/sh") -> Path:
    """A script that can be started, with the folders above it."""
    fill(path.parent, {path.name: f"#!{shell}\n{lines}\n"}, 0o755)
    return path
