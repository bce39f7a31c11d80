"""What torch's profiler saw of a few steps: how long ranks exchange data, and how much of that nothing else hides.

On a GPU the spans are those of its kernels and copies: communication is NCCL's, all others compute. Without a GPU they are
gloo's operations, from their call to their end, and torch's own operators on the CPU. What is not hidden is the time in which
something is exchanged and nothing is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

TOP = 15
"""Operations that the result names."""
METHOD_GPU = "torch.profiler on rank 0: time in which an NCCL kernel ran and no other kernel or copy, over the steps' time"
METHOD_CPU = "torch.profiler on rank 0: time in which gloo exchanged and no torch operator computed, over the steps' time"


@dataclass(frozen=True)
class OperationTime:
    """One operation, microseconds."""

    name: str
    start: float
    end: float
    communication: bool
    own: float | None = None
    """Without the operations that it calls; None: it calls none."""


def start() -> Any:
    """A running profiler: of the GPU's kernels where there is a GPU, else of the CPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    running = profile(activities=[activity], acc_events=True)
    running.start()
    return running


def stop(running: Any, steps: int) -> dict[str, Any]:
    """End the profiling; what it saw of so many steps, per step."""
    import torch

    gpu = torch.cuda.is_available()
    running.stop()
    return summarise(list(_gpu_spans(running.events()) if gpu else _cpu_spans(running.events())), steps, gpu=gpu)


def _gpu_spans(events: Iterable[Any]) -> Iterator[OperationTime]:
    from torch.autograd import DeviceType

    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            yield OperationTime(event.name, event.time_range.start, event.time_range.end, "nccl" in event.name.lower())


def _cpu_spans(events: Iterable[Any]) -> Iterator[OperationTime]:
    for event in events:
        span = event.time_range.start, event.time_range.end
        if event.name.startswith("gloo:"):
            yield OperationTime(event.name, *span, True)
        elif event.name.startswith("aten::") and not _exchanges(event):
            yield OperationTime(event.name, *span, False, float(event.self_cpu_time_total))


def _exchanges(event: Any) -> bool:
    """Whether an operator waits for other ranks inside: those of sharded tensors may."""
    return any(child.name.startswith(("c10d", "gloo:", "_c10d")) or _exchanges(child) for child in event.cpu_children)


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, ascending and apart."""
    found: list[tuple[float, float]] = []
    for start_, end in sorted(spans):
        if found and start_ <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start_:
            found.append((start_, end))
    return found


def length(spans: Iterable[tuple[float, float]]) -> float:
    """The sum of intervals that are apart."""
    return sum(end - start_ for start_, end in spans)


def summarise(spans: Sequence[OperationTime], steps: int, *, gpu: bool) -> dict[str, Any]:
    """Seconds a step in which ranks exchanged data, in which nothing hid that, and the operations that took longest.

    ``seconds`` is the time from the first operation to the last: a profiled step is slower than a timed one, so that the
    shares count, not the seconds.
    """
    talk = merged((s.start, s.end) for s in spans if s.communication)
    work = merged((s.start, s.end) for s in spans if not s.communication)
    whole = max((s.end for s in spans), default=0.0) - min((s.start for s in spans), default=0.0)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for span in spans:
        sums[span.name][0] += span.end - span.start if span.own is None else span.own
        sums[span.name][1] += 1
    top = sorted(sums.items(), key=lambda item: -item[1][0])[:TOP]
    exposed = length(merged([*talk, *work])) - length(work)
    each = 1e6 * max(1, steps)
    return {
        "steps": steps,
        "seconds": whole / each,
        "communication_s": length(talk) / each,
        "exposed_s": exposed / each,
        "communication_share": length(talk) / whole if whole else None,
        "exposed_share": exposed / whole if whole else None,
        "busy_share": length(work) / whole if whole else None,
        "method": METHOD_GPU if gpu else METHOD_CPU,
        "top": [{"name": name[:120], "seconds": total / each, "calls": calls / max(1, steps)} for name, (total, calls) in top],
    }
