"""Build images: options, packages, the engine (Apptainer or podman), and the files written beside an image.

The packages come here, on the machine that builds, with its own pip settings, into a folder with every wheel of a lock, each
held to its hash: the build installs from it with no index at all. No index, certificate or password gets near the image. What
has no wheel is built from its hashed source archive with build tools that are locked by hash as well, so that nothing unhashed
is fetched or run. pip does the fetching and compares the hashes; uv has no ``download``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.containers import lock_file, pins
from clustertune.containers import package_lock as locks
from clustertune.containers.lock_file import LockedPackage, PackageLock, text_digest
from clustertune.containers.package_lock import LockSpec
from clustertune.containers.pins import FOLDER, TOOL
from clustertune.errors import ExitCode, Problem, UserError, raise_if, storing
from clustertune.lock import in_turn
from clustertune.manifest import hash_file
from clustertune.process import captured
from clustertune.tree import ROOT

Say = Callable[[str], None]
WORK = ROOT / "build" / "containers"
STANDIN = "standin"
VARIANTS = {"cuda": "train", "cpu": "train-cpu", "vllm": "vllm"}
DEFINITIONS = ("train", "reference")
_TAG = re.compile(r"[a-z0-9][a-z0-9._/-]{0,127}(:[A-Za-z0-9][A-Za-z0-9._-]{0,63})?")
_REFERENCE = re.compile(r"[a-z0-9][a-z0-9._:/-]*@sha256:[0-9a-f]{64}")
PARTS = ("install.sh", "selftest.py")
"""What the definitions copy into the image, beside the lock."""


@dataclass(frozen=True)
class BuildRequest:
    """What is to be built."""

    kind: str
    """``build-sif`` or ``build-image``"""
    definition: str = "train"
    variant: str = "cuda"
    extras: tuple[str, ...] = ()
    base: str = ""
    """Empty: of containers/base.env; ``standin``; or NAME@sha256:DIGEST."""
    out: Path | None = None
    """The SIF."""
    tag: str = ""
    dry_run: bool = False

    @property
    def lock_name(self) -> str:
        """The lock that the image is built from."""
        if self.definition != "train":
            return self.definition
        aarch64 = self.variant == "cuda" and platform.machine() == "aarch64"
        return "train-aarch64" if aarch64 else VARIANTS[self.variant]

    @property
    def specs(self) -> list[LockSpec]:
        """What is locked for it: the lock, then its layers."""
        names = (self.lock_name, *(f"extra-{name}" for name in self.extras))
        return [spec for spec in locks.SPECS if spec.name in names]


@dataclass(frozen=True)
class BaseImage:
    """What an image starts from."""

    name: str
    """As labels tell it: never a path of this machine."""
    archive: Path | None = None
    """The files of a stand-in as tar; None: ``name`` is pulled."""


def arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    """The options of ``build-sif`` and ``build-image``."""
    sif = kind == "build-sif"
    parser.set_defaults(kind=kind, tag="", out=None)
    parser.add_argument("--definition", choices=DEFINITIONS if sif else ("train",), default="train", help="containers/NAME.def")
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="cuda", help="which lock; CI uses cpu")
    parser.add_argument("--extras", default="", help=f"layers on top, as A+B: {', '.join(locks.LAYERS)}")
    parser.add_argument("--base", default="", help="NAME@sha256:DIGEST, or `standin` if no registry can be reached")
    if sif:
        parser.add_argument("--out", type=Path, help="the image file")
    else:
        parser.add_argument("--tag", default="", help="name of the image")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")


def request(args: argparse.Namespace) -> BuildRequest:
    """The options as one value. Raises UserError with every one that cannot be."""
    extras = tuple(filter(None, re.split(r"[+,]", args.extras)))
    made = BuildRequest(args.kind, args.definition, args.variant, extras, args.base, args.out, args.tag, args.dry_run)
    raise_if([*_find_problems(made)])
    return made


def _find_problems(what: BuildRequest) -> Iterator[Problem]:
    for name in what.extras:
        if name not in locks.LAYERS:
            yield Problem(f"no layer {name!r}", key="EXTRAS", fix=f"one of {', '.join(locks.LAYERS)}")
    if what.extras and (what.definition, what.variant) != ("train", "cuda"):
        text = "layers are locked on top of the cuda variant of train"
        yield Problem(text, key="EXTRAS", fix="leave EXTRAS or VARIANT out")
    if what.definition != "train" and what.variant != "cuda":
        text = f"{what.variant}: {what.definition}.def has no variants"
        yield Problem(text, key="VARIANT", fix="leave VARIANT or DEFINITION out")
    if what.tag and not _TAG.fullmatch(what.tag):
        yield Problem(f"{what.tag!r} is not an image name", key="TAG", fix="lower case, as in clustertune/train:cpu")
    if what.base not in ("", STANDIN) and not _REFERENCE.fullmatch(what.base):
        yield Problem(f"{what.base!r} has no digest", key="BASE", fix="NAME@sha256:DIGEST, or standin")
    machine = platform.machine()
    for spec in what.specs:
        if spec.platform != locks.ANY and not spec.platform.startswith(machine):
            key = "EXTRAS" if spec.on_top_of else "VARIANT" if what.definition == "train" else "DEFINITION"
            text = f"{spec.path.name} is locked for {spec.platform}, this machine is {machine}"
            yield Problem(text, key=key, fix="build it there")


def locked(what: BuildRequest) -> PackageLock:
    """The lock with its layers, held to the pins. Raises UserError where a version was moved in one place only."""
    pinned = pins.read()
    parts = {spec: lock_file.read(spec.path) for spec in what.specs}
    raise_if([problem for spec, part in parts.items() for problem in locks.held_to_pins(spec, part, pinned)])
    merged, *layers = parts.values()
    for layer in layers:
        merged = merged.with_layer(layer)
    return merged


def _base_of(what: BuildRequest, lock: PackageLock, say: Say) -> BaseImage:
    """What it starts from; a stand-in is made once and kept."""
    if what.base == STANDIN:
        suite = suite_of(lock.python)
        archive = WORK / f"standin-{suite}.tar"
        if not archive.exists() and not what.dry_run:
            make_standin(lock.python, archive, say)
        return BaseImage(f"stand-in {suite}", archive)
    return BaseImage(what.base or pins.read_bases()["BASE_TRAIN"])


def labels(lock: PackageLock, base: BaseImage) -> dict[str, str]:
    """The build arguments that become labels."""
    digest = lock_file.text_digest(lock.text())
    return {"python": lock.python, "lock": lock.name, "lock_sha256": digest, "before": lock.before, "base_name": base.name}


_PASSED = re.compile(
    r"PATH|HOME|USER|LANG|LC_\w+|TMPDIR|XDG_\w+|SSL_CERT_(FILE|DIR)|(http|https|no|HTTP|HTTPS|NO)_(proxy|PROXY)|CONTAINERS_\w+|STORAGE_\w+"
    r"|REGISTRY_AUTH_FILE|DOCKER_(HOST|CONFIG|CONTEXT|CERT_PATH|TLS_VERIFY)|BUILDAH_\w+|(APPTAINER|SINGULARITY)_\w+"
)


def environ() -> dict[str, str]:
    """What of the caller's environment engines receive: tokens of other programs stay out."""
    return {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}


