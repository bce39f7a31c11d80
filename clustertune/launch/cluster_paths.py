"""Where caches, models and runs lie: what the shell that submits exports, else the cluster file, else the libraries' defaults.

A job sees nothing of the shell that submits it but the variables named here: `submit` hands each on as ``--env NAME=VALUE``,
with its final value, so that a ``$SCRATCH`` of the cluster file means the same on every node.
"""

from __future__ import annotations

import os
import platform
import pwd
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path

from clustertune.cluster.schema import Cluster
from clustertune.errors import Problem, UserError, raise_if
from clustertune.host.facts import Mount
from clustertune.host.mounts import all_mounts, lies_elsewhere, mount_of, own_mounts
from clustertune.launch.environment import Setting
from clustertune.manifest import MANIFEST
from clustertune.secrets import SECRET
from clustertune.tree import ROOT

FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "NLTK_DATA")
"""Variables that name a folder of the user's (NLTK_DATA several, parted by ``:``), in which libraries keep what they loaded."""
VARIABLES = (*FOLDERS, "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "WANDB_MODE")
"""What a job takes over of the shell that submits it. No token is among them: those stand in ``.env``."""
_KEY = {"caches": "HF_HOME", "runs": "--run-dir"}
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")


def folder(cluster: Cluster | None, what: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder for ``caches``, ``models`` or ``runs``, with ``~`` and variables put in; None where the cluster file has none.

    Raises UserError where a variable is not set here, or no absolute path comes out.
    """
    text = cluster.storage.folder(what) if cluster else None
    if cluster is None or text is None:
        return None
    key = f"storage.{what}"
    known = {**_user(), **environ}
    named = [one or two for one, two in _VARIABLE.findall(text)]
    instead = f", or give {_KEY[what]}" if what in _KEY else ""
    if lacking := [name for name in named if not known.get(name)]:
        fix = f"clustertune submit in a shell that has it{instead}, or write the path itself: a job sees no variable of a shell"
        raise UserError(f"{text}: {', '.join(lacking)} is not set in this environment", file=cluster.source, key=key, fix=fix)
    filled = _VARIABLE.sub(lambda match: known[match[1] or match[2]], text)
    path = Path(known["HOME"] + filled[1:] if filled.startswith("~/") else filled)
    if not path.is_absolute() or not str(path).isprintable():
        fix = f"an absolute path{instead}"
        raise UserError(f"{text} gives {str(path)!r}, no absolute path", file=cluster.source, key=key, fix=fix)
    return path


def _user() -> dict[str, str]:
    """What a login sets and a job may lack."""
    try:
        entry = pwd.getpwuid(os.getuid())
    except KeyError:
        return {"USER": str(os.getuid()), "HOME": "/"}
    return {"USER": entry.pw_name, "LOGNAME": entry.pw_name, "HOME": entry.pw_dir}


def local_cluster() -> Cluster | None:
    """The cluster whose file names this machine: its folders are those of the commands that run without ``--cluster``."""
    from clustertune.cluster.load import of_this_machine

    return of_this_machine()


def runs(cluster: Cluster | None, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder below which runs lie: the cluster file's, else ``runs`` of the working folder. Raises UserError."""
    return folder(cluster, "runs", environ) or Path("runs")


def enter_local() -> Path:
    """Take on the cache variables of the cluster that this machine belongs to; returns where its runs lie."""
    machine = local_cluster()
    enter(machine)
    return runs(machine)


def existing(path: Path) -> Path:
    """``runs/NAME/ID`` in the folder of the cluster that this machine belongs to, where it is not in the working folder."""
    if path.exists() or path.is_absolute() or path.parts[:1] != ("runs",):
        return path
    candidate = found_runs().joinpath(*path.parts[1:])
    return candidate if candidate.exists() else path


def found_runs() -> Path:
    """Where there are runs: the folder of this machine's cluster, else ``runs`` of the working folder or of one above it."""
    below = runs(local_cluster())
    if below.is_absolute() or below.is_dir():
        return below
    return next((above / below for above in Path.cwd().parents if (above / below).is_dir()), below)


def run_folders(below: Path) -> list[Path]:
    """Run folders, those of a sweep's points too, the newest first."""
    paths = [path for pattern in ("*/run.json", "*/*/run.json", "*/*/points/*/run.json") for path in below.glob(pattern)]
    return [path.parent for path in sorted(paths, key=lambda path: -path.stat().st_mtime)]


LATEST = "latest"
SHORTEST_ID = 4
"""Characters of a run's id that name it."""


def named_run(text: str) -> Path | None:
    """The run that ``latest``, a recipe's name or the beginning of an id names; the newest where a recipe has several.

    None where the text names none. Raises UserError where the beginning of an id names several.
    """
    if Path(text).name != text:
        return None
    folders = run_folders(found_runs())
    if text == LATEST:
        return folders[0] if folders else None
    of_recipe = [folder for folder in folders if text in (folder.parent.name, folder.name)]
    if of_recipe:
        return of_recipe[0]
    begin = [folder for folder in folders if len(text) >= SHORTEST_ID and folder.name.startswith(text)]
    if len(begin) > 1:
        names = ", ".join(str(folder) for folder in begin[:4])
        raise UserError(f"{text!r} is the beginning of {len(begin)} runs", file="command line", fix=f"one of {names}")
    return begin[0] if begin else None


def parse(assignments: Iterable[str]) -> dict[str, str]:
    """``NAME=VALUE`` words of ``--env``. Raises UserError for names beside :data:`VARIABLES`, and for values of two lines."""
    values, problems = {}, []
    for word in assignments:
        name, equals, value = word.partition("=")
        if name not in VARIABLES or not equals:
            fix = f"allowed as NAME=VALUE: {', '.join(VARIABLES)}; put access tokens in .env"
            problems.append(
                Problem(f"jobs do not accept the variable {name[:40]!r}", file="command line", key="--env", fix=fix)
            )
        elif not value.isprintable():
            problems.append(
                Problem(f"{name} holds a line break or control character", file="command line", key="--env", fix="rename it")
            )
        else:
            values[name] = value
    raise_if(problems)
    return values


def settings(
    cluster: Cluster | None, overrides: Mapping[str, str] | None = None, environ: Mapping[str, str] = os.environ
) -> list[Setting]:
    """The variables of every stage and rank, each with the reason of its value.

    ``overrides``: of ``--env``, which wins over ``environ`` (the shell, or a job's own), which wins over the cluster file:
    the more particular over the more general, as Slurm has it for ``SBATCH_ACCOUNT``. Raises UserError.
    """
    set_here = parse(f"{name}={environ[name]}" for name in VARIABLES if environ.get(name))
    origin = dict.fromkeys(set_here, "exported by the shell or job that this starts in")
    for name, value in (overrides or {}).items():
        set_here[name], origin[name] = value, "given by --env: the value where it was submitted"
    text = cluster.storage.folder("caches") if cluster else None
    if cluster is not None and text is not None:
        rule = f"storage.caches of {cluster.source}"
        if cluster.storage.caches is None:
            rule = f"the caches' folder of clustertune setup storage, below storage.shared of {cluster.source}"
        if "HF_HOME" not in set_here:
            set_here["HF_HOME"], origin["HF_HOME"] = str(folder(cluster, "caches", environ)), rule
        elif set_here["HF_HOME"] == text:
            origin["HF_HOME"] = rule
        else:
            origin["HF_HOME"] += f"; {rule} says {text}"
        if "HF_TOKEN_PATH" not in set_here:
            home = environ.get("HOME") or _user()["HOME"]
            set_here["HF_TOKEN_PATH"] = f"{home}/.cache/huggingface/token"
            origin["HF_TOKEN_PATH"] = "a token is never stored in a folder that others share"  # noqa: S105
    return [Setting(name, _absolute(name, set_here[name]), origin[name]) for name in VARIABLES if name in set_here]


def _absolute(name: str, value: str) -> str:
    """A job has another working folder than the shell that submits it."""
    if name not in (*FOLDERS, "HF_TOKEN_PATH"):
        return value
    parts = value.split(":") if name == "NLTK_DATA" else [value]
    return ":".join(os.path.abspath(os.path.expanduser(part)) for part in parts)  # noqa: PTH100, PTH111


OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
"""What keeps the libraries of a job from asking servers that its node does not reach: each waits for minutes."""


def of_jobs(cluster: Cluster) -> list[Setting]:
    """:func:`settings` of the stages on a cluster's nodes, which may reach less than the machine that submits them."""
    variables = settings(cluster)
    if cluster.network.internet == "all":
        return variables
    known, why = {setting.name for setting in variables}, f"network.internet: {cluster.network.internet} of {cluster.source}"
    return [*variables, *(Setting(name, value, why) for name, value in OFFLINE.items() if name not in known)]


def flags(variables: Sequence[Setting]) -> list[str]:
    """The arguments by which a job gets them."""
    return [word for setting in variables for word in ("--env", f"{setting.name}={setting.value}")]


def enter(
    cluster: Cluster | None, overrides: Mapping[str, str] | None = None, environ: MutableMapping[str, str] = os.environ
) -> list[Setting]:
    """Set the variables in this process, and so in all that it starts. Call before a library of the Hub is loaded."""
    variables = settings(cluster, overrides, environ)
    environ.update({setting.name: setting.value for setting in variables})
    return variables


def binds(environ: Mapping[str, str]) -> list[str]:
    """The folders that a container has to see for these variables. Of NLTK_DATA launch/inside.sh shows those that are there."""
    values = [environ[name] for name in FOLDERS if name != "NLTK_DATA" and environ.get(name)]
    return list(dict.fromkeys(value for value in values if value.startswith("/")))


def of_modules(environ: Mapping[str, str]) -> list[str]:
    """The variables that the cluster's modules changed (launch/modules.sh)."""
    return [name for name in environ.get("CLUSTERTUNE_MODULE_VARIABLES", "").split() if name in environ and name not in SECRET]


def load_modules(cluster: Cluster) -> None:
    """Begin this process again in a shell that has loaded the cluster's modules; returns where that is done, or there are none.

    A submitted script has loaded them already; of launch/run.sbatch by hand only this process knows the cluster.
    """
    names = " ".join(cluster.slurm.modules) if cluster.slurm else ""
    if not names or os.environ.get("CLUSTERTUNE_MODULES") == names:
        return
    script = f'. launch/modules.sh {names} && exec "$@"'  # plain words: cluster/schema.py MODULE
    sys.stdout.flush()
    os.chdir(ROOT)
    os.execv("/bin/bash", ["bash", "-c", script, "bash", sys.executable, "-m", "clustertune", *sys.argv[1:]])  # noqa: S606


# --- shared ---------------------------------------------------------------------------------------------------------------

# Whether the nodes of a cluster see a folder of this machine: by the cluster file and the kind of file system it lies on.


def filesystem(path: Path, mounts: str) -> Mount:
    """The mount on which ``path`` lies, from the text of ``/proc/self/mountinfo``; of kind ``unknown`` where it tells none."""
    return mount_of(str(path), all_mounts(mounts)) or Mount("/", "unknown")


def shared_folders(cluster: Cluster) -> list[str]:
    """Where a cluster file says that all its machines see the same."""
    storage = cluster.storage
    mounted = [storage.shared, storage.pool.mount if storage.pool else None, *(brick.mount for brick in storage.bricks)]
    return [path for path in mounted if path]


def is_shared(path: Path, cluster: Cluster, mounts: str) -> bool:
    """Whether a folder is on other machines' disks: by its kind of file system, or by the cluster file."""
    return lies_elsewhere(filesystem(path, mounts).kind) or any(map(path.is_relative_to, shared_folders(cluster)))


def find_unshared(
    places: Sequence[tuple[str, Path]], cluster: Cluster, host: str | None = None, mounts: str | None = None
) -> list[Problem]:
    """Folders (with what they are) that other nodes of the cluster cannot see. ``host``, ``mounts``: None are this machine's.

    None where the cluster file does not list what is shared, or where this machine is not one of the cluster's, or
    its only one: what it has mounted tells nothing then.
    """
    shared = shared_folders(cluster)
    if cluster.host(host or platform.node()) is None or len(cluster.nodes) < 2 or not shared:
        return []
    if mounts is None:
        mounts = own_mounts()
    problems = []
    for what, path in places:
        if is_shared(path, cluster, mounts):
            continue
        on = filesystem(path, mounts)
        text = f"{what} is on {on.kind} at {on.point} of this machine: the other nodes of {cluster.name} do not see it"
        fix = f"put it below {shared[0]}"
        problems.append(Problem(text, file=str(path), fix=fix))
    return problems


def existing_folder(path: Path, what: str) -> Path:
    """``path``, which must be a folder. ``what`` names the kind that is wanted. Raises UserError.

    ``runs/NAME/ID`` is looked for in the cluster's folder for runs too.
    """
    path = existing(path)
    if path.is_dir():
        return path
    message = "is a file, not a folder" if path.exists() else "no such folder"
    raise UserError(message, file=str(path), fix=f"give the path of {what}")


def existing_run(path: Path, what: str = "a run folder") -> Path:
    """A run's folder, or the run that ``latest``, a recipe's name or the beginning of an id names. Raises UserError.

    ``what`` names what is wanted where other folders are taken too.
    """
    if not path.exists() and (run := named_run(str(path))) is not None:
        return run
    try:
        run_path = existing_folder(path, what)
    except UserError as error:
        below = found_runs()
        names = ", ".join(list(dict.fromkeys(folder.parent.name for folder in run_folders(below)))[:8])
        fix = (
            f"give {what}, latest, the beginning of a run's id, or a recipe that has run: {names or f'none has below {below}'}"
        )
        raise UserError(error.problems[0].message, file=str(path), fix=fix) from None
    inside = [] if what != "a run folder" or (run_path / "run.json").is_file() else run_folders(run_path)
    if inside:
        names = ", ".join(str(folder) for folder in inside[:3])
        raise UserError(f"is no run folder; it holds {len(inside)}", file=str(run_path), fix=f"give one: {names}")
    return run_path


def merged_or_model(path: Path) -> Path:
    """A model's folder; of a run, its merged model. Raises UserError."""
    run_or_model = existing_run(path, "a run or a model")
    if not (run_or_model / "run.json").is_file():
        return run_or_model
    if not (run_or_model / "merged" / "config.json").is_file():
        raise UserError(
            "has no merged model yet", file=str(run_or_model), fix=f"clustertune run ... --run-dir {run_or_model} --to merge"
        )
    return run_or_model / "merged"


def newest_merged(below: Path) -> Path:
    """The merged model that was finished last in a folder of runs. Raises UserError where there is none."""
    folders = [path for path in below.glob(f"*/*/merged/{MANIFEST}") if path.is_file()]
    if not folders:
        fix = "make demo first, or name a folder: make eval-ifeval MODEL=DIR, clustertune eval DIR"
        raise UserError("no merged model in this folder of runs", file=str(below), fix=fix)
    return max(folders, key=lambda path: path.stat().st_mtime_ns).parent
