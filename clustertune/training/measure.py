"""A benchmark's stopwatch in a rank: steps timed behind the warm-up, tokens counted, a few steps more under the profiler.

torch's profiler says how long ranks exchange data, and how much of that nothing else hides. On a GPU the spans are those of its
kernels and copies: communication is NCCL's, all others compute. Without a GPU they are gloo's operations, from their call to
their end, and torch's own operators on the CPU. What is not hidden is the time in which something is exchanged and nothing is
computed.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from clustertune.process import process_age
from clustertune.training.bench_schedule import BenchSchedule, result_file
from clustertune.training.figures import count_tokens


def attach(trainer: Any, schedule: BenchSchedule, records: Path) -> None:
    """Have a trainer measured. It must call its ``on_inputs`` with the inputs of every micro batch of training."""
    watch = Stopwatch(schedule, result_file(records, int(os.environ.get("RANK", "0"))))
    trainer.on_inputs = watch.count
    watch.facts = {"rows": len(trainer.train_dataset)}
    trainer.add_callback(watch)


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Measures one rank, and writes what it found behind the last step.

    A step lasts from the end of the one before to its own end, the GPU's queue emptied: data, forward, backward, optimizer,
    logging. No collective is made in it: each rank leaves a file of its own.
    """

    def __init__(self, schedule: BenchSchedule, out: Path) -> None:
        self.schedule, self.out = schedule, out
        self.facts: dict[str, Any] = {}
        self._cuda = torch.cuda.is_available()
        self._last, self._cpu = 0.0, 0.0
        self._to_first_step: float | None = None
        self._taken = 0
        self._tokens: list[Any] = []
        self._records: list[dict[str, Any]] = []
        self._before: dict[str, int] = {}
        self._profiler: Any = None
        self._profile: dict[str, Any] | None = None

    def count(self, inputs: Mapping[str, Any]) -> None:
        """The tokens of one micro batch: computed, of conversations, and those that the loss is taken of. Waits for nothing."""
        self._tokens.append(count_tokens(inputs))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:  # noqa: ARG002
        """Start the clock at the first step, and the profiler behind the timed ones."""
        if self._to_first_step is None:
            self._to_first_step = process_age()
            self._begin()
        if self._taken == self.schedule.warmup + self.schedule.steps and self.schedule.profiled and self._is_first:
            self._profiler = start_profiler()

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:  # noqa: ARG002
        """Take the time of a step that has ended."""
        now, used = self._now(), time.process_time() - self._cpu
        tokens, self._tokens = self._tokens, []
        computed, real, labelled = ([int(one[kind]) for one in tokens] for kind in range(3))
        self._taken += 1
        counts = {"computed": sum(computed), "tokens": sum(real), "labelled": sum(labelled)}
        self._records.append({"step": self._taken, "seconds": now - self._last, "cpu_seconds": used, **counts})
        if self._taken == self.schedule.warmup:
            self._before = self._peaks()
            if self._cuda:
                torch.cuda.reset_peak_memory_stats()
        if self._taken == self.schedule.warmup + self.schedule.steps:
            self.facts["peak"] = self._peaks()
        if self._taken == self.schedule.total:
            self._end()
            control.should_save = False
        self._begin()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:  # noqa: ARG002
        """The last step is not saved here either."""
        control.should_save = False

    def _begin(self) -> None:
        """Start the clocks of a step."""
        self._last, self._cpu = self._now(), time.process_time()

    @property
    def _is_first(self) -> bool:
        return os.environ.get("RANK", "0") == "0"

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _peaks(self) -> dict[str, int]:
        """Peak bytes: tensors and the allocator's on the GPU, the process's resident set."""
        found = {"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        if self._cuda:
            found["allocated"] = int(torch.cuda.max_memory_allocated())
            found["reserved"] = int(torch.cuda.max_memory_reserved())
        return found

    def _end(self) -> None:
        if self._profiler is not None:
            self._profile = stop_profiler(self._profiler, self.schedule.profiled)
        schedule = self.schedule
        body = {
            "rank": int(os.environ.get("RANK", "0")),
            "device": torch.cuda.get_device_name() if self._cuda else None,
            "device_bytes": torch.cuda.get_device_properties(0).total_memory if self._cuda else None,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "to_first_step_s": self._to_first_step,
            "warmup": self._records[: schedule.warmup],
            "steps": self._records[schedule.warmup : schedule.warmup + schedule.steps],
            "profiled": self._records[schedule.warmup + schedule.steps :],
            "profile": self._profile,
            "peak_before": self._before,
            **self.facts,
        }
        # Under a name of its own first: who sees the file sees all of it.
        part = self.out.with_name(self.out.name + ".new")
        part.write_text(json.dumps(body) + "\n")
        part.replace(self.out)


# -- the profiler ---------------------------------------------------------------------------------------------------------

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


def start_profiler() -> Any:
    """A running profiler: of the GPU's kernels where there is a GPU, else of the CPU."""
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    running = profile(activities=[activity], acc_events=True)
    running.start()
    return running


def stop_profiler(running: Any, steps: int) -> dict[str, Any]:
    """End the profiling; what it saw of so many steps, per step."""
    gpu = torch.cuda.is_available()
    running.stop()
    return summarise(list(_gpu_spans(running.events()) if gpu else _cpu_spans(running.events())), steps, gpu=gpu)


def _gpu_spans(events: Iterable[Any]) -> Iterator[OperationTime]:
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
