"""The process that runs a recipe's own rewards: ``python -P reward_process.py REQUESTS REPLIES LIFELINE`` (three descriptors).

Foreign code may end its process, wait without end, change what it is given and leave processes behind. So it runs in a child
of this process, which ends all that the child has started, daemons too, as soon as the other end of LIFELINE is closed: with
the run, however that ends. Requests and replies are JSON, and nothing of a reply is believed.

The standard library alone: an interpreter of its own is started for it, without the run's tokens in its environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.abc
import importlib.util
import inspect
import itertools
import json
import math
import os
import select
import signal
import struct
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import asyncio

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
HEAD = struct.Struct(">Q")
"""In front of a request: its bytes."""
_TEXT = 500
"""Characters of an error that are repeated."""
_LOOK_SECONDS = 0.2


class KeptSources(importlib.abc.MetaPathFinder, importlib.abc.ExecutionLoader):
    """Imports modules from the texts that a run keeps of them, before installed ones, as files beside a script are.

    The recipe folder may have other texts by now, or be elsewhere. ``texts``: by name without ``.py``.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:  # noqa: ARG002
        return importlib.util.spec_from_loader(fullname, self) if fullname in self._texts else None

    def get_filename(self, fullname: str) -> str:
        return f"{fullname}.py"

    def get_source(self, fullname: str) -> str:
        return self._texts[fullname]

    def load(self, name: str) -> types.ModuleType:
        """A module of the recipe's own file, as it was when the run was made. Raises whatever it raises."""
        known = sys.modules.get(name)
        if known is not None and getattr(known, "__loader__", None) is self:
            return known
        spec = self.find_spec(name)
        assert spec is not None
        module: types.ModuleType = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(name, module)  # dataclasses and pickle look there for what it defines
        self.exec_module(module)
        return module


def describe(error: BaseException, module: str) -> str:
    """The error, and the line of the recipe's file that raised it. Calls foreign code, which may raise again."""
    try:
        text = str(error)
    except BaseException as again:
        text = f"(its text raises {type(again).__name__})"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == f"{module}.py"]
    return f"{type(error).__name__}: {text[:_TEXT]}" + (f" (line {lines[-1]})" if lines else "")


def _plain(value: Any) -> Any:
    """A scalar or an array of numpy or torch as Python has it. Raises what its class raises, TypeError where it is neither."""
    if callable(convert := getattr(value, "tolist", None)):
        return convert()
    raise TypeError(type(value).__name__)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for all calls, as TRL has it: a client that a reward keeps belongs to the loop that it was made in."""
    import asyncio  # 50 ms, for few

    return asyncio.new_event_loop()


def call(function: Callable[..., Any], module: str, given: Mapping[str, Any], count: int) -> dict[str, Any]:
    """What a reward returns of ``count`` answers: ``{"scores": ...}``, or ``{"wrong": text}``."""
    line = getattr(getattr(function, "__code__", None), "co_firstlineno", None)
    where = f" (line {line})" if line else ""
    calls = list[list[Any]]()
    hooks = {name: lambda *args, kept=name: calls.append([kept, *args]) for name in ("log_extra", "log_metric")}
    before, told = {name: json.dumps(value) for name, value in given.items()}, dict(given)
    if "trainer_state" in told:
        told["trainer_state"] = types.SimpleNamespace(**told["trainer_state"])
    try:
        returned = function(**told, **hooks)
        if inspect.isawaitable(returned):
            returned = _loop().run_until_complete(returned)
    except BaseException as error:
        return {"wrong": f"fails: {describe(error, module)}"}
    for name, value in before.items():
        if value != json.dumps(given[name], default=str):
            return {"wrong": f"changes {name}, which the other rewards and the training read{where}: it may change a copy"}
    kind = type(returned).__name__
    try:
        values = list(itertools.islice(returned, count + 1))
        if len(values) != count or isinstance(returned, (str, bytes, dict)):
            return {"wrong": f"returned {kind} of another length than the {count} answers it was given{where}"}
        scores = [None if value is None else float(value) for value in values]
    except BaseException as error:
        return {"wrong": f"returned what is no number: {describe(error, module)}{where}"}
    if bad := [score for score in scores if score is not None and not math.isfinite(score)]:
        return {"wrong": f"returned {bad[0]}{where}"}
    return {"scores": scores, "calls": calls}


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    modules, kept = dict[str, types.ModuleType](), KeptSources({})
    while len(head := requests.read(HEAD.size)) == HEAD.size:
        asked = json.loads(requests.read(HEAD.unpack(head)[0]))
        if "texts" in asked:
            reply: dict[str, Any] = {"scores": []}
            try:
                if not modules:
                    sys.meta_path.insert(0, kept := KeptSources(asked["texts"]))
                modules[asked["module"]] = kept.load(asked["module"])
            except BaseException as error:
                reply = {"wrong": f"fails: {describe(error, asked['module'])}"}
        else:
            try:
                function = vars(modules[asked["module"]])[asked["name"]]
                reply = call(function, asked["module"], asked["given"], asked["count"])
            except BaseException as error:
                reply = {"wrong": f"fails: {describe(error, asked['module'])}"}
        try:
            text = json.dumps(reply, default=_plain)
        except Exception:  # tolist is foreign
            text = json.dumps({"wrong": "gave log_extra or log_metric what is no text and no number"})
        replies.write(text.encode() + b"\n")
        replies.flush()


def _children() -> list[int]:
    found = list[int]()
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:  # noqa: PTH123
            found += map(int, file.read().split())
    return found


def _end_all() -> None:
    """Kill every process below this one: orphans become its children (PR_SET_CHILD_SUBREAPER), and are killed next."""
    until = time.monotonic() + 10
    while time.monotonic() < until and (alive := _children()):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _guard(child: int, lifeline: int, parent: int) -> int:
    """Wait for the child's end, or the run's; then nothing that was started below is left. The child's exit code."""
    code: int | None = None
    while code is None and os.getppid() == parent and not select.select([lifeline], [], [], _LOOK_SECONDS)[0]:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
    _end_all()
    return 0 if code is None else code


def main(requests: int, replies: int, lifeline: int) -> int:
    """Start the child, and guard it."""
    parent, libc = os.getppid(), ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # the run decides when it ends
        signal.signal(number, signal.SIG_IGN)
    child = os.fork()
    if child:
        os.close(requests)
        os.close(replies)
        code = _guard(child, lifeline, parent)
        return code if code >= 0 else 128 - code
    os.close(lifeline)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    with open(requests, "rb") as asked, open(replies, "wb") as told:
        os.set_inheritable(requests, False)
        os.set_inheritable(replies, False)
        _serve(asked, told)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
