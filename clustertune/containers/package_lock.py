"""From ``versions.env`` to locks with hashes (uv resolves), and whether the locks still are what the pins give.

uv's own ``--generate-hashes`` names every file of a version, so that pip could install a source archive or another platform's
wheel: of uv's answer the lock keeps the files that fit.
"""

from __future__ import annotations

import json
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

from clustertune.containers import pins
from clustertune.containers.lock_file import LockedPackage, PackageLock, path_of, platform_tags, read
from clustertune.containers.pins import BUILD, DEV, EXTRA, FOLDER, PY, REF, TOOL, Pins, normal
from clustertune.errors import ExitCode, Problem, UserError, collect_problems, raise_if
from clustertune.manifest import hash_file
from clustertune.process import captured

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


CHOSEN_BY_THE_STACK = ("huggingface-hub", "numpy", "safetensors", "tokenizers")
"""What the reference's packages bound themselves, each to another range than today's."""


def _exactly(group: Mapping[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in group.items()]


def stack(pinned: Pins) -> list[str]:
    """The training image: the stack, and pip, with which a person lists it."""
    return [*_exactly(pinned[PY]), f"pip=={pinned[BUILD]['pip']}"]


def reference(pinned: Pins) -> list[str]:
    """The source document's stack to the version; what clustertune itself needs beside it at its own versions."""
    beside = {name: version for name, version in pinned[PY].items() if name not in {*pinned[REF], *CHOSEN_BY_THE_STACK}}
    return [*_exactly(pinned[REF]), *CHOSEN_BY_THE_STACK, *_exactly(beside), f"pip=={pinned[BUILD]['pip']}"]


def cpu_stack(pinned: Pins) -> list[str]:
    """The CPU variant: the stack and DeepSpeed, so that the image's own test compiles what the ZeRO recipes need."""
    return [*stack(pinned), f"deepspeed=={pinned[DEV]['deepspeed']}"]


NVCC = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
"""The CUDA compiler, as wheels."""


def extra(name: str) -> Callable[[Pins], list[str]]:
    """One optional package (Ray and DeepSpeed are pinned with the tests' tools), and what it compiles with."""
    beside = NVCC if name == "deepspeed" else ()
    return lambda pinned: [f"{one}=={pinned[EXTRA].get(one) or pinned[DEV][one]}" for one in (name, *beside)]


def serving(pinned: Pins) -> list[str]:
    """vLLM asks for a torch of its own and takes no other: an image of its own, to generate and score."""
    beside = ("lm-eval", "nltk", "langdetect", "immutabledict")
    return [f"vllm=={pinned[EXTRA]['vllm']}", *(f"{name}=={pinned[PY][name]}" for name in beside), "pip"]


LAYERS = ("deepspeed", "ray", "liger-kernel")
"""Extras that resolve with the training image's own versions."""
SPECS = (
    # What turns source archives into wheels, and what installs them.
    LockSpec("build", lambda pinned: _exactly(pinned[BUILD]), "3.11", ANY),
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
    places = platform_tags(platform) or ["any"]
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
            text = f"{version} has no file for Python {python} on {platform}"
            problems.append(Problem(text, key=name, fix="take another version"))
        entries[name] = LockedPackage(name, version, tuple(sorted(hashes)))
    raise_if(problems)
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
            asked = "\n".join(requirements) + "\n"
            done = subprocess.run(command, input=asked, text=True, capture_output=True, timeout=RESOLVE_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            text = f"uv did not resolve within {RESOLVE_SECONDS} s"
            raise UserError(text, ExitCode.FAILED, fix="look at the index") from error
        if done.returncode:
            raise UserError(f"uv: {done.stderr.strip()[-1500:]}", fix="move the pin in containers/versions.env")
        return tomllib.loads(out.read_text())


def make(spec: LockSpec, pinned: Pins, known: Mapping[str, PackageLock], *, keep: bool = False) -> PackageLock:
    """The lock that the pins give. ``known``: locks made before it, and the present ones of their names.

    ``keep``: with the versions of the present lock. The date alone does not fix them, for a mirror may list a file
    days after it was published.
    """
    before = pinned.date_of(spec.name)
    below = known[spec.on_top_of].entries if spec.on_top_of else {}
    locked = known[spec.name].entries if keep else {}
    constraints = [f"{entry.name}=={entry.version}" for entry in {**locked, **below}.values() if "+" not in entry.version]
    pylock = uv_resolve(spec.requirements(pinned), constraints, spec.python, spec.platform, before)
    entries, sources = entries_of(pylock, spec.python, spec.platform)
    if spec.name == "train-cpu":
        entries = {name: entry for name, entry in entries.items() if not _CUDA_ONLY.fullmatch(name)}
        entries["torch"] = cpu_torch(f"{pinned[PY]['torch']}+cpu", known.get(spec.name))
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
        done = captured(command, RESOLVE_SECONDS)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            text = f"pip finds no torch {version} for Python {python}"
            fix = "name an index that has it: PIP_EXTRA_INDEX_URL=<url> make lock"
            raise UserError(text, file=path_of("train-cpu").name, key="torch", fix=fix)
        return LockedPackage("torch", version, (hash_file(wheels[0]).sha256,))


def make_all(pinned: Pins, say: Callable[[str], None], *, keep: bool = False) -> dict[str, PackageLock]:
    """Every lock again, from the pins; ``keep``: with the versions that are locked."""
    known: dict[str, PackageLock] = {}
    for spec in SPECS:
        with collect_problems([]):  # the present one, where it is one
            known[spec.name] = read(spec.path)
        known[spec.name] = made = make(spec, pinned, known, keep=keep)
        say(f"{spec.path.name}: {len(made.entries)} packages, Python {made.python}, {made.platform}, before {made.before}")
    return known


def write_all(say: Callable[[str], None]) -> None:
    """``make lock``: all or none."""
    for name, lock in make_all(pins.read(), say).items():
        scratch = path_of(name).with_suffix(f".lock.{os.getpid()}")
        scratch.write_text(lock.text())
        scratch.replace(path_of(name))


def held_to_pins(spec: LockSpec, lock: PackageLock, pinned: Pins) -> list[Problem]:
    """Where a lock says another thing than the pins, without asking an index."""
    file, problems = f"containers/{spec.path.name}", []

    def wrong(message: str, key: str | None = None) -> None:
        problems.append(Problem(message, file, key, "run make lock"))

    head = (lock.name, lock.python, lock.platform, lock.before, lock.on_top_of)
    meant = (spec.name, spec.python, spec.platform, pinned.date_of(spec.name), spec.on_top_of)
    if head != meant:
        wrong(f"its head says {head}, not {meant}")
    for requirement in spec.requirements(pinned):
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
    pinned = pins.read()
    problems: list[Problem] = []
    locks: dict[str, PackageLock] = {}
    for spec in SPECS:
        with collect_problems(problems):
            locks[spec.name] = read(spec.path)
            problems += held_to_pins(spec, locks[spec.name], pinned)
    if fresh and not problems:
        for name, made in make_all(pinned, say, keep=True).items():
            if made != locks[name]:
                now, old = made.entries, locks[name].entries
                changed = sorted(key for key in {*now, *old} if now.get(key) != old.get(key))
                what = f"is not what the pins resolve to (before {made.before}): {', '.join(changed) or 'its head'}"
                problems.append(Problem(what, f"containers/{name}.lock", fix="run make lock and look at the difference"))
    raise_if(problems)
    return locks


# --- vulnerabilities ------------------------------------------------------------------------------------------------------

# Known vulnerabilities of what is locked, from the OSV database (osv.dev), by pip-audit in an environment that uv makes for it.

DATABASE = "https://api.osv.dev"
ACCEPTED = FOLDER / "vulnerabilities.txt"
"""``ID reason``, a line each: what is known and lived with."""
AUDIT_SECONDS = 1800


class NotAudited(Exception):
    """The vulnerability database cannot be reached, or its answer has another form."""


def accepted(path: Path = ACCEPTED) -> Mapping[str, str]:
    """Ids of accepted vulnerabilities, each with its reason. Raises UserError for a line without one."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.partition(" ") for line in lines]
    fix = "write why it does not matter here"
    raise_if([Problem(f"{name} without a reason", str(path), fix=fix) for name, _, reason in pairs if not reason.strip()])
    return {name: reason.strip() for name, _, reason in pairs}


def audit(locks: Iterable[PackageLock], accepted_ids: Mapping[str, str], database: str = DATABASE) -> list[Problem]:
    """A problem for each locked version with a known vulnerability and no written reason to keep it.

    ``database``: the address of osv.dev or a mirror. Raises NotAudited where it does not answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            pins.find_tool("uv"), "tool", "run", "--quiet", f"pip-audit@{pins.read()[TOOL]['pip-audit']}",
            "--vulnerability-service", "osv", "--osv-url", f"{database}/v1/query", "--no-deps", "--disable-pip",
            "--progress-spinner", "off", "--format", "json", "--desc", "off",
        ]  # fmt: skip
        for lock in locks:
            # The database does not know torch's mark of a build (2.13.0+cpu).
            lines = (f"{entry.name}=={entry.version.partition('+')[0]}\n" for entry in lock.entries.values())
            file = Path(folder, f"{lock.name}.txt")
            file.write_text("".join(lines))
            command += ["--requirement", str(file)]
        try:
            done = captured(command, AUDIT_SECONDS)
            packages = json.loads(done.stdout)["dependencies"]
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotAudited(f"{database}: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
            raise NotAudited(f"{database}: {reason}") from error
    fix, problems = "move its pin, or write the id with a reason into containers/vulnerabilities.txt", []
    for package in packages:
        if "skip_reason" in package:
            raise NotAudited(f"{package['name']}: {package['skip_reason']}")
        ids = [known["id"] for known in package["vulns"] if not accepted_ids.keys() & {known["id"], *known["aliases"]}]
        if ids:
            problems.append(Problem(f"{package['version']}: {', '.join(ids)}", "containers/*.lock", package["name"], fix))
    return problems
