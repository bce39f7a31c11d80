"""Python code that asks for the network in a rehearsal without one: refused, and recorded with host, port and call stack.

``unshare --net`` cuts the network off (staging/verify.py). This hook beside it is our own because neither the namespace nor
``HF_HUB_OFFLINE`` says which library asked for what where the library swallows the error, and because many sites allow no user
namespaces.

Standard library only, and loaded by its file: as ``sitecustomize`` of every Python process of the rehearsal, children included
(:func:`write_site`). Loopback, Unix sockets and this machine's own name are no network.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

LOG = "CLUSTERTUNE_NETWATCH"
"""The variable that names the file to write into; one JSON object a line."""
STEP = "CLUSTERTUNE_NETWATCH_STEP"
"""The variable that says what is being rehearsed."""
_FRAMES = 60
_TRANSPORT = {
    "socket", "ssl", "http", "urllib", "urllib3", "requests", "httpx", "httpcore", "anyio", "asyncio", "aiohttp", "h11", "h2",
    "concurrent", "threading", "selectors", "contextlib", "ftplib", "smtplib", "xmlrpc", "importlib", "runpy", "functools",
    "tenacity", "backoff", "fsspec", "sitecustomize", "tqdm", "_pytest", "site", "httpx_aiohttp", "websocket", "websockets",
}  # fmt: skip
"""Libraries that carry what others ask for: their caller is named."""
_CONNECTS = ("socket.connect", "socket.sendto", "socket.sendmsg")
_LOOKS_UP = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo")
_WATCHED = frozenset({*_CONNECTS, *_LOOKS_UP})
_busy = threading.local()


def install(log: str) -> None:
    """Watch this process from now on; a hook of the interpreter cannot be taken out again."""
    own = _own_names()

    def hook(event: str, arguments: Any) -> None:
        if event not in _WATCHED or getattr(_busy, "on", False):
            return
        _busy.on = True
        try:
            found = _wanted(event, arguments, own)
            if found is None:
                return
            _write(log, event, *found)
        finally:
            _busy.on = False
        if event in _LOOKS_UP:
            raise socket.gaierror(socket.EAI_AGAIN, "no network in this rehearsal")
        raise OSError(errno.ENETUNREACH, "no network in this rehearsal")

    sys.addaudithook(hook)


def _own_names() -> set[str]:
    name = socket.gethostname().lower()
    return {"", "localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback", name, name.split(".")[0]}


def _wanted(event: str, arguments: Any, own: set[str]) -> tuple[str, Any] | None:
    """Host and port that were asked for; None where that is this machine."""
    if event in _CONNECTS:
        address = arguments[1] if len(arguments) > 1 else None
        family = getattr(arguments[0], "family", None)
        if family not in (socket.AF_INET, socket.AF_INET6) or not isinstance(address, tuple):
            return None  # a Unix socket, netlink, packets; or connected before
        host, port = address[0], address[1]
    elif event == "socket.getnameinfo":
        host, port = arguments[0][0], arguments[0][1]
    else:
        host, port = arguments[0], arguments[1] if len(arguments) > 1 else None
    text = host.decode("ascii", "replace") if isinstance(host, (bytes, bytearray)) else str("" if host is None else host)
    return None if is_local(text, own) else (text, port)


def is_local(host: str, own: set[str]) -> bool:
    """Whether an address or a name means this machine."""
    if host.lower().rstrip(".") in own or host.lower().endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback or address.is_unspecified


def _write(log: str, event: str, host: str, port: Any) -> None:
    stack = _stack()
    line = {
        "event": event,
        "host": host,
        "port": port if isinstance(port, (int, str, type(None))) else str(port),
        "library": _library(stack),
        "stack": ["{}:{} {}".format(*frame[1:]) for frame in stack[:_FRAMES]],
        "step": os.environ.get(STEP, ""),
        "process": os.getpid(),
        "program": " ".join(getattr(sys, "orig_argv", None) or sys.argv)[:500],
        "time": time.time(),
    }
    data = (json.dumps(line) + "\n").encode()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _stack() -> list[tuple[str, str, int, str]]:
    """Module, file, line and function of the callers, the nearest first."""
    found = []
    frame: Any = sys._getframe(3)
    while frame is not None:
        code = frame.f_code
        found.append((str(frame.f_globals.get("__name__", "")), code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return found


def _library(stack: list[tuple[str, str, int, str]]) -> str:
    """Who tried: the nearest caller that is not a transport, by its package, or by its file where it has none."""
    for name, file, _line, _function in stack:
        top = name.split(".")[0]
        if top in _TRANSPORT or file.startswith("<frozen"):
            continue
        if top in ("__main__", "__mp_main__", ""):
            return Path(file).name
        return top
    return stack[0][0].split(".")[0] if stack else "unknown"


def write_site(folder: Path) -> None:
    """Have ``folder``, first in PYTHONPATH, install the hook in every Python process; the next sitecustomize runs too."""
    text = SITE.format(here=str(Path(__file__).absolute()), folder=str(folder.absolute()))
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")


SITE = """import importlib.util, os, sys
_log = os.environ.get("CLUSTERTUNE_NETWATCH")
if _log:
    _spec = importlib.util.spec_from_file_location("sitecustomize_netwatch", {here!r})
    _watch = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_watch)
    _watch.install(_log)
for _entry in sys.path:
    _file = os.path.join(_entry, "sitecustomize.py")
    if os.path.isfile(_file) and os.path.abspath(_entry) != {folder!r}:
        _spec = importlib.util.spec_from_file_location("sitecustomize_next", _file)
        _next = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(_next)
        break
"""
