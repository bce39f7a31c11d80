"""The arguments that put a command into the cluster's container: Apptainer or Singularity in front, pyxis as options of srun.

Apptainer runs with ``--containall --cleanenv``: of the node the program sees only what the arguments name, so that two
nodes, or two users, run the same. What has to come in is named: folders here, variables and devices, which differ from node to
node, by launch/inside.sh on the node itself. Pyxis cleans nothing: there the allow-list of srun's ``--export`` is the border.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertune.cluster.schema import Cluster
from clustertune.cluster.schema import Container as Settings
from clustertune.errors import Problem, raise_if
from clustertune.launch import cluster_paths
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
