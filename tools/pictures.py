"""Pictures of the README, made by the commands that they show: ``python -m tools.pictures``.

``kill.svg``: a training killed with SIGKILL and started again, played at most ``GAP`` seconds a line. ``plan.svg``: what
``clustertune plan`` prints. Both are text in an SVG, without scripts and fonts from elsewhere. ``report.png``: the report of
the demo's run, by headless Chromium where it is installed.
"""

from __future__ import annotations

import contextlib
import html
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from clustertune.console import say

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
RUN = "runs/tiny-oasst2/demo"
GAP = 0.7
_WIDTH, _LINE, _LETTER = 104, 18, 7.8
_STYLE = "text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#d7dae0;white-space:pre}.in{fill:#8fd18f}.bad{fill:#ff8d8d}"
_MOVING = "@media (prefers-reduced-motion:no-preference){.t{animation:s .01s backwards}@keyframes s{from{opacity:0}}}"

Line = tuple[float, str]
"""Seconds since the begin, and the text."""


def svg(lines: list[Line], title: str, moving: bool = False) -> str:
    """Lines of a terminal; typed ones begin with ``$``, faults with ``!``. ``moving``: each comes at its second."""
    rows = []
    lines = [
        (at, part)
        for at, text in lines
        for part in textwrap.wrap(text, _WIDTH, subsequent_indent="    ", drop_whitespace=False)
    ]
    for number, (at, text) in enumerate(lines):
        kind = "in" if text.startswith("$") else "bad" if text.startswith("!") else ""
        delay = f' style="animation-delay:{at:.2f}s"' if moving else ""
        position = f'x="14" y="{46 + number * _LINE}"'
        rows.append(f'<text class="t {kind}" {position}{delay}>{html.escape(text.removeprefix("!"))}</text>')
    width, height = int(_WIDTH * _LETTER) + 28, 46 + len(lines) * _LINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"><title>{html.escape(title)}</title>'
        f'<style>{_STYLE}{_MOVING if moving else ""}</style><rect width="{width}" height="{height}" rx="8" fill="#1f232b"/>'
        f'<text x="14" y="22" style="fill:#8b93a1">{html.escape(title)}</text>{"".join(rows)}</svg>\n'
    )


def watch(words: list[str], folder: Path, kill_after: str = "") -> list[Line]:
    """Run a command in ``folder``; its lines with their seconds. Its processes are killed at a line with ``kill_after``."""
    began, found = time.monotonic(), []
    command = [sys.executable, "-m", "clustertune", *words]
    environment = {**os.environ, "COLUMNS": str(_WIDTH), "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    pipe = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, start_new_session=True, **pipe) as process:  # type: ignore[call-overload]
        for line in process.stdout:
            if text := line.rstrip():
                found.append((time.monotonic() - began, text))
            if kill_after and kill_after in line:
                os.killpg(process.pid, signal.SIGKILL)
                break
    return found


def plan() -> str:
    """What ``clustertune plan`` prints of the reference job today, but for the age of the prices, which changes every day."""
    words = ["plan", "llama405b-oasst2", "--cluster", "rno-rtxpro6000"]
    command = [sys.executable, "-m", "clustertune", *words]
    environment = {**os.environ, "COLUMNS": str(_WIDTH), "FORCE_COLOR": "1", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=120)
    text = re.sub(r", \d+ days old", "", re.sub(r"\x1b\[[0-9;]*m", "", done.stdout))
    lines = [(0.0, line.rstrip()) for line in text.splitlines() if line.strip()]
    return svg([(0.0, f"$ clustertune {' '.join(words)}"), *lines], "fits, hours, money, and what limits it")


def kill_and_resume(folder: Path) -> str:
    """The demo's training, killed after its second checkpoint; the same command continues. Of five steps two are shown."""
    words = ["run", "tiny-oasst2", "--run-dir", RUN, "--to", "train"]
    typed = f"$ clustertune {' '.join(words)}"
    lines: list[Line] = []

    def add(some: list[Line]) -> None:
        last = 0.0
        for at, text in some:
            if (step := re.match(r"step (\d+)/", text)) and int(step[1]) % 5 > 1:
                continue
            before = lines[-1][0] if lines else 0.0
            lines.append((before + min(GAP, max(0.12, at - last)), text))
            last = at

    add([(0, typed), *watch(words, folder, "step-000010")])
    add([(0, f"!kill -9: launcher and ranks, after {re.findall(r'step-[0-9]+', lines[-1][1])[-1]}"), (GAP, typed)])
    add(watch(words, folder))
    add([(0, f"$ clustertune checkpoint verify {RUN}"), *watch(["checkpoint", "verify", RUN], folder)])
    return svg(lines, "a training killed with SIGKILL, and the same command again (waits shortened)", moving=True)


def report(folder: Path) -> None:
    """The page of a whole run as people see it first, where Chromium is installed."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        say("no chromium: report.png is left as it is")
        return
    watch(["run", "tiny-oasst2", "--run-dir", RUN], folder)
    words = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=3000", "--window-size=1000,1100"]
    shot = f"--screenshot={FOLDER / 'report.png'}"
    subprocess.run(
        [browser, *words, shot, (folder / RUN / "report.html").as_uri()], check=True, capture_output=True, timeout=120
    )


def main() -> None:
    """Write all three; ``python -m tools.pictures plan`` the first alone, which takes a second."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "plan.svg").write_text(plan(), encoding="utf-8")
    if sys.argv[1:] == ["plan"]:
        return
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (FOLDER / "kill.svg").write_text(kill_and_resume(folder), encoding="utf-8")
        report(folder)


if __name__ == "__main__":
    main()
