"""What is counted while fake tensors pass the dispatcher: memory by moment, collectives, waits of the host, operators.

A storage counts from its birth to its end, by what it is for: what was born while weights are gathered is ``gathered``, while
gradients are reduced ``reduced gradients``, else it belongs to the moment of its birth.

Where operator and operands are alike, the result of an operator is made again. torch has such a cache
(``FakeTensorMode.cache``), whose keys hold all that a tensor may be: with it four of five seconds of a simulation go into
keys and into making tensors. Here a key is what a strided tensor of a model is, and what torch does not cache is not cached.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import _BypassDispatchCache
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
_ANSWERS: dict[Any, Callable[[torch.Tensor], tuple[bool, Any]]] = {
    torch.ops._c10d_functional.wait_tensor.default: lambda operand: (False, operand),  # a fake one makes a new tensor
    aten._pin_memory.default: lambda operand: (False, operand),
    aten.is_pinned.default: lambda _: (False, True),
    aten.equal.default: lambda _: (True, True),
    aten._local_scalar_dense.default: lambda operand: (
        True,
        1.0 if operand.is_floating_point() else operand.dtype == torch.bool or 1,
    ),
    aten.nonzero.default: lambda operand: (
        True,
        torch.empty((operand.numel(), operand.dim()), dtype=torch.long, device=operand.device),
    ),
    aten.masked_select.default: lambda operand: (True, operand.new_empty((operand.numel(),))),
}
"""Of an operator whose result the data decides, by its first operand: whether the host waits for it, and a plausible result."""
LOADING, REST, SAVE, EVALUATION, RESUME = "loading", "at rest", "save", "evaluation", "resume"
"""Moments that are none of a step."""
POINTS = 1024
"""Of a curve, at most."""
LARGEST = 12
"""Kinds of storage that a moment names."""
CACHE = 50 * 2**20
"""Bytes of a GPU's last cache (50 MB of an H100): a tensor that is larger is read from memory."""
_LIBRARIES = ("clustertune", "trl", "transformers", "accelerate", "peft", "torch")


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


@dataclass
class Peak:
    """The most that lived at once in one moment of a step."""

    bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    """Bytes by what they are for."""
    largest: list[tuple[str, int, int]] = field(default_factory=list)
    """Operator, shape and type; how many; bytes of all: at most 0.2 % before the peak."""
    _taken: int = 0


@dataclass
class Curve:
    """Bytes over the allocations of a step: of so many in a row (``every``) the most."""

    every: int = 1
    bytes: list[int] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    """Where a moment begins, as a number of allocations."""
    at: int = 0

    def add(self, size: int) -> None:
        place = self.at // self.every
        self.at += 1
        if place < len(self.bytes):
            self.bytes[place] = max(self.bytes[place], size)
            return
        self.bytes.append(size)
        if len(self.bytes) == POINTS:
            self.bytes = [max(pair) for pair in zip(self.bytes[::2], self.bytes[1::2], strict=True)]
            self.every *= 2

    def as_json(self) -> dict[str, Any]:
        return {"every": self.every, "bytes": list(self.bytes), "marks": [list(mark) for mark in self.marks]}


