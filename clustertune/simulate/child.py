"""The process that simulates: ``python -m clustertune.simulate.child SPEC`` imports the libraries once and forks each rank,
and once more the rank that resumes from what it saved.

``SPEC`` is a JSON file that :mod:`clustertune.simulate.simulator` writes. On stdout come lines of JSON: progress, and of
each rank what was counted, or where it failed. What libraries print goes to stderr.

Before torch it loads a device guard that lets a CPU build of torch take fake tensors of ``cuda``: compiled once for each torch,
on this machine. torch offers none: ``torch._C._ensureCUDADeviceGuardSet`` does nothing in a CPU build (2.13), and without one
indexing, autograd and autocast of such tensors end in "PyTorch is not linked with support for cuda devices".
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from clustertune.resolve.resolved import expand_home

# --- the guard -----------------------------------------------------------------------------------------------------------

SOURCE = Path(__file__).with_name("guard.cpp")
COMPILER = "g++"


def cache_folder() -> Path:
    """This user's own, closed to others: code that a process loads lies there."""
    return expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "clustertune" / "guard"


def torch_folder() -> Path | None:
    """The installed torch, without importing it: the guard must be loaded before, as torch asks for its hooks once."""
    found = importlib.util.find_spec("torch")
    return Path(found.origin).parent if found is not None and found.origin else None


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
            found = path.lstat()
            if found.st_uid != os.getuid() or found.st_mode & 0o022:
                return False
        return hashlib.sha256(library.read_bytes()).hexdigest() == digest.read_text()
    except OSError:
        return False


def build_guard() -> tuple[Path | None, str]:
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


# --- the process ---------------------------------------------------------------------------------------------------------

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}  # fmt: skip


def main() -> int:
    """All ranks of the file, one after the other."""
    began = time.perf_counter()
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ |= ENVIRONMENT
    guard = None
    if spec["library"] is not None:
        guard = Guard(Path(spec["library"]), spec["ranks"][0]["on_node"])  # before torch: it asks for its hooks once
    from clustertune.simulate import one_rank

    for one in spec["ranks"]:
        with tempfile.TemporaryDirectory(prefix="clustertune-simulate-") as folder:
            # On one GPU transformers would read the bytes of whole files.
            for resumes in (False, True) if spec["world"] > 1 else (False,):
                child = os.fork()
                if child == 0:
                    os._exit(one_rank.run(spec, one, guard, out, began, Path(folder), resumes=resumes))
                _, status = os.waitpid(child, 0)
                if os.WIFSIGNALED(status):
                    out.write(json.dumps({"rank": one["rank"], "signal": os.WTERMSIG(status)}) + "\n")
                if status != 0:
                    break
    return 0


if __name__ == "__main__":
    sys.exit(main())
