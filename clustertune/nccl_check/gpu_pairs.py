"""The first step between two GPUs: an all-reduce of each pair in processes of their own, with a time limit.

On cards without NVLink a PCIe switch or an IOMMU that redirects peer-to-peer traffic lets the very first collective hang for
ever (NVIDIA/nccl#1999 and many others): two processes find that out in seconds, where all ranks would wait for a watchdog.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from clustertune import bounded

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
        with tempfile.TemporaryDirectory(prefix="clustertune-probe-") as folder, contextlib.ExitStack() as children:
            began, running = time.monotonic(), []
            for pair in turn:
                store = Path(folder) / f"pair-{pair[0]}-{pair[1]}"
                works = [partial(try_pair, store, gpu, rank, backend, environ) for rank, gpu in enumerate(pair)]
                running.append((pair, [children.enter_context(bounded.Pending(work, most)) for work in works]))
            for pair, both in running:
                status, message = _outcome(both, most)
                taken = round(time.monotonic() - began, 2)
                found.append({"gpus": list(pair), "status": status, "seconds": taken, "message": message})
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


def _outcome(children: Sequence[bounded.Pending], limit: float) -> tuple[str, str]:
    """Status and message of a pair; where one of the two has failed, the other is not waited for."""
    while True:
        answers = [child.answer() for child in children if child.is_ready()]
        for answer in answers:
            fault = (answer.found or {}).get("fault", f"was ended by signal {answer.signal}")
            if fault and not answer.silent:
                return "failed", fault
        if len(answers) == len(children):
            hung = any(answer.silent for answer in answers)
            return ("hung", f"an all-reduce of two did not end within {limit:.0f} s") if hung else ("ok", "")
        time.sleep(0.05)


def try_pair(store: Path, gpu: int, rank: int, backend: str, environ: Mapping[str, str]) -> dict[str, str]:
    """One of the two processes: ``fault`` says what is wrong, nothing where the sum is right."""
    os.environ.update(environ)
    try:
        import torch  # not in the process that forks: a library whose threads are lost may hang, which is what is looked for
        import torch.distributed as dist

        device = torch.device("cuda", gpu) if backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        limit = datetime.timedelta(seconds=600)  # the parent's is shorter
        dist.init_process_group(backend, store=dist.FileStore(str(store), 2), rank=rank, world_size=2, timeout=limit)
        value = torch.full((ELEMENTS,), float(rank + 1), device=device)
        dist.all_reduce(value)
        return {"fault": "" if bool((value == 3).all()) else "the sum is wrong"}
    except Exception as error:
        return {"fault": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]}
