"""The arguments that put a command into the cluster's container: Apptainer or Singularity in front, pyxis as options of srun.

Apptainer runs with ``--containall --cleanenv``: of the node the program sees only what the arguments name, so that two
nodes, or two users, run the same. What has to come in is named: folders here, variables and devices, which differ from node to
node, by launch/inside.sh on the node itself. Pyxis cleans nothing: there the allow-list of srun's ``--export`` is the border.

And which image a run is in: its sum, held against the ``.sha256`` beside it, and what it has installed.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clustertune.cluster.schema import Cluster, Container
from clustertune.cluster.schema import Container as Settings
from clustertune.console import byte_progress, say
from clustertune.containers import package_lock, pins
from clustertune.errors import ExitCode, Problem, UserError, raise_if, storage_error
from clustertune.launch import cluster_paths
from clustertune.launch.inventory import MARK, inventory
from clustertune.manifest import open_to_read
from clustertune.process import captured
from clustertune.resolve import kernels
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir
from clustertune.tree import IS_INSTALLED, PACKAGE, ROOT, env_file

INSIDE = "launch/inside.sh"
CODE = Path("/srv/clustertune")
"""Where a container sees an installed package: alone, because the packages beside it are this machine's, not the image's."""
NODE_TMP = ("/tmp",)  # noqa: S108 - it is bound, not written to
"""Bound beside what the cluster file names: a contained /tmp is 64 MB of memory."""
RUNTIMES = ("apptainer", "singularity")
"""Those that are started in front of a command. Pyxis works through srun only."""
_UNBINDABLE = re.compile(r"[,:\x00-\x1f]")
_DIGEST = re.compile(
    r"docker://(?:(?P<registry>[^/]*[.:][^/]*|localhost)/)?(?P<name>[^:@]+)(?::[^@]*)?@(?P<digest>sha256:[0-9a-f]{64})"
)
HUB = "registry-1.docker.io"


@dataclass(frozen=True)
class ContainerCommand:
    """A command in the container."""

    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    """Options of srun; empty but for pyxis."""
    exported: tuple[str, ...] | None = None
    """The variables that srun may export, where it must be fewer than without a container."""
    added: tuple[str, ...] = ()
    """Variables with their values that srun exports besides."""


def wrap(
    command: Sequence[str], cluster: Cluster, *, binds: Sequence[str | Path], gpus: bool, repo: Path = ROOT
) -> ContainerCommand:
    """``command``, whose first word is this machine's Python, in the cluster's container; as it stands where there is none.

    It sees ``binds``, the node's disks, what the cluster file binds, and the checkout, which is not baked into the image, and
    is the working folder: there ``python3 -m clustertune`` finds the package. Raises UserError for a path that cannot be
    bound.
    """
    settings, storage = cluster.container, cluster.storage
    if settings.runtime == "none":
        return ContainerCommand(tuple(command), added=("PYTHONSAFEPATH=1",))
    raise_if(unbindable([repo, *binds]))
    staging = [storage.staging.path] if storage.staging else []
    code = [f"{PACKAGE}:{CODE}/{PACKAGE.name}"] if IS_INSTALLED else []
    if code and env_file().is_file():
        code.append(str(env_file().parent))
    work = CODE if IS_INSTALLED else repo
    named = [str(repo), *code, *map(str, binds), storage.scratch, *staging, *settings.binds, *NODE_TMP]
    paths = list(dict.fromkeys(named))
    launched = ("python3", *command[1:])
    if settings.runtime == "pyxis":
        return ContainerCommand(launched, tuple(_pyxis(settings, paths, work)), PYXIS_EXPORTED, ("PYTHONNOUSERSITE=1",))
    # Apptainer and Singularity take the same arguments. --no-home: its caches and packages are not the image's. --nv: the
    # driver's libraries and devices. --env, also after --cleanenv: an image that does not say it itself would take packages of
    # a bound home folder.
    device = ["--nv"] if gpus and "--rocm" not in settings.options else []
    start = [str(repo / INSIDE), settings.command, "exec"]
    contained = [*device, "--containall", "--cleanenv", "--no-home", *settings.options]
    seen = ["--env", "PYTHONNOUSERSITE=1", "--pwd", str(work), *(word for bind in paths for word in ("--bind", bind))]
    return ContainerCommand((*start, *contained, *seen, settings.image or "", *launched))


def paths_of(resolved: Resolved, run_path: Path) -> list[Path]:
    """What a run reads and writes beside the checkout: its folder, a sweep's that it is a point of, and whatever the recipe
    names by a path."""
    recipe = resolved.recipe
    shared = RunDir(run_path).shared_tokens
    named = [resolved.folder, recipe.staged, recipe.model.path, *resolved.inputs.values()]
    absolute = [seen for path in named if path for seen in _with_targets(Path(path).absolute())]
    run = run_path.resolve() if shared is None else shared.parent.resolve()
    return [run, *(path for path in absolute if not path.is_relative_to(ROOT))]


def _with_targets(path: Path) -> list[Path]:
    """A path, and the folders to which links in it lead: those of the Hub's snapshots lie beside them."""
    try:
        entries = [path, *path.iterdir()] if path.is_dir() else [path]
        behind = {entry.resolve().parent for entry in entries if entry.is_symlink()} - {path.resolve()}
    except OSError:  # not there yet
        return [path]
    return [path, *sorted(behind)]


