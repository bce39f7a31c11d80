"""From ``versions.env`` to locks with hashes (uv resolves), and whether the locks still are what the pins give.

uv's own ``--generate-hashes`` names every file of a version, so that pip could install a source archive or another platform's
wheel: of uv's answer the lock keeps the files that fit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.containers import lockfile, pins
from clustertune.containers.lockfile import LockedPackage, PackageLock
from clustertune.containers.pins import BUILD, DEV, EXTRA, PY, REF, Pins, normal
from clustertune.containers.wheelhouse import file_digest
from clustertune.errors import ExitCode, Problem, UserError

RESOLVE_SECONDS = 900
X86, ARM = "x86_64-manylinux_2_28", "aarch64-manylinux_2_28"
"""torch's wheels ask for glibc 2.28."""
ANY = "any"
_CUDA_ONLY = re.compile(r"(nvidia|cuda)-(?!ml-py$).*|triton")
"""What only torch's CUDA build asks for."""


@dataclass(frozen=True)
class LockSpec:
    """What a lock holds."""

    name: str
    requirements: Callable[[Pins], list[str]]
    python: str = "3.12"
    platform: str = X86
    on_top_of: str = ""

    @property
    def path(self) -> Path:
        """Its file."""
        return path_of(self.name)


def path_of(name: str) -> Path:
    """The file of a lock."""
    return pins.FOLDER / f"{name}.lock"


CHOSEN_BY_THE_STACK = ("huggingface-hub", "numpy", "safetensors", "tokenizers")
"""What the reference's packages bound themselves, each to another range than today's."""