class Memory:
    """Sums the storages of one device that live."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.now, self.moment = 0, LOADING
        self.parts: Counter[str] = Counter()
        self.moments: dict[str, Peak] = defaultdict(Peak)
        self._live: dict[int, tuple[Any, int, str]] = {}
        self._origin: dict[int, str] = {}
        self._purpose: list[str] = []
        self._left_out: dict[int, Any] = {}
        self.curve = Curve()

    @contextmanager
    def purpose(self, name: str) -> Iterator[None]:
        """Within: what is born is for this."""
        self._purpose.append(name)
        try:
            yield
        finally:
            self._purpose.pop()

    def enter(self, moment: str) -> None:
        """Another moment begins, with what is there."""
        if moment != self.moment:
            self.moment = moment
            self.curve.marks.append((self.curve.at, moment))
            self._peak()

    def forget(self) -> None:
        """Of the moments so far only loading and the save stay: the others are those of a step in which states were made."""
        self.moments = defaultdict(Peak, {name: peak for name, peak in self.moments.items() if name in (LOADING, SAVE)})

    def leave_out(self, tensor: torch.Tensor) -> None:
        """This one is in host memory, whatever its device is called."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._left_out[key] = weakref.ref(storage, lambda _: self._left_out.pop(key, None))
        if (known := self._live.get(key)) is not None:
            self._drop(key, known[0])

    def rename(self, name: str, kept: frozenset[str] = frozenset()) -> None:
        """All that lives now, but for the ``kept``, is this from now on."""
        for key, (reference, size, old) in list(self._live.items()):
            if old not in kept:
                self.parts[old] -= size
                self.parts[name] += size
                self._live[key] = (reference, size, name)

    def rename_storages(self, tensors: list[torch.Tensor], name: str) -> None:
        """The storages of these are this from now on."""
        for tensor in tensors:
            local = _local(tensor)
            key = local.untyped_storage()._cdata
            if (known := self._live.get(key)) is not None:
                reference, size, old = known
                self.parts[old] -= size
                self.parts[name] += size
                self._live[key] = (reference, size, name)

    def add(self, tensor: torch.Tensor, operator: str, *, replaces: bool = False) -> None:
        """A tensor was born; ``replaces``: on a GPU it takes the place of one that is about to go, so that it is no peak."""
        local = _local(tensor)
        if local.device.type != self.device or not isinstance(local, FakeTensor):
            return
        storage = local.untyped_storage()
        key = storage._cdata
        if key in self._left_out:
            return
        known = self._live.get(key)
        if known is not None and known[0]() is not None:
            if (size := storage.nbytes()) != known[1]:
                self._change(key, known[0], size, known[2])
            return
        if known is not None:  # its end has not been told yet
            self._drop(key, known[0])
        self._origin[key] = f"{operator} {list(local.shape)} {str(local.dtype).removeprefix('torch.')}"
        reference = weakref.ref(storage, partial(self._drop, key))
        self._change(key, reference, storage.nbytes(), self._purpose[-1] if self._purpose else self.moment, replaces=replaces)

    def _change(self, key: int, reference: Any, size: int, name: str, *, replaces: bool = False) -> None:
        difference = size - (self._live[key][1] if key in self._live else 0)
        self.now += difference
        self.parts[name] += difference
        self._live[key] = (reference, size, name)
        if replaces:
            return
        self.curve.add(self.now)
        if difference > 0:
            self._peak()

    def _drop(self, key: int, reference: Any) -> None:
        known = self._live.get(key)
        if known is not None and known[0] is reference:
            self.now -= known[1]
            self.parts[known[2]] -= known[1]
            del self._live[key]

    def _peak(self) -> None:
        peak = self.moments[self.moment]
        if self.now <= peak.bytes:
            return
        peak.bytes, peak.parts = self.now, {name: size for name, size in self.parts.items() if size}
        if self.now > 1.002 * peak._taken:
            peak._taken, peak.largest = self.now, self._largest()

    def _largest(self) -> list[tuple[str, int, int]]:
        sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for key, (_, size, _) in self._live.items():
            row = sizes[self._origin[key]]
            row[0] += 1
            row[1] += size
        return [(name, *row) for name, row in sorted(sizes.items(), key=lambda item: -item[1][1])[:LARGEST]]  # type: ignore[misc]

    def resized(self, storage: Any, size: int, resize: Any) -> Any:
        """FSDP empties and fills storages behind the dispatcher: ``torch.UntypedStorage.resize_`` comes here."""
        result = resize(storage, size)
        known = self._live.get(storage._cdata)
        if known is not None and known[0]() is not None:
            self._change(storage._cdata, known[0], storage.nbytes(), known[2])
        return result


@dataclass(frozen=True)
class Call:
    """One collective as this rank makes it."""

    kind: str
    """``all-gather``, ``reduce-scatter``, ``all-reduce`` ..."""
    ranks: int
    stride: int
    """Ranks from one member of the group to the next."""
    bytes: int
    """Of the whole tensor: what is gathered, or goes into a reduction."""
    times: int = 1
    """How many micro batches of a step it stands for."""


