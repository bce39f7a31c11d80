"""What a machine has of Slurm, and what of it will stop Slurm or is not as the cluster file says: facts, and rules on them."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clustertune.check.rule import FAIL, SLURM, UNKNOWN, WARN, Finding, Seen, checks, rule
from clustertune.cluster.schema import Cluster, Host
from clustertune.host import probe
from clustertune.ops.files import NODE, inside
from clustertune.ops.nodes import has_systemd, is_here, tool
from clustertune.ops.slurm import texts

SECONDS = 10.0
"""For one program to answer; each of them only reads this machine."""


@dataclass(frozen=True)
class PathState:
    """A file or folder as it is."""

    folder: bool
    mode: int
    uid: int
    size: int


@dataclass(frozen=True)
class NodeFacts:
    """One machine, or a tree that will be one. Empty or None: not to be seen."""

    local: bool
    """Whether it is this machine itself, so that its programs and devices can be asked."""
    versions: tuple[str, ...] = ()
    """Answers of ``slurmctld -V`` and ``slurmd -V``, else of ``sinfo -V``."""
    shape: str = ""
    """``slurmd -C``"""
    devices: tuple[int, ...] | None = None
    """The numbers N of /dev/nvidiaN."""
    minors: dict[str, int] = field(default_factory=dict)
    """Minor number of each NVIDIA GPU by its PCI address, as its driver tells."""
    cgroup: str = ""
    """``v1``, ``v2`` or ``hybrid``."""
    users: dict[str, tuple[int, int]] | None = None
    """Ids of users; None: there is no list of them."""
    places: dict[str, PathState] = field(default_factory=dict)
    """Of the files and folders that have an owner and a mode, those that are there."""
    systemd: bool = False
    owns: bool = True
    """Whether this process may give files to other users: root may."""


def collect(cluster: Cluster, node: Host, root: Path = NODE) -> NodeFacts:
    """Look at this machine, or at a tree. Raises nothing for what is not there."""
    local = root == NODE and is_here(cluster, node)
    watched = (
        texts.STATE,
        texts.SPOOL,
        texts.LOGS,
        texts.MUNGE_KEY,
        texts.SLURMDBD_CONF,
        texts.ETC,
        texts.SLURM_CONF,
        texts.GRES_CONF,
        texts.CGROUP_CONF,
    )
    places = {path: state for path in watched if (state := _path_state(inside(root, path))) is not None}
    if not local:
        return NodeFacts(False, users=_users(root), places=places, owns=os.geteuid() == 0)
    versions = [text for name in ("slurmctld", "slurmd") if (text := ask(name, "-V"))] or [ask("sinfo", "-V")]
    return NodeFacts(
        True,
        versions=tuple(text for text in versions if text),
        shape=ask("slurmd", "-C"),
        devices=_devices(Path("/dev")),
        minors=_minors(Path("/proc/driver/nvidia/gpus")),
        cgroup=_cgroup(Path("/sys/fs/cgroup")),
        users=_users(root),
        places=places,
        systemd=has_systemd(),
        owns=os.geteuid() == 0,
    )


def ask(*words: str) -> str:
    """What a program prints; empty where it is not there, fails or does not answer."""
    program = tool(words[0])
    answer = probe.ask([program, *words[1:]], SECONDS) if program else probe.ABSENT
    return answer.text.strip() if answer.good else ""


def _path_state(path: Path) -> PathState | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return PathState(stat.S_ISDIR(found.st_mode), stat.S_IMODE(found.st_mode), found.st_uid, found.st_size)


def _devices(folder: Path) -> tuple[int, ...]:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return ()
    return tuple(sorted(int(match[1]) for name in names if (match := re.fullmatch(r"nvidia(\d{1,4})", name))))


def _minors(folder: Path) -> dict[str, int]:
    found = {}
    try:
        for gpu in folder.iterdir():
            if match := re.search(r"Device Minor:\s*(\d+)", (gpu / "information").read_text(errors="replace")):
                found[gpu.name] = int(match[1])
    except OSError:
        return {}
    return found


def _cgroup(folder: Path) -> str:
    if (folder / "cgroup.controllers").exists():
        return "v2"
    if (folder / "unified" / "cgroup.controllers").exists():
        return "hybrid"
    return "v1" if (folder / "cpuset").is_dir() or (folder / "memory").is_dir() else ""


def _users(root: Path) -> dict[str, tuple[int, int]] | None:
    """The users of /etc/passwd; on this machine also what other sources know of those that matter."""
    found: dict[str, tuple[int, int]] = {}
    try:
        text = inside(root, "/etc/passwd").read_text(errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        parts = line.split(":")
        if len(parts) > 3 and parts[2].isdigit() and parts[3].isdigit():
            found[parts[0]] = (int(parts[2]), int(parts[3]))
    if root == NODE:
        for name in {"slurm", "munge"} - set(found):
            if match := re.match(r"[^:]*:[^:]*:(\d+):(\d+):", ask("getent", "passwd", name)):
                found[name] = (int(match[1]), int(match[2]))
    return found


# --- the rules: facts in, findings out -------------------------------------------------------------------------------


BLOCKING = frozenset({"slurm-cgroup", "slurm-version", "slurm-user", "slurm-hosts", "slurm-foreign-file", "slurm-parser"})
"""Rules whose failure keeps ``apply`` from writing; the others are reported, and fixed elsewhere."""


@dataclass(frozen=True)
class SlurmSubject:
    """What the rules look at."""

    cluster: Cluster
    node: Host
    facts: NodeFacts
    version: texts.Version | None = None
    """The release that will read the files; None: unknown."""
    hosts: Sequence[tuple[int, str]] = ()
    """Lines of ``/etc/hosts`` that are not ours, with their numbers."""
    foreign: Mapping[str, int] = field(default_factory=dict)
    """Files that others wrote and that are not taken over: how many of their settings would be lost or change."""
    repeated: Sequence[tuple[str, int, str]] = ()
    """File, number and text of lines beside our block that set what it sets."""
    parser: str = ""
    """What Slurm's own parser complains of; empty: nothing, or it was not asked."""


