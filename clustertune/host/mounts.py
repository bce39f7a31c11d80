"""The file systems of a machine, with their room, and what can be done in folders that matter."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import shlex
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from clustertune import bounded
from clustertune.host.facts import FileMode, FolderProbe, Mount
from clustertune.host.system import Probe

SECONDS = 12.0
"""How long a file system may take to say how full it is: a server under load some seconds, one that is gone for ever."""
PROBES = ("mmap", "flock")
_PSEUDO = frozenset(
    """
    autofs binfmt_misc bpf cgroup cgroup2 configfs debugfs devpts devtmpfs efivarfs fuse.gvfsd-fuse fuse.lxcfs fuse.portal
    fusectl hugetlbfs mqueue nsfs proc pstore ramfs rpc_pipefs securityfs selinuxfs squashfs sysfs tracefs
    """.split()  # noqa: SIM905 (one word a kind is what a person can read and extend)
)
"""Kinds that hold no files of anybody, or read-only images. autofs: asking for its room would mount what is behind it."""
_SYSTEM = re.compile(r"/(proc|sys|dev/(?!shm)[^/]*|run/(?!user|media)[^/]*|var/lib/(docker|containers|kubelet)|snap)(/|$)")
_SHADOWS = re.compile(r"lib(nccl|cudart|cudnn|cublas|cublasLt|cuda|nvrtc|stdc\+\+|gomp|iomp5)\.so(\.[\d.]+)?")
"""Libraries that torch's wheels bring themselves, or that must be the driver's: the loader takes those of the path first."""
_DEAD = (errno.ESTALE, errno.ENOTCONN, errno.EIO, errno.EHOSTDOWN, errno.ESHUTDOWN)
"""What a file system says whose server, disk or FUSE program is gone."""
MOST = 200
"""Mounts that are kept: a node of containers has thousands."""


NETWORK_KINDS = frozenset(
    """
    nfs nfs4 nfs3 lustre gpfs beegfs ceph wekafs glusterfs cifs smb3 9p panfs virtiofs orangefs pvfs2 afs
    """.split()  # noqa: SIM905 (as above)
)
"""Kinds of file system that lie on other machines."""


LOCAL_FUSE = frozenset(
    f"fuse.{name}"
    for name in "squashfuse squashfuse_ll fuse-overlayfs fuse2fs ext2fuse snapfuse bindfs gocryptfs encfs".split()  # noqa: SIM905
)
"""Kinds of FUSE that lie on this machine: images of containers, and what stands in front of a local folder."""


def lies_elsewhere(fstype: str) -> bool:
    """Whether a kind of file system is on other machines, or is a pool of file systems."""
    return fstype in NETWORK_KINDS or (fstype.startswith("fuse.") and fstype not in LOCAL_FUSE) or fstype == "fuse"


def own_mounts() -> str:
    """The text of ``/proc/self/mountinfo``; empty where there is none. Reading it asks no file system."""
    try:
        return Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def all_mounts(text: str) -> list[Mount]:
    """What ``/proc/self/mountinfo`` (proc(5)) says, in its order: a later one covers an earlier one at its point."""
    mounts = []
    for line in text.splitlines():
        fields, dash, rest = line.partition(" - ")
        parts, after = fields.split(" "), rest.split(" ")
        if dash and len(parts) >= 6 and len(after) >= 3:
            options = list(dict.fromkeys([*parts[5].split(","), *unescape(after[2]).split(",")]))
            if "ro" in options and "rw" in options:  # a mount, or its file system, that is read-only is not writable
                options.remove("rw")
            mounts.append(Mount(unescape(parts[4]), after[0], unescape(after[1]), options))
    return mounts


def parse_mounts(text: str) -> list[Mount]:
    """The mounts of ``/proc/self/mountinfo`` that hold files."""
    return [one for one in all_mounts(text) if one.kind not in _PSEUDO and not _SYSTEM.match(one.point)][:MOST]


def lies_below(path: str, folder: str) -> bool:
    """Whether a path is a folder, or inside of it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount with the longest point above ``path``; of two at one point the later one, which covers the other."""
    above = [mount for mount in reversed(mounts) if lies_below(path, mount.point)]
    return max(above, key=lambda mount: len(mount.point.rstrip("/")), default=None)


def parse_automounts(text: str) -> list[str]:
    """Where autofs waits for the first use, of ``/proc/self/mountinfo``."""
    return [mount.point for mount in all_mounts(text) if mount.kind == "autofs"]


def unescape(text: str) -> str:
    """A word of mountinfo: the kernel writes blanks and the like as ``\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def export_lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Number, text and folder of each line of exports(5); those that a backslash continues are one, comments are left out."""
    held, start = "", 0
    for number, line in enumerate(text.split("\n"), 1):
        start = start or number
        held += line.rstrip("\r")
        if held.endswith("\\"):
            held = held[:-1]
            continue
        bare = held.partition("#")[0].strip() if '"' not in held else held.strip()
        if bare and not bare.startswith("#"):
            yield start, bare, _exported(bare)
        held, start = "", 0


def _exported(line: str) -> str:
    try:
        fields = shlex.split(line.replace("\\", "\\\\"), posix=True)
    except ValueError:
        fields = line.split()
    first = fields[0] if fields else ""
    return os.path.normpath(unescape(first)) if first.startswith("/") else ""


def parse_exports(text: str) -> dict[str, str]:
    """The folders of /etc/exports, each with its clients and options as they stand there."""
    return {folder: re.sub(r"^(\"[^\"]*\"|\S+)\s*", "", line) for _, line, folder in export_lines(text) if folder}


@dataclass
class MountQuery:
    """What is asked of file systems that may not answer."""

    folders: Sequence[str] = ()
    """Where locks, mappings and programs are tried."""
    names: Sequence[str] = ()
    """Hosts to resolve."""
    files: Sequence[str] = ()
    """Files with secrets, whose mode matters."""
    libraries: Sequence[str] = ()
    """Folders of LD_LIBRARY_PATH."""


def look(probe: Probe, query: MountQuery) -> dict[str, Any]:
    """The mounts with their room, the exports, and what ``query`` names; what does not answer in time is silent, or missing."""
    mounts = parse_mounts(probe.read("/proc/self/mountinfo"))
    exports = parse_exports(probe.read("/etc/exports"))
    for name in probe.names("/etc/exports.d"):
        exports |= parse_exports(probe.read(f"/etc/exports.d/{name}"))
    automounts = parse_automounts(probe.read("/proc/self/mountinfo"))
    facts: dict[str, Any] = {"mounts": mounts, "exports": exports, "automounts": automounts}
    if not probe.live:
        return facts
    own = os.uname().nodename
    folders = list(dict.fromkeys(query.folders))
    points = sorted({"/dev/shm", *(mount.point for mount in mounts)})  # noqa: S108
    requests = [("space", point) for point in points]
    requests += [("pool", mount.point) for mount in mounts if mount.kind == "fuse.mergerfs"]
    requests += [("names", name) for name in dict.fromkeys([own, *query.names])]
    requests += [("mode", path) for path in query.files]
    requests += [("list", path) for path in query.libraries]
    requests += [(what, folder) for folder in folders for what in PROBES]
    answered = answers(list(dict.fromkeys(requests)), probe.left(2 * SECONDS) / 2)  # the driver is asked after it
    for mount in mounts:
        answer = answered.get(("space", mount.point))
        mount.silent = answer is None and mount_is_last(mount, mounts)
        if answer and answer.get("errno") in _DEAD:
            mount.fault = answer["error"]
        mount.options += answered.get(("pool", mount.point)) or []
        for key in ("total_bytes", "free_bytes", "free_inodes"):
            setattr(mount, key, (answer or {}).get(key))
    facts["names"] = {name: answered[("names", name)] for name in query.names if ("names", name) in answered}
    facts["own_addresses"] = answered.get(("names", own)) or []
    modes = [(path, answered.get(("mode", path))) for path in query.files]
    facts["files"] = [FileMode(path, mode) for path, mode in modes if mode is not None]
    facts["probes"] = [_probe(folder, what, answered) for folder in folders for what in PROBES]
    facts["libraries"] = [
        f"{folder.rstrip('/')}/{name}"
        for folder in query.libraries
        for name in answered.get(("list", folder)) or ()
        if _SHADOWS.fullmatch(name)
    ][:50]
    shm = answered.get(("space", "/dev/shm"))  # noqa: S108 - a folder, or a link to /run/shm, serves as well as a mount
    if shm is not None and ("total_bytes" in shm or shm.get("errno") == errno.ENOENT):
        facts["shm_bytes"], facts["shm_free_bytes"] = shm.get("total_bytes", 0), shm.get("free_bytes", 0)
    return facts


def _probe(folder: str, what: str, answered: Mapping[tuple[str, str], Any]) -> FolderProbe:
    answer = answered.get((what, folder)) or {"message": "no answer in time"}
    return FolderProbe(folder, what, answer.get("ok"), answer.get("message") or answer.get("error", ""))


def mount_is_last(mount: Mount, mounts: Sequence[Mount]) -> bool:
    """Whether nothing is mounted over it: only the last one at a point can be asked."""
    return next(other for other in reversed(mounts) if other.point == mount.point) is mount


def answers(requests: Sequence[tuple[str, str]], seconds: float) -> dict[tuple[str, str], Any]:
    """What file systems and name servers answer within ``seconds``, by request; what does not answer is missing."""
    works = {f"{kind} {subject}": partial(_answer, kind, subject) for kind, subject in requests}
    together = bounded.ask(lambda: {name: work() for name, work in works.items()}, seconds / 3).found
    if together is None:  # a child for each, so that a server which is gone hides only what is on it
        apart = {name: answer.found for name, answer in bounded.ask_all(works, seconds * 2 / 3).items()}
        together = {name: answer for name, answer in apart.items() if answer is not None}
    return {request: together[name]["told"] for request, name in zip(requests, works, strict=True) if name in together}


# --- in a child: what may hang --------------------------------------------------------------------------------------------

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


def resolved(name: str) -> list[str]:
    """The IPv4 and IPv6 addresses of a host name; none where it is unknown."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(entry[4][0]) for entry in entries})


