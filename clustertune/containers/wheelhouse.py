"""A folder with every wheel of a lock, each held to its hash: the image build installs from it with no index at all.

The packages come here, on the machine that builds, with its own pip settings: no index, certificate or password of it gets
near the image. What has no wheel is built from its hashed source archive with build tools that are locked by hash as well,
so that nothing unhashed is fetched or run. pip does the fetching and compares the hashes; uv has no ``download``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Callable, Mapping
from pathlib import Path

from clustertune.containers import package_lock as locks
from clustertune.containers import pins
from clustertune.containers.package_lock import LockedPackage, PackageLock, file_digest, text_digest
from clustertune.errors import ExitCode, Problem, UserError, storing
from clustertune.process import captured

FETCH_SECONDS = 3600
REQUIREMENTS = "requirements.txt"


def fill(lock: PackageLock, folder: Path, tools: Path, say: Callable[[str], None]) -> None:
    """Every wheel of the lock in ``folder``, and, last, the requirements with hashes from which the image's pip installs.

    Raises UserError where a hash does not match or a package is not found.
    """
    if (folder / REQUIREMENTS).exists():
        return
    with storing("gather the wheels", folder):
        folder.mkdir(parents=True, exist_ok=True)
        python = _tools(tools, say)
        entries = [lock.entries[name] for name in sorted(lock.entries)]
        say(f"fetching the {len(entries)} packages of {lock.name}.lock")
        # For another Python and platform than pip's own. It does not know that glibc is upward compatible.
        tags = [word for tag in locks.platform_tags(lock.platform) for word in ("--platform", tag)]
        target = ["--implementation", "cp", "--python-version", lock.python, *tags, "--dest", str(folder)]
        fetched = [entry for entry in entries if entry.name not in lock.from_source]
        if fetched:  # what an earlier call has fetched is not fetched again
            _pip(python, "download", fetched, lock, ["--only-binary", ":all:", *target])
        made = [_build(python, entry, lock, folder, say) if entry.name in lock.from_source else entry for entry in entries]
        scratch = folder / f".{REQUIREMENTS}"
        scratch.write_text("".join(entry.text() for entry in made))
        scratch.replace(folder / REQUIREMENTS)


def _tools(folder: Path, say: Callable[[str], None]) -> Path:
    """The Python of a virtual environment that holds the locked build tools, and nothing else."""
    lock = locks.read(locks.path_of("build"))
    python, ready = folder / "bin" / "python", folder / "ready"
    wanted = text_digest(lock.text())
    if ready.is_file() and ready.read_text() == wanted and python.exists():
        return python
    say(f"build tools: {', '.join(f'{entry.name} {entry.version}' for entry in lock.entries.values())}")
    try:
        venv.create(folder, with_pip=True, clear=True)
    except subprocess.CalledProcessError as error:
        fix = "take another Python (make build-sif PYTHON=...), on Debian install python3-venv"
        raise UserError(f"{sys.executable} makes no virtual environment with pip", fix=fix) from error
    _pip(python, "install", list(lock.entries.values()), lock, ["--only-binary", ":all:"])
    ready.write_text(wanted)
    return python


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
        text = f"pip {verb} took over {FETCH_SECONDS} s"
        raise UserError(text, ExitCode.AGAIN, fix="the same command continues") from error
    finally:
        requested.unlink()
    if done.returncode:
        raise UserError(_explain(done.stderr, verb, lock))


def _explain(stderr: str, verb: str, lock: PackageLock) -> Problem:
    file = f"containers/{lock.name}.lock"
    plain = re.sub(r"https?://\S+|file://\S+", "<index>", stderr)
    if "DO NOT MATCH THE HASHES" in plain:
        said = " ".join(plain[plain.find("DO NOT MATCH") :].split())[:600]
        fix = "do not install it: an index (or the lock) was altered; make lock-check shows which"
        return Problem(f"a file has another hash than the one that is locked: {said}", file, fix=fix)
    if missing := re.search(r"No matching distribution found for (\S+)", plain):
        fix = "look at pip's settings: pip config list"
        if "+" in missing[1]:
            fix = "name an index that has it: PIP_EXTRA_INDEX_URL=<url> make ..."
        return Problem(f"no index of this machine's pip has {missing[1]} for Python {lock.python}", file, fix=fix)
    said = " ".join(plain.split())[-800:]
    return Problem(f"pip {verb} failed: {said}", file, fix="the same command continues where it stopped")


def _build(python: Path, entry: LockedPackage, lock: PackageLock, folder: Path, say: Callable[[str], None]) -> LockedPackage:
    """A wheel of plain Python from the hashed source archive, with the locked tools: compiled code would be this machine's.

    Returns the package with the hash of the wheel.
    """
    say(f"building {entry.name} {entry.version} from source")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _pip(python, "wheel", [entry], lock, ["--no-build-isolation", "--no-binary", ":all:", "--wheel-dir", scratch])
        wheels = list(Path(scratch).glob("*.whl"))
        if len(wheels) != 1 or not wheels[0].name.endswith("-none-any.whl"):
            what = f"its source builds {[wheel.name for wheel in wheels]}, not one wheel of plain Python"
            raise UserError(Problem(what, f"containers/{lock.name}.lock", entry.name, "take a version that comes as a wheel"))
        wheel = wheels[0].replace(folder / wheels[0].name)
    return LockedPackage(entry.name, entry.version, (file_digest(wheel),))


# --- a stand-in for the base image ------------------------------------------------------------------------------------

# A stand-in for the base image: a minimal Debian or Ubuntu of its own archive, for machines (CI) that reach no registry.


STANDIN_SECONDS = 1800
PYTHONS = ("3.11", "3.12")
"""Whose Python a stand-in can have: Debian bookworm's and Ubuntu noble's."""
_LEFT_OUT = (
    "--skip=output/dev",
    '--customize-hook=cd "$1" && rm -rf etc/hostname etc/resolv.conf etc/machine-id var/log/* var/cache/ldconfig/*',
    *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("man", "doc", "locale")),
)
"""Device nodes (a build in a user namespace cannot make them), what names this machine or this hour, and what nobody reads."""


def suite_of(python: str) -> str:
    """The distribution whose Python it is."""
    return pins.read_bases()[f"STANDIN_{python.replace('.', '_')}"]


def make_standin(python: str, out: Path, say: Callable[[str], None]) -> None:
    """Write the files of a stand-in with that Python to ``out``, as tar: for ``podman import``, and Apptainer's ``localimage``.

    Raises UserError where mmdebstrap is missing or fails.
    """
    bases, suite = pins.read_bases(), suite_of(python)
    if not shutil.which("mmdebstrap"):
        fix = "apt-get install mmdebstrap, or name a base: BASE=NAME@sha256:DIGEST"
        raise UserError("mmdebstrap is not here", fix=fix)
    say(f"stand-in base: {suite} with Python {python}")
    with storing("write the stand-in base", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            scratch = Path(folder)
            scratch.chmod(0o755)  # apt reads the keys as a user of its own
            keys = [f"--keyring={path}"] if (path := _keyring(suite, bases, scratch)) else []
            mirror = f"deb {bases[f'ARCHIVE_{suite.upper()}']} {suite} main"
            _debootstrap(suite, mirror, keys, scratch / "root.tar")
            (scratch / "root.tar").replace(out)


def _keyring(suite: str, bases: Mapping[str, str], scratch: Path) -> Path | None:
    """The keys of a distribution that is not this machine's, out of its package, which is held to its hash."""
    key, file = f"KEYS_{suite.upper()}", "containers/base.env"
    address = bases.get(key)
    if not address:
        return None
    deb = scratch / "keys.deb"
    if not address.startswith(("http://", "https://")):
        raise UserError(f"{address}: no web address", file=file, key=key)
    try:
        with urllib.request.urlopen(address, timeout=60) as response:  # noqa: S310 (looked at above)
            data = response.read()
    except OSError as error:
        raise UserError(f"{address}: {error}", ExitCode.FAILED, file=file, fix="look at the network") from error
    if hashlib.sha256(data).hexdigest() != bases[f"{key}_SHA256"]:
        raise UserError(f"{address} has another hash than the one that is written down", file=file)
    deb.write_bytes(data)
    subprocess.run(["dpkg-deb", "--extract", str(deb), str(scratch / "keys")], check=True, timeout=60)
    return next((scratch / "keys" / "usr" / "share" / "keyrings").glob("*-archive-keyring.gpg"))


def _debootstrap(suite: str, mirror: str, keys: list[str], out: Path) -> None:
    command = ["mmdebstrap", "--quiet", "--variant=minbase", "--format=tar", "--include=apt,ca-certificates,python3"]
    try:
        done = captured([*command, *_LEFT_OUT, *keys, suite, str(out), mirror], STANDIN_SECONDS)
    except subprocess.TimeoutExpired as error:
        text = f"mmdebstrap took over {STANDIN_SECONDS} s"
        raise UserError(text, ExitCode.AGAIN, fix="look at the network") from error
    if done.returncode:
        text = f"mmdebstrap: {done.stderr.strip()[-600:]}"
        raise UserError(text, ExitCode.FAILED, fix="look at the network and at the free space")
