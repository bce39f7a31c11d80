"""A folder with every wheel of a lock, each held to its hash: the image build installs from it with no index at all.

The packages come here, on the machine that builds, with its own pip settings: no index, certificate or password of it gets
near the image. What has no wheel is built from its hashed source archive with build tools that are locked by hash as well,
so that nothing unhashed is fetched or run. pip does the fetching and compares the hashes; uv has no ``download``.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clustertune.containers import lockfile
from clustertune.containers.lockfile import LockedPackage, PackageLock
from clustertune.containers.pins import FOLDER, normal
from clustertune.errors import ExitCode, Problem, UserError, storage_error

FETCH_SECONDS = 3600
BUILT = "built.txt"
"""In the wheelhouse: for each wheel that was built here, its hash and the hash of its source archive."""
REQUIREMENTS = "requirements.txt"


@dataclass(frozen=True)
class Wheel:
    """One file of a wheelhouse."""

    entry: LockedPackage
    path: Path
    digest: str
    """SHA-256 of the file."""
    source: str = ""
    """SHA-256 of the source archive that it was built from; empty: the lock names the file itself."""


def fill(lock: PackageLock, folder: Path, tools: Path, say: Callable[[str], None]) -> list[Wheel]:
    """Every wheel of the lock in ``folder``, nothing else in it but the requirements that pip installs from.

    What is there already and has the right hash stays. Raises UserError where a hash does not match or a package is not found.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        python = _tools(tools, say)
        present, wanted = _keep(lock, folder), dict(lock.entries)
        missing = [entry for name, entry in sorted(wanted.items()) if name not in present]
        fetched = [entry for entry in missing if entry.name not in lock.from_source]
        if fetched:
            say(f"fetching {len(fetched)} of {len(wanted)} packages of {lock.name}.lock")
            _pip(python, "download", fetched, lock, ["--only-binary", ":all:", *_target(lock), "--dest", str(folder)])
        for entry in missing:
            if entry.name in lock.from_source:
                say(f"building {entry.name} {entry.version} from source")
                _build(python, entry, lock, folder)
        present = _keep(lock, folder)
        if gone := sorted(set(wanted) - set(present)):
            raise UserError(
                Problem(f"pip left no wheel for {', '.join(gone)}", str(folder), fix="remove the folder"), ExitCode.FAILED
            )
        wheels = [present[name] for name in sorted(wanted)]
        lines = (LockedPackage(wheel.entry.name, wheel.entry.version, (wheel.digest,)).text() for wheel in wheels)
        text, file = "".join(lines), folder / REQUIREMENTS
        if not file.exists() or file.read_text() != text:  # another build may be reading it
            file.write_text(text)
    except OSError as error:
        raise storage_error(error, "gather the wheels", folder) from error
    return wheels


def _tools(folder: Path, say: Callable[[str], None]) -> Path:
    """The Python of a virtual environment that holds the locked build tools, and nothing else."""
    lock = lockfile.read(FOLDER / "build.lock")
    python, ready = folder / "bin" / "python", folder / "ready"
    wanted = text_digest(lock.text())
    if ready.is_file() and ready.read_text() == wanted and python.exists():
        return python
    say(f"build tools: {', '.join(f'{entry.name} {entry.version}' for entry in lock.entries.values())}")
    try:
        venv.create(folder, with_pip=True, clear=True)
    except subprocess.CalledProcessError as error:
        fix = "take another Python (make build-sif PYTHON=...), on Debian install python3-venv"
        raise UserError(Problem(f"{sys.executable} makes no virtual environment with pip", fix=fix)) from error
    _pip(python, "install", list(lock.entries.values()), lock, ["--only-binary", ":all:"])
    ready.write_text(wanted)
    return python


def _target(lock: PackageLock) -> list[str]:
    """pip's options for another Python and platform than its own. It does not know that glibc is upward compatible."""
    tags = (word for tag in lockfile.platform_tags(lock.platform) for word in ("--platform", tag))
    return ["--implementation", "cp", "--python-version", lock.python, *tags]


