"""The staging folder beside the output: one merge at a time, and a journal of the files that are on the device.

``.<out>.merging/`` holds finished shards under their final names, ``journal.jsonl`` and ``lock``; it never holds a
``config.json`` or an index, so nothing loads it by mistake.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from clustertune import lock
from clustertune.errors import storage_error
from clustertune.manifest import FileRecord, fsync_path, parse_record, write_durably


def staging_folder(out: Path) -> Path:
    """Where the work for ``out`` lies until it is whole."""
    return out.with_name(f".{out.name}.merging")


class Journal:
    """What of an output is done: per line one event, durable before the next step begins.

    First line ``{"inputs": id}``; then ``{"shard", "size", "xxh3_128"}`` per finished shard; ``{"publish": [names]}`` once
    files begin to move into the output.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.jsonl"
        self.inputs: str | None = None
        self.shards: dict[str, FileRecord] = {}
        self.published: list[str] = []

    def load(self) -> Journal:
        """Read what is there, up to the first line that is torn or unknown."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return self
        for line in text.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                self._apply(json.loads(line))
            except (ValueError, KeyError, TypeError):
                break
        return self

    def _apply(self, event: dict[str, Any]) -> None:
        if "inputs" in event:
            self.inputs = str(event["inputs"])
        elif "publish" in event:
            self.published = [str(name) for name in event["publish"]]
        else:
            self.shards[str(event["shard"])] = parse_record(event)

    def rewrite(self) -> None:
        """Write all of it anew, so that nothing is appended after a torn line."""
        events: list[dict[str, Any]] = [{"inputs": self.inputs}]
        events += [{"shard": name, **record.as_json()} for name, record in self.shards.items()]
        events += [{"publish": self.published}] if self.published else []
        write_durably(self.path, "".join(json.dumps(event) + "\n" for event in events))

    def add_shard(self, name: str, record: FileRecord) -> None:
        """Note a shard that is on the device. Callers from several threads serialise."""
        self.shards[name] = record
        self._append({"shard": name, **record.as_json()})

    def begin_publish(self, names: list[str]) -> None:
        """Note that files named ``names`` in the output are ours from now on."""
        self.published = names
        self._append({"publish": names})

    def _append(self, event: dict[str, Any]) -> None:
        with self.path.open("ab") as out:
            out.write(json.dumps(event).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the staging folder against other processes, also of other nodes where the filesystem's locks reach.

    Raises UserError: exit 75 where another merge holds it, 73 where the folder cannot be made.
    """
    held = lock.held(folder / "lock", "is merging into it", shown=folder, fix="wait for it, then run the same command again")
    with ExitStack() as stack:
        try:
            stack.enter_context(held)
        except OSError as error:
            raise storage_error(error, "making the staging folder", folder) from error
        yield


def clear(folder: Path, keep: set[str] | None = None) -> None:
    """Remove the files of a staging folder that are not in ``keep``; without ``keep`` the folder itself, the lock last."""
    for path in sorted(folder.iterdir(), key=lambda p: p.name == "lock"):
        if keep is None or path.name not in {*keep, "lock"}:
            path.unlink()
    if keep is None:
        folder.rmdir()
        fsync_path(folder.parent)
