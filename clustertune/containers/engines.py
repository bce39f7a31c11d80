"""Apptainer (or Singularity), Docker and Podman: found, started, and told no more than they need."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clustertune.containers import sbom, wheelhouse
from clustertune.containers.build import (
    WORK,
    Asked,
    Base,
    Say,
    base_of,
    environ,
    gather,
    labels,
    lay_out,
    locked,
)  # fmt: skip
from clustertune.containers.lockfile import Lock
from clustertune.containers.pins import FOLDER
from clustertune.containers.wheelhouse import Wheel
from clustertune.errors import ExitCode, Problem, UserError, storage_error
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
            Problem(f"{command[0]} does not start: {error.strerror}", fix="install it anew"), ExitCode.FAILED
        ) from error
    if done.returncode:
        fix = "its last lines above say why; where no registry is reached: BASE=standin"
        raise UserError(Problem(f"{what} failed (exit code {done.returncode})", fix=fix), ExitCode.FAILED)


def answer(command: Sequence[str], seconds: int = PROBE_SECONDS) -> str | None:
    """A command's stdout; None where it fails."""
    try:
        done = subprocess.run(
            command, env=environ(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
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
    """The build rootless: an ordinary user's is by itself, root's where it is told, with a range of ids to map."""
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


def build_sif(what: Asked, say: Say) -> dict[str, Any]:
    """``make build-sif``: the image, its ``.sha256`` and its SBOM. Returns what was made."""
    started = time.monotonic()
    program, lock = find_apptainer(), locked(what)
    out = (what.out or ROOT / f"{what.definition}.sif").absolute()
    if what.dry_run:
        return _plan(what, lock, base_of(what, lock.python if lock else "3.12", say), program, str(out))
    try:
        base, folder, wheels = gather(what, lock, say)
        WORK.mkdir(parents=True, exist_ok=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=WORK, prefix="sif-") as scratch:
            context = Path(scratch) / "context"
            context.mkdir()
            lay_out(context, lock, folder, FOLDER / f"{what.definition}.def")
            part = out.with_name(f".{out.name}.{os.getpid()}.part")
            try:
                run(
                    _sif_command(what, program, lock, base, folder, context, part),
                    "the build",
                    say,
                    cwd=context,
                    env=_caches(scratch),
                )
                inventory = _inventory(in_sif(program, part, VENV_PYTHON, SELFTEST, "--inventory")) if lock else None
                return _publish(part, out, lock, wheels, inventory, base, started)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, "build the image", out) from error


def _sif_command(
    what: Asked, program: str, lock: Lock | None, base: Base, wheels: Path | None, context: Path, out: Path
) -> list[str]:
    """Everything relative to the context: what stands in the definition ends up in the image."""
    given = labels(lock, base)
    if base.archive:
        (context / "base.tar").symlink_to(base.archive)
        given |= {"bootstrap": "docker-archive", "base": "base.tar"}
    else:
        given |= {"base": base.name}
    bind = ["--bind", f"{wheels}:/mnt:ro"] if wheels else []
    words = [word for name, value in given.items() for word in ("--build-arg", f"{name}={value}")]
    command = [program, "build", "--mksquashfs-args", SQUASH, *bind, *words, str(out), f"{what.definition}.def"]
    return _as_user(command, context.parent)


def _caches(scratch: str) -> dict[str, str]:
    """A build needs twice the image's size; /tmp is often memory. The user's own places win."""
    return {
        f"{name}_{kind}": os.environ.get(f"{name}_{kind}", str(place))
        for name in ("APPTAINER", "SINGULARITY")
        for kind, place in (("TMPDIR", scratch), ("CACHEDIR", WORK / "cache"))
    }


# --- OCI ---------------------------------------------------------------------------------------------------------------


def find_engine() -> str:
    """docker where its server answers, else podman."""
    for name, probe in (("docker", ["version"]), ("podman", ["info"])):
        if shutil.which(name) and answer([name, *probe]) is not None:
            return name
    raise UserError(Problem("neither a docker server nor podman answers", fix="start docker, or install podman"))


def build_image(what: Asked, say: Say) -> dict[str, Any]:
    """``make build-image``: the image in the engine's store, tested, with its SBOM; an archive of it where asked."""
    started = time.monotonic()
    engine, lock = find_engine(), locked(what)
    assert lock, "only train has a Dockerfile"
    tag = what.tag or f"clustertune/{what.definition}:{what.variant}"
    if what.dry_run:
        return _plan(what, lock, base_of(what, lock.python, say), engine, tag)
    try:
        base, folder, wheels = gather(what, lock, say)
        assert folder, "there is a lock"
        WORK.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=WORK, prefix="oci-") as scratch:
            context = Path(scratch)
            lay_out(context, lock, folder, FOLDER / "Dockerfile")
            (context / "wheels").mkdir()
            for path in folder.iterdir():
                _link(path, context / "wheels" / path.name)
            given = {"BASE_IMAGE": _loaded(engine, base), **{key.upper(): value for key, value in labels(lock, base).items()}}
            words = [word for name, value in given.items() for word in ("--build-arg", f"{name}={value}")]
            # OCI's own format has no SHELL and no health check, and enroot reads both.
            style = ["--format", "docker", "--layers=false"] if engine == "podman" else []
            # The host's network: apt needs one, and a bridge needs modules that a small machine's kernel does not have.
            run(
                [engine, "build", "--network", "host", *style, *words, "--tag", tag, str(context)],
                "the build",
                say,
                env={"DOCKER_BUILDKIT": "1"},
            )
        alone = [engine, "run", "--rm", "--network", "none", *_limits(engine), tag]
        run([*alone, "python", SELFTEST], "the image's own test", say, seconds=TEST_SECONDS)
        inventory = _inventory([*alone, "python", SELFTEST, "--inventory"])
        if what.out is None:
            return _describe(
                tag, ROOT / f"{tag.replace('/', '-').replace(':', '-')}", lock, wheels, inventory, base, started, engine
            )
        out = what.out.absolute()
        part = out.with_name(f".{out.name}.{os.getpid()}.part")
        try:
            run([engine, "save", "--output", str(part), tag], "saving the image", say)
            return {"image": tag, **_publish(part, out, lock, wheels, inventory, base, started)}
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, "build the image", tag) from error