def judge(subject: SlurmSubject) -> list[Finding]:
    """Everything that the facts of one machine and its files tell."""
    return [found for check in checks(SLURM) for found in check(subject)]


def blocks(findings: Sequence[Finding]) -> list[Finding]:
    """Those that keep files from being written."""
    return [item for item in findings if item.status == FAIL and item.rule in BLOCKING]


def slurm_version(s: SlurmSubject) -> Iterator[Seen]:
    """Looks at: release of Slurm

    Why: a key that a release does not know makes every command fail
    See: https://manpages.ubuntu.com/manpages/lunar/en/man5/slurm.conf.5.html
    """
    installed = {str(found) for answer in s.facts.versions if (found := texts.parse_version(answer))}
    stated = texts.parse_version(s.cluster.slurm.version) if s.cluster.slurm and s.cluster.slurm.version else None
    if stated and installed - {str(stated)}:
        text = f"installed here is {' and '.join(sorted(installed))}, the cluster file says {stated}: machines may differ"
        yield Seen(WARN, text, "slurm: version: what sinfo --version shows on all machines")
    if s.version is None:
        fix = "install Slurm here, or write slurm.version into the cluster file"
        yield Seen(UNKNOWN, f"not installed here, not in the cluster file: keys that all since {texts.OLDEST} know", fix)
    elif not texts.OLDEST <= s.version <= texts.NEWEST:
        fix = "look at plan --try, which starts these files with the Slurm that is installed"
        fix = f"install {texts.OLDEST} or later" if s.version < texts.OLDEST else fix
        yield Seen(WARN, f"Slurm {s.version}: the files were tried with {texts.OLDEST} to {texts.NEWEST}", fix)


def slurm_user(s: SlurmSubject) -> Iterator[Seen]:
    """Looks at: the user slurm

    Why: slurmctld runs as him, and the same number must mean him everywhere
    See: https://manpages.ubuntu.com/manpages/lunar/en/man5/slurm.conf.5.html
    """
    if not set(s.node.roles) & {"slurmctld", "compute"}:
        return
    if s.facts.users is None:
        yield Seen(UNKNOWN, "no /etc/passwd here: folders stay with the user who makes them")
    elif texts.USER not in s.facts.users:
        fix = (
            f"install slurmctld or slurmd, which make him; or useradd --system --uid N {texts.USER}, with one N on all machines"
        )
        yield Seen(FAIL if s.facts.local else WARN, f"there is no user {texts.USER}", fix)


