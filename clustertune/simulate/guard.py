"""A device guard that lets a CPU build of torch take fake tensors of ``cuda``: compiled once for each torch, on this machine.

torch offers none: ``torch._C._ensureCUDADeviceGuardSet`` does nothing in a CPU build (2.13), and without one indexing, autograd
and autocast of such tensors end in "PyTorch is not linked with support for cuda devices".
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from clustertune.resolve.resolved import expand_home

SOURCE = Path(__file__).with_name("guard.cpp")
COMPILER = "g++"


def cache_folder() -> Path:
    """This user's own, closed to others: code that a process loads lies there."""
    return expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "clustertune" / "guard"


def torch_folder() -> Path | None:
    """The installed torch, without importing it: the guard must be loaded before, as torch asks for its hooks once."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _name(torch: Path, compiler: str) -> str:
    """A hash of everything that the library is made of: the source, torch's version and place, the compiler."""
    version = (torch / "version.py").read_bytes()
    compiled = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    parts = (SOURCE.read_bytes(), version, str(torch).encode(), compiled)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _is_own(library: Path, digest: Path) -> bool:
    """Whether a built library is this user's, unwritable for others, and what the build left."""
    try:
        for path in (library.parent, library, digest):
            info = path.lstat()
            if info.st_uid != os.getuid() or info.st_mode & 0o022:
                return False
        return hashlib.sha256(library.read_bytes()).hexdigest() == digest.read_text()
    except OSError:
        return False


def build() -> tuple[Path | None, str]:
    """The guard's library, built if need be; None, and why, where it cannot be."""
    torch, compiler = torch_folder(), shutil.which(COMPILER)
    if torch is None:
        return None, "torch is not installed"
    if compiler is None:
        return None, f"there is no {COMPILER}"
    name, folder = _name(torch, compiler), cache_folder()
    library, digest = folder / f"{name[:32]}.so", folder / f"{name[:32]}.sha256"
    if _is_own(library, digest):
        return library, ""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            made = Path(aside, "guard.so")
            done = subprocess.run(_command(compiler, torch, made), capture_output=True, text=True, timeout=300, check=False)
            if done.returncode != 0:
                return None, f"{COMPILER} ended with {done.returncode}: {done.stderr.strip().partition(chr(10))[0]}"
            made.chmod(0o700)
            text = Path(aside, "digest")
            text.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
            text.chmod(0o600)
            made.replace(library)
            text.replace(digest)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"the guard was not built in {folder}: {error}"
    return (library, "") if _is_own(library, digest) else (None, f"others may write to {folder}")


def _command(compiler: str, torch: Path, library: Path) -> list[str]:
    include, libraries = torch / "include", torch / "lib"
    return [
        compiler, "-O1", "-shared", "-fPIC", "-std=c++20", str(SOURCE), "-o", str(library),
        f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-L{libraries}", f"-Wl,-rpath,{libraries}",
        "-Wl,--no-as-needed", "-lc10", "-ltorch_cpu", "-ltorch",
    ]  # fmt: skip


class Guard:
    """The loaded library: devices that a thread can be on."""

    def __init__(self, library: Path, devices: int) -> None:
        """To be called before torch is imported."""
        self._loaded = ctypes.CDLL(str(library))
        self._loaded.install_guard(devices)

    def current(self) -> int:
        """The calling thread's device."""
        return int(self._loaded.current_device())

    def set(self, index: int) -> None:
        """Put the calling thread on a device."""
        self._loaded.set_device(index)
