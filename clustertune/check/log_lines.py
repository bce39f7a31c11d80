"""NCCL's lines out of any text: a rank's log, a job's output of many ranks, what somebody pasted into an issue.

Standard library only, Python 3.8 or later. A line of NCCL is, by version (``src/debug.cc``)::

    host:pid:tid [gpu] NCCL INFO text
    host:pid:tid [gpu] file.cc:12 NCCL WARN text                        before 2.27
    [2026-01-31 12:00:00] host:pid:tid [gpu] file.cc:12 NCCL WARN text          2.27
    [2026-01-31 12:00:00] host:pid:tid [gpu] file.cc:12 (function) NCCL WARN text       later ones
    host:pid:tid [gpu] 12.345 function:12 NCCL TRACE text               a build with TRACE=1
    NCCL version 2.29.7+cuda13.1                                        rank 0 alone, before 2.27

Launchers put more in front of it (``0: ``, ``[rank0]:``, ``(Worker pid=7) ``), people cut the host away, and where ranks write
into one file a second line may begin in the middle of a first. So the level is looked for, and what stands before it is read
backwards. Time is linear in the size of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

INFO, WARN, TRACE, ERROR, TEXT = "INFO", "WARN", "TRACE", "ERROR", "TEXT"
"""``ERROR``: what torch says of a failed call of NCCL; ``TEXT``: a line of another program that speaks of NCCL."""

MAX_MESSAGE = 4096
"""Characters of a message that are read: NCCL's own buffer holds 1024."""
_MAX_HEAD = 400
"""Characters before the level in which host, process and place are looked for."""

_LEVEL = re.compile(r"NCCL (INFO|WARN|TRACE|CALL|ABORT)(?: |$)")
_OLD_LEVEL = re.compile(r"\[\d{1,4}\] (?:[\w./]{1,200}:\d{1,6} )?(INFO|WARN) ")  # 2.2 and 2.3 had no NCCL in front
_SIMPLE = re.compile(r"([A-Za-z0-9][\w.-]{0,255}):(\d{1,10}):(\d{1,10}) \[(\d{1,4})\] (?:(\S{1,200}:\d{1,6}) )?$")
_COLOUR = re.compile(r"\x1b\[[0-9;?]{0,32}[A-Za-z]|ESC\[[0-9;]{0,32}m")
_PLACE = re.compile(r"[^\s:]{1,200}:\d{1,6}$")
_GPU = re.compile(r"\[(\d{1,4})\]$")
_TIME = re.compile(r"\d{1,16}\.\d{1,9}$")
_NOT_HOST = re.compile(r"[^A-Za-z0-9._-]")
_GLUED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?")
"""A time that a log service puts in front of a line without a space."""
_WHO = re.compile(r"(?<![\w.-])([A-Za-z0-9][\w.-]{0,255}):(\d{1,10}):\d{1,10} \[(\d{1,4})\] ")

_MARKS = (
    "CCL version",
    "NCCL_",
    "nccl",
    "NCCL error",
    "NCCL Error",
    "NCCL failure",
    "NCCL operations",
    "atchdog",
    "Avg bus bandwidth",
    "Out of bounds values",
    "Duplicate GPU",
    "Cuda failure",
    "CUDA failure",
    "Last error",
    "ibv_",
)
"""One of them is in every line of other programs that says something about NCCL."""
_FAILED = ("NCCL error", "NCCL Error", "NCCL failure", "NCCL operation nccl", "ncclRemoteError", "ncclSystemError")
"""Words of torch, vLLM, nccl-tests and XLA about a call that failed."""


class Record(NamedTuple):
    """One thing that NCCL, or another program about it, says."""

    level: str
    text: str
    host: str = ""
    """As NCCL writes it: without a domain. Empty: the line does not say."""
    pid: str = ""
    gpu: str = ""
    """CUDA's index of the GPU."""
    place: str = ""
    """Source file and line."""


def clean(text: str) -> str:
    """Without colours, carriage returns and the entities of a web page."""
    if "\x1b" in text or "ESC[" in text:
        text = _COLOUR.sub("", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "&gt;" in text:
        text = text.replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&")
    return text


def records(text: str) -> Iterator[Record]:
    """Everything in a text that NCCL said, in its order; any text is taken."""
    error_follows = False
    for line in clean(text).split("\n"):
        if "NCCL " in line:
            heads = list(_LEVEL.finditer(line))
            if heads:
                error_follows = False
                yield from _split(line, heads)
                continue
        if error_follows:
            error_follows = False
            yield Record(ERROR, line[:MAX_MESSAGE])
        elif any(mark in line for mark in _MARKS):
            error_follows = "Last error" in line
            level = ERROR if any(mark in line for mark in _FAILED) else TEXT
            yield Record(level, line[:MAX_MESSAGE])
        elif "] " in line and ("INFO " in line or "WARN " in line):
            old = _OLD_LEVEL.search(line[:_MAX_HEAD])
            if old:
                host, pid, gpu, _, _ = _head(line, 0, old.start(1))
                if pid:
                    yield Record(old.group(1), line[old.end() : old.end() + MAX_MESSAGE], host, pid, gpu)


def _split(line: str, heads: list[re.Match[str]]) -> Iterator[Record]:
    """The records of one physical line: usually one."""
    parts = []
    end = 0
    for head in heads:
        parts.append(_head(line, end, head.start()))
        end = head.end()
    for index, head in enumerate(heads):
        host, pid, gpu, place, _ = parts[index]
        stop = parts[index + 1][4] if index + 1 < len(heads) else len(line)
        text = line[head.end() : min(stop, head.end() + MAX_MESSAGE)]
        yield Record(head.group(1), text.rstrip(), host, pid, gpu, place)


def _head(line: str, begin: int, end: int) -> tuple[str, str, str, str, int]:
    """Host, process, GPU and place before a level, and where in the line they begin."""
    begin = max(begin, end - _MAX_HEAD)
    simple = _SIMPLE.match(line, begin, end)
    if simple:
        return simple.group(1), simple.group(2), simple.group(4), simple.group(5) or "", begin
    place = gpu = ""
    words = [(found.group(), found.start()) for found in re.finditer(r"\S+", line[begin:end])]
    start = end - begin

    def last() -> str:
        return words[-1][0] if words else ""

    if last().startswith("(") and last().endswith(")"):
        words.pop()
    if "](http" in last():  # a page has made a link of file.cc:12
        words.pop()
    elif _PLACE.match(last()) and last().count(":") == 1:
        place, start = words.pop()
    if _TIME.match(last()):
        words.pop()
    found = _GPU.search(last())
    if found and found.start() == 0:
        gpu, start = found.group(1), words.pop()[1]
    parts = last().rsplit(":", 2)
    if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
        name = _GLUED.sub(" ", parts[0], count=1)
        # Somebody may have written <node> for the name of a host.
        host = name[name.rfind("<") :] if name.endswith(">") and "<" in name else _NOT_HOST.split(name)[-1]
        return host, parts[1], gpu, place, begin + words[-1][1] + len(parts[0]) - len(host)
    # The name of a function with spaces in it may stand between (plugins of other makers).
    for who in _WHO.finditer(line, begin, end):
        return who.group(1), who.group(2), who.group(3), place, who.start()
    return "", "", gpu, place, begin + start
