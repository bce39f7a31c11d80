"""What a rank measures: where its start and its steps go, what they reach of the GPU's peak, and what it has learnt.

Steps: each rank measures, without a profiler, what it does alone: waiting for its batch, computing inside some decoder layers
(behind FSDP's gather and ahead of its scatter), the optimizer. Times from end to end hide a slow rank: all ranks wait for it
in the same collectives.

The start: where the time goes before the first step is done, in parts that are timed and written to ``metrics.jsonl``. The
events, one a part and then the sum, are all written by rank 0 at the end of the first step (so none of a start that died)::

    {"event": "startup", "part": "imports", "seconds": 6.81, ...}
    {"event": "startup", "part": "total", "seconds": 41.2, "read_bytes": [...], "host_bytes": [...], "loading": "slices"}

``seconds`` of the parts add up to the total's, but for rounding. ``read_bytes`` is what each rank read of the weights,
``host_bytes`` its peak resident memory, both in rank order; ``loading`` says how (:attr:`Startup.loading`).

An evaluation says the same on every mesh: the mean over the labelled tokens of the eval split, each row once. transformers
5.23 takes the mean of the batches' means over ranks, and cuts the last, padded batch by counting ranks as rows: under tp or
cp, whose ranks share their rows, full batches then weigh more than the last one. Here the split is filled with rows without
labels until it divides, and each rank sums what its labels cost: whatever is counted twice is so in both sums. Of preferences
the same is done with pairs for tokens.
"""

from __future__ import annotations

import contextlib
import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
import torch
import torch.distributed as dist

from clustertune.cluster.hardware import peak_flops
from clustertune.plan.predict import work_of
from clustertune.process import process_age
from clustertune.resolve.resolved import Resolved

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
START_PARTS = (
    "imports",
    "process group",
    "digests",
    "data",
    "model",
    "reading",
    "sharding",
    "resume",
    "evaluation",
    "first step",
    "other",
)
"""In the order in which they are reported.

``digests``: waiting until data and weights are compared with theirs.
``model``: built without weights, LoRA added, trainer made.
``reading``: weights from storage to where they stay. ``first step``: compilation included.
``evaluation``: the one before the first step."""
IGNORED_LABEL = -100
"""What a label is where no loss is taken."""
Base: Any = object
"""What stands in for one of TRL's trainers, which :mod:`clustertune.training.trainer` puts behind the classes made of it."""


# -- the start ---------------------------------------------------------------------------------------------------------------


