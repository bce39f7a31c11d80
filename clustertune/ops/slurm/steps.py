"""What an operator does around the files, in order: keys, database, drain, restart or reconfigure, and a look at the end."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from clustertune.config.cluster_schema import Cluster, Host
from clustertune.ops.slurm.reading import settings
from clustertune.ops.slurm.texts import (
    CGROUP_CONF,
    DATABASE,
    DROP_IN,
    GRES_CONF,
    MARIADB,
    MUNGE_KEY,
    SLURM_CONF,
    SLURM_ROLES,
    SLURMDBD_CONF,
    STATE,
    USER,
    fold,
)

LIVE = frozenset(
    {
        "defmempercpu", "enforcepartlimits", "jobrequeue", "killwait", "maxmempercpu", "minjobage", "preemptmode",
        "preemptparameters", "propagateresourcelimitsexcept", "returntoservice", "slurmctldlogfile", "slurmctldparameters",
        "slurmdlogfile", "slurmdtimeout", "unkillablesteptimeout",
    }
)  # fmt: skip
"""Settings that ``scontrol reconfigure`` takes; slurm.conf(5) says about the others that daemons must be restarted, or is not
clear. Partitions are taken too."""
SHAPE = ("sockets", "corespersocket", "threadspercore", "realmemory", "gres", "cpus", "boards", "socketsperboard")
"""What of a node's line is its shape: jobs that run on it were placed by the old one."""
HOLDS_JOBS = ("slurmdspooldir", "proctracktype", "selecttype")
"""Where and how slurmd and slurmctld find running jobs again: with another value they are lost to them."""
OLD_STATE = "/var/spool"
"""StateSaveLocation of a slurm.conf that names none (slurm.conf(5))."""


@dataclass(frozen=True)
class SetupStep:
    """Commands for one kind of machine, and why."""

    where: str
    why: str
    commands: tuple[str, ...]
    """Each as a shell line, for a person to copy."""


@dataclass(frozen=True)
class PreviousState:
    """What was there."""

    texts: Mapping[str, str | None]
    """Path to text, before; None: there was no file."""
    after: Mapping[str, str]


def steps(
    cluster: Cluster, node: Host, seen: PreviousState, *, key_there: bool, accounting: bool, applied: bool
) -> list[SetupStep]:
    """The order of things; ``applied``: the files of this machine are in place already."""
    changed = {path for path in seen.after if seen.after[path] != (seen.texts.get(path) or "")}
    if not set(node.roles) & set(SLURM_ROLES):
        return list(_files(cluster, node, accounting, applied)) if changed else []
    first = seen.texts.get(SLURM_CONF) is None
    new_key = not key_there
    if not (changed or new_key):
        return []
    found: list[SetupStep] = []
    held = "" if first else ", ".join(key for key in HOLDS_JOBS if key in _changed_keys(seen))
    shape = not first and _shape_changes(seen)
    if shape or held:
        found += _drain(cluster, "the shape of the nodes changes" if shape else f"{held}: jobs that run would be lost")
    found += _files(cluster, node, accounting, applied) if changed else ()
    if first or new_key:
        found += _munge(cluster)
    found += [] if first else [*_state(cluster, seen), *_rename(cluster, seen)]
    if accounting and (changed & {SLURMDBD_CONF, MARIADB} or "accountingstoragetype" in _changed_keys(seen)):
        found += _database(cluster)
    found += _daemons(cluster, seen, changed, first=first or new_key)
    if shape or held:
        nodes = fold([host.name for host in cluster.compute_nodes])
        found.append(
            SetupStep(_controller(cluster), "take the nodes back", (f"scontrol update NodeName={nodes} State=RESUME",))
        )
    found.append(SetupStep(_controller(cluster), "look: all nodes idle", ("scontrol ping", "sinfo -N -l")))
    return found


def _controller(cluster: Cluster) -> str:
    assert cluster.controller
    return cluster.controller.name


def _others(cluster: Cluster) -> list[str]:
    return [host.name for host in cluster.nodes if set(host.roles) & set(SLURM_ROLES) and host is not cluster.controller]


def _files(cluster: Cluster, node: Host, accounting: bool, applied: bool) -> Iterator[SetupStep]:
    assert cluster.slurm
    word = f"clustertune ops slurm apply --cluster {shlex.quote(_stated(cluster))}"
    if accounting != cluster.slurm.accounting:  # one slurm.conf for all: what is changed here must be changed there
        word += " --accounting" if accounting else " --no-accounting"
    others = [host.name for host in cluster.nodes if host.name != node.name]
    if not applied:
        yield SetupStep(node.name, "write the files of this machine", (word,))
    if others:
        yield SetupStep(fold(others), "the same on every other machine: Slurm wants one slurm.conf", (word,))


def _stated(cluster: Cluster) -> str:
    return cluster.name if cluster.source.startswith("ops/clusters/") else cluster.source


def _drain(cluster: Cluster, why: str) -> Iterator[SetupStep]:
    nodes = fold([host.name for host in cluster.compute_nodes])
    drain = f"scontrol update NodeName={nodes} State=DRAIN Reason='new slurm.conf'"
    yield SetupStep(_controller(cluster), f"{why}: let jobs end first (drained, not draining)", (drain, f"sinfo -n {nodes}"))