def munge_key(s: SlurmSubject) -> Iterator[Seen]:
    """Looks at: munge's key

    Why: machines with different keys refuse each other's messages
    See: https://manpages.ubuntu.com/manpages/lunar/en/man5/slurm.conf.5.html
    """
    if not set(s.node.roles) & set(texts.SLURM_ROLES):
        return
    key = s.facts.places.get(texts.MUNGE_KEY)
    fix = "the steps below take the controller's to this machine"
    if key is None:
        if s.facts.local:
            yield Seen(FAIL, f"{texts.MUNGE_KEY} is not there", fix)
        return
    owner = (s.facts.users or {}).get("munge")
    if key.mode & 0o077 or (owner and key.uid != owner[0]):
        fix = f"chown munge: {texts.MUNGE_KEY} && chmod 400 {texts.MUNGE_KEY}"
        yield Seen(FAIL, f"{texts.MUNGE_KEY} has mode {key.mode:04o} and owner {key.uid}: munged does not take it", fix)
    elif not 32 <= key.size <= 1024:
        yield Seen(FAIL, f"{texts.MUNGE_KEY} has {key.size} bytes, and 32 to 1024 are a key", fix)


# --- of a compute node that is this machine -------------------------------------------------------------------------------


def _computes(s: SlurmSubject) -> bool:
    return s.facts.local and "compute" in s.node.roles


def _reported(s: SlurmSubject) -> dict[str, int]:
    """The figures of ``slurmd -C``; {} where one of those that count is missing."""
    found = {key: int(value) for key, value in re.findall(r"\b(\w+)=(\d+)\b", s.facts.shape)}
    return found if {"CPUs", "CoresPerSocket", "ThreadsPerCore", "RealMemory"} <= set(found) else {}