def peak_host_bytes() -> int:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Startup:
    """Times parts of the start-up. A part inside another one stops the outer one's clock, so that nothing counts twice."""

    def __init__(self, age: Callable[[], float] = process_age, clock: Callable[[], float] = time.perf_counter) -> None:
        """Create it when the imports are done: the process's time until then counts as theirs."""
        self._clock = clock
        self.seconds: dict[str, float] = {"imports": age()}
        self._stack = ["other"]
        self._since = clock()
        self.read_bytes = 0
        """Bytes of weights that this rank read."""
        self.loading = "whole"
        """``slices``: each rank read its own; ``whole``: transformers read the files, whole."""
        self.done = False

    def _turn(self) -> None:
        now = self._clock()
        if not self.done:
            self.seconds[self._stack[-1]] = self.seconds.get(self._stack[-1], 0.0) + now - self._since
        self._since = now

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside as ``name``, one of :data:`START_PARTS`."""
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def begin(self, name: str) -> None:
        """:meth:`part` for code that begins and ends in two places."""
        self._turn()
        self._stack.append(name)

    def end(self) -> None:
        """The innermost part is over."""
        self._turn()
        self._stack.pop()

    def finish(self) -> None:
        """The first step is done: what comes now is not a start-up."""
        self._turn()
        self.done = True

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def summary(self) -> str:
        """One line: ``start-up 41.2 s: imports 6.8, data 0.4, ...``; parts below a tenth of a second are left out."""
        shown = [f"{name} {self.seconds[name]:.1f}" for name in START_PARTS if self.seconds.get(name, 0.0) >= 0.05]
        return f"start-up {self.total:.1f} s: {', '.join(shown)}"

    def events(self, read: list[int], held: list[int]) -> Iterator[Mapping[str, Any]]:
        """The values of the ``startup`` events: one a part in the order of :data:`START_PARTS`, then the total.

        ``read``, ``held``: every rank's bytes of weights and peak memory, in rank order.
        """
        for name in START_PARTS:
            if name in self.seconds:
                yield {"part": name, "seconds": round(self.seconds[name], 3)}
        figures = {"read_bytes": read, "host_bytes": held, "loading": self.loading}
        yield {"part": "total", "seconds": round(self.total, 3), **figures}


# -- steps -------------------------------------------------------------------------------------------------------------------


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
        seconds = dict(self._host)
        if self._events:
            self._events[-1][2].synchronize()
        for name, began, ended in self._events:
            seconds[name] += began.elapsed_time(ended) / 1e3
        seconds["forward_backward"] -= seconds["generation"] + seconds["reward"]  # they are made within the same call
        values = [*seconds.values(), float(self._computed), float(self._real)]
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
        values: dict[str, Any] = {
            f"{name}_seconds": round(statistics.median_low(rank[at] for rank in sums) / len(steps), 6)
            for at, name in enumerate(PARTS)
            if name in PARTS[:3] or (name != "layers" and any(rank[at] for rank in sums))
        }
        if computed:
            values["padding"] = round(1 - real / computed, 4)
            values["imbalance"] = round(max(rank[-1] for rank in sums) * len(sums) / real, 4) if real else None
        if self._flops and computed:
            per_second = self._share / seconds / self._could
            values["mfu"] = round(self._flops[0] * real * per_second, 4)
            values["hfu"] = round(self._flops[1] * computed * per_second, 4)
        return values

    def stragglers(self) -> dict[str, float]:
        """Ranks that the others wait for: rank (as text) to its time over that of the median rank, the slowest first."""
        if len(self._recent) < RECENT // 2 or len(self._recent[0]) < 2:
            return {}
        ratios = [[mine / max(statistics.median_low(step), 1e-9) for mine in step] for step in self._recent]
        slow = {}
        for rank, mine in enumerate(zip(*ratios, strict=True)):
            if sum(ratio >= SLOWER for ratio in mine) >= SHARE * len(mine):
                slow[str(rank)] = round(statistics.median(mine), 2)
        return dict(sorted(slow.items(), key=lambda pair: -pair[1]))


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


# -- evaluations -------------------------------------------------------------------------------------------------------------


def filled(rows: Any, multiple: int) -> Any:
    """The rows with as many behind them as divide by ``multiple``: copies of the first one, without a label or an answer.

    accelerate 1.15 would repeat the first rows, labels and all. What is no ``datasets.Dataset`` with labels is left alone.
    """
    lacking = -len(rows) % multiple if isinstance(rows, datasets.Dataset) else 0
    first = rows[0] if lacking else {}
    if "labels" in first:
        blank = {**first, "labels": [IGNORED_LABEL] * len(first["labels"])}
    elif "chosen_ids" in first:
        blank = {**first, "chosen_ids": [], "rejected_ids": []}
    else:
        return rows
    return torch.utils.data.ConcatDataset([rows, [blank] * lacking])


def labels_of(inputs: Mapping[str, Any]) -> torch.Tensor:
    """How many tokens of a batch the loss is taken of; labels are moved by one where the model does not do it."""
    labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]
    count: torch.Tensor = labels.ne(IGNORED_LABEL).sum()
    return count


class TokenMeans(Base):  # type: ignore[misc]
    """A trainer whose ``eval_loss``, token accuracy and entropy are means over tokens, the same on all ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._batches: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

    def my_inputs(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """What this rank computes of a batch that it is given."""
        return inputs

    def weighed(self, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], torch.Tensor]:
        """What this rank evaluates of a batch, and how much of it the mean is taken over."""
        inputs = self.my_inputs(inputs)
        return inputs, labels_of(inputs)

    @property
    def _rows_at_a_time(self) -> int:
        """Rows that all ranks together evaluate in one step."""
        sizes = self.accelerator.parallelism_config
        sharing = int(sizes.tp_size * sizes.cp_size) if sizes is not None else 1
        return int(self.args.eval_batch_size) * int(self.accelerator.num_processes) // sharing

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """As the Trainer's; where there are several ranks, of rows that divide over them."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if self.accelerator.num_processes > 1:
            rows = filled(rows, self._rows_at_a_time)
        return super().get_eval_dataloader(rows)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:  # noqa: ARG002
        """Keeps the sum of this rank's part of the batch, and gives the Trainer nothing to gather."""
        inputs, count = self.weighed(self._prepare_inputs(inputs))
        with torch.no_grad(), self.compute_loss_context_manager():
            mean = self.compute_loss(model, inputs).detach().double()
        # Without a label the mean is 0 or, with label smoothing, no number.
        self._batches.append(torch.stack([torch.where(count > 0, mean * count, 0.0), count.double()]))
        return None, None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """As the Trainer's, with the loss, and what TRL keeps of each batch, over all tokens; no number without any."""
        self._batches = []
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if not self._batches:
            return output
        metrics = {key: values for key, values in self._metrics["eval"].items() if len(values) == len(self._batches)}
        each = torch.stack(self._batches)
        shares = [(torch.tensor(values).to(each) * each[:, 1]).sum() for values in metrics.values()]
        sums = torch.stack([*each.sum(0), *shares])
        if dist.is_initialized():
            dist.all_reduce(sums)
        loss, count, *shares = sums.tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = loss / count if count else float("nan")
        for values, share in zip(metrics.values(), shares, strict=True):
            values[:] = [share / count] if count else values
        return output


class PairMeans(TokenMeans):
    """A trainer whose evaluation takes its means over pairs of answers."""

    def weighed(self, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], torch.Tensor]:
        """Without the pairs that only fill the split, where there are others."""
        real = inputs["completion_mask"].chunk(2)[0].any(dim=1)
        chosen = torch.cat([real, real]) if real.any() else slice(None)
        return {name: values[chosen] for name, values in inputs.items()}, real.sum()

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        with _ungathered(self.accelerator):
            return super().prediction_step(*args, **kwargs)


@contextmanager
def _ungathered(accelerator: Any) -> Iterator[None]:
    """Have TRL's metrics say what this rank computed: the ranks leave out different numbers of pairs."""
    accelerator.gather = accelerator.gather_for_metrics = lambda values, *_, **__: values
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics
