"""Wheels and source archives made on the spot, and a lock of them: what an index would serve."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

from clustertune.containers.lock_file import LockedPackage, PackageLock


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wheel(folder: Path, name: str, version: str = "1.0", text: str = "x = 1\n", tag: str = "py3-none-any") -> Path:
    """A wheel of one module."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-{version}-{tag}.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


def sdist(folder: Path, name: str, version: str = "1.0", setup: str = "") -> Path:
    """A source archive that setuptools builds."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}.tar.gz"
    body = setup or f"from setuptools import setup\nsetup(name='{name}', version='{version}', py_modules=['{name}'])\n"
    parts = {
        "setup.py": body,
        f"{name}.py": "x = 2\n",
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    }
    with tarfile.open(path, "w:gz") as archive:
        for part, text in parts.items():
            member = tarfile.TarInfo(f"{name}-{version}/{part}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def lock_of(*files: Path) -> PackageLock:
    """A lock of these files."""
    entries = {}
    for path in files:
        name, version = path.name.removesuffix(".tar.gz").split("-")[:2]
        entries[name] = LockedPackage(name, version, (digest(path),))
    sources = tuple(sorted(path.name.partition("-")[0] for path in files if path.suffix == ".gz"))
    return PackageLock("train", "3.12", "x86_64-manylinux_2_28", "2030-01-31", entries, sources)
