"""Files of a node that are partly or wholly ours: blocks with markers, differences, dated backups, atomic replacement.

Texts are bytes: a line that is not ours may hold anything. The way through it::

    before = read(root, "/etc/fstab")                             # None: there is no such file
    after = with_block(before, "storage", lines, shown="/etc/fstab")
    change = Change("/etc/fstab", before, after)                  # nothing is written yet
    diff(change)                                                  # a unified diff, [] where nothing changes
    put(root, change)                                             # backup, then replace; returns the backup's path

``root`` is ``Path("/")``, or a tree (an image, a test) in which absolute symbolic links mean the tree's own root.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertune.console import escape
from clustertune.errors import ExitCode, Problem, UserError, storing
from clustertune.lock import held
from clustertune.manifest import fsync_path

NODE = Path("/")
"""The root of this machine itself."""
BACKUP = ".clustertune-"
"""Between a file's name and the date of a backup of it."""
_BEGIN = re.compile(rb"^# >>> clustertune ([a-z][a-z0-9-]*): .*?( \(joined\))?$")
_END = re.compile(rb"^# <<< clustertune ([a-z][a-z0-9-]*) ([0-9a-f]{16})$")
_LINKS = 40
"""Symbolic links on the way to one file, as the kernel allows (path_resolution(7))."""


@dataclass(frozen=True)
class Change:
    """One file of a node, as it is and as it shall be."""

    path: str
    """Absolute, as the node sees it."""
    before: bytes | None
    """None: there is no such file."""
    after: bytes
    mode: int = 0o644
    """Of a file that is new; one that is there keeps its own, with owner, group and SELinux label."""
    secret: bool = False
    """The difference is not shown."""

    @property
    def needed(self) -> bool:
        """Whether anything is to be written: a file that holds nothing is not made."""
        return self.after != (self.before or b"")


# --- places ------------------------------------------------------------------------------------------------------------


def inside(root: Path, path: str) -> Path:
    """Where ``path`` of a node lies below ``root``; symbolic links are followed as the node itself would.

    The last part need not exist. Raises UserError where links go in a circle.
    """
    assert path.startswith("/"), path
    waiting = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    found = root
    links = 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            found = found if found == root else found.parent
            continue
        try:
            target = str((found / part).readlink())
        except OSError:
            found /= part
            continue
        links += 1
        if links > _LINKS:
            raise UserError(Problem("symbolic links go in a circle", file=path, fix="remove one of them"))
        if target.startswith("/"):
            found = root
        waiting += [step for step in reversed(target.split("/")) if step not in ("", ".")]
    return found


@contextlib.contextmanager
def exclusive(root: Path, name: str, doing: str) -> Iterator[None]:
    """One writer of a node, or of a tree, at a time, who makes folders that users can enter, whatever root's shell says.

    Raises UserError: exit 75 where another process is ``doing`` the same, 73 where storage fails on the way.
    """
    lock = inside(root, f"/run/{name}" if root == NODE else f"/etc/.{name}")
    umask = os.umask(0o022)
    fix = "wait for it, then run the same command again"
    try:
        with storing("cannot be written", root, named=True), held(lock, doing, shown=lock, fix=fix):
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    lock.unlink()
    finally:
        os.umask(umask)


def read(root: Path, path: str) -> bytes | None:
    """The file's bytes; None where there is none. Raises UserError where it cannot be read, or is not a plain file."""
    target = inside(root, path)
    with storing("cannot be read", path), contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(target.stat().st_mode):
            raise UserError(Problem("is not a plain file", file=path, fix="move it away"))
        return target.read_bytes()
    return None


# --- blocks ------------------------------------------------------------------------------------------------------------