def _exactly(group: Mapping[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in group.items()]


def stack(found: Pins) -> list[str]:
    """The training image: the stack, and pip, with which a person lists it."""
    return [*_exactly(found[PY]), f"pip=={found[BUILD]['pip']}"]


def reference(found: Pins) -> list[str]:
    """The source document's stack to the version; what clustertune itself needs beside it at its own versions."""
    beside = {name: version for name, version in found[PY].items() if name not in {*found[REF], *CHOSEN_BY_THE_STACK}}
    return [*_exactly(found[REF]), *CHOSEN_BY_THE_STACK, *_exactly(beside), f"pip=={found[BUILD]['pip']}"]


def cpu_stack(found: Pins) -> list[str]:
    """The CPU variant: the stack and DeepSpeed, so that the image's own test compiles what the ZeRO recipes need."""
    return [*stack(found), f"deepspeed=={found[DEV]['deepspeed']}"]


NVCC = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
"""The CUDA compiler, as wheels."""


def extra(name: str) -> Callable[[Pins], list[str]]:
    """One optional package (Ray and DeepSpeed are pinned with the tests' tools), and what it compiles with."""
    beside = NVCC if name == "deepspeed" else ()
    return lambda found: [f"{one}=={found[EXTRA].get(one) or found[DEV][one]}" for one in (name, *beside)]


def serving(found: Pins) -> list[str]:
    """vLLM asks for a torch of its own and takes no other: an image of its own, to generate and score."""
    beside = ("lm-eval", "nltk", "langdetect", "immutabledict")
    return [f"vllm=={found[EXTRA]['vllm']}", *(f"{name}=={found[PY][name]}" for name in beside), "pip"]


def build_tools(found: Pins) -> list[str]:
    """What turns source archives into wheels, and what installs them."""
    return _exactly(found[BUILD])


LAYERS = ("deepspeed", "ray", "liger-kernel")
"""Extras that resolve with the training image's own versions."""
SPECS = (
    LockSpec("build", build_tools, "3.11", ANY),
    LockSpec("train", stack),
    LockSpec("train-aarch64", stack, platform=ARM),
    # Python 3.11: of torch's CPU build a wheel for it could be had and hashed where this lock was made.
    LockSpec("train-cpu", cpu_stack, "3.11"),
    *(LockSpec(f"extra-{name}", extra(name), on_top_of="train") for name in LAYERS),
    LockSpec("vllm", serving),
    LockSpec("reference", reference),
)


def fits(wheel: str, python: str, platform: str) -> bool:
    """Whether a wheel's name says that it runs on this CPython and platform (PEP 425, PEP 600)."""
    from packaging.tags import compatible_tags, cpython_tags, parse_tag  # images are built where it may not be installed

    version = tuple(map(int, python.split(".")))
    interpreter = "cp" + python.replace(".", "")
    places = lockfile.platform_tags(platform) or ["any"]
    own = {*cpython_tags(version, [interpreter], places), *compatible_tags(version, interpreter, places)}
    return not own.isdisjoint(parse_tag("-".join(wheel.removesuffix(".whl").rsplit("-", 3)[1:])))


def entries_of(pylock: Mapping[str, Any], python: str, platform: str) -> tuple[dict[str, LockedPackage], tuple[str, ...]]:
    """The packages of uv's ``pylock.toml`` with the hashes of the files that fit, and those without such a wheel."""
    entries, sources, problems = {}, [], []
    for package in pylock["packages"]:
        name, version = normal(package["name"]), package["version"]
        named = [(file.get("name") or file["url"].rpartition("/")[2], file) for file in package.get("wheels", [])]
        hashes = [file["hashes"]["sha256"] for wheel, file in named if fits(wheel, python, platform)]
        if not hashes and "sdist" in package:
            hashes = [package["sdist"]["hashes"]["sha256"]]
            sources.append(name)
        if not hashes:
            problems.append(
                Problem(f"{version} has no file for Python {python} on {platform}", key=name, fix="take another version")
            )
        entries[name] = LockedPackage(name, version, tuple(sorted(hashes)))
    if problems:
        raise UserError(problems)
    return entries, tuple(sorted(sources))


def uv_resolve(
    requirements: Iterable[str], constraints: Iterable[str], python: str, platform: str, before: str
) -> dict[str, Any]:
    """uv's answer. The index is the user's (UV_* variables); none is written anywhere."""
    with tempfile.TemporaryDirectory() as folder:
        out, constraint = Path(folder, "pylock.toml"), Path(folder, "constraints.txt")
        constraint.write_text("\n".join(constraints) + "\n")
        command = [
            pins.find_tool("uv"), "pip", "compile", "-", "--quiet", "--no-config", "--no-header", "--format", "pylock.toml",
            "--output-file", str(out),
            "--constraint", str(constraint), "--python-version", python,
            "--python-platform", X86 if platform == ANY else platform, "--exclude-newer", f"{before}T00:00:00Z",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command,
                input="\n".join(requirements) + "\n",
                text=True,
                capture_output=True,
                timeout=RESOLVE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(
                Problem(f"uv did not resolve within {RESOLVE_SECONDS} s", fix="look at the index"), ExitCode.FAILED
            ) from error
        if done.returncode:
            raise UserError(Problem(f"uv: {done.stderr.strip()[-1500:]}", fix="move the pin in containers/versions.env"))
        return tomllib.loads(out.read_text())


def make(spec: LockSpec, found: Pins, known: Mapping[str, PackageLock], *, keep: bool = False) -> PackageLock:
    """The lock that the pins give. ``known``: locks made before it, and the present ones of their names.

    ``keep``: with the versions of the present lock. The date alone does not fix them, for a mirror may list a file
    days after it was published.
    """
    before = found.date_of(spec.name)
    below = known[spec.on_top_of].entries if spec.on_top_of else {}
    locked = known[spec.name].entries if keep else {}
    constraints = [f"{entry.name}=={entry.version}" for entry in {**locked, **below}.values() if "+" not in entry.version]
    pylock = uv_resolve(spec.requirements(found), constraints, spec.python, spec.platform, before)
    entries, sources = entries_of(pylock, spec.python, spec.platform)
    if spec.name == "train-cpu":
        entries = {name: entry for name, entry in entries.items() if not _CUDA_ONLY.fullmatch(name)}
        entries["torch"] = cpu_torch(f"{found[PY]['torch']}+cpu", known.get(spec.name))
    if spec.on_top_of:
        entries = {name: entry for name, entry in entries.items() if name not in below}
    sources = tuple(name for name in sources if name in entries)
    return PackageLock(spec.name, spec.python, spec.platform, before, entries, sources, spec.on_top_of)


def cpu_torch(version: str, present: PackageLock | None) -> LockedPackage:
    """torch's CPU build: its hash as it is locked; where the pin moved, of the file that pip finds with the user's settings.

    The build is on no index that uv could resolve from everywhere, so its hash is taken once and kept.
    """
    if present and (entry := present.entries.get("torch")) and entry.version == version:
        return entry
    python = next(spec.python for spec in SPECS if spec.name == "train-cpu")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
            "--python-version", python, "--platform", "manylinux_2_28_x86_64", "--dest", folder, f"torch=={version}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=RESOLVE_SECONDS, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            fix = "name an index that has it: PIP_EXTRA_INDEX_URL=<url> make lock"
            raise UserError(
                Problem(f"pip finds no torch {version} for Python {python}", path_of("train-cpu").name, "torch", fix)
            )
        return LockedPackage("torch", version, (file_digest(wheels[0]),))


def make_all(found: Pins, say: Callable[[str], None], *, keep: bool = False) -> dict[str, PackageLock]:
    """Every lock again, from the pins; ``keep``: with the versions that are locked."""
    known: dict[str, PackageLock] = {}
    for spec in SPECS:
        present = _present(spec)
        known[spec.name] = made = make(spec, found, {**({spec.name: present} if present else {}), **known}, keep=keep)
        say(f"{spec.path.name}: {len(made.entries)} packages, Python {made.python}, {made.platform}, before {made.before}")
    return known


def _present(spec: LockSpec) -> PackageLock | None:
    try:
        return lockfile.read(spec.path)
    except UserError:
        return None


def write_all(say: Callable[[str], None]) -> None:
    """``make lock``: all or none."""
    for name, lock in make_all(pins.read(), say).items():
        scratch = path_of(name).with_suffix(f".lock.{os.getpid()}")
        scratch.write_text(lock.text())
        scratch.replace(path_of(name))


def held_to_pins(spec: LockSpec, lock: PackageLock, found: Pins) -> list[Problem]:
    """Where a lock says another thing than the pins, without asking an index."""
    file, problems = f"containers/{spec.path.name}", []

    def wrong(message: str, key: str | None = None) -> None:
        problems.append(Problem(message, file, key, "run make lock"))

    head = (lock.name, lock.python, lock.platform, lock.before, lock.on_top_of)
    meant = (spec.name, spec.python, spec.platform, found.date_of(spec.name), spec.on_top_of)
    if head != meant:
        wrong(f"its head says {head}, not {meant}")
    for requirement in spec.requirements(found):
        name, _, version = requirement.partition("==")
        entry = lock.entries.get(normal(name))
        if entry is None:
            wrong("is asked for and not locked", name)
        elif version and entry.version.partition("+")[0] != version:
            wrong(f"is {entry.version} here and {version} in containers/versions.env", name)
    return problems


def check_all(say: Callable[[str], None], *, fresh: bool = True) -> dict[str, PackageLock]:
    """``make lock-check``: every lock is hashed, held to the pins, and what resolving again with its versions gives.

    It fails where a package is missing or too many, where its files are others, and where a locked version is gone.
    A newer version is not a fault: ``make lock`` takes it. Raises UserError.
    """
    found, problems, locks = pins.read(), [], {}
    for spec in SPECS:
        try:
            locks[spec.name] = lockfile.read(spec.path)
        except UserError as error:
            problems += error.problems
            continue
        problems += held_to_pins(spec, locks[spec.name], found)
        if spec.path.read_text() != locks[spec.name].text():
            problems.append(Problem("was edited by hand", f"containers/{spec.path.name}", fix="run make lock"))
    if fresh and not problems:
        for name, made in make_all(found, say, keep=True).items():
            if made != locks[name]:
                changed = sorted(
                    key
                    for key in {*made.entries, *locks[name].entries}
                    if made.entries.get(key) != locks[name].entries.get(key)
                )
                what = f"is not what the pins resolve to (before {made.before}): {', '.join(changed) or 'its head'}"
                problems.append(Problem(what, f"containers/{name}.lock", fix="run make lock and look at the difference"))
    if problems:
        raise UserError(problems)
    return locks
