"""Staging measured against copying the same bytes: ``python -m tools.staging_bench --gb 4 --place DIR``.

Each round copies with ``cp -r``, stages, stages again (what is there is verified), in this order, each from a cold page cache
of what it reads and with every file fsynced inside the time. The stage is the whole command's work: listing, copying, hashing,
listing again, sealing. Medians are over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clustertune.cluster.schema import Staging
from clustertune.console import emit_json, say
from clustertune.manifest import SHA256, hash_file
from clustertune.staging.cache import SourceFolder, Stager, open_cache
from tools.merge_bench import copy, evict

SHARD = 1 << 30
"""Bytes of one file: the shards of large models are a few times as large."""


def make_source(folder: Path, size: int, digests: bool) -> None:
    """Shards of random bytes, in the form of a model; with ``digests`` in that of the Hub's cache, which names SHA-256."""
    folder.mkdir(parents=True)
    for number in range(max(1, size // SHARD)):
        path = folder / f"shard-{number:05}.safetensors"
        with path.open("wb") as out:
            for _ in range(min(size, SHARD) >> 23):
                out.write(os.urandom(1 << 23))
            out.flush()
            os.fsync(out.fileno())
        if digests:
            blob = folder.parent / "blobs" / hash_file(path, SHA256).digest
            blob.parent.mkdir(exist_ok=True)
            path.rename(blob)
            path.symlink_to(blob)


def timed(work: Callable[[], object]) -> float:
    """Seconds that a piece of work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(base: Path, size: int, rounds: int, digests: bool) -> dict[str, Any]:
    """Bytes, and the seconds of each round for each way."""
    source, copied, local = base / "source", base / "copied", base / "local"
    make_source(source, size, digests)
    wanted = SourceFolder("model", "bench", source)

    def stage() -> None:
        local.mkdir(exist_ok=True)
        on = open_cache(Staging(path=str(local), gb=size / 1e9 + 1))
        Stager(on, tell=lambda _: None).stage(wanted).release()

    seconds: dict[str, list[float]] = {"cp": [], "stage": [], "verify": []}
    for number in range(rounds):
        for folder in (copied, local):
            shutil.rmtree(folder, ignore_errors=True)
        os.sync()
        evict(source)
        seconds["cp"].append(timed(lambda: copy(source, copied)))
        shutil.rmtree(copied)
        os.sync()
        evict(source)
        seconds["stage"].append(timed(stage))
        evict(local)
        seconds["verify"].append(timed(stage))
        say(f"round {number + 1}: " + ", ".join(f"{way} {found[-1]:.1f} s" for way, found in seconds.items()))
    return {"bytes": sum(path.stat().st_size for path in source.iterdir()), "seconds": seconds}


def main() -> int:
    """Measure, and say so as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--place", type=Path, default=None, help="a folder on the disk to measure; without it a temporary one")
    parser.add_argument("--digests", action="store_true", help="the source names SHA-256, as the Hub's cache does")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="clustertune-bench-", dir=given.place) as base:
        found = measure(Path(base), int(given.gb * 1e9) >> 23 << 23, given.rounds, given.digests)
    medians = {way: statistics.median(values) for way, values in found["seconds"].items()}
    found |= {"median": medians, "cpus": os.cpu_count(), "python": platform.python_version()}
    if given.json:
        emit_json(found)
        return 0
    for way, median in medians.items():
        rounds = ", ".join(f"{value:.1f}" for value in found["seconds"][way])
        sys.stdout.write(
            f"| {way} | **{median:.1f}** ({rounds}) | {found['bytes'] / median / 1e9:.2f} | {median / medians['cp']:.2f} |\n"
        )
    sys.stdout.write(json.dumps({"bytes": found["bytes"], "cpus": found["cpus"], "python": found["python"]}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
