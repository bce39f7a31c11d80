"""Requests to the servers of one's own job: whether one answers, an adapter to take, prompts to answer."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy of the site would be asked for this job's own servers."""
GONE = (OSError, HTTPException)
"""What a server that ends leaves: no connection, or half of an answer."""
LOAD_SECONDS = 300.0
"""Until a server has read an adapter."""


def ask(url: str, seconds: float = 5.0, key: str | None = None) -> dict[str, Any] | None:
    """What a server says there; None where it says nothing. ``key``: with which it is asked."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - http, of our own servers
    try:
        with _DIRECT.open(request, timeout=seconds) as reply:
            body: dict[str, Any] = json.loads(reply.read() or b"{}")
            return body
    except (OSError, HTTPException, ValueError, RecursionError):  # one that ends in the middle of a reply leaves half of it
        return None


def post(url: str, body: Mapping[str, Any], key: str, seconds: float) -> bytes:
    """What a server answers to a request. Raises HTTPError where it refuses, and one of :data:`GONE` where it ends."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310 - http, of our own servers
    with _DIRECT.open(request, timeout=seconds) as reply:
        content: bytes = reply.read()
    return content


def load_adapter(url: str, key: str, name: str, folder: Path) -> bool:
    """Have a server read an adapter; whether it has one of this name now."""
    try:
        post(f"{url}/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())}, key, LOAD_SECONDS)
    except urllib.error.HTTPError as error:
        return b"already been loaded" in error.read()  # for another client
    except GONE:
        return False
    return True


def unload_adapter(url: str, key: str, name: str) -> None:
    """Have a server forget an adapter; one that does not know it, or is gone, is left alone."""
    with contextlib.suppress(*GONE):
        post(f"{url}/v1/unload_lora_adapter", {"lora_name": name}, key, LOAD_SECONDS)
