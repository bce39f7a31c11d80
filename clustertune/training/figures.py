"""Where a rank's steps go, what they reach of the GPU's peak, and which rank the others wait for: without a profiler.

Each rank measures what it does alone: waiting for its batch, computing inside some decoder layers (behind FSDP's gather and
ahead of its scatter), the optimizer. Times from end to end hide a slow rank: all ranks wait for it in the same collectives.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from clustertune.cluster.hardware import peak_flops
from clustertune.plan.predict import work_of
from clustertune.resolve.resolved import Resolved
from clustertune.training.evaluation import IGNORED_LABEL
from clustertune.training.startup import peak_host_bytes

PARTS = ("data", "forward_backward", "optimizer", "layers", "generation", "reward")
"""Seconds of a rank in a step. ``layers``: inside the timed decoder layers; a part of the forward and backward pass.
``generation`` and ``reward``: of the model's own answers, which are made and judged before that pass."""
COLUMNS = (*PARTS, "computed", "real")
"""What each rank brings to the end of a step; the last two are tokens of its micro batches."""
TIMED_LAYERS = 8
RECENT = 20
"""Steps by which a rank is judged."""
SLOWER, SHARE = 1.2, 0.8
"""A rank is a straggler where it took 1.2 times as long as the median rank in 80 % of the recent steps, not for a moment."""