KINDS = {
    "allgather": "all-gather", "_allgather_base": "all-gather", "all_gather": "all-gather",
    "allreduce": "all-reduce", "all_reduce": "all-reduce", "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter": "reduce-scatter", "broadcast": "broadcast", "alltoall": "all-to-all", "all_to_all": "all-to-all",
    "send": "send", "recv": "receive", "barrier": "barrier", "gather": "gather", "scatter": "scatter",
}  # fmt: skip
"""The field's names of what c10d and functional collectives are called, by the longest beginning."""


def kind_of(operator: str) -> str:
    """``c10d::_allgather_base_`` is an all-gather."""
    name = operator.partition("::")[2].partition(".")[0]
    known = [key for key in KINDS if name.startswith(key)]
    return KINDS[max(known, key=len)] if known else name


@dataclass
class Counted:
    """Of the step that is looked at."""

    operators: int = 0
    """Dispatched, views included."""
    launches: int = 0
    """Of them those that a GPU would run: neither views nor empty memory."""
    flops: float = 0.0
    """Of matrix products and attention."""
    product_flops: float = 0.0
    """Of matrix products alone."""
    device_seconds: float = 0.0
    """At the very least: each operator's FLOPs at the peak, or its large tensors at the memory's full speed."""
    waits: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Moment, operator and source line at which the host needs a value from the device."""


@dataclass(frozen=True)
class _Known:
    """Of an operator."""

    is_question: bool
    is_collective: bool
    name: str
    text: str


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)


@dataclass(frozen=True)
class _Result:
    """One tensor: an operand itself, a view of one, or a new one."""

    same: int | None
    view: int | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    state: dict[str, Any] | None = None
    """Of a new fake tensor."""


class Results:
    """Results of operators on fake tensors. Of one process."""

    def __init__(self) -> None:
        self._known: dict[Any, _Result | None] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operator gives."""
        inputs = _key(args, kwargs)
        if inputs is None:
            return func(*args, **kwargs)
        key = (func, torch.get_default_dtype(), *inputs)
        if key not in self._known:
            result = func(*args, **kwargs)
            self._known[key] = _describe(func, args, kwargs, result)
            return result
        known = self._known[key]
        if known is None:
            return func(*args, **kwargs)
        return args[known.same] if known.same is not None else _make(known, args)


def _key(args: Any, kwargs: Any) -> list[Any] | None:
    """What a result follows from; None where that is more than sizes, types and plain values."""
    key: list[Any] = []
    for name, value in kwargs.items():
        key.append(name)
        if not _add(key, value):
            return None
    for value in args:
        if not _add(key, value):
            return None
    return key


def _add(key: list[Any], value: Any) -> bool:
    if type(value) is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided or value.is_conj() or value.is_neg():
            return False
        key += (
            value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device, value.requires_grad,
        )  # fmt: skip
        return True
    if isinstance(value, list | tuple):
        key.append(len(value))
        return all(_add(key, one) for one in value)
    if isinstance(value, _PLAIN):
        key += (type(value), value)  # 1 and 1.0 are equal, and give other types
        return True
    return False


def _describe(func: Any, args: Any, kwargs: Any, result: Any) -> _Result | None:
    """How to make it again; None where torch would not, either."""
    if type(result) is not FakeTensor or result.constant is not None or result.layout is not torch.strided:
        return None
    try:
        result.fake_mode._validate_cache_key(func, args, kwargs)
    except _BypassDispatchCache:
        return None
    for at, value in enumerate(args):
        if value is result:
            return _Result(at)
    if any(value is result for value in kwargs.values()) or result.requires_grad or result.is_conj() or result.is_neg():
        return None
    tensors = [at for at, value in enumerate(args) if isinstance(value, torch.Tensor)]
    if func.is_view and len(tensors) != 1:
        return None
    return _Result(
        None, tensors[0] if func.is_view else None, tuple(result.shape), result.stride(), result.storage_offset(), result.dtype,
        result.fake_device, dict(result.__dict__),
    )  # fmt: skip


