"""A benchmark's stopwatch in a rank: steps timed behind the warm-up, and tokens counted."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
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

    def count(self, inputs: Mapping[str, Any]) -> None:
        """The tokens of one micro batch: computed, of conversations, and those that the loss is taken of. Waits for nothing."""
        self._tokens.append(count_tokens(inputs))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:  # noqa: ARG002
        """Start the clock at the first step."""
        if self._to_first_step is None:
            self._to_first_step = process_age()
            self._begin()

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
        if self._taken == self.schedule.total:
            self.facts["peak"] = self._peaks()
            self._end()
            control.should_save = False
        self._begin()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:  # noqa: ARG002
        """The last step is not saved here either."""
        control.should_save = False

    def _begin(self) -> None:
        """Start the clocks of a step."""
        self._last, self._cpu = self._now(), time.process_time()

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
        schedule = self.schedule
        body = {
            "rank": int(os.environ.get("RANK", "0")),
            "device": torch.cuda.get_device_name() if self._cuda else None,
            "device_bytes": torch.cuda.get_device_properties(0).total_memory if self._cuda else None,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "to_first_step_s": self._to_first_step,
            "warmup": self._records[: schedule.warmup],
            "steps": self._records[schedule.warmup :],
            "peak_before": self._before,
            **self.facts,
        }
        # Under a name of its own first: who sees the file sees all of it.
        part = self.out.with_name(self.out.name + ".new")
        part.write_text(json.dumps(body) + "\n")
        part.replace(self.out)
