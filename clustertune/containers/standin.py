"""A stand-in for the base image: a minimal Debian or Ubuntu of its own archive, for machines (CI) that reach no registry."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from clustertune.containers import pins
from clustertune.containers.wheelhouse import file_digest
from clustertune.errors import ExitCode, Problem, UserError, storage_error
from clustertune.process import captured

BUILD_SECONDS = 1800
PYTHONS = ("3.11", "3.12")
"""Whose Python a stand-in can have: Debian bookworm's and Ubuntu noble's."""
_LEFT_OUT = ("dev/", "etc/hostname", "etc/resolv.conf", "etc/machine-id", "var/log/", "var/cache/ldconfig/")
"""Device nodes (a build in a user namespace cannot make them), and what names this machine or this hour."""
_NO_DOCS = [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("man", "doc", "locale")]


def suite_of(python: str) -> str:
    """The distribution whose Python it is."""
    return pins.read_bases()[f"STANDIN_{python.replace('.', '_')}"]


def make(python: str, out: Path, say: Callable[[str], None]) -> None:
    """Write the stand-in with that Python to ``out``, a docker-archive: ``podman load`` and Apptainer read it.

    Raises UserError where mmdebstrap is missing or fails.
    """
    bases, suite = pins.read_bases(), suite_of(python)
    if not shutil.which("mmdebstrap"):
        raise UserError(
            Problem("mmdebstrap is not here", fix="apt-get install mmdebstrap, or name a base: BASE=NAME@sha256:DIGEST")
        )
    say(f"stand-in base: {suite} with Python {python}")
    try:
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
    except OSError as error:
        raise storage_error(error, "write the stand-in base", out) from error


def _keyring(suite: str, bases: Mapping[str, str], scratch: Path) -> Path | None:
    """The keys of a distribution that is not this machine's, out of its package, which is held to its hash."""
    address = bases.get(f"KEYS_{suite.upper()}")
    if not address:
        return None
    deb = scratch / "keys.deb"
    if not address.startswith(("http://", "https://")):
        raise UserError(Problem(f"{address}: no web address", "containers/base.env", f"KEYS_{suite.upper()}"))
    try:
        with urllib.request.urlopen(address, timeout=60) as response:  # noqa: S310 (looked at above)
            data = response.read()
    except OSError as error:
        raise UserError(
            Problem(f"{address}: {error}", "containers/base.env", fix="look at the network"), ExitCode.FAILED
        ) from error
    if hashlib.sha256(data).hexdigest() != bases[f"KEYS_{suite.upper()}_SHA256"]:
        raise UserError(Problem(f"{address} has another hash than the one that is written down", "containers/base.env"))
    deb.write_bytes(data)
    subprocess.run(["dpkg-deb", "--extract", str(deb), str(scratch / "keys")], check=True, timeout=60)
    return next((scratch / "keys" / "usr" / "share" / "keyrings").glob("*-archive-keyring.gpg"))


def _debootstrap(suite: str, mirror: str, keys: list[str], out: Path) -> None:
    command = [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        "--format=tar",
        "--include=apt,ca-certificates,python3",
        *_NO_DOCS,
        *keys,
    ]
    try:
        done = captured([*command, suite, str(out), mirror], BUILD_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            Problem(f"mmdebstrap took over {BUILD_SECONDS} s", fix="look at the network"), ExitCode.AGAIN
        ) from error
    if done.returncode:
        raise UserError(
            Problem(f"mmdebstrap: {done.stderr.strip()[-600:]}", fix="look at the network and at the free space"),
            ExitCode.FAILED,
        )


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
    machine = subprocess.run(
        ["dpkg", "--print-architecture"], capture_output=True, text=True, timeout=30, check=True
    ).stdout.strip()
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
