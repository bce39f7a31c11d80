"""What was read from the installed libraries' source, kept for the next process: parsing takes 0.3 s, reading it back 0.01 s.

It lies in ``clustertune`` in the user's cache folder (``XDG_CACHE_HOME``, or ``~/.cache``) and may be deleted at any time.
A fact belongs to the contents of the files that it was read from, and to the code that read it: where one of these is another,
it is read anew. A folder that is missing, full, damaged or somebody else's means that each process reads for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from clustertune.config.source import content_digest, looked_at, unwatch, watch
from clustertune.errors import UserError

Fact = TypeVar("Fact")
Sources = frozenset[tuple[str, str]]

_MAX_BYTES = 4 << 20
"""More than any fact takes; what is larger is not ours."""


def remembered(read: Callable[..., Fact]) -> Callable[..., Fact]:
    """Keep what a function reads with :func:`clustertune.config.source.parse_module` and returns as JSON values.

    Its arguments are texts. A value that JSON would change (a tuple, a number as a key) is kept in this process only.
    Callers share the value and must not change it.
    """
    known: dict[tuple[str, ...], tuple[Fact, Sources]] = {}
    code = _code_digest(read)

    @wraps(read)
    def recall(*words: str) -> Fact:
        if words not in known:
            path = _path(f"{read.__module__.rpartition('.')[2]}.{read.__name__.strip('_')}", words)
            found = _load(path, code) if path and code else None
            if found is None:
                found = _read(read, words)
                if path and code:
                    _store(path, code, *found)
            known[words] = found
        value, sources = known[words]
        for package, relative in sources:
            looked_at(package, relative)
        return value

    return recall


def _read(read: Callable[..., Fact], words: tuple[str, ...]) -> tuple[Fact, Sources]:
    seen = watch()
    try:
        return read(*words), frozenset(seen)
    finally:
        unwatch()


def _code_digest(read: Callable[..., Any]) -> str | None:
    """Of the modules that make a fact, as they are when they are imported; None where their source cannot be read.

    The Python is part of it: releases write the same annotation in different ways.
    """
    here = Path(__file__)
    found = hashlib.blake2b(sys.version.encode(), digest_size=16)
    try:
        for path in (here, here.with_name("source.py"), Path(read.__code__.co_filename)):
            found.update(path.read_bytes())
    except OSError:
        return None
    return found.hexdigest()


def _path(name: str, words: tuple[str, ...]) -> str | None:
    """Where a fact is kept. The words stand in a recipe: only their digest becomes part of the name."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not base.startswith("/"):  # the XDG specification: to be ignored
        base = os.path.expanduser("~/.cache")  # noqa: PTH111 - pathlib takes ten times as long, and this is done 13 times
    digest = hashlib.blake2b(json.dumps(words).encode(), digest_size=8).hexdigest()
    return f"{base}/clustertune/{name}-{digest}.json" if base.startswith("/") else None


def _load(path: str, code: str) -> tuple[Any, Sources] | None:
    """A fact with its sources, if it is whole and nothing that it rests on has changed."""
    try:
        check, _, body = _own_bytes(path).partition(b"\n")
        if check.decode() != _checksum(body):
            return None
        kept = json.loads(body)
        sources = [(package, relative) for package, relative, _ in kept["sources"]]
        if kept["code"] != code or any(content_digest(p, r) != digest for p, r, digest in kept["sources"]):
            return None
        return kept["fact"], frozenset(sources)
    except (OSError, ValueError, UserError):
        return None


def _own_bytes(path: str) -> bytes:
    """The content of a file that nobody but this user can write. Raises OSError where it is none."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:  # noqa: PTH123 - it is open already
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(path)
        return file.read(_MAX_BYTES)


def _checksum(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _store(file: str, code: str, fact: Any, sources: Sources) -> None:
    """Put a fact where the next process finds it, whole or not at all: ranks on many nodes do this at the same moment."""
    try:
        digests = [[package, relative, content_digest(package, relative)] for package, relative in sorted(sources)]
        text = json.dumps({"code": code, "sources": digests, "fact": fact})
        if json.loads(text)["fact"] != fact:
            return
    except (TypeError, ValueError):
        return
    path = Path(file)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    with contextlib.suppress(OSError):
        for folder in (path.parent.parent, path.parent):  # no further up: a home that is not there is not made
            folder.mkdir(mode=0o700, exist_ok=True)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as opened:  # noqa: PTH123 - it is open already
                body = text.encode()
                opened.write(_checksum(body).encode() + b"\n" + body)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