def with_block(
    text: bytes | None, name: str, lines: Sequence[str], *, shown: str, origin: str = "", force: bool = False
) -> bytes:
    """``text`` with the block ``name`` holding ``lines``: replaced where it stands, else appended; no lines remove it.

    Every byte outside of the block stays, a missing newline at the end of the file too (it comes back when the block goes).
    ``origin`` is the name of what the lines come from; ``shown`` names the file in errors. Raises UserError where
    the block was edited by hand (``force`` replaces it then) or its markers are not a pair.
    """
    assert all("\n" not in line and "\r" not in line for line in lines)
    text = text or b""
    at = _torn(text, name, lines) or _find(text, name, shown)
    if at is None:
        start = end = len(text)
        joined = bool(text) and not text.endswith(b"\n")
    else:
        start, end, body, present = at
        joined = text[start : start + 1] == b"\n"
        if present != _digest(body) and not force:
            fix = "move your lines out of it, or put them into the cluster file; --force replaces the block"
            message = f"lines between the markers of clustertune {name} were edited by hand"
            line = text.count(b"\n", 0, start) + 1 + joined
            raise UserError(Problem(message, file=f"{shown}:{line}", fix=fix))
    block = _block(name, [line.encode() for line in lines], origin.encode(), joined) if lines else b""
    return text[:start] + block + text[end:]


def block(text: bytes | None, name: str, *, shown: str) -> list[str] | None:
    """The lines of the block ``name``; None where there is none. Raises UserError where its markers are not a pair."""
    at = _find(text or b"", name, shown)
    return None if at is None else at[2].decode(errors="replace").splitlines()


def foreign(text: bytes | None, name: str, *, shown: str) -> list[tuple[int, str]]:
    """The lines that are not of the block ``name``, with their numbers, from 1. Raises UserError as :func:`block`."""
    text = text or b""
    at = _find(text, name, shown)
    first, last = (text.count(b"\n", 0, at[0]), text.count(b"\n", 0, at[1])) if at else (-1, -1)
    joined = at is not None and text[at[0] : at[0] + 1] == b"\n"
    lines = text.decode(errors="replace").split("\n")
    return [(n + 1, line.rstrip("\r")) for n, line in enumerate(lines) if not first + joined <= n < last]


def _block(name: str, lines: Sequence[bytes], origin: bytes, joined: bool) -> bytes:
    body = b"".join(line + b"\n" for line in lines)
    note = b"written by clustertune ops" + (b" from " + origin if origin else b"") + b"; edit that, not this"
    first = b"# >>> clustertune " + name.encode() + b": " + note + (b" (joined)" if joined else b"")
    last = b"# <<< clustertune " + name.encode() + b" " + _digest(body)
    return (b"\n" if joined else b"") + first + b"\n" + body + last + b"\n"


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()


def _find(text: bytes, name: str, shown: str) -> tuple[int, int, bytes, bytes] | None:
    """Start and end of the block with its markers (and the newline that was put before it), its body, the digest it bears."""
    begins, ends, at = [], [], 0
    for line in _lines(text):
        bare = line.removesuffix(b"\n")
        if (found := _BEGIN.match(bare)) and found[1] == name.encode():
            begins.append((at, at + len(line), bool(found[2])))
        elif (found := _END.match(bare)) and found[1] == name.encode():
            ends.append((at, at + len(line), found[2]))
        at += len(line)
    if not begins and not ends:
        return None
    if len(begins) != 1 or len(ends) != 1 or ends[0][0] < begins[0][1]:
        message = f"{len(begins)} begin and {len(ends)} end markers of clustertune {name}: one pair is wanted"
        raise UserError(
            Problem(message, file=shown, fix="restore the file from its backup, or remove the stray markers by hand")
        )
    start, body_start, joined = begins[0]
    body_end, end, digest = ends[0]
    if joined and text[start - 1 : start] == b"\n":
        start -= 1
    return start, end, text[body_start:body_end], digest


