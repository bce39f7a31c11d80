"""The Python side of a CUDA that is not there: enough of ``torch.cuda`` for the libraries that ask about devices and streams.

Nothing computes: kernels run on fake tensors (shapes, types, devices, storages), so that dispatch, places, memory and
communication are checked, and no value. For a child process alone: what is replaced stays replaced.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from clustertune.simulate.guard import Guard


class FakeStream:
    """Work is in order everywhere: no stream waits."""

    _entered: list[FakeStream] = []  # noqa: RUF012 - the thread's own would be a copy of it

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        del priority, kwargs
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        index = torch.cuda.current_device() if found.index is None else found.index
        self.device, self.device_index, self.device_type = torch.device("cuda", index), index, 1
        self.stream_id, self.cuda_stream = id(self), 0

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, other: Any) -> None:
        """Order is given."""

    wait_event = wait_stream

    def synchronize(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or FakeEvent()

    def __enter__(self) -> FakeStream:
        FakeStream._entered.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        FakeStream._entered.pop()


class FakeEvent:
    """Reached as soon as it is recorded; a second lies between any two."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        del other
        return 1000.0


class _OnStream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self._stream is not None:
            self._stream.__exit__(*exc)


def _current_stream(device: Any = None) -> FakeStream:
    return FakeStream._entered[-1] if FakeStream._entered else FakeStream(device)


def install(guard: Guard, *, devices: int, name: str, memory: int, capability: tuple[int, int]) -> None:
    """Have ``torch.cuda`` and ``torch.accelerator`` speak of ``devices`` GPUs of one kind. ``memory``: bytes of each.

    After the libraries have been imported: some look for compiled kernels while they are.
    """

    def index_of(device: Any) -> int | None:
        if device is None or isinstance(device, int):
            return device
        found: int | None = torch.device(device).index
        return found

    def put(device: Any) -> None:
        index = index_of(device)
        if index is not None and index >= 0:
            guard.set(index)

    class OnDevice:
        def __init__(self, device: Any) -> None:
            self._device = device

        def __enter__(self) -> None:
            self._before = guard.current()
            put(self._device)

        def __exit__(self, *exc: object) -> None:
            guard.set(self._before)

    properties = types.SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=memory, multi_processor_count=132, gcnArchName="",
        is_integrated=False, warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448, L2_cache_size=50 * 2**20, uuid="0",
    )  # fmt: skip
    nothing, zero = (lambda *_, **__: None), (lambda *_, **__: 0)
    state = torch.get_rng_state()
    answers: dict[str, Any] = {
        **dict.fromkeys(("synchronize", "empty_cache", "init", "_lazy_init", "set_stream", "reset_peak_memory_stats"), nothing),
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed_all", "set_rng_state", "set_rng_state_all"), nothing),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), zero),
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), lambda *_, **__: True),
        "utilization": zero, "initial_seed": zero, "memory_stats": lambda *_: {}, "mem_get_info": lambda *_: (memory, memory),
        "device_count": lambda: devices, "current_device": guard.current, "set_device": put, "device": OnDevice,
        "Stream": FakeStream, "Event": FakeEvent, "stream": _OnStream, "current_stream": _current_stream,
        "default_stream": lambda device=None: FakeStream(device), "is_current_stream_capturing": lambda: False,
        "get_device_name": lambda *_: name, "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties, "get_rng_state": lambda *_: state.clone(),
        "get_rng_state_all": lambda: [state.clone()] * devices,
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
