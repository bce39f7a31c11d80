"""Build images: options, sources, the engine (Apptainer or podman), and the files written beside an image."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.containers import package_lock as locks
from clustertune.containers import pins, wheelhouse
from clustertune.containers.package_lock import LockSpec, PackageLock
from clustertune.containers.pins import FOLDER, TOOL
from clustertune.errors import ExitCode, Problem, UserError, raise_if, storing
from clustertune.lock import in_turn
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
    found = pins.read()
    parts = {spec: locks.read(spec.path) for spec in what.specs}
    raise_if([problem for spec, part in parts.items() for problem in locks.held_to_pins(spec, part, found)])
    whole, *layers = parts.values()
    for layer in layers:
        whole = whole.with_layer(layer)
    return whole


def _base_of(what: BuildRequest, lock: PackageLock, say: Say) -> BaseImage:
    """What it starts from; a stand-in is made once and kept."""
    if what.base == STANDIN:
        suite = wheelhouse.suite_of(lock.python)
        archive = WORK / f"standin-{suite}.tar"
        if not archive.exists() and not what.dry_run:
            wheelhouse.make_standin(lock.python, archive, say)
        return BaseImage(f"stand-in {suite}", archive)
    return BaseImage(what.base or pins.read_bases()["BASE_TRAIN"])


def labels(lock: PackageLock, base: BaseImage) -> dict[str, str]:
    """The build arguments that become labels."""
    digest = locks.text_digest(lock.text())
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
    if found := shutil.which("apptainer") or shutil.which("singularity") or shutil.which(str(own)):
        return found
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
    folder = WORK / "wheels" / "-".join((lock.name, *what.extras, locks.text_digest(lock.text())[:12]))
    with storing("build the image", image):
        # One build at a time: base and wheels are kept for the next one.
        with in_turn(WORK / "lock", lambda: say("another build is collecting its packages: waiting for it")):
            base = _base_of(what, lock, say)
            wheelhouse.fill(lock, folder, WORK / "tools", say)
        with tempfile.TemporaryDirectory(dir=WORK, prefix="build-") as scratch:
            # The folder that the engine builds in: the recipe, what goes into the image, and nothing of this machine.
            context = Path(scratch) / "context"
            context.mkdir()
            shutil.copy(FOLDER / recipe, context / recipe)
            for part in PARTS:
                shutil.copy(FOLDER / part, context / part)
            shutil.copy(folder / wheelhouse.REQUIREMENTS, context / wheelhouse.REQUIREMENTS)
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
    with _gathered(what, lock, f"{what.definition}.def", str(out), say) as given:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _partial(out) as part:
            command = _sif_command(what, program, lock, given, part, say)
            run(command, "the build", say, cwd=given.context, env=_caches(given.context.parent))
            return _publish(part, out, lock, given, say)


def _sif_path(what: BuildRequest) -> Path:
    return (what.out or ROOT / f"{what.definition}.sif").absolute()


def _sif_command(what: BuildRequest, program: str, lock: PackageLock, gathered: Gathered, out: Path, say: Say) -> list[str]:
    """Everything relative to the context: what stands in the definition ends up in the image."""
    base, context = gathered.base, gathered.context
    given = labels(lock, base)
    if base.archive:
        (context / "base").mkdir()
        run(
            ["tar", "--extract", "--no-same-owner", "--file", str(base.archive), "--directory", str(context / "base")],
            "tar",
            say,
        )
        given |= {"bootstrap": "localimage", "base": "base"}
    else:
        given |= {"base": base.name}
    bind = ["--bind", f"{gathered.wheelhouse}:/mnt:ro"]
    build_arguments = [word for name, value in given.items() for word in ("--build-arg", f"{name}={value}")]
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
    with _gathered(what, lock, "Dockerfile", tag, say) as given:
        (given.context / "wheels").mkdir()
        for path in given.wheelhouse.iterdir():
            try:
                os.link(path, given.context / "wheels" / path.name)
            except OSError:
                shutil.copy(path, given.context / "wheels" / path.name)
        labelled = {key.upper(): value for key, value in labels(lock, given.base).items()}
        arguments = {"BASE_IMAGE": _loaded(engine, given.base, say), **labelled}
        build_arguments = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        # OCI's own format has no SHELL and no health check, and enroot reads both.
        style = ["--format", "docker", "--layers=false"] if engine == "podman" else []
        # The host's network: apt needs one, and a bridge needs modules that a small machine's kernel does not have.
        command = [engine, "build", "--network", "host", *style, *build_arguments, "--tag", tag, str(given.context)]
        run(command, "the build", say, env={"DOCKER_BUILDKIT": "1"})
        alone = [engine, "run", "--rm", "--network", "none", *limits(engine), tag]
        run([*alone, "python", SELFTEST], "the image's own test", say, seconds=TEST_SECONDS)
        bill = _write_bill(ROOT / tag.replace("/", "-").replace(":", "-"), lock, given, say)
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


def _write_bill(beside: Path, lock: PackageLock, given: Gathered, say: Say) -> dict[str, Any]:
    """Write the bill of materials next to ``beside``: CycloneDX, of the requirements that were installed.

    ``cyclonedx-py`` runs in an environment of its own, by uv. Where there is none, or no index, the image is there without it.
    """
    bill = beside.with_name(beside.name + ".cdx.json")
    bill.unlink(missing_ok=True)
    made, version = {"lock": lock.name}, pins.read()[TOOL]["cyclonedx-bom"]
    try:
        tool = [pins.find_tool("uv"), "tool", "run", "--quiet", "--from", f"cyclonedx-bom=={version}", "cyclonedx-py"]
        requirements = str(given.context / wheelhouse.REQUIREMENTS)
        run([*tool, "requirements", requirements, "--of", "JSON", "--output-file", str(bill)], "cyclonedx-py", say, seconds=600)
    except UserError as error:
        say(f"warning: no bill of materials: {error.problems[0]}")
        return made
    return {**made, "sbom": str(bill)}


def _publish(part: Path, out: Path, lock: PackageLock, given: Gathered, say: Say) -> dict[str, Any]:
    """The image in its place, and beside it the SBOM and, last, the sum: who finds the sum finds a whole image."""
    total = out.with_name(out.name + ".sha256")
    total.unlink(missing_ok=True)
    digest, size = locks.file_digest(part), part.stat().st_size
    part.replace(out)
    made: dict[str, Any] = {"file": str(out), "sha256": digest, "bytes": size, "base": given.base.name}
    made |= _write_bill(out, lock, given, say)
    total.write_text(f"{digest}  {out.name}\n")
    return made
