"""Would this fstab boot? systemd's own generator and verifier say so of a text that lies nowhere yet."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from clustertune.ops.storage.layout import Mount
from clustertune.process import captured

GENERATOR = (
    "/lib/systemd/system-generators/systemd-fstab-generator",
    "/usr/lib/systemd/system-generators/systemd-fstab-generator",
)
GENERATED = Path("/run/systemd/generator")
CLIENT, SECURITY = "nfs-client.target", "rpc-gssd.service"
CLIENT_UNITS = {
    CLIENT: f"[Unit]\nBefore=remote-fs-pre.target\nWants=remote-fs-pre.target {SECURITY}\nAfter={SECURITY}\n",
    SECURITY: "[Service]\nExecStart=/bin/true\n",
}
"""The order of the NFS client (nfs-utils, systemd/nfs-client.target), where it is not installed yet: a mount that
local-fs.target waits for is a cycle with these units alone."""
UNITS = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
TARGETS = ("local-fs.target", "remote-fs.target", "multi-user.target")
_SECONDS = 60
_TOLD = re.compile(r"ordering cycle|\.mount\b|fstab|Failed|[Dd]uplicate|ignoring")


def unit(target: str) -> str:
    """The name of a mount's unit (systemd-escape --path --suffix=mount)."""
    path = target.strip("/")
    if not path:
        return "-.mount"
    escaped = (c if c == "/" or c in _PLAIN else "".join(f"\\x{byte:02x}" for byte in c.encode()) for c in path)
    text = "".join(escaped).replace("/", "-")
    if text.startswith("."):
        text = "\\x2e" + text[1:]
    return f"{text}.mount"


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:_.")


def generator() -> str | None:
    """Where systemd's generator is; None: this machine has none."""
    return next((path for path in GENERATOR if os.access(path, os.X_OK)), None)


def outdated(mounts: Iterable[Mount]) -> bool:
    """Whether systemd's units of our mounts are older than fstab, or absent."""
    try:
        changed = Path("/etc/fstab").stat().st_mtime
        return any((GENERATED / unit(mount.target)).stat().st_mtime < changed for mount in mounts)
    except OSError:
        return True


def complaints(old: bytes, new: bytes, mounts: Iterable[Mount]) -> list[str] | None:
    """What systemd says against ``new`` that it does not say against ``old``; None where it cannot be asked.

    It finds a required mount that is not there, two lines for one place, and a boot that orders in a circle. It knows nothing
    of mergerfs' options.
    """
    program, analyze = generator(), shutil.which("systemd-analyze")
    if program is None or analyze is None:
        return None
    try:
        before = _ask(program, analyze, old)
        after = _ask(program, analyze, new)
    except (OSError, subprocess.SubprocessError):
        return None
    if not {unit(mount.target) for mount in mounts} <= after[0]:
        # systemd before 246 reads no other file than /etc/fstab: what it says is not of this text.
        return None if not after[0] else [*after[1], "systemd makes no unit of some of the lines"]
    return [line for line in after[1] if line not in before[1]]


def _ask(program: str, analyze: str, text: bytes) -> tuple[set[str], list[str]]:
    """The mount units that come of a text, and what was said."""
    with tempfile.TemporaryDirectory(prefix="clustertune-") as name:
        folder = Path(name)
        places = [folder / part for part in ("normal", "early", "late")]
        for place in places:
            place.mkdir()
        fstab = folder / "fstab"
        fstab.write_bytes(text)
        env = {
            **{key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "LC_ALL")},
            "SYSTEMD_FSTAB": str(fstab),
            "SYSTEMD_SYSROOT_FSTAB": os.devnull,
            "SYSTEMD_LOG_TARGET": "console",
            "SYSTEMD_LOG_LEVEL": "info",
        }
        said = _run([program, *map(str, places)], env)
        units = {path.name for path in places[0].glob("*.mount")}
        env["SYSTEMD_UNIT_PATH"] = f"{places[0]}:"
        missing = not any(Path(folder, CLIENT).exists() for folder in UNITS)
        for file, body in CLIENT_UNITS.items() if missing else ():
            (places[0] / file).write_text(body)
        names = [str(places[0] / name) for name in sorted(units)]
        said += _run([analyze, "--man=no", "verify", *names, *([CLIENT] if missing else []), *TARGETS], env)
        lines = [line.replace(str(folder), "") for line in said if _TOLD.search(line)]
        return units, list(dict.fromkeys(line for line in lines if not line.startswith("Parsing ")))


def _run(argv: list[str], env: dict[str, str]) -> list[str]:
    done = captured(argv, _SECONDS, env)
    failed = [f"{Path(argv[0]).name} Failed with exit status {done.returncode}"] if done.returncode else []
    return [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()] + failed
