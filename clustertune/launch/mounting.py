"""Whether the mount of an image outlives a signal that Slurm sends to every process of a step (preemption, scancel).

A rootless Apptainer mounts the image with squashfuse, which ends with SIGTERM. launch/inside.sh puts launch/fuse/keep.sh in its
place, on the PATH. An Apptainer that brings a squashfuse of its own looks there first ("The internal bin
${prefix}/libexec/apptainer/bin is always included ... at the beginning of $PATH", apptainer.conf, BINARY PATH): it cannot be
shielded from here, and that is told.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from clustertune.config.cluster_schema import Container

PROBE_SECONDS = 60.0
HELPERS = ("squashfuse_ll", "squashfuse")


def unshielded(settings: Container) -> list[str]:
    """A warning where this machine's runtime mounts the image with a program that a signal ends; nothing else is one.

    Empty where the runtime is not here: a login node may have none, and the job looks again.
    """
    if settings.runtime not in ("apptainer", "singularity") or "--unsquash" in settings.options:
        return []
    folder = _own_folder(settings)
    if folder is None:
        return []
    return judge(settings, sorted(path.name for path in folder.iterdir()), str(folder))


def judge(settings: Container, own: Sequence[str], folder: str) -> list[str]:
    """``own``: what the runtime's folder of helpers, ``folder``, holds."""
    if "starter-suid" in own and "--userns" not in settings.options:
        return []  # the kernel mounts the image
    found = next((name for name in HELPERS if name in own), None)
    if found is None:
        return []
    text = f"the image is mounted by {folder}/{found}, which ends with any SIGTERM of Slurm's (preemption, scancel)"
    unsquash = "container.options: [--unsquash], or " if settings.runtime == "apptainer" else ""
    fix = f"{unsquash}PreemptParameters=send_user_signal, or that program out of the folder and squashfuse on the PATH"
    return [f"{text}: the steps since the newest checkpoint are lost then -> {fix}"]


def _own_folder(settings: Container) -> Path | None:
    """Where the runtime keeps its own helpers, as it says itself; None where it does not."""
    try:
        done = subprocess.run(
            [settings.command, "buildcfg"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = re.search(r"^LIBEXECDIR=(/.*)$", done.stdout, re.MULTILINE)
    name = re.search(r"^PACKAGE_NAME=([a-z-]+)$", done.stdout, re.MULTILINE)
    if not said or not name:
        return None
    folder = Path(said[1]) / name[1].partition("-")[0] / "bin"
    return folder if folder.is_dir() else None
