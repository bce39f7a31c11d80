"""Where a process finds itself: in a container, in a job, in which environment, under which Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from clustertune.host.credentials import holds_secret, may_name_secret
from clustertune.host.probe import Probe

_RELEVANT = re.compile(
    r"(SLURM|SRUN|SBATCH|NCCL|GLOO|UCX|UCC|FI|OMPI|PMI|PMIX|TORCH|TORCHINDUCTOR|PYTORCH|CUDA|NVIDIA|HF|HUGGINGFACE|TRANSFORMERS"
    r"|DATASETS|TRITON|OMP|MKL|KMP|GOMP|OPENBLAS|APPTAINER|SINGULARITY|ENROOT|ACCELERATE|FSDP|WANDB|NLTK|LD|XDG|MASTER)_\w+"
    r"|PYTHON\w+|(?i:(https?|all|no|ftp)_proxy)|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|ROLE_RANK"
    r"|TMPDIR|HOME|VIRTUAL_ENV|CONDA_PREFIX|CONDA_DEFAULT_ENV|LC_ALL|LANG"
)
"""Names that steer Slurm, the frameworks, caches and proxies."""
_KEY_IN_HEX = re.compile(r"\b[0-9a-f]{40}\b|\beyJ[A-Za-z0-9_.\-]{12,}")
"""A key of W&B, or a signed web token: in a recipe 40 hex digits are a commit."""
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/\s]*@")
_LONGEST = 4096

_SLURM_KEYS = (
    "SLURM_VERSION",
    "AccountingStorageType",
    "ConstrainDevices",
    "GresTypes",
    "PropagateResourceLimits",
    "PropagateResourceLimitsExcept",
    "ProctrackType",
    "SelectType",
    "TaskPlugin",
)
_BAD_STATES = re.compile(
    r"(?i)(?<!power_)(?<!powered_)(?<!powering_)down|drain|fail|not_respond|unknown|error|reboot|inval|\*$"
)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that rules read. What looks like a secret is left out, by its name or by its value."""
    found = {}
    for name, value in sorted(environ.items()):
        if not _RELEVANT.fullmatch(name) or may_name_secret(name) or holds_secret(value) or _KEY_IN_HEX.search(value):
            continue
        found[name] = _LOGIN_IN_URL.sub("***@", value[:_LONGEST])
    return found


def has_login(text: str) -> bool:
    """Whether a URL held a name or password, which :func:`environment` has taken out."""
    return "://***@" in text


def container(probe: Probe, environ: Mapping[str, str]) -> str:
    """What kind of container this is; empty: none."""
    if environ.get("APPTAINER_CONTAINER") or environ.get("SINGULARITY_CONTAINER") or probe.path("/.singularity.d").exists():
        return "apptainer"
    if environ.get("ENROOT_RUNTIME_PATH") or environ.get("ENROOT_ROOTFS"):
        return "enroot"
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if probe.path("/run/.containerenv").exists():
        return "podman"
    return "docker" if probe.path("/.dockerenv").exists() else ""


def find_place(kind: str, environ: Mapping[str, str], *, slurm: bool) -> str:
    """Where this is, of :data:`clustertune.host.facts` ``HostFacts.place``.

    ``kind``: of the container. A step is what srun starts; the batch script is none: its limits are a step's, but its cores
    are all of the job's. A machine with Slurm's commands and without a job is a login node.
    """
    step = "SLURM_STEP_ID" in environ and environ["SLURM_STEP_ID"].isdigit()
    if kind in ("apptainer", "enroot"):
        return "container+step" if step else "container"
    if step:
        return "step"
    return "login" if slurm and not environ.get("SLURM_JOB_ID") else "here"


def parse_config(text: str) -> dict[str, str]:
    """The keys of ``scontrol show config`` that rules read."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and name.strip() in _SLURM_KEYS:
            found[name.strip()] = value.strip()
    return found


def parse_nodes(text: str) -> dict[str, str]:
    """Nodes that take no jobs, with state and reason, of ``sinfo -h -N -o '%N|%T|%E'``."""
    found = {}
    for line in text.splitlines():
        fields = line.split("|", 2)
        if len(fields) == 3 and _BAD_STATES.search(fields[1].strip()):
            reason = fields[2].strip()
            found[fields[0].strip()] = fields[1].strip() + (f" ({reason})" if reason not in ("", "none") else "")
    return found


def slurm(probe: Probe) -> dict[str, Any]:
    """What the controller says. Not to be asked by every node of a job at once: it is one process for all of them."""
    config = probe.call("scontrol", "show", "config", seconds=8.0)
    if not config.present:
        return {}
    if not config.good:
        return {"slurm_silent": config.fault}
    nodes = probe.call("sinfo", "-h", "-N", "-o", "%N|%T|%E", seconds=8.0)
    return {"slurm": parse_config(config.text), "slurm_nodes": parse_nodes(nodes.text)}


def library_folders(environ: Mapping[str, str]) -> list[str]:
    """The folders of LD_LIBRARY_PATH."""
    return [folder for folder in dict.fromkeys(environ.get("LD_LIBRARY_PATH", "").split(":")) if folder.startswith("/")]


def files_that_matter(environ: Mapping[str, str], cwd: str) -> list[tuple[str, str]]:
    """Files with secrets, and programs that a job runs, with ``secret`` or ``program``."""
    home = environ.get("HOME", "")
    hub = environ.get("HF_HOME") or (f"{environ.get('XDG_CACHE_HOME') or f'{home}/.cache'}/huggingface" if home else "")
    named = [
        f"{cwd}/.env",
        *([f"{home}/.netrc", f"{home}/.git-credentials"] if home else []),
        *([f"{hub}/token", f"{hub}/stored_tokens"] if hub else []),
        "/etc/slurm/slurmdbd.conf",
        "/etc/munge/munge.key",
    ]
    programs = [f"{cwd}/launch/run.sbatch", *([f"{home}/.nccl.conf"] if home else []), "/etc/nccl.conf"]
    return [(path, "secret") for path in named] + [(path, "program") for path in programs]


def probe_folders(environ: Mapping[str, str]) -> list[str]:
    """Folders in which libraries keep caches and locks, whether the user named them or not."""
    home = environ.get("HOME", "")
    cache = environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "")
    named = [
        environ.get("HF_HOME") or (f"{cache}/huggingface" if cache else ""),
        environ.get("HF_DATASETS_CACHE", ""),
        environ.get("TRITON_CACHE_DIR", ""),
        environ.get("TORCHINDUCTOR_CACHE_DIR", ""),
        environ.get("TMPDIR") or "/tmp",  # noqa: S108 - it is looked at, as everybody uses it
    ]
    return [path for path in dict.fromkeys(named) if path.startswith("/")]


def user_name() -> str:
    """Who runs this; the number where the machine knows no name for it, as in containers."""
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_name
    except (KeyError, ImportError):
        return str(os.getuid())


def has_slurm(probe: Probe, environ: Mapping[str, str]) -> bool:
    """Whether this machine belongs to a Slurm: its commands alone may be left from anything."""
    named = environ.get("SLURM_CONF", "")
    return any(probe.path(path).exists() for path in (named, "/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf") if path)
