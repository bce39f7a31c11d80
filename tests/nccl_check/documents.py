"""A check as its files, written by hand: what ranks and nodes leave behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustertune.nccl_check.link_measure import NODE, RECORDS, CollectiveCase, Setup

SETUP = Setup(
    hosts=("n1", "n2"), address="10.0.0.1", port=29_400, ranks_per_node=1, cpus_per_node=1, backend="gloo",
    backend_why="asked for", seconds=60.0, start_seconds=20.0, case_seconds=10.0, most_seconds=120.0, largest=1 << 20,
)  # fmt: skip


def setup(nodes: int, each: int = 1, **changes: Any) -> Setup:
    """A check on so many nodes."""
    hosts = tuple(f"n{i + 1}" for i in range(nodes))
    return replace(SETUP, hosts=hosts, ranks_per_node=each, **changes)


class Files:
    """The folder of a check."""

    def __init__(self, folder: Path, wanted: Setup, *, bare: bool = False) -> None:
        """``bare``: of a round of which nothing else is there yet."""
        self.folder, self.setup = folder, wanted
        wanted.write(folder)
        if bare:
            return
        for rank in range(wanted.world_size):
            self.say(rank, "start", rank=rank, pid=1000 + rank)
            self.say(rank, "met")
            self.say(rank, "up", torch="2.13.0", nccl=None, cuda=None, room=1 << 30)
        for node in range(len(wanted.hosts)):
            self.node(node)

    def say(self, rank: int, event: str, /, **values: Any) -> None:
        with (self.folder / RECORDS.format(rank=rank)).open("a") as out:
            out.write(json.dumps({"event": event, "at": 1.0, **values}) + "\n")

    def node(self, number: int, codes: list[int | None] | None = None, **values: Any) -> None:
        codes = [0] * self.setup.ranks_per_node if codes is None else codes
        empty: dict[str, Any] = {"probe": [], "problems": []}
        found = {"python": "3.11.9", "environment": {"GLOO_SOCKET_IFNAME": "eth0"}}
        record = {"codes": codes, "facts": {"hostname": self.setup.hosts[number]}, **empty, **found, **values}
        (self.folder / NODE.format(node=number)).write_text(json.dumps(record))

    def begin(self, step: int, case: CollectiveCase, ranks: list[int], moved: int | None = None) -> None:
        for rank in ranks:
            self.say(rank, "begin", step=step, case=vars(case), ranks=ranks, moved=moved or case.bytes)

    def done(self, step: int, rank: int, median: float, *, spread: float = 0.1, correct: bool = True) -> None:
        self.say(rank, "done", step=step, median_s=median, spread=spread, correct=correct)

    def whole(self, step: int, case: CollectiveCase, medians: dict[int, float], moved: int | None = None) -> None:
        """A step that all ended: rank to seconds."""
        self.begin(step, case, list(medians), moved)
        for rank, median in medians.items():
            self.done(step, rank, median)