def slurm_shape(s: SlurmSubject) -> Iterator[Seen]:
    """Looks at: cores of a node

    Why: a node with fewer CPUs than slurm.conf says is not used
    See: https://manpages.ubuntu.com/manpages/lunar/en/man5/slurm.conf.5.html
    """
    if not _computes(s):
        return
    reported, compute = _reported(s), s.cluster.compute
    if not reported:
        yield Seen(UNKNOWN, "slurmd -C shows nothing: slurmd is not installed here")
        return
    sockets = reported.get("Boards", 1) * reported.get("SocketsPerBoard", reported.get("Sockets", 1))
    found = (sockets, reported["CoresPerSocket"], reported["ThreadsPerCore"])
    wanted = (compute.sockets, compute.cores // compute.sockets, compute.threads // compute.cores)
    if found != wanted:
        cores = sockets * reported["CoresPerSocket"]
        fix = f"compute: sockets: {sockets}, cores: {cores}, threads: {cores * reported['ThreadsPerCore']}; or look at the BIOS"
        status = FAIL if reported["CPUs"] < compute.threads else WARN
        form = "{} sockets x {} cores x {} threads"
        yield Seen(status, f"this machine has {form.format(*found)}, the file says {form.format(*wanted)}", fix)


def slurm_memory(s: SlurmSubject) -> Iterator[Seen]:
    """Looks at: memory of a node

    Why: a node with less memory than RealMemory is not used
    See: https://manpages.ubuntu.com/manpages/lunar/en/man5/slurm.conf.5.html
    """
    mib, wanted = _reported(s).get("RealMemory"), texts.real_memory(s.cluster)
    if _computes(s) and mib is not None and mib < wanted:
        text = f"this machine has {mib} MiB, slurm.conf {wanted} (memory_gb: {s.cluster.compute.memory_gb:g})"
        yield Seen(FAIL, text, f"compute: memory_gb: {mib // 1024}")


def slurm_gpu_devices(s: SlurmSubject) -> Iterator[Seen]:
    """Looks at: a device for each GPU

    Why: slurmd ends where a file of gres.conf is missing
    See: https://slurm.schedmd.com/gres.conf.html
    """
    wanted = set(range(s.cluster.compute.gpus))
    if _computes(s) and (missing := sorted(wanted - set(s.facts.devices or ()))):
        shown = ", ".join(f"/dev/nvidia{number}" for number in missing[:4]) + (", ..." if len(missing) > 4 else "")
        fix = "nvidia-smi makes them where the driver is loaded; dmesg shows a card that is gone"
        yield Seen(FAIL, f"{len(missing)} of {len(wanted)} devices missing: {shown}", fix)


def slurm_gpu_order(s: SlurmSubject) -> Iterator[Seen]:
    """Looks at: numbers of the GPUs

    Why: a job gets /dev/nvidiaN by Slurm's count and reads the driver's, by PCI address:
        cores and GPU would not belong together
    Fix: leave numa_cpus out of the cluster file: gres.conf has no Cores then, and the launcher binds by what the node says
    See: https://slurm.schedmd.com/gres.conf.html
    """
    by_bus = [s.facts.minors[bus] for bus in sorted(s.facts.minors, key=str.lower)]
    if _computes(s) and by_bus != sorted(by_bus):
        yield Seen(WARN, f"by PCI address the GPUs are /dev/nvidia{', '.join(map(str, by_bus))}")


def slurm_cgroup(s: SlurmSubject) -> Iterator[Seen]:
    """Looks at: version of cgroups

    Why: without its plugin slurmd does not start
    See: https://slurm.schedmd.com/cgroups.html
    """
    if not _computes(s):
        return
    if s.facts.cgroup == "v2" and s.version is not None and s.version < texts.OLDEST:
        fix = f"install Slurm {texts.OLDEST} or later, or boot with systemd.unified_cgroup_hierarchy=0"
        yield Seen(FAIL, f"cgroup version 2, which Slurm {s.version} does not know", fix)
    elif not s.facts.cgroup:
        fix = "mount -t cgroup2 none /sys/fs/cgroup, which systemd does by itself"
        yield Seen(WARN, "no cgroups are mounted below /sys/fs/cgroup", fix)


# --- of files -------------------------------------------------------------------------------------------------------------


def slurm_hosts(s: SlurmSubject) -> Iterator[Seen]:
    """No line of /etc/hosts that is not ours gives a machine of the cluster another address.

    Looks at: one address for a name
    Why: the first line of /etc/hosts wins, and others cannot reach it
    See: https://manpages.ubuntu.com/manpages/lunar/en/man5/slurm.conf.5.html
    """
    ours = {}
    for host in s.cluster.nodes:
        if not _address(host.address):
            continue  # reached by a name, which such a line may well be for
        for name in (host.name, host.name.partition(".")[0]):
            ours[name.lower()] = host.address
    for number, line in s.hosts:
        fields = line.partition("#")[0].split()
        for name in fields[1:]:
            address = ours.get(name.lower())
            if address is None or _address(address) == _address(fields[0]):
                continue
            stated_address = _address(fields[0])
            loopback = stated_address is not None and stated_address.is_loopback
            fix = f"remove {name} from line {number} of {texts.HOSTS}"
            text = f"line {number} says {fields[0]} for {name}, the cluster file {address}"
            yield Seen(WARN if loopback else FAIL, text, fix, texts.HOSTS)


def slurm_foreign_file(s: SlurmSubject) -> Iterator[Seen]:
    """Looks at: files that others wrote

    Why: what stands in them would be lost
    Fix: --adopt takes it over (a backup stays beside it); settings to keep go below our block afterwards
    See: https://manpages.ubuntu.com/manpages/lunar/en/man5/slurm.conf.5.html
    """
    for path, lost in s.foreign.items():
        yield Seen(FAIL, f"others wrote it; {lost} of its settings would be lost or change", where=path)


def slurm_own_lines(s: SlurmSubject) -> Iterator[Seen]:
    """Looks at: lines beside ours

    Why: of two lines for one setting Slurm takes the last
    Fix: keep one of them
    See: https://manpages.ubuntu.com/manpages/lunar/en/man5/slurm.conf.5.html
    """
    for path, number, text in s.repeated:
        yield Seen(WARN, f"line {number} sets again what the block sets: {text}", where=path)


@rule
def slurm_parser(s: SlurmSubject) -> Iterator[Seen]:
    """Looks at: what Slurm's own parser says

    Why: every command would fail with these files
    Fix: slurm.version of the cluster file must be what is installed; sinfo --version shows it
    See: https://manpages.ubuntu.com/manpages/lunar/en/man5/slurm.conf.5.html
    """
    if re.search(r"auth/|munge", s.parser, re.IGNORECASE):  # a machine that is not set up yet, or a Slurm without auth/none
        fix = "start munge, then plan again; or plan --try where it can be"
        yield Seen(UNKNOWN, "slurmd -G tries to authenticate before it reads nodes and GPUs", fix, texts.SLURM_CONF)
    elif s.parser:
        yield Seen(FAIL, s.parser, where=texts.SLURM_CONF)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
