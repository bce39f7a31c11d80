"""The first step between two GPUs: an all-reduce of each pair in processes of their own, with a time limit.

On cards without NVLink a PCIe switch or an IOMMU that redirects peer-to-peer traffic lets the very first collective hang for
ever (NVIDIA/nccl#1999 and many others): two processes find that out in seconds, where all ranks would wait for a watchdog.
"""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clustertune import process
from clustertune.process import kill_group

PAIR_SECONDS = 60.0
"""What a pair may take, the start of Python included."""
ELEMENTS = 1 << 20


def probe_pairs(
    gpus: int, backend: str, environ: Mapping[str, str], limit: float, *, pairwise: bool, seconds: float = PAIR_SECONDS
) -> list[dict[str, Any]]:
    """``gpus``, ``status``, ``seconds`` and ``message`` of each pair of a node; none begins later than ``limit`` s from now.

    ``pairwise``: every pair; else the first one. ``seconds``: what one may take.
    """
    deadline, found, why = time.monotonic() + limit, [], ""
    for turn in tournament(gpus) if pairwise else [[(0, 1)]]:
        why = why or ("no time was left" if time.monotonic() >= deadline else "")
        if why:
            found += [{"gpus": list(pair), "status": "skipped", "seconds": 0.0, "message": why} for pair in turn]
            continue
        most = min(seconds, max(10.0, deadline - time.monotonic()))
        with tempfile.TemporaryDirectory(prefix="clustertune-probe-") as folder:
            began = time.monotonic()
            running = [(pair, _start_pair(pair, backend, environ, Path(folder))) for pair in turn]
            try:
                found += [_end_pair(pair, children, began, most, Path(folder)) for pair, children in running]
            finally:
                for _, children in running:
                    for child in children:
                        kill_group(child)
        if any(entry["status"] == "hung" for entry in found):
            why = "a pair hung before"
    return found


def tournament(players: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in turns in which no one plays twice (the circle method): with an odd number one rests in each turn."""
    seats = list(range(players)) + ([-1] if players % 2 else [])
    turns = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        turns.append(sorted((min(a, b), max(a, b)) for a, b in pairs if a >= 0 and b >= 0))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return turns


def _start_pair(pair: tuple[int, int], backend: str, environ: Mapping[str, str], folder: Path) -> list[subprocess.Popen[bytes]]:
    store, children = folder / f"pair-{pair[0]}-{pair[1]}", []
    for rank, gpu in enumerate(pair):
        command = [sys.executable, "-m", "clustertune.nccl_check.gpu_pairs", str(store), str(gpu), str(rank), backend]
        out = folder / f"{store.name}-{rank}.out"
        children.append(start(command, out, signal.SIGKILL, env=environ, stdout=subprocess.DEVNULL))
    return children


def _end_pair(
    pair: tuple[int, int], children: Sequence[subprocess.Popen[bytes]], began: float, limit: float, folder: Path
) -> dict[str, Any]:
    status, message = "ok", ""
    while any(child.poll() is None for child in children) and not any(child.returncode for child in children):
        if time.monotonic() - began > limit:
            status, message = "hung", f"an all-reduce of two did not end within {limit:.0f} s"
            break
        time.sleep(0.05)
    for child in children:
        kill_group(child)
    if status == "ok" and any(child.returncode for child in children):
        status = "failed"
        for rank, child in enumerate(children):
            lines = (folder / f"pair-{pair[0]}-{pair[1]}-{rank}.out").read_text(errors="replace").strip().splitlines()
            if child.returncode not in (0, -signal.SIGKILL) and lines:
                message = lines[-1][:400]
                break
    return {"gpus": list(pair), "status": status, "seconds": round(time.monotonic() - began, 2), "message": message}


def try_pair(store: Path, gpu: int, rank: int, backend: str) -> int:
    """One of the two processes: exit 0 where the sum is right."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", gpu) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=600)  # the parent's is shorter
    dist.init_process_group(backend, store=dist.FileStore(str(store), 2), rank=rank, world_size=2, timeout=limit)
    value = torch.full((ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(value)
    right = bool((value == 3).all())
    sys.stderr.write("" if right else "the sum is wrong\n")
    sys.stderr.flush()
    os._exit(0 if right else 1)  # nothing is left to end in order


def start(command: Sequence[str], output: Path, last: signal.Signals, **given: Any) -> subprocess.Popen[bytes]:
    """Start a program that writes to the end of ``output`` and gets signal ``last`` when this process ends. Raises OSError.

    ``given``: further arguments of Popen, such as where its stdout goes instead.
    """
    with output.open("ab") as out:
        return process.start(command, last, **{"stdout": out, "stderr": out, **given})


if __name__ == "__main__":
    sys.exit(try_pair(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
