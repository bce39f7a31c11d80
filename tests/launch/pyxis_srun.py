#!/usr/bin/env python3
"""An srun with the options of pyxis: refuses what the plugin would refuse, then runs the command as one task on this machine.

The options and their forms are those of args.c of NVIDIA/pyxis and of its wiki's page on usage. Stands in for a cluster with
enroot: ``PYXIS_RECORD`` gets what it understood, ``PYXIS_PYTHON`` is the image's python3.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

FLAGS = ("mount-home", "remap-root", "entrypoint", "writable")
SLURM = ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "mem", "kill-on-bad-exit", "gpu-bind", "export", "nodelist")


def fail(text: str) -> NoReturn:
    sys.exit(f"srun: error: pyxis: {text}")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    for name in SLURM:
        found.add_argument(f"--{name}")
    for name in ("overlap", "unbuffered", "label"):
        found.add_argument(f"--{name}", action="store_true")
    for name in ("image", "mounts", "workdir", "name", "save", "env"):
        found.add_argument(f"--container-{name}", action="append", help="[pyxis]")
    for name in FLAGS:
        no = "--container-readonly" if name == "writable" else f"--no-container-{name}"
        found.add_argument(f"--container-{name}", action="store_true", help="[pyxis]")
        found.add_argument(no, action="store_true", dest=f"no_{name.replace('-', '_')}", help="[pyxis]")
    found.add_argument("--container-entrypoint-log", action="store_true")
    found.add_argument("command", nargs=argparse.REMAINDER)
    return found


def mount(text: str) -> list[str]:
    """``SRC:DST[:FLAGS]``, and what the plugin says about it."""
    parts = text.split(":")
    source, target = parts[0], parts[1] if len(parts) > 1 else parts[0]
    if not source or not target or len(parts) > 3:
        fail(f"--container-mounts: invalid format: {text}")
    if source[0] not in "./" and source not in ("tmpfs", "umount"):
        fail("mount source must be a relative path, an absolute path, tmpfs or umount")
    if target[0] not in "./":
        fail("mount target must be a relative path or an absolute path")
    if source[0] == "/" and not Path(source).exists():
        fail(f"mount: {source}: no such file")
    return [source, target, *parts[2:]]


def main() -> None:
    given = parser().parse_args()
    for name in ("image", "workdir"):
        if len(getattr(given, f"container_{name}") or []) != 1:
            fail(f"--container-{name} specified {len(getattr(given, f'container_{name}') or [])} times")
    for name in FLAGS:
        if getattr(given, f"container_{name.replace('-', '_')}") and getattr(given, f"no_{name.replace('-', '_')}"):
            fail(f"both --container-{name} and its contrary were specified")
    mounts = [mount(part) for words in given.container_mounts or [] for part in words.split(",")]
    named = [part for words in given.container_env or [] for part in words.split(",")]
    if "" in named:
        fail("--container-env: invalid format")
    environment = {}
    for word in (given.export or "").split(","):
        name, equals, value = word.partition("=")
        if equals or name in os.environ:
            environment[name] = value if equals else os.environ[name]
    document = {
        "image": given.container_image[0],
        "mounts": mounts,
        "env": environment,
        "command": given.command,
        "options": sys.argv[1:],
    }
    with Path(os.environ["PYXIS_RECORD"]).open("a") as record:
        record.write(json.dumps(document) + "\n")
    os.chdir(given.container_workdir[0])
    python = os.environ["PYXIS_PYTHON"] if given.command[0] == "python3" else given.command[0]
    os.execve(python, [python, *given.command[1:]], {**environment, "SLURM_NODEID": "0"})  # noqa: S606 - as enroot does


if __name__ == "__main__":
    main()
