"""The first step between two GPUs: an all-reduce of each pair in processes of their own, with a time limit.

On cards without NVLink a PCIe switch or an IOMMU that redirects peer-to-peer traffic lets the very first collective hang for
ever (NVIDIA/nccl#1999 and many others): two processes find that out in seconds, where all ranks would wait for a watchdog.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from clustertune.nccl_check.schedule import tournament
from clustertune.process import die_with_parent, kill_group

PAIR_SECONDS = 60.0
"""What a pair may take, the start of Python included."""
ELEMENTS = 1 << 20


@dataclass
class PairProbe:
    """The pairs of one node."""

    gpus: int
    backend: str
    environment: Mapping[str, str]
    pairwise: bool
    """Every pair; else the first one."""
    seconds: float = PAIR_SECONDS

    def run(self, limit: float) -> list[dict[str, Any]]:
        """``gpus``, ``status``, ``seconds`` and ``message`` of each pair; none begins later than ``limit`` seconds from now."""
        deadline, found = time.monotonic() + limit, []
        turns = tournament(self.gpus) if self.pairwise else [[(0, 1)]]
        hung = False
        for turn in turns:
            if hung or time.monotonic() >= deadline:
                why = "a pair hung before" if hung else "no time was left"
                found += [{"gpus": list(pair), "status": "skipped", "seconds": 0.0, "message": why} for pair in turn]
                continue
            found += self._try(turn, min(self.seconds, max(10.0, deadline - time.monotonic())))
            hung = any(entry["status"] == "hung" for entry in found)
        return found

    def _try(self, pairs: Sequence[tuple[int, int]], limit: float) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="clustertune-probe-") as folder:
            began = time.monotonic()
            running = [(pair, self._start(pair, Path(folder))) for pair in pairs]
            try:
                return [self._end(pair, children, began, limit, Path(folder)) for pair, children in running]
            finally:
                for _, children in running:
                    for child in children:
                        kill_group(child)

    def _start(self, pair: tuple[int, int], folder: Path) -> list[subprocess.Popen[bytes]]:
        children = []
        store = folder / f"pair-{pair[0]}-{pair[1]}"
        for rank, gpu in enumerate(pair):
            arguments = ["--gpu", str(gpu), "--rank", str(rank), "--backend", self.backend, "--store", str(store)]
            with (folder / f"{store.name}-{rank}.out").open("wb") as out:
                children.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "clustertune.nccl_check.probe", *arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=out,
                        start_new_session=True,
                        preexec_fn=partial(die_with_parent, signal.SIGKILL),  # noqa: PLW1509 - no thread is running here, and it calls libc only
                        env=dict(self.environment),
                    )
                )
        return children

    def _end(
        self, pair: tuple[int, int], children: Sequence[subprocess.Popen[bytes]], began: float, limit: float, folder: Path
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
            status, message = "failed", ""
            for rank, child in enumerate(children):
                lines = (folder / f"pair-{pair[0]}-{pair[1]}-{rank}.out").read_text(errors="replace").strip().splitlines()
                if child.returncode not in (0, -signal.SIGKILL) and lines:
                    message = lines[-1][:400]
                    break
        return {"gpus": list(pair), "status": status, "seconds": round(time.monotonic() - began, 2), "message": message}


def main(argv: Sequence[str] | None = None) -> int:
    """One of the two processes: exit 0 where the sum is right."""
    parser = argparse.ArgumentParser(prog="clustertune.nccl_check.probe")
    parser.add_argument("--gpu", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--backend", choices=("nccl", "gloo"), required=True)
    parser.add_argument("--store", required=True)
    given = parser.parse_args(argv)
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", given.gpu) if given.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(given.store, 2)
    limit = datetime.timedelta(seconds=600)  # the parent's is shorter
    dist.init_process_group(given.backend, store=store, rank=given.rank, world_size=2, timeout=limit)
    value = torch.full((ELEMENTS,), float(given.rank + 1), device=device)
    dist.all_reduce(value)
    if not bool((value == 3).all()):
        sys.stderr.write("the sum is wrong\n")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
