"""The process that touches the storage for ``stage``: ``python -m clustertune.staging.copier``, one order as JSON on stdin.

A mount that hangs takes the process that reads from it with it, and no signal helps: so that is a process of its own, which
whoever started it gives up when it shows no progress. On stdout goes one JSON object a line: ``{"bytes": N}`` as the work goes
on, ``{"file": ...}`` for each whole file, and at the end ``{"answer": ...}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clustertune.errors import UserError
from clustertune.manifest import FileRecord
from clustertune.process import die_with_parent
from clustertune.staging.copying import copy_files, hash_files
from clustertune.staging.survey import SourceFile, survey

TELL_SECONDS = 0.2


class _Teller:
    """Lines to whoever gave the order; counted bytes a few times a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes, self._reported = 0, 0
        self._end = threading.Event()
        threading.Thread(target=self._tell_bytes, daemon=True).start()

    def advance(self, count: int) -> None:
        with self._lock:
            self._bytes += count

    def tell(self, line: Mapping[str, Any]) -> None:
        with self._lock:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()

    def done(self, name: str, record: FileRecord) -> None:
        self.tell({"file": name, "record": record.as_json()})

    def end(self, line: Mapping[str, Any]) -> None:
        self._end.set()
        self.tell({"bytes": self._bytes})
        self.tell(line)

    def _tell_bytes(self) -> None:
        while not self._end.wait(TELL_SECONDS):
            if self._bytes != self._reported:
                self._reported = self._bytes
                self.tell({"bytes": self._bytes})


def work(order: Mapping[str, Any], teller: _Teller) -> Any:
    """Carry out one order. Raises UserError, OSError."""
    if order["do"] == "locate":
        return os.path.realpath(order["root"])
    if order["do"] == "survey":
        return [asdict(file) for file in survey(Path(order["root"]), order["what"])]
    if order["do"] == "copy":
        files = [SourceFile(**values) for values in order["files"]]
        root, out = Path(order["root"]), Path(order["out"])
        bounds = {"workers": order["workers"], "record": order["record"]}
        copy_files(root, out, files, advance=teller.advance, done=teller.done, **bounds)
        return None
    assert order["do"] == "hash", order["do"]
    paths = [(Path(path), algorithm) for path, algorithm in order["paths"]]
    return hash_files(paths, teller.advance, order["workers"])


def main() -> int:
    """Read an order, carry it out, answer."""
    die_with_parent(signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the whole job: who gave the order ends this process
    order = json.loads(sys.stdin.readline())
    teller = _Teller()
    try:
        answer = work(order, teller)
    except UserError as error:
        teller.end({"error": error.as_dict()})
    except OSError as error:
        teller.end({"os_error": {"errno": error.errno, "text": error.strerror or str(error), "path": error.filename}})
    else:
        teller.end({"answer": answer})
    return 0


if __name__ == "__main__":
    sys.exit(main())
