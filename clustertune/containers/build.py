"""What an image is built from: the options, the lock held to the pins, the base, and the folder that the engine sees."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clustertune.containers import lock as locks
from clustertune.containers import lockfile, pins, standin, wheelhouse
from clustertune.containers.lockfile import PackageLock
from clustertune.containers.wheelhouse import Wheel
from clustertune.errors import Problem, UserError
from clustertune.lock import in_turn
from clustertune.tree import ROOT

Say = Callable[[str], None]
WORK = ROOT / "build" / "containers"
STANDIN = "standin"
VARIANTS = {"cuda": "train", "cpu": "train-cpu", "vllm": "vllm"}
DEFINITIONS = ("train", "reference", "megatron")
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
    """Empty: of containers/base.env; ``standin``; a docker-archive; or NAME@sha256:DIGEST."""
    out: Path | None = None
    """The SIF; of an OCI image an archive that is written beside what the engine keeps."""
    tag: str = ""
    dry_run: bool = False

    @property
    def lock_name(self) -> str:
        """The lock that the image is built from; empty: its base has all."""
        if self.definition != "train":
            return "" if self.definition == "megatron" else self.definition
        aarch64 = self.variant == "cuda" and platform.machine() == "aarch64"
        return "train-aarch64" if aarch64 else VARIANTS[self.variant]


@dataclass(frozen=True)
class BaseImage:
    """What an image starts from."""

    name: str
    """As labels and SBOM tell it: never a path of this machine."""
    archive: Path | None = None
    """A docker-archive; None: ``name`` is pulled."""


def arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    """The options of ``build-sif`` and ``build-image``."""
    sif = kind == "build-sif"
    parser.set_defaults(kind=kind)
    parser.add_argument("--definition", choices=DEFINITIONS if sif else ("train",), default="train", help="containers/NAME.def")
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="cuda", help="which lock; CI uses cpu")
    parser.add_argument("--extras", default="", help=f"layers on top, as A+B: {', '.join(locks.LAYERS)}")
    parser.add_argument(
        "--base", default="", help="NAME@sha256:DIGEST, a docker-archive, or `standin` if no registry can be reached"
    )
    parser.add_argument("--out", type=Path, help="the image file" if sif else "write it as a docker-archive too")
    parser.add_argument("--tag", default="", help=argparse.SUPPRESS if sif else "name of the image")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")


def request(args: argparse.Namespace) -> BuildRequest:
    """The options as one value. Raises UserError with every one that cannot be."""
    extras = tuple(filter(None, re.split(r"[+,]", args.extras)))
    problems = [
        Problem(f"no layer {name!r}", key="EXTRAS", fix=f"one of {', '.join(locks.LAYERS)}")
        for name in extras
        if name not in locks.LAYERS
    ]
    if extras and (args.definition, args.variant) != ("train", "cuda"):
        problems.append(
            Problem("layers are locked on top of the cuda variant of train", key="EXTRAS", fix="leave EXTRAS or VARIANT out")
        )
    if extras and platform.machine() != "x86_64":
        problems.append(Problem("layers are locked for x86_64", key="EXTRAS", fix="leave EXTRAS out"))
    if args.tag and not re.fullmatch(r"[a-z0-9][a-z0-9._/-]{0,127}(:[A-Za-z0-9][A-Za-z0-9._-]{0,63})?", args.tag):
        problems.append(Problem(f"{args.tag!r} is not an image name", key="TAG", fix="lower case, as in clustertune/train:cpu"))
    if args.base and args.base != STANDIN and not _REFERENCE.fullmatch(args.base) and not Path(args.base).is_file():
        problems.append(
            Problem(
                f"{args.base!r} is not a file and has no digest",
                key="BASE",
                fix="NAME@sha256:DIGEST, a docker-archive, or standin",
            )
        )
    if problems:
        raise UserError(problems)
    return BuildRequest(args.kind, args.definition, args.variant, extras, args.base, args.out, args.tag, args.dry_run)


def locked(what: BuildRequest) -> PackageLock | None:
    """The lock with its layers, held to the pins. Raises UserError where a version was moved in one place only."""
    if not what.lock_name:
        return None
    found, problems, whole = pins.read(), [], None
    for name in (what.lock_name, *(f"extra-{name}" for name in what.extras)):
        part = lockfile.read(locks.path_of(name))
        problems += locks.held_to_pins(next(spec for spec in locks.SPECS if spec.name == name), part, found)
        whole = whole.with_layer(part) if whole else part
    if problems:
        raise UserError(problems)
    return whole


def base_of(what: BuildRequest, python: str, say: Say) -> BaseImage:
    """What it starts from; a stand-in is made once and kept."""
    if what.base == STANDIN:
        if what.definition == "megatron":
            raise UserError(
                Problem("megatron.def has no stand-in: its base is NVIDIA's whole image", key="BASE", fix="leave BASE out")
            )
        archive = WORK / f"standin-{standin.suite_of(python)}.tar"
        if not archive.exists() and not what.dry_run:
            standin.make(python, archive, say)
        return BaseImage(f"stand-in {standin.suite_of(python)}", archive)
    if what.base and not _REFERENCE.fullmatch(what.base):
        return BaseImage(Path(what.base).name, Path(what.base).resolve())
    return BaseImage(what.base or pins.read_bases()["BASE_MEGATRON" if what.definition == "megatron" else "BASE_TRAIN"])


REGISTRIES = {"docker.io": "registry-1.docker.io"}
"""Where a registry answers, if not at its name."""
REGISTRY_SECONDS = 10


def look_for_registry(base: BaseImage, say: Say) -> None:
    """Warn where the base's registry does not answer, before gigabytes are fetched. An engine may know a mirror."""
    if base.archive is not None:
        return
    named = base.name.partition("/")[0]
    host = named if re.search(r"[.:]|^localhost$", named) else "docker.io"
    try:
        with urllib.request.urlopen(f"https://{REGISTRIES.get(host, host)}/v2/", timeout=REGISTRY_SECONDS):
            return
    except urllib.error.HTTPError:
        return  # it asks who we are
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if not isinstance(reason, ssl.SSLError):
            say(f"note: {host} does not answer ({reason}): without a mirror of it the build fails at its base -> BASE=standin")