def _pip(python: Path, verb: str, entries: list[LockedPackage], lock: PackageLock, options: list[str]) -> None:
    """pip with the entries' hashes; nothing that they do not name. Its message is the error, without the index's address."""
    requested = python.parent.parent / f"asked-{os.getpid()}.txt"
    requested.write_text("".join(entry.text() for entry in entries))
    command = [
        str(python), "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", verb, "--quiet", "--no-deps",
        "--require-hashes", "--requirement", str(requested), *options,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            Problem(f"pip {verb} took over {FETCH_SECONDS} s", fix="the same command continues"), ExitCode.AGAIN
        ) from error
    finally:
        requested.unlink()
    if done.returncode:
        raise UserError(_explain(done.stderr, verb, lock))


def _explain(stderr: str, verb: str, lock: PackageLock) -> Problem:
    file = f"containers/{lock.name}.lock"
    plain = re.sub(r"https?://\S+|file://\S+", "<index>", stderr)
    if "DO NOT MATCH THE HASHES" in plain:
        named = re.search(r"^ +([A-Za-z0-9][\w.-]*)==(\S+)[^\n]*:$", plain, re.MULTILINE) or re.search(
            r"^ +(\S+?)-(\d\S*)", plain, re.MULTILINE
        )
        message = (
            "a file has another hash than the one that is locked: "
            + " ".join(plain[plain.find("DO NOT MATCH") :].split())[:600]
        )
        fix = "do not install it: an index (or the lock) was altered; make lock-check shows which"
        return Problem(message, file, named[1] if named else None, fix)
    if missing := re.search(r"No matching distribution found for (\S+)", plain):
        fix = (
            "name an index that has it: PIP_EXTRA_INDEX_URL=<url> make ..."
            if "+" in missing[1]
            else "look at pip's settings: pip config list"
        )
        return Problem(f"no index of this machine's pip has {missing[1]} for Python {lock.python}", file, fix=fix)
    return Problem(
        f"pip {verb} failed: {' '.join(plain.split())[-800:]}", file, fix="the same command continues where it stopped"
    )


def _build(python: Path, entry: LockedPackage, lock: PackageLock, folder: Path) -> None:
    """A wheel of plain Python from the hashed source archive, with the locked tools: compiled code would be this machine's."""
    scratch = folder / f"build-{entry.name}"
    options = ["--no-build-isolation", "--no-binary", ":all:", "--wheel-dir", str(scratch)]
    _pip(python, "wheel", [entry], lock, options)
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1 or not wheels[0].name.endswith("-none-any.whl"):
        what = f"its source builds {[wheel.name for wheel in wheels]}, not one wheel of plain Python"
        raise UserError(Problem(what, f"containers/{lock.name}.lock", entry.name, "take a version that comes as a wheel"))
    digest = file_digest(wheels[0])
    target = folder / wheels[0].name
    wheels[0].replace(target)
    scratch.rmdir()
    with (folder / BUILT).open("a") as file:
        file.write(f"{digest} {entry.hashes[0]} {target.name}\n")


def _keep(lock: PackageLock, folder: Path) -> dict[str, Wheel]:
    """The wheels that are there and are the lock's; every other file is removed."""
    lines = (folder / BUILT).read_text().splitlines() if (folder / BUILT).is_file() else []
    built = dict(line.split(" ")[:2] for line in lines)
    found: dict[str, Wheel] = {}
    for path in sorted(folder.iterdir()):
        if path.name in (BUILT, REQUIREMENTS):
            continue
        if path.is_dir():
            for left in path.iterdir():
                left.unlink()
            path.rmdir()
            continue
        entry = lock.entries.get(normal(path.name.partition("-")[0]))
        digest = file_digest(path) if entry else ""
        source = built.get(digest, "")
        if entry and entry.name not in found and (digest in entry.hashes or (source and source in entry.hashes)):
            found[entry.name] = Wheel(entry, path, digest, source)
        else:
            path.unlink()
    return found


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_digest(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
