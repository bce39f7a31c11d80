"""Apptainer (or Singularity), Docker and Podman: found, and started with no more of the environment than they need."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clustertune.containers import sbom, wheelhouse
from clustertune.containers.build import (
    WORK,
    BaseImage,
    BuildRequest,
    Say,
    base_of,
    environ,
    gather,
    labels,
    lay_out,
    locked,
)  # fmt: skip
from clustertune.containers.lockfile import PackageLock
from clustertune.containers.pins import FOLDER
from clustertune.containers.wheelhouse import Wheel
from clustertune.errors import ExitCode, Problem, UserError, storage_error
from clustertune.process import captured
from clustertune.tree import ROOT

BUILD_SECONDS, TEST_SECONDS, PROBE_SECONDS = 7200, 1800, 60
SELFTEST = "/usr/local/share/clustertune/selftest.py"
VENV_PYTHON = "/usr/local/venv/bin/python"
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
    wheelhouse: Path | None
    """None: the base has all."""
    wheels: list[Wheel]
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
        raise UserError(
            Problem(f"{what} took over {seconds} s", fix="look at its last lines above"), ExitCode.FAILED
        ) from error
    except OSError as error:
        raise UserError(
            Problem(f"{command[0]} does not start: {error.strerror}", fix="install it again"), ExitCode.FAILED
        ) from error
    if done.returncode:
        fix = "its last lines above say why; where no registry is reached: BASE=standin"
        raise UserError(Problem(f"{what} failed (exit code {done.returncode})", fix=fix), ExitCode.FAILED)


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
    if found := shutil.which("apptainer") or shutil.which("singularity"):
        return found
    if not own.exists():
        fix = "install one; on Debian, beside the system: containers/get-apptainer.sh build/apptainer"
        raise UserError(Problem("neither apptainer nor singularity is here", fix=fix))
    if answer([str(own), "--version"]) is None:
        fix = "the folder was moved, or another system's: containers/get-apptainer.sh fixes it"
        raise UserError(Problem("does not start", str(own), fix=fix))
    return str(own)


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


def in_sif(program: str, image: Path, *command: str) -> list[str]:
    """A command in a SIF that sees nothing of this machine: no home, no environment, no network."""
    # Root on a machine without every capability (a container, a small VM) may not start it otherwise.
    user = ["--userns"] if os.geteuid() == 0 else []
    return [
        program,
        "exec",
        *user,
        "--containall",
        "--cleanenv",
        "--no-home",
        "--net",
        "--network",
        "none",
        str(image),
        *command,
    ]


@contextlib.contextmanager
def _gathered(what: BuildRequest, lock: PackageLock | None, recipe: str, image: str, say: Say) -> Iterator[Gathered]:
    """What a build needs, for as long as it takes. Raises UserError where storage fails."""
    try:
        base, folder, wheels = gather(what, lock, say)
        WORK.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=WORK, prefix="build-") as scratch:
            context = Path(scratch) / "context"
            context.mkdir()
            lay_out(context, lock, folder, FOLDER / recipe)
            yield Gathered(base, folder, wheels, context)
    except OSError as error:
        raise storage_error(error, "build the image", image) from error


def build_sif(what: BuildRequest, say: Say) -> dict[str, Any]:
    """``make build-sif``: the image, its ``.sha256`` and its SBOM. Returns what was made."""
    started = time.monotonic()
    program, lock = find_apptainer(), locked(what)
    out = (what.out or ROOT / f"{what.definition}.sif").absolute()
    if what.dry_run:
        return _plan(what, lock, base_of(what, lock.python if lock else "3.12", say), program, str(out))
    with _gathered(what, lock, f"{what.definition}.def", str(out), say) as given:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _partial(out) as part:
            command = _sif_command(what, program, lock, given, part)
            run(command, "the build", say, cwd=given.context, env=_caches(given.context.parent))
            inventory = _inventory(in_sif(program, part, VENV_PYTHON, SELFTEST, "--inventory")) if lock else None
            return _publish(part, out, lock, given, inventory, started)


def _sif_command(what: BuildRequest, program: str, lock: PackageLock | None, gathered: Gathered, out: Path) -> list[str]:
    """Everything relative to the context: what stands in the definition ends up in the image."""
    base, context = gathered.base, gathered.context
    given = labels(lock, base)
    if base.archive:
        (context / "base.tar").symlink_to(base.archive)
        given |= {"bootstrap": "docker-archive", "base": "base.tar"}
    else:
        given |= {"base": base.name}
    bind = ["--bind", f"{gathered.wheelhouse}:/mnt:ro"] if gathered.wheelhouse else []
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
    raise UserError(Problem("neither a docker server nor podman answers", fix="start docker, or install podman"))


def build_image(what: BuildRequest, say: Say) -> dict[str, Any]:
    """``make build-image``: the image in the engine's store, tested, with its SBOM; an archive of it where asked."""
    started = time.monotonic()
    engine, lock = find_engine(), locked(what)
    assert lock, "only train has a Dockerfile"
    tag = what.tag or f"clustertune/{what.definition}:{what.variant}"
    if what.dry_run:
        return _plan(what, lock, base_of(what, lock.python, say), engine, tag)
    with _gathered(what, lock, "Dockerfile", tag, say) as given:
        assert given.wheelhouse, "there is a lock"
        (given.context / "wheels").mkdir()
        for path in given.wheelhouse.iterdir():
            _link(path, given.context / "wheels" / path.name)
        labelled = {key.upper(): value for key, value in labels(lock, given.base).items()}
        arguments = {"BASE_IMAGE": _loaded(engine, given.base), **labelled}
        build_arguments = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        # OCI's own format has no SHELL and no health check, and enroot reads both.
        style = ["--format", "docker", "--layers=false"] if engine == "podman" else []
        # The host's network: apt needs one, and a bridge needs modules that a small machine's kernel does not have.
        command = [engine, "build", "--network", "host", *style, *build_arguments, "--tag", tag, str(given.context)]
        run(command, "the build", say, env={"DOCKER_BUILDKIT": "1"})
        alone = [engine, "run", "--rm", "--network", "none", *_limits(engine), tag]
        run([*alone, "python", SELFTEST], "the image's own test", say, seconds=TEST_SECONDS)
        inventory = _inventory([*alone, "python", SELFTEST, "--inventory"])
        if what.out is None:
            bill = _write_bill(ROOT / tag.replace("/", "-").replace(":", "-"), tag, lock, given, inventory)
            size = int((answer([engine, "image", "inspect", "--format", "{{.Size}}", tag]) or "0").strip() or 0)
            return {"image": tag, "bytes": size, "seconds": round(time.monotonic() - started), **bill}
        out = what.out.absolute()
        with _partial(out) as part:
            run([engine, "save", "--output", str(part), tag], "saving the image", say)
            return {"image": tag, **_publish(part, out, lock, given, inventory, started)}