def count_tokens(inputs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Tokens of one micro batch: computed, of conversations, and those that the loss is taken of. Waits for nothing."""
    ids, mask, labels = inputs["input_ids"], inputs.get("attention_mask"), inputs.get("labels")
    real = (mask != 0).sum() if mask is not None and mask.dim() == 2 else ids.numel()
    return ids.numel(), real, (labels != IGNORED_LABEL).sum() if labels is not None else ids.numel()


def peak_memory_bytes() -> int:
    """Peak memory of this rank: allocated on its GPU, else the resident set of the process."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else peak_host_bytes()


class Clock:
    """Adds up one rank's seconds by part: of the host, or on a GPU between events of its stream, which nothing waits for."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        self._host = dict.fromkeys(PARTS, 0.0)
        self._events: list[tuple[str, Any, Any]] = []
        self._computed, self._real = 0, 0.0

    def begin(self) -> Any:
        """A moment for :meth:`add`."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what runs inside as ``name``."""
        began = self.begin()
        yield
        self.add(name, began)

    def add(self, name: str, began: Any) -> None:
        """Count what ran since ``began``, of :meth:`begin`, as ``name``."""
        if self._cuda:
            self._events.append((name, began, self.begin()))
        else:
            self._host[name] += time.perf_counter() - began

    def batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """The batches of ``source``; the time until each is there counts as ``data``."""
        while True:
            began = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._host["data"] += time.perf_counter() - began
            yield batch

    def count(self, inputs: Mapping[str, Any]) -> None:
        """Add the tokens of one micro batch."""
        if "input_ids" in inputs:
            computed, real, _ = count_tokens(inputs)
            self._computed, self._real = self._computed + computed, self._real + real

    def watch(self, layers: Sequence[Any]) -> None:
        """Time some of a model's decoder layers, spread evenly; called once all of FSDP's hooks are in place."""
        for at in range(0, len(layers), -(-len(layers) // TIMED_LAYERS) or 1):
            began: list[Any] = [None]
            # Behind FSDP's own hook (which waits for the gather), and before the one that frees what was gathered.
            layers[at].register_forward_pre_hook(lambda layer, _, began=began: self._enter(layer, began))
            layers[at].register_forward_hook(lambda layer, *_, began=began: self._leave(layer, began), prepend=True)

    def _enter(self, layer: Any, began: list[Any]) -> None:
        if layer.training:  # an evaluation is no part of a step
            began[0] = self.begin()

    def _leave(self, layer: Any, began: list[Any]) -> None:
        if layer.training:
            self.add("layers", began[0])

    def take(self) -> list[float]:
        """This rank's :data:`COLUMNS` since the last call. On a GPU its stream has to have come to the end of the step."""
        found = dict(self._host)
        if self._events:
            self._events[-1][2].synchronize()
        for name, began, ended in self._events:
            found[name] += began.elapsed_time(ended) / 1e3
        found["forward_backward"] -= found["generation"] + found["reward"]  # they are made within the same call
        values = [*found.values(), float(self._computed), float(self._real)]
        self._events, self._host, self._computed, self._real = [], dict.fromkeys(PARTS, 0.0), 0, 0.0
        return values


class Figures:
    """Rank 0's view of all ranks: the figures of the steps since the last log line, and the stragglers of the recent ones."""

    def __init__(self, resolved: Resolved, device: str | None) -> None:
        work = work_of(resolved)
        peak = peak_flops(device)
        self._flops = (work.model, work.hardware) if work and peak else None
        self._could = (peak or 0.0) * resolved.world_size
        self._share = resolved.data_parallel_size / resolved.world_size
        self._steps: list[list[list[float]]] = []
        self._recent: deque[list[float]] = deque(maxlen=RECENT)

    def add(self, table: list[list[float]]) -> None:
        """Take the :data:`COLUMNS` of every rank in one step."""
        self._steps.append(table)
        self._recent.append(_alone(table))

    def take(self, seconds: float) -> dict[str, Any]:
        """Figures of the steps since the last call, which took ``seconds`` together; times are means of the median rank.

        ``mfu`` counts tokens of conversations, ``hfu`` padding and recomputation too (:mod:`clustertune.plan.step`);
        ``padding``: share of computed tokens that are none; ``imbalance``: tokens of the fullest rank over the mean.
        """
        steps, self._steps = self._steps, []
        if not steps or seconds <= 0:
            return {}
        sums = [[sum(column) for column in zip(*rows, strict=True)] for rows in zip(*steps, strict=True)]
        computed, real = (sum(rank[COLUMNS.index(name)] for rank in sums) for name in ("computed", "real"))
        found: dict[str, Any] = {
            f"{name}_seconds": round(statistics.median_low(rank[at] for rank in sums) / len(steps), 6)
            for at, name in enumerate(PARTS)
            if name in PARTS[:3] or (name != "layers" and any(rank[at] for rank in sums))
        }
        if computed:
            found["padding"] = round(1 - real / computed, 4)
            found["imbalance"] = round(max(rank[-1] for rank in sums) * len(sums) / real, 4) if real else None
        if self._flops and computed:
            per_second = self._share / seconds / self._could
            found["mfu"] = round(self._flops[0] * real * per_second, 4)
            found["hfu"] = round(self._flops[1] * computed * per_second, 4)
        return found

    def stragglers(self) -> dict[str, float]:
        """Ranks that the others wait for: rank (as text) to its time over that of the median rank, the slowest first."""
        if len(self._recent) < RECENT // 2 or len(self._recent[0]) < 2:
            return {}
        ratios = [[mine / max(statistics.median_low(step), 1e-9) for mine in step] for step in self._recent]
        found = {}
        for rank, mine in enumerate(zip(*ratios, strict=True)):
            if sum(ratio >= SLOWER for ratio in mine) >= SHARE * len(mine):
                found[str(rank)] = round(statistics.median(mine), 2)
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _alone(table: Sequence[Sequence[float]]) -> list[float]:
    """Seconds that each rank would take alone: its data and optimizer, and the shortest pass at the pace of its layers."""
    columns = [list(column) for column in zip(*table, strict=True)]
    data, passes, optimizer, layers = columns[:4]
    # All ranks leave the pass together, the slowest without having waited; who came late to it has the shortest one.
    pace, least = max(layers), min(passes)
    return [d + o + (least * mine / pace if pace > 0 else 0.0) for d, o, mine in zip(data, optimizer, layers, strict=True)]


def attach(trainer: Any, resolved: Resolved, layers: Callable[[Any], Sequence[Any]], device: str | None) -> None:
    """Have a trainer that is ready for its first step measured. Compiled layers are left alone: a hook breaks their graph."""
    if not resolved.distribution.compiled:
        trainer.clock.watch(layers(trainer.model))
    if trainer.group.rank == 0:
        trainer.figures = Figures(resolved, device)