def mode(path: str) -> int | None:
    """Permission bits of a file; None where there is none.

    Bits without effect are left out: those of a group that is its owner's own (same number), and all of others below a folder
    that they cannot enter.
    """
    try:
        status = Path(path).stat()
        bits = status.st_mode & 0o7777
        if status.st_gid == status.st_uid:
            bits &= ~0o070
        for folder in Path(path).resolve().parents:
            above = folder.stat()
            group = above.st_mode & 0o010 and above.st_gid != above.st_uid
            if not above.st_mode & 0o001:
                bits &= ~(0o007 if group else 0o077)
    except OSError:
        return None
    return bits


POOL = ("branches", "cache.files", "category.create", "minfreespace", "moveonenospc", "version")
"""Settings of a mergerfs that rules read, as extended attributes of its control file (its manual, "Runtime interface")."""


def pool(point: str) -> list[str]:
    """The settings of a mergerfs, ``cache.files=off``: the kernel's table of mounts does not have them."""
    settings = []
    for name in POOL:
        try:
            value = os.getxattr(f"{point.rstrip('/')}/.mergerfs", f"user.mergerfs.{name}")
        except OSError:
            continue
        settings.append(f"{name}={value.decode(errors='replace')}")
    return settings


def probe_folder(folder: str, what: str) -> dict[str, Any]:
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
        Path(path).unlink()
    return {"ok": True, "message": ""}


def listing(folder: str) -> list[str]:
    """The names in a folder, 2,000 at most."""
    return sorted(entry.name for entry in Path(folder).iterdir())[:2000]


ANSWERS: dict[str, Any] = {"space": space, "names": resolved, "mode": mode, "pool": pool, "list": listing}


def _answer(kind: str, subject: str) -> dict[str, Any]:
    try:
        return {"told": ANSWERS[kind](subject) if kind in ANSWERS else probe_folder(subject, kind)}
    except OSError as error:
        failed: Any = {"error": error.strerror or str(error), "errno": error.errno}
        return {"told": [] if kind in ("list", "pool") else failed}
