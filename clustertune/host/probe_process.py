"""What may hang is done in here, a process of its own that its caller need not wait for: file systems, probes, names.

Run as a program: a JSON document of requests on stdin, one JSON line on stdout for each as soon as it is answered. Each has
a thread, so that a server which is gone hides only what is on it. Standard library, Python 3.8.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import socket
import sys
import tempfile
import threading
from typing import Any

PREFIX = ".clustertune-probe-"
"""Begin of the names of files that a probe makes; it removes them."""


def space(path: str) -> dict[str, Any]:
    """Size and room of the file system at ``path``, as an ordinary user has it."""
    volume = os.statvfs(path)
    return {
        "total_bytes": volume.f_blocks * volume.f_frsize,
        "free_bytes": volume.f_bavail * volume.f_frsize,
        # btrfs and many network file systems count no inodes: 0 of 0 are not none left
        "free_inodes": volume.f_favail if volume.f_files else None,
    }


def names(name: str) -> list[str]:
    """The IPv4 and IPv6 addresses of a host name; none where it is unknown."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(entry[4][0]) for entry in found})


def mode(path: str) -> int | None:
    """Permission bits of a file; None where there is none.

    Bits without effect are left out: those of a group that is its owner's own (same number), and all of others below a folder
    that they cannot enter.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - run as a program, before any other import
        bits = status.st_mode & 0o7777
        if status.st_gid == status.st_uid:
            bits &= ~0o070
        folder = os.path.dirname(os.path.realpath(path))  # noqa: PTH120
        while folder != "/":
            above = os.stat(folder)  # noqa: PTH116
            group = above.st_mode & 0o010 and above.st_gid != above.st_uid
            if not above.st_mode & 0o001:
                bits &= ~(0o007 if group else 0o077)
            folder = os.path.dirname(folder)  # noqa: PTH120
    except OSError:
        return None
    return bits


POOL = ("branches", "cache.files", "category.create", "minfreespace", "moveonenospc", "version")
"""Settings of a mergerfs that rules read, as extended attributes of its control file (its manual, "Runtime interface")."""


def pool(point: str) -> list[str]:
    """The settings of a mergerfs, ``cache.files=off``: the kernel's table of mounts does not have them."""
    found = []
    for name in POOL:
        try:
            value = os.getxattr(f"{point.rstrip('/')}/.mergerfs", f"user.mergerfs.{name}")
        except OSError:
            continue
        found.append(f"{name}={value.decode(errors='replace')}")
    return found


def probe(folder: str, what: str) -> dict[str, Any]:
    """Try one thing with a small file in a folder: ``ok`` is None where no file can be made there."""
    try:
        handle, path = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    except OSError as error:
        return {"ok": None, "message": error.strerror or str(error)}
    try:
        os.write(handle, b"\0" * mmap.PAGESIZE)
        if what == "mmap":
            mmap.mmap(handle, mmap.PAGESIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE).close()
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return {"ok": None if full else False, "message": error.strerror or str(error)}
    finally:
        os.close(handle)
        os.unlink(path)  # noqa: PTH108 - as above
    return {"ok": True, "message": ""}


def listing(folder: str) -> list[str]:
    """The names in a folder, 2,000 at most."""
    return sorted(os.listdir(folder))[:2000]  # noqa: PTH208 - as above


ANSWERS: dict[str, Any] = {"space": space, "names": names, "mode": mode, "pool": pool, "list": listing}


def _answer(request: list[str], lock: Any) -> None:
    kind, subject = request[0], request[1]
    answer: Any
    try:
        answer = ANSWERS[kind](subject) if kind in ANSWERS else probe(subject, kind)
    except OSError as error:
        answer = [] if kind in ("list", "pool") else {"error": error.strerror or str(error), "errno": error.errno}
    line = json.dumps({"request": request, "told": answer}) + "\n"
    with lock:
        sys.stdout.write(line)
        sys.stdout.flush()


def main() -> None:
    """Answer what stdin asks."""
    requests = json.load(sys.stdin)
    lock = threading.Lock()
    threads = [threading.Thread(target=_answer, args=(request, lock), daemon=True) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
