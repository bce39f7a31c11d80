"""The Python side of a CUDA that is not there: enough of ``torch.cuda`` for the libraries that ask about devices and streams.

Nothing computes: kernels run on fake tensors (shapes, types, devices, storages), so that dispatch, places, memory and
communication are checked, and no value. For a child process alone: what is replaced stays replaced.
"""

from __future__ import annotations

import threading
import types
from collections import Counter, defaultdict
from typing import Any

import torch
from torch._subclasses import FakeTensor

from clustertune.simulate.guard import Guard


class DeviceJournal:
    """What the threads of this process do with devices and streams, and whose random state a device is given."""

    def __init__(self) -> None:
        self.devices: dict[str, set[int]] = defaultdict(set)
        """By thread: a context of CUDA is made on each device that a thread is put on."""
        self.waits: Counter[tuple[str, str, str]] = Counter()
        """Thread, a stream of it, and the stream that it waits for."""
        self.random: list[tuple[int, list[int]]] = []
        """Device, and the rank and device whose state it was given."""
        self.reseeded = False
        """Random numbers began anew."""
        self.faults: Counter[str] = Counter()
        """What would go wrong on a GPU."""
        self._ordered: set[int] = set()
        self._unfinished: set[int] = set()

    def put(self, index: int) -> None:
        name = threading.current_thread().name
        self.devices["autograd" if name.startswith("Dummy") else name].add(index)

    def waited(self, stream: FakeStream, other: FakeStream | None) -> None:
        if other is not None:
            self.waits[threading.current_thread().name, stream.name, other.name] += 1
            if other.is_default:
                self._ordered.add(stream.stream_id)

    def begin(self) -> None:
        """A save begins: training has changed everything since."""
        self._ordered.clear()
        self._unfinished.clear()

    def copied(self, waits: bool) -> None:
        """The current stream copies from the device to host memory, and the host ``waits`` for it or does not."""
        stream = _current_stream()
        name = threading.current_thread().name
        if not stream.is_default and stream.stream_id not in self._ordered:
            self.faults[f"thread {name} copies on {stream.name}, which has not waited for the stream that trains"] += 1
        if not waits:
            self._unfinished.add(stream.stream_id)

    def reached(self, stream: FakeStream | None) -> None:
        """The host has waited for a stream; None: for all."""
        self._unfinished -= self._unfinished if stream is None else {stream.stream_id}

    def read(self) -> None:
        """The host reads what was copied."""
        if self._unfinished:
            self.faults["host memory is read before the copy into it has ended"] += 1


JOURNAL = DeviceJournal()
"""Of this process."""


class FakeStream:
    """Work is in order everywhere: no stream waits. Each thread begins on the default stream of its device."""

    _made = 0

    def __init__(self, device: Any = None, priority: int = 0, *, is_default: bool = False, **kwargs: Any) -> None:
        del priority, kwargs
        chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        index = torch.cuda.current_device() if chosen.index is None else chosen.index
        self.device, self.device_index, self.device_type = torch.device("cuda", index), index, 1
        self.is_default, self.cuda_stream = is_default, 0
        FakeStream._made += not is_default
        self.stream_id = 0 if is_default else FakeStream._made
        self.name = "the default stream" if is_default else f"stream {self.stream_id}"

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, other: FakeStream) -> None:
        JOURNAL.waited(self, other)

    def wait_event(self, event: FakeEvent) -> None:
        JOURNAL.waited(self, event.stream)

    def synchronize(self) -> None:
        JOURNAL.reached(self)

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        event = event or FakeEvent()
        event.record(self)
        return event

    def __enter__(self) -> FakeStream:
        _entered().append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _entered().pop()


class FakeEvent:
    """Reached as soon as it is recorded; a second lies between any two."""

    stream: FakeStream | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: FakeStream | None = None) -> None:
        self.stream = stream or _current_stream()

    def wait(self, stream: FakeStream | None = None) -> None:
        JOURNAL.waited(stream or _current_stream(), self.stream)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        JOURNAL.reached(self.stream)

    def elapsed_time(self, other: Any) -> float:
        del other
        return 1000.0


