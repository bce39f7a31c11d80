"""The image of a run: its SHA-256, held against the ``.sha256`` beside it, and whether a run continues in another one."""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clustertune.cluster.schema import Container
from clustertune.console import byte_progress, say
from clustertune.errors import ExitCode, UserError, storage_error
from clustertune.manifest import open_to_read

_CHUNK = 1 << 22
_MAX_SUM = 4096


@dataclass(frozen=True)
class Image:
    """An image as ``run.json`` keeps it."""

    runtime: str
    image: str
    """Path, or ``docker://NAME@sha256:DIGEST``."""
    sha256: str | None
    """Of the file, or the registry's digest; None: not known."""
    checked: bool
    """Whether ``sha256`` was held against something: the file beside the image, or a registry's digest."""
    bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        """For run.json."""
        return asdict(self)


def look(settings: Container) -> tuple[Image | None, list[str]]:
    """The cluster's image with its sum, and what to warn of; None where there is no container.

    Raises UserError where it is not there, or is not what the ``.sha256`` beside it says.
    """
    if settings.runtime == "none" or settings.image is None:
        return None, []
    if settings.image.startswith("docker://"):
        digest = settings.image.rpartition("@sha256:")[2]
        return Image(settings.runtime, settings.image, digest, checked=True), []
    path = Path(settings.image)
    try:
        stated, notes = _stated(path)
        digest, size = _digest(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            fix = "build it (make build-sif), or name the one that is there: container.image of the cluster file"
            raise UserError("no such image", file=str(path), key="container.image", fix=fix) from None
        raise storage_error(error, "reading the image", path) from None
    if stated is not None and digest != stated:
        again = f"sha256sum {path.name} > {path.name}.sha256"
        fix = f"it was altered or copied in part: copy or build it again; where it is meant so: {again}"
        text = f"its SHA-256 is {digest[:16]}..., and {path.name}.sha256 says {stated[:16]}..."
        raise UserError(text, file=str(path), key="container.image", fix=fix)
    return Image(settings.runtime, settings.image, digest, stated is not None, size), notes


def _stated(path: Path) -> tuple[str | None, list[str]]:
    """The sum in the file beside an image, and a note where there is none. Raises UserError for a file that holds none."""
    beside = path.with_name(path.name + ".sha256")
    try:
        with open_to_read(beside) as file:
            text = file.read(_MAX_SUM).decode(errors="replace")
    except FileNotFoundError:
        path.stat()  # the image itself is named as missing
        fix = f"cd {path.parent} && sha256sum {path.name} > {beside.name}"
        return None, [f"{beside} is not there: whether the image is whole is not checked -> {fix}"]
    match = re.fullmatch(r"([0-9a-fA-F]{64})([ \t]+\*?[^\n]*)?\s*", text)
    if not match:
        fix = f"sha256sum {path.name} > {beside.name}, where the image is the right one"
        raise UserError("contains no sum of one file", file=str(beside), fix=fix)
    return match[1].lower(), []


# --- the sum -----------------------------------------------------------------------------------------------------


def _digest(path: Path) -> tuple[str, int]:
    """SHA-256 and size of an image. Raises OSError, or UserError."""
    before = _identity(path)
    say(f"computing the SHA-256 of {path}: {before['size'] / 1e9:.2f} GB")
    digest = _read(path, before["size"])
    if _identity(path) != before:
        raise UserError("changed while its SHA-256 was computed", file=str(path), fix="wait for it", code=ExitCode.AGAIN)
    return digest, before["size"]


def _identity(path: Path) -> dict[str, int]:
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise UserError("is not a file", file=str(path), key="container.image", fix="a .sif (or .sqsh) file")
    return {"size": info.st_size, "mtime_ns": info.st_mtime_ns, "inode": info.st_ino}


def _read(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with open_to_read(path) as file, byte_progress() as bar:
        task = bar.add_task(path.name, total=size)
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            bar.advance(task, len(chunk))
    return digest.hexdigest()


def changed(before: object, now: Image) -> str:
    """A warning where a run continues in another image than it began in; empty where it does not."""
    if not isinstance(before, Mapping) or not before.get("sha256") or before["sha256"] == now.sha256:
        return ""
    old, new = str(before["sha256"])[:16], (now.sha256 or "unknown")[:16]
    text = f"the run continues in another image: {now.image} is {new}... and was {old}..."
    return f"{text} -> results may differ from those of one image"
