"""Requests to the servers of one's own job: whether one answers, an adapter to take, prompts to answer.

Each request has a connection of its own, on which the server proves first that it has the job's key
(:mod:`clustertune.launch.guard.vllm_guard`). Only then are the key, paths and prompts sent, on the same connection: who takes
the port in between has another one. Proxies of the environment are not asked, and no redirect is followed.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import json
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead, NotConnected
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from clustertune.launch.guard import vllm_guard

GONE = (OSError, HTTPException)
"""What a server that ends leaves: no connection, or half of an answer."""
LOAD_SECONDS = 300.0
"""Until a server has read an adapter."""
PROOF_SECONDS = 60.0
"""Until it has proved the key: the event loops of a busy server, and of a client with hundreds of requests, take their time."""
REST_SECONDS = 60.0
"""From the first byte of an answer to its last: vLLM sends an answer at once when it is whole."""
FEW_BYTES = 1 << 20
"""Of an answer without tokens, or of what surrounds them."""
TOKEN_BYTES = 1 << 10
"""Of an answer for each token of prompt and answer: its id, its log-probability, its text."""
_PART = 1 << 16


class NotOurs(ValueError):
    """What listens there does not prove that it has the job's key."""


class Malformed(ValueError):
    """What a server of ours has answered is no answer."""


class TooSlow(Malformed):
    """An answer that did not come in time, or began and did not end."""


@dataclass
class Limits:
    """What one exchange may take from now on."""

    until: float
    """The deadline, by the monotonic clock."""
    left: int
    """Bytes."""

    def take(self, count: int) -> None:
        """Count bytes. Raises Malformed where they are too many."""
        self.left -= count
        if self.left < 0:
            raise Malformed("an answer that does not end, or is far larger than what was asked for")

    def seconds(self) -> float:
        """Until the deadline. Raises TooSlow behind it."""
        if (left := self.until - time.monotonic()) <= 0:
            raise TooSlow("an answer that did not come in time, or began and did not end")
        return left


class _Limited(io.RawIOBase):
    """What a socket receives, within limits: a socket's own timeout begins anew with each byte."""

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        self._sock, self._limits, self._begun = sock, limits, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._limits.seconds())
        try:
            count = self._sock.recv_into(buffer)
        except TimeoutError:
            self._limits.seconds()  # raises
            raise
        if not self._begun:
            self._begun, self._limits.until = True, min(self._limits.until, time.monotonic() + REST_SECONDS)
        self._limits.take(count)
        return count


class _Connection(HTTPConnection):
    """One connection, never made again behind the proof."""

    auto_open = 0

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        super().__init__(str(parts.hostname), parts.port)
        self.address = parts.netloc
        self._limits = Limits(0.0, 0)

    def exchange(self, path: str, body: bytes | None, headers: Mapping[str, str], limits: Limits) -> tuple[int, bytes]:
        """Status and body of one answer. Raises one of :data:`GONE`, and Malformed."""
        if self.sock is None:
            raise NotConnected("the connection ended behind the proof")
        self.sock.settimeout(limits.seconds())
        self._limits = limits
        self.request("GET" if body is None else "POST", path, body, dict(headers))
        reply, parts = self.getresponse(), bytearray()
        while part := reply.read(_PART):  # in parts: a header may announce any length
            parts += part
        return reply.status, bytes(parts)

    def response_class(self, sock: socket.socket, **more: Any) -> HTTPResponse:  # type: ignore[override]
        """A reader of an answer within the limits of the exchange."""
        return HTTPResponse(_Source(sock, self._limits), **more)  # type: ignore[arg-type]


class _Source:
    """What :class:`HTTPResponse` needs of a socket."""

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        self._sock, self._limits = sock, limits

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Limited(self._sock, self._limits))


def new_nonce() -> str:
    """A number that nobody knows ahead, in hex."""
    return secrets.token_hex(vllm_guard.NONCE_BYTES)


def require_proof(answer: bytes, key: str, address: str, nonce: str) -> None:
    """Raise NotOurs where an answer does not prove the key."""
    if not hmac.compare_digest(answer, vllm_guard.prove(key, address, nonce).encode()):
        raise NotOurs("what listens there does not prove that it has this job's key")


def request(
    url: str, path: str, key: str, body: Mapping[str, Any] | None = None, *, seconds: float = 5.0, limit: int = FEW_BYTES
) -> tuple[int, bytes]:
    """Status and body of a server's answer, once it has proved the key. ``url``: without a path.

    ``seconds``: until the answer begins; its rest has :data:`REST_SECONDS`. ``limit``: bytes of it in all. Raises one of
    :data:`GONE` where the server ends, NotOurs, Malformed.
    """
    sent = None if body is None else json.dumps(body).encode()
    headers, nonce = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}, new_nonce()
    connection = _Connection(url)
    try:
        connection.timeout = min(seconds, PROOF_SECONDS)
        connection.connect()
        limits = Limits(time.monotonic() + PROOF_SECONDS, _PART)
        try:
            status, answer = connection.exchange(f"{vllm_guard.PATH}?{nonce}", None, {}, limits)
        except TooSlow as error:  # it may be busy, or starting
            raise TimeoutError(str(error)) from None
        except (OSError, IncompleteRead, NotConnected):
            raise
        except (ValueError, HTTPException):
            status, answer = 0, b""
        require_proof(answer if status == 200 else b"", key, connection.address, nonce)
        return connection.exchange(path, sent, headers, Limits(time.monotonic() + seconds, limit))
    except (ValueError, RecursionError) as error:  # of the standard library's own reader, too
        raise error if isinstance(error, (NotOurs, Malformed)) else Malformed(f"no HTTP: {error}") from None
    finally:
        connection.close()


def ask(url: str, path: str, key: str, seconds: float = 5.0) -> dict[str, Any] | None:
    """What a server of ours says there; None where it says nothing of use. Raises NotOurs."""
    try:
        status, content = request(url, path, key, seconds=seconds)
        body = json.loads(content or b"{}")
    except NotOurs:
        raise
    except (*GONE, ValueError, RecursionError):  # one that ends in the middle of a reply leaves half of it
        return None
    return body if status == 200 and isinstance(body, dict) else None


def load_adapter(url: str, key: str, name: str, folder: Path) -> str | None:
    """Have a server read an adapter; None where it has one of this name now, else why not.

    Raises one of :data:`GONE`, NotOurs, Malformed.
    """
    asked = {"lora_name": name, "lora_path": str(folder.resolve())}
    status, content = request(url, "/v1/load_lora_adapter", key, asked, seconds=LOAD_SECONDS)
    if status == 200 or b"already been loaded" in content:  # for another client
        return None
    return f"does not take the adapter: {status} {shown(content)}"


def unload_adapter(url: str, key: str, name: str) -> None:
    """Have a server forget an adapter; one that does not know it, or is gone, is left alone."""
    with contextlib.suppress(*GONE, ValueError):
        request(url, "/v1/unload_lora_adapter", key, {"lora_name": name}, seconds=LOAD_SECONDS)


def is_log_probability(value: Any) -> bool:
    """Whether a value of JSON is a finite number up to 0."""
    return type(value) in (int, float) and -sys.float_info.max <= value <= 0


def shown(content: bytes) -> str:
    """The beginning of an answer, for a message."""
    return content[:300].decode(errors="replace")