def _limits(engine: str) -> list[str]:
    """Limits that every machine may set: podman's own are larger than a container or a small VM allows."""
    names = ("nofile", "nproc") if engine == "podman" else ()
    return [word for name in names for word in ("--ulimit", f"{name}={LIMIT}:{LIMIT}")]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def _loaded(engine: str, base: Base) -> str:
    """The base's name for ``FROM``: an archive is loaded first."""
    if base.archive is None:
        return base.name
    told = answer([engine, "load", "--input", str(base.archive)], seconds=900) or ""
    named = re.search(r"Loaded image(?:\(s\)| ID)?: (\S+)", told)
    if not named:
        raise UserError(
            Problem(f"{engine} loads no image from it", str(base.archive), fix="give a docker-archive with a name"),
            ExitCode.FAILED,
        )
    return named[1]


# --- beside the image --------------------------------------------------------------------------------------------------


def _inventory(command: Sequence[str]) -> Mapping[str, Any]:
    told = answer(command, seconds=TEST_SECONDS)
    if told is None:
        raise UserError(Problem("the image does not say what it holds", fix="its test's output above"), ExitCode.FAILED)
    return dict(json.loads(told))


def _plan(what: Asked, lock: Lock | None, base: Base, program: str, image: str) -> dict[str, Any]:
    recipe = "Dockerfile" if what.kind == "build-image" else f"{what.definition}.def"
    return {
        "image": image, "with": program, "definition": f"containers/{recipe}", "lock": lock.name if lock else None,
        "packages": len(lock.entries) if lock else 0, "extras": list(what.extras), "base": base.name,
    }  # fmt: skip


def _describe(
    name: str,
    stem: Path,
    lock: Lock,
    wheels: list[Wheel],
    inventory: Mapping[str, Any],
    base: Base,
    started: float,
    engine: str,
) -> dict[str, Any]:
    bill = stem.with_name(stem.name + ".cdx.json")
    document = sbom.document(name, lock, wheels, inventory, base.name, datetime.now(UTC))
    bill.write_text(json.dumps(document, indent=1) + "\n")
    size = int((answer([engine, "image", "inspect", "--format", "{{.Size}}", name]) or "0").strip() or 0)
    return {"image": name, "bytes": size, "seconds": round(time.monotonic() - started), "sbom": str(bill), "lock": lock.name}


def _publish(
    part: Path,
    out: Path,
    lock: Lock | None,
    wheels: list[Wheel],
    inventory: Mapping[str, Any] | None,
    base: Base,
    started: float,
) -> dict[str, Any]:
    """The image in its place, and beside it the SBOM and, last, the sum: who finds the sum finds a whole image."""
    total, bill = out.with_name(out.name + ".sha256"), out.with_name(out.name + ".cdx.json")
    total.unlink(missing_ok=True)
    digest, size = wheelhouse.file_digest(part), part.stat().st_size
    part.replace(out)
    made: dict[str, Any] = {"file": str(out), "sha256": digest, "bytes": size, "base": base.name}
    if lock and inventory:
        document = sbom.document(out.name, lock, wheels, inventory, base.name, datetime.now(UTC))
        bill.write_text(json.dumps(document, indent=1) + "\n")
        made |= {"sbom": str(bill), "lock": lock.name}
    total.write_text(f"{digest}  {out.name}\n")
    return {**made, "seconds": round(time.monotonic() - started)}
