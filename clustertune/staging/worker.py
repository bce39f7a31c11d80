"""Orders to :mod:`clustertune.staging.copier`, each with a time limit: storage that stops answering is given up."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clustertune import console
from clustertune.errors import ExitCode, Problem, UserError, storage_error
from clustertune.manifest import XXH3_128, FileRecord, parse_record
from clustertune.staging.copier import WORKERS, SourceFile

STALL_SECONDS = 120.0
"""How long nothing may move: longer than the fail-over of a file server, shorter than what holds up a job unnoticed."""
SECONDS_BETWEEN_LINES = 30.0


class Stalled(UserError):
    """No byte came for the whole bound."""


@dataclass(frozen=True)
class Bounds:
    """How an order is carried out."""

    workers: int = WORKERS
    stall: float = STALL_SECONDS


def amount(size: float) -> str:
    """``3.2 MB``."""
    for unit, word in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.2f} {word}"
    return f"{size:.0f} bytes"


def locate(root: Path, bounds: Bounds) -> Path:
    """Where a folder really lies, links followed. Raises UserError."""
    return Path(_order({"do": "locate", "root": str(root)}, root, bounds))


def survey(root: Path, what: str, bounds: Bounds) -> list[SourceFile]:
    """:func:`clustertune.staging.copier.survey` within bounds. Raises UserError."""
    answer = _order({"do": "survey", "root": str(root), "what": what}, root, bounds)
    return [SourceFile(**values) for values in answer]


def copy(
    root: Path,
    out: Path,
    files: Sequence[SourceFile],
    bounds: Bounds,
    *,
    done: Callable[[str, FileRecord], None],
    advance: Callable[[int], None],
    record: str = XXH3_128,
) -> None:
    """Copy files; ``done`` is called for each that is whole, ``advance`` with the bytes so far. Raises UserError.

    ``record``: the kind of digest that a copy is recorded by.
    """
    about = {"root": str(root), "out": str(out), "workers": bounds.workers, "record": record}
    order = {"do": "copy", "files": [asdict(file) for file in files], **about}
    _order(order, root, bounds, done, advance, target=out)


def hash_files(
    paths: Sequence[tuple[Path, str]], bounds: Bounds, advance: Callable[[int], None] = lambda _: None
) -> list[tuple[int, str] | str]:
    """Size and digest of each file, or why it cannot be read. Raises UserError where the storage hangs."""
    if not paths:
        return []
    entries = [(str(path), algorithm) for path, algorithm in paths]
    order = {"do": "hash", "paths": entries, "workers": bounds.workers}
    answer = _order(order, paths[0][0].parent, bounds, None, advance)
    return [item if isinstance(item, str) else (int(item[0]), str(item[1])) for item in answer]


def _order(
    order: Mapping[str, Any],
    path: Path,
    bounds: Bounds,
    done: Callable[[str, FileRecord], None] | None = None,
    advance: Callable[[int], None] | None = None,
    target: Path | None = None,
) -> Any:
    package = str(Path(__file__).resolve().parents[2])
    child = subprocess.Popen(
        [sys.executable, "-m", "clustertune.staging.copier"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))},
    )
    try:
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(order).encode() + b"\n")
            child.stdin.close()
        fix = "is the storage mounted and its server up? --stall SECONDS waits longer"
        text = f"nothing was read or written for {bounds.stall:g} s"
        stalled = Stalled(text, file=str(path), fix=fix, code=ExitCode.STORAGE)
        for line in lines(child, bounds.stall, stalled):
            if "bytes" in line and advance:
                advance(line["bytes"])
            elif "file" in line and done:
                done(line["file"], parse_record(line["record"]))
            elif "error" in line:
                problems = [Problem(**problem) for problem in line["error"]["problems"]]
                raise UserError(problems, ExitCode(line["error"]["exit_code"]))
            elif "os_error" in line:
                body = line["os_error"]
                where = body["path"] or str(path)
                doing = "cannot be written" if target is not None and Path(where).is_relative_to(target) else "cannot be read"
                raise storage_error(OSError(body["errno"], body["text"]), doing, where)
            elif "answer" in line:
                return line["answer"]
        text = f"the copying process ended (exit code {child.wait()})"
        raise UserError(text, file=str(path), fix="run the same command again: it continues", code=ExitCode.AGAIN)
    finally:
        child.kill()
        # A process that waits for a hung mount ends when the mount answers: it is not waited for, and has nothing to say.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(2)
        if child.stdout is not None:
            child.stdout.close()


def lines(child: subprocess.Popen[bytes], seconds: float, late: UserError) -> Iterator[dict[str, Any]]:
    """A child's lines of JSON as they come. Raises ``late`` where none comes for so many seconds."""
    assert child.stdout is not None
    waiting, fd = b"", child.stdout.fileno()
    while True:
        if not select.select([fd], [], [], seconds)[0]:
            raise late
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return
        *whole, waiting = (waiting + chunk).split(b"\n")
        for line in whole:
            yield json.loads(line)


@contextlib.contextmanager
def shown(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that shows the bytes done so far: a bar on a terminal, elsewhere a line every half minute."""
    with console.byte_progress() as bar:
        task = bar.add_task(what, total=total)
        began = last = time.monotonic()

        def advance(done: int) -> None:
            nonlocal last
            bar.update(task, completed=done)
            now = time.monotonic()
            if not console.stderr.is_terminal and now - last > SECONDS_BETWEEN_LINES:
                last = now
                rate = done / max(now - began, 1e-9) / 1e9
                console.say(f"{what}: {amount(done)} of {amount(total)}, {rate:.2f} GB/s")

        yield advance
