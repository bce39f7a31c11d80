"""Everything that is known of one machine, in seconds, without changing it.

As a program it prints the facts of one machine: what ``clustertune doctor`` has run on every node. They come through srun in
short lines, since srun passes on 1024 bytes of a line as one piece, not more.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from functools import partial
from pathlib import Path
from typing import Any

from clustertune import bounded
from clustertune.host import adapters, credentials, devices, mounts, packages, system
from clustertune.host.facts import HostFacts, Package, from_dict
from clustertune.host.system import Ask, Probe, ask

Reader = Callable[[Probe], dict[str, Any]]

# --- where it is ------------------------------------------------------------------------------------------------------

_SLURM_KEYS = """
    SLURM_VERSION AccountingStorageType ConstrainDevices GresTypes PropagateResourceLimits PropagateResourceLimitsExcept
    TaskPlugin SlurmdSpoolDir StateSaveLocation KillWait Prolog Epilog
""".split()  # noqa: SIM905 (one word a key is what a person can read and extend)
_BAD_STATES = re.compile(
    r"(?i)(?<!power_)(?<!powered_)(?<!powering_)down|drain|fail|not_respond|unknown|error|reboot|inval|\*$"
)


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
    """The keys of ``scontrol show config`` that rules read; of several scripts (``Prolog[0]``) the first."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        name = name.strip().partition("[")[0]
        if equals and name in _SLURM_KEYS:
            values.setdefault(name, value.strip())
    return values


def parse_nodes(text: str) -> dict[str, Any]:
    """Nodes that take no jobs, GRES of nodes and limits of partitions, of ``sinfo -h -N -o '%N|%T|%G|%R|%l|%E'``."""
    facts: dict[str, dict[str, str]] = {"slurm_nodes": {}, "slurm_gres": {}, "slurm_limits": {}}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|", 5)]
        if len(fields) != 6:
            continue
        name, state, gres, partition, limit, reason = fields
        facts["slurm_gres"][name], facts["slurm_limits"][partition] = gres, limit
        if _BAD_STATES.search(state):
            facts["slurm_nodes"][name] = state + (f" ({reason})" if reason not in ("", "none") else "")
    return facts


def slurm(probe: Probe) -> dict[str, Any]:
    """What the controller says. Not to be asked by every node of a job at once: it is one process for all of them."""
    answer = probe.call("scontrol", "show", "config", seconds=8.0)
    if not answer.present:
        return {}
    if not answer.good:
        return {"slurm_silent": answer.fault}
    config = parse_config(answer.text)
    nodes = probe.call("sinfo", "-h", "-N", "-o", "%N|%T|%G|%R|%l|%E", seconds=8.0)
    scripts = {path: "" for key in ("Prolog", "Epilog") if (path := config.get(key, "")).startswith("/")}
    for path in scripts:
        if probe.live and not os.access(path, os.X_OK):
            scripts[path] = "cannot be run" if Path(path).exists() else "does not exist"
    return {"slurm": config, "slurm_scripts": scripts, **parse_nodes(nodes.text)}


def files_with_secrets(environ: Mapping[str, str], cwd: str) -> list[str]:
    """Files with secrets that the user, Slurm or a library keeps."""
    home = environ.get("HOME", "")
    hub = environ.get("HF_HOME") or (f"{environ.get('XDG_CACHE_HOME') or f'{home}/.cache'}/huggingface" if home else "")
    return [
        f"{cwd}/.env",
        *([f"{home}/.netrc", f"{home}/.git-credentials"] if home else []),
        *([f"{hub}/token", f"{hub}/stored_tokens"] if hub else []),
        "/etc/slurm/slurmdbd.conf",
        "/etc/munge/munge.key",
    ]


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


def has_slurm(probe: Probe, environ: Mapping[str, str]) -> bool:
    """Whether this machine belongs to a Slurm: its commands alone may be left from anything."""
    named = environ.get("SLURM_CONF", "")
    return any(probe.path(path).exists() for path in (named, "/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf") if path)


# --- all of it --------------------------------------------------------------------------------------------------------

DIRECT: tuple[Reader, ...] = (
    system.processors,
    system.memory,
    system.limits,
    system.kernel,
    devices.bridges,
    devices.iommu,
    adapters.rdma,
    adapters.nccl_files,
    devices.devices,
    adapters.interfaces,
    system.clock,
)
"""Readers of the kernel's files, which answer at once."""
ASKING: tuple[Reader, ...] = (devices.driver, devices.topology, devices.kernel_log)
"""Readers that run commands: side by side."""
GRACE = 3.0
"""Seconds beyond the limit in which a reader whose command was killed says so."""


def collect(
    place: str | None = None,
    seconds: float = 20.0,
    root: str = "/",
    *,
    names: Sequence[str] = (),
    folders: Sequence[str] = (),
    python: str | None = None,
    command: Ask = ask,
) -> HostFacts:
    """The facts of this machine; of a recorded tree where ``root`` names one.

    ``place``: where this is, as ``HostFacts.place``; None: found by looking. ``seconds``: how long it may take in all; what
    did not answer by then is missing. ``names``: hosts to resolve. ``folders``: where locks, mappings and programs are tried,
    beside those that libraries use. ``python``: the ranks' interpreter; None: this one. ``command``: runs commands.
    Raises nothing for what a machine lacks.
    """
    probe = Probe(Path(root), command, time.monotonic() + seconds)
    environ = dict(os.environ) if probe.live else {}
    kind, in_slurm = container(probe, environ), has_slurm(probe, environ)
    name = platform.node() if probe.live else probe.read("/proc/sys/kernel/hostname") or probe.read("/etc/hostname")
    user = "root" if os.geteuid() == 0 else str(os.geteuid())  # a name may be asked of a directory service, which may hang
    facts = HostFacts(hostname=name or "?", user=user if probe.live else "", container=kind)
    facts.environment = credentials.environment(environ)
    facts.place = place or find_place(kind, environ, slurm=in_slurm)
    asking: list[Reader] = [*ASKING, partial(_stack, python=python)]
    if "step" not in facts.place and in_slurm:
        asking.append(slurm)
    # Children are forked before threads begin.
    cuda = bounded.Pending(devices.cuda, probe.left(devices.INIT_SECONDS)) if probe.live else None
    _take(facts, _storage, lambda: _storage(probe, environ=environ, names=names, folders=folders))
    pool = ThreadPoolExecutor(max_workers=len(asking))
    try:
        started = [(reader, pool.submit(reader, probe)) for reader in asking]
        for reader in DIRECT:
            _take(facts, reader, lambda reader=reader: reader(probe))  # type: ignore[misc]
        for reader, future in started:
            left = max(0.0, probe.deadline - time.monotonic()) + GRACE
            _take(facts, reader, partial(future.result, timeout=left))
        if cuda is not None:
            _take(facts, devices.cuda, lambda: cuda.answer().found or {})
    finally:
        pool.shutdown(wait=False)
    return facts


def _take(facts: HostFacts, reader: Any, read: Callable[[], dict[str, Any]]) -> None:
    """Add what a reader found. One that fails on something unforeseen is named, and the others continue."""
    name = getattr(reader, "func", reader).__name__.strip("_")
    try:
        values = read()
    except Late:
        facts.unread.append(f"{name}: no answer in time")
        return
    except Exception as error:
        facts.unread.append(f"{name}: {type(error).__name__}: {error}"[:300])
        return
    for key, value in values.items():
        if value not in (None, "", [], {}) or getattr(facts, key) in (None, "", [], {}):
            setattr(facts, key, value)


def _storage(probe: Probe, *, environ: Mapping[str, str], names: Sequence[str], folders: Sequence[str]) -> dict[str, Any]:
    query = mounts.MountQuery(
        folders=[*probe_folders(environ), *(folder for folder in folders if folder.startswith("/"))],
        names=list(names),
        files=files_with_secrets(environ, str(Path.cwd())),
        libraries=[path for path in dict.fromkeys(environ.get("LD_LIBRARY_PATH", "").split(":")) if path.startswith("/")],
    )
    return mounts.look(probe, query)


def _stack(probe: Probe, *, python: str | None) -> dict[str, Any]:
    """The packages of an interpreter: of this one by looking, of another one by asking it."""
    if not probe.live:
        return {}
    if python is None or Path(python) == Path(sys.executable):
        installed = packages.look()
    else:
        answer = probe.call(python, str(Path(packages.__file__)), seconds=15.0)
        try:
            installed = json.loads(answer.text)
        except ValueError:
            raise ValueError(f"{python}: {answer.fault or ('no answer' if answer.present else 'is not there')}") from None
    installed["packages"] = [Package(**item) for item in installed["packages"]]
    return installed


# --- through srun -------------------------------------------------------------------------------------------------------

_WIDTH = 600
"""Characters of a piece; with its head it stays below the 1024 bytes of which srun makes one message."""
_LINE = re.compile(r"clustertune-facts (\S+) (\d+)/(\d+) (\S*)$")
MAX_BYTES = 8 << 20
"""A node's facts take some 20 kB; what is packed must not fill memory when it is unpacked."""


def probe_command(place: str, seconds: float, **look: Sequence[str]) -> list[str]:
    """The command that prints the facts of a machine; its arguments as of :func:`clustertune.host.collect.collect`."""
    request: dict[str, Any] = {"place": place, "seconds": seconds, **look}
    return [sys.executable, "-m", "clustertune.host.collect", json.dumps(request)]


def encode(facts: HostFacts, name: str = "") -> list[str]:
    """The lines that carry the facts of one machine; ``name`` is what Slurm calls it."""
    packed = base64.b64encode(zlib.compress(json.dumps(facts.as_dict()).encode())).decode()
    pieces = [packed[at : at + _WIDTH] for at in range(0, len(packed), _WIDTH)]
    word = re.sub(r"\s+", "_", name or facts.hostname) or "?"
    return [f"clustertune-facts {word} {n}/{len(pieces)} {piece}" for n, piece in enumerate(pieces, 1)]


def decode(lines: Iterable[str]) -> tuple[dict[str, HostFacts], dict[str, str], list[str]]:
    """Facts by node, what is wrong by node, and the lines that are not facts (warnings of srun, of a container)."""
    pieces: dict[str, dict[tuple[int, int], str]] = {}
    facts, faults, others = {}, {}, []
    for line in lines:
        if match := _LINE.search(line.rstrip()):
            pieces.setdefault(match[1], {})[int(match[2]), int(match[3])] = match[4]
        elif line.strip():
            others.append(line.rstrip())
    for name, parts in pieces.items():
        try:
            if sorted(parts) != [(n, len(parts)) for n in range(1, len(parts) + 1)]:
                raise ValueError("lines are missing")
            unpacker = zlib.decompressobj()
            text = unpacker.decompress(base64.b64decode("".join(parts[key] for key in sorted(parts)), validate=True), MAX_BYTES)
            if not unpacker.eof:  # zlib has compared its own checksum there
                raise ValueError("they end early")
            facts[name] = from_dict(json.loads(text))
        except (ValueError, zlib.error) as error:
            faults[name] = f"its facts came damaged: {error}"
    return facts, faults, others


if __name__ == "__main__":
    facts = collect(**json.loads(sys.argv[1]))
    sys.stdout.write("".join(f"{line}\n" for line in encode(facts, os.environ.get("SLURMD_NODENAME", ""))))
    sys.stdout.flush()
    # Threads that wait for a driver or a server which is gone would keep the interpreter from ending.
    os._exit(0)
