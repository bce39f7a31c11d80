"""Block devices of bricks: whether one is blank, and the command that would format it."""

from __future__ import annotations

import errno
import os
import shlex
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError
from clustertune.ops.bounded import ask
from clustertune.ops.nodes import tool
from clustertune.ops.storage.layout import FstabMount
from clustertune.process import captured

MKFS = {"xfs": ("mkfs.xfs",), "ext4": ("mkfs.ext4", "-m", "0"), "btrfs": ("mkfs.btrfs",)}
"""``-m 0``: ext4 would keep 5 % of a brick for root, 0.7 TB of 14."""
_SECONDS = 10
_START = 1 << 20


@dataclass(frozen=True)
class BlockDevice:
    """What is on a block device."""

    path: str
    state: str
    """``absent``, ``other`` (no block device), ``blank``, ``holds`` (a file system, a table, a member of an array), ``busy``,
    ``silent`` (it does not answer) or ``unknown`` (only root can look)."""
    holds: str = ""
    """blkid's word: ``xfs``, ``LVM2_member``, ``gpt``."""

    def __str__(self) -> str:
        reasons = {
            "holds": f"holds {self.holds}",
            "absent": "does not exist",
            "other": "is not a block device",
            "busy": "is in use",
            "silent": "does not answer",
        }
        return f"{self.path} {reasons.get(self.state, 'cannot be looked at')}"


def look(path: str) -> BlockDevice:
    """What a device holds, by blkid's low-level probe and wipefs: both must find nothing for it to be blank."""
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        return BlockDevice(path, "absent" if isinstance(error, FileNotFoundError) else "unknown")
    if not stat.S_ISBLK(mode):
        return BlockDevice(path, "other")
    if os.geteuid() != 0:
        return BlockDevice(path, "unknown")
    # In a child: a disk that does not answer holds whoever reads it, for ever.
    answer = ask(partial(_device_record, path), 3 * _SECONDS)
    return BlockDevice(**answer.found) if answer.found else BlockDevice(path, "silent" if answer.silent else "unknown")


def _device_record(path: str) -> dict[str, Any]:
    try:
        return asdict(_content(path))
    except subprocess.SubprocessError:
        return asdict(BlockDevice(path, "silent"))


def _content(path: str) -> BlockDevice:
    probe = _run("blkid", "-p", "-o", "value", "-s", "TYPE", "-s", "PTTYPE", path)
    signatures = _run("wipefs", "--no-act", "--noheadings", "--output", "TYPE", path)
    if signatures_found := [*probe.stdout.split(), *signatures.stdout.split()]:
        return BlockDevice(path, "holds", signatures_found[0])
    # blkid: 2 says that nothing was found, 8 that it found several things at once.
    if probe.returncode != 2 or signatures.returncode != 0:
        return BlockDevice(path, "unknown")
    if _busy(path):
        return BlockDevice(path, "busy")
    return BlockDevice(path, "holds", "data without a known signature") if _data(path) else BlockDevice(path, "blank")


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    program = tool(argv[0])
    if program is None:
        raise FileNotFoundError(argv[0])
    return captured([program, *argv[1:]], _SECONDS)


def _busy(path: str) -> bool:
    """Whether the kernel holds it: mounted, or part of something (open(2), O_EXCL on block devices)."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EBUSY
    return False


def _data(path: str) -> bool:
    """Whether the first MiB holds anything: a disk of ciphertext bears no signature."""
    try:
        with Path(path).open("rb") as file:
            return any(file.read(_START))
    except OSError:
        return True


def steps(mount: FstabMount) -> Iterator[StorageStep]:
    """The command that a blank device needs first; only a person or ``--format`` runs it."""
    assert mount.brick
    device = look(mount.source)
    command = (*MKFS[mount.brick.filesystem], mount.source)
    if device.state == "blank":
        why = f"the device is blank; clustertune ops storage apply --format {mount.source} runs it"
        yield StorageStep(command, why, by_hand=True)
    elif device.state == "holds" and device.holds != mount.brick.filesystem:
        why = f"{device}, not {mount.brick.filesystem}: check whether this is the brick's device"
        yield StorageStep(("wipefs", "--no-act", mount.source), why, by_hand=True)
    elif device.state in ("absent", "other"):
        yield StorageStep(("lsblk", "-f"), f"{device}: fix storage.bricks.device", by_hand=True)
    elif device.state == "silent":
        yield StorageStep(("dmesg",), f"{device}: look for errors of the disk", by_hand=True)
    elif device.state == "busy":
        yield StorageStep(("lsblk", "-f", mount.source), f"{device} already", by_hand=True)


def require_blank(requested: str, mounts: Iterator[FstabMount]) -> FstabMount:
    """The mount whose device may be formatted. Raises UserError where ``--format`` names another one, or it is not blank."""
    key = "--format"
    known = list(mounts)
    mount = next((mount for mount in known if mount.source == requested), None)
    if mount is None:
        names = ", ".join(mount.source for mount in known) or "none"
        raise UserError(Problem(f"{requested} is not a device of this node's bricks ({names})", file="command line", key=key))
    device = look(requested)
    if device.state != "blank":
        message = f"{device}: only a blank device is formatted"
        fix = f"leave {key} out, or make sure that nothing on it is needed and run wipefs yourself"
        raise UserError(Problem(message, file="command line", key=key, fix=fix))
    return mount


# --- step -----------------------------------------------------------------------------------------------------------------

# One command of an operator's work.


@dataclass(frozen=True)
class StorageStep:
    """One command, and why."""

    argv: tuple[str, ...]
    why: str
    by_hand: bool = False
    """``apply`` never runs it."""
    target: str | None = None
    """What it mounts."""

    def __str__(self) -> str:
        return shlex.join(self.argv)
