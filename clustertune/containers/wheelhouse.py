"""A folder with every wheel of a lock, each held to its hash: the image build installs from it with no index at all.

The packages come here, on the machine that builds, with its own pip settings: no index, certificate or password of it gets
near the image. What has no wheel is built from its hashed source archive with build tools that are locked by hash as well,
so that nothing unhashed is fetched or run. pip does the fetching and compares the hashes; uv has no ``download``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from clustertune.containers import lock as locks
from clustertune.containers import pins
from clustertune.containers.lock import LockedPackage, PackageLock, file_digest, text_digest
from clustertune.containers.pins import normal
from clustertune.errors import ExitCode, Problem, UserError, storing
from clustertune.process import captured

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
    with storing("gather the wheels", folder):
        folder.mkdir(parents=True, exist_ok=True)
        python = _tools(tools, say)
        present, wanted = _keep(lock, folder), dict(lock.entries)
        missing = [entry for name, entry in sorted(wanted.items()) if name not in present]
        fetched = [entry for entry in missing if entry.name not in lock.from_source]
        if fetched:
            say(f"fetching {len(fetched)} of {len(wanted)} packages of {lock.name}.lock")
            # For another Python and platform than pip's own. It does not know that glibc is upward compatible.
            tags = [word for tag in locks.platform_tags(lock.platform) for word in ("--platform", tag)]
            target = ["--implementation", "cp", "--python-version", lock.python, *tags, "--dest", str(folder)]
            _pip(python, "download", fetched, lock, ["--only-binary", ":all:", *target])
        for entry in missing:
            if entry.name in lock.from_source:
                say(f"building {entry.name} {entry.version} from source")
                _build(python, entry, lock, folder)
        present = _keep(lock, folder)
        if gone := sorted(set(wanted) - set(present)):
            text = f"pip left no wheel for {', '.join(gone)}"
            raise UserError(text, ExitCode.FAILED, file=str(folder), fix="remove the folder")
        wheels = [present[name] for name in sorted(wanted)]
        lines = (LockedPackage(wheel.entry.name, wheel.entry.version, (wheel.digest,)).text() for wheel in wheels)
        text, file = "".join(lines), folder / REQUIREMENTS
        if not file.exists() or file.read_text() != text:  # another build may be reading it
            file.write_text(text)
    return wheels


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
        requirement, archive = r"(?m)^ +([A-Za-z0-9][\w.-]*)==(\S+)[^\n]*:$", r"(?m)^ +(\S+?)-(\d\S*)"
        named = re.search(requirement, plain) or re.search(archive, plain)
        said = " ".join(plain[plain.find("DO NOT MATCH") :].split())[:600]
        message = f"a file has another hash than the one that is locked: {said}"
        fix = "do not install it: an index (or the lock) was altered; make lock-check shows which"
        return Problem(message, file, named[1] if named else None, fix)
    if missing := re.search(r"No matching distribution found for (\S+)", plain):
        fix = "look at pip's settings: pip config list"
        if "+" in missing[1]:
            fix = "name an index that has it: PIP_EXTRA_INDEX_URL=<url> make ..."
        return Problem(f"no index of this machine's pip has {missing[1]} for Python {lock.python}", file, fix=fix)
    said = " ".join(plain.split())[-800:]
    return Problem(f"pip {verb} failed: {said}", file, fix="the same command continues where it stopped")


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
            shutil.rmtree(path)
            continue
        entry = lock.entries.get(normal(path.name.partition("-")[0]))
        digest = file_digest(path) if entry else ""
        source = built.get(digest, "")
        if entry and entry.name not in found and (digest in entry.hashes or (source and source in entry.hashes)):
            found[entry.name] = Wheel(entry, path, digest, source)
        else:
            path.unlink()
    return found


# --- a stand-in for the base image ------------------------------------------------------------------------------------

# A stand-in for the base image: a minimal Debian or Ubuntu of its own archive, for machines (CI) that reach no registry.


STANDIN_SECONDS = 1800
PYTHONS = ("3.11", "3.12")
"""Whose Python a stand-in can have: Debian bookworm's and Ubuntu noble's."""
_LEFT_OUT = ("dev/", "etc/hostname", "etc/resolv.conf", "etc/machine-id", "var/log/", "var/cache/ldconfig/")
"""Device nodes (a build in a user namespace cannot make them), and what names this machine or this hour."""
_NO_DOCS = [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("man", "doc", "locale")]


def suite_of(python: str) -> str:
    """The distribution whose Python it is."""
    return pins.read_bases()[f"STANDIN_{python.replace('.', '_')}"]


def make_standin(python: str, out: Path, say: Callable[[str], None]) -> None:
    """Write the stand-in with that Python to ``out``, a docker-archive: ``podman load`` and Apptainer read it.

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
            _strip(scratch / "root.tar", scratch / "layer.tar")
            _as_image(scratch, f"clustertune-standin:{suite}", scratch / "image.tar")
            (scratch / "image.tar").replace(out)


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
        done = captured([*command, *_NO_DOCS, *keys, suite, str(out), mirror], STANDIN_SECONDS)
    except subprocess.TimeoutExpired as error:
        text = f"mmdebstrap took over {STANDIN_SECONDS} s"
        raise UserError(text, ExitCode.AGAIN, fix="look at the network") from error
    if done.returncode:
        text = f"mmdebstrap: {done.stderr.strip()[-600:]}"
        raise UserError(text, ExitCode.FAILED, fix="look at the network and at the free space")


def _strip(whole: Path, layer: Path) -> None:
    with tarfile.open(whole) as source, tarfile.open(layer, "w", format=tarfile.PAX_FORMAT) as target:
        for member in source:
            name = member.name.removeprefix("./")
            if name.startswith(_LEFT_OUT) and not (member.isdir() and f"{name}/" in _LEFT_OUT):
                continue
            target.addfile(member, source.extractfile(member) if member.isreg() else None)
    whole.unlink()


def _as_image(scratch: Path, name: str, out: Path) -> None:
    """A docker-archive of one layer (https://github.com/moby/docker-image-spec/blob/main/v1.2.md)."""
    layer = scratch / "layer.tar"
    digest = file_digest(layer)
    asked = captured(["dpkg", "--print-architecture"], 30)
    if asked.returncode != 0:
        raise UserError(f"dpkg does not name the architecture: {asked.stderr.strip()[-300:]}", fix="repair dpkg on this host")
    machine = asked.stdout.strip()
    config = {
        "architecture": machine, "os": "linux", "created": "1970-01-01T00:00:00Z",
        "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}, "history": [{"created": "1970-01-01T00:00:00Z"}],
    }  # fmt: skip
    (scratch / "config.json").write_text(json.dumps(config))
    (scratch / "manifest.json").write_text(json.dumps([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]))
    with tarfile.open(out, "w") as archive:
        for part in ("manifest.json", "config.json", "layer.tar"):
            archive.add(scratch / part, arcname=part)
