"""The door of a vLLM server that belongs to one job: ``vllm serve --middleware vllm_guard.KeyGuard``.

The server proves that it has the job's key before anybody sends it the key, a path or a prompt: it answers a number drawn by
the client (nonce) with an HMAC of that number and of its own address. Who has taken the server's port cannot, nor by asking
another server of the job. vLLM 0.30 asks for the key below ``/v1`` only (``AuthenticationMiddleware``,
vllm/entrypoints/serve/utils/server_utils.py); here nothing but the proof is answered without it.

vLLM's Python imports this file alone: it needs the standard library.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

PATH = "/clustertune/proof"
KEY, ADDRESS = "VLLM_API_KEY", "CLUSTERTUNE_SERVER_ADDRESS"
"""Variables of the server's environment: the key, which vLLM reads too, and ``host:port`` as the clients call it."""
NONCE_BYTES = 32
_NONCE = re.compile(rb"[0-9a-f]{%d}" % (2 * NONCE_BYTES))

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def prove(key: str, address: str, nonce: str) -> str:
    """The proof in hex: HMAC-SHA-256 by the key over the server's address and the client's nonce (hex)."""
    return hmac.new(key.encode(), f"clustertune server\0{address}\0{nonce}".encode(), hashlib.sha256).hexdigest()


class KeyGuard:
    """ASGI middleware: answers the proof, and lets through who has the key."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app, self._key, self._address = app, os.environ[KEY], os.environ[ADDRESS]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["path"] == PATH and _NONCE.fullmatch(nonce := scope["query_string"]):
            await _reply(send, 200, prove(self._key, self._address, nonce.decode()))
        elif hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), f"Bearer {self._key}".encode()):
            await self._app(scope, receive, send)
        else:
            await _reply(send, 401, "the job's key is missing")


async def _reply(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