def unbindable(paths: Sequence[str | Path]) -> list[Problem]:
    """Folders that no runtime can bind: ``,`` and ``:`` part the words of a bind, and none can be quoted everywhere."""
    fix = "move it to a path without ',' and ':'"
    bad = dict.fromkeys(str(path) for path in paths if _UNBINDABLE.search(str(path)))
    return [Problem("the container cannot be shown a path with ',' or ':'", file=path, fix=fix) for path in bad]


PYXIS_EXPORTED = (
    "PATH", "USER", "LOGNAME", "LANG", "LC_ALL", "TMPDIR", *cluster_paths.VARIABLES,
)  # fmt: skip
"""What srun exports into enroot, which passes on all that it is given. The image's own PATH wins; this machine's
LD_LIBRARY_PATH would be searched inside where the image sets none."""


def _pyxis(settings: Settings, paths: Sequence[str], repo: Path) -> list[str]:
    """As ``srun --help`` of a cluster with pyxis lists them (args.c of NVIDIA/pyxis). enroot binds /dev with /dev/shm and
    /dev/infiniband by itself, and its hook the GPUs, where the image or the node sets NVIDIA_VISIBLE_DEVICES.
    """
    chosen = settings.options
    root = [] if "--container-remap-root" in chosen else ["--no-container-remap-root"]
    # An entrypoint prints and may wait; ours is not needed.
    entry = [] if "--container-entrypoint" in chosen else ["--no-container-entrypoint"]
    mounts = ",".join(bind if ":" in bind else f"{bind}:{bind}" for bind in paths)  # SRC:DST[:FLAGS]
    return [
        f"--container-image={enroot_name(settings.image or '')}",
        f"--container-mounts={mounts}",
        f"--container-workdir={repo}",
        "--no-container-mount-home",
        *root,
        *entry,
        "--container-env=PYTHONNOUSERSITE",
        *chosen,
    ]


def enroot_name(image: str) -> str:
    """The image as enroot takes it. A digest in the place of the tag, with ``#`` behind the registry: releases before 4 read no
    ``@sha256:``, later ones read both (docker::_parse_uri of NVIDIA/enroot's docker.sh).
    """
    match = _DIGEST.fullmatch(image)
    if not match:
        return image
    name = match["name"] if match["registry"] or "/" in match["name"] else f"library/{match['name']}"
    return f"docker://{match['registry'] or HUB}#{name}:{match['digest']}"


# --- the image --------------------------------------------------------------------------------------------------------

_CHUNK = 1 << 22
_MAX_SUM = 4096


@dataclass(frozen=True)
class Image:
    """An image as ``run.json`` keeps it."""

    runtime: str
    image: str
    """Path, or ``docker://NAME@sha256:DIGEST``."""
    sha256: str | None
    """Of the file, or the registry's digest; None: not known."""
    checked: bool
    """Whether ``sha256`` was held against something: the file beside the image, or a registry's digest."""
    bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        """For run.json."""
        return asdict(self)


