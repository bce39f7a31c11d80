"""The README's picture of ``clustertune plan``: ``make pictures`` writes what the command prints as text in an SVG.

It has no scripts, and no fonts from elsewhere. ``kill.svg`` and ``report.png`` beside it were recorded once.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
_WIDTH, _LINE, _LETTER = 104, 18, 7.8
_STYLE = "text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#d7dae0;white-space:pre}.in{fill:#8fd18f}.bad{fill:#ff8d8d}"


def svg(lines: list[str], title: str) -> str:
    """Lines of a terminal; typed ones begin with ``$``."""
    broken = [part for text in lines for part in textwrap.wrap(text, _WIDTH, subsequent_indent="    ", drop_whitespace=False)]
    rows = []
    for number, text in enumerate(broken):
        kind = "in" if text.startswith("$") else ""
        rows.append(f'<text class="t {kind}" x="14" y="{46 + number * _LINE}">{html.escape(text)}</text>')
    width, height = int(_WIDTH * _LETTER) + 28, 46 + len(broken) * _LINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"><title>{html.escape(title)}</title>'
        f'<style>{_STYLE}</style><rect width="{width}" height="{height}" rx="8" fill="#1f232b"/>'
        f'<text x="14" y="22" style="fill:#8b93a1">{html.escape(title)}</text>{"".join(rows)}</svg>\n'
    )


def plan() -> str:
    """What ``clustertune plan`` prints of the reference job today, but for the age of the prices, which changes every day."""
    words = ["plan", "llama405b-oasst2", "--cluster", "rno-rtxpro6000"]
    command = [sys.executable, "-m", "clustertune", *words]
    environment = {**os.environ, "COLUMNS": str(_WIDTH), "FORCE_COLOR": "1", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=120)
    text = re.sub(r", \d+ days old", "", re.sub(r"\x1b\[[0-9;]*m", "", done.stdout))
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return svg([f"$ clustertune {' '.join(words)}", *lines], "fits, hours, money, and what limits it")


if __name__ == "__main__":
    (FOLDER / "plan.svg").write_text(plan(), encoding="utf-8")