def _limits(engine: str) -> list[str]:
    """Limits that every machine may set: podman's own are larger than a container or a small VM allows."""
    names = ("nofile", "nproc") if engine == "podman" else ()
    return [word for name in names for word in ("--ulimit", f"{name}={LIMIT}:{LIMIT}")]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def _loaded(engine: str, base: BaseImage) -> str:
    """The base's name for ``FROM``: an archive is loaded first."""
    if base.archive is None:
        return base.name
    text = answer([engine, "load", "--input", str(base.archive)], seconds=900) or ""
    named = re.search(r"Loaded image(?:\(s\)| ID)?: (\S+)", text)
    if not named:
        raise UserError(
            Problem(f"{engine} loads no image from it", str(base.archive), fix="give a docker-archive with a name"),
            ExitCode.FAILED,
        )
    return named[1]


# --- beside the image --------------------------------------------------------------------------------------------------


def _inventory(command: Sequence[str]) -> Mapping[str, Any]:
    reply = answer(command, seconds=TEST_SECONDS)
    if reply is None:
        raise UserError(Problem("the image does not say what it holds", fix="its test's output above"), ExitCode.FAILED)
    return dict(json.loads(reply))


def _plan(what: BuildRequest, lock: PackageLock | None, base: BaseImage, program: str, image: str) -> dict[str, Any]:
    recipe = "Dockerfile" if what.kind == "build-image" else f"{what.definition}.def"
    return {
        "image": image, "with": program, "definition": f"containers/{recipe}", "lock": lock.name if lock else None,
        "packages": len(lock.entries) if lock else 0, "extras": list(what.extras), "base": base.name,
    }  # fmt: skip


@contextlib.contextmanager
def _partial(out: Path) -> Iterator[Path]:
    """Where an image is written before it has its name; nothing stays there."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def _write_bill(beside: Path, name: str, lock: PackageLock, given: Gathered, inventory: Mapping[str, Any]) -> dict[str, Any]:
    """Write the SBOM of image ``name`` next to ``beside``. Returns what the result says about it."""
    document = sbom.document(name, lock, given.wheels, inventory, given.base.name, datetime.now(UTC))
    bill = beside.with_name(beside.name + ".cdx.json")
    bill.write_text(json.dumps(document, indent=1) + "\n")
    return {"sbom": str(bill), "lock": lock.name}


def _publish(
    part: Path, out: Path, lock: PackageLock | None, given: Gathered, inventory: Mapping[str, Any] | None, started: float
) -> dict[str, Any]:
    """The image in its place, and beside it the SBOM and, last, the sum: who finds the sum finds a whole image."""
    total = out.with_name(out.name + ".sha256")
    total.unlink(missing_ok=True)
    digest, size = wheelhouse.file_digest(part), part.stat().st_size
    part.replace(out)
    made: dict[str, Any] = {"file": str(out), "sha256": digest, "bytes": size, "base": given.base.name}
    if lock and inventory:
        made |= _write_bill(out, out.name, lock, given, inventory)
    total.write_text(f"{digest}  {out.name}\n")
    return {**made, "seconds": round(time.monotonic() - started)}