def _torn(text: bytes, name: str, lines: Sequence[str]) -> tuple[int, int, bytes, bytes] | None:
    """A block that breaks off at the end of the text, as a copy on a full disk would: all of it is what we write."""
    at = 0
    for line in _lines(text):
        start, at = at, at + len(line)
        if (found := _BEGIN.match(line.removesuffix(b"\n"))) and found[1] == name.encode():
            joined, rest = bool(found[2]), text[at:]
            body = b"".join(line.encode() + b"\n" for line in lines)
            whole = body + b"# <<< clustertune " + name.encode() + b" " + _digest(body) + b"\n"
            if not whole.startswith(rest) or rest == whole:
                return None
            return start - (joined and text[start - 1 : start] == b"\n"), len(text), b"", _digest(b"")
    return None


def _lines(text: bytes) -> list[bytes]:
    """Lines that end in a line feed only: a carriage return is part of what an administrator wrote."""
    parts = text.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


# --- show and write ----------------------------------------------------------------------------------------------------


def diff(change: Change) -> list[str]:
    """The change as a unified diff, without line ends; what is secret or does not change gives one line or none."""
    if not change.needed:
        return []
    if change.secret:
        return [f"--- {change.path}", f"+++ {change.path}", "@@ the difference is not shown: the file holds a secret @@"]
    old, new = (_shown(data or b"") for data in (change.before, change.after))
    gone = "/dev/null" if change.before is None else change.path
    found = difflib.unified_diff(old, new, gone, change.path, lineterm="", n=2)
    return [escape(part, keep="\t") for line in found for part in line.split("\n")]


def _shown(text: bytes) -> list[str]:
    lines = text.decode(errors="replace").split("\n")
    if lines[-1]:
        lines[-1] += "\n\\ No newline at end of file"
        return lines
    return lines[:-1]


def put(root: Path, change: Change, *, when: float | None = None) -> Path | None:
    """Bring the file to its new text in one step, with a dated backup of the old beside it. Returns the backup.

    A power loss leaves the old text or the new, each whole. Raises UserError (exit 75) where the file changed since ``before``
    was read, (exit 73) where it cannot be written.
    """
    target = inside(root, change.path)
    if (read(root, change.path)) != change.before:
        fix = "run the same command again"
        raise UserError(Problem("was changed by another program meanwhile", file=change.path, fix=fix), ExitCode.AGAIN)
    if not change.needed:
        return None
    with storing("cannot be written", change.path):
        target.parent.mkdir(parents=True, exist_ok=True)
        backup = None if change.before is None else _back_up(target, change.before, when)
        _replace(target, target, change.after, change.mode)
    return backup


def _back_up(target: Path, data: bytes, when: float | None) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(when))
    backup = target.with_name(f"{target.name}{BACKUP}{stamp}")
    number = 1
    while os.path.lexists(backup):
        if not backup.is_symlink() and backup.read_bytes() == data:
            return backup
        backup = target.with_name(f"{target.name}{BACKUP}{stamp}-{number}")
        number += 1
    _replace(backup, target, data, 0o600)
    return backup


def _replace(target: Path, like: Path, data: bytes, mode: int) -> None:
    """Write ``target`` with the mode, owner and label of ``like`` where that is there: beside it, synced, then renamed."""
    fresh = target.with_name(f".{target.name}.clustertune-new")
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()  # of a run that was killed
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(data)
            out.flush()
            _alike(fd, like, mode)
            os.fsync(fd)
        fresh.rename(target)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    fsync_path(target.parent)


def _alike(fd: int, like: Path, mode: int) -> None:
    try:
        known = like.stat()
    except FileNotFoundError:
        os.fchmod(fd, mode)
        return
    if (known.st_uid, known.st_gid) != (os.geteuid(), os.getegid()):
        os.fchown(fd, known.st_uid, known.st_gid)
    os.fchmod(fd, stat.S_IMODE(known.st_mode))
    with contextlib.suppress(OSError):  # no SELinux, or a file system without labels
        os.setxattr(fd, "security.selinux", os.getxattr(like, "security.selinux"))