def _munge(cluster: Cluster) -> Iterator[SetupStep]:
    key, controller, others = MUNGE_KEY, _controller(cluster), _others(cluster)
    why = "one munge key for all machines; each package makes its own when it is installed"
    make = f"test -s {key} || sudo -u munge mungekey --create --keyfile {key}"
    yield SetupStep(controller, why, (make, f"chown munge: {key} && chmod 400 {key}", "systemctl restart munge"))
    if others:
        take = f"ssh HOST 'umask 077; cat > {key}.new && chown munge: {key}.new && chmod 400 {key}.new && mv {key}.new {key}"
        commands = (f"{take} && systemctl restart munge' < {key}", "munge -n | ssh HOST unmunge")
        yield SetupStep(controller, f"the same key for each HOST of {fold(others)}, and the proof", commands)


def _state(cluster: Cluster, seen: PreviousState) -> Iterator[SetupStep]:
    value = settings(_both(seen)[0] or "").get("statesavelocation", f"={OLD_STATE}").partition("=")[2].strip()
    if value.rstrip("/") != STATE:
        why = "the queue moves with its folder: in an empty one slurmctld knows of no job"
        yield SetupStep(_controller(cluster), why, ("systemctl stop slurmctld", f"cp -a {shlex.quote(value)}/. {STATE}/"))


def _rename(cluster: Cluster, seen: PreviousState) -> Iterator[SetupStep]:
    before, after = (settings(text or "").get("clustername") for text in _both(seen))
    if before and after and before.lower() != after.lower():
        why = "the cluster's name changes, and slurmctld refuses a state of another (running jobs are forgotten)"
        yield SetupStep(_controller(cluster), why, ("systemctl stop slurmctld", f"rm {STATE}/clustername"))


def _database(cluster: Cluster) -> Iterator[SetupStep]:
    controller = _controller(cluster)
    sql = (
        f"CREATE USER IF NOT EXISTS '{USER}'@'localhost' IDENTIFIED VIA unix_socket;",
        f"GRANT ALL ON {DATABASE}.* TO '{USER}'@'localhost';",
    )
    commands = ("systemctl restart mariadb", *(f'mariadb -e "{line}"' for line in sql), "systemctl restart slurmdbd")
    why = "the database, whose user is known by its socket: no password; slurmctld enters the cluster by itself"
    yield SetupStep(controller, why, (*commands, "sacctmgr show cluster"))


def _daemons(cluster: Cluster, seen: PreviousState, changed: set[str], *, first: bool) -> Iterator[SetupStep]:
    controller, nodes = _controller(cluster), fold([host.name for host in cluster.compute_nodes])
    if first:
        yield SetupStep(controller, "the controller first", ("systemctl enable slurmctld", "systemctl restart slurmctld"))
        commands = ("systemctl daemon-reload", "systemctl enable slurmd", "systemctl restart slurmd")
        yield SetupStep(nodes, "then each node", commands)
        return
    keys = _changed_keys(seen)
    slow = sorted(key for key in keys if key not in LIVE and not key.startswith("partitionname"))
    files = changed & {GRES_CONF, CGROUP_CONF, DROP_IN}
    if slow or files:
        what = ", ".join([*slow[:6], *(path.rpartition("/")[2] for path in sorted(files))])
        if slow or GRES_CONF in files:
            yield SetupStep(
                controller, f"changed, and read at a start only: {what}; the queue is kept", ("systemctl restart slurmctld",)
            )
        yield SetupStep(nodes, "running jobs live on", ("systemctl daemon-reload", "systemctl restart slurmd"))
    elif keys:
        yield SetupStep(controller, f"changed: {', '.join(sorted(keys)[:6])}", ("scontrol reconfigure",))


def _both(seen: PreviousState) -> tuple[str | None, str]:
    return seen.texts.get(SLURM_CONF), seen.after.get(SLURM_CONF, "")


def _changed_keys(seen: PreviousState) -> set[str]:
    before, after = (settings(text or "") for text in _both(seen))
    return {key for key in {*before, *after} if before.get(key) != after.get(key)}


def _shape_changes(seen: PreviousState) -> bool:
    before, after = (_shapes(text or "") for text in _both(seen))
    gone = seen.texts.get(GRES_CONF)
    gres = gone is not None and GRES_CONF in seen.after and settings(gone) != settings(seen.after[GRES_CONF])
    return bool(before) and (before != after or gres)


def _shapes(text: str) -> set[tuple[tuple[str, str], ...]]:
    """The different shapes that the nodes of a slurm.conf have, whatever the names; DEFAULT counts for those after it."""
    found, default = set(), dict[str, str]()
    for key, line in settings(text).items():
        if not key.startswith("nodename="):
            continue
        fields = dict(word.lower().split("=", 1) for word in line.split() if "=" in word)
        shape = {name: fields[name] for name in SHAPE if name in fields}
        if fields["nodename"] == "default":
            default |= shape
        else:
            found.add(tuple(sorted({**default, **shape}.items())))
    return found


def shown(found: Sequence[SetupStep]) -> list[str]:
    """The steps as lines: where and why, then the commands."""
    lines = []
    for number, step in enumerate(found, 1):
        lines.append(f"{number}. {step.where}: {step.why}")
        lines += [f"     {command}" for command in step.commands]
    return lines
