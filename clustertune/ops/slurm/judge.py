"""What of a machine will stop Slurm, or is not as the cluster file says. Pure: facts in, findings out."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence

from clustertune.check.rule import FAIL, UNKNOWN, WARN, Finding, Rule, finding
from clustertune.config.cluster_schema import Cluster, Host
from clustertune.ops.slurm.node import NodeFacts
from clustertune.ops.slurm.texts import HOSTS, MUNGE_KEY, NEWEST, OLDEST, SLURM_ROLES, USER, Version, parse_version, real_memory

_CONF = "https://manpages.ubuntu.com/manpages/lunar/en/man5/slurm.conf.5.html"
_GRES = "https://slurm.schedmd.com/gres.conf.html"
_CGROUPS = "https://slurm.schedmd.com/cgroups.html"

SHAPE = Rule("slurm-shape", "cores of a node", "a node with fewer CPUs than slurm.conf says is not used", _CONF)
MEMORY = Rule("slurm-memory", "memory of a node", "a node with less memory than RealMemory is not used", _CONF)
DEVICES = Rule("slurm-gpu-devices", "a device for each GPU", "slurmd ends where a file of gres.conf is missing", _GRES)
ORDER = Rule(
    "slurm-gpu-order",
    "numbers of the GPUs",
    "a job gets /dev/nvidiaN by Slurm's count and reads the driver's, by PCI address: cores and GPU would not belong together",
    _GRES,
)
CGROUP = Rule("slurm-cgroup", "version of cgroups", "without its plugin slurmd does not start", _CGROUPS)
VERSION = Rule("slurm-version", "release of Slurm", "a key that a release does not know makes every command fail", _CONF)
USERS = Rule("slurm-user", "the user slurm", "slurmctld runs as him, and the same number must mean him everywhere", _CONF)
MUNGE = Rule("munge-key", "munge's key", "machines with different keys refuse each other's messages", _CONF)
NAMES = Rule("slurm-hosts", "one address for a name", "the first line of /etc/hosts wins, and others cannot reach it", _CONF)
FOREIGN = Rule("slurm-foreign-file", "files of somebody else", "what stands in them would be lost", _CONF)
EXTRA = Rule("slurm-own-lines", "lines beside ours", "of two lines for one setting Slurm takes the last", _CONF)
PARSER = Rule("slurm-parser", "what Slurm's own parser says", "every command would fail with these files", _CONF)

RULES = (SHAPE, MEMORY, DEVICES, ORDER, CGROUP, VERSION, USERS, MUNGE, NAMES, FOREIGN, EXTRA, PARSER)
BLOCKING = frozenset({CGROUP.id, VERSION.id, USERS.id, NAMES.id, FOREIGN.id, PARSER.id})
"""Rules whose failure keeps ``apply`` from writing; the others are reported, and fixed elsewhere."""


def judge(cluster: Cluster, node: Host, facts: NodeFacts, *, version: Version | None) -> list[Finding]:
    """Everything that the facts of one machine tell."""
    found = [*_version(cluster, facts, version), *_users(node, facts), *_munge(node, facts)]
    if facts.here and "compute" in node.roles:
        found += [*_shape(cluster, facts), *_devices(cluster, facts), *_cgroup(facts, version)]
    return found


def blocks(findings: Sequence[Finding]) -> list[Finding]:
    """Those that keep files from being written."""
    return [item for item in findings if item.status == FAIL and item.rule in BLOCKING]


def _version(cluster: Cluster, facts: NodeFacts, version: Version | None) -> Iterator[Finding]:
    here = {str(found) for answer in facts.versions if (found := parse_version(answer))}
    stated = parse_version(cluster.slurm.version) if cluster.slurm and cluster.slurm.version else None
    if stated and here - {str(stated)}:
        text = f"installed here is {' and '.join(sorted(here))}, the cluster file says {stated}: machines may differ"
        yield finding(VERSION, WARN, text, "slurm: version: what sinfo --version shows on all machines")
    if version is None:
        fix = "install Slurm here, or write slurm.version into the cluster file"
        yield finding(VERSION, UNKNOWN, f"not installed here, not in the cluster file: keys that all since {OLDEST} know", fix)
    elif version < OLDEST:
        yield finding(
            VERSION, WARN, f"Slurm {version}: the files were tried with {OLDEST} to {NEWEST}", f"install {OLDEST} or later"
        )
    elif version > NEWEST:
        fix = "look at plan --try, which starts these files with the Slurm that is installed"
        yield finding(VERSION, WARN, f"Slurm {version}: the files were tried with {OLDEST} to {NEWEST}", fix)


def _users(node: Host, facts: NodeFacts) -> Iterator[Finding]:
    if not set(node.roles) & {"slurmctld", "compute"}:
        return
    if facts.users is None:
        yield finding(USERS, UNKNOWN, "no /etc/passwd here: folders stay with whoever makes them")
    elif USER not in facts.users:
        fix = f"install slurmctld or slurmd, which make him; or useradd --system --uid N {USER}, with one N on all machines"
        yield finding(USERS, FAIL if facts.here else WARN, f"there is no user {USER}", fix)


def _munge(node: Host, facts: NodeFacts) -> Iterator[Finding]:
    if not set(node.roles) & set(SLURM_ROLES):
        return
    key = facts.places.get(MUNGE_KEY)
    fix = "the steps below take the controller's to this machine"
    if key is None:
        if facts.here:
            yield finding(MUNGE, FAIL, f"{MUNGE_KEY} is not there", fix)
        return
    owner = (facts.users or {}).get("munge")
    if key.mode & 0o077 or (owner and key.uid != owner[0]):
        fix = f"chown munge: {MUNGE_KEY} && chmod 400 {MUNGE_KEY}"
        yield finding(MUNGE, FAIL, f"{MUNGE_KEY} has mode {key.mode:04o} and owner {key.uid}: munged does not take it", fix)
    elif not 32 <= key.size <= 1024:
        yield finding(MUNGE, FAIL, f"{MUNGE_KEY} has {key.size} bytes, and 32 to 1024 are a key", fix)


def _shape(cluster: Cluster, facts: NodeFacts) -> Iterator[Finding]:
    reported = {key: int(value) for key, value in re.findall(r"\b(\w+)=(\d+)\b", facts.shape)}
    if not {"CPUs", "CoresPerSocket", "ThreadsPerCore", "RealMemory"} <= set(reported):
        yield finding(SHAPE, UNKNOWN, "slurmd -C shows nothing: slurmd is not installed here")
        return
    compute = cluster.compute
    sockets = reported.get("Boards", 1) * reported.get("SocketsPerBoard", reported.get("Sockets", 1))
    here = (sockets, reported["CoresPerSocket"], reported["ThreadsPerCore"])
    wanted = (compute.sockets, compute.cores // compute.sockets, compute.threads // compute.cores)
    if here != wanted:
        cores = sockets * reported["CoresPerSocket"]
        fix = f"compute: sockets: {sockets}, cores: {cores}, threads: {cores * reported['ThreadsPerCore']}; or look at the BIOS"
        status = FAIL if reported["CPUs"] < compute.threads else WARN
        form = "{} sockets x {} cores x {} threads"
        yield finding(SHAPE, status, f"this machine has {form.format(*here)}, the file says {form.format(*wanted)}", fix)
    if reported["RealMemory"] < real_memory(cluster):
        mib = reported["RealMemory"]
        text = f"this machine has {mib} MiB, slurm.conf {real_memory(cluster)} (memory_gb: {compute.memory_gb:g})"
        yield finding(MEMORY, FAIL, text, f"compute: memory_gb: {mib // 1024}")


def _devices(cluster: Cluster, facts: NodeFacts) -> Iterator[Finding]:
    wanted = set(range(cluster.compute.gpus))
    if missing := sorted(wanted - set(facts.devices or ())):
        shown = ", ".join(f"/dev/nvidia{number}" for number in missing[:4]) + (", ..." if len(missing) > 4 else "")
        fix = "nvidia-smi makes them where the driver is loaded; dmesg shows a card that is gone"
        yield finding(DEVICES, FAIL, f"{len(missing)} of {len(wanted)} devices missing: {shown}", fix)
    by_bus = [facts.minors[bus] for bus in sorted(facts.minors, key=str.lower)]
    if by_bus != sorted(by_bus):
        text = f"by PCI address the GPUs are /dev/nvidia{', '.join(map(str, by_bus))}"
        fix = (
            "leave numa_cpus out of the cluster file: gres.conf has no Cores then, and the launcher binds by what the node says"
        )
        yield finding(ORDER, WARN, text, fix)


def _cgroup(facts: NodeFacts, version: Version | None) -> Iterator[Finding]:
    if facts.cgroup == "v2" and version is not None and version < OLDEST:
        fix = f"install Slurm {OLDEST} or later, or boot with systemd.unified_cgroup_hierarchy=0"
        yield finding(CGROUP, FAIL, f"cgroup version 2, which Slurm {version} does not know", fix)
    elif not facts.cgroup:
        fix = "mount -t cgroup2 none /sys/fs/cgroup, which systemd does by itself"
        yield finding(CGROUP, WARN, "no cgroups are mounted below /sys/fs/cgroup", fix)


def hosts_findings(cluster: Cluster, foreign: Sequence[tuple[int, str]]) -> list[Finding]:
    """Lines of ``/etc/hosts`` that are not ours and give a machine of the cluster another address."""
    ours = {}
    for host in cluster.nodes:
        if not _address(host.address):
            continue  # reached by a name, which such a line may well be for
        for name in (host.name, host.name.partition(".")[0]):
            ours[name.lower()] = host.address
    found = []
    for number, line in foreign:
        fields = line.partition("#")[0].split()
        for name in fields[1:]:
            address = ours.get(name.lower())
            if address is None or _address(address) == _address(fields[0]):
                continue
            stated_address = _address(fields[0])
            loopback = stated_address is not None and stated_address.is_loopback
            fix = f"remove {name} from line {number} of {HOSTS}"
            text = f"line {number} says {fields[0]} for {name}, the cluster file {address}"
            found.append(finding(NAMES, WARN if loopback else FAIL, text, fix, HOSTS))
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