def look(settings: Container) -> tuple[Image | None, list[str]]:
    """The cluster's image with its sum, and what to warn of; None where there is no container.

    Raises UserError where it is not there, or is not what the ``.sha256`` beside it says.
    """
    if settings.runtime == "none" or settings.image is None:
        return None, []
    if settings.image.startswith("docker://"):
        digest = settings.image.rpartition("@sha256:")[2]
        return Image(settings.runtime, settings.image, digest, checked=True), []
    path = Path(settings.image)
    try:
        stated, notes = _stated(path)
        digest, size = _digest(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            fix = "build it (make build-sif), or name the one that is there: container.image of the cluster file"
            raise UserError("no such image", file=str(path), key="container.image", fix=fix) from None
        raise storage_error(error, "reading the image", path) from None
    if stated is not None and digest != stated:
        again = f"sha256sum {path.name} > {path.name}.sha256"
        fix = f"it was altered or copied in part: copy or build it again; where it is meant so: {again}"
        text = f"its SHA-256 is {digest[:16]}..., and {path.name}.sha256 says {stated[:16]}..."
        raise UserError(text, file=str(path), key="container.image", fix=fix)
    return Image(settings.runtime, settings.image, digest, stated is not None, size), notes


def _stated(path: Path) -> tuple[str | None, list[str]]:
    """The sum in the file beside an image, and a note where there is none. Raises UserError for a file that holds none."""
    beside = path.with_name(path.name + ".sha256")
    try:
        with open_to_read(beside) as file:
            text = file.read(_MAX_SUM).decode(errors="replace")
    except FileNotFoundError:
        path.stat()  # the image itself is named as missing
        fix = f"cd {path.parent} && sha256sum {path.name} > {beside.name}"
        return None, [f"{beside} is not there: whether the image is whole is not checked -> {fix}"]
    match = re.fullmatch(r"([0-9a-fA-F]{64})([ \t]+\*?[^\n]*)?\s*", text)
    if not match:
        fix = f"sha256sum {path.name} > {beside.name}, where the image is the right one"
        raise UserError("contains no sum of one file", file=str(beside), fix=fix)
    return match[1].lower(), []


# --- the sum -----------------------------------------------------------------------------------------------------


def _digest(path: Path) -> tuple[str, int]:
    """SHA-256 and size of an image. Raises OSError, or UserError."""
    before = _identity(path)
    say(f"computing the SHA-256 of {path}: {before['size'] / 1e9:.2f} GB")
    digest = _read(path, before["size"])
    if _identity(path) != before:
        raise UserError("changed while its SHA-256 was computed", file=str(path), fix="wait for it", code=ExitCode.AGAIN)
    return digest, before["size"]


def _identity(path: Path) -> dict[str, int]:
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise UserError("is not a file", file=str(path), key="container.image", fix="a .sif (or .sqsh) file")
    return {"size": info.st_size, "mtime_ns": info.st_mtime_ns, "inode": info.st_ino}


def _read(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with open_to_read(path) as file, byte_progress() as bar:
        task = bar.add_task(path.name, total=size)
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            bar.advance(task, len(chunk))
    return digest.hexdigest()


def changed(before: object, now: Image) -> str:
    """A warning where a run continues in another image than it began in; empty where it does not."""
    if not isinstance(before, Mapping) or not before.get("sha256") or before["sha256"] == now.sha256:
        return ""
    old, new = str(before["sha256"])[:16], (now.sha256 or "unknown")[:16]
    text = f"the run continues in another image: {now.image} is {new}... and was {old}..."
    return f"{text} -> results may differ from those of one image"


# --- what it has installed ------------------------------------------------------------------------------------------------

# Held against containers/versions.env before the first stage: which package is missing, and which is of another version.

MODULE = "clustertune.launch.inventory"
INVENTORY_SECONDS = 300.0
"""How long an image may take to answer: its first start on a node reads it over the network."""
FOR_SOME = {
    "wandb": "training with report_to: wandb",
    "matplotlib": "the report's plots",
    "bitsandbytes": "training on a 4-bit or 8-bit base",
    "lm-eval": "the stage eval",
    "nltk": "the stage eval",
    "langdetect": "the stage eval",
    "immutabledict": "the stage eval",
    "nvidia-ml-py": "GPU readings of the metrics",
    "xxhash": "digests of merged weights",
}
"""Packages that not every stage imports, and what fails without them. All others are needed by each."""
_MOST = 40
"""Lines of one kind."""


@dataclass(frozen=True)
class Stack:
    """What a Python has installed."""

    python: str
    packages: Mapping[str, str]


def parse(text: str) -> Stack | None:
    """The answer among what an image printed; None where there is none."""
    for line in reversed(text.splitlines()):
        if line.startswith(MARK):
            try:
                body = json.loads(line[len(MARK) :])
                return Stack(str(body["python"]), {str(k): str(v) for k, v in body["packages"].items()})
            except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
                return None
    return None


def ask(command: Sequence[str], image: str) -> Stack:
    """Run the inventory in the container. Raises UserError (exit 2) where the image does not start or has no Python for it."""
    fix = "try it by hand: the command is in the job's log; clustertune doctor looks at runtime, image and binds"
    try:
        done = captured(command, INVENTORY_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"the container did not answer within {INVENTORY_SECONDS:.0f} s", file=image, fix=fix) from None
    except OSError as error:
        text = f"the container does not start: {error.filename or command[0]}: {error.strerror}"
        raise UserError(text, file=image, fix=fix) from None
    stack = parse(done.stdout)
    if stack is None:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()][-4:]
        text = (
            f"no Python 3.8 or later answers in the image (exit code {done.returncode}): {' | '.join(lines)[:600] or 'no word'}"
        )
        raise UserError(text, file=image, key="container.image", fix=fix)
    return stack


def too_old(python: str) -> str:
    """What is wrong with a Python that ``requires-python`` of the project does not allow; empty for another."""
    required = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    match = re.search(r">=\s*([0-9]+)\.([0-9]+)", required)
    if not match or tuple(map(int, re.findall(r"\d+", python)[:2])) >= (int(match[1]), int(match[2])):
        return ""
    return f"Python {python}, and clustertune needs {match[1]}.{match[2]} or later"


def judge(stack: Stack, pinned: pins.Pins, image: str) -> tuple[list[Problem], list[str]]:
    """What keeps a job from running in an image, and what to warn of: one line for each difference.

    An image of the reference stack is whole in its own way: it is held against its own pins where these fit better.
    """
    problems, warnings = [], []
    fix = "build it from this checkout (make build-sif), or install it in the image"
    if text := too_old(stack.python):
        problems.append(Problem(text, file=image, key="container.image", fix=fix))
    stack_pins = {**pinned[pins.PY]}
    reference = {**stack_pins, **{name: version for name, version in pinned[pins.REF].items() if name in stack_pins}}
    differences = min((_differences(stack, expected) for expected in (stack_pins, reference)), key=len)
    for name, version in sorted(stack_pins.items()):
        if name in stack.packages:
            continue
        if name in FOR_SOME:
            warnings.append(f"the image has no {name} ({version} in containers/versions.env): {FOR_SOME[name]} fails")
        else:
            problems.append(Problem(f"the image has no {name} ({version})", file=image, key="container.image", fix=fix))
    return problems[:_MOST], [*warnings, *differences][:_MOST]


def lacking(stack: Stack, train: Mapping[str, Any], image: str, *, gpus: bool) -> list[Problem]:
    """The packages that a recipe's ``train`` section asks for and an image does not have."""
    problems = []
    for key, value, packages in kernels.needed(train, gpus=gpus):
        if not any(name.lower() in stack.packages for name in packages):
            text = f"{value} needs {' or '.join(packages)}, and {image} has none"
            problems.append(Problem(text, key=key, fix=f"install {packages[0]} there, or leave {key} out"))
    return problems


def not_built(train: Mapping[str, Any], in_image: Sequence[str] = ()) -> list[Problem]:
    """The packages that a recipe's ``train`` section asks for, and that neither an image of this checkout can have nor this
    Python has: what is known before the queue, where the image itself is first asked in the job. ``in_image``: what the
    cluster file says that its own image has."""
    if not (asked := list(kernels.needed(train, gpus=True))):
        return []
    known, here = package_lock.locked_packages().union(name.lower() for name in in_image), own().packages
    problems = []
    for key, value, packages in asked:
        if not any(name.lower() in known or name.lower() in here for name in packages):
            text = f"{value} needs {' or '.join(packages)}, which no lock in containers/ has"
            fix = f"leave {key} out or take another value; or, where an image of your own has {packages[0]}, "
            fix += f"container.packages: [{packages[0]}] in the cluster file"
            problems.append(Problem(text, key=key, fix=fix))
    return problems


def own() -> Stack:
    """What this Python has installed."""
    listed = inventory()
    return Stack(str(listed["python"]), listed["packages"])


def lacking_here(train: Mapping[str, Any], *, gpus: bool) -> list[Problem]:
    """The packages that a recipe's ``train`` section asks for and this Python lacks."""
    if not any(kernels.needed(train, gpus=gpus)):
        return []
    return lacking(own(), train, "this Python", gpus=gpus)


def _differences(stack: Stack, pinned: Mapping[str, str]) -> list[str]:
    # torch 2.13.0+cpu is 2.13.0, built for another device.
    return [
        f"the image has {name} {stack.packages[name]}, containers/versions.env {version}"
        for name, version in sorted(pinned.items())
        if name in stack.packages and stack.packages[name].partition("+")[0] != version
    ]


def record(stack: Stack, pinned: pins.Pins) -> dict[str, Any]:
    """For run.json: the Python, and the packages that are pinned."""
    return {"python": stack.python, "packages": {n: v for n, v in sorted(stack.packages.items()) if n in pinned[pins.PY]}}


# --- Megatron's -----------------------------------------------------------------------------------------------------------

# The ranks of a Megatron recipe run in NVIDIA's image, by the same step and launcher on every node.

MEGATRON_KEY = "container.megatron"
MEGATRON_NEEDED = (
    "megatron-bridge", "megatron-core", "transformer-engine", "torch", "transformers", "pyarrow",
    "pydantic", "pyyaml", "rich", "typer",
)  # fmt: skip
"""Packages that the ranks import: NVIDIA's own, and what the launcher's side of a rank needs."""
BRIDGE_RELEASE = "0.5."


def is_megatron(resolved: Resolved) -> bool:
    """Whether the ranks of a recipe are Megatron's."""
    return resolved.recipe.megatron is not None


def of_training(resolved: Resolved, cluster: Cluster) -> Cluster:
    """The cluster as the ranks see it: for a Megatron recipe with NVIDIA's image in the place of the project's own."""
    if not is_megatron(resolved) or cluster.container.megatron is None:
        return cluster
    container = cluster.container.model_copy(update={"image": cluster.container.megatron})
    return cluster.model_copy(update={"container": container})


def megatron_problems(resolved: Resolved, cluster: Cluster) -> list[Problem]:
    """A cluster that has no image for the ranks of a Megatron recipe."""
    if not is_megatron(resolved):
        return []
    if cluster.container.runtime == "none":
        text = "a Megatron recipe runs in NVIDIA's image, and this cluster has no container runtime"
        fix = "container: {runtime: apptainer, image: ..., megatron: ...}"
        return [Problem(text, file=cluster.source, key="container.runtime", fix=fix)]
    if cluster.container.megatron is None:
        fix = "apptainer build megatron.sif containers/megatron.def makes it; name the file there"
        return [Problem("missing: the image that a Megatron recipe trains in", file=cluster.source, key=MEGATRON_KEY, fix=fix)]
    return []


def judge_megatron(seen: Stack, image: str) -> list[Problem]:
    """What keeps the ranks from running in an image, by what it has installed."""
    fix = "build it from containers/megatron.def"
    problems = [
        Problem(f"the image has no {name}", file=image, key=MEGATRON_KEY, fix=fix)
        for name in MEGATRON_NEEDED
        if name not in seen.packages
    ]
    version = seen.packages.get("megatron-bridge")
    if version is not None and not version.startswith(BRIDGE_RELEASE):
        text = f"the image has Megatron-Bridge {version}, and this release of clustertune is for {BRIDGE_RELEASE}x"
        problems.append(Problem(text, file=image, key=MEGATRON_KEY, fix=fix))
    if text := too_old(seen.python):
        problems.append(Problem(text, file=image, key=MEGATRON_KEY, fix=fix))
    return problems