# --- the engines ------------------------------------------------------------------------------------------------------

# Apptainer (or Singularity), Docker and Podman: found, and started with no more of the environment than they need.


BUILD_SECONDS, TEST_SECONDS, PROBE_SECONDS = 7200, 1800, 60
SELFTEST = "/usr/local/share/clustertune/selftest.py"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LIMIT = 4096
"""Open files and processes of an image's own test."""
SQUASH = "-comp zstd -Xcompression-level 3"
"""Of gzip's size, in a tenth of its time."""
_AS_ROOT = """
mount --bind "$1" /etc/subuid
mount --bind "$1" /etc/subgid
shift
exec "$@"
"""
"""root without a range of subordinate ids gets one, for this process only: the mount namespace is private."""


@dataclass(frozen=True)
class Gathered:
    """What an image is built from."""

    base: BaseImage
    wheelhouse: Path
    """Of the lock and its layers."""
    context: Path
    """The folder that the engine builds in; beside it there is room for its own files."""


def run(
    command: Sequence[str],
    what: str,
    say: Say,
    *,
    seconds: int = BUILD_SECONDS,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """A command whose output goes to stderr as it comes. Raises UserError where it fails or takes too long."""
    say(f"+ {shlex.join(word for word in command if word != _AS_ROOT)}")
    try:
        done = subprocess.run(
            command, cwd=cwd, env={**environ(), **(env or {})}, stdin=subprocess.DEVNULL, stdout=2, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{what} took over {seconds} s", ExitCode.FAILED, fix="look at its last lines above") from error
    except OSError as error:
        raise UserError(f"{command[0]} does not start: {error.strerror}", ExitCode.FAILED, fix="install it again") from error
    if done.returncode:
        fix = "its last lines above say why; where no registry is reached: BASE=standin"
        raise UserError(f"{what} failed (exit code {done.returncode})", ExitCode.FAILED, fix=fix)


def answer(command: Sequence[str], seconds: int = PROBE_SECONDS) -> str | None:
    """A command's stdout; None where it fails."""
    try:
        done = captured(command, seconds, environ())
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# --- SIF ---------------------------------------------------------------------------------------------------------------


def find_apptainer() -> str:
    """apptainer or singularity: on PATH, else what containers/get-apptainer.sh made."""
    own = WORK.parent / "apptainer" / "bin" / "apptainer"
    if program := shutil.which("apptainer") or shutil.which("singularity") or shutil.which(str(own)):
        return program
    fix = "install one; on Debian, beside the system: containers/get-apptainer.sh build/apptainer"
    raise UserError("neither apptainer nor singularity is here", fix=fix)


def _as_user(command: list[str], scratch: Path) -> list[str]:
    """The build rootless: an ordinary user's always is, root's where asked for, with a range of ids to map."""
    if os.geteuid() != 0:
        return command
    command = [*command[:2], "--fakeroot", *command[2:]]
    listed = Path("/etc/subuid").read_text() if Path("/etc/subuid").exists() else None
    if listed is None or re.search(r"^(root|0):", listed, re.MULTILINE):
        return command
    ids = scratch / "subid"
    ids.write_text("root:100000:65536\n")
    return ["unshare", "--mount", "--propagation", "private", "--", "sh", "-eu", "-c", _AS_ROOT, "sh", str(ids), *command]


@contextlib.contextmanager
def _gathered(what: BuildRequest, lock: PackageLock, recipe: str, image: str, say: Say) -> Iterator[Gathered]:
    """What a build needs, for as long as it takes. Raises UserError where storage fails."""
    # Of another lock another folder: what a former one left is never installed.
    folder = WORK / "wheels" / "-".join((lock.name, *what.extras, lock_file.text_digest(lock.text())[:12]))
    with storing("build the image", image):
        # One build at a time: base and wheels are kept for the next one.
        with in_turn(WORK / "lock", lambda: say("another build is collecting its packages: waiting for it")):
            base = _base_of(what, lock, say)
            fill(lock, folder, WORK / "tools", say)
        with tempfile.TemporaryDirectory(dir=WORK, prefix="build-") as scratch:
            # The folder that the engine builds in: the recipe, what goes into the image, and nothing of this machine.
            context = Path(scratch) / "context"
            context.mkdir()
            shutil.copy(FOLDER / recipe, context / recipe)
            for part in PARTS:
                shutil.copy(FOLDER / part, context / part)
            shutil.copy(folder / REQUIREMENTS, context / REQUIREMENTS)
            (context / "image.lock").write_text(lock.text())
            for path in context.iterdir():
                path.chmod(0o644)
            yield Gathered(base, folder, context)


def build(what: BuildRequest, say: Say) -> dict[str, Any]:
    """``make build-sif`` or ``make build-image``. Returns what was made or, in a dry run, what would be."""
    started, lock = time.monotonic(), locked(what)
    if what.dry_run:
        return _plan(what, lock, say)
    made = (_build_sif if what.kind == "build-sif" else _build_image)(what, lock, say)
    return {**made, "seconds": round(time.monotonic() - started)}


def _build_sif(what: BuildRequest, lock: PackageLock, say: Say) -> dict[str, Any]:
    """The image, its ``.sha256`` and its SBOM."""
    program, out = find_apptainer(), _sif_path(what)
    with _gathered(what, lock, f"{what.definition}.def", str(out), say) as gathered:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _partial(out) as part:
            command = _sif_command(what, program, lock, gathered, part, say)
            run(command, "the build", say, cwd=gathered.context, env=_caches(gathered.context.parent))
            return _publish(part, out, lock, gathered, say)


def _sif_path(what: BuildRequest) -> Path:
    return (what.out or ROOT / f"{what.definition}.sif").absolute()


def _sif_command(what: BuildRequest, program: str, lock: PackageLock, gathered: Gathered, out: Path, say: Say) -> list[str]:
    """Everything relative to the context: what stands in the definition ends up in the image."""
    base, context = gathered.base, gathered.context
    values = labels(lock, base)
    if base.archive:
        (context / "base").mkdir()
        run(
            ["tar", "--extract", "--no-same-owner", "--file", str(base.archive), "--directory", str(context / "base")],
            "tar",
            say,
        )
        values |= {"bootstrap": "localimage", "base": "base"}
    else:
        values |= {"base": base.name}
    bind = ["--bind", f"{gathered.wheelhouse}:/mnt:ro"]
    build_arguments = [word for name, value in values.items() for word in ("--build-arg", f"{name}={value}")]
    command = [program, "build", "--mksquashfs-args", SQUASH, *bind, *build_arguments, str(out), f"{what.definition}.def"]
    return _as_user(command, context.parent)


def _caches(scratch: Path) -> dict[str, str]:
    """A build needs twice the image's size; /tmp is often memory. The user's own places win."""
    return {
        f"{name}_{kind}": os.environ.get(f"{name}_{kind}", str(path))
        for name in ("APPTAINER", "SINGULARITY")
        for kind, path in (("TMPDIR", scratch), ("CACHEDIR", WORK / "cache"))
    }


# --- OCI ---------------------------------------------------------------------------------------------------------------


def find_engine() -> str:
    """docker where its server answers, else podman."""
    for name, probe in (("docker", ["version"]), ("podman", ["info"])):
        if shutil.which(name) and answer([name, *probe]) is not None:
            return name
    raise UserError("neither a docker server nor podman answers", fix="start docker, or install podman")


def _tag(what: BuildRequest) -> str:
    return what.tag or f"clustertune/{what.definition}:{what.variant}"


def _build_image(what: BuildRequest, lock: PackageLock, say: Say) -> dict[str, Any]:
    """The image in the engine's store, tested, with its SBOM."""
    engine, tag = find_engine(), _tag(what)
    with _gathered(what, lock, "Dockerfile", tag, say) as gathered:
        (gathered.context / "wheels").mkdir()
        for path in gathered.wheelhouse.iterdir():
            try:
                os.link(path, gathered.context / "wheels" / path.name)
            except OSError:
                shutil.copy(path, gathered.context / "wheels" / path.name)
        labelled = {key.upper(): value for key, value in labels(lock, gathered.base).items()}
        values = {"BASE_IMAGE": _loaded(engine, gathered.base, say), **labelled}
        build_arguments = [word for name, value in values.items() for word in ("--build-arg", f"{name}={value}")]
        # OCI's own format has no SHELL and no health check, and enroot reads both.
        style = ["--format", "docker", "--layers=false"] if engine == "podman" else []
        # The host's network: apt needs one, and a bridge needs modules that a small machine's kernel does not have.
        command = [engine, "build", "--network", "host", *style, *build_arguments, "--tag", tag, str(gathered.context)]
        run(command, "the build", say, env={"DOCKER_BUILDKIT": "1"})
        alone = [engine, "run", "--rm", "--network", "none", *limits(engine), tag]
        run([*alone, "python", SELFTEST], "the image's own test", say, seconds=TEST_SECONDS)
        bill = _write_bill(ROOT / tag.replace("/", "-").replace(":", "-"), lock, gathered, say)
        size = int((answer([engine, "image", "inspect", "--format", "{{.Size}}", tag]) or "0").strip() or 0)
        return {"image": tag, "bytes": size, **bill}


def limits(engine: str) -> list[str]:
    """Limits that every machine may set: podman's own are larger than a container or a small VM allows."""
    names = ("nofile", "nproc") if engine == "podman" else ()
    return [word for name in names for word in ("--ulimit", f"{name}={LIMIT}:{LIMIT}")]


def _loaded(engine: str, base: BaseImage, say: Say) -> str:
    """The base's name for ``FROM``: a stand-in is imported first."""
    if base.archive is None:
        return base.name
    name = f"clustertune-{base.archive.stem.replace('-', ':')}"
    # A base of files has no settings: PATH is what the Dockerfile puts the venv in front of.
    run([engine, "import", "--change", f"ENV PATH={PATH}", str(base.archive), name], "the import of the stand-in", say)
    return name


# --- beside the image --------------------------------------------------------------------------------------------------


def _plan(what: BuildRequest, lock: PackageLock, say: Say) -> dict[str, Any]:
    sif = what.kind == "build-sif"
    return {
        "image": str(_sif_path(what)) if sif else _tag(what), "with": "apptainer" if sif else "docker or podman",
        "definition": f"containers/{f'{what.definition}.def' if sif else 'Dockerfile'}", "lock": lock.name,
        "packages": len(lock.entries), "extras": list(what.extras), "base": _base_of(what, lock, say).name,
    }  # fmt: skip


@contextlib.contextmanager
def _partial(out: Path) -> Iterator[Path]:
    """Where an image is written before it has its name; nothing stays there."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def _write_bill(beside: Path, lock: PackageLock, gathered: Gathered, say: Say) -> dict[str, Any]:
    """Write the bill of materials next to ``beside``: CycloneDX, of the requirements that were installed.

    ``cyclonedx-py`` runs in an environment of its own, by uv. Where there is none, or no index, the image is there without it.
    """
    bill = beside.with_name(beside.name + ".cdx.json")
    bill.unlink(missing_ok=True)
    made, version = {"lock": lock.name}, pins.read()[TOOL]["cyclonedx-bom"]
    try:
        tool = [pins.find_tool("uv"), "tool", "run", "--quiet", "--from", f"cyclonedx-bom=={version}", "cyclonedx-py"]
        requirements = str(gathered.context / REQUIREMENTS)
        run([*tool, "requirements", requirements, "--of", "JSON", "--output-file", str(bill)], "cyclonedx-py", say, seconds=600)
    except UserError as error:
        say(f"warning: no bill of materials: {error.problems[0]}")
        return made
    return {**made, "sbom": str(bill)}


def _publish(part: Path, out: Path, lock: PackageLock, gathered: Gathered, say: Say) -> dict[str, Any]:
    """The image in its place, and beside it the SBOM and, last, the sum: who finds the sum finds a whole image."""
    total = out.with_name(out.name + ".sha256")
    total.unlink(missing_ok=True)
    record = hash_file(part)
    part.replace(out)
    made: dict[str, Any] = {"file": str(out), "sha256": record.sha256, "bytes": record.size, "base": gathered.base.name}
    made |= _write_bill(out, lock, gathered, say)
    total.write_text(f"{record.sha256}  {out.name}\n")
    return made


# --- the packages -----------------------------------------------------------------------------------------------------

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
        tags = [word for tag in lock_file.platform_tags(lock.platform) for word in ("--platform", tag)]
        target = ["--implementation", "cp", "--python-version", lock.python, *tags, "--dest", str(folder)]
        fetched = [entry for entry in entries if entry.name not in lock.from_source]
        if fetched:  # what an earlier call has fetched is not fetched again
            _pip(python, "download", fetched, lock, ["--only-binary", ":all:", *target])
        made = [
            _build_wheel(python, entry, lock, folder, say) if entry.name in lock.from_source else entry for entry in entries
        ]
        scratch = folder / f".{REQUIREMENTS}"
        scratch.write_text("".join(entry.text() for entry in made))
        scratch.replace(folder / REQUIREMENTS)


def _tools(folder: Path, say: Callable[[str], None]) -> Path:
    """The Python of a virtual environment that holds the locked build tools, and nothing else."""
    lock = lock_file.read(lock_file.path_of("build"))
    python, ready = folder / "bin" / "python", folder / "ready"
    digest = text_digest(lock.text())
    if ready.is_file() and ready.read_text() == digest and python.exists():
        return python
    say(f"build tools: {', '.join(f'{entry.name} {entry.version}' for entry in lock.entries.values())}")
    try:
        venv.create(folder, with_pip=True, clear=True)
    except subprocess.CalledProcessError as error:
        fix = "take another Python (make build-sif PYTHON=...), on Debian install python3-venv"
        raise UserError(f"{sys.executable} makes no virtual environment with pip", fix=fix) from error
    _pip(python, "install", list(lock.entries.values()), lock, ["--only-binary", ":all:"])
    ready.write_text(digest)
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
        text = " ".join(plain[plain.find("DO NOT MATCH") :].split())[:600]
        fix = "do not install it: an index (or the lock) was altered; make lock-check shows which"
        return Problem(f"a file has another hash than the one that is locked: {text}", file, fix=fix)
    if missing := re.search(r"No matching distribution found for (\S+)", plain):
        fix = "look at pip's settings: pip config list"
        if "+" in missing[1]:
            fix = "name an index that has it: PIP_EXTRA_INDEX_URL=<url> make ..."
        return Problem(f"no index of this machine's pip has {missing[1]} for Python {lock.python}", file, fix=fix)
    text = " ".join(plain.split())[-800:]
    return Problem(f"pip {verb} failed: {text}", file, fix="the same command continues where it stopped")


def _build_wheel(
    python: Path, entry: LockedPackage, lock: PackageLock, folder: Path, say: Callable[[str], None]
) -> LockedPackage:
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
    return LockedPackage(entry.name, entry.version, (hash_file(wheel).sha256,))


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