def _make(known: _Result, args: Any) -> Any:
    """A fake tensor (torch 2.13, FakeTensor.__new__)."""
    with torch._C._DisableTorchDispatch():
        made = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
        if known.view is not None:
            made.set_(args[known.view].untyped_storage(), known.offset, known.shape, known.stride)
    fake: Any = torch.Tensor._make_subclass(FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=known.device)
    torch._C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(known.state or {})
    return fake


_DEVICE = torch.ops.prim.device.default
_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm)


class Follow(TorchDispatchMode):  # type: ignore[misc]
    """Answers what fake tensors cannot know, and counts everything that passes."""

    def __init__(self, memory: Memory, device: str, *, flops_per_s: float, bytes_per_s: float, length: int) -> None:
        """``flops_per_s`` and ``bytes_per_s``: of the GPU at its best. ``length``: tokens of a row."""
        super().__init__()
        self.memory, self._device, self.length = memory, device, length
        self._flops_per_s, self._bytes_per_s = flops_per_s, bytes_per_s
        self.counted: Counted | None = None
        """Set for the step that is looked at."""
        self.calls: dict[str, list[Call]] = {"loading": []}
        """In their order, by stage: loading, step 1, save, step 2 ..."""
        self.on_copy: Callable[[bool], None] | None = None
        """Told of each copy to the host: whether the host waits for it."""
        self._stage, self._times = "loading", 1
        self._groups: dict[str, tuple[int, int]] = {}
        self._known: dict[Any, _Known] = {}
        self._results = Results()

    def begin(self, stage: str, times: int = 1) -> tuple[str, int]:
        """What follows belongs to this stage, and happens so many times in a real one; returns what was before."""
        before = self._stage, self._times
        self._stage, self._times = stage, times
        return before

    def meet(self, kind: str) -> None:
        """The ranks tell each other values that are no tensors."""
        if dist.is_initialized():
            self.calls.setdefault(self._stage, []).append(Call(kind, dist.get_world_size(), 1, 0, self._times))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled: torch need not switch its compiler off for each operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is _DEVICE and type(args[0]) is FakeTensor:  # a question for the device, of fake tensors alone
            return args[0].device
        kwargs = kwargs or {}
        known = self._known.get(func) or self._know(func)
        if known.is_question:
            return func(*args, **kwargs)
        if known.is_collective:
            self._collective(known.name, args, kwargs)
        if self.on_copy is not None and func is aten.copy_.default and args[1].device.type != args[0].device.type == "cpu":
            self.on_copy(not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)))
        waits, result = self._answer(func, args, kwargs)
        if waits and self.counted is not None:
            self.counted.waits[(self.memory.moment, str(func.overloadpacket), _where())] += self._times
        if result is NotImplemented:
            result = self._results.run(func, args, kwargs)
        if type(result) is FakeTensor:
            leaves = [result]
        else:
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        replaces = func is aten.add.Tensor and _is_engine(sys._getframe().f_back)
        for leaf in leaves:
            self.memory.add(leaf, known.text, replaces=replaces)
        if self.counted is not None:
            self._count(func, args, kwargs, result, leaves)
        return result

    def _know(self, func: Any) -> _Known:
        known = _Known(
            func.namespace == "prim",
            func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name(),
            func.name(),
            str(func),
        )
        self._known[func] = known
        return known

    def _answer(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Whether the host waits for the device here, and a plausible value where only the data would tell."""
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is None:
            return False, NotImplemented
        on_device = first.device.type == self._device
        if (answer := _ANSWERS.get(func)) is not None:
            waits, result = answer(first)
            return waits and on_device, result
        if func is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1]):
            (mask, *_) = args[1]
            return on_device, first.new_empty((mask.numel(), *first.shape[mask.dim() :]))
        if func is aten.repeat_interleave.Tensor:
            size = kwargs.get("output_size")
            tensor = torch.empty((size or self.length,), dtype=first.dtype, device=first.device)
            return on_device and size is None, tensor
        if func is aten._to_copy.default and on_device and not kwargs.get("non_blocking"):
            target = kwargs.get("device")
            return target is not None and torch.device(target).type != self._device, NotImplemented
        return False, NotImplemented

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, results: list[torch.Tensor]) -> None:
        counted = self.counted
        assert counted is not None
        counted.operators += self._times
        if func.is_view or not results or results[0].device.type != self._device or "empty" in func.name():
            return
        if func.namespace in ("c10d", "_c10d_functional") or func is aten.detach.default:
            return
        counted.launches += self._times
        if any(isinstance(one, DTensor) for one in tree_leaves((args, result))):  # of this rank alone
            args, result, results = tree_map(_local, (args, result, results))
        flops = 0.0
        if func.overloadpacket is aten._grouped_mm:  # rows by experts, or, of a weight's gradient, rows that meet rows
            flops = 2.0 * args[0].shape[0] * args[0].shape[1] * args[1].shape[-1]
        elif func.namespace == "torch_attn":
            flops = _varlen_flops(func.name(), args, self.length // 4)
        elif (formula := flop_registry.get(func.overloadpacket)) is not None:
            # The formulas do not know the type that a product may be asked for.
            flops = float(formula(*(a for a in args if not isinstance(a, torch.dtype)), **kwargs, out_val=result))
        tensors = {id(t): t for t in (*(a for a in tree_leaves(args) if isinstance(a, torch.Tensor)), *results)}
        moved = sum(size for t in tensors.values() if (size := _bytes(t)) > CACHE)
        counted.flops += flops * self._times
        if func.overloadpacket in _PRODUCTS:
            counted.product_flops += flops * self._times
        counted.device_seconds += max(flops / self._flops_per_s, moved / self._bytes_per_s) * self._times

    def _collective(self, name: str, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        size = max((_bytes(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)), default=0)
        ranks, stride = 1, 1
        for leaf in leaves:
            group = self._group(leaf)
            if group is not None:
                ranks, stride = group
        kind = kind_of(name)
        if kind == "all-gather" and "functional" in name:  # its operand is the part of this rank
            size *= ranks
        self.calls.setdefault(self._stage, []).append(Call(kind, ranks, stride, size, self._times))

    def _group(self, leaf: Any) -> tuple[int, int] | None:
        if isinstance(leaf, str):
            if leaf not in self._groups:
                try:
                    self._groups[leaf] = _shape(_resolve_process_group(leaf))
                except (RuntimeError, ValueError, LookupError):
                    return None
            return self._groups[leaf]
        if isinstance(leaf, torch.ScriptObject):
            try:
                leaf = dist.ProcessGroup.unbox(leaf)
            except (RuntimeError, TypeError):
                return None
        return _shape(leaf) if isinstance(leaf, dist.ProcessGroup) else None


def _varlen_flops(name: str, args: Any, tokens: int) -> float:
    """FLOPs of attention over packed conversations of so many tokens each: the causal half of two products, of five going back.

    torch's formula takes a conversation for each entry of their beginnings, which in a fake tensor are as many as tokens.
    """
    back = "backward" in name
    rows, heads, size = args[1 if back else 0].shape  # [tokens, heads, size]; going back the gradient is ahead of the queries
    return float(rows * tokens * heads * size * (5 if back else 2))


def _shape(group: Any) -> tuple[int, int]:
    """How many ranks, and how far they lie apart."""
    ranks = dist.get_process_group_ranks(group)
    return len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1


def _is_engine(caller: Any) -> bool:
    """Whether autograd itself adds: two gradients of one tensor. It does so in place where it holds the last reference, but not
    of a subclass as fake tensors are (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace)."""
    return caller is None or caller.f_code.co_name == "_engine_run_backward"


def _where() -> str:
    """The line of the project or of a library whose call waits: the innermost one outside of torch."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if "simulate" in path.parts:
            continue
        parts = path.parts
        for library in _LIBRARIES[:-1]:
            if library in parts:
                at = len(parts) - 1 - parts[::-1].index(library)
                return f"{'/'.join(parts[at:])}:{frame.lineno}"
    return "torch"