def gather(what: BuildRequest, lock: PackageLock | None, say: Say) -> tuple[BaseImage, Path | None, list[Wheel]]:
    """The base, and the lock's wheelhouse with its wheels: one build at a time, for both are kept for the next one."""
    with in_turn(WORK / "lock", lambda: say("another build is gathering: waiting for it")):
        base = base_of(what, lock.python if lock else "3.12", say)
        look_for_registry(base, say)
        return (base, *wheels_of(what, lock, say)) if lock else (base, None, [])


def wheels_of(what: BuildRequest, lock: PackageLock, say: Say) -> tuple[Path, list[Wheel]]:
    """The wheelhouse of the lock and its layers."""
    folder = WORK / "wheels" / "+".join((lock.name, *what.extras))
    return folder, wheelhouse.fill(lock, folder, WORK / "tools", say)


def lay_out(context: Path, lock: PackageLock | None, wheels: Path | None, recipe: Path) -> None:
    """The folder that the engine builds in: the recipe, what goes into the image, and nothing of this machine."""
    shutil.copy(recipe, context / recipe.name)
    if lock and wheels:
        for part in PARTS:
            shutil.copy(pins.FOLDER / part, context / part)
        shutil.copy(wheels / wheelhouse.REQUIREMENTS, context / wheelhouse.REQUIREMENTS)
        (context / "image.lock").write_text(lock.text())
    for path in context.iterdir():
        path.chmod(0o644)


def labels(lock: PackageLock | None, base: BaseImage) -> dict[str, str]:
    """The build arguments that become labels."""
    if lock is None:
        return {"base_name": base.name}
    digest = wheelhouse.text_digest(lock.text())
    return {"python": lock.python, "lock": lock.name, "lock_sha256": digest, "before": lock.before, "base_name": base.name}


_PASSED = re.compile(
    r"PATH|HOME|USER|LANG|LC_\w+|TMPDIR|XDG_\w+|SSL_CERT_(FILE|DIR)|(http|https|no|HTTP|HTTPS|NO)_(proxy|PROXY)|CONTAINERS_\w+|STORAGE_\w+"
    r"|REGISTRY_AUTH_FILE|DOCKER_(HOST|CONFIG|CONTEXT|CERT_PATH|TLS_VERIFY)|BUILDAH_\w+|(APPTAINER|SINGULARITY)_\w+"
)


def environ() -> dict[str, str]:
    """What of the caller's environment engines receive: tokens of other programs stay out."""
    return {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