class _OnStream:
    """``torch.cuda.stream``: to leave it puts the thread on the device that it came from, and makes a context there
    (StreamContext.__exit__). A thread that was put on none came from device 0."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = torch.cuda.current_device()
            torch.cuda.set_device(self._stream.device_index)
            self._stream.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self._stream is not None:
            self._stream.__exit__(*exc)
            torch.cuda.set_device(self._before)


_LOCAL = threading.local()


def _entered() -> list[FakeStream]:
    """The streams that this thread has entered."""
    if not hasattr(_LOCAL, "entered"):
        _LOCAL.entered = []
    streams: list[FakeStream] = _LOCAL.entered
    return streams


def _current_stream(device: Any = None) -> FakeStream:
    return _entered()[-1] if _entered() else FakeStream(device, is_default=True)


def install(guard: Guard, *, rank: int, devices: int, name: str, memory: int, capability: tuple[int, int]) -> None:
    """Have ``torch.cuda`` and ``torch.accelerator`` speak of ``devices`` GPUs of one kind. ``memory``: bytes of each.

    After the libraries have been imported: some look for compiled kernels while they are.
    """

    def index_of(device: Any) -> int | None:
        if device is None or isinstance(device, int):
            return device
        index: int | None = torch.device(device).index
        return index

    def put(device: Any) -> None:
        index = index_of(device)
        if index is not None and index >= 0:
            JOURNAL.put(index)
            guard.set(index)

    def seed(*_: Any, **__: Any) -> None:
        JOURNAL.reseeded = True

    def random_state(device: Any = "cuda") -> torch.Tensor:
        index = index_of(device)
        return states[guard.current() if index is None else index]

    def take_random_state(state: torch.Tensor, device: Any = "cuda") -> None:
        index = index_of(device)
        whose = [] if isinstance(state, FakeTensor) else state.tolist()
        JOURNAL.random.append(
            (guard.current() if index is None else index, [256 * whose[0] + whose[1], whose[2]] if whose else [])
        )

    class OnDevice:
        def __init__(self, device: Any) -> None:
            self._device = device

        def __enter__(self) -> None:
            self._before = guard.current()
            put(self._device)

        def __exit__(self, *exc: object) -> None:
            guard.set(self._before)

    def take_random_states(states: list[torch.Tensor]) -> None:
        for index, one in enumerate(states):
            take_random_state(one, index)

    properties = types.SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=memory, multi_processor_count=132, gcnArchName="",
        is_integrated=False, warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448, L2_cache_size=50 * 2**20, uuid="0",
    )  # fmt: skip
    nothing, zero = (lambda *_, **__: None), (lambda *_, **__: 0)
    # Of each device a state that says whose it is: rank and device, two bytes each.
    states = [torch.tensor([rank >> 8, rank & 255, index], dtype=torch.uint8) for index in range(devices)]
    answers: dict[str, Any] = {
        **dict.fromkeys(("empty_cache", "init", "_lazy_init", "set_stream", "reset_peak_memory_stats"), nothing),
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed_all"), seed),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), zero),
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), lambda *_, **__: True),
        "utilization": zero, "initial_seed": zero, "memory_stats": lambda *_: {}, "mem_get_info": lambda *_: (memory, memory),
        "device_count": lambda: devices, "current_device": guard.current, "set_device": put, "device": OnDevice,
        "Stream": FakeStream, "Event": FakeEvent, "stream": _OnStream, "current_stream": _current_stream,
        "default_stream": lambda device=None: FakeStream(device, is_default=True), "is_current_stream_capturing": lambda: False,
        "get_device_name": lambda *_: name, "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties, "synchronize": lambda *_: JOURNAL.reached(None),
        "get_rng_state": random_state, "set_rng_state": take_random_state, "get_rng_state_all": lambda: list(states),
        "set_rng_state_all": take_random_states,
    }  # fmt: skip
    for key, value in answers.items():
        setattr(torch.cuda, key, value)
    torch.cuda.default_generators = tuple(torch.Generator() for _ in range(devices))
    for key in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, key, answers[key])
    torch.version.cuda = "13.0"
    accelerator = {
        "is_available": lambda: True, "current_accelerator": lambda *_, **__: torch.device("cuda"), "synchronize": nothing,
        "device_count": lambda: devices, "current_device_index": guard.current, "set_device_index": put,
        "current_stream": _current_stream,
    }  # fmt: skip
    for key, value in accelerator.items():
        setattr(torch.accelerator, key, value)
